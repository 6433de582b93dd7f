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

EXIT_SOFTWARE = 70
"""EX_SOFTWARE of sysexits.h."""

_PR_SET_PDEATHSIG = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessArgs:
    """What both processes are started with."""

    config: EngineConfig
    served_name: str
    """Name that clients know the base model by."""
    run_dir: Path
    """Folder of the pod's sockets."""

    def socket_path(self, name: str) -> Path:
        """Path of one of the pod's sockets.

        Raises:
            ConfigError: the path is longer than a socket's can be.
        """
        path = self.run_dir / name
        if len(os.fsencode(path)) > constants.MAX_SOCKET_PATH:
            raise ConfigError(f"--run-dir {self.run_dir}: too long for a socket in it; {path} may have 107 bytes")
        return path


def run_process(process_name: str, main: Callable[[ProcessArgs], None]) -> NoReturn:
    """Be the process `name`: parse the command line, set up logging and signals, call `main`, and exit."""
    set_parent_death_signal()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: exit_now(0))
    threading.excepthook = _on_thread_exception
    try:
        main(_parse_args(process_name))
    except ConfigError as error:
        # For a person who reads the last line of a log: the message says what to do, a traceback would bury it.
        print(f"{process_name}: {error}", file=sys.stderr)
        exit_now(constants.EXIT_CONFIG)
    except Exception:
        logger.exception("process failed name=%s", process_name)
        exit_now(EXIT_SOFTWARE)
    exit_now(0)


def exit_now(exit_code: int) -> NoReturn:
    """End the process now: no thread, device or peer can keep it."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)


def set_parent_death_signal() -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL.

    The signal comes when the thread that started this process ends, so a supervisor starts it from its main thread.
    """
    parent_pid = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above: then nobody would ever send the signal.
    if os.getppid() != parent_pid:
        exit_now(EXIT_SOFTWARE)


def install_exit_handlers(loop: asyncio.AbstractEventLoop) -> None:
    """Have `loop` end the process on an exception that nobody handled, and on SIGTERM."""
    loop.set_exception_handler(_on_loop_exception)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, exit_now, 0)


def _parse_args(process_name: str) -> ProcessArgs:
    parser = argparse.ArgumentParser(prog=process_name)
    parser.add_argument("--engine", type=Path, required=True, help="engine.json")
    parser.add_argument("--served-name", required=True, help="name that clients know the base model by")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the pod's sockets")
    args = parser.parse_args()
    return ProcessArgs(EngineConfig.load(args.engine), args.served_name, args.run_dir)


def _on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error("event loop failed: %s", context["message"], exc_info=context.get("exception"))
    exit_now(EXIT_SOFTWARE)


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    exc_info = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    logger.error("thread failed name=%s", args.thread and args.thread.name, exc_info=exc_info)
    exit_now(EXIT_SOFTWARE)
