# SPDX-License-Identifier: Apache-2.0
"""The key that all ends of a protocol share: reading its file, and the proof that the other end has it.

Both ends send a random nonce, and then HMAC-SHA256 over both nonces and what they claim about themselves. So no proof
can be used again, and the key is never sent. The proof does not protect what is sent later: that is neither encrypted
nor signed. Called by the wire formats of KV peers and of nodes.
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from quire_spec.errors import Unavailable

MIN_KEY_BYTES = 16


def read_key(path: Path, field: str) -> bytes:
    """Return the key in a file; `field` is the setting that names the file.

    Raises:
        Unavailable: the file cannot be read, its key is too short, or other users can read it.
    """
    field = f"{field} {str(path)!r}"
    try:
        key, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise Unavailable(f"{field}: {error.strerror}; create it: openssl rand -hex 32 > FILE") from error
    if len(key) < MIN_KEY_BYTES:
        raise Unavailable(
            f"{field}: has {len(key)} bytes, but a key has at least {MIN_KEY_BYTES}; create it: openssl rand -hex 32"
        )
    if mode & 0o007:
        raise Unavailable(f"{field}: other users can read it (mode {mode & 0o777:o}); run chmod 600")
    return key


def new_nonce() -> bytes:
    """Return 32 random bytes."""
    return secrets.token_bytes(32)


def compute_mac(key: bytes, role: bytes, *parts: bytes) -> bytes:
    """Return the proof of one end.

    Args:
        key: the key of both ends.
        role: the protocol, its version and the end, so that a proof is valid for nothing else.
        parts: both nonces, then what the end claims. Only the last part may have any length, so that the parts cannot
            be divided in another way.
    """
    return hmac.new(key, role + b" " + b"".join(parts), hashlib.sha256).digest()


def is_mac(mac: bytes, key: bytes, role: bytes, *parts: bytes) -> bool:
    """Return whether `mac` is the proof of the other end; see `compute_mac`."""
    return hmac.compare_digest(compute_mac(key, role, *parts), mac)
