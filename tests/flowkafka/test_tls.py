"""Certificates that cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LOAD = """
import fcntl, sys, termios
from pyspark_flowkafka.errors import AuthenticationError
from pyspark_flowkafka.properties import ClientSettings
from pyspark_flowkafka.tls import tls_context
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    tls_context(ClientSettings(("a:1",), security_protocol="SSL", ssl_certificate_file=sys.argv[1]))
except AuthenticationError as error:
    sys.exit("'kafka.ssl.key.password'" not in str(error))
sys.exit(3)
"""


def test_nobody_is_asked_for_the_password_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    request = ["req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=a", "-days", "2"]
    paths = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    subprocess.run(
        ["openssl", *request, *paths, "-passout", "pass:s3cret"], check=True, capture_output=True
    )
    file.write_text((tmp_path / "key").read_text() + (tmp_path / "certificate").read_text())
    # A terminal at which nobody types: whoever asks there waits for ever.
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, str(file)],
            stdin=theirs,
            start_new_session=True,
            timeout=60,
        )
    finally:
        os.close(ours)
        os.close(theirs)

    assert done.returncode == 0
