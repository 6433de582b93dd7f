# SPDX-License-Identifier: Apache-2.0
"""Starts the process that serves KV blocks to other pods (kv_peer), and reads its counters. It does not restart it."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from quire_server.supervisor import engine_process
from quire_server.supervisor.child_process import RETURN_MEMORY_ENV, ChildProcess
from quire_spec import constants
from quire_spec.errors import QuireError
from quire_spec.protocol.client import ConnectionLost
from quire_spec.protocol.results import KVPeerStatus

_STATUS_INTERVAL_S = 2.0


async def start(config_file: Path, run_dir: Path, relay: Callable[[str, str], None], *options: str) -> ChildProcess:
    """Start the process with further options; raises OSError if it cannot be created."""
    (run_dir / constants.process_socket(constants.KV_PEER)).unlink(missing_ok=True)
    argv = [sys.executable, "-m", "quire_server.kv_peer", "--config", str(config_file), "--run-dir", str(run_dir)]
    return await ChildProcess.start(constants.KV_PEER, [*argv, *options], relay, RETURN_MEMORY_ENV | os.environ)


async def watch(run_dir: Path, on_ready: Callable[[], None], on_status: Callable[[KVPeerStatus], None]) -> str:
    """Pass the counters of a process on until it must be killed; return the reason."""
    async with engine_process.connect(constants.KV_PEER, run_dir) as control:
        on_ready()
        on_status(KVPeerStatus())
        while True:
            try:
                on_status(await control.call("status", KVPeerStatus))
            except ConnectionLost:
                return "connection closed"
            except QuireError as error:
                return str(error)
            await asyncio.sleep(_STATUS_INTERVAL_S)
