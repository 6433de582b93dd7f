# SPDX-License-Identifier: Apache-2.0
"""A node of a group other than the first: it joins the group, starts the workers of its ranks, and passes them what the
first node sends. The workers do not know that rank 0 is on another machine.

    first node ==TCP== RankNode --ring: input of a step--> worker of each rank
                                --socket: calls---------->

A node belongs to one group. If it loses the first node or one of its workers, it ends, and its process ends too.
"""

import contextlib
import json
import logging
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from quire_engine.distributed.node_connection import NodeConnection
from quire_engine.distributed.rank_relay import RankRelay, RelayEnded
from quire_engine.distributed.shm_ring import ELEMENT_BYTES, Doorbell, SharedMemoryRing, notify_all
from quire_engine.distributed.worker_handle import WorkerChannels, WorkerHandle, WorkerProcess
from quire_engine.executor.node_identity import node_identity
from quire_engine.executor.node_rows import CALLS, FOLDER_CALLS, NodeRows
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import Internal, QuireError
from quire_spec.protocol import rank_wire, shared_key
from quire_spec.protocol.protocol_error import ProtocolError
from quire_spec.protocol.rank_wire import FileChunk, FileReceipt, Generation, Kind
from quire_spec.protocol.results import NodeStatus, SharedRows

_CONNECT_TIMEOUT_S = 3.0
_CONNECT_INTERVAL_S = 0.1
"""Seconds between two attempts to connect to a first node that does not listen, because it is starting."""
_LOG_INTERVAL_S = 30.0
_MAX_ROW_BYTES = 1 << 30
_GENERATION_BYTES = 64

logger = logging.getLogger(__name__)


class RankNode:
    """The ranks of one node, in one group."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        node_rank: int,
        leader: str,
        folder: Path,
        start_worker: Callable[[WorkerChannels], WorkerHandle] = WorkerProcess,
        join_at: float = 0.0,
    ) -> None:
        """Create a node that is not connected.

        Args:
            config: the same as on the first node.
            checkpoint: the model on this machine.
            node_rank: number of this node, from 1.
            leader: name or address of the first node.
            folder: where files of adapters are kept while they are read, and the number of the last generation.
            start_worker: starts a worker; tests replace it.
            join_at: monotonic seconds before which it does not connect to the first node.
        """
        self._config, self._checkpoint, self._node_rank, self._leader = config, checkpoint, node_rank, leader
        self._folder, self._start_worker = folder, start_worker
        self._generation_file = folder / f"generation-{node_rank}"
        self._join_at = join_at
        self._rows = NodeRows(config, node_rank) if config.shares_blocks else None
        self._relay: _RankRelay | None = None
        self._is_closing = False

    def status(self) -> NodeStatus:
        """Return the state for the supervisor."""
        relay = self._relay
        if relay is None:
            return NodeStatus("connecting", self._last_generation())
        return NodeStatus("ready" if relay.is_serving else "loading", relay.generation)

    def shared_rows(self) -> SharedRows | None:
        """Return where another process of this user finds the rows of host memory; None while they are not shared."""
        relay = self._relay
        return None if relay is None or self._rows is None else self._rows.shared_rows(relay.generation)

    def run(self) -> str:
        """Join a group, and compute until it ends; return the reason.

        Raises:
            QuireError: the node cannot join: the key cannot be read, or the first node refuses it.
        """
        assert self._config.rank_key_file is not None
        key = shared_key.read_key(Path(self._config.rank_key_file), "rank_key_file")
        adapters = self._folder / f"rank-adapters-{self._node_rank}"
        shutil.rmtree(adapters, ignore_errors=True)
        size = self._config.ranks_per_node
        ranks = range(self._node_rank * size, (self._node_rank + 1) * size)
        # They import torch while the first node starts.
        workers = _Workers(ranks, self._start_worker)
        try:
            generation = self._last_generation()
            connection = self._join(key, generation)
            self._relay = relay = _RankRelay(
                connection, workers, self._checkpoint.folder, adapters, generation, self._keep_generation, self._rows
            )
            if self._is_closing:
                connection.close()
            return relay.run()
        finally:
            workers.end()
            shutil.rmtree(adapters, ignore_errors=True)

    def close(self) -> None:
        """Make `run` return. Safe to call from any thread."""
        self._is_closing = True
        if self._relay is not None:
            self._relay.connection.close()

    def _join(self, key: bytes, generation: int) -> NodeConnection:
        """Return a connection to the first node, which has accepted this one."""
        connection = self._connect()
        try:
            connection.introduce(key, node_identity(self._config, self._checkpoint, self._node_rank, generation))
        except (OSError, QuireError) as error:
            connection.close()
            raise ProtocolError("handshake", f"{self._leader} port {self._config.rank_port}: {error}") from error
        logger.info("joined node_rank=%d leader=%s", self._node_rank, connection.peer)
        return connection

    def _connect(self) -> NodeConnection:
        """Connect to the first node as soon as it listens."""
        time.sleep(max(0.0, self._join_at - time.monotonic()))
        log_at = time.monotonic()
        while True:
            if self._is_closing:
                raise ProtocolError("closed", "the node was closed")
            try:
                address = self._leader, self._config.rank_port
                connected = socket.create_connection(address, _CONNECT_TIMEOUT_S)
                connected.settimeout(None)
                return NodeConnection(connected)
            except OSError as error:
                if time.monotonic() >= log_at:
                    logger.info("waiting for the first node address=%s:%d error=%s", *address, error)
                    log_at += _LOG_INTERVAL_S
                time.sleep(_CONNECT_INTERVAL_S)

    def _last_generation(self) -> int:
        try:
            return int(self._generation_file.read_text())
        except (OSError, ValueError):
            return 0

    def _keep_generation(self, generation: int) -> None:
        part = self._generation_file.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(str(generation))
            part.replace(self._generation_file)
        except OSError as error:
            raise RelayEnded(f"{self._generation_file}: {error.strerror}") from error


class _Workers:
    """The workers of the ranks of this node."""

    def __init__(self, ranks: range, start_worker: Callable[[WorkerChannels], WorkerHandle]) -> None:
        """The thread that creates this object must live as long as the workers; see WorkerProcess."""
        self.controls: dict[int, socket.socket] = {}
        self.handles: dict[int, WorkerHandle] = {}
        self._memory_fd = os.memfd_create("quire-ring")
        self._eventfds = [os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in ranks]
        self.doorbells = [Doorbell(fd) for fd in self._eventfds]
        for rank, eventfd in zip(ranks, self._eventfds, strict=True):
            self.controls[rank], worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with worker_socket:
                channels = WorkerChannels(worker_socket.fileno(), self._memory_fd, eventfd)
                self.handles[rank] = start_worker(channels)

    def create_ring(self, num_elements: int, num_rows: int) -> SharedMemoryRing:
        """Create the ring of the steps, with as many rows as that of the first node."""
        SharedMemoryRing.allocate(self._memory_fd, num_elements, num_rows)
        return SharedMemoryRing(self._memory_fd, num_elements, num_rows)

    def end(self) -> None:
        """Kill the workers and wait for their end."""
        for handle in self.handles.values():
            handle.kill()
        for handle in self.handles.values():
            handle.join()
        for control in self.controls.values():
            control.close()
        for fd in (self._memory_fd, *self._eventfds):
            os.close(fd)


class _RankRelay(RankRelay):
    """The relay of a node: it also writes steps into the ring, and files of adapters to a folder."""

    def __init__(
        self,
        connection: NodeConnection,
        workers: _Workers,
        model_folder: Path,
        adapters: Path,
        last_generation: int,
        keep_generation: Callable[[int], None],
        rows: NodeRows | None,
    ) -> None:
        super().__init__(
            connection, workers.controls, {Kind.FILE: rank_wire.MAX_FILE_BYTES, Kind.GENERATION: _GENERATION_BYTES}
        )
        self.is_serving = False
        self.generation = last_generation
        self._workers, self._model_folder, self._keep_generation = workers, model_folder, keep_generation
        self._rows = rows
        self._ring: SharedMemoryRing | None = None
        self._serve_id: object = None
        self._unserved = set(workers.controls)
        self._files = _AdapterFiles(adapters, self._send_receipt)
        # The ranks that still read an adapter, by the id of the call, and the key of the adapter.
        self._readers: dict[object, tuple[int, set[int]]] = {}

    def on_call(self, rank: int, call: bytes) -> None:
        """Pass a call to a rank. Folders and files of the first node are replaced by those of this one."""
        document = _parse(call)
        if (name := document.get("call")) in CALLS and self._rows is not None:
            self._rows.prepare(document)
            if name in FOLDER_CALLS:
                self._start_folder_call(rank, document)
            elif name != "end_read":
                threading.Thread(target=self._run_row_call, args=(rank, document), name=name, daemon=True).start()
            return
        match name:
            case "load":
                document["folder"] = str(self._model_folder)
                document["row_file"] = None if self._rows is None else self._rows.file.path
            case "serve":
                if self._ring is None:
                    num_elements, num_rows = int(document["num_elements"]), int(document["num_rows"])
                    row_bytes = num_elements * ELEMENT_BYTES
                    if not 0 < row_bytes <= _MAX_ROW_BYTES or not 0 < num_rows <= rank_wire.MAX_CALL_BYTES:
                        raise ProtocolError("protocol", f"a ring of {num_rows} rows of {row_bytes} bytes")
                    self._ring = self._workers.create_ring(num_elements, num_rows)
                    self.limits[Kind.STEP] = row_bytes
                self._serve_id = document["id"]
            case "read_adapter":
                key, folders = int(document["key"]), document["folders"]
                local = [self._files.folder(key, index) for index in range(len(folders))]
                document["folders"] = [[str(path), weight] for path, (_, weight) in zip(local, folders, strict=True)]
                self._readers.setdefault(document["id"], (key, set(self.controls)))
        self.controls[rank].send(json.dumps(document).encode())

    def on_local_call(self, rank: int, call: bytes) -> None:
        """Pass the reply of a rank."""
        reply = _parse(call)
        if reply["id"] == self._serve_id and reply["error"] is None:
            self._unserved.discard(rank)
            self.is_serving = not self._unserved
        if (reader := self._readers.get(reply["id"])) is not None:
            key, ranks = reader
            ranks.discard(rank)
            if not ranks:
                del self._readers[reply["id"]]
                self._files.remove(key)
        super().on_local_call(rank, call)

    def _run_row_call(self, rank: int, document: dict[str, Any]) -> None:
        """Answer a call about rows of host memory."""
        assert self._rows is not None
        try:
            self._send_value(rank, document, self._rows.run(document))
        except Exception as failure:
            self._send_failure(rank, document, failure)

    def _start_folder_call(self, rank: int, document: dict[str, Any]) -> None:
        """Start a transfer between rows and the folder of this node. A thread of the folder answers the call."""
        assert self._rows is not None
        try:
            self._rows.start_transfer(document, partial(self._send_value, rank, document))
        except Exception as failure:
            self._send_failure(rank, document, failure)

    def _send_failure(self, rank: int, document: dict[str, Any], failure: Exception) -> None:
        is_expected = isinstance(failure, QuireError)
        text = str(failure) if is_expected else f"{type(failure).__name__}: {failure}"
        code = failure.code if isinstance(failure, QuireError) else Internal.code
        error = [code.value, text[:1000]]
        logger.error("call failed call=%s error=%s", document["call"], text, exc_info=None if is_expected else failure)
        self._send_value(rank, document, 0, error)

    def _send_value(self, rank: int, document: dict[str, Any], value: object, error: list[str] | None = None) -> None:
        reply = {"id": document["id"], "error": error, "value": value}
        with contextlib.suppress(OSError):
            self.connection.send(Kind.CALL, rank, json.dumps(reply).encode())

    def on_local_end(self, rank: int) -> NoReturn:
        """A worker has ended, and with it the node."""
        raise RelayEnded(f"rank {rank} ended: {self._workers.handles[rank].join()}")

    def on_frame(self, kind: Kind, rank: int, length: int) -> None:
        """Receive a step, a part of a file, or the number of the generation."""
        if kind is Kind.STEP:
            assert self._ring is not None, "a step has a limit of 0 bytes before the call serve"
            self.connection.receive_into(self._ring.next_row()[:length])
            notify_all(self._workers.doorbells)
        elif kind is Kind.FILE:
            self._files.put(rank_wire.decode(FileChunk, self.connection.receive(length)))
        else:
            number = rank_wire.decode(Generation, self.connection.receive(length)).number
            if number <= self.generation:
                raise RelayEnded(f"generation {number} is not above {self.generation}, the last one of this node")
            self._keep_generation(number)
            self.generation = number
            logger.info("generation=%d", number)

    def _send_receipt(self, receipt: FileReceipt) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(Kind.RECEIPT, 0, rank_wire.encode(receipt))


class _AdapterFiles:
    """Writes files of adapters in a thread of its own, because a disk can be slow and steps must not wait for it."""

    def __init__(self, root: Path, send_receipt: Callable[[FileReceipt], None]) -> None:
        self._root, self._send_receipt = root, send_receipt
        # The first node waits for each chunk's receipt, so that there is at most one of each adapter.
        self._chunks: queue.SimpleQueue[FileChunk | int] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapter-files", daemon=True).start()

    def folder(self, key: int, index: int) -> Path:
        """Return the folder of a part of an adapter."""
        return self._root / str(key) / str(index)

    def put(self, chunk: FileChunk) -> None:
        """Write a chunk later, and send a receipt then."""
        self._chunks.put(chunk)

    def remove(self, key: int) -> None:
        """Remove the files of an adapter later."""
        self._chunks.put(key)

    def _run(self) -> None:
        while True:
            chunk = self._chunks.get()
            if isinstance(chunk, int):
                shutil.rmtree(self._root / str(chunk), ignore_errors=True)
                continue
            error = ""
            path = self.folder(chunk.key, chunk.folder) / chunk.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab" if chunk.data else "wb") as file:
                    file.write(chunk.data)
            except OSError as failure:
                error = f"{path}: {failure.strerror or failure}"[:1000]
            self._send_receipt(FileReceipt(chunk.key, error))


def _parse(call: bytes) -> dict[str, Any]:
    try:
        document = json.loads(call)
        if isinstance(document, dict):
            return document
    except (ValueError, RecursionError):
        pass
    raise ProtocolError("protocol", f"a call is no JSON object: {call[:80]!r}")
