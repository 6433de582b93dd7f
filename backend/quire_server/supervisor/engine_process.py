# SPDX-License-Identifier: Apache-2.0
"""Starts the text process and the core processes, connects to them, and watches them. It does not restart them.

process_manager.py runs them in a pod, and batch/local_engine.py runs them for a batch.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec

from quire_server.supervisor.child_process import RETURN_MEMORY_ENV, ChildProcess
from quire_spec import constants
from quire_spec.documents.pod_config import PodConfig
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, Unavailable
from quire_spec.protocol.client import Client, ConnectionLost
from quire_spec.protocol.messages import Hello

START_TIMEOUT_S = 3600.0
"""The core must load its weights within this many seconds. On Kubernetes, the startup probe sets a shorter limit."""
CONNECT_RETRY_S = 0.05
PING_INTERVAL_S = 5.0
UNRESPONSIVE_TIMEOUT_S = 120.0
"""A process that does not respond for this many seconds is treated as hung. Even on a slow CPU, a step of a large model
takes less time."""
STOPPED_TIMEOUT_S = 10.0
"""A core whose other nodes wait for it must answer within this many seconds, also while a step runs: the nodes give up
after this time, too."""
_STOPPED_INTERVAL_S = 2.0
_EXIT_GRACE_S = 2.0
"""After a process has closed its connection to the supervisor, it must exit within this many seconds."""

ENGINE_ENV = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "LRU_CACHE_CAPACITY": "128",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
"""Default environment variables of the engine processes. The log cannot show the bars of the hub, which need several
lines. The other two set the sizes of two caches, in which torch and oneDNN
store compiled matrix products. In a cache, each combination of a token count and a weight shape has its own entry. With
the default of 1,024 entries, a core that computes float32 on a CPU needed 0.7 GB more memory after some thousand
requests. With 128 entries, it needed only 0.15 GB more, and was as fast."""


async def start(name: str, config_file: Path, run_dir: Path, relay: Callable[[str, str], None]) -> ChildProcess:
    """Start the text process or a core (see `constants.core_names`), which read pod.json; raises OSError if the process
    cannot be created."""
    # A killed process leaves its socket file behind.
    (run_dir / constants.process_socket(name)).unlink(missing_ok=True)
    program, _, number = name.partition("-")
    argv = [sys.executable, "-m", f"quire_engine.{program}", "--config", str(config_file), "--run-dir", str(run_dir)]
    # The core's tensors stay in use, and freeing and allocating their memory again would take time.
    env = core_environment() if program == "core" else ENGINE_ENV | RETURN_MEMORY_ENV | os.environ
    if number:
        argv += ["--name", name]
        env |= visible_devices(PodConfig.load(config_file).engine, int(number), os.environ)
    return await ChildProcess.start(name, argv, relay, env)


def core_environment() -> dict[str, str]:
    """Return the environment of a process that has a part of the model."""
    return ENGINE_ENV | os.environ


def visible_devices(config: EngineConfig, core: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives core number `core` of several cores its own GPUs; nothing if there are none.

    If the environment restricts the GPUs of the pod, the cores divide those.

    Raises:
        ConfigError: there are too few GPUs in CUDA_VISIBLE_DEVICES.
    """
    if config.device != "cuda":
        return {}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(config.num_ranks)]
    if len(devices) < config.num_ranks:
        raise ConfigError(
            f"data_parallel_size: {config.data_parallel_size} cores need {config.num_ranks} GPUs, but "
            f"CUDA_VISIBLE_DEVICES is {visible!r}; use more GPUs, or lower data_parallel_size"
        )
    size = config.ranks_per_core
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[core * size : (core + 1) * size])}


@contextlib.asynccontextmanager
async def connect(name: str, run_dir: Path) -> AsyncIterator[Client]:
    """Connect to a process that is starting. If it does not listen yet, try again until it does."""
    control = Client(run_dir / constants.process_socket(name), Hello("supervisor", pid=os.getpid()), name)
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


async def watch_group_core(control: Client) -> str:
    """Wait until the core of a group of nodes must be killed; return the reason. In addition to what `watch_connection`
    finds, this is a core that was stopped."""
    tasks = [asyncio.create_task(watch(control)) for watch in (watch_connection, _watch_stopped)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def _watch_stopped(control: Client) -> str:
    while True:
        await asyncio.sleep(_STOPPED_INTERVAL_S)
        try:
            await control.call("ping", msgspec.Raw, timeout_s=STOPPED_TIMEOUT_S)
        except ConnectionLost:
            # The other watcher reports it.
            continue
        except Unavailable:
            return f"no response for {STOPPED_TIMEOUT_S:g} s"


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
