# SPDX-License-Identifier: Apache-2.0
"""The preflight says what a machine lacks, each with its fix, and finds the CPU build of torch where there is one."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import nvidia_stubs
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
    monkeypatch.setattr(bootstrap.machine.platform, "libc_ver", lambda: ("glibc", "2.31"))
    monkeypatch.setattr(bootstrap.machine.sysconfig, "get_config_var", lambda _: "/nowhere")
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


def compile_c(target: Path, code: str, *options: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-x", "c", "-", "-x", "none", "-o", str(target)]
    subprocess.run([*command, *options], input=code, text=True, check=True)


def test_pip_accepts_stubs_instead_of_libraries_of_nvidia(tmp_path):
    """In an environment that pip makes, a library with versioned functions of NVIDIA loads and learns of no device."""
    script = tmp_path / "map"
    script.write_text("libcublas.so.13 { global: cublasCreate_v2; cublasGetStatusString; };")
    functions = "int cublasCreate_v2() { return 0; } const char *cublasGetStatusString(int status) { return 0; }"
    compile_c(tmp_path / "libcublas.so.13", functions, f"-Wl,--version-script={script}")
    code = """int cublasCreate_v2(); const char *cublasGetStatusString(int status);
    int probe() { return cublasCreate_v2(); } const char *text() { return cublasGetStatusString(1); }"""
    library = tmp_path / "torch/lib/libtorch_cuda.so"
    run_path = "-Wl,-rpath,$ORIGIN/../../nvidia/cu13/lib"
    compile_c(library, code, str(tmp_path / "libcublas.so.13"), run_path)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    metadata = """Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0
Requires-Dist: cuda-toolkit[cublas,nvtx]==13.2.2; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13<3,>=2.30
Requires-Dist: triton~=3.9.0
Requires-Dist: nvidia-never; extra == "never"
"""
    wheel = wheels / "torch-2.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "torch/lib/libtorch_cuda.so")
        archive.writestr("torch-2.99.0.dist-info/METADATA", metadata)
        archive.writestr("torch-2.99.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
        archive.writestr("torch-2.99.0.dist-info/RECORD", "")
    nvidia_stubs._write_stub_wheels(wheel, wheels)
    without_triton = wheels / nvidia_stubs.WITHOUT_TRITON
    assert (wheels / nvidia_stubs.CONSTRAINTS).read_text() + f"triton==3.9.0+stub.{nvidia_stubs._DIGEST}\n" == (
        without_triton / nvidia_stubs.CONSTRAINTS
    ).read_text()
    folders = [f"--find-links={wheels}", f"--find-links={without_triton}"]
    pip = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", *folders, f"--target={tmp_path / 'env'}"]
    subprocess.run([*pip, f"--constraint={without_triton / nvidia_stubs.CONSTRAINTS}", "torch"], check=True)
    # In a process of its own: this one may have loaded a real library of this name.
    probe = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).probe())"
    command = [sys.executable, "-c", probe, tmp_path / "env/torch/lib/libtorch_cuda.so"]
    assert subprocess.run(command, check=False).returncode == 100


def test_check_only_installs_nothing(tmp_path):
    command = [sys.executable, str(SCRIPT), "--check-only", "--venv", str(tmp_path / "env")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "nothing is missing" in done.stdout
    assert not (tmp_path / "env").exists()
