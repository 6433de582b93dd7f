# SPDX-License-Identifier: Apache-2.0
"""Certificates of one cluster. trustme creates a certificate authority and the leaf certificates, which are written to
files.

A server or a client can use a leaf certificate. The authority is only for tests.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path

import trustme


class CertificateAuthority:
    """Signs certificates, and writes them to a folder as NAME.crt and NAME.key. The files of the authority itself are
    ca.crt and ca.key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ca = trustme.CA()
        self._write("ca", self._ca.cert_pem, self._ca.private_key_pem)

    def issue(
        self,
        name: str,
        common_name: str,
        group: str = "",
        hosts: Sequence[str] = ("localhost",),
        lifetime: datetime.timedelta | None = None,
    ) -> None:
        """Write a leaf certificate for `hosts`. Kubernetes reads a client's user from `common_name` and its group from
        `group`.

        Args:
            name: stem of the two files.
            common_name: common name of the subject.
            group: organization of the subject.
            hosts: names and addresses for which the certificate is valid. Go rejects a certificate without hosts.
            lifetime: time from now until the certificate expires. If it is negative, the certificate has expired. If it
                is None, the certificate is valid for centuries.
        """
        expiry = None if lifetime is None else datetime.datetime.now(datetime.UTC) + lifetime
        leaf = self._ca.issue_cert(
            *hosts, common_name=common_name, organization_name=group or "quire-test", not_after=expiry
        )
        self._write(name, leaf.cert_chain_pems[0], leaf.private_key_pem)

    def write_service_account_key(self) -> None:
        """Write sa.key, the RSA key that signs the tokens of pods. The API server derives the public key from this
        key."""
        self._save("sa.key", trustme.CA(key_type=trustme.KeyType.RSA).private_key_pem)

    def _write(self, name: str, certificate: trustme.Blob, key: trustme.Blob) -> None:
        self._save(f"{name}.crt", certificate)
        self._save(f"{name}.key", key)

    def _save(self, name: str, content: trustme.Blob) -> None:
        file = self.folder / name
        file.touch(mode=0o600)
        content.write_to_path(file)
