# SPDX-License-Identifier: Apache-2.0
"""How a process ends that is asked to while it starts: at once, without words, with the exit code that a shell gives.

Imports take up to two seconds, in which Python shows a traceback through some library for SIGINT, and process 1 of a
container is deaf to SIGTERM. Whoever has something to bring in order sets handlers of its own after that.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def quietly() -> None:
    """From now on SIGINT ends this process with 130 and SIGTERM with 143, also those that `held_back` holds."""
    for number in _SIGNALS:
        signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def quietly_as(package: str) -> None:
    """`quietly`, if this process is `python -m` this package, or a module of it, which Python is about to import.

    For the package's __init__: before that nothing of ours runs, and after it there are the module's own imports.
    """
    # Python inside of another program may have no arguments.
    argv = getattr(sys, "argv", [])
    # As long as it looks for the module, "-m" is in the place of the module's file.
    if argv[:1] == ["-m"] and sys.orig_argv[-len(argv)].removeprefix("-m").partition(".")[0] == package:
        quietly()


def held_back() -> None:
    """Keep both signals from now on: what this process becomes by exec gets them when it says `quietly`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _end(number: int, _: FrameType | None) -> NoReturn:
    os._exit(128 + number)
