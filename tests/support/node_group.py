# SPDX-License-Identifier: Apache-2.0
"""Nodes, each a network namespace with its own `quire serve` of the example, which serve one model. Needs root."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from support.node_namespaces import NodeNamespace, node_namespaces
from support.quire_serve import QuireServeProcess, command_line, example_document

STORY = "Once upon a time"
MODELS = ("tales", "pirate", "sql")
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "health": 8003, "openai": 8004}


class Group:
    """Nodes with their services. Each has a stage of `num_ranks` tensor-parallel ranks."""

    def __init__(
        self,
        nodes: list[NodeNamespace],
        folder: Path,
        num_ranks: int = 1,
        flags: Sequence[str] = (),
        engine: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start the services with further options, and with further fields of spec.engine."""
        self.nodes, self.folder, self.num_ranks = nodes, folder, num_ranks
        self.flags, self.engine = flags, engine
        self.key = write_key(folder / "key")
        self.services: list[QuireServeProcess] = [self.start(rank) for rank in range(len(nodes))]

    def start(self, rank: int, name: str = "", key: Path | None = None, model: Path | None = None) -> QuireServeProcess:
        """Start the service of a node in the folder `name`."""
        document = example_document()
        document["spec"]["engine"] |= {"tensorParallelSize": self.num_ranks, **self.engine}
        if model is not None:
            document["spec"]["model"]["source"]["path"] = str(model)
        folder = self.folder / (name or f"node{rank}")
        folder.mkdir(exist_ok=True)
        node = self.nodes[rank]
        flags = [*self.flags, *(f"--{option}={len(self.nodes)}" for option in ("pipeline-parallel-size", "nnodes"))]
        flags += [f"--node-rank={rank}", f"--master-addr={self.nodes[0].address}", f"--rank-key-file={key or self.key}"]
        program = node.wrapper(folder, Path(sys.executable).with_name("quire"))
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return QuireServeProcess(
            document, folder, *flags, host=node.address, ports=dict(PORTS), env=env, program=program
        )

    @property
    def leader(self) -> QuireServeProcess:
        return self.services[0]

    @property
    def worker(self) -> QuireServeProcess:
        return self.services[1]

    def wait_ready(self) -> float:
        """Wait until all nodes are ready, and all models answer; return the seconds."""
        started = time.monotonic()
        for service in self.services:
            service.wait_ready(120)
        assert all(self.leader.text(model, STORY, max_tokens=2) for model in MODELS)
        return time.monotonic() - started

    def end(self) -> None:
        """Kill what still runs."""
        for service in self.services:
            if service.process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    service.kill()
                    service.assert_nothing_left()
            service.clean_up()

    def processes(self, rank: int, module: str) -> list[psutil.Process]:
        """Return the processes of a node that run a module."""
        children = self.services[rank].child_processes()
        return [child for child in children if any(word.endswith(module) for word in command_line(child))]


def write_key(path: Path, character: str = "k") -> Path:
    path.touch(0o600)
    path.write_text(character * 32)
    return path


@contextlib.contextmanager
def running_group(folder: Path, num_nodes: int = 2, num_ranks: int = 1) -> Iterator[Group]:
    """Start nodes, which need not be ready yet, and kill at the end what still runs."""
    with node_namespaces(num_nodes) as nodes:
        group = Group(nodes, folder, num_ranks)
        try:
            yield group
        finally:
            group.end()
