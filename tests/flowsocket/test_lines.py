from __future__ import annotations

import codecs
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_flowsocket.buffers import BLOCK_BYTES, LineBuffer
from pyspark_flowsocket.errors import LineTooLongError, UndecodableLineError
from pyspark_flowsocket.lines import LineCounts, Utf8Decoder, cut_lines
from pyspark_flowsocket.options import LineRules, OnBadLine, OnLongLine, OnPartialLine

DELIMITERS = [b"\n", b";", b"\r\n", b"||", b"aab", b"\n\n", "é".encode()]
# Pieces that are no text by themselves come together, with a delimiter between them or without.
BYTES = (
    st.binary(max_size=40)
    | st.text(alphabet="ab|\n\ré;x", max_size=40).map(str.encode)
    | st.lists(
        st.sampled_from(
            [b"a", b"\n", b"\r", b"|", b";", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80"]
        ),
        max_size=20,
    ).map(b"".join)
)


def rules_of(delimiter: bytes = b"\n", limit: int = 1 << 20, **more: object) -> LineRules:
    return LineRules(
        delimiter=delimiter,
        max_line_bytes=limit,
        on_decode_error=OnBadLine(str(more.get("bad", "replace"))),
        on_long_line=OnLongLine(str(more.get("long", "truncate"))),
        on_partial_line=OnPartialLine(str(more.get("partial", "emit"))),
    )


def model(stream: bytes, rules: LineRules) -> list[str]:
    """Cut lines one by one, as nobody should."""
    pieces = stream.split(rules.delimiter)
    last = pieces.pop()
    if last:
        # With "||" an unfinished "a|" is the line "a" and half a delimiter.
        pieces.append((last + rules.delimiter).split(rules.delimiter)[0])
    found = []
    for piece in pieces:
        # A carriage return belongs to the newline behind it, which an unfinished line lacks, but
        # gets when it is emitted.
        line = piece.removesuffix(b"\r") if rules.strips_cr else piece
        if len(line) > rules.max_line_bytes:
            if rules.on_long_line is OnLongLine.SKIP:
                continue
            short = line[: rules.max_line_bytes]
            while short and line[len(short)] & 0xC0 == 0x80 and is_text(line):
                short = short[:-1]
            line = short
        if rules.on_decode_error is OnBadLine.SKIP and not is_text(line):
            continue
        found.append(line.decode("utf-8", "replace"))
    return found


def is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def cut_stream(stream: bytes, rules: LineRules, sizes: list[int]) -> list[str]:
    buffer, place, found, turn = LineBuffer(rules), 0, [], 0
    while place < len(stream):
        size = sizes[turn % len(sizes)] if sizes else len(stream)
        buffer.feed(stream[place : place + size], turn)
        place, turn = place + size, turn + 1
        if turn % 3 == 0:
            found += take(buffer, rules)
    buffer.finish(turn, is_orderly=True)
    return found + take(buffer, rules)


def take(buffer: LineBuffer, rules: LineRules) -> list[str]:
    found: list[str] = []
    for block in buffer.take():
        found += cut_lines(block.data, rules).values.to_pylist()
    return found


@pytest.mark.parametrize("delimiter", DELIMITERS, ids=repr)
@given(
    stream=BYTES,
    sizes=st.lists(st.integers(1, 9), max_size=5),
    bad=st.sampled_from(["replace", "skip"]),
)
@settings(max_examples=150, deadline=None)
def test_lines_are_those_of_a_plain_split_however_they_arrive(
    delimiter: bytes, stream: bytes, sizes: list[int], bad: str
) -> None:
    rules = rules_of(delimiter, bad=bad)

    assert cut_stream(stream, rules, sizes) == model(stream, rules)


@given(
    stream=st.text(alphabet="abé\n", max_size=60).map(str.encode),
    sizes=st.lists(st.integers(1, 9), max_size=5),
    limit=st.integers(1, 8),
    long=st.sampled_from(["truncate", "skip"]),
)
@settings(max_examples=300, deadline=None)
def test_a_long_line_is_cut_or_skipped_however_it_arrives(
    stream: bytes, sizes: list[int], limit: int, long: str
) -> None:
    rules = rules_of(limit=limit, long=long)

    assert cut_stream(stream, rules, sizes) == model(stream, rules)


def test_counts_tell_what_became_of_lines() -> None:
    block = b"good\n\xff\xfe\n" + b"x" * 20 + b"\nnul\0\n\n"

    cut = cut_lines(block, rules_of(limit=10))
    assert cut.values.to_pylist() == ["good", "\ufffd\ufffd", "x" * 10, "nul\0", ""]
    assert cut.counts == LineCounts(received=5, truncated=1, undecodable=1)
    cut = cut_lines(block, rules_of(limit=10, long="skip", bad="skip"))
    assert cut.values.to_pylist() == ["good", "nul\0", ""]
    assert cut.counts == LineCounts(received=5, skipped=2, undecodable=1)
    assert cut.ends.tolist() == [5, 34, 35]


def test_with_fail_the_lines_before_the_bad_one_are_kept() -> None:
    cut = cut_lines(b"a\nb\n\xff\nc\n", rules_of(bad="fail"))

    assert cut.values.to_pylist() == ["a", "b"]
    assert cut.counts.received == 2
    assert isinstance(cut.fault, UndecodableLineError)
    assert "onDecodeError" in str(cut.fault)
    assert str(cut.fault).startswith("[FLOWSOCKET_UNDECODABLE]")
    cut = cut_lines(b"a\nbbbb\n", rules_of(limit=3, long="fail"))
    assert (cut.values.to_pylist(), type(cut.fault)) == (["a"], LineTooLongError)


def test_one_bad_line_among_many_costs_only_itself() -> None:
    good = [f"line {number} é" for number in range(20_000)]
    raw = [line.encode() for line in good]
    raw[777] = b"\x80bad"
    raw[19_999] = b"bad\xc3"

    cut = cut_lines(b"\n".join(raw) + b"\n", rules_of())
    good[777], good[19_999] = "\ufffdbad", "bad\ufffd"
    assert cut.values.to_pylist() == good
    assert cut.counts.undecodable == 2


def test_halves_of_a_character_on_two_lines_are_no_text() -> None:
    cut = cut_lines(b"a\n\xc3\n\xa9\n", rules_of())

    assert cut.values.to_pylist() == ["a", "\ufffd", "\ufffd"]
    assert cut.counts == LineCounts(received=3, undecodable=2)


@pytest.mark.parametrize("bad", ["replace", "skip"])
def test_lines_that_are_all_bad_do_not_take_long(bad: str) -> None:
    count = 1 << 19
    before = time.process_time()
    cut = cut_lines(b"\xff\n" * count, rules_of(bad=bad))

    assert cut.counts.undecodable == count
    assert len(cut.values) == (count if bad == "replace" else 0)
    # One by one they are half a minute, in which nobody's lines become durable.
    assert time.process_time() - before < 5


def test_crlf_is_one_end_and_a_lone_carriage_return_stays() -> None:
    rules = rules_of()

    assert cut_lines(b"a\r\nb\r\n", rules).values.to_pylist() == ["a", "b"]
    assert cut_lines(b"a\r\nb\n\r\n\n\rc\n", rules).values.to_pylist() == ["a", "b", "", "", "\rc"]
    assert cut_lines(b"a\r\r\nb\r", rules_of(b"\r")).values.to_pylist() == ["a", "", "\nb"]


@pytest.mark.parametrize(
    "charset", ["iso-8859-1", "utf-16-le", "utf-16", "utf-32-be", "shift_jis", "cp1252", "utf-7"]
)
def test_other_charsets_arrive_as_the_same_text(charset: str) -> None:
    text = "plain\ncafé\n" if charset != "shift_jis" else "plain\n日本\n"
    raw = text.encode(charset)
    random.seed(charset)
    rules = LineRules(charset=codecs.lookup(charset).name)

    for sizes in ([1], [3, 2], [100]):
        assert cut_stream(raw, rules, sizes) == text.splitlines()


def test_bytes_that_another_charset_has_not_are_found() -> None:
    raw = "ok\n".encode("utf-16-le") + b"\x00\xd8" + "x\nok\n".encode("utf-16-le") + b"\x00"
    decoder = Utf8Decoder("utf-16-le")
    data = decoder.feed(raw) + decoder.finish() + b"\n"

    assert cut_lines(data, rules_of()).values.to_pylist() == ["ok", "\ufffdx", "ok", "\ufffd"]
    cut = cut_lines(data, rules_of(bad="skip"))
    assert (cut.values.to_pylist(), cut.counts.undecodable) == (["ok", "ok"], 2)


def test_a_character_without_an_end_takes_no_more_than_a_bit_of_memory() -> None:
    decoder = Utf8Decoder("utf-7")
    decoder.feed(b"+")
    with pytest.raises(UndecodableLineError, match="utf-7"):
        list(map(decoder.feed, [b"A" * 65536] * 100))


def test_a_stream_without_a_delimiter_takes_no_more_than_a_line_of_memory() -> None:
    buffer = LineBuffer(rules_of(limit=1000))
    for _ in range(200):
        buffer.feed(b"x" * 65536, 0)
        assert len(buffer._partial) < 1010
    buffer.feed(b"\nnext\n", 1)

    assert take(buffer, rules_of(limit=1000)) == ["x" * 1000, "next"]
    with pytest.raises(LineTooLongError, match="maxLineBytes"):
        LineBuffer(rules_of(limit=1000, long="fail")).feed(b"x" * 2000, 0)


@pytest.mark.parametrize("delimiter", [b"\n", b"\r\n", b"\n\n"], ids=repr)
def test_a_long_line_that_comes_byte_by_byte_is_not_read_again_for_each(delimiter: bytes) -> None:
    buffer = LineBuffer(rules_of(delimiter))
    buffer.feed(b"x" * (1 << 20), 0)
    before = time.process_time()
    for _ in range(20_000):
        buffer.feed(b"", 0)

    assert time.process_time() - before < 1.5


def test_lines_that_come_one_by_one_take_no_more_memory_than_is_counted() -> None:
    buffer = LineBuffer(rules_of())
    tracemalloc.start()
    try:
        for number in range(20_000):
            buffer.feed(bytes([65 + number % 26, 10]), 10**15 + number)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert taken < 1.5 * buffer.complete_bytes
    assert len(take(buffer, rules_of())) == 20_000


def test_an_unfinished_line_is_dropped_when_told_so_or_when_the_end_was_no_orderly_one() -> None:
    for partial, is_orderly in (("drop", True), ("emit", False)):
        rules = rules_of(partial=partial)
        buffer = LineBuffer(rules)
        buffer.feed(b"whole\npart", 0)

        assert buffer.finish(1, is_orderly=is_orderly)
        assert take(buffer, rules) == ["whole"]


def test_marks_tell_when_each_line_was_complete() -> None:
    buffer = LineBuffer(rules_of())
    buffer.feed(b"a\nb", 10)
    buffer.feed(b"", 15)
    buffer.feed(b"\nc\n", 20)

    (block,) = buffer.take()
    assert (block.data, block.marks) == (b"a\nb\nc\n", [(2, 10), (6, 20)])
    buffer.feed((b"y" * 99 + b"\n") * (BLOCK_BYTES // 50), 30)
    buffer.feed(b"z\n", 40)
    assert [len(block.marks) for block in buffer.take()] == [1, 1]
