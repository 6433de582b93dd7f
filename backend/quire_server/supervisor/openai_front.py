# SPDX-License-Identifier: Apache-2.0
"""Starts the process of an OpenAI front, and runs the session that watches it. process_manager.py uses both in its
restart loop."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp

from quire_server.supervisor.child_process import RETURN_MEMORY_ENV, ChildProcess
from quire_spec import constants

_START_TIMEOUT_S = 60.0
_PROBE_INTERVAL_S = 0.1
_PING_INTERVAL_S = 5.0
_UNRESPONSIVE_TIMEOUT_S = 60.0
_PROBE_URL = "http://localhost/version"
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)


def openai_process_name(index: int) -> str:
    """Return the name that status, logs and metrics use for a front."""
    return f"openai-{index}" if index else "openai"


class OpenAIFront:
    """Starts the process of a front, and checks that it responds."""

    def __init__(
        self,
        config_file: Path,
        run_dir: Path,
        index: int,
        relay: Callable[[str, str], None],
        mark_ready: Callable[[], None],
    ) -> None:
        """`mark_ready` is called when the process responds for the first time. `index` is the number of the front, from
        0."""
        self._config_file = config_file
        self._run_dir = run_dir
        self._name = openai_process_name(index)
        self._probe_socket = run_dir / constants.openai_probe_socket(index)
        self._relay = relay
        self._mark_ready = mark_ready

    async def start(self) -> ChildProcess:
        """Start the process."""
        argv = [sys.executable, "-m", "quire_server.openai", "--config", str(self._config_file)]
        argv += ["--run-dir", str(self._run_dir), f"--probe-socket={self._probe_socket}"]
        return await ChildProcess.start(self._name, argv, self._relay, RETURN_MEMORY_ENV | os.environ)

    async def session(self, child: ChildProcess) -> str:
        """Watch a process until it must be killed; return the reason."""
        connector = aiohttp.UnixConnector(str(self._probe_socket))
        async with aiohttp.ClientSession(connector=connector, timeout=_PROBE_TIMEOUT) as session:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while not await _answers(session):
                    await asyncio.sleep(_PROBE_INTERVAL_S)
            self._mark_ready()
            loop = asyncio.get_running_loop()
            last_answer = loop.time()
            while loop.time() - last_answer < _UNRESPONSIVE_TIMEOUT_S:
                await asyncio.sleep(_PING_INTERVAL_S)
                if await _answers(session):
                    last_answer = loop.time()
        return f"no response for {_UNRESPONSIVE_TIMEOUT_S:g} s"


async def _answers(session: aiohttp.ClientSession) -> bool:
    """Return True if the front sends a response, even if this is an error. While the text process restarts, the front
    responds with an error."""
    try:
        async with session.get(_PROBE_URL) as response:
            return response.status > 0
    except (aiohttp.ClientError, TimeoutError):
        return False
