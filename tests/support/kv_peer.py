# SPDX-License-Identifier: Apache-2.0
"""The server of KV blocks of an engine of this process, in a thread of its own."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire_engine.core.engine import Engine
from quire_server.kv_peer.core_rows import Rows, _map, state_rows
from quire_server.kv_peer.first_node import FirstNode
from quire_server.kv_peer.server import KVPeerServer
from quire_spec.protocol.kv_wire import RowLayout


class EngineRows:
    """Rows of an engine that no other thread uses while peers ask. Stands for CoreRows, which talks to a core
    process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory = _map(engine.shared_rows())
        self.damaged = False
        self.generation, self.nodes = 0, list[str]()

    def rows(self) -> Rows:
        assert self._engine.row_layout is not None
        shared = self._engine.shared_rows()
        return Rows(self._memory[: shared.num_rows * shared.row_bytes], shared.row_bytes)

    @property
    def layout(self) -> RowLayout | None:
        return self._engine.row_layout

    async def lease(self, lease: bytes, keys: Sequence[bytes]) -> list[tuple[int, memoryview] | None]:
        rows, layout = self._engine.lease_rows(lease, list(keys)), self._engine.row_layout
        assert layout is not None
        size = layout.row_bytes
        return [None if row is None else (row, self._memory[row * size : (row + 1) * size]) for row in rows]

    async def lease_state(self, lease: bytes, keys: Sequence[bytes], first: int) -> tuple[int, int, memoryview] | None:
        found = self._engine.lease_state(lease, list(keys), first)
        states = state_rows(self._memory, self._engine.shared_rows())
        if found is None:
            return None
        assert states is not None
        return *found, states[found[1]]

    async def extend(self, lease: bytes) -> bool:
        return self._engine.extend_leases([lease]) == [True]

    async def release(self, leases: Sequence[bytes]) -> None:
        assert self._engine.leases is not None
        self._engine.leases.release(leases)


class PeerServer:
    """A running server. `close` ends it and its connections."""

    def __init__(
        self, engine: Engine, key_file: Path, bytes_per_second: int | None = None, first_node: str = ""
    ) -> None:
        """`first_node` is the address of the server of node 0 if this is the one of node 1. Its rows are those of the
        same engine, because a row has the same number on all nodes."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        rows: Any = EngineRows(engine)
        self.rows = rows
        self._first_node: FirstNode | None = None
        if first_node:
            host, port = first_node.split(":")
            self._first_node = FirstNode(host, int(port), key_file, lambda: engine.row_layout)
        self.server = KVPeerServer(
            [rows], key_file, bytes_per_second, self._first_node, node_rank=1 if first_node else 0
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._task = self._loop.create_task(self.server.run(self._listener))
        self._loop.run_until_complete(self._until_closed())
        self._loop.close()

    async def _until_closed(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        if self._first_node is not None:
            self._first_node.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._task.cancel())
        self._thread.join(30)
        self._listener.close()
