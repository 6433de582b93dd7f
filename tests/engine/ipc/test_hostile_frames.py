# SPDX-License-Identifier: Apache-2.0
"""Frames that the real text and core processes cannot accept end only the requests that their headers name."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from support.engine_processes import EngineProcesses, IpcClient, engine_config, text_of
from support.hostile_frames import PAYLOADS, UNKNOWN_KIND, hostile_frame
from support.tiny_checkpoints import make_llama

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.connection import Connection
from quire_spec.protocol.messages import (
    AbortSequences,
    CancelRequests,
    Failure,
    Message,
    OutputDeltas,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
)
from quire_spec.protocol.server import Server

FIRST_ID = 2**63
KINDS = ["GenerateRequest", "SequenceRequest", "Call", "CancelRequests", "StepResult", "Hello", UNKNOWN_KIND]
HOSTILE_IDS = [FIRST_ID + i for i in range(len(KINDS) * len(PAYLOADS))]
FRAMES = b"".join(
    hostile_frame(kind, [request_id], payload)
    for request_id, (kind, payload) in zip(HOSTILE_IDS, product(KINDS, PAYLOADS.values()), strict=True)
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return engine_config(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def pod(config: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcesses]:
    with EngineProcesses(tmp_path_factory.mktemp("run"), **config) as pod:
        yield pod.start("core", "text")
        assert "Traceback" not in pod.log("text") + pod.log("core")


def read_errors(peer: IpcClient, num_errors: int) -> list[int]:
    """Read messages until they contain this number of errors; return the ids of the errors."""
    ids: list[int] = []
    while len(ids) < num_errors:
        message = peer.receive()
        if isinstance(message, Failure):
            ids.append(message.id)
        elif isinstance(message, OutputDeltas):
            ids += [delta.id for delta in message.deltas if delta.error_code is not None]
    return ids


def test_a_frontend_loses_only_the_hostile_request(pod: EngineProcesses):
    with pod.connect("text", "stub") as stub, pod.connect("text", "openai") as other:
        expected = text_of(other.generate("fox", temperature=0, max_tokens=40))
        running = stub.submit("fox", temperature=0, max_tokens=1500)
        stub.socket.sendall(FRAMES)
        assert sorted(read_errors(stub, len(HOSTILE_IDS))) == HOSTILE_IDS
        assert text_of(other.generate("fox", temperature=0, max_tokens=40)) == expected
        assert stub.collect([running])[running][-1].finish_reason == "length"


def test_an_oversized_message_of_a_frontend_fails_alone(pod: EngineProcesses):
    with pod.connect("text", "openai") as front:
        for i, kind in enumerate(("GenerateRequest", "Call", "CancelRequests", UNKNOWN_KIND)):
            front.socket.sendall(hostile_frame(kind, [FIRST_ID + i], b"x" * 3_000_000))
        assert sorted(read_errors(front, 4)) == HOSTILE_IDS[:4]
        assert front.call("models")["served_name"] == "base"


@pytest.mark.parametrize("process", ["text", "core"])
def test_a_supervisor_loses_only_the_hostile_call(pod: EngineProcesses, process: str):
    with pod.connect(process, "supervisor") as supervisor, pod.connect("text", "stub") as stub:
        running = stub.submit("fox", temperature=0, max_tokens=300)
        supervisor.socket.sendall(FRAMES)
        assert read_errors(supervisor, len(HOSTILE_IDS)) == HOSTILE_IDS
        assert "started_at" in supervisor.call("status")
        assert stub.collect([running])[running][-1].finish_reason == "length"


def test_the_core_loses_only_the_hostile_sequence(config: dict[str, object], tmp_path: Path):
    with EngineProcesses(tmp_path, **config) as engine:
        engine.start("core")
        with engine.connect("core", "text") as text:
            text.send(SequenceRequest(1, [5], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)))
            text.socket.sendall(FRAMES)
            failed_ids: list[int] = []
            num_tokens = 0
            while len(failed_ids) < len(HOSTILE_IDS) or num_tokens < 30:
                message = text.receive()
                assert isinstance(message, Failure | StepResult)
                if isinstance(message, Failure):
                    failed_ids.append(message.id)
                else:
                    num_tokens += sum(len(result.token_ids) for result in message.results)
            assert failed_ids == HOSTILE_IDS
        assert "Traceback" not in engine.log("core")


class FakeCore(Server):
    """A core in a thread. It records the messages of the text process, and sends what a test gives to it."""

    def __init__(self, path: Path) -> None:
        super().__init__((), (SequenceRequest, AbortSequences))
        self.messages: queue.Queue[Message] = queue.Queue()
        self._path = path
        self._connected = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def on_connected(self, connection: Connection) -> None:
        self.connection = connection
        self._connected.set()

    def on_request(self, connection: Connection, message: Message) -> None:
        self.messages.put(message)

    def write(self, data: bytes) -> None:
        """Send bytes to the text process."""
        self._connected.wait(60)
        assert self.connection._transport is not None
        self._loop.call_soon_threadsafe(self.connection._transport.write, data)

    def send(self, *results: SequenceDelta) -> None:
        """Send the results of a step."""
        self._loop.call_soon_threadsafe(self.connection.send, StepResult([*results], [], SchedulerStats()))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with self.listening(self._path):
            await self._stopped.wait()


def test_hostile_results_of_a_core_end_only_their_request(config: dict[str, object], tmp_path: Path):
    core = FakeCore(tmp_path / "core.sock")
    with EngineProcesses(tmp_path, **config) as engine:
        engine.start("text")
        engine.wait_core_connected(True)
        with engine.connect("text", "stub") as stub:
            good = stub.submit([5], max_tokens=100)
            good_sequence = core.messages.get(timeout=60)
            assert isinstance(good_sequence, SequenceRequest)
            for kind in ("StepResult", "Reply", "OutputDeltas", UNKNOWN_KIND):
                for payload in PAYLOADS.values():
                    bad = stub.submit([5], max_tokens=100)
                    sequence = core.messages.get(timeout=60)
                    assert isinstance(sequence, SequenceRequest)
                    core.write(hostile_frame(kind, [sequence.id], payload))
                    [delta] = stub.collect([bad])[bad]
                    assert delta.error_code == "INTERNAL"
                    # The core would run the sequence until its end.
                    assert core.messages.get(timeout=60) == AbortSequences([sequence.id])
            core.send(SequenceDelta(good_sequence.id, [6]), SequenceDelta(good_sequence.id, [7], "length"))
            deltas = stub.collect([good])[good]
            assert [token for delta in deltas for token in delta.token_ids] == [6, 7]
            stub.send(CancelRequests([good]))
        assert "Traceback" not in engine.log("text")
    core.stop()
