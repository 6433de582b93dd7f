# SPDX-License-Identifier: Apache-2.0
"""The real core process over its real socket: sequences, clients, adapters, idling, failing steps."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.engine_processes import EngineProcesses, IpcClient, wait_for, wait_quiet
from support.tiny_checkpoints import greedy_output, make_llama, make_llama_adapter

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.framing import encode_frame
from quire_spec.protocol.messages import (
    AbortSequences,
    Failure,
    Hello,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
)

GREEDY = {"temperature": 0, "max_tokens": 12}
ENDLESS = {"temperature": 0, "max_tokens": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_llama_adapter(model, tmp_path_factory.mktemp("adapter"), seed) for seed in range(4)]


def config_of(model: Path, **fields: object) -> dict[str, object]:
    return {"model": str(model), "dtype": "float32", "kv_cache_memory_bytes": 8 * 2**20, **fields}


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcesses]:
    lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}
    with EngineProcesses(tmp_path_factory.mktemp("run"), **config_of(model, **lora)) as engine:
        yield engine.start("core")


@pytest.fixture
def engine(shared: EngineProcesses) -> Iterator[EngineProcesses]:
    yield shared
    shared.wait_idle()
    assert "Traceback" not in shared.log("core")


@pytest.fixture
def text_client(engine: EngineProcesses) -> Iterator[IpcClient]:
    """A connection in the role of the text process."""
    with engine.connect("core", "text") as peer:
        yield peer


@pytest.fixture
def supervisor(engine: EngineProcesses) -> Iterator[IpcClient]:
    with engine.connect("core", "supervisor") as peer:
        yield peer


def receive_results(peer: IpcClient, ids: list[int]) -> dict[int, list[SequenceDelta]]:
    """Return all results of the sequences `ids`, up to the last ones."""
    results_by_id: dict[int, list[SequenceDelta]] = {i: [] for i in ids}
    unfinished, started_ids = set(ids), []
    while unfinished:
        step = peer.receive()
        if isinstance(step, Failure):
            step = StepResult([SequenceDelta(step.id, error_code=step.error_code)], [], SchedulerStats())
        assert isinstance(step, StepResult)
        started_ids += [started.id for started in step.started]
        for result in step.results:
            results_by_id[result.id].append(result)
            if result.finish_reason or result.error_code:
                unfinished.discard(result.id)
    assert len(started_ids) == len(set(started_ids))
    return results_by_id


def token_ids_of(deltas: list[SequenceDelta]) -> list[int]:
    return [i for result in deltas for i in result.token_ids]


def test_sequences_return_results_step_by_step(text_client: IpcClient, model: Path):
    prompts = {7: [1, 2, 3], 8: [9] * 40, 9: [5]}
    for request_id, prompt in prompts.items():
        text_client.send(SequenceRequest(request_id, prompt, SamplingParams.from_mapping(GREEDY)))
    for request_id, deltas in receive_results(text_client, list(prompts)).items():
        assert token_ids_of(deltas) == greedy_output(model, prompts[request_id], 12)
        assert [len(result.token_ids) for result in deltas] == [1] * 12
        assert deltas[-1].finish_reason == "length"


def test_invalid_sequences_fail_alone(engine: EngineProcesses, text_client: IpcClient):
    text_client.send(SequenceRequest(1, [5], SamplingParams.from_mapping(GREEDY)))
    invalid_requests = {
        2: SequenceRequest(2, [5] * 5000, SamplingParams.from_mapping(GREEDY)),
        3: SequenceRequest(3, [5], SamplingParams.from_mapping(GREEDY), adapter_digest="sha256:none"),
        4: SequenceRequest(4, "abc", SamplingParams.from_mapping(GREEDY)),  # type: ignore[arg-type]
        5: SequenceRequest(5, [5], "abc"),  # type: ignore[arg-type]
        6: SequenceRequest(6, None, None),  # type: ignore[arg-type]
    }
    for request in invalid_requests.values():
        text_client.send(request)
    deltas = receive_results(text_client, [1, *invalid_requests])
    assert len(token_ids_of(deltas[1])) == 12
    assert [deltas[i][0].error_code for i in (2, 3)] == ["INVALID_ARG", "NOT_FOUND"]
    assert all(deltas[i][0].error_code == "INVALID_ARG" for i in (4, 5, 6))


def test_second_text_process_replaces_the_first(engine: EngineProcesses, text_client: IpcClient):
    text_client.send(SequenceRequest(1, [5], SamplingParams.from_mapping(ENDLESS)))
    wait_for(lambda: engine.core_stats()["num_running"] == 1)
    with engine.connect("core", "text") as second:
        # The same id is another sequence for this client, which must not receive results of the first one.
        second.send(SequenceRequest(1, [6], SamplingParams.from_mapping(GREEDY)))
        assert len(token_ids_of(receive_results(second, [1])[1])) == 12
        with pytest.raises(EOFError):
            while True:
                text_client.receive()
        assert engine.core_stats()["num_running"] == 0


def test_status_and_control_calls(engine: EngineProcesses, supervisor: IpcClient, model: Path):
    status = supervisor.call("status")
    assert set(status) == {"started_at", "memory", "adapters", "stats"}
    assert status["started_at"].endswith("Z")
    assert status["memory"]["num_blocks"] == engine.core_stats()["num_blocks"] > 0
    assert status["memory"]["max_model_len"] == 2048
    assert supervisor.call("check") is None
    with pytest.raises(InvalidArgument, match="'nope' is unknown"):
        supervisor.call("nope")
    with pytest.raises(InvalidArgument, match="load_adapter: Object missing required field `digest`"):
        supervisor.call("load_adapter", path="/x")


def test_adapters_are_loaded_used_read_again_and_unloaded(
    engine: EngineProcesses, text_client: IpcClient, supervisor: IpcClient, adapters: list[Path]
):
    text_client.send(SequenceRequest(100, [5, 6], SamplingParams.from_mapping(GREEDY)))
    base = token_ids_of(receive_results(text_client, [100])[100])
    digests = [f"sha256:{i}" for i in range(4)]
    for digest, path in zip(digests, adapters, strict=True):
        assert supervisor.call("load_adapter", digest=digest, path=str(path), pinned=False) is None
    # Two host copies, four adapters, one slot: some adapters are read again while others run.
    first = run_all(text_client, digests, 0)
    assert len({tuple(output) for output in first}) == 4 and base not in first
    assert run_all(text_client, digests[::-1], 10) == first[::-1]
    text_client.send(SequenceRequest(101, [5, 6], SamplingParams.from_mapping(GREEDY)))
    assert token_ids_of(receive_results(text_client, [101])[101]) == base
    states = supervisor.call("status")["adapters"]
    assert set(states) == set(digests)
    assert sorted(states.values()) == ["disk", "disk", "host", "slot"]
    for digest in digests:
        assert supervisor.call("unload_adapter", digest=digest) is None
    assert supervisor.call("status")["adapters"] == {}
    text_client.send(SequenceRequest(102, [5, 6], SamplingParams.from_mapping(GREEDY), adapter_digest=digests[0]))
    assert receive_results(text_client, [102])[102][0].error_code == "NOT_FOUND"


def run_all(text_client: IpcClient, digests: list[str], base: int) -> list[list[int]]:
    """Return the output of one prompt with each adapter; all requests are concurrent."""
    ids = {base + i: digest for i, digest in enumerate(digests)}
    for request_id, digest in ids.items():
        text_client.send(
            SequenceRequest(request_id, [5, 6], SamplingParams.from_mapping(GREEDY), adapter_digest=digest)
        )
    deltas = receive_results(text_client, list(ids))
    return [token_ids_of(deltas[i]) for i in ids]


def test_failed_adapter_load_returns_the_reason(supervisor: IpcClient, adapters: list[Path], tmp_path: Path):
    with pytest.raises(InvalidArgument, match="adapter_config"):
        supervisor.call("load_adapter", digest="d", path=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidArgument):
        supervisor.call("load_adapter", digest="d", path=str(tmp_path))
    assert supervisor.call("status")["adapters"] == {}


def test_deleted_adapter_fails_only_its_own_sequences(
    engine: EngineProcesses,
    text_client: IpcClient,
    supervisor: IpcClient,
    model: Path,
    adapters: list[Path],
    tmp_path: Path,
):
    paths = [tmp_path / "gone", adapters[1], adapters[2]]
    make_llama_adapter(model, paths[0], 9)
    for i, path in enumerate(paths):
        supervisor.call("load_adapter", digest=f"d{i}", path=str(path))
    run_all(text_client, ["d1", "d2"], 0)
    assert supervisor.call("status")["adapters"]["d0"] == "disk"
    for file in paths[0].iterdir():
        file.unlink()
    text_client.send(SequenceRequest(20, [5, 6], SamplingParams.from_mapping(GREEDY), adapter_digest="d0"))
    text_client.send(SequenceRequest(21, [5, 6], SamplingParams.from_mapping(GREEDY), adapter_digest="d1"))
    deltas = receive_results(text_client, [20, 21])
    assert deltas[20][0].error_code and "gone" in deltas[20][0].error
    assert len(token_ids_of(deltas[21])) == 12
    for i in range(3):
        supervisor.call("unload_adapter", digest=f"d{i}")


def test_idle_core_uses_no_cpu_time(engine: EngineProcesses, text_client: IpcClient):
    text_client.send(SequenceRequest(1, [5], SamplingParams.from_mapping(GREEDY)))
    receive_results(text_client, [1])
    wait_quiet([psutil.Process(engine.processes["core"].pid)], 0.02)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        encode_frame(AbortSequences([1])),
        encode_frame(Hello("stub")),
    ],
    ids=range(3),
)
def test_invalid_messages_close_the_connection(engine: EngineProcesses, text_client: IpcClient, garbage: bytes):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(engine.folder / "core.sock"))
        raw.sendall(garbage)
        assert raw.recv(1) == b""
    text_client.send(SequenceRequest(1, [5], SamplingParams.from_mapping(GREEDY)))
    assert len(token_ids_of(receive_results(text_client, [1])[1])) == 12


def test_startup_is_logged_and_sigterm_exits_cleanly(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path, **config_of(model)) as engine:
        engine.start("core")
        log = engine.log("core")
        for expected in ("max_num_batched_tokens=2048", "part=weights planned_gib=", "part=kv", "num_blocks="):
            assert expected in log
        with engine.connect("core", "text") as text_client:
            text_client.send(SequenceRequest(1, [5], SamplingParams.from_mapping(ENDLESS)))
            text_client.receive()
            assert engine.kill("core", signal.SIGTERM) == 0


FAILING = """
import sys
from quire_engine.core import process as core_process
from quire_engine.ipc import process
from quire_engine.worker.model_runner import DeviceModelRunner

execute = DeviceModelRunner.execute

def fail_on_99(self, plan):
    if any(99 in span.sequence.prompt_token_ids for span in plan.spans):
        raise RuntimeError("device-side assert triggered")
    return execute(self, plan)

DeviceModelRunner.execute = fail_on_99
process.run_process("core", core_process.main)
"""


def test_failed_steps_fail_their_sequences_and_three_in_a_row_exit(model: Path, tmp_path: Path):
    # Without a real device failure, the runner of an otherwise real core raises for one token.
    engine = EngineProcesses(tmp_path, **config_of(model))
    argv = [sys.executable, "-c", FAILING, "--config", str(engine.config_file), "--run-dir", str(tmp_path)]
    with engine, (tmp_path / "core.log").open("wb") as log:
        engine.processes["core"] = subprocess.Popen(argv, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        wait_for(lambda: engine._is_serving("core"))
        with engine.connect("core", "text") as text_client:
            for round_id in (1, 2):
                for i in range(2):
                    request_id = 10 * round_id + i
                    text_client.send(SequenceRequest(request_id, [99], SamplingParams.from_mapping(GREEDY)))
                    (failed,) = receive_results(text_client, [request_id])[request_id]
                    assert failed.error_code == "INTERNAL" and "device-side assert" in failed.error
                text_client.send(SequenceRequest(round_id, [5], SamplingParams.from_mapping(GREEDY)))
                assert len(token_ids_of(receive_results(text_client, [round_id])[round_id])) == 12
            for i in range(3):
                text_client.send(SequenceRequest(30 + i, [99], SamplingParams.from_mapping(GREEDY)))
                if i < 2:
                    receive_results(text_client, [30 + i])
            with pytest.raises(EOFError):
                while True:
                    text_client.receive()
        assert engine.processes["core"].wait(10) == 70
        assert "steps keep failing" in engine.log("core")
