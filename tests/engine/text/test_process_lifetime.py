# SPDX-License-Identifier: Apache-2.0
"""Start, death, drain and exit of the text and core processes while the other process keeps running."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.engine_processes import (
    LONG_CONTEXT,
    EngineProcesses,
    engine_config,
    events_of,
    first_event,
    text_of,
    wait_for,
)
from support.tiny_checkpoints import greedy_output, make_llama

from quire_spec.protocol.messages import CancelRequests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), max_positions=LONG_CONTEXT)


def test_core_death_ends_requests_at_once_and_a_new_core_serves(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path, **engine_config(model)) as pod:
        pod.start("text")
        with pod.connect("text", "frontend") as client:
            (event,) = client.generate("fox")
            assert (event.error_code, event.error) == ("UNAVAILABLE", "engine core is starting; try again")
            pod.start("core")
            before = text_of(client.generate("fox", temperature=0, max_tokens=8))
            requests = [client.submit("fox", max_tokens=100_000, stream=s) for s in (True, False) for _ in range(8)]
            wait_for(lambda: pod.core_stats()["num_running"] == 16)
            start = time.monotonic()
            pod.kill("core")
            for events in client.collect(requests).values():
                assert events[-1].error_code == "UNAVAILABLE" and "restarting" in events[-1].error
            (event,) = client.generate("fox")
            assert event.error_code == "UNAVAILABLE"
            assert time.monotonic() - start < 2.0
            pod.start("core")
            assert text_of(client.generate("fox", temperature=0, max_tokens=8)) == before


def test_text_process_death_aborts_its_sequences_in_the_core(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path, **engine_config(model)) as pod:
        pod.start("core", "text")
        client = pod.connect("text", "frontend")
        for _ in range(8):
            client.submit("fox", max_tokens=100_000)
        wait_for(lambda: pod.core_stats()["num_running"] == 8)
        start = time.monotonic()
        pod.kill("text")
        with pytest.raises(EOFError):
            while True:
                client.receive()
        client.close()
        pod.wait_idle()
        assert time.monotonic() - start < 2.0
        pod.start("text")
        with pod.connect("text", "frontend") as client:
            assert client.generate("fox", max_tokens=4)[-1].finish_reason == "length"


def test_queue_limit_and_drain(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path, **engine_config(model, max_num_seqs=1, max_num_queued_reqs=2)) as pod:
        pod.start("core", "text")
        with pod.connect("text", "frontend") as client, pod.connect("text", "supervisor") as supervisor:
            running = client.submit("fox", temperature=0, max_tokens=100_000)
            first_event(client, running)
            queued = [client.submit("fox", max_tokens=4), client.submit("the fox", max_tokens=4)]
            rejected = client.submit("fox")
            while not (events := [e for e in client.receive().deltas if e.id != running]):
                pass
            assert events[0].id == rejected and events[0].error_code == "UNAVAILABLE"
            assert "2 requests are waiting and max_num_queued_reqs is 2" in events[0].error
            wait_for(lambda: supervisor.call("status")["num_queued"] == 2)

            with pod.connect("text", "supervisor") as other:
                other.socket.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    other.call("drain")
                (event,) = [e for e in events_of(client, client.submit("fox")) if e.error_code]
                assert event.error_code == "UNAVAILABLE" and "draining" in event.error
                client.send(CancelRequests([running]))
                finish_reasons: dict[int, str | None] = {}
                while len(finish_reasons) < 2:
                    finish_reasons |= {
                        delta.id: delta.finish_reason
                        for delta in client.receive().deltas
                        if delta.id in queued and delta.final
                    }
                assert set(finish_reasons.values()) == {"length"}
                other.socket.settimeout(10)
                assert other.receive().result == {}


def test_model_without_tokenizer_uses_token_ids(tmp_path: Path):
    model = make_llama(tmp_path / "model", tokenizer=False)
    with EngineProcesses(tmp_path / "run", **engine_config(model)) as pod:
        pod.start("core", "text")
        with pod.connect("text", "frontend") as client:
            events = client.generate([5, 6, 7], temperature=0, max_tokens=6, logprobs=0)
            assert [i for event in events for i in event.token_ids] == greedy_output(model, [5, 6, 7], 6)
            assert all(event.text == "" for event in events)
            (event,) = client.generate("fox")
            assert event.error_code == "INVALID_ARG" and "tokenizer.json" in event.error
            (event,) = client.generate([5], stop=["x"])
            assert event.error_code == "INVALID_ARG" and "stop_token_ids" in event.error


def test_sigterm_ends_the_text_process_with_exit_code_0(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path / "run", **engine_config(model)) as pod:
        pod.start("text")
        assert pod.kill("text", signal.SIGTERM) == 0
        # A remaining socket file does not prevent the next process from listening.
        pod.start("text")


def test_invalid_configuration_prints_one_line_and_exits_with_code_2(tmp_path: Path):
    engine = tmp_path / "engine.json"
    cases = {
        '{"model": "/nowhere/at/all"}': "/nowhere/at/all",
        '{"model": "x", "gpu_utilisation": 1}': "gpu_utilisation",
        "{": str(engine),
    }
    for document, message in cases.items():
        engine.write_text(document)
        for name in ("text", "core"):
            argv = [sys.executable, "-m", f"quire_engine.{name}", "--engine", str(engine)]
            argv += ["--served-name", "base", "--run-dir", str(tmp_path)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
            assert done.returncode == 2
            assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_process_dies_with_its_parent(model: Path, tmp_path: Path):
    pod = EngineProcesses(tmp_path / "run", **engine_config(model))
    argv = [sys.executable, "-m", "quire_engine.text", "--engine", str(pod.folder / "engine.json")]
    argv += ["--served-name", "base", "--run-dir", str(pod.folder)]
    code = f"import subprocess; p = subprocess.Popen({argv!r}); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: (pod.folder / "text.sock").exists())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5.0)
