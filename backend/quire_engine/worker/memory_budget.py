# SPDX-License-Identifier: Apache-2.0
"""Computes how many KV blocks fit into the free memory, and creates the errors if something does not fit.

The module only calculates. `startup.py` measures the memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

GIB = 1 << 30

# Limits of the default size of the KV cache on a CPU, where other processes use the same memory. The size is enough for
# a model on a laptop, and far below the memory of most machines.
CPU_KV_BYTES = 4 * GIB
CPU_KV_SHARE = 4


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Sizes of the parts of a device's memory, in bytes.

    They are measured after the weights and the adapter slots were loaded and the largest step was run.
    """

    total: int
    """Number of bytes that the engine is allowed to use. On a GPU, this is the engine's share of the GPU's memory. On a
    CPU, it is the free host memory."""
    weights: int
    lora: int
    activations: int
    """Peak memory of a step. It does not include weights, adapters or graphs, but it includes the memory of other
    processes."""
    graphs: int = 0
    """Memory of the captured CUDA graphs; 0 on a CPU."""
    states: int = 0
    """Memory of the states of sequences."""

    @property
    def available_for_kv(self) -> int:
        """Bytes for KV blocks."""
        return self.total - self.weights - self.lora - self.activations - self.graphs - self.states


def num_kv_blocks(
    config: EngineConfig, max_model_len: int, block_bytes: int, budget: MemoryBudget, num_groups: int = 1
) -> int:
    """Return the number of blocks of the KV cache.

    If `kv_cache_memory_bytes` is set, the blocks fill this memory. Otherwise, a GPU uses all remaining memory. A CPU
    uses the smallest of three amounts: 4 GiB divided by the number of ranks, a quarter of the remaining memory, or the
    memory for `max_num_seqs` sequences of `max_model_len` tokens. If blocks have no contents, there are as many as the
    scheduler counts.

    Raises:
        ConfigError: one sequence of max_model_len tokens does not fit, or the engine runs on a CPU and
            `kv_cache_memory_bytes` is more than the free memory. The message contains the sizes in bytes and the
            settings to change.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size) * num_groups
    if block_bytes == 0:
        # The scheduler keeps one block in reserve for each running sequence.
        return 2 * (config.max_num_seqs + 1) * blocks_per_sequence
    if config.kv_cache_memory_bytes is not None:
        kv_bytes = config.kv_cache_memory_bytes
        # Without this check, Linux would grant the allocation, but kill a process later, when the memory is used.
        if config.device == "cpu" and kv_bytes > budget.total - budget.states:
            raise ConfigError(
                f"kv_cache_memory_bytes: {kv_bytes} is more than the {budget.total - budget.states} bytes that are "
                f"free{' beside the states; lower it or max_num_seqs' if budget.states else '; lower it'}"
            )
    elif config.device == "cpu":
        max_bytes = CPU_KV_BYTES // config.num_ranks
        kv_bytes = min(
            max_bytes, budget.available_for_kv // CPU_KV_SHARE, config.max_num_seqs * blocks_per_sequence * block_bytes
        )
    else:
        kv_bytes = budget.available_for_kv
    num_blocks = max(kv_bytes, 0) // block_bytes
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            _kv_cache_too_small_message(config, max_model_len, blocks_per_sequence * block_bytes, kv_bytes, budget)
        )
    return num_blocks


def check_model_fits(config: EngineConfig, weights: int, lora: int, free: int) -> None:
    """Before a model is loaded, check that it fits into the free memory. All sizes are in bytes.

    Raises:
        ConfigError: the weights and the adapter slots do not fit. The message contains their sizes in bytes and the
            settings to change.
    """
    if weights + lora <= free:
        return
    remedy = "raise tensor_parallel_size, use a GPU with more memory" if config.device == "cuda" else "free memory"
    raise ConfigError(
        f"model: {config.model!r} does not fit into the memory that is free; {remedy}, or choose a smaller model"
        f"{', or lower max_loaded_lora_ranks, max_loras or max_lora_rank' if lora else ''}\n"
        f"{_format_table([('weights', weights), *_adapter_slot_rows(config, lora), ('free', free)])}"
    )


def check_host_memory(config: EngineConfig, needed: int, free: int) -> None:
    """Check that the ranks of a core on this machine find enough host memory for KV blocks. `needed` is the number of
    bytes of one rank, `free` that of the machine. The other cores check theirs, and may already use it.

    Raises:
        ConfigError: the memory is not free. Linux would grant the allocation, but kill a process later.
    """
    total = needed * config.ranks_per_node
    if total > free:
        raise ConfigError(
            f"kv_offloading_size: {config.kv_offloading_size} GiB: the host memory for KV blocks needs {total} bytes, "
            f"but {free} are free; lower it"
        )


def step_too_large_error(config: EngineConfig, weights: int, lora: int, total: int) -> ConfigError:
    """Return the error for a configuration whose largest step does not fit into memory. All sizes are in bytes."""
    return ConfigError(
        f"max_num_batched_tokens: a step of {config.max_num_batched_tokens} tokens of {config.max_num_seqs} sequences "
        "does not fit next to the weights; lower it, max_num_seqs or max_loras, or raise tensor_parallel_size\n"
        f"{_format_table([('weights', weights), *_adapter_slot_rows(config, lora), ('device', total)])}"
    )


@contextmanager
def naming_setting_on_oom(name: str) -> Iterator[None]:
    """Convert an allocation error in the body of the context to an error that contains the name of the setting.

    Raises:
        ConfigError: the memory cannot be allocated.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{name}: the memory cannot be allocated; lower it ({str(error)[:200]})") from error


def _kv_cache_too_small_message(
    config: EngineConfig, max_model_len: int, needed: int, kv_bytes: int, budget: MemoryBudget
) -> str:
    table = _format_table(
        [
            ("one sequence of max_model_len", needed),
            ("KV cache", kv_bytes),
            ("weights", budget.weights),
            *_adapter_slot_rows(config, budget.lora),
            ("activations and other use", budget.activations),
            *((("CUDA graphs", budget.graphs),) if budget.graphs else ()),
            *((("states of max_num_seqs sequences", budget.states),) if budget.states else ()),
            ("device", budget.total),
        ]
    )
    if budget.states and config.kv_cache_memory_bytes is None and budget.states > budget.available_for_kv:
        fix = f"lower max_num_seqs, which is {config.max_num_seqs}, because each sequence has a state"
    elif config.kv_cache_memory_bytes is not None:
        fix = f"raise kv_cache_memory_bytes to {needed} or more"
    elif config.device == "cpu":
        fix = f"set kv_cache_memory_bytes to {needed} or more, if the machine has it"
    else:
        fix = "raise gpu_memory_utilization, or lower max_num_batched_tokens or max_loras"
    return (
        f"max_model_len: a sequence of {max_model_len} tokens does not fit into the KV cache; lower max_model_len, or "
        f"{fix}\n{table}"
    )


def _adapter_slot_rows(config: EngineConfig, lora: int) -> list[tuple[str, int]]:
    slots = f"adapter slots ({config.max_loras} with {config.total_lora_rank} LoRA ranks)"
    return [(slots, lora)] if lora else []


def _format_table(rows: list[tuple[str, int]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {size:>16,} bytes  {size / GIB:8.2f} GiB" for name, size in rows)
