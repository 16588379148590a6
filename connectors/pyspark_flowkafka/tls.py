"""The TLS context of the connections: PEM files, TLS 1.2 and 1.3."""

from __future__ import annotations

import ssl

from pyspark_flowkafka.errors import AuthenticationError
from pyspark_flowkafka.properties import ClientSettings


def tls_context(settings: ClientSettings) -> ssl.SSLContext | None:
    """Return the context, or None where connections are not encrypted."""
    if "SSL" not in settings.security_protocol.split("_"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = (
        ssl.TLSVersion.TLSv1_2 if "TLSv1.2" in settings.ssl_protocols else ssl.TLSVersion.TLSv1_3
    )
    if "TLSv1.3" not in settings.ssl_protocols:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = settings.ssl_check_hostname
    try:
        if settings.ssl_ca_file or settings.ssl_ca_data:
            context.load_verify_locations(settings.ssl_ca_file, cadata=settings.ssl_ca_data)
        else:
            context.load_default_certs()
        if settings.ssl_certificate_file:
            # Without any password, OpenSSL would ask for one on the terminal, and wait.
            context.load_cert_chain(
                settings.ssl_certificate_file, password=settings.ssl_key_password or ""
            )
    except (OSError, ssl.SSLError, ValueError) as error:
        raise AuthenticationError(
            f"the certificates cannot be loaded ({type(error).__name__}). Check that the files of "
            f"'kafka.ssl.truststore.location' and 'kafka.ssl.keystore.location' exist on every "
            f"machine and are PEM, and that 'kafka.ssl.key.password' is right"
        ) from None
    return context
