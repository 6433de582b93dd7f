# SPDX-License-Identifier: Apache-2.0
"""`quire doctor` on this machine, and with things that are missing."""

import importlib.util
import shutil
import socket
from collections import namedtuple

from quire_operator.cli import main
from quire_operator.cli.doctor import machine

Usage = namedtuple("Usage", "total free")


def report(capsys):
    return main.main(["doctor"]), capsys.readouterr().out


def test_this_machine_can_serve(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    status, text = report(capsys)
    assert status == 0 and "FAIL" not in text
    assert "Triton Inference Server" in text and "warn  http://127.0.0.1:9: " in text


def test_names_what_is_missing_with_the_fix(capsys, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setattr("quire_operator.cli.doctor.checks._PORT_OPTIONS", {port: "--grpc-port"})
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setattr(machine, "missing_requirements", lambda: ["libc musl: the server needs glibc"])
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else find_spec(name))
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**26, 2**20))
        status, text = report(capsys)
    assert status == 1
    for line in (
        "FAIL  libc musl",
        "FAIL  uvloop: not installed; pip install 'quire-llm[serve]'",
        "warn  no C++ compiler",
        "warn  /dev/shm has 64.0 MiB",
        f"warn  port {port} is in use; stop that program, or give --grpc-port",
    ):
        assert line in text
