# SPDX-License-Identifier: Apache-2.0
"""Reads tensors from safetensors files without mapping the files into memory.

The safetensors library is only used to validate a file. To read tensors, the library would map them into memory. If
another process truncates a mapped file, the next access kills the process (SIGBUS). If files are read instead of
mapped, a truncated file only leads to an error. The library also holds the interpreter lock while it copies, but the
steps of a running engine need this lock. While an adapter of 20 MB is read, the library holds the lock for 10 ms. This
reader holds the lock for 0.02 ms.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quire_spec.errors import InvalidArgument

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Maps the dtype names of safetensors to the dtypes that can be read."""

_HEADER_LENGTH_BYTES = 8


class SafetensorsReader:
    """An open safetensors file; created by `open_safetensors`."""

    def __init__(self, path: Path, safetensors_file: Any) -> None:
        """`safetensors_file` is the file that the library has opened. It provides names, dtypes and shapes."""
        self._path = path
        self._safetensors_file = safetensors_file
        self._offsets: dict[str, tuple[int, int]] = {}
        self._payload: Tensor | None = None

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._safetensors_file.keys())

    def get_slice(self, name: str) -> Any:
        """Return a description of a tensor.

        The description has the methods `get_dtype()` and `get_shape()`. The tensor is not read.
        """
        return self._safetensors_file.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor.

        The first call reads the whole file. The tensors of all calls share that memory.

        Raises:
            InvalidArgument: the file has changed since it was opened.
            OSError: the file cannot be read.
        """
        if self._payload is None:
            self._payload = self._read_payload()
        begin, end = self._offsets[name]
        tensor_slice = self._safetensors_file.get_slice(name)
        dtype = DTYPES[tensor_slice.get_dtype()]
        content = self._payload[begin:end]
        # The safetensors format does not guarantee alignment.
        return (content.clone() if begin % dtype.itemsize else content).view(dtype).view(tensor_slice.get_shape())

    def _read_payload(self) -> Tensor:
        with self._path.open("rb", buffering=0) as file:
            header = file.read(int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little"))
            try:
                entries = json.loads(header)
                self._offsets = {
                    name: self._validate_offsets(name, entries[name]["data_offsets"]) for name in self.keys()
                }
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise self._changed_error() from error
            size = max((end for _, end in self._offsets.values()), default=0)
            payload = torch.empty(size, dtype=torch.uint8)
            buffer, num_read = memoryview(payload.numpy().data), 0
            while num_read < size:
                # A read can return fewer bytes than requested; it returns 0 only at the end of the file.
                count = file.readinto(buffer[num_read:])
                if not count:
                    raise self._changed_error()
                num_read += count
        return payload

    def _validate_offsets(self, name: str, offsets: Any) -> tuple[int, int]:
        """Check that the offsets of a tensor match its shape and dtype, which the library has read."""
        begin, end = offsets
        tensor_slice = self._safetensors_file.get_slice(name)
        if begin < 0 or end - begin != math.prod(tensor_slice.get_shape()) * DTYPES[tensor_slice.get_dtype()].itemsize:
            raise ValueError(name)
        return begin, end

    def _changed_error(self) -> InvalidArgument:
        return InvalidArgument(
            f"{self._path.name} changed while it was read; write a new version to another file, then rename that file"
        )


@contextmanager
def open_safetensors(path: Path) -> Iterator[SafetensorsReader]:
    """Open a file and let the library validate it.

    Raises:
        safetensors.SafetensorError: the file is not a safetensors file.
        OSError: the file cannot be read.
    """
    with safe_open(path, framework="pt") as safetensors_file:
        yield SafetensorsReader(path, safetensors_file)
