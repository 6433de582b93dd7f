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

from quire_spec import constants
from quire_spec.documents.pod_config import PodConfig
from quire_spec.errors import Code
from quire_spec.protocol import framing
from quire_spec.protocol.messages import (
    CancelRequests,
    ControlRequest,
    ControlResponse,
    GenerateRequest,
    Hello,
    OutputDelta,
    OutputDeltas,
)

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


class FakeProcess:
    """Base of both fakes: socket, connections, control requests."""

    def __init__(self, name: str) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        self.name = name
        self.run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
        self.served_name = PodConfig.load(Path(sys.argv[sys.argv.index("--config") + 1])).servedName
        self.behaviour = json.loads(Path(os.environ[_BEHAVIOUR_VARIABLE]).read_text())
        self.started_at = str(time.time())
        self.call_tasks: set[asyncio.Task[None]] = set()
        if message := self.behaviour.get(f"{name}_startup_error"):
            sys.exit(self.fail_startup(message))

    def fail_startup(self, message: str) -> int:
        print(message, file=sys.stderr)
        return int(self.behaviour.get("exit_code", 2))

    async def listen(self, socket: str) -> None:
        while not Path(self.behaviour.get(f"{self.name}_waits_for", "/")).exists():
            await asyncio.sleep(0.02)
        print(f"{self.name} is up", file=sys.stderr, flush=True)
        server = await asyncio.start_unix_server(self.serve_client, self.run_dir / socket)
        await server.serve_forever()

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder, hello = framing.FrameDecoder(), Hello("")
        try:
            while data := await reader.read(2**16):
                for message in decoder.feed(data):
                    if isinstance(message, Hello):
                        hello = message
                    elif isinstance(message, ControlRequest):
                        task = asyncio.create_task(self.handle_call(message, writer))
                        self.call_tasks.add(task)
                        task.add_done_callback(self.call_tasks.discard)
                    else:
                        self.on_frame(message, writer)
        except OSError:
            pass
        self.on_disconnect(hello, writer)

    async def handle_call(self, request: ControlRequest, writer: asyncio.StreamWriter) -> None:
        if request.method == self.behaviour.get("silent_on"):
            return
        try:
            response = ControlResponse(request.id, await getattr(self, request.method)(**request.args))
        except ValueError as error:
            response = ControlResponse(request.id, None, Code.INVALID_ARG, str(error))
        writer.write(framing.encode_frame(response))

    def on_frame(self, message: Any, writer: asyncio.StreamWriter) -> None: ...
    def on_disconnect(self, hello: Hello, writer: asyncio.StreamWriter) -> None: ...


class FakeCore(FakeProcess):
    """Stores adapters; rejects an adapter of rank 0."""

    def __init__(self) -> None:
        super().__init__("core")
        self.adapters: dict[str, str] = {}

    async def status(self) -> dict[str, Any]:
        numbers = ("weights_bytes", "lora_bytes", "kv_bytes", "num_blocks", "max_model_len", "block_size")
        memory = dict.fromkeys(numbers, 1) | {"dtype": "float32", "device": "cpu"}
        return {"started_at": self.started_at, "memory": memory, "adapters": self.adapters, "stats": {}}

    async def load_adapter(self, digest: str, path: str, pinned: bool) -> dict[str, Any]:
        await asyncio.sleep(self.behaviour.get("load_s", 0.0))
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config["r"] == 0:
            raise ValueError("rank must be positive, got 0")
        self.adapters[digest] = "slot" if pinned else "host"
        return {}

    async def unload_adapter(self, digest: str) -> dict[str, Any]:
        del self.adapters[digest]
        return {}


class FakeText(FakeProcess):
    """Streams the same word until max_tokens; accepts the adapter names of set_adapters."""

    def __init__(self) -> None:
        super().__init__("text")
        self.digest_by_name: dict[str, str] = {}
        self.loading_names: list[str] = []
        self.streams: dict[tuple[int, int], asyncio.Task[None]] = {}
        self.draining = False
        self.watch_task = asyncio.create_task(self.watch_core())
        self.core_connected = False
        self.num_cores_lost = 0

    async def watch_core(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self.run_dir / constants.CORE_SOCKET)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.write(framing.encode_frame(Hello("text", pid=os.getpid())))
            self.core_connected = True
            await reader.read()
            self.core_connected = False
            self.num_cores_lost += 1
            writer.close()

    async def status(self) -> dict[str, Any]:
        return {
            "started_at": self.started_at,
            "core": self.core_connected,
            "num_open": len(self.streams),
            "num_queued": 0,
        }

    async def set_adapters(self, adapters: dict[str, str], limits: Any = None) -> dict[str, Any]:
        self.digest_by_name = adapters
        return {}

    async def set_loading_adapters(self, names: list[str]) -> dict[str, Any]:
        self.loading_names = names
        return {}

    async def models(self) -> dict[str, Any]:
        names = {"served_name": self.served_name, "adapters": sorted(self.digest_by_name)}
        return {
            **names,
            "loading": sorted(set(self.loading_names) - self.digest_by_name.keys()),
            "max_model_len": 2048,
            "sampling_defaults": {},
            "closed_reason": "" if self.core_connected else "no core",
        }

    async def metrics(self, format: str = "") -> dict[str, Any]:
        return {"text": f"fake_aliases{{format={json.dumps(format)}}} {len(self.digest_by_name)}\n"}

    async def drain(self) -> dict[str, Any]:
        self.draining = True
        while self.streams:
            await asyncio.sleep(0.01)
        return {}

    def on_frame(self, message: Any, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, GenerateRequest):
            key = (id(writer), message.id)
            self.streams[key] = asyncio.create_task(self.stream(message, writer))
            self.streams[key].add_done_callback(lambda _: self.streams.pop(key))
        elif isinstance(message, CancelRequests):
            for request_id in message.ids:
                if (id(writer), request_id) in self.streams:
                    self.streams[id(writer), request_id].cancel()

    def on_disconnect(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        if hello.role != "frontend":
            return
        tasks = [task for key, task in self.streams.items() if key[0] == id(writer)]
        for task in tasks:
            task.cancel()

    async def stream(self, request: GenerateRequest, writer: asyncio.StreamWriter) -> None:
        def send(**fields: Any) -> None:
            writer.write(framing.encode_frame(OutputDeltas([OutputDelta(request.id, **fields)])))

        if self.draining or not self.core_connected:
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
        cores_lost_before = self.num_cores_lost
        limit = int(request.params.get("max_tokens") or 16)
        for count in range(1, limit):
            send(text=word, token_ids=[1], num_output_tokens=count)
            await asyncio.sleep(STEP_S)
            if self.num_cores_lost != cores_lost_before:
                send(error_code=Code.UNAVAILABLE, error="engine core is restarting; try again")
                return
        send(text=word, token_ids=[1], num_output_tokens=limit, finish_reason="length")

    async def stream_events(self, request: GenerateRequest, send: Any) -> None:
        """Stream the events that the last message contains as JSON, or else the messages, in a delta for each."""
        messages = request.chat["messages"] if request.chat else []
        try:
            events = json.loads(messages[-1]["content"])
        except ValueError:
            events = [["content", json.dumps(request.chat)]]
        numbers = {"num_input_tokens": 7, "num_cached_tokens": 2}
        deltas = [[event] for event in events] if request.stream and events else [events]
        reason = "length" if request.params.get("max_tokens") == len(events) else "stop"
        for i, parsed in enumerate(deltas, 1):
            if ["fail"] in parsed:
                send(error_code=Code.UNAVAILABLE, error="engine core is restarting; try again")
                return
            num_output = i if request.stream else len(events)
            num_reasoning = sum(event[0] == "reasoning" for event in events[:num_output])
            end = reason if i == len(deltas) else None
            numbers |= {"num_output_tokens": num_output, "num_reasoning_tokens": num_reasoning}
            send(parsed=parsed, token_ids=[1], finish_reason=end, **numbers)
            await asyncio.sleep(0.005)


def run_core() -> None:
    asyncio.run(_run(FakeCore, constants.CORE_SOCKET))


def run_text() -> None:
    asyncio.run(_run(FakeText, constants.TEXT_SOCKET))


async def _run(process_class: type[FakeProcess], socket: str) -> None:
    await process_class().listen(socket)  # type: ignore[call-arg]
