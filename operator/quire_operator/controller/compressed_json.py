# SPDX-License-Identifier: Apache-2.0
"""JSON that has to fit where little text does, an annotation or a termination message: compressed, in base64."""

import base64
import gzip
import json
import zlib
from typing import Any


def compress(document: Any) -> str:
    """A document as text; the same for the same content."""
    compressed = gzip.compress(json.dumps(document, separators=(",", ":"), sort_keys=True).encode(), mtime=0)
    return base64.b64encode(compressed).decode()


def decompress(text: str) -> Any:
    """The document that a text is.

    Raises:
        ValueError: it is none, or was changed.
    """
    try:
        return json.loads(gzip.decompress(base64.b64decode(text)))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"{text[:80]!r} is no packed JSON: {error}") from error
