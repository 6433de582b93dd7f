# SPDX-License-Identifier: Apache-2.0
"""`quire doctor`: what this machine has for `quire serve`, and the fix for what it lacks. It changes nothing.

Each check is a function that yields findings. Called by main.py.
"""

import argparse
import asyncio
import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import aiohttp
from huggingface_hub import constants as hub_constants
from huggingface_hub import get_token

from quire_operator.cli import serve
from quire_operator.cli.doctor import machine
from quire_operator.cli.model.summary import visible_gpus
from quire_spec import constants
from quire_spec.documents.download_progress import format_bytes
from quire_spec.model.host_memory import available_memory_bytes, read_system_file

_MIN_SHARED_MEMORY = 256 * 2**20
"""Requests, answers and prompts are in shared memory; a container has 64 MiB by default."""
_MIN_DISK = 5 * 2**30
_HUB_TIMEOUT_S = 5.0
_PORT_OPTIONS = {
    constants.HTTP_PORT: "--http-port",
    constants.GRPC_PORT: "--grpc-port",
    constants.SERVER_METRICS_PORT: "--metrics-port",
    constants.HEALTH_PORT: "--health-port",
    constants.OPENAI_PORT: "--port",
}


class Level(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warn"
    ERROR = "FAIL"
    """`quire serve` cannot run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str


def run(_args: argparse.Namespace) -> int:
    """Print the findings; return 1 if `quire serve` cannot run."""
    worst = 0
    for finding in findings(os.environ):
        print(f"{finding.level.value:<4}  {finding.text}", flush=True)
        worst = max(worst, int(finding.level is Level.ERROR))
    return worst


def findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of all checks."""
    yield from _machine()
    yield from _packages()
    yield from _device()
    yield from _space(environment)
    yield from _hub()
    yield from _ports()


def _machine() -> Iterator[Finding]:
    problems = machine.missing_requirements()
    yield from (Finding(Level.ERROR, problem) for problem in problems)
    if not problems:
        yield Finding(Level.OK, "Python, C library and processor are supported")


def _packages() -> Iterator[Finding]:
    required = serve.REQUIRED_PACKAGES | serve.OPENAI_PACKAGES | {"pytriton": "server"}
    missing = {package: extra for package, extra in required.items() if importlib.util.find_spec(package) is None}
    if missing:
        names = ", ".join(missing)
        yield Finding(Level.ERROR, f"{names}: not installed; pip install 'quire-llm[serve]'")
        return
    yield Finding(
        Level.OK,
        f"quire-llm {version('quire-llm')}, torch {version('torch')}, "
        f"Triton Inference Server of nvidia-pytriton {version('nvidia-pytriton')}",
    )


def _device() -> Iterator[Finding]:
    if gpus := visible_gpus():
        names = ", ".join(f"{gpu.name} with {gpu.memory_mib} MiB" for gpu in gpus)
        yield Finding(Level.OK, f"GPUs: {names}")
        return
    if serve.has_gpu():
        yield Finding(Level.WARNING, "a GPU without nvidia-smi: install the driver's tools to see its memory")
        return
    flags = read_system_file(Path("/proc/cpuinfo")).split()
    name_by_flag = {
        "amx_bf16": "AMX",
        "avx512_bf16": "AVX-512 BF16",
        "avx512_vnni": "AVX-512 VNNI",
        "avx512f": "AVX-512",
        "avx2": "AVX2",
        "asimd": "ARM64",
    }
    kinds = [name for flag, name in name_by_flag.items() if flag in flags]
    yield Finding(Level.OK, f"no NVIDIA GPU: models run on the CPU ({kinds[0] if kinds else 'without AVX2'})")
    if os.environ.get("CXX") is None and shutil.which("g++") is None and shutil.which("c++") is None:
        yield Finding(
            Level.WARNING,
            "no C++ compiler: PyTorch replaces the compiled CPU kernels, which are faster; install g++ (Debian, "
            "Ubuntu: apt-get install g++)",
        )


def _space(environment: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding(Level.OK, f"memory: {format_bytes(available_memory_bytes())} are free")
    shared = shutil.disk_usage("/dev/shm").total
    if shared < _MIN_SHARED_MEMORY:
        yield Finding(
            Level.WARNING,
            f"/dev/shm has {format_bytes(shared)}, and large requests need more; start the container with "
            "--shm-size=1g",
        )
    hub_cache = Path(environment.get("HF_HUB_CACHE") or hub_constants.HF_HUB_CACHE)
    for option, folder in (("--download-dir", hub_cache), ("--cache-dir", serve.default_cache_dir(environment))):
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            yield Finding(Level.WARNING, f"{folder}: you cannot write there; give another folder with {option}")
        elif free < _MIN_DISK:
            yield Finding(Level.WARNING, f"{folder}: {format_bytes(free)} are free; give another disk with {option}")
        else:
            yield Finding(Level.OK, f"{folder}: {format_bytes(free)} are free")


def _hub() -> Iterator[Finding]:
    token = "with a token" if get_token() else "without a token (gated models need HF_TOKEN or hf auth login)"
    try:
        asyncio.run(_ask_hub())
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
        reason = str(error) or f"no answer in {_HUB_TIMEOUT_S:g} s"
        yield Finding(
            Level.WARNING, f"{hub_constants.ENDPOINT}: {reason}; models in its cache and in folders can be served"
        )
    else:
        yield Finding(Level.OK, f"{hub_constants.ENDPOINT} can be reached, {token}")


async def _ask_hub() -> None:
    timeout = aiohttp.ClientTimeout(total=_HUB_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session, session.head(hub_constants.ENDPOINT):
        pass


def _ports() -> Iterator[Finding]:
    used = []
    for port in _PORT_OPTIONS:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((serve.LOCALHOST, port))
            except OSError:
                used.append(port)
    yield from (
        Finding(Level.WARNING, f"port {port} is in use; stop that program, or give {_PORT_OPTIONS[port]}")
        for port in used
    )
    if not used:
        yield Finding(Level.OK, f"ports {', '.join(map(str, sorted(_PORT_OPTIONS)))} are free")
