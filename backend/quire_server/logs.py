# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a pod: every process's lines in one log, each with the process's name in front.

The server's own chatter (its INFO lines and tables) is left out unless asked for; its warnings and errors are not.
"""

import contextlib
import logging
import re
import sys

NAME_WIDTH = 6
_NOISE = re.compile(r"I\d{4} |[+|]|\s*$")
_HARMLESS_MESSAGES = (
    # On every machine without a GPU.
    "pinned_memory_manager",
    "cuda_memory_manager",
    "CudaDriverHelper",
    # For every model that has no folder, as our adapters' have none.
    "Failed to set config modification time",
    # For every error that a gRPC client gets with its real status.
    "HandleCancellation called even when the context was not cancelled",
    "Signal (15) received",
)
"""Warnings and errors of the server's that mean nothing here."""


class LogRelay:
    """Relays the children's lines to stderr; processes.Child calls it."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose

    def __call__(self, name: str, line: str) -> None:
        if self._verbose or not is_noise(name, line):
            # A reader of the log that has gone must not end what it was reading about.
            with contextlib.suppress(OSError):
                print(f"{name:<{NAME_WIDTH}}| {line}", file=sys.stderr, flush=True)


def is_noise(name: str, line: str) -> bool:
    """True for what only --verbose shows."""
    if name != "server":
        return not line
    return bool(_NOISE.match(line)) or any(word in line for word in _HARMLESS_MESSAGES)


def configure_logging() -> None:
    """The supervisor's own lines, in the same columns."""
    prefix = "quire".ljust(NAME_WIDTH)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"{prefix}| %(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # One line per request to the health port, and one per request to the hub, say nothing.
    for noisy in ("aiohttp.access", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
