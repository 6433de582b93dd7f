# SPDX-License-Identifier: Apache-2.0
"""Starts of the supervisor that cannot succeed, each with what it says; and what it says of itself."""

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


def ended(pod, timeout=30):
    with contextlib.suppress(Exception):
        pod.processes()
    code = pod.process.wait(timeout)
    pod.assert_nothing_left()
    return code, pod.log.read_text()


def test_a_configuration_that_the_core_refuses_ends_it_with_the_cores_words(tmp_path):
    with started_supervisor(tmp_path / "pod", catalog(1), core_refuses="model: 'none' is not a folder") as pod:
        code, log = ended(pod)
    assert code == 2
    assert "quire: core ended with exit_code=2 before it was ready; its last lines:\n  model: 'none' is not" in log
    assert not pod.run_dir.exists()


def test_a_core_that_always_crashes_at_the_start_ends_it(tmp_path):
    with started_supervisor(tmp_path / "pod", catalog(1), core_refuses="no memory", exit_code=70) as pod:
        code, log = ended(pod)
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
def test_a_wrong_file_ends_it_before_anything_starts(tmp_path, engine, adapters, message):
    with started_supervisor(tmp_path / "pod", adapters, engine=engine) as pod:
        code, log = ended(pod)
    assert code == 2
    assert message in log
    assert "process started" not in log


@pytest.mark.parametrize("ports", [["http"], ["grpc"], ["metrics"], ["health"], ["http", "metrics", "health"]])
def test_all_ports_that_are_taken_are_named(tmp_path, ports):
    with contextlib.ExitStack() as stack:
        flags = []
        for port in ports:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            flags.append(f"--{port}-port={taken.getsockname()[1]}")
        code, log = ended(stack.enter_context(started_supervisor(tmp_path / "pod", catalog(1), *flags)))
    assert code == 2
    named = ", ".join(f"{flag.replace('=', ' ')} (Address already in use)" for flag in flags)
    assert f"{named}: cannot listen on 127.0.0.1 there" in log


@pytest.mark.parametrize(("one", "other"), [("http", "grpc"), ("grpc", "health"), ("metrics", "health")])
def test_ports_must_differ(tmp_path, one, other):
    with started_supervisor(tmp_path / "pod", catalog(1), f"--{one}-port=9000", f"--{other}-port=9000") as pod:
        code, log = ended(pod)
    assert code == 2
    assert f"--{one}-port 9000 and --{other}-port 9000: ports must differ; give each its own number" in log
    assert "process started" not in log


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
def test_an_address_that_is_another_machines_is_named(tmp_path, host):
    with started_supervisor(tmp_path / "pod", catalog(1), f"--host={host}") as pod:
        code, log = ended(pod)
    assert code == 2
    assert f"--host {host}: not an address of this machine" in log and "port" not in log


def test_a_run_folder_has_one_owner(tmp_path):
    with started_supervisor(tmp_path / "first", catalog(1)) as first:
        first.wait(first.run_dir.exists, 10, "up")
        with started_supervisor(tmp_path / "second", catalog(1), f"--run-dir={first.run_dir}") as second:
            code, log = ended(second)
        assert (code, first.process.poll()) == (2, None)
        assert "another supervisor uses it" in log
        assert first.stop() == 0


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "/health/ready" in text and "exit codes:" in text and "Examples:" in text


async def test_a_cache_that_cannot_be_swept_ends_nothing(caplog):
    async def sweep():
        raise OSError(errno.ESTALE, "Stale file handle")

    supervisor = Supervisor(None, SimpleNamespace(), SimpleNamespace(prune_cache=sweep), None)
    sweeping = asyncio.create_task(supervisor._prune_cache())
    await asyncio.wait([sweeping], timeout=0.1)
    assert not sweeping.done() and "cache was not swept" in caplog.text
    sweeping.cancel()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--served-name=m", "--engine and --adapters are needed, or --vllm-repository"),
        ("--vllm-repository=m --engine=e", "--engine and --adapters, or --vllm-repository: not both"),
        ("--engine=e --adapters=a --device=cpu", "--device is for --vllm-repository: engine.json says it"),
        ("--engine=e --adapters=a --http-port=http", "'http' is not a port; use 1 to 65535"),
    ],
)
def test_wrong_use_is_said(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(["--served-name=m", "--run-dir=r", "--cache-dir=c", *arguments.split()])
    assert message in capsys.readouterr().err
