# SPDX-License-Identifier: Apache-2.0
"""What the text and the core process have in common: arguments, logging, and how they start, fail and end.

Exit codes: 0 asked to end, 2 cannot start with this configuration (starting again changes nothing), 70 a defect or a
failing device (starting again may help). The supervisor reads them. Nothing here knows messages or the engine.
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quire_spec import constants
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

EXIT_DEFECT = 70
"""EX_SOFTWARE of sysexits.h."""

_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("quire.process")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What both processes are started with."""

    config: EngineConfig
    served_name: str
    """Name that clients know the base model by."""
    run_dir: Path
    """Folder of the pod's sockets."""

    def socket(self, name: str) -> Path:
        """Path of one of the pod's sockets.

        Raises:
            ConfigError: the path is longer than a socket's can be.
        """
        path = self.run_dir / name
        if len(os.fsencode(path)) > constants.MAX_SOCKET_PATH:
            raise ConfigError(f"--run-dir {self.run_dir}: too long for a socket in it; {path} may have 107 bytes")
        return path


def run(name: str, main: Callable[[Arguments], None]) -> NoReturn:
    """Be the process `name`: parse the command line, set up logging and signals, call `main`, and exit."""
    die_with_parent()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: leave(0))
    threading.excepthook = _thread_failed
    try:
        main(_parse(name))
    except ConfigError as error:
        # For a person who reads the last line of a log: the message says what to do, a traceback would bury it.
        print(f"{name}: {error}", file=sys.stderr)
        leave(constants.EXIT_CONFIG)
    except Exception:
        _log.exception("process failed name=%s", name)
        leave(EXIT_DEFECT)
    leave(0)


def leave(code: int) -> NoReturn:
    """End the process now: no thread, device or peer can keep it."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL.

    The signal comes when the thread that started this process ends, so a supervisor starts it from its main thread.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above: then nobody would ever send the signal.
    if os.getppid() != parent:
        leave(EXIT_DEFECT)


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Have `loop` end the process on an exception that nobody handled, and on SIGTERM."""
    loop.set_exception_handler(_loop_failed)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, 0)


def _parse(name: str) -> Arguments:
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--engine", type=Path, required=True, help="engine.json")
    parser.add_argument("--served-name", required=True, help="name that clients know the base model by")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the pod's sockets")
    args = parser.parse_args()
    return Arguments(EngineConfig.load(args.engine), args.served_name, args.run_dir)


def _loop_failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    _log.error("event loop failed: %s", context["message"], exc_info=context.get("exception"))
    leave(EXIT_DEFECT)


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    exc_info = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    _log.error("thread failed name=%s", args.thread and args.thread.name, exc_info=exc_info)
    leave(EXIT_DEFECT)
