"""Certificates for tests of TLS with files of the operator's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_certificate(folder: Path, name: str, days: int = 30) -> dict[str, str]:
    """An authority of this name, and a certificate of 127.0.0.1 that it signed, good for so many days from a day before
    now: paths by the keys of the `tls` section."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (f"{name} authority", name)
    )
    begin = datetime.now(UTC) - timedelta(days=1)
    ends = begin + timedelta(days=31), begin + timedelta(days=1 + days, seconds=-1)
    authority, made = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - timedelta(days=1))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=who is issuer, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(keys[0], hashes.SHA256())
        for who, key, end in zip((issuer, subject), keys, ends, strict=True)
    )
    pem = serialization.Encoding.PEM
    private = keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {
        "certificate": made.public_bytes(pem),
        "key": private,
        "authority": authority.public_bytes(pem),
    }
    paths = {part: folder / f"{name}.{part}.pem" for part in files}
    for part, data in files.items():
        paths[part].write_bytes(data)
    return {part: str(path) for part, path in paths.items()}
