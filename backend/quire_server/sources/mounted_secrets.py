# SPDX-License-Identifier: Apache-2.0
"""Secrets as files: <secrets_dir>/<secret>/<key>, the way Kubernetes mounts them, or <secrets_dir>/<secret> as one JSON
object, the way the operator bundles them. Values are never logged or quoted.

Read anew at each use, so that a rotated Secret is taken without a restart.
"""

import json
import re
from pathlib import Path

from quire_spec.documents.adapter_catalog import SecretRef
from quire_spec.errors import AccessDenied, InvalidArgument
from quire_spec.net.redaction import check_header_value

_NAME_PATTERN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._]{0,251}[A-Za-z0-9])?|[A-Za-z0-9_]")
_MAX_BYTES = 64 * 1024


class MountedSecrets:
    """The mounted Secrets of a pod."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def value(self, secret: SecretRef, key: str) -> str:
        """The value of one key, without the newline at its end.

        Raises:
            InvalidArgument: no --secrets-dir, or a name that is not a Secret's.
            AccessDenied: the file is not there (yet), or what it holds cannot be sent.
        """
        path = self._secret_path(secret)
        value = (
            _read_bundle(path).get(_require_valid_name(key, "key"))
            if path.is_file()
            else _read_text(path / _require_valid_name(key, "key"))
        )
        if value is None:
            raise AccessDenied(
                f"secret {secret.name!r}: key {key!r} is not there ({str(path)!r}); make the Secret, with that key"
            )
        check_header_value(value, secret.name, key)
        return value

    def has_key(self, secret: SecretRef, key: str) -> bool:
        """True when the Secret has this key."""
        path = self._secret_path(secret)
        return (
            _require_valid_name(key, "key") in _read_bundle(path)
            if path.is_file()
            else (path / _require_valid_name(key, "key")).is_file()
        )

    def items(self, secret: SecretRef) -> dict[str, str]:
        """Every key with its value; raises as `value` does."""
        folder = self._secret_path(secret)
        try:
            keys = sorted(_read_bundle(folder)) if folder.is_file() else [path.name for path in _key_files(folder)]
        except OSError as error:
            raise AccessDenied(
                f"secret {secret.name!r}: {str(folder)!r} is not there, or cannot be read; make the Secret"
            ) from error
        return {key: self.value(secret, key) for key in keys}

    def version(self, secret: SecretRef) -> int:
        """Another number once the Secret holds something else, or is there at all."""
        path = self._secret_path(secret)
        try:
            files = [path] if path.is_file() else _key_files(path)
        except OSError:
            return 0
        return hash(tuple((file.name, _read_text(file)) for file in files))

    def _secret_path(self, secret: SecretRef) -> Path:
        if self._folder is None:
            raise InvalidArgument(f"secret {secret.name!r}: this pod has no secrets; give --secrets-dir")
        return self._folder / _require_valid_name(secret.name, "name")


def _key_files(folder: Path) -> list[Path]:
    """Files of the keys of a Secret that is a folder; raises OSError."""
    # Kubernetes keeps its own links there, named ..data and ..<time>.
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _read_text(path: Path) -> str | None:
    """A key's file; None when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _read_bundle(path: Path) -> dict[str, str]:
    """A Secret that is one JSON object; nothing when it cannot be read as one."""
    try:
        document = json.loads(_read_text(path) or "")
    except ValueError:
        return {}
    texts = document.items() if isinstance(document, dict) else ()
    return {key: value.strip() for key, value in texts if isinstance(value, str)}


def _require_valid_name(name: str, kind: str) -> str:
    """Refuse what would leave the folder."""
    if not _NAME_PATTERN.fullmatch(name):
        raise InvalidArgument(f"secret: {name!r} is not a {kind} of a Secret; use letters, digits, '-', '_' and '.'")
    return name
