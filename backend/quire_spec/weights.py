# SPDX-License-Identifier: Apache-2.0
"""How long a file of weights is by its own word, without any library."""

import json
from pathlib import Path

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_LENGTH_BYTES = 8


def weights_bytes(path: Path) -> int | None:
    """Bytes that a safetensors file has, by its header: at the least, where that is cut. None: it is no such file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(_LENGTH_BYTES)
        length = int.from_bytes(head, "little")
        if len(head) < _LENGTH_BYTES:
            return _LENGTH_BYTES
        if length > _MAX_HEADER_BYTES:
            return None
        header = file.read(length)
    if len(header) < length:
        return _LENGTH_BYTES + length
    try:
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        return _LENGTH_BYTES + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
