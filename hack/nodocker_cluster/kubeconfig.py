# SPDX-License-Identifier: Apache-2.0
"""Kubeconfig files for tests. This module writes the files for the control plane of this package. For an existing
cluster, it reads the cluster's file."""

import base64
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """URL and credentials of an API server."""

    server: str
    """URL of the API server."""
    ca: str
    """The certificate of the authority that signed the server's certificate, in PEM format."""
    certificate: str = ""
    """The certificate of the client, in PEM format; empty if a token is used."""
    key: str = ""
    """The private key for the client's certificate, in PEM format."""
    token: str = ""

    def ssl_context(self) -> ssl.SSLContext:
        """Return a context that trusts only the authority `ca` and presents the client's certificate."""
        context = ssl.create_default_context(cadata=self.ca)
        if self.certificate:
            with tempfile.NamedTemporaryFile("w") as file:  # the ssl module reads keys from files only
                file.write(self.certificate + self.key)
                file.flush()
                context.load_cert_chain(file.name)
        return context

    def headers(self) -> dict[str, str]:
        """Return the authentication headers of a request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def document(self) -> dict[str, Any]:
        """Return a kubeconfig that does not refer to other files."""
        user = {"token": self.token} if self.token else {}
        if self.certificate:
            user |= {"client-certificate-data": _encoded(self.certificate), "client-key-data": _encoded(self.key)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "quire",
                    "cluster": {"server": self.server, "certificate-authority-data": _encoded(self.ca)},
                }
            ],
            "users": [{"name": "quire", "user": user}],
            "contexts": [{"name": "quire", "context": {"cluster": "quire", "user": "quire"}}],
            "current-context": "quire",
        }

    def write(self, file: Path) -> Path:
        """Write a kubeconfig that only its owner can read."""
        file.touch(mode=0o600)
        file.write_text(yaml.safe_dump(self.document(), sort_keys=False))
        return file

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the current context of a kubeconfig.

        Raises:
            ValueError: the user has neither a certificate nor a token.
        """
        document = yaml.safe_load(file.read_text())
        context = _entry_named(document["contexts"], document["current-context"])["context"]
        cluster = _entry_named(document["clusters"], context["cluster"])["cluster"]
        user = _entry_named(document["users"], context["user"])["user"]
        token = user.get("token") or (Path(user["tokenFile"]).read_text() if "tokenFile" in user else "")
        certificate, key = _pem(user, "client-certificate", file), _pem(user, "client-key", file)
        if not token and not certificate:
            raise ValueError(f"{file}: user {context['user']!r} has {sorted(user)}; a certificate or a token is needed")
        return cls(cluster["server"], _pem(cluster, "certificate-authority", file), certificate, key, token.strip())


def _entry_named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(e for e in entries if e["name"] == name)


def _pem(holder: dict[str, Any], key: str, file: Path) -> str:
    if data := holder.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return (file.parent / holder[key]).read_text() if key in holder else ""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
