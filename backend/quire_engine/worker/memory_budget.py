# SPDX-License-Identifier: Apache-2.0
"""How many KV blocks there will be: what is asked for, or what the device has left. Arithmetic, and the refusal when a
single sequence would not fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

GIB = 1 << 30

# On a CPU, memory that nobody promised to this process: enough for a laptop's model, far from the machine's limit.
CPU_KV_BYTES = 4 * GIB
CPU_KV_SHARE = 4


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of a device, as measured when weights and adapter slots were in place and a full step had run."""

    total: int
    """What the engine may take of the device: its share of it on a GPU, free memory on a CPU."""
    weights: int
    lora: int
    activations: int
    """Beside weights, adapters and graphs at the peak of a step, other processes' included."""
    graphs: int = 0
    """Of captured steps; 0 on a CPU."""

    @property
    def available_for_kv(self) -> int:
        """Bytes for KV blocks."""
        return self.total - self.weights - self.lora - self.activations - self.graphs


def num_kv_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, budget: MemoryBudget) -> int:
    """Blocks of the KV cache.

    kv_cache_memory_bytes where it is set; on a GPU all that is left; on a CPU the least of 4 GiB (of all ranks
    together), a quarter of what is left and what max_num_seqs sequences of max_model_len tokens could ever use.

    Raises:
        ConfigError: one sequence of max_model_len tokens does not fit, or a CPU's machine has less than is asked for;
            the message has the bytes and the settings.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    if config.kv_cache_memory_bytes is not None:
        kv_bytes = config.kv_cache_memory_bytes
        # The system would give it, and kill somebody when it is used.
        if config.device == "cpu" and kv_bytes > budget.total:
            raise ConfigError(
                f"kv_cache_memory_bytes: {kv_bytes} are more than the {budget.total} bytes that are free; lower it"
            )
    elif config.device == "cpu":
        max_bytes = CPU_KV_BYTES // config.tensor_parallel_size
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
    """Refuse a model that cannot be held, before it is loaded; all in bytes.

    Raises:
        ConfigError: weights and adapter slots do not fit into what is free; the message has the bytes and the settings.
    """
    if weights + lora <= free:
        return
    remedy = "raise tensor_parallel_size, take a GPU with more memory" if config.device == "cuda" else "free memory"
    raise ConfigError(
        f"model: {config.model!r} does not fit into the memory that is free; {remedy}, or choose a smaller model"
        f"{', or lower max_loras or max_lora_rank' if lora else ''}\n"
        f"{_format_table([('weights', weights), *_adapter_slot_rows(config, lora), ('free', free)])}"
    )


def step_too_large_error(config: EngineConfig, weights: int, lora: int, total: int) -> ConfigError:
    """Why an engine does not start for which the largest step has no memory; all in bytes."""
    return ConfigError(
        f"max_num_batched_tokens: a step of {config.max_num_batched_tokens} tokens of {config.max_num_seqs} sequences "
        "does not fit beside the weights; lower it, max_num_seqs or max_loras, or raise tensor_parallel_size\n"
        f"{_format_table([('weights', weights), *_adapter_slot_rows(config, lora), ('device', total)])}"
    )


@contextmanager
def naming_setting_on_oom(name: str) -> Iterator[None]:
    """Say which setting asked for memory that the system does not give.

    Raises:
        ConfigError: instead of what torch raises.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{name}: the memory cannot be had; lower it ({str(error)[:200]})") from error


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
            *((("captured steps", budget.graphs),) if budget.graphs else ()),
            ("device", budget.total),
        ]
    )
    if config.kv_cache_memory_bytes is not None:
        fix = f"raise kv_cache_memory_bytes to {needed} or more"
    elif config.device == "cpu":
        fix = f"set kv_cache_memory_bytes to {needed} or more, if the machine has it"
    else:
        fix = "raise gpu_memory_utilization, lower max_num_batched_tokens or max_loras"
    return (
        f"max_model_len: a sequence of {max_model_len} tokens does not fit into the KV cache; lower max_model_len, or "
        f"{fix}\n{table}"
    )


def _adapter_slot_rows(config: EngineConfig, lora: int) -> list[tuple[str, int]]:
    return [(f"adapter slots ({config.max_loras} of rank {config.max_lora_rank})", lora)] if lora else []


def _format_table(rows: list[tuple[str, int]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {size:>16,} bytes  {size / GIB:8.2f} GiB" for name, size in rows)
