# SPDX-License-Identifier: Apache-2.0
"""Start, connection and watch of the text process and the core process. This module is independent of restarts.

process_manager.py runs both processes in a pod, and batch/local_engine.py runs them for a batch.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from quire_server.clients.control_client import ConnectionLost, ControlClient
from quire_server.supervisor.child_process import ChildProcess
from quire_spec import constants
from quire_spec.errors import Unavailable

START_TIMEOUT_S = 3600.0
"""Seconds in which the core must load its weights. On Kubernetes the startup probe has a shorter limit."""
SOCKETS = {"core": constants.CORE_SOCKET, "text": constants.TEXT_SOCKET}
CONNECT_RETRY_S = 0.05
PING_INTERVAL_S = 5.0
UNRESPONSIVE_TIMEOUT_S = 120.0
"""Seconds without a response after which a process counts as hung; a step of a large model on a slow CPU is shorter."""
_EXIT_GRACE_S = 2.0
"""Seconds in which a process must exit after it closed its connection to the supervisor."""

ENGINE_ENV = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""Default environment of the engine processes: sizes of torch's and oneDNN's caches of compiled matrix products. Each
combination of a number of tokens and a weight shape has one entry in the caches. With the default of 1,024 entries, a
core that computes float32 on a CPU grew by 0.7 GB in some thousand requests. With 128 entries, the core grew by only
0.15 GB and was as fast."""


async def start(
    name: str, engine: Path, served_name: str, run_dir: Path, relay: Callable[[str, str], None]
) -> ChildProcess:
    """Start `core` or `text` with the configuration file `engine`; raises OSError."""
    # A killed process leaves its socket file behind.
    (run_dir / SOCKETS[name]).unlink(missing_ok=True)
    argv = [sys.executable, "-m", f"quire_engine.{name}", "--engine", str(engine)]
    argv += ["--served-name", served_name, "--run-dir", str(run_dir)]
    return await ChildProcess.start(name, argv, relay, ENGINE_ENV | os.environ)


@contextlib.asynccontextmanager
async def connect(name: str, run_dir: Path) -> AsyncIterator[ControlClient]:
    """Connect to a process that is starting; retry until it listens."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                control = await ControlClient.connect(name, run_dir / SOCKETS[name])
                break
            except OSError:
                await asyncio.sleep(CONNECT_RETRY_S)
    try:
        yield control
    finally:
        await control.close()


async def watch_connection(control: ControlClient) -> str:
    """Wait until a process must be killed; return the reason."""
    while True:
        try:
            async with asyncio.timeout(PING_INTERVAL_S):
                await control.closed.wait()
            # The exit of the process is usually detected first and cancels this session.
            await asyncio.sleep(_EXIT_GRACE_S)
            return "connection closed"
        except TimeoutError:
            pass
        try:
            await control.call("status", timeout_s=UNRESPONSIVE_TIMEOUT_S)
        except ConnectionLost:
            continue
        except Unavailable:
            return f"no response for {UNRESPONSIVE_TIMEOUT_S:g} s"
