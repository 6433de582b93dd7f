# SPDX-License-Identifier: Apache-2.0
"""Start, death, drain and exit of the text and core processes while the other process keeps running."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.engine_processes import LONG_CONTEXT, EngineProcesses, engine_config, text_of, wait_for
from support.tiny_checkpoints import make_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), max_positions=LONG_CONTEXT)


def test_core_death_ends_requests_at_once_and_a_new_core_serves(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path, **engine_config(model)) as pod:
        pod.start("text")
        with pod.connect("text", "stub") as client:
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
            assert time.monotonic() - start < 20
            pod.start("core")
            assert text_of(client.generate("fox", temperature=0, max_tokens=8)) == before


def test_text_process_death_aborts_its_sequences_in_the_core(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path, **engine_config(model)) as pod:
        pod.start("core", "text")
        client = pod.connect("text", "stub")
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
        assert time.monotonic() - start < 20
        pod.start("text")
        with pod.connect("text", "stub") as client:
            assert client.generate("fox", max_tokens=4)[-1].finish_reason == "length"


def test_sigterm_ends_the_text_process_with_exit_code_0(model: Path, tmp_path: Path):
    with EngineProcesses(tmp_path / "run", **engine_config(model)) as pod:
        pod.start("text")
        assert pod.kill("text", signal.SIGTERM) == 0
        # A remaining socket file does not prevent the next process from listening.
        pod.start("text")


def test_process_dies_with_its_parent(model: Path, tmp_path: Path):
    pod = EngineProcesses(tmp_path / "run", **engine_config(model))
    argv = [sys.executable, "-m", "quire_engine.text", "--config", str(pod.config_file), "--run-dir", str(pod.folder)]
    code = f"import subprocess; p = subprocess.Popen({argv!r}); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(lambda: (pod.folder / "text.sock").exists())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
