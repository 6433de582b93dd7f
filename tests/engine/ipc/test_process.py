# SPDX-License-Identifier: Apache-2.0
"""A failing process exits at once, with the exit code and the last log line that the supervisor reads."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire_engine.ipc.process import ProcessArgs
from quire_spec.constants import MAX_SOCKET_PATH
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

SCRIPT = """
import asyncio, threading, time
from quire_engine.ipc import process
from quire_spec.errors import ConfigError

async def serve(fail):
    loop = asyncio.get_running_loop()
    process.install_exit_handlers(loop)
    print("serving", flush=True)
    fail(loop)
    await asyncio.sleep(60)

def main(args):
    {body}

process.run_process("name", main)
"""

FAILURES = {
    "main": "raise RuntimeError('boom')",
    "thread": "threading.Thread(target=lambda: 1 / 0).start(); time.sleep(60)",
    "callback": "asyncio.run(serve(lambda loop: loop.call_soon(lambda: 1 / 0)))",
    "future": "asyncio.run(serve(lambda loop: loop.create_future().set_result(1) or 1 / 0))",
}


DOCUMENT = '{"servedName": "base", "adapters": "/a", "engine": {"model": "m"}}'


def start_process(tmp_path: Path, body: str, document: str = DOCUMENT) -> subprocess.Popen[str]:
    config_file = tmp_path / "pod.json"
    config_file.write_text(document)
    argv = [sys.executable, "-c", SCRIPT.format(body=body), "--config", str(config_file), "--run-dir", str(tmp_path)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("failure", FAILURES)
def test_unhandled_exception_ends_the_process(tmp_path: Path, failure: str):
    with start_process(tmp_path, FAILURES[failure]) as process:
        _, err = process.communicate(timeout=20)
    assert process.returncode == 70
    assert "Traceback" in err and ("boom" in err or "ZeroDivisionError" in err)
    assert " ERROR quire_engine.ipc.process " in err


def test_configuration_error_is_reported_in_one_line(tmp_path: Path):
    documents = {
        DOCUMENT: "max_loras",
        DOCUMENT.replace('"m"', '"m", "gpu_utilisation": 1'): "engine.gpu_utilisation",
        "{": "pod.json",
    }
    for document, field in documents.items():
        with start_process(tmp_path, "raise ConfigError('max_loras: must be at least 1, got 0')", document) as process:
            _, err = process.communicate(timeout=20)
        (line,) = err.splitlines()
        assert process.returncode == 2 and line.startswith("name: ") and field in line


@pytest.mark.parametrize("body", ["print('serving', flush=True); time.sleep(60)", "asyncio.run(serve(lambda loop: 0))"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process_at_once_with_exit_code_0(tmp_path: Path, body: str, number: signal.Signals):
    with start_process(tmp_path, body) as process:
        assert process.stdout is not None and process.stdout.readline() == "serving\n"
        start_time = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert time.monotonic() - start_time < 20, "without the signal it ends after 60 s"


def test_too_long_run_dir_is_rejected(tmp_path: Path):
    short = ProcessArgs(EngineConfig("m"), "base", Path("/run/quire"), "text")
    assert short.socket_path("text.sock") == Path("/run/quire/text.sock")
    deep = ProcessArgs(EngineConfig("m"), "base", Path("/" + "x" * MAX_SOCKET_PATH), "text")
    with pytest.raises(ConfigError, match="--run-dir"):
        deep.socket_path("text.sock")
