# SPDX-License-Identifier: Apache-2.0
"""Secrets as files: <secrets_dir>/<secret>/<key>, the way Kubernetes mounts them, or <secrets_dir>/<secret> as one JSON
object, the way the operator bundles them. Values are never logged or quoted.

Read anew at each use, so that a rotated Secret is taken without a restart.
"""

import json
import re
from pathlib import Path

from quire_spec.catalogue import SecretRef
from quire_spec.errors import AccessDenied, InvalidArgument
from quire_spec.secret import check_value

_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._]{0,251}[A-Za-z0-9])?|[A-Za-z0-9_]")
_MAX_BYTES = 64 * 1024


class Credentials:
    """The mounted Secrets of a pod."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def value(self, secret: SecretRef, key: str) -> str:
        """The value of one key, without the newline at its end.

        Raises:
            InvalidArgument: no --secrets-dir, or a name that is not a Secret's.
            AccessDenied: the file is not there (yet), or what it holds cannot be sent.
        """
        path = self._secret(secret)
        found = _bundled(path).get(_checked(key, "key")) if path.is_file() else _read(path / _checked(key, "key"))
        if found is None:
            raise AccessDenied(
                f"secret {secret.name!r}: key {key!r} is not there ({str(path)!r}); make the Secret, with that key"
            )
        check_value(found, secret.name, key)
        return found

    def has(self, secret: SecretRef, key: str) -> bool:
        """True when the Secret has this key."""
        path = self._secret(secret)
        return _checked(key, "key") in _bundled(path) if path.is_file() else (path / _checked(key, "key")).is_file()

    def items(self, secret: SecretRef) -> dict[str, str]:
        """Every key with its value; raises as `value` does."""
        folder = self._secret(secret)
        try:
            keys = sorted(_bundled(folder)) if folder.is_file() else [path.name for path in _keys(folder)]
        except OSError as error:
            raise AccessDenied(
                f"secret {secret.name!r}: {str(folder)!r} is not there, or cannot be read; make the Secret"
            ) from error
        return {key: self.value(secret, key) for key in keys}

    def mark(self, secret: SecretRef) -> int:
        """Another number once the Secret holds something else, or is there at all."""
        path = self._secret(secret)
        try:
            files = [path] if path.is_file() else _keys(path)
        except OSError:
            return 0
        return hash(tuple((file.name, _read(file)) for file in files))

    def _secret(self, secret: SecretRef) -> Path:
        if self._folder is None:
            raise InvalidArgument(f"secret {secret.name!r}: this pod has no secrets; give --secrets-dir")
        return self._folder / _checked(secret.name, "name")


def _keys(folder: Path) -> list[Path]:
    """Files of the keys of a Secret that is a folder; raises OSError."""
    # Kubernetes keeps its own links there, named ..data and ..<time>.
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _read(path: Path) -> str | None:
    """A key's file; None when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _bundled(path: Path) -> dict[str, str]:
    """A Secret that is one JSON object; nothing when it cannot be read as one."""
    try:
        found = json.loads(_read(path) or "")
    except ValueError:
        return {}
    texts = found.items() if isinstance(found, dict) else ()
    return {key: value.strip() for key, value in texts if isinstance(value, str)}


def _checked(part: str, what: str) -> str:
    """Refuse what would leave the folder."""
    if not _PART.fullmatch(part):
        raise InvalidArgument(f"secret: {part!r} is not a {what} of a Secret; use letters, digits, '-', '_' and '.'")
    return part
