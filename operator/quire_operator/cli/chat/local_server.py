# SPDX-License-Identifier: Apache-2.0
"""A `quire serve` that belongs to a chat: starts with it on free ports, and ends with it."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quire_operator.cli.chat.terminal import printable
from quire_spec.errors import Unavailable

_HOST = "127.0.0.1"
_PORTS = ("http", "grpc", "metrics", "health", "openai")
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_STOP_TIMEOUT_S = 60.0
_NUM_LOG_LINES = 20
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def running_server(model: str, flags: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Start `quire serve`, wait until it is ready, and yield the root of its URL. At the end, stop it.

    Raises:
        Unavailable: it ended before it was ready. The message has the last lines of its log.
    """
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    with tempfile.TemporaryDirectory(prefix="quire-chat-") as folder:
        log = Path(folder, "log")
        command = [sys.executable, "-m", "quire_operator.cli", "serve", model, f"--host={_HOST}", *flags]
        command += [f"--{name}-port={port}" for name, port in ports.items()]
        command.append(f"--run-dir={folder}/run")
        signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
        process = _start(command, environment, log)
        threading.Thread(target=_end_on_signal, args=(process, folder), daemon=True).start()
        try:
            _wait_until_ready(process, model, f"http://{_HOST}:{ports['health']}/health/ready", log)
            yield f"http://{_HOST}:{ports['openai']}"
        finally:
            _stop(process)


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("wb") as file:
        # In a session of its own, it does not get the Ctrl-C that stops an answer.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def _end_on_signal(process: subprocess.Popen[bytes], folder: str) -> None:
    """Wait for a signal that ends the chat, and end it as an exit does. A handler could not do this: Python's readline
    module misses a signal that comes just before it waits for a key."""
    number = signal.sigwait(_END_SIGNALS)
    _stop(process)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def _wait_until_ready(process: subprocess.Popen[bytes], model: str, health_url: str, log: Path) -> None:
    started = time.monotonic()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    is_terminal = sys.stderr.isatty()
    print(f"quire chat: starting quire serve {model}", file=sys.stderr)
    try:
        while not _is_ready(opener, health_url):
            if process.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
                raise Unavailable("\n".join([*map(printable, lines), "quire chat: quire serve did not start"]))
            if is_terminal:
                _show(f"{time.monotonic() - started:.0f} s  {_last_line(log)}")
            time.sleep(_POLL_S)
    finally:
        if is_terminal:
            _show("")


def _is_ready(opener: urllib.request.OpenerDirector, url: str) -> bool:
    try:
        with opener.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def _last_line(log: Path) -> str:
    """Return what the server printed last. A progress bar ends with a carriage return instead of a newline."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return printable(lines[-1]) if lines else ""


def _show(text: str) -> None:
    """Replace the current line of the terminal."""
    width = shutil.get_terminal_size().columns - 1
    print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind((_HOST, 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
