# SPDX-License-Identifier: Apache-2.0
"""Secrets as files: <secrets_dir>/<secret>/<key>, the way Kubernetes mounts them. Values are never logged or quoted.

Read anew at each use, so that a rotated Secret is taken without a restart.
"""

import re
from pathlib import Path

from quire_spec.catalogue import SecretRef
from quire_spec.errors import InvalidArgument, Unavailable

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
            Unavailable: the file is not there (yet).
        """
        path = self._secret(secret) / _checked(key, "key")
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES)
            return data.decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Unavailable(
                f"secret {secret.name!r}: key {key!r} cannot be read ({type(error).__name__}); "
                f"mount the Secret at {str(path.parent)!r} with that key"
            ) from error

    def has(self, secret: SecretRef, key: str) -> bool:
        """True when the Secret has this key."""
        return (self._secret(secret) / _checked(key, "key")).is_file()

    def items(self, secret: SecretRef) -> dict[str, str]:
        """Every key with its value; raises as `value` does."""
        folder = self._secret(secret)
        try:
            # Kubernetes keeps its own links there, named ..data and ..<time>.
            keys = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        except OSError as error:
            raise Unavailable(
                f"secret {secret.name!r}: {str(folder)!r} cannot be read; mount the Secret there"
            ) from error
        return {key: self.value(secret, key) for key in keys}

    def _secret(self, secret: SecretRef) -> Path:
        if self._folder is None:
            raise InvalidArgument(f"secret {secret.name!r}: this pod has no secrets; give --secrets-dir")
        return self._folder / _checked(secret.name, "name")


def _checked(part: str, what: str) -> str:
    """Refuse what would leave the folder."""
    if not _PART.fullmatch(part):
        raise InvalidArgument(f"secret: {part!r} is not a {what} of a Secret; use letters, digits, '-', '_' and '.'")
    return part
