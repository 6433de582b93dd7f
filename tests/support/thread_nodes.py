# SPDX-License-Identifier: Apache-2.0
"""Groups of nodes for tests: each node other than the first is a thread, whose ranks are threads too. They use the same
connections, process groups and rings as nodes on several machines."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nodocker_cluster.ports import free_ports
from support.thread_workers import ThreadWorker, engine_with_thread_workers

from quire_engine.core.engine import Engine
from quire_engine.distributed.worker_handle import WorkerChannels, WorkerHandle
from quire_engine.executor.rank_node import RankNode
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import QuireError


class ThreadNode:
    """A node on a thread."""

    def __init__(
        self,
        config: EngineConfig,
        node_rank: int,
        folder: Path,
        start_worker: Callable[[WorkerChannels], WorkerHandle] = ThreadWorker,
    ) -> None:
        checkpoint = Checkpoint.load(Path(config.model))
        self.node = RankNode(config, checkpoint, node_rank, "127.0.0.1", folder, start_worker)
        self.outcome = ""
        """Why it ended; empty while it runs."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.node.run()
        except QuireError as error:
            self.outcome = str(error)

    def wait(self) -> str:
        """Wait for the end of the node; return the reason."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.outcome


def group_config(config: EngineConfig, nnodes: int, folder: Path) -> EngineConfig:
    """Return the configuration of a group on this machine."""
    key = folder / "rank-key"
    if not key.exists():
        key.touch(0o600)
        key.write_text("k" * 32)
    # Two ports in a row.
    port = next(port for port in free_ports(8) if port % 2)
    config = replace(config, nnodes=nnodes, master_addr="127.0.0.1", rank_port=port, rank_key_file=str(key))
    config.validate()
    return config


@contextlib.contextmanager
def start_engine(
    config: EngineConfig,
    nnodes: int,
    folder: Path,
    node_changes: Mapping[str, Any] = MappingProxyType({}),
    **runner_options: Any,
) -> Iterator[Engine]:
    """Yield an engine whose workers and other nodes are threads. `folder` gets the files of the nodes, whose
    configuration has `node_changes`."""
    if nnodes > 1:
        config = group_config(config, nnodes, folder)
    nodes = [ThreadNode(replace(config, **node_changes), rank, folder) for rank in range(1, config.nnodes)]
    try:
        yield engine_with_thread_workers(config, **runner_options)
    finally:
        for node in nodes:
            node.node.close()
            node.wait()
