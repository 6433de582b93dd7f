# SPDX-License-Identifier: Apache-2.0
"""The preflight says what a machine lacks, each with its fix, and finds the CPU build of torch where there is one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "hack/bootstrap.py"


@pytest.fixture
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_all_missing_requirements_with_fixes(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(bootstrap.platform, "libc_ver", lambda: ("glibc", "2.31"))
    monkeypatch.setattr(bootstrap.sysconfig, "get_config_var", lambda _: "/nowhere")
    monkeypatch.setattr(bootstrap, "NEEDED_BYTES", 2**60)
    problems = "\n".join(bootstrap.missing_requirements())
    assert "install python3.11" in problems
    assert "glibc 2.35 or later" in problems
    assert "libpython3.9.so.1.0: not found" in problems
    assert "apt-get install libpython3.9" in problems
    assert "disk:" in problems


@pytest.mark.parametrize(
    ("offered", "gpu", "wanted"),
    [
        ("2.15.0, 2.14.1, 2.13.0+cpu, 2.13.0, 2.9.0+cpu", False, "torch==2.13.0+cpu"),
        ("2.15.0, 2.13.0+cpu", True, None),
        ("2.15.0, 2.13.0", False, None),
        ("3.1.0+cpu, 2.5.0+cpu", False, None),
        ("", False, None),
    ],
)
def test_selects_the_newest_cpu_build_in_range(bootstrap, monkeypatch, offered, gpu, wanted):
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: gpu)
    pip = [sys.executable, "-c", f"print('Available versions: {offered}')"]
    assert bootstrap.torch_requirement(pip) == wanted


def test_range_equals_pyproject(bootstrap):
    (low, high) = (".".join(map(str, v)) for v in bootstrap.TORCH_RANGE)
    text = (SCRIPT.parents[1] / "pyproject.toml").read_text()
    assert f'"torch>={low},<{high.split(".")[0]}"' in text


def test_check_only_installs_nothing(tmp_path):
    command = [sys.executable, str(SCRIPT), "--check-only", "--venv", str(tmp_path / "env")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "nothing is missing" in done.stdout
    assert not (tmp_path / "env").exists()
