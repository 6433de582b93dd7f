# SPDX-License-Identifier: Apache-2.0
"""Fakes of the text and the core process, for tests of the supervisor.

They use the real protocol without a model, start in 0.1 s, and can fail on demand (exit at startup, stop responding).
End-to-end behaviour is tested with the real processes (tests/e2e). `install` writes a package quire_engine that the
supervisor's child processes import instead of the real one.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from quire_spec import constants
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_catalog import AdapterLimits, Canary
from quire_spec.documents.pod_config import PodConfig
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.errors import Code, InvalidArgument
from quire_spec.protocol.client import Client
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import (
    CancelRequests,
    Conversation,
    FieldsIgnored,
    GenerateRequest,
    Hello,
    Message,
    OutputDelta,
    OutputDeltas,
    RequestRejected,
    SchedulerStats,
)
from quire_spec.protocol.parsed_output import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart
from quire_spec.protocol.results import AdapterCheck, CoreStatus, ServedModels, TextStatus
from quire_spec.protocol.server import Server

STEP_S = 0.02
_BEHAVIOUR_VARIABLE = "FAKE_ENGINE_BEHAVIOUR"


def install(folder: Path, **behaviour: Any) -> dict[str, str]:
    """Return an environment in which `python -m quire_engine.core` and `quire_engine.text` are the fakes."""
    package = folder / "quire_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("core", "text"):
        (package / f"{name}.py").write_text(f"from support.fake_engine import run_{name}\nrun_{name}()\n")
    tests = Path(__file__).resolve().parents[1]
    set_behaviour(folder, **behaviour)
    return dict(os.environ) | {"PYTHONPATH": f"{folder}:{tests}", _BEHAVIOUR_VARIABLE: str(folder / "behaviour.json")}


def set_behaviour(folder: Path, **behaviour: Any) -> None:
    """Change the behaviour of the fakes, effective at their next start."""
    (folder / "behaviour.json").write_text(json.dumps(behaviour))


class FakeProcess(Server):
    """Base of both fakes."""

    METHODS: tuple[str, ...]

    def __init__(self, name: str, *accepted: type[Message]) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        self.name = name
        self.run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
        self.served_name = PodConfig.load(Path(sys.argv[sys.argv.index("--config") + 1])).servedName
        self.behaviour = json.loads(Path(os.environ[_BEHAVIOUR_VARIABLE]).read_text())
        self.started_at = str(time.time())
        if message := self.behaviour.get(f"{name}_startup_error"):
            sys.exit(self.fail_startup(message))
        super().__init__([getattr(self, method) for method in self.METHODS], accepted)

    def fail_startup(self, message: str) -> int:
        print(message, file=sys.stderr)
        return int(self.behaviour.get("exit_code", 2))

    async def run(self, socket: str) -> None:
        while not Path(self.behaviour.get(f"{self.name}_waits_for", "/")).exists():
            await asyncio.sleep(0.02)
        print(f"{self.name} is up", file=sys.stderr, flush=True)
        server = await self.listen(self.run_dir / socket)
        await server.serve_forever()

    def on_message(self, connection: Connection, message: Message) -> None:
        if getattr(message, "method", "") != self.behaviour.get("silent_on"):
            super().on_message(connection, message)


class FakeCore(FakeProcess):
    """Stores adapters; rejects an adapter of rank 0."""

    METHODS = ("status", "load_adapter", "verify_adapter", "unload_adapter", "set_adapter_names")

    def __init__(self) -> None:
        super().__init__("core")
        self.adapters: dict[AdapterDigest, str] = {}

    async def status(self) -> CoreStatus:
        memory = MeasuredMemory(1, 1, 1, 1, 1, 1, "float32", "cpu")
        return CoreStatus(self.started_at, memory, self.adapters, SchedulerStats())

    async def load_adapter(self, digest: AdapterDigest, path: str, pinned: bool) -> None:
        await asyncio.sleep(self.behaviour.get("load_s", 0.0))
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config["r"] == 0:
            raise InvalidArgument("rank must be positive, got 0")
        self.adapters[digest] = "slot" if pinned else "host"

    async def verify_adapter(self, digest: AdapterDigest, path: str, canary: Canary | None) -> AdapterCheck:
        if canary is not None and canary.expect == "never":
            raise InvalidArgument("CanaryFailed: the output is 'word', and must start with 'never'")
        return AdapterCheck(1.0)

    async def unload_adapter(self, digest: AdapterDigest) -> None:
        del self.adapters[digest]

    async def set_adapter_names(self, adapters: dict[AdapterName, AdapterDigest]) -> None:
        assert set(adapters.values()) <= self.adapters.keys(), "a name has an adapter that is not loaded"


class FakeText(FakeProcess):
    """Streams the same word until max_tokens; accepts the adapter names of set_adapters."""

    METHODS = ("status", "set_adapters", "set_loading_adapters", "models", "metrics", "drain")

    def __init__(self) -> None:
        super().__init__("text", GenerateRequest, CancelRequests, RequestRejected, FieldsIgnored)
        self.digest_by_name: dict[AdapterName, AdapterDigest] = {}
        self.loading_names: list[AdapterName] = []
        self.streams: dict[tuple[Connection, int], asyncio.Task[None]] = {}
        self.draining = False
        self.core = FakeTextCoreClient(self.run_dir / constants.CORE_SOCKET, Hello("text", pid=os.getpid()), "core")
        self.watch_task = asyncio.create_task(self.core.run())

    async def status(self) -> TextStatus:
        return TextStatus(self.started_at, self.core.is_connected, len(self.streams), 0)

    async def set_adapters(
        self,
        adapters: dict[AdapterName, AdapterDigest],
        limits: dict[str, AdapterLimits],
        chat_templates: dict[str, str],
    ) -> None:
        self.digest_by_name = adapters

    async def set_loading_adapters(self, names: list[AdapterName]) -> None:
        self.loading_names = names

    async def models(self, api_key_name: str = "") -> ServedModels:
        return ServedModels(
            served_name=self.served_name,
            adapters=sorted(self.digest_by_name),
            loading=sorted(set(self.loading_names) - self.digest_by_name.keys()),
            max_model_len=2048,
            sampling_defaults={},
            closed_reason="" if self.core.is_connected else "no core",
        )

    async def metrics(self, page_format: str = "") -> str:
        return f"fake_aliases{{format={json.dumps(page_format)}}} {len(self.digest_by_name)}\n"

    async def drain(self) -> None:
        self.draining = True
        while self.streams:
            await asyncio.sleep(0.01)

    def on_request(self, connection: Connection, message: Message) -> None:
        if isinstance(message, GenerateRequest):
            key = (connection, message.id)
            self.streams[key] = asyncio.create_task(self.stream(message, connection))
            self.streams[key].add_done_callback(lambda _: self.streams.pop(key))
        elif isinstance(message, CancelRequests):
            for request_id in message.ids:
                if (connection, request_id) in self.streams:
                    self.streams[connection, request_id].cancel()

    def on_closed(self, connection: Connection) -> None:
        for (owner, _), task in self.streams.items():
            if owner is connection:
                task.cancel()

    async def stream(self, request: GenerateRequest, connection: Connection) -> None:
        def send(**fields: Any) -> None:
            connection.send(OutputDeltas([OutputDelta(request.id, **fields)]))

        if self.draining or not self.core.is_connected:
            send(error_code=Code.UNAVAILABLE, error="draining, or not connected to core")
            return
        if request.model in self.loading_names and request.model not in self.digest_by_name:
            send(
                error_code=Code.UNAVAILABLE, error=f"model {request.model!r}: the adapter is not loaded yet; try again"
            )
            return
        if request.model != self.served_name and request.model not in self.digest_by_name:
            send(error_code=Code.NOT_FOUND, error=f"model {request.model!r} does not exist")
            return
        if request.parsing is not None and request.chat is not None:
            await self.stream_events(request, send)
            return
        word = self.digest_by_name.get(request.model, "base")[-8:] + " "
        cores_lost_before = self.core.num_lost
        limit = request.params.max_tokens or 16
        for count in range(1, limit):
            send(text=word, token_ids=[1], num_output_tokens=count)
            await asyncio.sleep(STEP_S)
            if self.core.num_lost != cores_lost_before:
                send(error_code=Code.UNAVAILABLE, error="engine core is restarting; try again")
                return
        send(text=word, token_ids=[1], num_output_tokens=limit, finish_reason="length")

    async def stream_events(self, request: GenerateRequest, send: Any) -> None:
        """Stream the events that the last message contains as JSON, or else the messages, in a delta for each."""
        assert request.chat is not None
        last_message = msgspec.msgpack.decode(request.chat.messages)[-1]
        try:
            documents = json.loads(last_message["content"])
        except ValueError:
            documents = [["content", json.dumps(conversation_document(request.chat))]]
        numbers = {"num_input_tokens": 7, "num_cached_tokens": 2}
        deltas = [[document] for document in documents] if request.stream and documents else [documents]
        reason = "length" if request.params.max_tokens == len(documents) else "stop"
        for i, parsed in enumerate(deltas, 1):
            if ["fail"] in parsed:
                send(error_code=Code.UNAVAILABLE, error="engine core is restarting; try again")
                return
            num_output = i if request.stream else len(documents)
            num_reasoning = sum(document[0] == "reasoning" for document in documents[:num_output])
            end = reason if i == len(deltas) else None
            numbers |= {"num_output_tokens": num_output, "num_reasoning_tokens": num_reasoning}
            events = [_EVENT_TYPES[kind](*values) for kind, *values in parsed]
            send(parsed=events, token_ids=[1], finish_reason=end, **numbers)
            await asyncio.sleep(0.005)


_EVENT_TYPES: dict[str, Any] = {
    "content": ContentDelta,
    "reasoning": ReasoningDelta,
    "call": ToolCallStart,
    "arguments": ToolCallArguments,
}


class FakeTextCoreClient(Client):
    """Counts how often the core was lost."""

    num_lost = 0

    def on_closed(self, connection: Connection) -> None:
        self.num_lost += 1
        super().on_closed(connection)


def conversation_document(chat: Conversation) -> dict[str, Any]:
    """Return a conversation as JSON."""
    values = msgspec.structs.asdict(chat)
    return {k: msgspec.msgpack.decode(v) if isinstance(v, msgspec.Raw) else v for k, v in values.items()}


def run_core() -> None:
    asyncio.run(_run(FakeCore, constants.CORE_SOCKET))


def run_text() -> None:
    asyncio.run(_run(FakeText, constants.TEXT_SOCKET))


async def _run(process_class: type[FakeProcess], socket: str) -> None:
    await process_class().run(socket)  # type: ignore[call-arg]
