"""Encryption of connections."""

from __future__ import annotations

import ssl

from pyspark_flowsocket.errors import ConnectionLostError
from pyspark_flowsocket.options import TlsOptions

__all__ = ["client_context", "server_context"]


def client_context(tls: TlsOptions) -> ssl.SSLContext:
    """Return how this side greets a server: it must show who it is, unless told otherwise."""
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if not tls.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        _load_certificate(context, tls)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(error) from None
    return context


def server_context(tls: TlsOptions) -> ssl.SSLContext:
    """Return how this side answers clients; with a CA file they must show who they are."""
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca_file)
        if tls.ca_file is not None and tls.verify:
            context.verify_mode = ssl.CERT_REQUIRED
        _load_certificate(context, tls)
    except (OSError, ssl.SSLError) as error:
        raise _unusable(error) from None
    return context


def _load_certificate(context: ssl.SSLContext, tls: TlsOptions) -> None:
    if tls.cert_file is not None:
        # A password is always given, or OpenSSL would ask for one on a terminal nobody sees.
        context.load_cert_chain(tls.cert_file, tls.key_file, password=tls.key_password or "")


def _unusable(error: OSError) -> ConnectionLostError:
    return ConnectionLostError(
        f"the files of 'tlsCaFile', 'tlsCertFile' and 'tlsKeyFile' cannot be used: {error}. Check "
        f"that they are PEM, belong together, and that 'tlsKeyPassword' is right"
    )
