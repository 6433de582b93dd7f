# SPDX-License-Identifier: Apache-2.0
"""Server of the core process: accepts connections of the text process and of supervisors.

The server runs asyncio in the main thread. The engine runs in the compute thread (see engine_loop). All results of a
step are sent in one small message, so one thread can serve all peers while the next step runs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

from quire_engine.core.compute_thread import ComputeThread
from quire_engine.core.engine import Engine, slot_copy_error
from quire_engine.core.engine_loop import EngineLoop
from quire_engine.core.grammar_queue import GrammarQueue
from quire_engine.ipc.connection import Connection, ConnectionHandler, listen
from quire_engine.lora.io_threads import AdapterIOThreads
from quire_engine.step.plan import SlotLoad
from quire_spec.constants import AdapterDigest
from quire_spec.dataclass_json import to_json
from quire_spec.documents.pod_status import utc_now
from quire_spec.errors import Internal, InvalidArgument, QuireError
from quire_spec.protocol.messages import (
    AbortSequences,
    ControlRequest,
    ControlResponse,
    IpcMessage,
    SequenceRequest,
    StepResult,
)

MAX_UNSENT_BYTES = 256 * 2**20
"""Maximum number of bytes of unsent results. This is the output of several minutes under full load. If the unread
results of a text process exceed this limit, the process is considered to hang, and its connection is aborted. This ends
the sequences of the text process, and then the health checks of the supervisor fail.
"""

logger = logging.getLogger(__name__)


class CoreServer(ConnectionHandler):
    """Handler of all connections of the core process."""

    def __init__(self, engine: Engine, compute_thread: ComputeThread) -> None:
        """Create the server for an engine; `compute_thread` is the thread that has loaded the engine."""
        self._engine = engine
        self._compute_thread = compute_thread
        self._event_loop = asyncio.get_running_loop()
        self._started_at = utc_now()
        self._engine_loop = EngineLoop(engine, self._publish, self._on_adapter_needed, self._on_slot_copy)
        self._io_threads = AdapterIOThreads()
        self._grammar_queue = GrammarQueue(engine.input_processor.grammar_compiler, self._engine_loop.generate)
        self._text_connection: Connection | None = None
        self._client_ids = count(1)
        self._client_id = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._call_handlers: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "status": self._status,
            "check": self._check_integrity,
            "live": self._live,
        }

    async def run(self, socket_path: Path) -> None:
        """Serve forever."""
        self._compute_thread.run_forever(self._engine_loop.run)
        self._grammar_queue.warm_up()
        server = await listen(socket_path, lambda: Connection(self))
        logger.info("engine core listens path=%s", socket_path)
        await server.serve_forever()

    def on_connected(self, connection: Connection) -> None:
        """Called when a peer has sent its role. A new text process replaces the previous one."""
        assert connection.peer is not None, "only accepted connections have this handler"
        role = connection.peer.role
        if role not in ("text", "supervisor"):
            raise Internal(f"role: {role!r} is not accepted; connect as text or supervisor")
        logger.info("connected role=%s pid=%s", role, connection.peer.pid)
        if role == "text":
            if self._text_connection is not None:
                self._text_connection.abort()
            self._text_connection, self._client_id = connection, next(self._client_ids)
            self._engine_loop.attach_client(self._client_id)

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Called when the text process or a supervisor has sent a message."""
        from_text = connection is self._text_connection
        if from_text and isinstance(message, SequenceRequest):
            self._grammar_queue.init_grammar(self._client_id, message)
        elif from_text and isinstance(message, AbortSequences):
            self._grammar_queue.abort(message.ids)
            self._engine_loop.abort(self._client_id, message.ids)
        elif isinstance(message, ControlRequest):
            self._start_task(self._handle_call(connection, message))
        else:
            raise Internal(f"unexpected {type(message).__name__}")

    def on_closed(self, connection: Connection) -> None:
        """Called when the connection closes."""
        if connection is self._text_connection:
            logger.warning("text process disconnected")
            self._text_connection = None
            self._engine_loop.detach_client(self._client_id)

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

    def _on_adapter_needed(self, digest: AdapterDigest, path: Path) -> None:
        """Start to read an adapter; called in the compute thread."""
        self._event_loop.call_soon_threadsafe(lambda: self._start_task(self._reload_adapter(digest, path)))

    def _on_slot_copy(self, slot_load: SlotLoad, copy: Callable[[], None]) -> None:
        """Start to copy an adapter into a slot; called in the compute thread."""
        self._event_loop.call_soon_threadsafe(lambda: self._start_task(self._copy_to_slot(slot_load, copy)))

    def _start_task(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        # If the task failed, result() raises its exception again. The event loop's exception handler then ends the
        # process.
        task.result()

    async def _handle_call(self, connection: Connection, call: ControlRequest) -> None:
        try:
            if call.method not in self._call_handlers:
                raise InvalidArgument(
                    f"method: {call.method!r} is unknown; use one of {', '.join(self._call_handlers)}"
                )
            result = await self._call_handlers[call.method](call.args)
        except QuireError as error:
            connection.send(ControlResponse(call.id, None, error.code, str(error)))
        else:
            connection.send(ControlResponse(call.id, result))

    async def _load_adapter(self, args: dict[str, Any]) -> dict[str, Any]:
        digest, path = AdapterDigest(_required_string(args, "digest")), Path(_required_string(args, "path"))
        slot_pinned = bool(args.get("pinned", False))
        await self._read_and_add_adapter(digest, path, slot_pinned)
        logger.info("adapter loaded digest=%s pinned=%s", digest, slot_pinned)
        return {}

    async def _unload_adapter(self, args: dict[str, Any]) -> dict[str, Any]:
        digest = AdapterDigest(_required_string(args, "digest"))
        await self._run_on_engine_thread(lambda: self._engine.remove_adapter(digest))
        logger.info("adapter unloaded digest=%s", digest)
        return {}

    async def _status(self, args: dict[str, Any]) -> dict[str, Any]:
        adapters, stats = await self._run_on_engine_thread(
            lambda: (self._engine.adapter_states(), self._engine.stats())
        )
        memory = to_json(self._engine.memory)
        return {"started_at": self._started_at, "memory": memory, "adapters": adapters, "stats": to_json(stats)}

    async def _live(self, args: dict[str, Any]) -> dict[str, Any]:
        snapshot: dict[str, Any] = await self._run_on_engine_thread(self._engine.live_snapshot)
        return snapshot

    async def _check_integrity(self, args: dict[str, Any]) -> dict[str, Any]:
        await self._run_on_engine_thread(self._engine.check_integrity)
        return {}

    async def _reload_adapter(self, digest: AdapterDigest, path: Path) -> None:
        """Read an adapter for which sequences wait."""
        try:
            await self._read_and_add_adapter(digest, path, None)
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

    async def _read_and_add_adapter(self, digest: AdapterDigest, path: Path, slot_pinned: bool | None) -> None:
        started_at = self._event_loop.time()
        try:
            packed_adapter = await self._io_threads.read(lambda: self._engine.read_adapter(path))
        except QuireError:
            raise
        except Exception as error:
            # The files are untrusted: if they crash the reader, only this adapter fails.
            logger.exception("adapter could not be read digest=%s path=%s", digest, path)
            raise Internal(f"adapter {digest!r}: reading {path} failed: {type(error).__name__}: {error}") from error
        read_s = self._event_loop.time() - started_at
        await self._run_on_engine_thread(
            lambda: self._engine.add_adapter(digest, path, packed_adapter, slot_pinned, read_s)
        )

    async def _run_on_engine_thread(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._engine_loop.submit_call(action))


def _required_string(args: dict[str, Any], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name}: must be a non-empty string, got {value!r}")
    return value
