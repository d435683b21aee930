"""Certificates of an authority that no machine trusts."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_certificate(folder: Path, name: str) -> tuple[Path, Path, Path]:
    """An authority's certificate, one that it signed for `name`, and the key of that."""
    folder.mkdir(exist_ok=True)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in ("an authority", name)]
    paths = [folder / each for each in ("authority.pem", "certificate.pem", "key.pem")]
    now = datetime.now(UTC)
    for number in range(2):
        builder = (
            x509.CertificateBuilder().subject_name(names[number]).issuer_name(names[0])
            .public_key(keys[number].public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(keys[number].public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key()), critical=False)
        )  # fmt: skip
        if number:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        signed = builder.sign(keys[0], hashes.SHA256())
        paths[number].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths[2].write_bytes(private)
    return paths[0], paths[1], paths[2]
