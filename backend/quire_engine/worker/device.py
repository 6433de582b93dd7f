# SPDX-License-Identifier: Apache-2.0
"""Sets up the device, and finds out which CPU cores, memory and dtypes this process can use.

If a setting is "auto" in `EngineConfig`, it chooses the value. It does not change other settings. The model runner and
its startup call it.
"""

import ctypes
import gc
import logging
import math
import os
from pathlib import Path

import torch

import quire_kernels
from quire_engine.worker.memory_budget import check_model_fits
from quire_kernels import MIN_CAPABILITY_FOR_FP8, cpu_native, dispatch, has_quantized_kernel
from quire_kernels.gpu import kernel_cache
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.model import batch_invariance
from quire_spec.model.host_memory import CGROUP, available_memory_bytes, read_system_file
from quire_spec.model.memory_sizing import lora_bytes, weights_bytes
from quire_spec.model.model_config import ModelConfig

logger = logging.getLogger(__name__)

_WEIGHT_BYTES_PER_THREAD = 32 << 20
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def init_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Set up the configured device and return it. `rank` is the number of this process among the
    ranks of the core.

    Raises:
        ConfigError: the device does not exist, or QUIRE_KERNELS names a kernel that does not exist.
    """
    if problem := dispatch.validate_overrides(dispatch.collect_ops(vars(quire_kernels)), config.device):
        raise ConfigError(f"QUIRE_KERNELS: {problem}")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "device: is 'cuda' but torch found no CUDA device; use 'cpu' (--device cpu) or install torch for CUDA"
            )
        size, num_devices = config.ranks_per_node, torch.cuda.device_count()
        if size > num_devices:
            name = "tensor_parallel_size"
            if config.pipeline_parallel_size > 1:
                name += f" x pipeline_parallel_size {config.pipeline_parallel_size}"
            if config.nnodes > 1:
                name += f" / nnodes {config.nnodes}"
            raise ConfigError(
                f"{name}: is {size} but torch found {num_devices} CUDA devices; use {num_devices} or fewer"
            )
        if size > 1:
            torch.cuda.set_device(rank % size)
        kernel_cache.install_shipped_cache(torch.cuda.get_device_capability())
        return torch.device("cuda", torch.cuda.current_device())
    retain_freed_memory()
    return torch.device("cpu")


def resolve_dtype(config: EngineConfig, checkpoint_dtype: str) -> torch.dtype:
    """Return the dtype of weights and activations.

    `auto` selects the checkpoint's dtype, with two exceptions on a CPU. The dtype float16 becomes float32, because few
    CPUs can multiply float16. The dtype bfloat16 becomes float32 if there are no compiled kernels and the CPU has
    neither AVX-512 BF16 nor AMX nor Arm BF16. In this case, torch would have to convert each operand.

    Raises:
        ConfigError: the engine cannot compute in the checkpoint's dtype.
    """
    name = config.dtype
    if name == "auto":
        name = checkpoint_dtype
        if name not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype: is 'auto' but the checkpoint has {name!r}; set float32, bfloat16 or float16")
        if config.device == "cpu" and not (name == "bfloat16" and _has_bf16()):
            name = "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def log_batch_invariance(config: EngineConfig, shape: ModelConfig, dtype: torch.dtype) -> None:
    """Log whether outputs depend on what else is served. `shape` is the configuration of the whole model."""
    kernels = batch_invariance.CpuKernels(
        has_compiled=config.device != "cpu" or cpu_native.load_library() is not None,
        has_amx=not cpu_native.has_fast_gemm(),
        override=os.environ.get("QUIRE_KERNELS", ""),
    )
    name, num_ranks = str(dtype).removeprefix("torch."), config.tensor_parallel_size
    reason = batch_invariance.variance_reason(shape, config.device, name, num_ranks, kernels)
    logger.info("%s", batch_invariance.describe(reason))


def warn_of_slow_quantization(quantization: str | None, dtype: torch.dtype, device: torch.device) -> None:
    """Log a warning if this machine has no kernels for quantized weights.

    In this case, each step must dequantize all weights, which is slow.
    """
    if quantization is not None and not has_quantized_kernel(dtype, device):
        logger.warning(
            "quantization %s is slow here: the kernels need dtype bfloat16 (got %s), a C++ compiler and a processor "
            "with AVX2, FMA and F16C, or an ARM64 processor",
            quantization,
            str(dtype).removeprefix("torch."),
        )


def resolve_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache for a model that computes in `dtype`.

    Raises:
        ConfigError: the GPU has no instructions for the configured dtype, or there are no kernels for it.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if config.kv_cache_dtype == "int8_per_token_head":
        if config.device == "cuda":
            raise ConfigError("kv_cache_dtype: 'int8_per_token_head' has no kernels for GPUs; use 'fp8' or 'auto'")
        if not has_quantized_kernel(dtype, torch.device(config.device)):
            logger.warning(
                "kv_cache_dtype int8_per_token_head is slow here: the kernels need dtype bfloat16 (got %s), a "
                "C++ compiler and a processor with AVX2, FMA and F16C, or an ARM64 processor",
                str(dtype).removeprefix("torch."),
            )
        return torch.int8
    if config.device == "cuda" and (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY_FOR_FP8:
        raise ConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype!r} requires a GPU of compute capability 8.9 or higher, "
            f"got {capability[0]}.{capability[1]}; use 'auto' or another GPU"
        )
    return torch.float8_e4m3fn


def free_memory_bytes(device: torch.device) -> int:
    """Return the number of free bytes on the device.

    For a CPU, this is the host memory that this process can allocate.
    """
    return available_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def set_num_threads(weights_bytes: int, num_ranks: int = 1) -> None:
    """Set the number of threads that compute matrix products.

    There is one thread for each 32 MiB of weights, but at most one for each CPU core. If OMP_NUM_THREADS is set, it is
    also an upper limit. All ranks share the cores.

    With a small model, a second core saves little time, and it can make steps much slower. The threads wait for each
    other in every product. If another process keeps one core busy, it delays all threads. This was measured with 64
    sequences on two Zen 5 cores. A step with 6 MB of weights takes 6.2 ms on one thread and 5.7 ms on two. While
    another process keeps one core busy, the same step takes 6.7 ms on one thread and 272 ms on two. A step with 326 MB
    of weights takes 90 ms on one thread and 53 ms on two.
    """
    cores, requested = num_cores(), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    max_threads = int(requested) if requested.isdecimal() else cores
    torch.set_num_threads(max(1, min(max_threads, cores // num_ranks, weights_bytes // _WEIGHT_BYTES_PER_THREAD)))
    logger.info("cpu threads num_threads=%d num_cores=%d", torch.get_num_threads(), cores)


def num_cores(cpu_folder: Path = Path("/sys/devices/system/cpu"), quota_file: Path = CGROUP / "cpu.max") -> int:
    """Return the number of physical cores that this process can use.

    The quota of its control group is respected. The hardware threads of one core are counted once, because they share
    the units that compute matrix products.
    """
    allowed_cpus = os.sched_getaffinity(0)
    siblings = {
        read_system_file(cpu_folder / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed_cpus
    }
    quota, _, period = read_system_file(quota_file).partition(" ")
    limit = math.ceil(int(quota) / int(period)) if quota.isdigit() and period.isdigit() else len(siblings)
    return max(1, min(len(siblings), limit))


def retain_freed_memory() -> None:
    """Make the C library keep the memory that a step frees, instead of returning it to the system.

    Otherwise, the system must map and clear the same pages again in every step. With this option, a step with 64
    sequences of 1,024 tokens takes 0.3 s instead of 0.6 s. This was measured in bf16 on one Zen 5 core, with 30 layers,
    3 KV heads and a head size of 64. The option numbers come from the malloc.h of glibc. Other C libraries (musl) do
    not have this function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, 1 << 30), (_M_MMAP_THRESHOLD, 32 << 20)):
            mallopt(option, value)


def trim_heap() -> None:
    """Make the C library return freed memory to the system. The startup calls it after the weights were packed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _has_bf16() -> bool:
    """Return whether this machine computes faster in bfloat16 than in float32.

    It does if there are compiled kernels, or if the CPU has bfloat16 instructions that torch uses.
    """
    if has_quantized_kernel(torch.bfloat16, torch.device("cpu")):
        return True
    words = read_system_file(Path("/proc/cpuinfo")).split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def check_free_memory(
    config: EngineConfig,
    shape: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantized_bytes: int | None = None,
    file_bytes: int = 0,
) -> None:
    """Check that the weights and the adapter slots fit into memory, before anything is loaded.

    `quantized_bytes` is the size of the files of a quantized checkpoint. On a machine with kernels for quantized
    weights, most weights of such a checkpoint stay quantized. `file_bytes` is the size of the files if config.json does
    not describe all weights.

    Raises:
        ConfigError: the weights and the adapter slots do not fit. The message contains their sizes in bytes, which an
            allocation error of the device does not contain.
    """
    if device.type != "cpu":
        # Free the memory of an earlier engine in this process that was not garbage-collected yet.
        gc.collect()
        torch.cuda.empty_cache()
    size = dtype.itemsize
    lora = lora_bytes(shape, config.num_lora_pages(shape), size, config.lora_experts)
    # Ranks on a CPU load at the same time and share the free memory, so another rank may already have used some of it.
    weights = max(weights_bytes(shape, size), file_bytes)
    if quantized_bytes is not None and has_quantized_kernel(dtype, device):
        weights = min(weights, quantized_bytes // config.tensor_parallel_size)
    check_model_fits(config, weights, lora, free_memory_bytes(device))
