# SPDX-License-Identifier: Apache-2.0
"""Make .venv in a fresh clone: check that the machine meets the requirements, and install the packages for `make demo`
or for tests.

The script runs with the machine's own Python and needs only the standard library. It reports all missing requirements
together, with a fix for each of them. On a machine without an NVIDIA GPU, the script installs PyTorch's CPU build if
the package index offers one. Otherwise, it installs the default build without 3 GB of CUDA libraries (nvidia_stubs.py).

    python3.11 hack/bootstrap.py --for demo|dev|emulated [--venv .venv] [--check-only]
"""

import argparse
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import nvidia_stubs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "operator"))

from quire_operator.cli.doctor import machine  # noqa: E402

EXTRAS = "engine,streamer,tracing,trust,server,openai,operator"
TORCH_RANGE = ((2, 11), (3, 0))
"""The first version of torch that is supported, and the first version that is too new. pyproject.toml contains the same
range."""
_GROUP_ORDER = ("demo", "dev")
"""Names of dependency groups. Each group includes the groups before it."""
EMULATED = "emulated"
"""Name of the group that contains the lowest supported PyTorch, for CUDA but without NVIDIA's libraries. tests/emulator
replaces these libraries."""
EMULATED_TORCH = ("torch==2.11.0", "triton==3.6.0")
EMULATED_HEADERS = "nvidia-cuda-runtime===13.0.96"
"""tests/emulator needs only its headers. The three equals signs exclude the stub, which has a local label."""
TORCH = f"torch>={'.'.join(map(str, TORCH_RANGE[0]))},<{TORCH_RANGE[1][0]}"
NEEDED_BYTES = 6 * 2**30
"""Space for the environment of the tests: 3.7 GB, and 0.6 GB for torch's wheel. With NVIDIA's libraries, it needs 3 GB
more."""


def missing_requirements() -> list[str]:
    """Return the requirements that this machine does not meet. Each text also describes the fix."""
    return [*machine.missing_requirements(), *_venv_module(), *_space()]


def _venv_module() -> list[str]:
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return [f"the venv module: install it (Debian, Ubuntu: apt-get install python{version}-venv)"]
    return []


def _space() -> list[str]:
    free = shutil.disk_usage(ROOT).free
    if free >= NEEDED_BYTES:
        return []
    return [f"disk: {free / 2**30:.1f} GiB free at {ROOT}; about {NEEDED_BYTES / 2**30:.0f} GiB are needed"]


def has_nvidia_gpu() -> bool:
    """Return whether the device nodes of an NVIDIA driver exist."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def torch_requirement(pip: list[str]) -> str | None:
    """Return the pip requirement for the newest CPU build of PyTorch in the package index; None if the default build
    must be used."""
    if has_nvidia_gpu():
        return None
    output = subprocess.run([*pip, "index", "versions", "torch"], capture_output=True, text=True, check=False).stdout
    low, high = TORCH_RANGE
    builds = [(tuple(map(int, m.groups())), m.group(0)) for m in re.finditer(r"(\d+)\.(\d+)\.(\d+)\+cpu", output)]
    candidates = sorted(b for b in builds if low <= b[0][:2] < high)
    if candidates:
        return f"torch=={candidates[-1][1]}"
    return None


def torch_options(pip: list[str]) -> list[str]:
    """Return arguments of `pip install` that select a build of torch for this machine. See nvidia_stubs.py."""
    if has_nvidia_gpu():
        return []
    if requirement := torch_requirement(pip):
        return [requirement]
    if programs := nvidia_stubs.missing_programs():
        print_progress(
            "note: the configured package index has no CPU build of torch. Therefore, the default build is installed,\n"
            f"      with 3 GB of CUDA libraries. To avoid this, stop now and install {' and '.join(programs)}\n"
            "      (Debian, Ubuntu: apt-get install g++ binutils), or set PIP_EXTRA_INDEX_URL to PyTorch's CPU index."
        )
        return []
    print_progress("getting torch without CUDA's libraries (a download of 0.5 GB)")
    folder = nvidia_stubs.build_wheels(pip, TORCH)
    return [f"--find-links={folder}", f"--constraint={folder / nvidia_stubs.CONSTRAINTS}"]


def requirements(group: str) -> list[str]:
    """Return the packages of a dependency group in pyproject.toml, and those of the groups that it includes. pip itself
    can read dependency groups only since version 25.1."""
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    specifiers: list[str] = []
    for entry in groups[group]:
        specifiers += requirements(entry["include-group"]) if isinstance(entry, dict) else [entry]
    return specifiers


def stamp(folder: Path, group: str) -> Path:
    """Return the path of a file that exists only if `group` is installed as the current pyproject.toml defines it."""
    files = ROOT / "pyproject.toml", Path(__file__), Path(nvidia_stubs.__file__)
    content = b"".join(file.read_bytes() for file in files)
    return folder / f".quire-{group}-{hashlib.sha256(content).hexdigest()[:16]}"


def install(folder: Path, group: str) -> None:
    """Create the environment in `folder` and install the project with `group`."""
    started = time.monotonic()
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    if not (folder / "bin/python").exists():
        print_progress(f"making {folder.name} with Python {platform.python_version()}")
        venv.create(folder, with_pip=True, symlinks=True)
    arguments = [*torch_options(pip), "-e", f"{ROOT}[{EXTRAS}]", *requirements(group)]
    print_progress(f"installing quire-llm[{EXTRAS}] and what {group} needs")
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    done = subprocess.run([*pip, "install", *quiet, *arguments], check=False)
    if done.returncode:
        sys.exit(f"bootstrap: pip failed with {done.returncode}; see its last lines")
    for included in _GROUP_ORDER[: _GROUP_ORDER.index(group) + 1]:
        stamp(folder, included).touch()
    print_progress(f"ready in {time.monotonic() - started:.0f} s: {folder}")


def install_emulated(folder: Path) -> None:
    """Create the environment for `make emulated` and `make test-torch-min`. It contains only the engine."""
    started = time.monotonic()
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True, symlinks=True)
    print_progress(f"installing {', '.join(EMULATED_TORCH)}, without CUDA's libraries")
    wheels = nvidia_stubs.build_wheels(pip, EMULATED_TORCH[0])
    options = [f"--find-links={wheels}", f"--constraint={wheels / nvidia_stubs.CONSTRAINTS}"]
    for arguments in (
        [*options, *EMULATED_TORCH, "-e", f"{ROOT}[engine,streamer]", *requirements(EMULATED)],
        ["--no-deps", EMULATED_HEADERS],
    ):
        if code := subprocess.run([*pip, "install", "--quiet", *arguments], check=False).returncode:
            sys.exit(f"bootstrap: pip failed with {code}; see its last lines")
    stamp(folder, EMULATED).touch()
    print_progress(f"ready in {time.monotonic() - started:.0f} s: {folder}")


def print_progress(text: str) -> None:
    """Print a progress line."""
    print(f"bootstrap: {text}", flush=True)


def main() -> None:
    """Check the machine, and install the packages unless they are already installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--for", dest="group", choices=(*_GROUP_ORDER, EMULATED), default="dev", help="what the environment is for"
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder (default: .venv)")
    parser.add_argument(
        "--check-only", action="store_true", help="only report missing requirements; do not install anything"
    )
    arguments = parser.parse_args()
    if problems := missing_requirements():
        sys.exit("\n  - ".join(["bootstrap: this machine lacks", *problems]))
    if arguments.check_only:
        print_progress("nothing is missing")
        if shutil.which("g++") is None:
            print_progress("g++ is not installed, so CPUs run without the compiled kernels")
        from nodocker_cluster import binaries, go_module

        try:
            go_module.go_program()
        except binaries.Unavailable as error:
            print_progress(f"`make cluster-tools` can download Kubernetes and Helm, but not build them. {error}")
        if None in (shutil.which("chromium"), shutil.which("chromedriver")):
            print_progress(
                "chromium is not installed, so tests do not open the live page in a browser (apt-get install chromium "
                "chromium-driver)"
            )
    elif not stamp(arguments.venv, arguments.group).exists():
        if arguments.group == EMULATED:
            install_emulated(arguments.venv)
        else:
            install(arguments.venv, arguments.group)


if __name__ == "__main__":
    main()
