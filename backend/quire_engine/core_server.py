# SPDX-License-Identifier: Apache-2.0
"""CoreServer: where the text process and supervisors come to the engine core.

asyncio, in the process's main thread; the engine runs in another one (core_loop.py). Messages here are few and small,
a step's results are one of them, so one thread serves every peer, and its work overlaps with the step that runs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

from quire_engine.connection import Connection, listen
from quire_engine.core_loop import CoreLoop
from quire_engine.engine import Engine, copy_failure
from quire_engine.loader import Loader
from quire_engine.step import SlotLoad
from quire_engine.step_thread import StepThread
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
"""Results that wait for the text process at most: minutes of a full engine. A text process that is so late is stuck;
it is cut off, so that its sequences end and the supervisor's checks find it."""

_log = logging.getLogger("quire.core")


class CoreServer:
    """Handler of the connections of the engine core."""

    def __init__(self, engine: Engine, steps: StepThread) -> None:
        """`steps` has loaded the engine."""
        self._engine = engine
        self._steps = steps
        self._event_loop = asyncio.get_running_loop()
        self._started_at = utc_now()
        self._loop = CoreLoop(engine, self._publish, self._fetch, self._carry)
        self._loader = Loader()
        self._text: Connection | None = None
        self._owners = count(1)
        self._owner = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "status": self._status,
            "check": self._check,
        }

    async def run(self, path: Path) -> None:
        """Serve, for ever."""
        self._steps.run(self._loop.run)
        server = await listen(path, lambda: Connection(self))
        _log.info("engine core listens path=%s", path)
        await server.serve_forever()

    def on_ready(self, connection: Connection) -> None:
        """Handler: a peer says who it is. A text process takes the place of the one before."""
        assert connection.peer is not None, "a dialled connection"
        role = connection.peer.role
        if role not in ("text", "supervisor"):
            raise Internal(f"role {role!r} has no business here")
        _log.info("connected role=%s pid=%s", role, connection.peer.pid)
        if role == "text":
            if self._text is not None:
                self._text.cut()
            self._text, self._owner = connection, next(self._owners)
            self._loop.begin(self._owner)

    def on_message(self, connection: Connection, message: IpcMessage) -> None:
        """Handler: the text process or a supervisor wants something."""
        from_text = connection is self._text
        if from_text and isinstance(message, SequenceRequest):
            self._loop.generate(self._owner, message)
        elif from_text and isinstance(message, AbortSequences):
            self._loop.abort(self._owner, message.ids)
        elif not from_text and isinstance(message, ControlRequest):
            self._start(self._answer(connection, message))
        else:
            raise Internal(f"unexpected {type(message).__name__}")

    def on_oversize(self, connection: Connection, head: bytes, length: int) -> None:
        """Handler: never, as frames may have any length here; the text process has bounded prompts."""
        raise Internal(f"message of {length} bytes")

    def on_resumed(self, connection: Connection) -> None:
        """Handler: nothing waits here for that."""

    def on_lost(self, connection: Connection) -> None:
        """Handler: a peer is gone."""
        if connection is self._text:
            _log.warning("text process gone")
            self._text = None
            self._loop.end(self._owner)

    def _publish(self, owner: int, result: StepResult) -> None:
        """Called in the engine's thread."""
        self._event_loop.call_soon_threadsafe(self._send, owner, result)

    def _send(self, owner: int, result: StepResult) -> None:
        if self._text is None or owner != self._owner:
            return
        self._text.send(result)
        if self._text.unsent_bytes > MAX_UNSENT_BYTES:
            _log.error("text process cut: it does not read unsent_bytes=%d", self._text.unsent_bytes)
            self._text.cut()

    def _fetch(self, digest: str, path: Path) -> None:
        """Called in the engine's thread."""
        self._event_loop.call_soon_threadsafe(lambda: self._start(self._read_again(digest, path)))

    def _carry(self, load: SlotLoad, work: Callable[[], None]) -> None:
        """Called in the engine's thread."""
        self._event_loop.call_soon_threadsafe(lambda: self._start(self._fill(load, work)))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Future[None]") -> None:
        self._tasks.discard(task)
        # Raises what the task raised, for the event loop's handler to end the process with.
        task.result()

    async def _answer(self, connection: Connection, call: ControlRequest) -> None:
        try:
            if call.method not in self._calls:
                raise InvalidArgument(f"method {call.method!r} is unknown; known are {', '.join(self._calls)}")
            result = await self._calls[call.method](call.args)
        except QuireError as error:
            connection.send(ControlResponse(call.id, None, error.code, str(error)))
        else:
            connection.send(ControlResponse(call.id, result))

    async def _load_adapter(self, args: dict[str, Any]) -> dict[str, Any]:
        digest, path = _text(args, "digest"), Path(_text(args, "path"))
        pinned = bool(args.get("pinned", False))
        host, read_s = await self._read(digest, path)
        await self._do(lambda: self._engine.add_adapter(digest, path, host, pinned, read_s))
        _log.info("adapter loaded digest=%s pinned=%s", digest, pinned)
        return {}

    async def _unload_adapter(self, args: dict[str, Any]) -> dict[str, Any]:
        digest = _text(args, "digest")
        await self._do(lambda: self._engine.remove_adapter(digest))
        _log.info("adapter unloaded digest=%s", digest)
        return {}

    async def _status(self, args: dict[str, Any]) -> dict[str, Any]:
        adapters, stats = await self._do(lambda: (self._engine.adapters(), self._engine.stats()))
        memory = to_json(self._engine.memory)
        return {"started_at": self._started_at, "memory": memory, "adapters": adapters, "stats": to_json(stats)}

    async def _check(self, args: dict[str, Any]) -> dict[str, Any]:
        await self._do(self._engine.check_integrity)
        return {}

    async def _read_again(self, digest: str, path: Path) -> None:
        """Supply the host copy of an adapter that sequences wait for."""
        try:
            host, read_s = await self._read(digest, path)
            await self._do(lambda: self._engine.add_adapter(digest, path, host, None, read_s))
        except QuireError as error:
            _log.error("adapter cannot be read again digest=%s error=%s", digest, error)
            failure = error
            await self._do(lambda: self._engine.fail_adapter(digest, failure))

    async def _fill(self, load: SlotLoad, work: Callable[[], None]) -> None:
        """Fill a slot that sequences wait for."""
        failure = None
        try:
            await self._loader.copy(work)
        except Exception as error:  # whatever a device throws costs this adapter's sequences, never the engine
            _log.exception("adapter cannot be copied digest=%s slot=%d", load.digest, load.slot)
            failure = copy_failure(load, f"{type(error).__name__}: {error}")
        await self._do(lambda: self._engine.slot_loaded(load, failure))

    async def _read(self, digest: str, path: Path) -> tuple[object, float]:
        """What `add_adapter` takes, and the seconds that it took."""
        begun = self._event_loop.time()
        try:
            host = await self._loader.read(lambda: self._engine.read_adapter(path))
            return host, self._event_loop.time() - begun
        except QuireError:
            raise
        except Exception as error:
            # Files are what users bring: whatever they do to the reader, only this adapter fails.
            _log.exception("adapter cannot be read digest=%s path=%s", digest, path)
            raise Internal(f"adapter {digest!r}: reading {path} failed: {type(error).__name__}: {error}") from error

    async def _do(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._loop.call(action))


def _text(args: dict[str, Any], name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name}: expected a string, found {value!r}")
    return value
