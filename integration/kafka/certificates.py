"""A certificate authority of the tests' own, and a broker's certificate for the loopback host."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)


def write_certificates(folder: Path) -> tuple[Path, Path]:
    """Write PEM files and return them: the authority, and the broker's key with its chain."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, broker_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority_name, broker_name = _name("flowspark tests"), _name("127.0.0.1")
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    broker = (
        _builder(broker_name, authority_name, broker_key.public_key())
        .add_extension(x509.SubjectAlternativeName([loopback]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    key = broker_key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pem = serialization.Encoding.PEM
    ca_file, broker_file = folder / "ca.pem", folder / "broker.pem"
    ca_file.write_bytes(authority.public_bytes(pem))
    broker_file.write_bytes(key + broker.public_bytes(pem) + authority.public_bytes(pem))
    return ca_file, broker_file


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + 30 * _DAY)
    )
