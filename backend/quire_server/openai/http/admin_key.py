# SPDX-License-Identifier: Apache-2.0
"""The admin key: a file that the operator mounts or a person writes. The health port and the OpenAI front check it."""

import hmac
from pathlib import Path

from quire_spec.errors import Unavailable


class AdminKey:
    """The key in a file. It is read for every request, so that a rotated Secret takes effect without a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def matches(self, authorization: str) -> bool:
        """Return whether the header Authorization contains the key; raises Unavailable as `read` does."""
        presented_key = authorization.removeprefix("Bearer ").encode(errors="replace")
        return hmac.compare_digest(presented_key, self.read())

    def read(self) -> bytes:
        """Return the key; raises Unavailable if the file cannot be read or is empty."""
        try:
            key = self._path.read_bytes().strip()
        except OSError as error:
            raise Unavailable(f"--admin-key-file {str(self._path)!r}: {error.strerror}") from error
        if not key:
            raise Unavailable(f"--admin-key-file {str(self._path)!r}: the file is empty; write the key to it")
        return key
