# SPDX-License-Identifier: Apache-2.0
"""Server of the core process: accepts connections of the text process and of supervisors.

The server runs asyncio in the main thread. The engine runs in the compute thread (see engine_loop). All results of a
step are sent in one small message, so one thread can serve all peers while the next step runs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from quire_engine.core.adapter_verifier import AdapterVerifier
from quire_engine.core.compute_thread import ComputeThread
from quire_engine.core.engine import Engine, slot_copy_error
from quire_engine.core.engine_loop import EngineLoop
from quire_engine.core.grammar_queue import GrammarQueue
from quire_engine.ipc import process
from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.kv_events.publisher import KVEventPublisher
from quire_engine.lora.adapter_source import AdapterSource
from quire_engine.lora.io_threads import AdapterIOThreads, run_in_background
from quire_engine.step.plan import SlotLoad
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_catalog import Canary
from quire_spec.documents.pod_status import utc_now
from quire_spec.errors import PROCESS_ENDS, Internal, QuireError
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import AbortSequences, Message, SequenceRequest, StepResult
from quire_spec.protocol.results import AdapterCheck, CoreStatus, SharedRows, UncachedPrompt
from quire_spec.protocol.server import Server

MAX_UNSENT_BYTES = 256 * 2**20
"""Maximum number of bytes of unsent results. This is the output of several minutes under full load. If the unread
results of a text process exceed this limit, the process is considered to hang, and its connection is aborted. This ends
the sequences of the text process, and then the health checks of the supervisor fail.
"""

_LEASE_BLOCKS = 64
"""A lease copies at most this many blocks between two steps."""
_LEASE_CHECK_S = 1.0
logger = logging.getLogger(__name__)


class CoreServer(Server):
    """Handler of all connections of the core process."""

    def __init__(
        self, engine: Engine, compute_thread: ComputeThread, event_publisher: KVEventPublisher | None = None
    ) -> None:
        """Create the server for an engine.

        Args:
            engine: the engine.
            compute_thread: the thread that has loaded the engine.
            event_publisher: publishes the events of cached blocks.
        """
        super().__init__(
            (
                *(self.load_adapter, self.verify_adapter, self.unload_adapter, self.set_adapter_names, self.status),
                *(self.check, self.ping, self.live, self.block_hasher, self.uncached_prompt),
                *(() if engine.leases is None else self._lease_methods()),
            ),
            (SequenceRequest, AbortSequences),
        )
        self._engine = engine
        self._compute_thread = compute_thread
        self._event_loop = asyncio.get_running_loop()
        self._started_at = utc_now()
        self._event_publisher = event_publisher
        self._engine_loop = EngineLoop(
            *(engine, self._publish, self._on_adapter_needed, self._on_slot_copy, self._on_image, event_publisher),
            report_blocks=engine.config.data_parallel_size > 1,
        )
        self._verifier = AdapterVerifier(engine, self._engine_loop)
        self._io_threads = AdapterIOThreads()
        self._grammar_queue = GrammarQueue(engine.input_processor.grammar_compiler, self._engine_loop.generate)
        self._text_connection: Connection | None = None
        self._kv_peer: Connection | None = None
        self._has_lease_timer = False
        self._client_ids = count(1)
        self._client_id = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, socket_path: Path) -> None:
        """Serve forever."""
        self._compute_thread.run_forever(self._engine_loop.run)
        self._grammar_queue.warm_up()
        server = await self.listen(socket_path)
        logger.info("engine core listens path=%s", socket_path)
        await server.serve_forever()

    def on_connected(self, connection: Connection) -> None:
        """Called when a peer has sent its role. A new text process replaces the previous one."""
        assert connection.peer is not None, "only accepted connections have this handler"
        role = connection.peer.role
        if role not in ("text", "supervisor", "kv_peer"):
            raise Internal(f"role: {role!r} is not accepted; connect as text, supervisor or kv_peer")
        logger.info("connected role=%s pid=%s", role, connection.peer.pid)
        if role == "text":
            if self._text_connection is not None:
                self._text_connection.abort()
            self._text_connection, self._client_id = connection, next(self._client_ids)
            self._engine_loop.attach_client(self._client_id)
        if role == "kv_peer":
            self._kv_peer = connection
            self._release_all_leases()

    def on_request(self, connection: Connection, message: Message) -> None:
        """Called for each message of the text process that is not a call."""
        from_text = connection is self._text_connection
        if from_text and isinstance(message, SequenceRequest):
            self._grammar_queue.start_when_compiled(self._client_id, message)
        elif from_text and isinstance(message, AbortSequences):
            self._grammar_queue.abort(message.ids)
            self._engine_loop.abort(self._client_id, message.ids)
        else:
            super().on_request(connection, message)

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        if connection is self._text_connection:
            logger.warning("text process disconnected")
            self._text_connection = None
            self._engine_loop.detach_client(self._client_id)
        if connection is self._kv_peer:
            logger.warning("kv peer disconnected")
            self._kv_peer = None
            self._release_all_leases()

    def _publish(self, client_id: int, result: StepResult) -> None:
        """Send a result to its client; called in the compute thread."""
        self._event_loop.call_soon_threadsafe(self._send_result, client_id, result)

    def _send_result(self, client_id: int, result: StepResult) -> None:
        if self._text_connection is None or client_id != self._client_id:
            return
        self._text_connection.send(result)
        if self._text_connection.unsent_bytes > MAX_UNSENT_BYTES:
            logger.error(
                "text process disconnected: it does not read results unsent_bytes=%d",
                self._text_connection.unsent_bytes,
            )
            self._text_connection.abort()

    def _on_adapter_needed(self, digest: AdapterDigest, source: AdapterSource) -> None:
        """Start to read an adapter; called in the compute thread."""
        self._event_loop.call_soon_threadsafe(lambda: self._start_task(self._reload_adapter(digest, source)))

    def _on_slot_copy(self, slot_load: SlotLoad, copy: Callable[[], None]) -> None:
        """Start to copy an adapter into a slot; called in the compute thread."""
        self._event_loop.call_soon_threadsafe(lambda: self._start_task(self._copy_to_slot(slot_load, copy)))

    def _on_image(self, encode: Callable[[], object]) -> None:
        """Start to encode an image; called in the compute thread."""
        self._event_loop.call_soon_threadsafe(lambda: self._start_task(self._encode_image(encode)))

    def _start_task(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        # If the task failed, result() raises its exception again. The event loop's exception handler then ends the
        # process.
        task.result()

    # Methods that clients can call.

    async def load_adapter(self, digest: AdapterDigest, path: str, pinned: bool = False) -> None:
        """Register an adapter and read it from the folder `path`. A pinned adapter keeps its slot."""
        await self._read_and_add_adapter(digest, Path(path), pinned)
        logger.info("adapter loaded digest=%s pinned=%s", digest, pinned)

    async def verify_adapter(self, digest: AdapterDigest, path: str, canary: Canary | None = None) -> AdapterCheck:
        """Check a loaded adapter in the steps of the engine: its effect, and its canary if it has one."""
        check = await self._verifier.verify(digest, Path(path), canary)
        logger.info("adapter verified digest=%s effect=%g", digest, check.effect)
        return check

    async def unload_adapter(self, digest: AdapterDigest) -> None:
        """Remove an adapter."""
        await self._run_on_engine_thread(lambda: self._engine.remove_adapter(digest))
        logger.info("adapter unloaded digest=%s", digest)

    def set_adapter_names(self, adapters: dict[AdapterName, AdapterDigest]) -> None:
        """Set the digest of each adapter name. Only subscribers of KV events know adapters by their names."""
        if self._event_publisher is not None:
            self._event_publisher.set_adapter_names(adapters)

    def ping(self) -> None:
        """Answer at once, also while a step runs."""

    async def status(self) -> CoreStatus:
        """Return the memory, the adapters and the state of the scheduler."""
        adapters, stats = await self._run_on_engine_thread(
            lambda: (self._engine.adapter_states(), self._engine.stats())
        )
        return CoreStatus(self._started_at, self._engine.memory, adapters, stats)

    async def live(self) -> dict[str, Any]:
        """Return the state that the live page shows."""
        snapshot: dict[str, Any] = await self._run_on_engine_thread(self._engine.live_snapshot)
        return snapshot

    def block_hasher(self) -> BlockHasher:
        """Return the parameters with which the text process can hash the blocks of a prompt."""
        return self._engine.block_hasher

    async def uncached_prompt(self, request: SequenceRequest) -> UncachedPrompt:
        """Return how much of a prompt would have to be computed. The request is not run."""
        prompt: UncachedPrompt = await self._run_on_engine_thread(lambda: self._engine.uncached_prompt(request))
        return prompt

    async def check(self) -> None:
        """Check the integrity of the engine's state; raises Internal."""
        await self._run_on_engine_thread(self._engine.check_integrity)

    def _lease_methods(self) -> tuple[Callable[..., Any], ...]:
        return self.shared_rows, self.lease_rows, self.lease_state, self.extend_leases, self.release_leases

    def shared_rows(self) -> SharedRows:
        """Return where the rows of host memory are."""
        return self._engine.shared_rows()

    async def lease_rows(self, lease: bytes, keys: list[bytes]) -> list[int | None]:
        """Pin the rows of blocks, and return the row of each, or None. Steps run between the parts of a long list."""
        rows = list[int | None]()
        for start in range(0, len(keys), _LEASE_BLOCKS):
            part = keys[start : start + _LEASE_BLOCKS]
            rows += await self._run_on_engine_thread(partial(self._engine.lease_rows, lease, part))
        await asyncio.to_thread(self._engine.synchronize_rows)
        self._start_lease_timer()
        return rows

    async def lease_state(self, lease: bytes, keys: list[bytes], first: int) -> tuple[int, int] | None:
        """Pin the row of a state; see HostLeases. Return the number of its block and of its row."""
        found: tuple[int, int] | None = await self._run_on_engine_thread(
            lambda: self._engine.lease_state(lease, keys, first)
        )
        await asyncio.to_thread(self._engine.synchronize_rows)
        self._start_lease_timer()
        return found

    async def extend_leases(self, leases: list[bytes]) -> list[bool]:
        """Prolong leases, and return which of them exist."""
        known: list[bool] = await self._run_on_engine_thread(lambda: self._engine.extend_leases(leases))
        return known

    async def release_leases(self, leases: list[bytes]) -> None:
        """End leases."""
        table = self._engine.leases
        assert table is not None
        await self._run_on_engine_thread(lambda: table.release(leases))

    def _release_all_leases(self) -> None:
        if (leases := self._engine.leases) is not None:
            self._start_task(self._run_on_engine_thread(leases.release_all))

    def _start_lease_timer(self) -> None:
        """Look for leases whose time is over as long as there are leases."""
        if not self._has_lease_timer:
            self._has_lease_timer = True
            self._start_task(self._expire_leases())

    async def _expire_leases(self) -> None:
        while await self._run_on_engine_thread(self._engine.expire_leases):
            await asyncio.sleep(_LEASE_CHECK_S)
        self._has_lease_timer = False

    async def _reload_adapter(self, digest: AdapterDigest, source: AdapterSource) -> None:
        """Read an adapter for which sequences wait."""
        try:
            await self._read_and_add_adapter(digest, source, None)
        except QuireError as error:
            logger.error("adapter could not be read again digest=%s error=%s", digest, error)
            failure = error
            await self._run_on_engine_thread(lambda: self._engine.fail_adapter(digest, failure))

    async def _copy_to_slot(self, slot_load: SlotLoad, copy: Callable[[], None]) -> None:
        """Copy an adapter into a slot; sequences wait for this copy."""
        failure = None
        try:
            await self._io_threads.copy(copy)
        except Exception as error:  # a failed copy ends only the sequences of this adapter, not the engine
            logger.exception(
                "adapter could not be copied digest=%s slot=%d", slot_load.adapter_digest, slot_load.adapter_slot
            )
            failure = slot_copy_error(slot_load, f"{type(error).__name__}: {error}")
        await self._run_on_engine_thread(lambda: self._engine.on_slot_loaded(slot_load, failure))

    async def _encode_image(self, encode: Callable[[], object]) -> None:
        """Encode an image; sequences wait for it."""
        try:
            embeddings = await run_in_background("image", encode)
        except Exception as error:  # an image ends only the sequences that have it, not the engine
            logger.exception("an image could not be encoded")
            failure = Internal(f"images: an image could not be encoded: {type(error).__name__}: {str(error)[:200]}")
            await self._run_on_engine_thread(lambda: self._engine.fail_image(failure))
        else:
            await self._run_on_engine_thread(lambda: self._engine.on_image_encoded(embeddings))

    async def _read_and_add_adapter(
        self, digest: AdapterDigest, source: AdapterSource, slot_pinned: bool | None
    ) -> None:
        started_at = self._event_loop.time()
        try:
            packed_adapter = await self._io_threads.read(source, lambda: self._engine.read_adapter(source))
        except QuireError:
            raise
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            # The files are untrusted: if they crash the reader, only this adapter fails.
            logger.exception("adapter could not be read digest=%s source=%s", digest, source)
            raise Internal(f"adapter {digest!r}: reading {source} failed: {type(error).__name__}: {error}") from error
        read_s = self._event_loop.time() - started_at
        await self._run_on_engine_thread(
            lambda: self._engine.add_adapter(digest, source, packed_adapter, slot_pinned, read_s)
        )

    async def _run_on_engine_thread(self, action: Callable[[], Any]) -> Any:
        try:
            return await asyncio.wrap_future(self._engine_loop.submit_call(action))
        except QuireError:
            raise
        except Exception:
            logger.exception("a call failed in the engine: ending this process")
            # The state of the engine is unknown. The supervisor restarts the process.
            process.exit_now(process.EXIT_SOFTWARE)
