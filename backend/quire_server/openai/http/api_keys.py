# SPDX-License-Identifier: Apache-2.0
"""The API keys, which are stored in a folder, such as a mounted Secret. Each file contains one key. In metrics, the
name of the file identifies the key.

The folder is read again after it has changed, so that rotated keys take effect without a restart. If no key can be
read, all requests are rejected.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from quire_server.openai.errors import ApiError

CHECK_INTERVAL_S = 1.0
MAX_KEYS = 1000
_MAX_KEY_BYTES = 4096

logger = logging.getLogger(__name__)


class ApiKeys:
    """The API keys in a folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._checked_at = -CHECK_INTERVAL_S
        self._signature: object = None
        self._digests: dict[str, bytes] = {}

    def authenticate(self, authorization: bytes) -> str:
        """Return the name of the API key that the header Authorization contains; raises ApiError if the key is
        unknown."""
        self._reload_if_changed()
        scheme, _, presented = authorization.partition(b" ")
        # All digests have the same length, and the key of the request is compared to every key. Therefore, a client
        # cannot learn anything about a key from the time that the check takes.
        digest = hashlib.sha256(presented.strip()).digest()
        name = ""
        for key_name, key_digest in self._digests.items():
            if hmac.compare_digest(digest, key_digest):
                name = key_name
        if not name or scheme.lower() != b"bearer":
            problem = "authorization: send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY' with a valid API key"
            raise ApiError(401, problem, "authorization")
        return name

    def _reload_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        try:
            # In a mounted Secret, each file is a link to a hidden entry of the folder. Hidden entries are not keys.
            paths = sorted(path for path in self._folder.iterdir() if not path.name.startswith(".") and path.is_file())
            stats = [(path.name, path.stat()) for path in paths]
            signature = [(name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in stats]
            if signature == self._signature:
                return
            keys = {path.name: path.read_bytes().strip() for path in paths[:MAX_KEYS]}
        except OSError as error:
            logger.error("API keys cannot be read, the last ones stay valid folder=%s error=%s", self._folder, error)
            return
        self._signature = signature
        self._digests = {
            name: hashlib.sha256(key).digest() for name, key in keys.items() if 0 < len(key) <= _MAX_KEY_BYTES
        }
        if len(self._digests) < len(paths):
            logger.error(
                "API keys ignored, they are empty, too long or over the limit count=%d limit=%d",
                len(paths) - len(self._digests),
                MAX_KEYS,
            )
        logger.info("API keys read count=%d", len(self._digests))
