# SPDX-License-Identifier: Apache-2.0
"""Engine configuration: one frozen dataclass that contains all arguments of an engine. It is the field `engine` of
pod.json.

If vLLM has an engine argument with the same meaning as a field, the field has the name of that argument. No other
setting overrides the document. The environment variables in docs/gpu-design.md exist only for debugging.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from quire_spec import constants
from quire_spec.dataclass_json import from_json, to_json
from quire_spec.engine.kv_events_config import KVEventsConfig
from quire_spec.engine.kv_transfer_config import KVTransferConfig
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities
from quire_spec.model.memory_sizing import lora_pages
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.pipeline_parallel import split_stages

_DEFAULT_MAX_LORAS = 8
_DEFAULT_MAX_IMAGES = 8


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Arguments of an engine. An instance that `from_json` returns is already validated."""

    model: str
    """Folder of a Hugging Face checkpoint, or a hub id such as `org/name`."""

    revision: str | None = None
    """Branch, tag or commit if `model` is a hub id; None selects the default branch of the hub."""

    download_dir: str | None = None
    """Folder to which a hub id is downloaded; None: the cache of huggingface_hub."""

    generation_config: str = "auto"
    """Where `LLM` and the OpenAI API get their default sampling parameters.

    With auto, they come from the file generation_config.json of the checkpoint. With vllm, they are vLLM's own
    defaults. Any other value is a folder that contains a generation_config.json.
    """

    device: str = "cpu"
    """Device that holds the tensors: cpu or cuda. The engine never chooses a different device on its own."""

    dtype: str = "auto"
    """Data type of the weights and activations. With auto, it is the dtype of the checkpoint, or float32 on a CPU
    without kernels for bf16."""

    max_model_len: int | None = None
    """Maximum number of tokens of a request; the prompt and the output both count. None: the checkpoint's
    max_position_embeddings, which the rope types yarn and linear extend."""

    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that the weights, the activations and the KV cache may use together."""

    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache in bytes. If it is None on a GPU, the engine measures memory at startup and derives the size
    from that. If it is None on a CPU, the engine uses a bounded share of the free memory."""

    block_size: int = 16
    """Tokens per KV block. With smaller blocks, more tokens of a common prefix can be shared; with larger blocks, the
    block tables are shorter."""

    max_num_seqs: int = 64
    """Maximum number of sequences that one step can contain."""

    max_num_batched_tokens: int = 2048
    """Maximum number of tokens that one step can contain. If a prompt has more tokens than a step has left, it is
    prefilled in chunks over several steps."""

    max_num_queued_reqs: int = 1024
    """Maximum number of requests that wait for their first step. Further requests are rejected with UNAVAILABLE, except
    those of a client that has less than its share of the queue, up to twice this number."""

    max_logprobs: int = 20
    """Maximum number of log probabilities that a request can ask for at each position; -1: the size of the
    vocabulary."""

    scheduling_policy: str = "fcfs"
    """Order in which requests are scheduled.

    With fcfs, the request that arrived first is scheduled first. With priority, the request with the lowest `priority`
    is scheduled first; among equal requests, it is the one that arrived first.
    """

    enable_prefix_caching: bool = True
    """If two prompts start with the same tokens, use the same KV blocks for these tokens."""

    enable_chunked_prefill: bool = True
    """Split a long prompt and prefill it over several steps. If false, a prompt must fit into
    max_num_batched_tokens."""

    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks; all of them run on one machine. On GPUs, each rank uses its own GPU. On a CPU,
    each rank is a process, and the ranks share the CPU cores. A setting in bytes applies to each rank separately."""

    pipeline_parallel_size: int = 1
    """Number of pipeline stages, each with its own part of the layers.

    Each stage has `tensor_parallel_size` ranks. On GPUs, each rank uses its own GPU. On a CPU, each rank is a process,
    and the ranks share the CPU cores. A setting in bytes applies to each rank separately. The first stage also has the
    embedding and the output projection, and samples the tokens.
    """

    pipeline_micro_batches: int | None = None
    """Number of steps that are in flight with several pipeline stages, so that all stages compute at the same time.
    Each has an equal part of the decoding sequences. None: as many as there are stages. 1: a step begins when the
    previous one is complete."""

    nnodes: int = 1
    """Number of machines, called nodes, each with an equal number of pipeline stages. The first node serves requests.
    The others run `python -m quire_server.rank`, with the same document."""

    master_addr: str | None = None
    """Name or address of the first node, at which the other nodes reach it. None: the environment variable
    LWS_LEADER_ADDRESS on the other nodes; the first node then listens on the address of its pod, or else on all."""

    rank_port: int = constants.RANK_PORT
    """Port of the first node to which the other nodes connect. The ranks meet on the next port; the connections between
    them then use ports that the system chooses."""

    rank_key_file: str | None = None
    """File with the key that all nodes share: at least 16 bytes, which only this user or its group can read. It is
    required if nnodes is above 1."""

    data_parallel_size: int = 1
    """Number of cores: copies of the model that serve one queue, all in one pod.

    On GPUs, each core uses `tensor_parallel_size` x `pipeline_parallel_size` GPUs of its own. On a CPU, the cores
    share the CPU cores. A setting in bytes applies to each core separately, and so do `max_num_seqs` and the adapter
    slots.
    """

    async_scheduling: bool | None = None
    """Schedule and launch the next step while the current step is still running.

    The device then does not wait for the host. There is a cost: after a request ends with a stop token, one more token
    is computed for it and discarded. None: async scheduling is enabled on a GPU, unless speculative_config is set or
    pipeline_parallel_size is above 1.
    """

    enable_lora: bool = False
    """Accept adapters, and reserve memory for adapter slots."""

    max_loras: int = _DEFAULT_MAX_LORAS
    """Number of adapter slots on the device. A step can use at most this number of different adapters. If only
    max_cpu_loras is given, and it is less than 8, the default is max_cpu_loras."""

    max_lora_rank: int = 16
    """Largest LoRA rank that an adapter can have."""

    max_loaded_lora_ranks: int | None = None
    """Largest sum of the LoRA ranks of the adapters in slots. Memory is reserved for it, in pages of one rank of all
    modules, and an adapter takes as many pages as it fills. None: max_loras times max_lora_rank, so that an adapter of
    the largest rank fits into each slot."""

    lora_experts: bool = False
    """Accept adapters that change experts. Every page then also has memory for the matrices of all experts. Routers can
    be changed without this setting. Models without experts ignore it."""

    lora_modules_to_save: bool = False
    """Accept adapters with a whole embedding or output projection (`modules_to_save` of PEFT). Every adapter
    slot then also reserves memory for both. Whole norms need no setting."""

    max_cpu_loras: int | None = None
    """Maximum number of adapters in host memory. If cpu_lora_memory_bytes is set, None means that the number is not
    limited. Otherwise, None means four times max_loras."""

    cpu_lora_memory_bytes: int | None = None
    """Host memory for adapters, in bytes. An adapter with a small LoRA rank needs less memory. Therefore, more adapters
    fit into the limit if their rank is small. None: only the number of adapters is limited, by max_cpu_loras. With
    max_loaded_lora_ranks, None means the memory of the slots, times max_cpu_loras, divided by max_loras."""

    load_format: str = "auto"
    """Reader of the weights. runai_streamer: Model Streamer, whose threads read ahead; it is not used with
    several ranks. safetensors: the engine's own reader, which reads only what a rank needs. auto:
    safetensors, because it is faster if the files are in the page cache or on a fast disk."""

    swap_space: float = 0.0
    """Host memory in GiB to which the KV blocks of preempted requests can be swapped.

    If the device is a GPU, the memory is pinned. The engine measures at startup whether swapping blocks is faster than
    recomputing them, and swaps only if it is. The default is 0, because a pod must request the swap space in addition
    to its other memory.
    """

    kv_offloading_size: float = 0.0
    """Host memory in GiB that caches KV blocks for which the devices have no room, for all ranks together.

    A block is copied to host memory when a second request uses it. When the device has evicted it, it is copied back if
    this is faster than computing it, as measured at startup. Blocks of preempted requests can use this memory, too. If
    the device is a GPU, the memory is pinned. The default is 0, because a pod must request this memory in addition to
    its other memory.
    """

    kv_offloading_folder: str | None = None
    """Folder that keeps the KV blocks of the host memory of kv_offloading_size in files; None: there is no folder.

    Several processes and pods with the same model can share it. Blocks in it survive a restart. With several nodes,
    each node keeps the parts of its own layers in its own folder. With a folder, every
    byte of the weights is hashed once, before the first start.
    """

    kv_offloading_folder_size: float | None = None
    """Maximum size in GiB of all files in kv_offloading_folder; None: half of the space that is free at startup."""

    kv_cache_dtype: str = "auto"
    """Data type of the KV cache. With auto, it is the same type as `dtype`.

    With fp8 and fp8_e4m3, the cache stores twice as many tokens as with a 16-bit type, but numbers have a precision of
    only 4 bits. The output of attention then has an error of about 3 % if keys and values are normally distributed.

    With int8_per_token_head, the cache stores 8-bit integers, and one scale for each token and KV head. This type is
    supported only on CPUs. It is fast only if the dtype is bfloat16 and the CPU has compiled kernels.
    """

    mamba_ssm_cache_dtype: str = "auto"
    """Data type of the recurrent matrices in the states of sequences; see StateConfig. With auto, it is float32.

    With bfloat16, states take half the memory, and a step reads and writes half the bytes. Each token rounds the state
    again, so errors grow with the length of the output. The inputs of short convolutions always have the type `dtype`.
    """

    quantization: str | None = None
    """Quantization of the weights.

    With None, the weights of the checkpoint are used unchanged. With int8, int4 and fp8, the weights of all linear
    layers are quantized when a model is loaded. With int8 and fp8, there is a scale for each row. With int4, there is a
    scale and a zero point for each 32 inputs. With int8 on a CPU and fp8 on a GPU, the inputs of linear layers are also
    quantized.

    On a CPU, a quantized model is fast only if the dtype is bfloat16 and the kernels are compiled. If the checkpoint is
    already quantized, use None or the name of its quant_method.
    """

    speculative_config: SpeculativeConfig | None = None
    """Settings of speculative decoding.

    If it is set, a step also verifies draft tokens, and can return several tokens of a sequence. The distribution of
    the output does not change. async_scheduling must not be true at the same time.
    """

    kv_events_config: KVEventsConfig | None = None
    """Publish which KV blocks are cached, so that a router can send a prompt to the engine that has its beginning.
    None: nothing is published."""

    kv_transfer: KVTransferConfig | None = None
    """Serve KV blocks of the host memory of kv_offloading_size to other pods with the same model, and read blocks that
    they have. None: the pod does neither."""

    prefill_local_tokens: int = 512
    """If a request names a pod that computes its prompt, this pod nevertheless computes a prompt of which at most this
    many tokens are not cached. Another pod would take longer, because its queue has long prompts."""

    kv_recompute_threshold: int = 64
    """Blocks of other pods are not read if fewer tokens of the prompt than this number are not cached, because
    computing them takes less time than asking, or if reads of the last seconds took longer than computing. With 0, they
    are always read: prompts never delay the tokens of this pod."""

    kv_load_failure_policy: str = "recompute"
    """Policy for a request whose prompt another pod has computed, but whose blocks cannot be read. With recompute,
    this pod computes the prompt. With fail, the request fails with UNAVAILABLE before it has output, so that the
    prompts of a broken pod do not delay the tokens of other requests."""

    otlp_traces_endpoint: str | None = None
    """URL to which spans of requests are sent by OTLP, such as http://collector:4317 for gRPC or
    http://collector:4318/v1/traces for HTTP; None: requests are not traced."""

    tool_call_parser: str = "auto"
    """Format in which the model writes tool calls.

    The values are those of vLLM's --tool-call-parser. With auto, the engine detects the format from the chat template
    and the tokens of the checkpoint. With none, tool calls are left in the text.
    """

    reasoning_parser: str = "auto"
    """Format in which the model writes its reasoning before the answer. The values are those of vLLM's
    --reasoning-parser. auto and none have the same meaning as for tool_call_parser."""

    chat_template: str | None = None
    """File that contains a chat template; None: the chat template of the checkpoint is used."""

    model_impl: str = "auto"
    """The classes that compute the model, as in vLLM: quire (Quire's own), transformers (those of transformers, with
    Quire's attention, linear layers and adapters; slower), or auto: Quire's own, and those of transformers for other
    architectures."""

    convert: str = "auto"
    """What the model answers instead of, or in addition to, generating: the values are those of vLLM's --convert.

    With auto, the checkpoint decides: one with the files of sentence-transformers, or without an output projection,
    returns embeddings, and one with the head of a classifier classifies. With embed, any model returns embeddings. With
    classify, a model that generates returns the probability of one token against another: those of
    `classifier_from_token` in config.json, by default no and yes. With none, the model only generates.
    """

    pooling_type: str = "auto"
    """Which hidden states an embedding is made of: last (of the last token), cls (of the first token) or mean (of
    all tokens). With auto, the checkpoint decides; if it names none, it is last, or cls for an encoder."""

    language_model_only: bool = False
    """Serve a checkpoint that reads images as a language model: the vision tower is not loaded, and requests with
    images are rejected."""

    limit_mm_per_prompt: Mapping[str, int] | None = None
    """Maximum number of images of a prompt, as {"image": number}; None: 8 images. Other kinds of input, such as video
    and audio, are not supported, so their number must be 0."""

    skip_tokenizer_init: bool = False
    """Do not load a tokenizer. Prompts must then be token ids, and outputs have no text. If this is false, a model
    without a tokenizer is an error."""

    seed: int = 0
    """Seed of the generator that gives a seed to each request without one of its own."""

    @property
    def max_images(self) -> int:
        """Maximum number of images of a prompt."""
        limits = self.limit_mm_per_prompt or {}
        return 0 if self.language_model_only else limits.get("image", _DEFAULT_MAX_IMAGES)

    @property
    def ranks_per_core(self) -> int:
        """Number of tensor-parallel ranks of all pipeline stages together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a core on one machine."""
        return self.ranks_per_core // self.nnodes

    @property
    def max_steps_in_flight(self) -> int:
        """Largest number of steps in flight without async scheduling."""
        return self.pipeline_parallel_size if self.pipeline_micro_batches is None else self.pipeline_micro_batches

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all cores on one machine. On a CPU, they share the CPU cores and the memory."""
        return self.ranks_per_node * self.data_parallel_size

    @property
    def max_host_loras(self) -> int:
        """Maximum number of adapters in host memory."""
        if self.max_cpu_loras is not None:
            return self.max_cpu_loras
        return 4 * self.max_loras if self.cpu_lora_memory_bytes is None else sys.maxsize

    @property
    def total_lora_rank(self) -> int:
        """Largest sum of the LoRA ranks of the adapters in slots. An odd rank takes one more."""
        return self.max_loaded_lora_ranks or self.max_loras * (self.max_lora_rank + self.max_lora_rank % 2)

    @property
    def publishes_kv_events(self) -> bool:
        """True if the engine publishes KV events."""
        return self.kv_events_config is not None and self.kv_events_config.is_enabled

    @property
    def shares_blocks(self) -> bool:
        """True if other processes can use the KV blocks of the engine, so that their keys must cover all weights."""
        return self.kv_offloading_folder is not None or self.kv_transfer is not None

    @property
    def has_drafter(self) -> bool:
        """True if the draft tokens are proposed by a draft model or by heads on the main model."""
        return self.speculative_config is not None and self.speculative_config.has_drafter

    @property
    def max_drafts(self) -> int:
        """Maximum number of draft tokens of a sequence in a step; 0 without speculation."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def state_dtype(self) -> str:
        """Name of the data type of the recurrent matrices in states."""
        return "float32" if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype

    @property
    def uses_async_scheduling(self) -> bool:
        """True if the next step is launched while the current step is still running."""
        if self.speculative_config is not None or self.pipeline_parallel_size > 1:
            return False
        return self.device == "cuda" if self.async_scheduling is None else self.async_scheduling

    def num_lora_pages(self, model_config: ModelConfig) -> int:
        """Return the number of pages that the adapter slots of a model share; see `memory_sizing.lora_pages`."""
        if not self.enable_lora:
            return 0
        parts = self.lora_experts, self.lora_modules_to_save
        # All stages have the same number of pages, although the pages of stage 0 also have room for the embedding.
        model_config = split_stages(model_config, self.pipeline_parallel_size, self.quantization)[0]
        return lora_pages(model_config, self.max_loras, self.total_lora_rank, *parts)

    def for_model(self, model_config: ModelConfig) -> Self:
        """Return the configuration with which a model runs.

        An encoder computes each request in one step, and keeps nothing: a step has room for the longest request, and
        blocks of the KV cache only count sequences.

        Raises:
            ConfigError: a setting is not possible with an encoder.
        """
        if model_config.encoder is None:
            return self
        for name in ("speculative_config", "kv_offloading_size"):
            if getattr(self, name):
                raise ConfigError(f"{name}: not possible with an encoder, which has no KV cache; remove it")
        max_model_len = self.max_model_len or model_config.max_length
        return replace(
            self,
            max_num_batched_tokens=max(self.max_num_batched_tokens, max_model_len),
            block_size=max(capabilities.BLOCK_SIZES),
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=None,
            kv_cache_dtype="auto",
            swap_space=0.0,
        )

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed document.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type, is out of range, or is not supported by the
                engine.
        """
        if isinstance(data, dict) and "max_loras" not in data and type(cached := data.get("max_cpu_loras")) is int:
            # vLLM's default of max_loras is 1, so any max_cpu_loras is valid there.
            data = data | {"max_loras": max(1, min(_DEFAULT_MAX_LORAS, cached))}
        config = from_json(cls, data)
        config.validate()
        return config

    def to_json(self) -> dict[str, Any]:
        """Return all fields in the form that `from_json` reads."""
        document: dict[str, Any] = to_json(self)
        return document

    def validate(self) -> None:
        """Raise ConfigError for the first field whose value is out of range or is not in the capability table."""
        self._check_choices()
        self._check_ranges()
        if self.max_loras > self.max_host_loras:
            raise ConfigError(
                f"max_cpu_loras: must be at least max_loras {self.max_loras}, got {self.max_cpu_loras}; every adapter "
                "in an adapter slot also has a copy in host memory"
            )
        largest = max(2, self.max_lora_rank)
        if self.max_loaded_lora_ranks is not None and self.max_loaded_lora_ranks < largest:
            raise ConfigError(
                f"max_loaded_lora_ranks: must be at least {largest}, so that an adapter of max_lora_rank fits, got "
                f"{self.max_loaded_lora_ranks}; raise it, or lower max_lora_rank"
            )
        if self.kv_events_config is not None:
            self.kv_events_config.validate()
        if self.publishes_kv_events and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config: requires enable_prefix_caching, because only cached blocks have events; enable "
                "it, or publish no events"
            )
        if self.pipeline_parallel_size > 1:
            self._check_pipeline()
        self._check_nodes()
        if self.speculative_config is not None:
            self.speculative_config.validate()
            if self.async_scheduling:
                raise ConfigError(
                    "async_scheduling: must not be true with speculative_config, because draft tokens are computed "
                    "from the tokens of the previous step; remove one of the two"
                )

    def _check_pipeline(self) -> None:
        """Raise ConfigError for the first field that cannot be set with several pipeline stages."""
        size = f"pipeline_parallel_size {self.pipeline_parallel_size}"
        if self.async_scheduling:
            raise ConfigError(
                f"async_scheduling: must not be true with {size}, because stages already have several steps in "
                "flight; remove it"
            )
        if self.has_drafter:
            raise ConfigError(
                f"speculative_config.method: not possible with {size}, because drafts of a model need the hidden "
                "states of all layers in one process; use the method ngram or suffix, or remove one of the two"
            )

    def _check_nodes(self) -> None:
        """Raise ConfigError for the first field that cannot be set with this number of nodes."""
        if self.nnodes == 1:
            for field in ("master_addr", "rank_key_file"):
                if getattr(self, field):
                    raise ConfigError(
                        f"{field}: has no effect with nnodes 1, got {getattr(self, field)!r}; set nnodes to the number "
                        "of machines, or remove it"
                    )
            return
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size: must be 1 with nnodes {self.nnodes}, got {self.data_parallel_size}; use more "
                "replicas for more cores"
            )
        if not 0 < self.rank_port < 2**16 - 1:
            raise ConfigError(f"rank_port: must be a port from 1 to 65534, got {self.rank_port}")
        if not self.rank_key_file:
            raise ConfigError(
                f"rank_key_file: missing, but nnodes {self.nnodes} requires it; give a file with the key that all "
                "nodes share: openssl rand -hex 32 > FILE && chmod 600 FILE"
            )

    def _check_choices(self) -> None:
        choices: list[tuple[str, object, tuple[object, ...]]] = [
            ("device", self.device, capabilities.DEVICES),
            ("dtype", self.dtype, capabilities.DTYPES),
            ("block_size", self.block_size, capabilities.BLOCK_SIZES),
            ("load_format", self.load_format, capabilities.LOAD_FORMATS),
            ("scheduling_policy", self.scheduling_policy, capabilities.SCHEDULING_POLICIES),
            ("tensor_parallel_size", self.tensor_parallel_size, capabilities.TENSOR_PARALLEL_SIZES),
            ("kv_cache_dtype", self.kv_cache_dtype, capabilities.KV_CACHE_DTYPES),
            ("mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, capabilities.STATE_DTYPES),
            (
                "quantization",
                self.quantization,
                (None, *dict.fromkeys((*capabilities.QUANTIZATIONS, *capabilities.CHECKPOINT_QUANTIZATIONS))),
            ),
            ("max_lora_rank", self.max_lora_rank, capabilities.LORA_RANKS),
            ("model_impl", self.model_impl, capabilities.MODEL_IMPLS),
            ("convert", self.convert, capabilities.CONVERSIONS),
            ("pooling_type", self.pooling_type, capabilities.POOLING_TYPES),
            ("kv_load_failure_policy", self.kv_load_failure_policy, capabilities.KV_LOAD_FAILURE_POLICIES),
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
        if not 1 <= self.pipeline_parallel_size <= capabilities.MAX_PIPELINE_PARALLEL_SIZE:
            raise ConfigError(
                f"pipeline_parallel_size: must be from 1 to {capabilities.MAX_PIPELINE_PARALLEL_SIZE}, got "
                f"{self.pipeline_parallel_size}"
            )
        if self.nnodes < 1 or self.pipeline_parallel_size % self.nnodes:
            raise ConfigError(
                f"nnodes: must divide pipeline_parallel_size, {self.pipeline_parallel_size}, because each node has an "
                f"equal number of stages, got {self.nnodes}"
            )
        if not 1 <= self.max_steps_in_flight <= self.pipeline_parallel_size:
            raise ConfigError(
                f"pipeline_micro_batches: must be from 1 to pipeline_parallel_size, {self.pipeline_parallel_size}, got "
                f"{self.pipeline_micro_batches}"
            )
        if not 1 <= self.data_parallel_size <= capabilities.MAX_DATA_PARALLEL_SIZE:
            raise ConfigError(
                f"data_parallel_size: must be from 1 to {capabilities.MAX_DATA_PARALLEL_SIZE}, got "
                f"{self.data_parallel_size}; use more replicas for more cores"
            )
        for kind, limit in (self.limit_mm_per_prompt or {}).items():
            if not 0 <= limit <= (capabilities.MAX_IMAGES if kind == "image" else 0):
                raise ConfigError(
                    f"limit_mm_per_prompt.{kind}: must be from 0 to {capabilities.MAX_IMAGES} for image and 0 for "
                    f"other kinds of input, got {limit}"
                )
        for name in ("prefill_local_tokens", "kv_recompute_threshold"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must be at least 0, got {getattr(self, name)}")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs: must be at least -1, got {self.max_logprobs}")
        if not 0.0 <= self.swap_space < math.inf:
            raise ConfigError(f"swap_space: must be a size in GiB, got {self.swap_space}; use 0 for no swap space")
        if not 0.0 <= self.kv_offloading_size < math.inf:
            raise ConfigError(
                f"kv_offloading_size: must be a size in GiB, got {self.kv_offloading_size}; use 0 for no cache in host "
                "memory"
            )
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size: needs enable_prefix_caching, because only the prefix cache uses this memory; "
                "remove it or set enable_prefix_caching"
            )
        if self.kv_offloading_folder is not None:
            self._check_kv_offloading_folder()
        elif self.kv_offloading_folder_size is not None:
            raise ConfigError("kv_offloading_folder_size: needs kv_offloading_folder; set it, or remove the size")
        if self.kv_transfer is not None:
            self.kv_transfer.validate()
            self._check_store("kv_transfer", "peers would not know")
        if self.otlp_traces_endpoint is not None and not re.match(r"(https?|grpc)://[^/]", self.otlp_traces_endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint: must be a URL such as http://collector:4317, got {self.otlp_traces_endpoint!r}"
            )
        if not self.model:
            raise ConfigError("model: must not be empty; give a folder or a hub id such as org/name")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens: must be at least max_num_seqs {self.max_num_seqs}, got "
                f"{self.max_num_batched_tokens}; each running sequence needs at least one token of a step"
            )

    def _check_kv_offloading_folder(self) -> None:
        size = self.kv_offloading_folder_size
        if size is not None and not 0.0 < size < math.inf:
            raise ConfigError(f"kv_offloading_folder_size: must be a size in GiB above 0, got {size}; or omit it")
        self._check_store("kv_offloading_folder", "files do not name")

    def _check_store(self, field: str, unknown: str) -> None:
        """Check what every store outside of a core needs. `unknown` says why a draft model is not possible."""
        if not self.kv_offloading_size:
            raise ConfigError(
                f"{field}: needs kv_offloading_size, because blocks pass through this host memory; set it"
            )
        if self.has_drafter:
            raise ConfigError(
                f"{field}: not possible with a drafter in speculative_config, because {unknown} its weights; remove "
                "one of the two"
            )
