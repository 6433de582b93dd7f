# SPDX-License-Identifier: Apache-2.0
"""Log output of a pod. The lines of all processes are written to one stream, and each line begins with the name of its
process.

Without --verbose, the INFO lines and the tables that the server prints are dropped. The server's warnings and errors
are always kept, except for a few that are known to be harmless.
"""

import contextlib
import logging
import re
import sys

NAME_WIDTH = 6
_NOISE = re.compile(r"I\d{4} |\d{4}-\d\d-\d\dT\S+ I |[+|]|\s*$")
_HARMLESS_MESSAGES = (
    # Logged on every machine without a GPU.
    "pinned_memory_manager",
    "cuda_memory_manager",
    "CudaDriverHelper",
    # Logged for every error that a gRPC client gets with its real status.
    "HandleCancellation called even when the context was not cancelled",
    "Signal (15) received",
)
"""Warnings and errors of the server that are harmless in this setup."""


class LogRelay:
    """Writes the lines that child processes print to stderr. ChildProcess calls it.

    On a terminal, it also shows the present state of a progress bar, which is a line that begins with a carriage
    return. The next line replaces it.
    """

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._is_terminal = sys.stderr.isatty()
        self._shows_bar = False

    def __call__(self, name: str, line: str) -> None:
        is_bar = line.startswith("\r")
        if not (self._is_terminal if is_bar else self._verbose or not is_noise(name, line)):
            return
        start = "\x1b[K" if is_bar or self._shows_bar else ""
        self._shows_bar = is_bar
        # The cursor stays before the bar, so that a line of another writer overwrites it.
        # A closed stderr must not stop the supervisor.
        with contextlib.suppress(OSError):
            text = f"{start}{name:<{NAME_WIDTH}}| {line.removeprefix(chr(13))}"
            print(text, end="\r" if is_bar else "\n", file=sys.stderr, flush=True)


def is_noise(name: str, line: str) -> bool:
    """Return True if this line is shown only with --verbose."""
    if name != "server":
        return not line
    return bool(_NOISE.match(line)) or any(word in line for word in _HARMLESS_MESSAGES)


def configure_logging() -> None:
    """Configure the logging of the supervisor itself, so that its lines have the same columns."""
    prefix = "quire".ljust(NAME_WIDTH)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"{prefix}| %(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # It logs one uninteresting line per request to the health port.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
