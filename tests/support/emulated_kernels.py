# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of ARM64, called from a process on x86: `pytest -p support.emulated_kernels` (make test-arm64).

The cross compiler of Debian builds the library and a small program, which runs in qemu and calls the library. torch
runs in this process. Before a call, all tensors and ctypes objects of this process are copied into memory that both
processes share, and pointers to them are replaced with their addresses there. After the call, they are copied back.
"""

import ctypes
import gc
import mmap
import shutil
import subprocess
import tempfile
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quire_kernels import cpu_build, cpu_native

CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
_PROGRAM = Path(__file__).with_name("call_kernels.cpp")
_ARENA_BYTES = 2**30
_MAX_POINTER_BYTES = 1 << 16
"""Larger objects contain no pointers."""
_CDATA = ctypes.Structure.__mro__[1]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of an object of this process, and its place in the arena."""

    address: int
    size: int
    offset: int
    can_have_pointers: bool


class EmulatedLibrary:
    """The kernels, as attributes like those of a ctypes library."""

    def __init__(self, folder: Path) -> None:
        """Build the library, which the cache keeps, and the program in a folder, and start the program."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", CROSS_COMPILER)
            library = cpu_build.build(cpu_build.NEON)
        program = folder / "call_kernels"
        command = [CROSS_COMPILER, "-std=c++17", "-O2", "-fopenmp", str(_PROGRAM), "-o", str(program), "-ldl"]
        subprocess.run([*command, "-Wl,--no-as-needed", "-lgomp"], check=True)
        # Not in /dev/shm, which has only 64 MiB in many containers. Only the pages in use take space.
        self._file = (folder / "arena").open("w+b")
        self._file.truncate(_ARENA_BYTES)
        self._arena = mmap.mmap(self._file.fileno(), _ARENA_BYTES)
        self._here = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        command = [*EMULATOR, str(program), str(library), self._file.name, str(_ARENA_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._there = int(self._read())
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        kinds = cpu_native.SIGNATURES[name]
        return lambda *arguments: self._call(name, kinds, arguments)

    def close(self) -> None:
        """End the program."""
        with self._process, self._file:
            self._process.kill()

    def _call(self, name: str, kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        assert len(kinds) == len(arguments), name
        regions = _regions()
        starts = [region.address for region in regions]

        def translate(pointer: int) -> int:
            index = bisect_right(starts, pointer) - 1
            region = regions[index] if index >= 0 else None
            if region is None or pointer >= region.address + region.size:
                return 0
            return self._there + region.offset + pointer - region.address

        replaced: list[tuple[int, int, int]] = []
        for region in regions:
            ctypes.memmove(self._here + region.offset, region.address, region.size)
            if region.can_have_pointers:
                offset = -(-region.offset // 8) * 8
                count = max(0, region.offset + region.size - offset) // 8
                words = np.frombuffer(self._arena, np.uint64, count, offset)
                for i in np.nonzero(words >= min(starts))[0]:
                    if new := translate(int(words[i])):
                        replaced.append((offset + 8 * int(i), int(words[i]), new))
                        words[i] = new
        words = [name]
        for kind, value in zip(kinds, arguments, strict=True):
            if kind is ctypes.c_void_p and value:
                pointer, value = value, translate(value)
                assert value, f"{name}: {pointer:#x} is in no tensor"
            letter = "f" if kind is ctypes.c_float else "n"
            words.append(f"{letter}{float(value)!r}" if letter == "f" else f"n{int(value or 0) % 2**64}")
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._read()
        for offset, word, new in replaced:
            # A new tensor contains what the memory had before, also pointers, which the kernel may have overwritten.
            if self._arena[offset : offset + 8] == new.to_bytes(8, "little"):
                self._arena[offset : offset + 8] = word.to_bytes(8, "little")
        for region in regions:
            ctypes.memmove(region.address, self._here + region.offset, region.size)
        self.num_calls += 1

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self._process.wait()}"
        return line


def _regions() -> list[Region]:
    """Return all tensors and ctypes objects of this process that were created after the start, by address."""
    sizes: dict[int, tuple[int, bool]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes(), storage.nbytes() <= _MAX_POINTER_BYTES
        elif issubclass(type(thing), _CDATA):
            sizes[ctypes.addressof(thing)] = ctypes.sizeof(thing), True
    regions, offset = [], 0
    for address, (size, can_have_pointers) in sorted(sizes.items()):
        if not address or not size or (regions and address < regions[-1].address + regions[-1].size):
            continue
        # An object keeps its place in a cache line.
        offset = -(-offset // 64) * 64 + address % 64
        regions.append(Region(address, size, offset, can_have_pointers))
        offset += size + 64
    assert offset < _ARENA_BYTES
    return regions


def pytest_configure(config: pytest.Config) -> None:
    """Use the emulated kernels in all tests. The compiler takes a minute, so it runs before the first test."""
    for program in (CROSS_COMPILER, EMULATOR[0]):
        if shutil.which(program) is None:
            raise pytest.UsageError(f"{program}: not installed; run apt-get install g++-aarch64-linux-gnu qemu-user")
    folder = tempfile.TemporaryDirectory(prefix="quire-arm64-")
    library = EmulatedLibrary(Path(folder.name))
    patch = pytest.MonkeyPatch()
    patch.setattr(cpu_native, "load_library", lambda: library)
    gc.collect()
    gc.freeze()

    def end() -> None:
        patch.undo()
        library.close()
        folder.cleanup()
        print(f"{library.num_calls} calls of ARM64 kernels")

    config.add_cleanup(end)
