# SPDX-License-Identifier: Apache-2.0
"""What a safetensors file says of its own length, by its first bytes; without the library, which an operator lacks.

A file is the length of its header in 8 bytes, the header as JSON, and the tensors one after the other.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_spec.errors import ConfigError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def header_length(start: bytes) -> int:
    """Bytes of the header, from the first 8 bytes of the file; raises ConfigError for anything else."""
    length = int.from_bytes(start, "little")
    if len(start) != LENGTH_BYTES or not 2 <= length <= MAX_HEADER_BYTES:
        raise ConfigError("does not begin like a safetensors file; save the weights as safetensors")
    return length


def tensor_bytes(header: object) -> int:
    """Bytes of all tensors, which is where the last one ends; raises ConfigError when the header does not tell.

    Args:
        header: the parsed header.
    """
    tensors = {name: t for name, t in header.items() if name != "__metadata__"} if isinstance(header, Mapping) else {}
    try:
        return max(_end_offset(tensor) for tensor in tensors.values())
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError("its header names no tensors with offsets; save it as safetensors") from error


def expected_file_bytes(path: Path) -> int | None:
    """Bytes that a file has by its own header: at the least, where that is cut. None: it is no safetensors file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        if len(start) < LENGTH_BYTES:
            return LENGTH_BYTES
        try:
            length = header_length(start)
            header = file.read(length)
            is_complete = len(header) == length
            return LENGTH_BYTES + length + (tensor_bytes(json.loads(header)) if is_complete else 0)
        except (ConfigError, ValueError, RecursionError):
            return None


def _end_offset(tensor: Any) -> int:
    end = tensor["data_offsets"][1]
    if not isinstance(end, int) or isinstance(end, bool) or end < 0:
        raise ValueError(end)
    return end
