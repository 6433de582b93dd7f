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
    """Writes the lines that child processes print to stderr. ChildProcess calls it."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose

    def __call__(self, name: str, line: str) -> None:
        if self._verbose or not is_noise(name, line):
            # A closed stderr must not stop the supervisor.
            with contextlib.suppress(OSError):
                print(f"{name:<{NAME_WIDTH}}| {line}", file=sys.stderr, flush=True)


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
