# SPDX-License-Identifier: Apache-2.0
"""The real engine core over its real socket: sequences, owners, adapters, idleness, failing steps."""

import json
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

from quire_spec.errors import InvalidArgument
from quire_spec.protocol.framing import encode_frame
from quire_spec.protocol.messages import AbortSequences, Hello, SequenceDelta, SequenceRequest, StepResult

GREEDY = {"temperature": 0, "max_tokens": 12}
ENDLESS = {"temperature": 0, "max_tokens": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_llama_adapter(model, tmp_path_factory.mktemp("adapter"), seed) for seed in range(4)]


def config_of(model: Path, **more: object) -> dict[str, object]:
    return {"model": str(model), "dtype": "float32", "kv_cache_memory_bytes": 8 * 2**20, **more}


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcesses]:
    lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2}
    with EngineProcesses(tmp_path_factory.mktemp("run"), **config_of(model, **lora)) as pod:
        yield pod.start("core")


@pytest.fixture
def pod(shared: EngineProcesses) -> Iterator[EngineProcesses]:
    yield shared
    shared.wait_idle()
    assert "Traceback" not in shared.log("core")


@pytest.fixture
def text(pod: EngineProcesses) -> Iterator[IpcClient]:
    """A connection in the role of the text process."""
    with pod.connect("core", "text") as peer:
        yield peer


@pytest.fixture
def supervisor(pod: EngineProcesses) -> Iterator[IpcClient]:
    with pod.connect("core", "supervisor") as peer:
        yield peer


def results(peer: IpcClient, ids: list[int]) -> dict[int, list[SequenceDelta]]:
    """Every result of the sequences `ids`, up to their last ones."""
    got: dict[int, list[SequenceDelta]] = {i: [] for i in ids}
    missing, started = set(ids), []
    while missing:
        step = peer.receive()
        assert isinstance(step, StepResult)
        started += step.started_ids
        for result in step.results:
            got[result.id].append(result)
            if result.finish_reason or result.error_code:
                missing.discard(result.id)
    assert len(started) == len(set(started))
    return got


def tokens(found: list[SequenceDelta]) -> list[int]:
    return [i for result in found for i in result.token_ids]


def test_sequences_run_and_their_results_come_step_by_step(text: IpcClient, model: Path):
    prompts = {7: [1, 2, 3], 8: [9] * 40, 9: [5]}
    for id, prompt in prompts.items():
        text.send(SequenceRequest(id, prompt, GREEDY))
    for id, found in results(text, list(prompts)).items():
        assert tokens(found) == greedy_output(model, prompts[id], 12)
        assert [len(result.token_ids) for result in found] == [1] * 12
        assert found[-1].finish_reason == "length"


def test_a_wrong_sequence_fails_alone(pod: EngineProcesses, text: IpcClient):
    text.send(SequenceRequest(1, [5], GREEDY))
    wrong = {
        2: SequenceRequest(2, [], GREEDY),
        3: SequenceRequest(3, [10**6], GREEDY),
        4: SequenceRequest(4, [5] * 5000, GREEDY),
        5: SequenceRequest(5, [5], {"top_p": 9}),
        6: SequenceRequest(6, [5], GREEDY, adapter_digest="sha256:none"),
        7: SequenceRequest(7, "abc", GREEDY),  # type: ignore[arg-type]
        8: SequenceRequest(8, [5], "abc"),  # type: ignore[arg-type]
        9: SequenceRequest(9, None, None),  # type: ignore[arg-type]
    }
    for request in wrong.values():
        text.send(request)
    got = results(text, [1, *wrong])
    assert len(tokens(got[1])) == 12
    assert {got[i][0].error_code for i in (2, 3, 4, 5)} == {"INVALID_ARG"}
    assert got[6][0].error_code == "NOT_FOUND"
    assert all(got[i][0].error_code and got[i][0].error for i in (7, 8, 9))
    # What the text process would never send is logged with a traceback, which the fixture must not mistake.
    (pod.folder / "core.log").write_text("")


def test_abort_frees_blocks_and_says_so(pod: EngineProcesses, text: IpcClient):
    text.send(SequenceRequest(1, [5], ENDLESS))
    first = text.receive()
    assert isinstance(first, StepResult)
    while not first.started_ids:
        first = text.receive()
    assert pod.core_stats()["num_used_blocks"] > 0
    text.send(AbortSequences([1, 99]))
    pod.wait_idle()
    text.socket.settimeout(5)
    while (step := text.receive()).stats.num_running:
        pass
    assert (step.stats.num_used_blocks, step.results) == (0, [])


def test_what_a_text_process_left_is_aborted(pod: EngineProcesses, text: IpcClient):
    text.send(SequenceRequest(1, [5], ENDLESS))
    wait_for(lambda: pod.core_stats()["num_running"] == 1)
    text.close()
    pod.wait_idle()


def test_a_second_text_process_takes_over(pod: EngineProcesses, text: IpcClient):
    text.send(SequenceRequest(1, [5], ENDLESS))
    wait_for(lambda: pod.core_stats()["num_running"] == 1)
    with pod.connect("core", "text") as second:
        # The same id means another sequence here, and nothing of the first one's comes.
        second.send(SequenceRequest(1, [6], GREEDY))
        assert len(tokens(results(second, [1])[1])) == 12
        with pytest.raises(EOFError):
            while True:
                text.receive()
        assert pod.core_stats()["num_running"] == 0


def test_status_and_calls(pod: EngineProcesses, supervisor: IpcClient, model: Path):
    status = supervisor.call("status")
    assert set(status) == {"started_at", "memory", "adapters", "stats"}
    assert status["started_at"].endswith("Z")
    assert status["memory"]["num_blocks"] == status["stats"]["num_blocks"] > 0
    assert status["memory"]["max_model_len"] == 2048
    assert supervisor.call("check") == {}
    with pytest.raises(InvalidArgument, match="'nope' is unknown"):
        supervisor.call("nope")
    with pytest.raises(InvalidArgument, match="digest: expected a string"):
        supervisor.call("load_adapter", path="/x")


def test_adapters_are_loaded_used_read_again_and_unloaded(
    pod: EngineProcesses, text: IpcClient, supervisor: IpcClient, adapters: list[Path]
):
    text.send(SequenceRequest(100, [5, 6], GREEDY))
    base = tokens(results(text, [100])[100])
    digests = [f"sha256:{i}" for i in range(4)]
    for digest, path in zip(digests, adapters, strict=True):
        assert supervisor.call("load_adapter", digest=digest, path=str(path), pinned=False) == {}
    # Two host copies, four adapters, one slot: running them in turn reads some again while others run.
    first = run_all(text, digests, 0)
    assert len({tuple(found) for found in first}) == 4 and base not in first
    assert run_all(text, digests[::-1], 10) == first[::-1]
    text.send(SequenceRequest(101, [5, 6], GREEDY))
    assert tokens(results(text, [101])[101]) == base
    states = supervisor.call("status")["adapters"]
    assert set(states) == set(digests)
    assert sorted(states.values()) == ["disk", "disk", "host", "slot"]
    for digest in digests:
        assert supervisor.call("unload_adapter", digest=digest) == {}
    assert supervisor.call("status")["adapters"] == {}
    text.send(SequenceRequest(102, [5, 6], GREEDY, adapter_digest=digests[0]))
    assert results(text, [102])[102][0].error_code == "NOT_FOUND"


def run_all(text: IpcClient, digests: list[str], base: int) -> list[list[int]]:
    """Output of one prompt with each adapter, asked for at once."""
    ids = {base + i: digest for i, digest in enumerate(digests)}
    for id, digest in ids.items():
        text.send(SequenceRequest(id, [5, 6], GREEDY, adapter_digest=digest))
    got = results(text, list(ids))
    return [tokens(got[i]) for i in ids]


def test_an_adapter_that_cannot_be_loaded_says_why(supervisor: IpcClient, adapters: list[Path], tmp_path: Path):
    with pytest.raises(InvalidArgument, match="adapter_config"):
        supervisor.call("load_adapter", digest="d", path=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidArgument):
        supervisor.call("load_adapter", digest="d", path=str(tmp_path))
    assert supervisor.call("status")["adapters"] == {}


def test_an_adapter_that_vanished_fails_its_own_sequences(
    pod: EngineProcesses, text: IpcClient, supervisor: IpcClient, model: Path, adapters: list[Path], tmp_path: Path
):
    paths = [tmp_path / "gone", adapters[1], adapters[2]]
    make_llama_adapter(model, paths[0], 9)
    for i, path in enumerate(paths):
        supervisor.call("load_adapter", digest=f"d{i}", path=str(path))
    run_all(text, ["d1", "d2"], 0)
    assert supervisor.call("status")["adapters"]["d0"] == "disk"
    for file in paths[0].iterdir():
        file.unlink()
    text.send(SequenceRequest(20, [5, 6], GREEDY, adapter_digest="d0"))
    text.send(SequenceRequest(21, [5, 6], GREEDY, adapter_digest="d1"))
    got = results(text, [20, 21])
    assert got[20][0].error_code and "gone" in got[20][0].error
    assert len(tokens(got[21])) == 12
    for i in range(3):
        supervisor.call("unload_adapter", digest=f"d{i}")


def test_an_idle_core_takes_no_processor_time(pod: EngineProcesses, text: IpcClient):
    text.send(SequenceRequest(1, [5], GREEDY))
    results(text, [1])
    wait_quiet([psutil.Process(pod.processes["core"].pid)], 0.02)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        encode_frame(AbortSequences([1])),
        encode_frame(Hello("frontend")),
        encode_frame(Hello("supervisor")) + encode_frame(AbortSequences([1])),
    ],
    ids=range(4),
)
def test_a_broken_peer_is_cut(pod: EngineProcesses, text: IpcClient, garbage: bytes):
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(pod.folder / "core.sock"))
        raw.sendall(garbage)
        assert raw.recv(1) == b""
    text.send(SequenceRequest(1, [5], GREEDY))
    assert len(tokens(results(text, [1])[1])) == 12


def test_start_is_logged_and_sigterm_ends_it(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path, **config_of(model)) as pod:
        pod.start("core")
        log = pod.log("core")
        for said in ("max_num_batched_tokens=2048", "part=weights planned_gib=", "part=kv", "num_blocks="):
            assert said in log
        with pod.connect("core", "text") as text:
            text.send(SequenceRequest(1, [5], ENDLESS))
            text.receive()
            assert pod.kill("core", signal.SIGTERM) == 0


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


def test_failing_steps_fail_their_sequences_and_three_in_a_row_end_the_process(model: Path, tmp_path: Path):
    # A device that fails cannot be had on order: the runner of an otherwise real core raises for one token.
    pod = EngineProcesses(tmp_path, **config_of(model))
    argv = [sys.executable, "-c", FAILING, "--engine", str(tmp_path / "engine.json")]
    argv += ["--served-name", "base", "--run-dir", str(tmp_path)]
    with pod, (tmp_path / "core.log").open("wb") as log:
        pod.processes["core"] = subprocess.Popen(argv, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        wait_for(lambda: pod._is_serving("core"))
        with pod.connect("core", "text") as text:
            for good in (1, 2):
                for i in range(2):
                    id = 10 * good + i
                    text.send(SequenceRequest(id, [99], GREEDY))
                    (failed,) = results(text, [id])[id]
                    assert failed.error_code == "INTERNAL" and "device-side assert" in failed.error
                text.send(SequenceRequest(good, [5], GREEDY))
                assert len(tokens(results(text, [good])[good])) == 12
            for i in range(3):
                text.send(SequenceRequest(30 + i, [99], GREEDY))
                if i < 2:
                    results(text, [30 + i])
            with pytest.raises(EOFError):
                while True:
                    text.receive()
        assert pod.processes["core"].wait(10) == 70
        assert "steps keep failing" in pod.log("core")


def test_a_cache_that_is_too_small_is_refused_with_the_setting(model: Path, tmp_path: Path):
    engine = tmp_path / "engine.json"
    engine.write_text(json.dumps(config_of(model, kv_cache_memory_bytes=4096)))
    argv = [sys.executable, "-m", "quire_engine.core", "--engine", str(engine)]
    argv += ["--served-name", "base", "--run-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "quire_engine.core: " in done.stderr and "kv_cache_memory_bytes" in done.stderr
