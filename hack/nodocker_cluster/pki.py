# SPDX-License-Identifier: Apache-2.0
"""Certificates of one cluster: an authority of its own, and leaves for its programs. Valid for days, for this machine.

Python 3.13 refuses an authority without keyUsage and a leaf without authorityKeyIdentifier, so both are there: pods
run it.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=30)
_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class CertificateAuthority:
    """Signs certificates into a folder: NAME.crt, NAME.key; its own are ca.crt, ca.key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quire-test-ca")])
        usage = _key_usage(signs=True)
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._write("ca", self._certificate, self._key)

    def issue(
        self,
        name: str,
        common_name: str,
        group: str = "",
        hosts: Sequence[str] = (),
        client: bool = True,
        lifetime: datetime.timedelta = _LIFETIME,
    ) -> None:
        """A leaf for a client, for a server at `hosts`, or for both; good for `life` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        subject.append(x509.NameAttribute(NameOID.COMMON_NAME, common_name))
        purposes = [*([_SERVER] if hosts else []), *([_CLIENT] if client else [])]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(x509.Name(subject), self._name, key.public_key(), lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(authority_key, critical=False)
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(h) for h in hosts]), critical=False
            )
        self._write(name, builder.sign(self._key, hashes.SHA256()), key)

    def write_service_account_keys(self) -> None:
        """sa.key, which signs the tokens of pods, and sa.pub."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._save("sa.key", _pem(key))
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self._save("sa.pub", public)

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._save(f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
        self._save(f"{name}.key", _pem(key))

    def _save(self, name: str, content: bytes) -> None:
        file = self.folder / name
        file.touch(mode=0o600)
        file.write_bytes(content)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta = _LIFETIME
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + lifetime)
    )


def _key_usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
