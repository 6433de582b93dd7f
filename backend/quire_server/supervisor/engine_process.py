# SPDX-License-Identifier: Apache-2.0
"""Starts the text process and the core process, connects to them, and watches them. This module does not restart them.

process_manager.py runs both processes in a pod, and batch/local_engine.py runs them for a batch.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from quire_server.supervisor.child_process import RETURN_MEMORY_ENV, ChildProcess
from quire_spec import constants
from quire_spec.errors import Unavailable
from quire_spec.protocol.client import Client, ConnectionLost
from quire_spec.protocol.messages import Hello

START_TIMEOUT_S = 3600.0
"""The core must load its weights within this many seconds. On Kubernetes, the startup probe sets a shorter limit."""
SOCKETS = {"core": constants.CORE_SOCKET, "text": constants.TEXT_SOCKET}
CONNECT_RETRY_S = 0.05
PING_INTERVAL_S = 5.0
UNRESPONSIVE_TIMEOUT_S = 120.0
"""A process that does not respond for this many seconds is treated as hung. Even on a slow CPU, a step of a large model
takes less time."""
_EXIT_GRACE_S = 2.0
"""After a process has closed its connection to the supervisor, it must exit within this many seconds."""

ENGINE_ENV = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""Default environment variables of the engine processes. They set the sizes of two caches, in which torch and oneDNN
store compiled matrix products. In a cache, each combination of a token count and a weight shape has its own entry. With
the default of 1,024 entries, a core that computes float32 on a CPU needed 0.7 GB more memory after some thousand
requests. With 128 entries, it needed only 0.15 GB more, and was as fast."""


async def start(name: str, config_file: Path, run_dir: Path, relay: Callable[[str, str], None]) -> ChildProcess:
    """Start `core` or `text`, which read pod.json; raises OSError if the process cannot be created."""
    # A killed process leaves its socket file behind.
    (run_dir / SOCKETS[name]).unlink(missing_ok=True)
    argv = [sys.executable, "-m", f"quire_engine.{name}", "--config", str(config_file), "--run-dir", str(run_dir)]
    # The core's tensors stay in use, and freeing and allocating their memory again would take time.
    defaults = ENGINE_ENV if name == "core" else ENGINE_ENV | RETURN_MEMORY_ENV
    return await ChildProcess.start(name, argv, relay, defaults | os.environ)


@contextlib.asynccontextmanager
async def connect(name: str, run_dir: Path) -> AsyncIterator[Client]:
    """Connect to a process that is starting. If it does not listen yet, try again until it does."""
    control = Client(run_dir / SOCKETS[name], Hello("supervisor", pid=os.getpid()), name)
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                await control.connect()
                break
            except OSError:
                await asyncio.sleep(CONNECT_RETRY_S)
    try:
        yield control
    finally:
        await control.close()


async def watch_connection(control: Client) -> str:
    """Wait until a process must be killed; return the reason."""
    while True:
        try:
            async with asyncio.timeout(PING_INTERVAL_S):
                await control.closed.wait()
            # Usually, the connection is closed because the process has exited. The supervisor then detects the exit
            # during this pause, and cancels this session.
            await asyncio.sleep(_EXIT_GRACE_S)
            return "connection closed"
        except TimeoutError:
            pass
        try:
            await control.call("status", msgspec.Raw, timeout_s=UNRESPONSIVE_TIMEOUT_S)
        except ConnectionLost:
            continue
        except Unavailable:
            return f"no response for {UNRESPONSIVE_TIMEOUT_S:g} s"
