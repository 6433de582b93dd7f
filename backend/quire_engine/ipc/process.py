# SPDX-License-Identifier: Apache-2.0
"""Start-up and exit of the text process and the core process: arguments, logging, signals, exit codes.

The supervisor reads the exit code. 0 means that a signal ended the process. 2 means that the configuration is invalid,
so a restart does not help. 70 means that Quire has a defect or the device failed, so a restart can help. This module
does not depend on messages or on the engine.
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
from quire_spec.documents.api_key_rule import ApiKeyRule
from quire_spec.documents.pod_config import PodConfig
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import advertised_address

EXIT_SOFTWARE = 70
"""The exit code EX_SOFTWARE from sysexits.h."""

_SWITCH_INTERVAL_S = 0.001
"""Seconds after which a thread must give the interpreter lock to another one. The threads of steps and of the event
loop need it again after each call that releases it, while other threads read adapters and long texts."""
BACKGROUND_NICE = 5
"""Nice value of threads and processes that must not slow down the steps on the same cores. Larger values do harm: on
Linux 6.18, a process with the value 10 or 19 ran for up to 0.5 s while processes of other sessions waited, and one
with the value 5 for at most 0.17 s."""
_PR_SET_PDEATHSIG = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessArgs:
    """Arguments of both processes, from the command line and pod.json."""

    config: EngineConfig
    served_name: str
    """Model name of the base model in requests."""
    run_dir: Path
    """Folder of the pod's Unix sockets."""
    name: str
    """Name of the process in the pod. Its socket has the same name."""
    api_key_rules: tuple[ApiKeyRule, ...] = ()
    """What each API key may use; see OpenAIOptions.keys."""
    advertised_host: str = ""
    """Address at which other pods reach this pod; empty if it is not known."""

    def socket_path(self, name: str) -> Path:
        """Return the path of one of the pod's sockets.

        Raises:
            ConfigError: the path is too long for a socket.
        """
        path = self.run_dir / name
        if len(os.fsencode(path)) > constants.MAX_SOCKET_PATH:
            raise ConfigError(
                f"--run-dir {self.run_dir}: too long, because {path} must have at most 107 bytes; use a shorter path"
            )
        return path


def run_process(process_name: str, main: Callable[[ProcessArgs], None]) -> NoReturn:
    """Parse the command line of the text process or of a core, and call `main`; see `run_main`."""
    run_main(process_name, lambda: main(_parse_args(process_name)))


def run_main(process_name: str, main: Callable[[], None]) -> NoReturn:
    """Set up logging and signals, call `main`, and exit with the code for its outcome."""
    set_parent_death_signal()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: exit_now(0))
    threading.excepthook = _on_thread_exception
    try:
        main()
    except ConfigError as error:
        # No traceback is logged, because the message contains the fix and must be the last line of the log.
        print(f"{process_name}: {error}", file=sys.stderr)
        exit_now(constants.EXIT_CONFIG)
    except Exception:
        logger.exception("process failed name=%s", process_name)
        exit_now(EXIT_SOFTWARE)
    exit_now(0)


def exit_now(exit_code: int) -> NoReturn:
    """Exit at once, without waiting for threads, devices or peers."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)


def set_parent_death_signal() -> None:
    """Make the kernel kill this process when its parent ends, even if the parent is killed by SIGKILL.

    The kernel sends the signal when the thread that started this process ends, even if the parent process lives on.
    Therefore, the supervisor must start this process from its main thread.
    """
    parent_pid = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent died before the call above, the kernel never sends the signal.
    if os.getppid() != parent_pid:
        exit_now(EXIT_SOFTWARE)


def install_exit_handlers(loop: asyncio.AbstractEventLoop, before_exit: Callable[[], None] = lambda: None) -> None:
    """Make `loop` exit the process on an unhandled exception, and on SIGTERM and SIGINT after a call of
    `before_exit`."""

    def on_signal() -> None:
        before_exit()
        exit_now(0)

    loop.set_exception_handler(_on_loop_exception)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)


def _parse_args(process_name: str) -> ProcessArgs:
    parser = argparse.ArgumentParser(prog=process_name)
    parser.add_argument("--config", type=Path, required=True, help="path of pod.json")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the pod's Unix sockets")
    parser.add_argument("--name", default=process_name.rpartition(".")[2], help="name of this process in the pod")
    args = parser.parse_args()
    config = PodConfig.load(args.config)
    rules = () if config.openai is None else config.openai.keys
    host = advertised_address(config.host, os.environ)
    return ProcessArgs(config.engine, config.servedName, args.run_dir, args.name, rules, host)


def _on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error("event loop failed: %s", context["message"], exc_info=context.get("exception"))
    exit_now(EXIT_SOFTWARE)


def _on_thread_exception(args: threading.ExceptHookArgs) -> None:
    exc_info = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    logger.error("thread failed name=%s", args.thread and args.thread.name, exc_info=exc_info)
    exit_now(EXIT_SOFTWARE)
