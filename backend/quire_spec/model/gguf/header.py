# SPDX-License-Identifier: Apache-2.0
"""Reads the header of a GGUF file: its metadata, and the names, types and sizes of its tensors.

The weights are not read. The planner and the converter call this module. It does not use the package `gguf`, because
that package needs numpy, and maps the whole file.

Source of the format: docs/gguf.md of ggml.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire_spec.errors import ConfigError, truncated_repr

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_HEADER_BYTES = 64 * 2**20
_MAX_TENSORS, _MAX_DIMENSIONS = 1_000_000, 4
_DEFAULT_ALIGNMENT = 32
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Maps the number of a type of metadata to its format in `struct`."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A type of tensors. Adjacent numbers of a row form blocks."""

    name: str
    block_size: int
    """Numbers of a block."""
    block_bytes: int

    @property
    def is_float(self) -> bool:
        """Whether the numbers are not quantized."""
        return self.block_size == 1


TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    8: GGMLType("Q8_0", 32, 34),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    30: GGMLType("BF16", 1, 2),
}
"""Maps the number of a type in the file to the type. Other types are not supported."""
_OTHER_TYPES = {3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 20: "IQ4_NL", 23: "IQ4_XS", 39: "MXFP4"}
"""Some types that are not supported, for messages."""


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where a tensor is in the file."""

    shape: tuple[int, ...]
    """The last dimension is contiguous, as in PyTorch."""
    type: GGMLType
    offset: int
    """Offset of the first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        num_bytes = self.row_bytes
        for size in self.shape[:-1]:
            num_bytes *= size
        return num_bytes


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """The header of a file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensorInfo]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def read_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file.

    Raises:
        ConfigError: the file cannot be read, is not a GGUF file or is incomplete, or a tensor has a type that is not
            supported.
    """
    try:
        with path.open("rb") as file:
            return _Reader(file).read(path.stat().st_size)
    except (OSError, struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: not a complete GGUF file ({error}); download it again") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, file_size: int) -> GGUFHeader:
        if self._file.read(4) != _MAGIC:
            raise ConfigError("does not begin like a GGUF file; give the path of a .gguf file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ConfigError(f"has version {version} of GGUF, but only 2 and 3 are supported; convert the model again")
        num_tensors, num_entries = self._count(_MAX_TENSORS), self._count(_MAX_TENSORS)
        metadata = {self._string(): self._value(self._number("I")) for _ in range(num_entries)}
        if metadata.get("split.count", 1) != 1:
            raise ConfigError("is one of several files of a model; merge them with llama-gguf-split --merge")
        infos = {self._string(): self._tensor_info() for _ in range(num_tensors)}
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ConfigError(f"general.alignment must be a positive integer, got {truncated_repr(alignment)}")
        start = -(-self._file.tell() // alignment) * alignment
        tensors = {name: _tensor(name, *info, start) for name, info in infos.items()}
        for name, tensor in tensors.items():
            if tensor.offset + tensor.num_bytes > file_size:
                raise ConfigError(f"{name} ends after the end of the file; download it again")
        return GGUFHeader(metadata, tensors)

    def _tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        """Return the shape, the number of the type and the offset in the data."""
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ConfigError(f"a tensor has {num_dimensions} dimensions; download the file again")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_scalar(kind))
        item, count = self._number("I"), self._count(_MAX_HEADER_BYTES)
        if item == _STRING:
            return [self._string() for _ in range(count)]
        layout = _scalar(item)
        data = self._bytes(count * struct.calcsize(f"<{layout}"))
        return list(struct.unpack(f"<{count}{layout}", data))

    def _string(self) -> str:
        return self._bytes(self._count(_MAX_HEADER_BYTES)).decode()

    def _count(self, maximum: int) -> int:
        count: int = self._number("Q")
        if count > maximum:
            raise ValueError(f"a length of {count}")
        return count

    def _number(self, layout: str) -> Any:
        return struct.unpack(f"<{layout}", self._bytes(struct.calcsize(f"<{layout}")))[0]

    def _bytes(self, count: int) -> bytes:
        if self._file.tell() + count > _MAX_HEADER_BYTES:
            raise ValueError("the header is too long")
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("the header is truncated")
        return data


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"type {kind} of metadata")
    return _SCALARS[kind]


def _tensor(name: str, shape: tuple[int, ...], number: int, offset: int, start: int) -> GGUFTensorInfo:
    kind = TYPES.get(number)
    if kind is None:
        found = _OTHER_TYPES.get(number, f"number {number}")
        known = ", ".join(kind.name for kind in TYPES.values())
        raise ConfigError(f"{name} has type {found}, but only {known} are supported; use a file such as Q4_K_M or Q8_0")
    if min(shape) < 1 or shape[-1] % kind.block_size:
        raise ConfigError(f"{name} has shape {shape}, which cannot be divided into blocks of {kind.name}")
    return GGUFTensorInfo(shape, kind, start + offset)
