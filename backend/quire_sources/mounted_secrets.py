# SPDX-License-Identifier: Apache-2.0
"""Reads Secrets from files. In the layout of Kubernetes, each key has its own file: <secrets_dir>/<secret>/<key>. In
the operator's own layout, each Secret has one file, <secrets_dir>/<secret>, which contains a JSON object.
"""

import json
import re
from pathlib import Path

from quire_spec.documents.sources import SecretRef
from quire_spec.errors import AccessDenied, ConfigError

_NAME_PATTERN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._]{0,251}[A-Za-z0-9])?|[A-Za-z0-9_]")
_MAX_BYTES = 64 * 1024


class MountedSecrets:
    """The mounted Secrets of a pod."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def values(self, secret: SecretRef) -> dict[str, str]:
        """Return every key with its value.

        Raises:
            ConfigError: --secrets-dir is not set, or the name is not valid for a Secret.
            AccessDenied: the Secret does not exist or cannot be read. It can still be created later.
        """
        path = self._secret_path(secret)
        try:
            return _read_bundle(path) if path.is_file() else {file.name: _read_text(file) for file in _key_files(path)}
        except (OSError, ValueError) as error:
            raise AccessDenied(
                f"secret {secret.name!r}: {str(path)!r} does not exist or cannot be read; create the Secret"
            ) from error

    def version(self, secret: SecretRef) -> int:
        """Return a number that changes when the Secret's content changes; 0 while the Secret does not exist."""
        try:
            return hash(tuple(self.values(secret).items()))
        except AccessDenied:
            return 0

    def _secret_path(self, secret: SecretRef) -> Path:
        if self._folder is None:
            raise ConfigError(f"secret {secret.name!r}: this pod has no secrets; give --secrets-dir")
        if not _NAME_PATTERN.fullmatch(secret.name):
            # A name such as `..` would lead out of the folder.
            raise ConfigError(
                f"secret: {secret.name!r} is not a name of a Secret; use only letters, digits, '-', '_' and '.'"
            )
        return self._folder / secret.name


def _key_files(folder: Path) -> list[Path]:
    # The folder also contains links that Kubernetes creates. They are named ..data and ..<time>.
    return sorted(path for path in folder.iterdir() if not path.name.startswith("..") and path.is_file())


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        # Bytes that are not valid UTF-8 are rejected where the value is used.
        return file.read(_MAX_BYTES).decode(errors="replace")


def _read_bundle(path: Path) -> dict[str, str]:
    document = json.loads(_read_text(path))
    items = document.items() if isinstance(document, dict) else ()
    return {key: value for key, value in items if isinstance(value, str)}
