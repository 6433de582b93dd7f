# SPDX-License-Identifier: Apache-2.0
"""Real text and core processes for tests, and a blocking client of their sockets."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import psutil
from support.pod_config import write_pod_config

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, error_from_code
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import (
    Call,
    Failure,
    GenerateRequest,
    Hello,
    Message,
    OutputDelta,
    OutputDeltas,
    Reply,
    Role,
    to_raw,
)
from quire_spec.protocol.results import CoreStatus

DEADLINE_S = 60.0


def wait_for(check: Any, timeout_s: float = DEADLINE_S, what: str | Callable[[], object] = "it") -> Any:
    """Poll `check()` until it returns a true value, and return that; fail the test after `timeout_s`.

    `what` names what is awaited, or returns the state that is reported instead.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what if isinstance(what, str) else what()} did not happen within {timeout_s} s")
        time.sleep(0.02)
    return value


def wait_quiet(processes: Sequence[psutil.Process], max_cpu_s: float) -> None:
    """Wait for one second in which the processes use at most `max_cpu_s` of CPU time; fail the test after 30 s."""

    def is_quiet() -> bool:
        before = [process.cpu_times() for process in processes]
        time.sleep(1.0)
        after = [process.cpu_times() for process in processes]
        return sum(a.user + a.system - b.user - b.system for a, b in zip(after, before, strict=True)) <= max_cpu_s

    wait_for(is_quiet, 30, f"one second with at most {max_cpu_s} s of CPU time")


class IpcClient:
    """A blocking connection to one of the processes."""

    def __init__(self, path: Path, role: str, model: str = "base", timeout_s: float = DEADLINE_S) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout_s)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self._decoder = FrameDecoder()
        self._messages: list[Message] = []
        self._ids = count(1)
        self.send(Hello(cast(Role, role), model, os.getpid()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def send(self, message: Message) -> None:
        """Send a message."""
        self.socket.sendall(encode_frame(message))

    def receive(self) -> Message:
        """Return the next message. Raise EOFError if the peer has closed the connection."""
        while not self._messages:
            try:
                data = self.socket.recv(2**18)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            for message in self._decoder.feed(data):
                assert isinstance(message, Message), message
                self._messages.append(message)
        return self._messages.pop(0)

    def call(self, method: str, **args: Any) -> Any:
        """Call a control method; return its result or raise its error."""
        call_id = next(self._ids)
        self.send(Call(call_id, method, to_raw(args, method)))
        reply = self.receive()
        assert isinstance(reply, Reply | Failure) and reply.id == call_id
        if isinstance(reply, Failure):
            raise error_from_code(reply.error_code, reply.error)
        return msgspec.msgpack.decode(reply.result)

    def submit(
        self, prompt: str | list[int] | None, stream: bool = True, model: str = "base", priority: int = 0, **params: Any
    ) -> int:
        """Send a request; return its id."""
        request_id = next(self._ids)
        text, ids = (None, prompt) if isinstance(prompt, list) else (prompt, None)
        try:
            values = SamplingParams.from_mapping(params)
        except InvalidArgument:
            values = SamplingParams(**params)  # a frontend rejects them; the text process must do so, too
        self.send(GenerateRequest(request_id, model, text, ids, values, stream, priority=priority))
        return request_id

    def collect(self, ids: Iterable[int]) -> dict[int, list[OutputDelta]]:
        """Return all deltas of the requests `ids`, up to the final ones."""
        events_by_id: dict[int, list[OutputDelta]] = {i: [] for i in ids}
        unfinished = set(events_by_id)
        while unfinished:
            message = self.receive()
            assert isinstance(message, OutputDeltas)
            for event in message.deltas:
                assert event.id in unfinished, f"unexpected {event}"
                events_by_id[event.id].append(event)
                if event.final:
                    unfinished.discard(event.id)
        return events_by_id

    def generate(self, prompt: str | list[int] | None, **options: Any) -> list[OutputDelta]:
        """Send a request and return all its deltas."""
        request_id = self.submit(prompt, **options)
        return self.collect([request_id])[request_id]


def text_of(events: list[OutputDelta]) -> str:
    """Return the text of a request, which must have succeeded."""
    assert events[-1].error_code is None, events[-1].error
    return "".join(event.text for event in events)


class EngineProcesses:
    """The text and the core process in one run folder. They are killed on exit of the context."""

    def __init__(
        self,
        folder: Path,
        num_threads: int | None = 1,
        core: Sequence[str] = ("-m", "quire_engine.core"),
        **config: Any,
    ) -> None:
        """Write pod.json.

        Args:
            folder: run folder.
            num_threads: OMP_NUM_THREADS of the processes; None for the default.
            core: Python arguments that start the core.
            config: the engine's part of pod.json.
        """
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config_file = write_pod_config(folder / "pod.json", {"engine": config})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._programs = {"text": ("-m", "quire_engine.text"), "core": tuple(core)}
        self._env = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, *names: str, timeout_s: float = DEADLINE_S) -> Self:
        """Start `text` and `core`, or one of several cores such as `core-1`; wait until they accept connections."""
        for name in names:
            with (self.folder / f"{name}.log").open("ab") as log:
                program, is_one_of_several, _ = name.partition("-")
                argv = [sys.executable, *self._programs[program], "--config", str(self.config_file)]
                argv += ["--run-dir", str(self.folder), *(["--name", name] if is_one_of_several else [])]
                self.processes[name] = subprocess.Popen(argv, stderr=log, env=os.environ | self._env)
        for name in names:
            wait_for(lambda name=name: self._is_serving(name), timeout_s, what=f"{name}:\n{self.log(name)}")
        if "text" in self.processes and len(self.processes) > 1:
            self.wait_core_connected(True)
        return self

    def wait_core_connected(self, connected: bool) -> None:
        """Wait until the text process reports the core, or each of several, as connected, or as disconnected."""

        def states(status: dict[str, Any]) -> set[bool]:
            return {core["connected"] for core in status["cores"].values()} or {status["core"]}

        with self.connect("text", "supervisor") as supervisor:
            wait_for(lambda: states(supervisor.call("status")) == {connected}, what=f"core={connected}")

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a process, wait until it exits, and return its exit code."""
        self.processes[name].send_signal(number)
        return self.processes[name].wait(DEADLINE_S)

    def connect(self, name: str, role: str, model: str = "base", timeout_s: float = DEADLINE_S) -> IpcClient:
        """Connect to `text` or `core`."""
        return IpcClient(self.folder / f"{name}.sock", role, model, timeout_s)

    def core_stats(self) -> dict[str, Any]:
        """Return the current stats of the engine."""
        with self.connect("core", "supervisor") as supervisor:
            status = msgspec.convert(supervisor.call("status"), CoreStatus)
            return msgspec.structs.asdict(status.stats)

    def wait_idle(self) -> None:
        """Wait until the engine has no sequences and no used blocks."""
        wait_for(lambda: self._is_idle(), what=f"an idle engine, last {self.core_stats()}")
        with self.connect("core", "supervisor") as supervisor:
            assert supervisor.call("check") is None

    def log(self, name: str) -> str:
        """Return the log of a process."""
        return (self.folder / f"{name}.log").read_text()

    def _is_idle(self) -> bool:
        stats = self.core_stats()
        return not (stats["num_running"] or stats["num_waiting"] or stats["num_used_blocks"])

    def _is_serving(self, name: str) -> bool:
        assert self.processes[name].poll() is None, f"{name} exited:\n{self.log(name)}"
        try:
            self.connect(name, "supervisor").close()
        except OSError:
            return False
        return True


LONG_CONTEXT = 131072
"""max_position_embeddings of a model for prompts of megabytes and outputs of minutes."""


def engine_config(model: Path, **overrides: object) -> dict[str, object]:
    """Return the engine's part of pod.json for a test model."""
    return {"model": str(model), "dtype": "float32", "kv_cache_memory_bytes": 96 * 2**20, **overrides}


def first_event(client: IpcClient, request_id: int) -> OutputDelta:
    """Return the next delta, which must be of this request."""
    message = client.receive()
    assert isinstance(message, OutputDeltas) and message.deltas[0].id == request_id
    return message.deltas[0]


def events_of(client: IpcClient, request_id: int) -> list[OutputDelta]:
    """Return the deltas of one request; skip those of others."""
    events: list[OutputDelta] = []
    while not (events and events[-1].final):
        message = client.receive()
        assert isinstance(message, OutputDeltas)
        events += [event for event in message.deltas if event.id == request_id]
    return events
