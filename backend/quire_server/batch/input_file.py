# SPDX-License-Identifier: Apache-2.0
"""Reads the input file of a batch, one window of lines at a time.

Invalid and repeated lines are rejected, and each window is sorted. The number of lines and bytes in a window is
limited. As a result, memory does not grow with the file. The methods block, so the runner calls them in a thread.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from quire_server.batch.id_set import IdSet
from quire_server.batch.request_line import BadLine, RequestLine, bad_line, parse_line
from quire_spec.errors import ConfigError

MAX_LINE_BYTES = 16 * 2**20
"""Maximum size of a line in bytes. This is twice the size of the largest body that the OpenAI front accepts by
default."""
WINDOW_LINES = 4096
"""Number of lines that are sorted together. With ten adapters, a window contains several hundred lines for each
adapter."""
WINDOW_BYTES = 32 * 2**20
_CHUNK_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Window:
    """Lines of the input file that are sorted and sent together."""

    requests: list[RequestLine] = field(default_factory=list)
    """The requests of the window. They are sorted by model, and then by the start of the prompt."""
    bad_lines: list[BadLine] = field(default_factory=list)
    is_last: bool = False


class InputFile:
    """An open input file."""

    def __init__(self, path: Path, is_done: Callable[[str], bool]) -> None:
        """`is_done(id)` must return whether the line with this id has a result.

        The id of a request is its custom_id. The id of any other line is `BadLine.id`.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._is_done = is_done
        self._seen_ids = IdSet()
        self._number = 0
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise ConfigError(f"--input {path}: {error.strerror}; give a file with one request on each line") from error
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ConfigError(
                f"--input {path}: is not a file; write the requests to a file, so that a stopped batch can continue"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def count_lines(self) -> int:
        """Return the number of lines. The progress bar needs it."""
        count, last = 0, b"\n"
        while chunk := self._file.read(_CHUNK_BYTES):
            count += chunk.count(b"\n")
            last = chunk[-1:]
        self._file.seek(0)
        return count + (last != b"\n")

    def next_window(self) -> Window:
        """Read the next lines that do not have a result yet.

        Raises:
            ConfigError: the file cannot be read.
        """
        window, num_bytes = Window(), 0
        while len(window.requests) + len(window.bad_lines) < WINDOW_LINES and num_bytes < WINDOW_BYTES:
            try:
                line, length = self._read_line()
            except OSError as error:
                raise ConfigError(f"--input {self._file.name}: {error.strerror} after line {self._number}") from error
            if not length:
                window.is_last = True
                break
            if line.strip():
                num_bytes += length
                self._add(window, line, length)
        window.requests.sort(key=lambda request: request.sort_key)
        return window

    def _read_line(self) -> tuple[bytes, int]:
        """Return a line and its length.

        If the line is too long, only its start is returned. At the end of the file, the length is 0.
        """
        self._number += 1
        line = self._file.readline(MAX_LINE_BYTES + 1)
        length = len(line)
        if length > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := self._file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                length += len(rest)
            length += len(rest)
        if self._number == 1:
            line = line.removeprefix(_BOM)
        return line, length

    def _add(self, window: Window, line: bytes, length: int) -> None:
        number = self._number
        if length > MAX_LINE_BYTES:
            message = f"line {number}: has {length} bytes, more than {MAX_LINE_BYTES}; shorten the prompt"
            request: RequestLine | BadLine = bad_line(number, line, None, "line_too_long", message)
        else:
            request = parse_line(number, line)
        if isinstance(request, RequestLine) and not self._seen_ids.add(request.custom_id):
            message = f"line {number}: custom_id {request.custom_id!r} is on an earlier line; give each line another"
            request = bad_line(number, line, request.custom_id, "duplicate_custom_id", message)
        if isinstance(request, BadLine):
            if not self._is_done(request.id):
                window.bad_lines.append(request)
        elif not self._is_done(request.custom_id):
            window.requests.append(request)
