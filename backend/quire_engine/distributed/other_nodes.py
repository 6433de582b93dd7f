# SPDX-License-Identifier: Apache-2.0
"""The nodes of a group other than the first, as the first node sees them: it listens for them, compares them with
itself, and then passes steps, calls and files of adapters to their ranks.

A node can join only while the group forms: when all nodes are connected, the first node closes its port. If it loses
one of them, the group has ended, and the process of rank 0 ends too. So a node that was away joins the next group, and
there is never a group with nodes of several generations.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quire_engine.distributed.node_connection import NodeConnection, NodeVisit
from quire_engine.distributed.rank_relay import RankRelay
from quire_engine.distributed.rendezvous import Rendezvous, serve_store
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, QuireError, Unavailable
from quire_spec.net.listener import listen
from quire_spec.protocol import rank_wire, shared_key
from quire_spec.protocol.rank_wire import FileChunk, FileReceipt, Generation, Kind, Node

MAX_VISITORS = 32
MAX_ADDRESS_VISITORS = 4
"""Maximum number of connections from one address that have not been accepted yet."""
KEY_FIELD = "rank_key_file"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_RECEIPT_BYTES = 4096

logger = logging.getLogger(__name__)


class OtherNodes:
    """The other nodes of a group. `start_worker` must be called for each of their ranks; then they can connect."""

    def __init__(self, config: EngineConfig, own: Node, host: str) -> None:
        """Listen on `host`, and on the port of the configuration. `own` is what the first node claims about itself.

        Raises:
            ConfigError: the key cannot be read, or the ports cannot be used.
        """
        assert config.rank_key_file is not None
        self._own, self._key_file = own, Path(config.rank_key_file)
        self._ranks_per_node = config.ranks_per_node
        self._seats = {index: _Seat(index) for index in range(1, config.nnodes)}
        try:
            shared_key.read_key(self._key_file, KEY_FIELD)
        except Unavailable as error:
            raise ConfigError(str(error)) from error
        self._listener = listen(host, config.rank_port, "rank_port")
        try:
            self._store_listener = listen(host, config.rank_port + 1, "rank_port + 1 =")
        except ConfigError:
            self._listener.close()
            raise
        self._store_port = config.rank_port + 1
        self._store: object = None
        self.generation = 0
        """Number of the group; 0 while it forms."""
        self._visitors = Counter[str]()
        self._lock = threading.Lock()

    def start_worker(self, rank: int, control: socket.socket) -> "RemoteWorker":
        """Return the worker of a rank on another node, which can connect later. `control` is its socket for calls."""
        seat = self._seats[rank // self._ranks_per_node]
        seat.controls[rank] = control.dup()
        if sum(len(seat.controls) for seat in self._seats.values()) == len(self._seats) * self._ranks_per_node:
            threading.Thread(target=self._accept, name="node-accept", daemon=True).start()
        return RemoteWorker(seat)

    @property
    def addresses(self) -> list[str]:
        """IP address of each other node, from node 1. All nodes must be connected."""
        return [seat.require_connection().peer for seat in self._seats.values()]

    def rendezvous(self, rank: int) -> Rendezvous:
        """Return where a rank of any node meets the others. All nodes must be connected."""
        if self._store is None:
            self._store = serve_store(self._store_listener)
        own_address = self._seats[1].require_connection().address
        seat = self._seats.get(rank // self._ranks_per_node)
        address = own_address if seat is None else seat.require_connection().peer
        return Rendezvous("", own_address, self._store_port, self.generation, address)

    def send_step(self, row: memoryview) -> None:
        """Send the input of a step to all nodes; raises OSError if one has ended."""
        for seat in self._seats.values():
            seat.require_connection().send(Kind.STEP, 0, row)

    def send_adapter(self, key: int, folders: Sequence[Path]) -> None:
        """Send the files of an adapter to all nodes, chunk by chunk.

        Raises:
            Unavailable: a file could not be read, or not be written by a node, or a node has ended.
        """
        seats = list(self._seats.values())
        for seat in seats:
            seat.receipts[key] = queue.SimpleQueue()
        try:
            for chunk in _iter_chunks(key, folders):
                payload = rank_wire.encode(chunk)
                for seat in seats:
                    seat.require_connection().send(Kind.FILE, 0, payload)
                for seat in seats:
                    if error := seat.receipts[key].get():
                        raise Unavailable(f"node {seat.index}: {error}")
        except OSError as error:
            raise Unavailable(f"files of an adapter could not be sent to the other nodes: {error}") from error
        finally:
            for seat in seats:
                del seat.receipts[key]

    def close(self) -> None:
        """Stop to listen, and end all connections. Safe to call from any thread."""
        self._stop_listening()
        self._store_listener.close()
        self._store = None
        for seat in self._seats.values():
            seat.close()

    def _stop_listening(self) -> None:
        # This also wakes the thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        """Accept connections until the group is complete."""
        while True:
            try:
                visitor, address = self._listener.accept()
            except OSError:
                return
            if self._visitors.total() >= MAX_VISITORS or self._visitors[address[0]] >= MAX_ADDRESS_VISITORS:
                visitor.close()
                continue
            with self._lock:
                self._visitors[address[0]] += 1
            threading.Thread(target=self._admit, args=(visitor, address[0]), name="node-admit", daemon=True).start()

    def _admit(self, visitor: socket.socket, address: str) -> None:
        """Seat a node that has the key and agrees with the first one."""
        try:
            connection = NodeConnection(visitor)
            visit = connection.challenge(shared_key.read_key(self._key_file, KEY_FIELD))
            if not self._seat(visit):
                connection.close()
        except (OSError, QuireError) as error:
            logger.warning("a connection to the rank port was refused address=%s error=%s", address, error)
            visitor.close()
        finally:
            with self._lock:
                self._visitors[address] -= 1

    def _seat(self, visit: NodeVisit) -> bool:
        """Answer a node; return whether it has joined."""
        with self._lock:
            seat = self._seats.get(visit.node.node_rank)
            problem = self._own.difference(visit.node)
            if not problem and seat is None:
                problem = f"node rank {visit.node.node_rank}: must be from 1 to {len(self._seats)}"
            elif not problem and seat is not None and seat.is_taken:
                problem = f"node rank {visit.node.node_rank}: another node has it, or had it a moment ago"
            visit.answer(problem)
            if problem:
                logger.warning("node refused address=%s reason=%s", visit.connection.peer, problem)
                return False
            assert seat is not None
            seat.take(visit)
            logger.info("node connected node_rank=%d address=%s", seat.index, visit.connection.peer)
            if all(seat.is_taken for seat in self._seats.values()):
                self._start_generation()
            return True

    def _start_generation(self) -> None:
        self._stop_listening()
        self.generation = 1 + max(seat.last_generation for seat in self._seats.values())
        logger.info("all nodes are connected generation=%d", self.generation)
        message = rank_wire.encode(Generation(self.generation))
        for seat in self._seats.values():
            with contextlib.suppress(OSError, Unavailable):
                seat.require_connection().send(Kind.GENERATION, 0, message)


class RemoteWorker:
    """A WorkerHandle of a rank on another node."""

    def __init__(self, seat: "_Seat") -> None:
        self._seat = seat

    def kill(self) -> None:
        """See WorkerHandle. All ranks of the node end."""
        self._seat.close()

    def join(self) -> str:
        """See WorkerHandle."""
        return f"node {self._seat.index}: {self._seat.wait_ended()}"


class _Seat:
    """One of the other nodes, connected or not."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.controls: dict[int, socket.socket] = {}
        """The socket of each rank of the node, by its number. The worker group has the other end."""
        self.receipts: dict[int, queue.SimpleQueue[str]] = {}
        """Errors of chunks, by the key of the adapter that is being sent; empty if a chunk was written."""
        self.last_generation = 0
        self._connection: NodeConnection | None = None
        self._reason = ""
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def is_taken(self) -> bool:
        """Whether a node has connected, or the group has ended."""
        return self._connection is not None or self._ended.is_set()

    def require_connection(self) -> NodeConnection:
        """Return the connection; raises Unavailable if the node has ended or is not connected."""
        if self._connection is None or self._ended.is_set():
            raise Unavailable(f"node {self.index} is not connected")
        return self._connection

    def take(self, visit: NodeVisit) -> None:
        """Start to pass frames between the node and the worker group."""
        with self._lock:
            self._connection, self.last_generation = visit.connection, visit.node.generation
            if self._ended.is_set():
                visit.connection.close()
                return
        relay = _NodeRelay(visit.connection, self.controls, self.receipts)
        threading.Thread(target=self._run, args=(relay,), name=f"node-{self.index}", daemon=True).start()

    def close(self) -> None:
        """End the connection. Safe to call from any thread."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            elif not self._ended.is_set():
                self._end("was not connected")

    def wait_ended(self) -> str:
        """Wait for the end of the connection; return the reason."""
        self._ended.wait()
        return self._reason

    def _run(self, relay: RankRelay) -> None:
        reason = relay.run()
        with self._lock:
            self._end(f"{relay.connection.peer}: {reason}")

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._ended.set()
        for receipts in list(self.receipts.values()):
            receipts.put(reason)
        for control in self.controls.values():
            control.close()


class _NodeRelay(RankRelay):
    """The relay of the first node."""

    def __init__(
        self,
        connection: NodeConnection,
        controls: Mapping[int, socket.socket],
        receipts: Mapping[int, "queue.SimpleQueue[str]"],
    ) -> None:
        super().__init__(connection, controls, {Kind.RECEIPT: _RECEIPT_BYTES})
        self._receipts = receipts

    def on_frame(self, kind: Kind, rank: int, length: int) -> None:
        """Pass a receipt to the thread that sends the adapter."""
        receipt = rank_wire.decode(FileReceipt, self.connection.receive(length))
        if (receipts := self._receipts.get(receipt.key)) is not None:
            receipts.put(receipt.error)


def _iter_chunks(key: int, folders: Sequence[Path]) -> Iterator[FileChunk]:
    """Yield the files that the engine reads from the folders of an adapter; raises OSError. A file that is missing is
    left out, so that the other node reports the same error as this one."""
    for index, folder in enumerate(folders):
        for name in _ADAPTER_FILES:
            if not (folder / name).is_file():
                continue
            with (folder / name).open("rb") as file:
                yield FileChunk(key, index, name, b"")
                while data := file.read(rank_wire.FILE_CHUNK_BYTES):
                    yield FileChunk(key, index, name, data)
