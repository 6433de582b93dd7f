# SPDX-License-Identifier: Apache-2.0
"""Startup failures of the supervisor with their messages, and its command line."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from nodocker_cluster.ports import free_ports
from support.pod_config import write_pod_config
from support.quire_serve import EXAMPLES, PORTS, QuireServeProcess
from support.supervisor_harness import catalog, started_supervisor

from quire_server.__main__ import main
from quire_server.supervisor.child_process import ChildProcess
from quire_server.supervisor.supervisor import Supervisor

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]


def wait_for_exit(pod, timeout=30):
    with contextlib.suppress(Exception):
        pod.child_processes()
    code = pod.process.wait(timeout)
    pod.assert_nothing_left()
    return code, pod.log.read_text()


def test_config_error_of_core_stops_the_supervisor(tmp_path):
    with started_supervisor(tmp_path / "pod", catalog(1), core_startup_error="model: 'none' is not a folder") as pod:
        code, log = wait_for_exit(pod)
    assert code == 2
    assert "quire: core ended with exit_code=2 before it was ready; its last lines:\n  model: 'none' is not" in log
    assert not pod.run_dir.exists()


def test_repeated_crash_of_core_stops_the_supervisor(tmp_path):
    with started_supervisor(tmp_path / "pod", catalog(1), core_startup_error="no memory", exit_code=70) as pod:
        code, log = wait_for_exit(pod)
    assert code == 1
    assert "core ended 3 times with exit_code=70" in log


EMPTY = catalog(1)


@pytest.fixture
def rejected(tmp_path, monkeypatch, capsys):
    """Return a function that runs the supervisor's main; it must fail before it starts a process."""

    def run(config, adapters=EMPTY):
        ports = dict(zip(PORTS, free_ports(4), strict=True))
        (tmp_path / "adapters.json").write_text(json.dumps(adapters))
        config_file = write_pod_config(tmp_path / "pod.json", {"servedName": "tales", "ports": ports}, config)
        folders = [f"--run-dir={tmp_path / 'run'}", f"--cache-dir={tmp_path / 'cache'}"]
        assert main([f"--config={config_file}", *folders]) == 2
        return capsys.readouterr().err

    monkeypatch.setattr("quire_server.__main__.configure_logging", lambda: None)
    monkeypatch.setattr(ChildProcess, "start", None)
    return run


@pytest.mark.parametrize(
    ("config", "adapters", "message"),
    [
        ({"engine": {"max_lora": 3}}, EMPTY, "pod.json: engine.max_lora: unknown field"),
        ({"server": {"expose": ["https"]}}, EMPTY, "pod.json: server.expose: 'https' is not a protocol; give http"),
        ({}, catalog(1, tales="/a"), "'tales' is the base model's name"),
        ({}, {"adapter": []}, "adapter: unknown field"),
    ],
)
def test_rejects_invalid_file(rejected, config, adapters, message):
    assert message in rejected(config, adapters)


@pytest.mark.parametrize("ports", [["http"], ["grpc"], ["metrics"], ["health"], ["http", "metrics", "health"]])
def test_error_names_all_ports_in_use(rejected, ports):
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in ports]
        used = {name: listener.getsockname()[1] for name, listener in zip(ports, listeners, strict=True)}
        error = rejected({"ports": used})
    named = ", ".join(f"ports.{name} {port} (Address already in use)" for name, port in used.items())
    assert f"{named}: cannot listen on 127.0.0.1; stop" in error


@pytest.mark.parametrize(("one", "other"), [("http", "grpc"), ("grpc", "health"), ("metrics", "health")])
def test_ports_must_differ(rejected, one, other):
    error = rejected({"ports": {one: 9000, other: 9000}})
    assert f"ports.{other}: 9000 is also the value of ports.{one}; ports must differ" in error


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
def test_rejects_host_of_another_machine(rejected, host):
    error = rejected({"host": host})
    assert f"host {host}: not an address of this machine" in error and "port" not in error


def test_run_dir_has_one_owner(tmp_path):
    with started_supervisor(tmp_path / "first", catalog(1)) as first:
        first.wait(first.run_dir.exists, 10, "started")
        with started_supervisor(tmp_path / "second", catalog(1), run_dir=first.run_dir) as second:
            code, log = wait_for_exit(second)
        assert (code, first.process.poll()) == (2, None)
        assert "in use by another supervisor" in log
        assert first.stop() == 0


def test_help_lists_paths_exit_codes_and_examples(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "/health/ready" in text and "exit codes:" in text and "Example:" in text


async def test_failed_cache_prune_is_logged_and_retried(caplog):
    async def prune_cache():
        raise OSError(errno.ESTALE, "Stale file handle")

    supervisor = Supervisor(
        None,
        SimpleNamespace(),
        SimpleNamespace(prune_cache=prune_cache),
        None,
        SimpleNamespace(names=frozenset()),
        None,
    )
    prune_task = asyncio.create_task(supervisor._prune_cache())
    await asyncio.wait([prune_task], timeout=0.1)
    assert not prune_task.done() and "cache prune failed" in caplog.text
    prune_task.cancel()


def test_serves_a_folder_with_an_adapter_and_a_key(tmp_path):
    adapter = shutil.copytree(EXAMPLES / "adapters/pirate", tmp_path / "pirate")
    flags = ["--lora", f"pirate={adapter}", "--served-model-name", "tales", "org/tales"]
    process = QuireServeProcess(
        str(EXAMPLES / "models/tiny"), tmp_path, *flags, env=os.environ | {"QUIRE_API_KEY": "s3cret"}
    )
    try:
        process.wait_ready()
        url = f"http://127.0.0.1:{process.ports['openai']}/v1/models"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=30)
        request = urllib.request.Request(url, headers={"Authorization": "Bearer s3cret"})
        models = json.load(urllib.request.urlopen(request, timeout=30))["data"]
        assert {model["id"] for model in models} == {"tales", "org/tales", "pirate"}
        for child in process.child_processes():
            secrets = (Path(f"/proc/{child.pid}/{name}").read_bytes() for name in ("environ", "cmdline"))
            assert not any(b"s3cret" in content for content in secrets)
    finally:
        process.stop()
