# SPDX-License-Identifier: Apache-2.0
"""Compute how long a safetensors file must be, from the header of the file.

This module exists because the operator's image does not contain the safetensors library.

A safetensors file starts with the length of its header in 8 bytes. After that come the header as JSON, and the tensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_spec.errors import ConfigError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Maximum length that the safetensors format allows for a header."""


def header_length(start: bytes) -> int:
    """Return the length of the header from the first 8 bytes of the file. Raises ConfigError if it is not valid."""
    length = int.from_bytes(start, "little")
    if len(start) != LENGTH_BYTES or not 2 <= length <= MAX_HEADER_BYTES:
        raise ConfigError("does not begin like a safetensors file; save the weights as safetensors")
    return length


def tensor_bytes(header: object) -> int:
    """Return the size of all tensors together in bytes. This is the offset at which the last tensor ends.

    Args:
        header: the parsed header.

    Raises:
        ConfigError: the header has no tensors with valid offsets.
    """
    tensors = {name: t for name, t in header.items() if name != "__metadata__"} if isinstance(header, Mapping) else {}
    try:
        return max(_end_offset(tensor) for tensor in tensors.values())
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError("the header contains no tensors with offsets; save the file as safetensors") from error


def expected_file_bytes(path: Path) -> int | None:
    """Return the length that the file should have according to its header.

    If the header is truncated, the result is a lower bound.

    The result is None if the file is not a safetensors file.

    Raises:
        OSError: the file cannot be read.
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
