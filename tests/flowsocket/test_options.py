from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from flowspark.errors import OptionError
from pyspark_flowsocket import DefaultSource, errors
from pyspark_flowsocket.errors import SocketSourceError
from pyspark_flowsocket.options import KNOWN, Mode, OnPartialLine, Reconnecting, SocketOptions

GOOD = {"host": "h", "port": "1", "stateLocation": "s"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"host": ""}, "'host'"),
        ({"port": "0"}, "'port' must be 1..65535, not '0'"),
        ({"port": "x"}, "'port'"),
        ({"stateLocation": " "}, "'stateLocation' is missing"),
        ({"stateLocation": "memory://x"}, "executors"),
        ({"uid": " "}, "'uid'"),
        ({"hots": "x"}, "did you mean 'host'"),
        ({"charset": "klingon"}, "'charset'"),
        ({"charset": "base64"}, "'charset'"),
        ({"charset": "undefined"}, "'charset'"),
        ({"charset": "idna"}, "'charset'"),
        ({"charset": "punycode"}, "'charset'"),
        ({"delimiter": "\ufffd"}, "'delimiter'"),
        ({"delimiter": ""}, "'delimiter'"),
        ({"delimiter": "x" * 17}, "'delimiter'"),
        ({"onDecodeError": "ignore"}, "fail, replace, skip"),
        ({"onLongLine": "cut"}, "fail, truncate, skip"),
        ({"onPartialLine": "keep"}, "emit, drop"),
        ({"onPartialLine": "emit", "protocol": "ack"}, "protocol=ack"),
        ({"maxLineBytes": "0"}, "'maxLineBytes'"),
        ({"maxLineBytes": "1g"}, "'maxLineBytes'"),
        ({"segmentBytes": "10"}, "'segmentBytes'"),
        ({"segmentBytes": "2g"}, "'segmentBytes'"),
        ({"maxSpoolBytes": "1m"}, "'segmentBytes', which is 8388608"),
        ({"numPartitions": "0"}, "'numPartitions'"),
        ({"maxRowsPerTrigger": "0"}, "'maxRowsPerTrigger'"),
        ({"connectTimeout": "soon"}, "'connectTimeout'"),
        ({"mode": "udp"}, "connect, listen"),
        ({"protocol": "http"}, "plain, ack"),
        ({"idleTimeout": "1s"}, "mode=listen"),
        ({"readTimeout": "1s", "mode": "listen"}, "mode=connect"),
        ({"reconnectDelay": "1s", "mode": "listen"}, "mode=connect"),
        ({"tlsCaFile": "x"}, "tls=true"),
        ({"tls": "true", "tlsCaFile": "no/such/file"}, "'tlsCaFile' names no file"),
        ({"tls": "true", "mode": "listen"}, "'tlsCertFile' is missing"),
        ({"tls": "maybe"}, "true or false"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_by_name(given: dict[str, str], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        SocketOptions.parse({**GOOD, **given})

    assert str(caught.value).startswith("[FLOWSOCKET_OPTION]")
    assert named in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_what_cannot_be_guessed_is_asked_for(name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' is missing"):
        SocketOptions.parse({key: value for key, value in GOOD.items() if key != name})


def test_names_come_in_lower_case_and_defaults_are_those_of_the_guide() -> None:
    options = SocketOptions.parse({"HOST": "h", "port": "9", "statelocation": "s"})

    assert (options.uid, options.mode, options.schema) == (
        "connect-h-9",
        Mode.CONNECT,
        "value string",
    )
    assert options.rules.max_line_bytes == 1 << 20
    assert options.rules.on_partial_line is OnPartialLine.EMIT
    assert options.idle_timeout_ms is None
    listening = SocketOptions.parse({"port": "9", "statelocation": "s", "mode": "listen"})
    assert (listening.host, listening.idle_timeout_ms) == ("127.0.0.1", 600_000)


def test_delimiters_may_be_written_with_escapes() -> None:
    def delimiter(text: str) -> bytes:
        return SocketOptions.parse({**GOOD, "delimiter": text}).rules.delimiter

    assert [delimiter(text) for text in ("\\r\\n", "\\t", "|", "é")] == [
        b"\r\n",
        b"\t",
        b"|",
        "é".encode(),
    ]


def test_delays_double_up_to_a_cap() -> None:
    reconnecting = Reconnecting(delay_ms=100, max_delay_ms=1000)

    assert [reconnecting.delay_s(n) for n in (1, 2, 3, 4, 5, 10**9)] == [
        0.1,
        0.2,
        0.4,
        0.8,
        1.0,
        1.0,
    ]


def test_secrets_are_in_no_text_of_the_options(tmp_path: Path) -> None:
    certificate = tmp_path / "c.pem"
    certificate.write_text("x")
    options = SocketOptions.parse(
        {
            **GOOD,
            "tls": "true",
            "tlsCertFile": str(certificate),
            "tlsKeyPassword": "hunter22",
            "storage.secret": "topsecret",
        }
    )

    assert "hunter22" not in repr(options)
    assert "topsecret" not in repr(options)


def test_the_schema_follows_the_options() -> None:
    source = DefaultSource({**GOOD, "includeTimestamp": "true", "includeSource": "true"})

    assert source.schema() == "value string, timestamp timestamp, source string"
    assert DefaultSource.name() == "flowsocket"


@pytest.mark.parametrize("name", sorted(set(errors.__all__)))
def test_errors_keep_their_text_through_pickle(name: str) -> None:
    error: SocketSourceError = getattr(errors, name)("what happened")
    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again)) == (type(error), str(error))
    assert str(error).startswith("[FLOWSOCKET_")


def test_every_option_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "flowsocket.md").read_text("utf-8")

    assert [name for name in KNOWN if f"`{name}`" not in guide] == []
