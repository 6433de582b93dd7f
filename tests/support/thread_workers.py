# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel workers for tests, as threads: they start at once and use the same ring, sockets and gloo. Also finds
worker processes."""

import os
import threading
from pathlib import Path
from typing import Any

import psutil

from quire_engine.core.engine import Engine
from quire_engine.distributed.worker_handle import WorkerChannels
from quire_engine.executor.rank_worker import RankWorker
from quire_engine.executor.runner_factory import create_runner
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig


class ThreadWorker:
    """A WorkerHandle on a thread. An error of gloo ends its step, as the end of a process does."""

    def __init__(self, channels: WorkerChannels) -> None:
        own_channels = WorkerChannels(
            *(os.dup(fd) for fd in (channels.control_fd, channels.memory_fd, channels.doorbell_fd))
        )
        self._worker = RankWorker(own_channels, on_disconnected=self.kill)
        self._outcome = "returned"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def stored_adapter_digests(self) -> set[str]:
        """Keys of the adapters in host memory, which workers use as digests."""
        runner = self._worker._runner
        assert runner is not None
        return set(runner.adapter_store.digests)

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:
            self._outcome = repr(error)
        self._worker.close_control()

    def kill(self) -> None:
        self._worker.stop()

    def join(self) -> str:
        self._thread.join()
        return self._outcome


def engine_with_thread_workers(config: EngineConfig, **runner_options: Any) -> Engine:
    """Return an engine whose workers are threads; `runner_options` go to create_runner."""
    checkpoint = Checkpoint.load(Path(config.model), full_digest=config.shares_blocks)
    runner = create_runner(
        config, checkpoint.shape, checkpoint.folder, **({"start_worker": ThreadWorker} | runner_options)
    )
    return Engine(config, checkpoint, runner, runner.memory)


def rank_worker_processes(pid: int | None = None) -> list[psutil.Process]:
    """Return the workers that a process, by default this one, has started."""
    children = psutil.Process(pid).children()
    return [child for child in children if any("rank_worker_process" in word for word in _command_line(child))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended, or is a zombie
        return []
