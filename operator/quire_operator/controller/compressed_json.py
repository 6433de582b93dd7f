# SPDX-License-Identifier: Apache-2.0
"""JSON that is compressed with gzip and encoded in base64.

This is used for annotations and termination messages, which must be short.
"""

import base64
import gzip
import json
import zlib
from typing import Any


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
        return json.loads(gzip.decompress(base64.b64decode(text)))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{text[:80]!r} is not compressed JSON: {error}") from error
