# SPDX-License-Identifier: Apache-2.0
"""The admin key, which is stored in a file. Either the operator mounts this file, or a user writes it. The health port
and the OpenAI front check the key."""

import hmac
from pathlib import Path

from quire_spec.errors import Unavailable


class AdminKey:
    """The admin key in a file. The file is read for each request, so that a rotated Secret takes effect without a
    restart."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def matches(self, authorization: str) -> bool:
        """Return whether the header Authorization contains the key; raises Unavailable if the key cannot be read."""
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
