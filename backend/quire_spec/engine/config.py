# SPDX-License-Identifier: Apache-2.0
"""EngineConfig: everything that decides how an engine runs, as one frozen value.

Written as engine.json by `quire render` and the operator, read by every process of a pod. Field names are vLLM's
engine arguments wherever the meaning is the same. Nothing changes it later, and the environment has switches for
narrowing down a fault only (docs/gpu-design.md).
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire_spec.dataclass_json import from_json, read_json, to_json
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Arguments of an engine; `validate()` has passed on every instance that `from_json` made."""

    model: str
    """Folder of a Hugging Face checkpoint, or a hub id such as `org/name`."""

    revision: str | None = None
    """Revision of a hub id: branch, tag or commit; None is the hub's default."""

    device: str = "cpu"
    """Where tensors live: cpu or cuda. Said, never guessed."""

    dtype: str = "auto"
    """Type of weights and activations; auto takes the checkpoint's, but float32 on a CPU without bf16 instructions."""

    max_model_len: int | None = None
    """Tokens of prompt and output together; None takes the checkpoint's max_position_embeddings."""

    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, activations and KV may take together."""

    kv_cache_memory_bytes: int | None = None
    """KV memory, in bytes; None measures on a GPU, and takes a bounded share of free memory on a CPU."""

    block_size: int = 16
    """Tokens per KV block; small blocks share prefixes better, large ones have shorter tables."""

    max_num_seqs: int = 64
    """Sequences in a step at most."""

    max_num_batched_tokens: int = 2048
    """Token budget of a step; prompts longer than what is left of it are prefilled in chunks."""

    max_num_queued_reqs: int = 1024
    """Requests waiting for their first step at most; the next one is refused with UNAVAILABLE."""

    max_logprobs: int = 20
    """Most log probabilities per position that a request may ask for; -1 is as many as there are tokens."""

    scheduling_policy: str = "fcfs"
    """Which requests run first: fcfs, those that came first; priority, those of the lowest `priority` among them."""

    enable_prefix_caching: bool = True
    """Reuse the blocks of equal prefixes."""

    enable_chunked_prefill: bool = True
    """Split long prompts over steps; off, a prompt must fit into max_num_batched_tokens."""

    tensor_parallel_size: int = 1
    """Devices that share each layer, on one machine; on CPUs, processes that share its cores. Settings that are bytes
    hold for each of them."""

    async_scheduling: bool | None = None
    """Plan and begin a step while the one before it computes, so that the device does not wait for the host; a request
    that ends by its own tokens costs one token in vain. None: on a GPU, where it pays."""

    enable_lora: bool = False
    """Reserve adapter slots and accept adapters."""

    max_loras: int = 8
    """Adapter slots on the device: adapters that one step can mix."""

    max_lora_rank: int = 16
    """Largest rank of an adapter; every slot has room for it."""

    max_cpu_loras: int | None = None
    """Adapters kept in host memory; None keeps four times max_loras, or what cpu_lora_memory_bytes has room for."""

    cpu_lora_memory_bytes: int | None = None
    """Host memory for adapters, in bytes; None sets no bound but max_cpu_loras. Adapters of a small rank take less than
    the largest, so a bound in bytes keeps more of them at hand."""

    swap_space: float = 0.0
    """Host memory for KV blocks of preempted requests, in GiB, pinned on a GPU. They are moved there when that is
    quicker than to compute them again, as measured at start. Off by default: it is memory that a pod has to ask for."""

    kv_cache_dtype: str = "auto"
    """Type of the KV cache; auto is dtype. fp8 or fp8_e4m3 holds twice the tokens of a 16-bit one, rounded to 4 bits of
    precision: attention's output is then off by about 3 %, on keys and values of normal distribution."""

    quantization: str | None = None
    """Weight quantization of the checkpoint."""

    speculative_config: dict[str, Any] | None = None
    """Speculative decoding."""

    seed: int = 0
    """Seeds requests that bring none."""

    @property
    def max_host_loras(self) -> int:
        """Adapters kept in host memory."""
        if self.max_cpu_loras is not None:
            return self.max_cpu_loras
        return 4 * self.max_loras if self.cpu_lora_memory_bytes is None else sys.maxsize

    @property
    def overlap_steps(self) -> bool:
        """Whether steps are begun while the one before them computes."""
        return self.device == "cuda" if self.async_scheduling is None else self.async_scheduling

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed engine.json.

        Raises:
            ConfigError: unknown key, wrong type, value out of range, or something the engine cannot do.
        """
        config = from_json(cls, data)
        config.validate()
        return config

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read engine.json from `path`; raises ConfigError as `from_json` does, also for text that is not JSON."""
        return cls.from_json(read_json(path))

    def to_json(self) -> dict[str, Any]:
        """Every field with its value, fit for `from_json`."""
        document: dict[str, Any] = to_json(self)
        return document

    def validate(self) -> None:
        """Raise ConfigError for the first field that is out of range or beyond the capability table."""
        self._check_choices()
        self._check_ranges()
        if self.max_loras > self.max_host_loras:
            raise ConfigError(
                f"max_cpu_loras: {self.max_cpu_loras} is less than max_loras {self.max_loras}; "
                "every adapter in a slot also has a host copy"
            )
        if self.speculative_config and not capabilities.SPECULATION:
            raise ConfigError("speculative_config: not supported by this engine yet; remove it")

    def _check_choices(self) -> None:
        choices: list[tuple[str, object, tuple[object, ...]]] = [
            ("device", self.device, capabilities.DEVICES),
            ("dtype", self.dtype, capabilities.DTYPES),
            ("block_size", self.block_size, capabilities.BLOCK_SIZES),
            ("scheduling_policy", self.scheduling_policy, capabilities.SCHEDULING_POLICIES),
            ("tensor_parallel_size", self.tensor_parallel_size, capabilities.TENSOR_PARALLEL_SIZES),
            ("kv_cache_dtype", self.kv_cache_dtype, capabilities.KV_CACHE_DTYPES),
            ("quantization", self.quantization, (None, *capabilities.QUANTIZATIONS)),
            ("max_lora_rank", self.max_lora_rank, capabilities.LORA_RANKS),
        ]
        for name, value, allowed in choices:
            if value not in allowed:
                raise ConfigError(f"{name}: {value!r} is not one of {', '.join(map(str, allowed))}")

    def _check_ranges(self) -> None:
        at_least_one = ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "max_loras")
        for name in (*at_least_one, "max_model_len", "kv_cache_memory_bytes", "cpu_lora_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is less than 1")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: {self.gpu_memory_utilization} is outside (0, 1]")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs: {self.max_logprobs} is less than -1")
        if not 0.0 <= self.swap_space < math.inf:
            raise ConfigError(f"swap_space: {self.swap_space} is no size in GiB; use 0 for none")
        if not self.model:
            raise ConfigError("model: empty; give a folder or a hub id such as org/name")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs "
                f"{self.max_num_seqs}; each running sequence takes at least one token of a step"
            )
