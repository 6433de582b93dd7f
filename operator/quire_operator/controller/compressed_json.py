# SPDX-License-Identifier: Apache-2.0
"""JSON that is compressed with gzip and encoded in base64.

This is used for annotations and termination messages, which must be short.
"""

import base64
import gzip
import json
import zlib
from typing import Any

_MAX_BYTES = 4 * 2**20
"""Maximum size of a decompressed document. The longest ones are pod templates of some tens of kilobytes."""


def compress(document: Any) -> str:
    """Compress a document. The same content always gives the same text."""
    compressed = gzip.compress(json.dumps(document, separators=(",", ":"), sort_keys=True).encode(), mtime=0)
    return base64.b64encode(compressed).decode()


def decompress(text: str) -> Any:
    """Return the document that was passed to compress().

    Raises:
        ValueError: the text is invalid or was changed.
    """
    try:
        stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
        data = stream.decompress(base64.b64decode(text), _MAX_BYTES)
        if not stream.eof:
            raise ValueError(f"it is truncated, or has more than {_MAX_BYTES} bytes")
        return json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{text[:80]!r} is not compressed JSON: {error}") from error
