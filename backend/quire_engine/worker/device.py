# SPDX-License-Identifier: Apache-2.0
"""The device and the machine around it: cores, memory and types that this process may use. Reads, and decides nothing
but the defaults that config.py leaves to it."""

import ctypes
import logging
import math
import os
from pathlib import Path

import torch

import quire_kernels
from quire_kernels import dispatch
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_WEIGHT_BYTES_PER_THREAD = 32 << 20
_MIN_CAPABILITY_FOR_E4M3 = (8, 9)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def init_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """The configured device, ready for use; `rank`: this process's among those that share the layers.

    Raises:
        ConfigError: there is none, or QUIRE_KERNELS asks for what is not there.
    """
    if problem := dispatch.validate_overrides(dispatch.collect_ops(vars(quire_kernels)), config.device):
        raise ConfigError(f"QUIRE_KERNELS: {problem}")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "device: 'cuda', and torch finds no CUDA device; take 'cpu' (--device cpu) or install torch for CUDA"
            )
        size, num_devices = config.tensor_parallel_size, torch.cuda.device_count()
        if size > num_devices:
            raise ConfigError(
                f"tensor_parallel_size: {size}, and torch finds {num_devices} CUDA devices; use {num_devices} or fewer"
            )
        if size > 1:
            torch.cuda.set_device(rank)
        return torch.device("cuda", torch.cuda.current_device())
    retain_freed_memory()
    return torch.device("cpu")


def resolve_dtype(config: EngineConfig, checkpoint_dtype: str) -> torch.dtype:
    """Type of weights and activations.

    `auto` is the checkpoint's, except on a CPU: there bfloat16 needs instructions for it (AVX-512 BF16, AMX or Arm
    BF16), without which torch converts back and forth, and float16 becomes float32 too, because few CPUs multiply it.

    Raises:
        ConfigError: the checkpoint's type is none that the engine computes in.
    """
    name = config.dtype
    if name == "auto":
        name = checkpoint_dtype
        if name not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype: 'auto', and the checkpoint says {name!r}; set float32, bfloat16 or float16")
        if config.device == "cpu" and not (name == "bfloat16" and _has_bf16()):
            name = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def resolve_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Type of the KV cache of a model that computes in `dtype`.

    Raises:
        ConfigError: the GPU has no instructions for it.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.device == "cuda" and (capability := torch.cuda.get_device_capability()) < _MIN_CAPABILITY_FOR_E4M3:
        raise ConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype!r} needs a GPU of compute capability 8.9, and this one has "
            f"{capability[0]}.{capability[1]}; leave it 'auto', or use another one"
        )
    return torch.float8_e4m3fn


def free_memory_bytes(device: torch.device) -> int:
    """Bytes of the device that are free now; of host memory, what this process could take."""
    return available_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def available_memory_bytes() -> int:
    """Bytes of host memory that this process could take now: the machine's, or less if its control group has less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = _read_system_file(_CGROUP / "memory.max"), _read_system_file(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        # Page cache counts as used, and gives way.
        cached = dict(line.split() for line in _read_system_file(_CGROUP / "memory.stat").splitlines()).get(
            "inactive_file", "0"
        )
        available = min(available, int(limit) - int(used) + int(cached))
    return max(available, 0)


def set_num_threads(weights_bytes: int, num_ranks: int = 1) -> None:
    """Threads of this process's matrix products: one per 32 MiB of weights, at most one per core, and no more than
    OMP_NUM_THREADS where that is set. Ranks that share the layers share the cores.

    A second core gains a small model nothing, and costs it everything when another process wants that core, because
    threads wait for each other in every product. 64 sequences, two Zen 5 cores: 6 MB of weights take 6.2 ms a step on
    one thread and 5.7 ms on two, but 6.7 ms against 272 ms beside one busy process; 326 MB take 90 ms and 53 ms.
    """
    cores, requested = num_cores(), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    max_threads = int(requested) if requested.isdecimal() else cores
    torch.set_num_threads(max(1, min(max_threads, cores // num_ranks, weights_bytes // _WEIGHT_BYTES_PER_THREAD)))
    logger.info("cpu threads num_threads=%d num_cores=%d", torch.get_num_threads(), cores)


def num_cores(cpu_folder: Path = Path("/sys/devices/system/cpu"), quota_file: Path = _CGROUP / "cpu.max") -> int:
    """Physical cores that this process may run on, no more than its control group's quota: hardware threads of one
    core share the units that matrix products keep busy."""
    allowed_cpus = os.sched_getaffinity(0)
    siblings = {
        _read_system_file(cpu_folder / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed_cpus
    }
    quota, _, period = _read_system_file(quota_file).partition(" ")
    limit = math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else len(siblings)
    return max(1, min(len(siblings), limit))


def retain_freed_memory() -> None:
    """Have the C library keep what a step frees for the next one, instead of giving it back to the system.

    Pages that come back are cleared and mapped again in every step. 64 sequences of 1,024 tokens, 30 layers of 3 KV
    heads of 64, bf16, one Zen 5 core: 0.3 s a step instead of 0.6 s. Numbers of options: glibc's malloc.h; others
    (musl) have no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, 1 << 30), (_M_MMAP_THRESHOLD, 32 << 20)):
            mallopt(option, value)


def trim_heap() -> None:
    """Return to the system what the C library keeps of freed memory: the weights as they were read, once packed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _has_bf16() -> bool:
    words = _read_system_file(Path("/proc/cpuinfo")).split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def _read_system_file(path: Path) -> str:
    """A file of the kernel's, "" where this kernel has none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
