# SPDX-License-Identifier: Apache-2.0
"""Engine configuration (engine.json): all arguments of an engine as one frozen value.

`quire render` and the operator write the file; every process of a pod reads it. If vLLM has an engine argument with the
same meaning, the field has the name of that argument. Nothing overrides the file: environment variables exist only for
debugging (docs/gpu-design.md).
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire_spec.dataclass_json import from_json, read_json, to_json
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Arguments of an engine. Instances from `from_json` have passed `validate()`."""

    model: str
    """Folder of a Hugging Face checkpoint, or a hub id such as `org/name`."""

    revision: str | None = None
    """Revision of a hub id: branch, tag or commit; None selects the hub's default."""

    download_dir: str | None = None
    """Folder for downloads of a hub id; None: the cache of huggingface_hub."""

    generation_config: str = "auto"
    """Source of the default sampling parameters of `LLM` and of the OpenAI API. auto: generation_config.json of the
    checkpoint; vllm: vLLM's own defaults; any other value: a folder with a generation_config.json."""

    device: str = "cpu"
    """Device of the tensors: cpu or cuda. The engine never chooses another device itself."""

    dtype: str = "auto"
    """Type of weights and activations. auto: the checkpoint's dtype, or float32 on a CPU without kernels for bf16."""

    max_model_len: int | None = None
    """Maximum number of tokens of prompt and output together; None: the checkpoint's max_position_embeddings."""

    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory for weights, activations and KV cache together."""

    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache in bytes. None: on a GPU, the engine measures memory at startup; on a CPU, it uses a bounded
    share of the free memory."""

    block_size: int = 16
    """Tokens per KV block. Smaller blocks share more tokens of a prefix; larger blocks need shorter block tables."""

    max_num_seqs: int = 64
    """Maximum number of sequences in a step."""

    max_num_batched_tokens: int = 2048
    """Maximum number of tokens in a step. A prompt that does not fit into the rest of a step is prefilled in chunks."""

    max_num_queued_reqs: int = 1024
    """Maximum number of requests waiting for their first step; further requests are rejected with UNAVAILABLE."""

    max_logprobs: int = 20
    """Maximum number of log probabilities per position in a request; -1: the size of the vocabulary."""

    scheduling_policy: str = "fcfs"
    """Order of requests. fcfs: by arrival. priority: by lowest `priority`, then by arrival."""

    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prefixes."""

    enable_chunked_prefill: bool = True
    """Split long prompts over several steps. If false, a prompt must fit into max_num_batched_tokens."""

    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks on one machine. Each rank uses one GPU, or is a process that shares the CPU cores
    with the other ranks. Settings in bytes apply to each rank."""

    async_scheduling: bool | None = None
    """Schedule and launch a step while the previous step computes, so that the device does not wait for the host. With
    async scheduling, a request that ends with a stop token computes one unused token. None: enabled on a GPU without
    speculative_config."""

    enable_lora: bool = False
    """Reserve adapter slots and accept adapters."""

    max_loras: int = 8
    """Number of adapter slots on the device: the maximum number of adapters in one step."""

    max_lora_rank: int = 16
    """Largest LoRA rank of an adapter; every adapter slot has memory for this rank."""

    max_cpu_loras: int | None = None
    """Maximum number of adapters in host memory. None: four times max_loras, or no limit if cpu_lora_memory_bytes is
    set."""

    cpu_lora_memory_bytes: int | None = None
    """Host memory for adapters, in bytes; None: only max_cpu_loras limits their number. Adapters of a small LoRA rank
    need less memory, so more of them fit into a limit in bytes."""

    swap_space: float = 0.0
    """Host memory for KV blocks of preempted requests, in GiB; pinned memory if the device is a GPU. Blocks are
    swapped if this is faster than recomputing them, according to measurements at startup. The default is 0, because a
    pod must request this memory in addition."""

    kv_cache_dtype: str = "auto"
    """Type of the KV cache; auto: the value of dtype. fp8 or fp8_e4m3 stores twice as many tokens as a 16-bit type,
    with 4 bits of precision. With these types, the output of attention has an error of about 3 % for normally
    distributed keys and values. int8_per_token_head stores 8-bit integers with a scale for each token and KV head. This
    type is supported only on CPUs, and is fast only with dtype bfloat16 on a CPU with compiled kernels."""

    quantization: str | None = None
    """Quantization of the weights. None: the weights of the checkpoint are used unchanged. int8, int4 and fp8 quantize
    the weights of all linear layers when a model is loaded. int8 and fp8 have a scale for each row; int4 has a scale
    and a zero point for each 32 inputs. int8 on a CPU and fp8 on a GPU also quantize the inputs of linear layers. On a
    CPU, quantization is fast only with dtype bfloat16 and compiled kernels. For a quantized checkpoint, use None or the
    name of its quant_method."""

    speculative_config: SpeculativeConfig | None = None
    """Speculative decoding: a step also verifies draft tokens, so that it can return several tokens of a sequence. The
    distribution of the output does not change. async_scheduling must not be true."""

    tool_call_parser: str = "auto"
    """Format of tool calls in outputs. The values are those of vLLM's --tool-call-parser. auto: the engine finds the
    format from the checkpoint's chat template and tokens; none: tool calls stay in the text."""

    reasoning_parser: str = "auto"
    """Format of the reasoning before an answer. The values are those of vLLM's --reasoning-parser. auto and none have
    the same meaning as for tool_call_parser."""

    chat_template: str | None = None
    """File with a chat template; None: the chat template of the checkpoint."""

    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids, and outputs have no text. If false, a model without a tokenizer is an
    error."""

    seed: int = 0
    """Seed of requests that set no seed."""

    @property
    def max_host_loras(self) -> int:
        """Maximum number of adapters in host memory."""
        if self.max_cpu_loras is not None:
            return self.max_cpu_loras
        return 4 * self.max_loras if self.cpu_lora_memory_bytes is None else sys.maxsize

    @property
    def has_drafter(self) -> bool:
        """True if a draft model or heads propose drafts."""
        return self.speculative_config is not None and self.speculative_config.model is not None

    @property
    def uses_async_scheduling(self) -> bool:
        """True if a step is launched while the previous step computes."""
        if self.speculative_config is not None:
            return False
        return self.device == "cuda" if self.async_scheduling is None else self.async_scheduling

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed engine.json.

        Raises:
            ConfigError: unknown key, wrong type, value out of range, or a value that the engine does not support.
        """
        config = from_json(cls, data)
        config.validate()
        return config

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read engine.json from `path`. Raises ConfigError if the text is not JSON, or if `from_json` rejects the
        document."""
        return cls.from_json(read_json(path))

    def to_json(self) -> dict[str, Any]:
        """Return all fields in the form that `from_json` reads."""
        document: dict[str, Any] = to_json(self)
        return document

    def validate(self) -> None:
        """Raise ConfigError for the first field whose value is out of range or not in the capability table."""
        self._check_choices()
        self._check_ranges()
        if self.max_loras > self.max_host_loras:
            raise ConfigError(
                f"max_cpu_loras: must be at least max_loras {self.max_loras}, got {self.max_cpu_loras}; every adapter "
                "in an adapter slot also has a copy in host memory"
            )
        if self.speculative_config is not None:
            self.speculative_config.validate()
            if self.async_scheduling:
                raise ConfigError(
                    "async_scheduling: must not be true with speculative_config, because drafts need the tokens of the "
                    "previous step; remove one of the two"
                )

    def _check_choices(self) -> None:
        choices: list[tuple[str, object, tuple[object, ...]]] = [
            ("device", self.device, capabilities.DEVICES),
            ("dtype", self.dtype, capabilities.DTYPES),
            ("block_size", self.block_size, capabilities.BLOCK_SIZES),
            ("scheduling_policy", self.scheduling_policy, capabilities.SCHEDULING_POLICIES),
            ("tensor_parallel_size", self.tensor_parallel_size, capabilities.TENSOR_PARALLEL_SIZES),
            ("kv_cache_dtype", self.kv_cache_dtype, capabilities.KV_CACHE_DTYPES),
            (
                "quantization",
                self.quantization,
                (None, *dict.fromkeys((*capabilities.QUANTIZATIONS, *capabilities.CHECKPOINT_QUANTIZATIONS))),
            ),
            ("max_lora_rank", self.max_lora_rank, capabilities.LORA_RANKS),
            ("tool_call_parser", self.tool_call_parser, ("auto", "none", *capabilities.TOOL_CALL_PARSERS)),
            ("reasoning_parser", self.reasoning_parser, ("auto", "none", *capabilities.REASONING_PARSERS)),
        ]
        for name, value, allowed in choices:
            if value not in allowed and allowed == (None,):
                raise ConfigError(f"{name}: not supported by this engine yet, got {value!r}; remove it")
            if value not in allowed:
                raise ConfigError(f"{name}: must be one of {', '.join(map(str, allowed))}, got {value!r}")

    def _check_ranges(self) -> None:
        at_least_one = ("max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "max_loras")
        for name in (*at_least_one, "max_model_len", "kv_cache_memory_bytes", "cpu_lora_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, got {value}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization: must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs: must be at least -1, got {self.max_logprobs}")
        if not 0.0 <= self.swap_space < math.inf:
            raise ConfigError(f"swap_space: must be a size in GiB, got {self.swap_space}; use 0 for no swap space")
        if not self.model:
            raise ConfigError("model: empty; give a folder or a hub id such as org/name")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: must be at least max_num_seqs {self.max_num_seqs}, got "
                f"{self.max_num_batched_tokens}; each running sequence needs at least one token of a step"
            )
