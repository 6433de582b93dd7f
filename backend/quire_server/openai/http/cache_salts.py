# SPDX-License-Identifier: Apache-2.0
"""The salts of the prefix cache, one for each API key and each cache_salt of a client.

A salt is an HMAC with a secret. Without the secret, a client of another port cannot compute the salt of a key whose
name it knows. Therefore, it cannot find out by timing which prompts the holder of this key has sent.
"""

import hashlib
import hmac
import logging
import secrets

from quire_server.openai.settings import FrontSettings

_PURPOSE = b"quire cache salt"
"""The secret can be the admin key, which has another use, too. The purpose separates the two uses."""

logger = logging.getLogger(__name__)


class CacheSalts:
    """The salts of one front."""

    def __init__(self, settings: FrontSettings) -> None:
        self._key = hmac.digest(_read_secret(settings), _PURPOSE, hashlib.sha256)

    def salt(self, key_name: str, client_salt: str | None) -> str:
        """Return the salt for the requests of an API key. `client_salt` is the field cache_salt of the request."""
        # A client's salt cannot contain a slash. Therefore, two different pairs of key name and salt never result in
        # the same text.
        return hmac.new(self._key, f"{key_name}/{client_salt or ''}".encode(), hashlib.sha256).hexdigest()


def _read_secret(settings: FrontSettings) -> bytes:
    """Return the secret in the file; a random one if there is no file."""
    path = settings.cache_salt_secret_file
    try:
        secret = path.read_bytes().strip() if path is not None else b""
    except OSError as error:
        logger.warning("the secret of cache salts cannot be read, other pods have other salts error=%s", error)
        secret = b""
    return secret or secrets.token_bytes(32)
