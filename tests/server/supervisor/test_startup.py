# SPDX-License-Identifier: Apache-2.0
"""Startup failures of the supervisor with their messages, and its command line."""

import asyncio
import contextlib
import errno
import socket
from types import SimpleNamespace

import pytest
from support.supervisor_harness import ENGINE, catalog, started_supervisor

from quire_server.__main__ import main
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


@pytest.mark.parametrize(
    ("engine", "adapters", "message"),
    [
        ('{"model": "m", "max_lora": 3}', catalog(1), "max_lora: unknown field"),
        ("{", catalog(1), "engine.json: Expecting"),
        (ENGINE, catalog(1, tales="/a"), "'tales' is the base model's name"),
        (ENGINE, {"adapter": []}, "adapter: unknown field"),
    ],
)
def test_rejects_invalid_file_before_starting_processes(tmp_path, engine, adapters, message):
    with started_supervisor(tmp_path / "pod", adapters, engine=engine) as pod:
        code, log = wait_for_exit(pod)
    assert code == 2
    assert message in log
    assert "process started" not in log


@pytest.mark.parametrize("ports", [["http"], ["grpc"], ["metrics"], ["health"], ["http", "metrics", "health"]])
def test_error_names_all_ports_in_use(tmp_path, ports):
    with contextlib.ExitStack() as stack:
        flags = []
        for port in ports:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            flags.append(f"--{port}-port={listener.getsockname()[1]}")
        code, log = wait_for_exit(stack.enter_context(started_supervisor(tmp_path / "pod", catalog(1), *flags)))
    assert code == 2
    named = ", ".join(f"{flag.replace('=', ' ')} (Address already in use)" for flag in flags)
    assert f"{named}: cannot listen on 127.0.0.1; stop" in log


@pytest.mark.parametrize(("one", "other"), [("http", "grpc"), ("grpc", "health"), ("metrics", "health")])
def test_ports_must_differ(tmp_path, one, other):
    with started_supervisor(tmp_path / "pod", catalog(1), f"--{one}-port=9000", f"--{other}-port=9000") as pod:
        code, log = wait_for_exit(pod)
    assert code == 2
    assert f"--{one}-port 9000 and --{other}-port 9000: ports must differ; use different numbers" in log
    assert "process started" not in log


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
def test_rejects_host_of_another_machine(tmp_path, host):
    with started_supervisor(tmp_path / "pod", catalog(1), f"--host={host}") as pod:
        code, log = wait_for_exit(pod)
    assert code == 2
    assert f"--host {host}: not an address of this machine" in log and "port" not in log


def test_run_dir_has_one_owner(tmp_path):
    with started_supervisor(tmp_path / "first", catalog(1)) as first:
        first.wait(first.run_dir.exists, 10, "started")
        with started_supervisor(tmp_path / "second", catalog(1), f"--run-dir={first.run_dir}") as second:
            code, log = wait_for_exit(second)
        assert (code, first.process.poll()) == (2, None)
        assert "in use by another supervisor" in log
        assert first.stop() == 0


def test_help_lists_paths_exit_codes_and_examples(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "/health/ready" in text and "exit codes:" in text and "Examples:" in text


async def test_failed_cache_prune_is_logged_and_retried(caplog):
    async def prune_cache():
        raise OSError(errno.ESTALE, "Stale file handle")

    supervisor = Supervisor(None, SimpleNamespace(), SimpleNamespace(prune_cache=prune_cache), None)
    prune_task = asyncio.create_task(supervisor._prune_cache())
    await asyncio.wait([prune_task], timeout=0.1)
    assert not prune_task.done() and "cache prune failed" in caplog.text
    prune_task.cancel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--served-name=m", "--engine and --adapters are required, or --vllm-repository"),
        ("--vllm-repository=m --engine=e", "--vllm-repository cannot be combined with --engine or --adapters"),
        ("--engine=e --adapters=a --device=cpu", "--device requires --vllm-repository; otherwise set device in"),
        ("--engine=e --adapters=a --http-port=http", "must be a port from 1 to 65535, got 'http'"),
    ],
)
def test_rejects_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["--served-name=m", "--run-dir=r", "--cache-dir=c", *arguments.split()])
    assert message in capsys.readouterr().err
