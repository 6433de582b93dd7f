# SPDX-License-Identifier: Apache-2.0
"""spec.lora and spec.engine of an LLMService."""

from dataclasses import dataclass
from typing import ClassVar

from quire_operator.api.quantity import QUANTITY
from quire_spec.documents.adapter_catalog import OnNoEffect
from quire_spec.documents.field_schema import Restarts, Rule, schema_field
from quire_spec.documents.sources import PvcSource, Source
from quire_spec.engine import kv_transfer_config
from quire_spec.model import capabilities

PEER_PATTERN = r"^([^:/\[\]\s]+|\[[0-9a-fA-F:.]+\]|[0-9.]+/[0-9]{1,2}|\[[0-9a-fA-F:.]+/[0-9]{1,3}\]):[0-9]{1,5}$"
"""HOST:PORT or NETWORK:PORT; an IPv6 address is in brackets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """spec.lora"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.maxCached) || self.maxCached >= self.maxLoaded",
            "maxCached must be at least maxLoaded, because every adapter in a slot also has a copy in host memory; "
            "raise spec.lora.maxCached or lower spec.lora.maxLoaded.",
        ),
    )

    maxLoaded: int = schema_field(8, minimum=0, maximum=256)
    """Number of adapter slots on the device: adapters that can be used at the same time. 0 disables adapters and frees
    their memory. Default 8, even without adapters, so that adding the first adapter restarts no pod."""
    maxRank: int = schema_field(16, enum=capabilities.LORA_RANKS)
    """Largest LoRA rank, and the memory of each adapter slot: for a model with 8 billion parameters, 80 MiB at rank 16
    and 320 MiB at rank 64. Not used with maxLoadedRanks. Default 16, the most common LoRA rank."""
    maxLoadedRanks: int | None = schema_field(None, minimum=8, maximum=131072)
    """Largest sum of the LoRA ranks of the adapters in slots, for which memory is reserved: 192 for eight adapters of
    rank 8 and one of rank 128. Adapters can have any LoRA rank that fits, at most 512, so that adapters of a higher
    rank than before restart no pod. An adapter that changes only some modules takes less. If the sum is reached,
    adapters that are not in use leave their slots. Default maxLoaded times maxRank."""
    experts: bool | None = schema_field(None)
    """Accept adapters that change the experts of a mixture of experts. Adapter slots and copies in host memory then
    have room for the matrices of all experts: for Qwen3-30B-A3B, 1.2 GiB at rank 16. Routers can be changed without
    this. Default false."""
    modulesToSave: bool | None = schema_field(None)
    """Accept adapters with a whole embedding or output projection (modules_to_save of PEFT). Every adapter
    slot and every copy in host memory then has room for both: for a model with 8 billion parameters and 128,256 tokens,
    2 GiB. Whole norms need no room. Default false."""
    maxCached: int | None = schema_field(None, minimum=0, maximum=4096)
    """Number of adapters cached in host memory. Copying one of them to a slot takes milliseconds. Default: four times
    maxLoaded, or as many as fit into maxCachedMemory if that is set."""
    maxCachedMemory: str | None = schema_field(None, **QUANTITY)
    """Host memory for cached adapters, such as 8Gi. Adapters with a small LoRA rank need less of it. The adapters in
    slots must fit: maxLoadedRanks, or maxLoaded adapters of maxRank. Default: only maxCached limits the number. With
    maxLoadedRanks, the default is as much memory as the slots have, times maxCached, divided by maxLoaded."""
    onNoEffect: OnNoEffect | None = schema_field(None, restarts=Restarts.NO)
    """Policy for adapters that do not change the outputs of the base model. Refuse: such an adapter is not used. Warn:
    it is used, and status.adapters contains a warning. Default Warn, because training by reinforcement learning starts
    with such an adapter."""

    @property
    def largest_rank(self) -> int:
        """Largest LoRA rank that an adapter can have."""
        if self.maxLoadedRanks is None:
            return self.maxRank
        return max(rank for rank in capabilities.LORA_RANKS if rank <= self.maxLoadedRanks)

    @property
    def total_rank(self) -> int:
        """Sum of the LoRA ranks for which the slots have memory. An odd rank is padded to an even number."""
        if not self.maxLoaded or self.maxLoadedRanks is None:
            return self.maxLoaded * (self.maxRank + self.maxRank % 2)
        return self.maxLoadedRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeModelSpec:
    """spec.engine.speculativeConfig.model"""

    source: Source = schema_field()
    """Location of the files: set exactly one field. Weights must be in safetensors format. Code in a model repository
    is never executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfigSpec:
    """spec.engine.speculativeConfig"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.model) == (self.method in ['draft_model', 'eagle3', 'medusa'])",
            "model must be set with method draft_model, eagle3 and medusa, and with no other method; add "
            "model.source, or use another method.",
        ),
        Rule(
            "!has(self.promptLookupMin) || !has(self.promptLookupMax) || self.promptLookupMin <= self.promptLookupMax",
            "promptLookupMax must be at least promptLookupMin; increase it or omit it.",
        ),
    )

    method: str = schema_field(enum=capabilities.SPECULATIVE_METHODS)
    """Method of the proposer. ngram finds the last tokens of a request earlier in the same request, and proposes the
    tokens that followed them there. suffix also finds them in past outputs of the same adapter and cache salt, and
    proposes the most frequent continuation. draft_model computes them with a smaller model, eagle3 with an EAGLE-3
    head, and medusa with Medusa heads; these three need model. mtp computes them with the layer of the model's own
    checkpoint that predicts a further token."""
    model: SpeculativeModelSpec | None = schema_field(None)
    """The draft model of method draft_model, or the heads of eagle3 or medusa. They are downloaded with the model and
    use its dtype. A draft model must have the model's vocabulary, and heads must have been trained for the model."""
    numSpeculativeTokens: int = schema_field(minimum=1, maximum=16)
    """Maximum number of guessed tokens for a request in a step. A step uses fewer, or none, if it has many requests or
    if few of the last guesses were correct."""
    promptLookupMin: int | None = schema_field(None, minimum=1, maximum=1048576)
    """Minimum number of last tokens that must occur earlier. Default: promptLookupMax, or 5."""
    promptLookupMax: int | None = schema_field(None, minimum=1, maximum=1048576)
    """Maximum number of last tokens to search for; the longest match is used. Default: promptLookupMin, or 5."""
    suffixDecodingMaxTreeDepth: int | None = schema_field(None, minimum=2, maximum=128)
    """Method suffix: maximum number of tokens of a match and its guess together. Default: 24."""
    suffixDecodingMaxCachedRequests: int | None = schema_field(None, minimum=0, maximum=10000000)
    """Method suffix: maximum number of past outputs that are kept, in at most 64 MiB; 0 keeps none. Default: 10000."""
    suffixDecodingMaxSpecFactor: str | None = schema_field(
        None, pattern=r"^(0\.[0-9]{0,2}[1-9]|[1-9][0-9]{0,2}(\.[0-9]{1,3})?)$", max_length=16
    )
    """Method suffix: maximum number of guessed tokens per token of the match. Default: "1.0"."""
    suffixDecodingMinTokenProb: str | None = schema_field(None, pattern=r"^(0(\.[0-9]{1,3})?|1(\.0)?)$", max_length=16)
    """Method suffix: a guess ends before a token whose estimated probability, from counts, is lower. Default: "0.1"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyDirSpec:
    """spec.engine.kvCacheOffloading.secondary[].folder.emptyDir: it has no fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFolderSpec:
    """spec.engine.kvCacheOffloading.secondary[].folder"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.emptyDir) != has(self.pvc)",
            "folder must have exactly one of emptyDir and pvc; keep the one that holds the blocks.",
        ),
    )

    emptyDir: EmptyDirSpec | None = schema_field(None)
    """A volume on the node's disk that is deleted with the pod. The blocks survive a restart of the container. Give {}.
    """
    pvc: PvcSource | None = schema_field(None)
    """A folder on a PersistentVolumeClaim in the same namespace, which all pods of the service mount. The blocks
    survive the pods. Services with the same model can share it. It must not be the claim of a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondaryTierSpec:
    """spec.engine.kvCacheOffloading.secondary[]"""

    folder: KVFolderSpec = schema_field()
    """Place of the files: set exactly one field."""
    size: str = schema_field(**QUANTITY)
    """Maximum size of all files in the folder, such as 200Gi. The files that were used least recently are removed. The
    size limit of an emptyDir, and the ephemeral storage that the pod requests for it, are a quarter larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheOffloadingSpec:
    """spec.engine.kvCacheOffloading: further places for cached KV blocks."""

    memory: str = schema_field(**QUANTITY)
    """Host memory of a replica that caches KV blocks for which its GPUs, or the KV cache of a CPU, have no room, such
    as 16Gi. A block is copied there when a second request uses it, and copied back if this is faster than computing it.
    The pod's memory increases by this amount."""
    secondary: tuple[SecondaryTierSpec, ...] = schema_field((), max_items=1, list_type="atomic")
    """A folder that keeps the blocks of this memory in files, also after a restart. Files are not encrypted. Not
    possible with pipelineParallelSize above 1 or with speculativeConfig.model. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSpec:
    """spec.engine.kvTransfer: pods read KV blocks from the host memory of each other."""

    enabled: bool = schema_field(True)
    """Default true."""
    port: int = schema_field(kv_transfer_config.DEFAULT_PORT, minimum=1024, maximum=65535)
    """Port on which a pod serves its blocks to the other pods of the service. Default 8005."""
    bytesPerSecond: str | None = schema_field(None, **QUANTITY)
    """Maximum number of bytes of blocks that a pod sends in a second, such as 500M. Default: no limit."""
    allowedPeers: tuple[str, ...] = schema_field(
        (), items={"min_length": 3, "max_length": 260, "pattern": PEER_PATTERN}, max_items=64, list_type="set"
    )
    """Further servers from which a pod may read if a request names one: HOST:PORT, or NETWORK:PORT such as
    10.0.0.0/8:8005. They need the same key. The pods of the service are always allowed. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitMmPerPromptSpec:
    """spec.engine.limitMmPerPrompt"""

    image: int = schema_field(minimum=0, maximum=capabilities.MAX_IMAGES)
    """Maximum number of images of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEngineSpec:
    """spec.disaggregation.prefill.engine and spec.disaggregation.decode.engine: the fields of spec.engine that can
    differ between the roles. A field that is set replaces the one of spec.engine.

    All other fields must be equal in both roles. Otherwise, a pod of one role could not use the KV blocks of the other.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.maxNumSeqs) || !has(self.maxNumBatchedTokens) || self.maxNumBatchedTokens >= self.maxNumSeqs",
            "maxNumBatchedTokens must be at least maxNumSeqs, because each running sequence uses at least one token "
            "of a step; raise spec.engine.maxNumBatchedTokens or lower spec.engine.maxNumSeqs.",
        ),
        Rule(
            "!has(self.kvCacheMemory) || !has(self.gpuMemoryUtilization)",
            "kvCacheMemory and gpuMemoryUtilization must not both be set, because each determines the size of the KV "
            "cache; keep one.",
        ),
    )

    gpuMemoryUtilization: str | None = schema_field(
        None, min_length=3, max_length=5, pattern=r"^0\.[1-9][0-9]{0,2}$", planned=True
    )
    """Fraction of GPU memory for weights, activations and KV cache together. It is a decimal in quotes ("0.90"),
    because Kubernetes does not store exact decimals. Default: 0.80 to 0.93, depending on the size of the GPU."""
    kvCacheMemory: str | None = schema_field(None, **QUANTITY, planned=True)
    """Memory of a replica's KV cache on each GPU, or on the CPU, such as 4Gi. Default: on a GPU the memory that
    gpuMemoryUtilization leaves, on a CPU a bounded fraction of free memory."""
    dataParallelSize: int | None = schema_field(
        None, minimum=1, maximum=capabilities.MAX_DATA_PARALLEL_SIZE, planned=True
    )
    """Number of cores of a replica: copies of the model behind one queue, which share the replica's adapters and
    addresses. Each uses tensorParallelSize GPUs of its own; on a CPU they share the CPU cores. A request goes to the
    core that has cached its beginning, unless that one is busier. If a core ends, the others serve on. Default 1."""
    maxNumSeqs: int | None = schema_field(None, minimum=1, maximum=4096, planned=True)
    """Maximum number of running sequences. Default: the number that the KV cache can hold, up to 512 on a GPU."""
    maxNumBatchedTokens: int | None = schema_field(None, minimum=1, maximum=1048576, planned=True)
    """Maximum number of tokens in a step. Longer prompts are processed in several steps. A larger value uses the GPU
    better; a smaller value gives running requests a steadier token rate. Default: 512 on a CPU; 2048 to 8192 on a GPU,
    depending on its memory, and less if this permits a longer context."""
    maxNumQueuedReqs: int | None = schema_field(None, minimum=1, maximum=1048576)
    """Maximum number of requests in a replica that wait for their first step. Additional requests get the error
    UNAVAILABLE at once, so that the client can try another replica. Default 1024."""
    schedulingPolicy: str | None = schema_field(None, enum=capabilities.SCHEDULING_POLICIES)
    """Order in which requests run. fcfs is first come, first served. With priority, requests with the lowest value of
    the parameter `priority` run first, and requests with equal values run in order of arrival. Default fcfs."""
    swapSpace: str | None = schema_field(None, **QUANTITY, planned=True)
    """Host memory for KV blocks of preempted requests, for each GPU or for the CPU, such as 4Gi. Blocks are swapped
    only if this is faster than recomputing them. The pod's memory increases by this amount. Default: none; blocks are
    recomputed."""
    kvCacheOffloading: KVCacheOffloadingSpec | None = schema_field(None, planned=True)
    """Caches KV blocks of repeated prompts in host memory after the KV cache has evicted them. Not possible for models
    in which only some layers have a sliding window. Default: none; evicted blocks are computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec(RoleEngineSpec):
    """spec.engine. If a field is None, the planner chooses its value."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        *RoleEngineSpec.RULES,
        Rule(
            "!has(self.kvTransfer) || !self.kvTransfer.enabled || has(self.kvCacheOffloading)",
            "kvTransfer must not be set without kvCacheOffloading, because blocks are sent from its memory and "
            "received there; add kvCacheOffloading.memory, or remove kvTransfer.",
        ),
        Rule(
            "!has(self.pipelineParallelSize) || self.pipelineParallelSize == 1 || !has(self.dataParallelSize) || "
            "self.dataParallelSize == 1",
            "dataParallelSize must be 1 with pipelineParallelSize above 1, because the cores of a replica run on one "
            "node; use more replicas, or remove one of the two.",
        ),
        Rule(
            "!has(self.pipelineParallelSize) || self.pipelineParallelSize == 1 || !has(self.speculativeConfig) || "
            "self.speculativeConfig.method in ['ngram', 'suffix']",
            "speculativeConfig.method must be ngram or suffix with pipelineParallelSize above 1, because drafts of a "
            "model need all layers in one process; change the method, or remove one of the two.",
        ),
    )

    maxModelLen: int | None = schema_field(None, minimum=16, maximum=16777216, planned=True)
    """Maximum total number of prompt and output tokens of a request. Default: the model's training length, at most
    32768, and less if minConcurrency requests of that length do not fit into memory."""
    kvCacheDtype: str | None = schema_field(None, enum=("auto", "fp8", "int8_per_token_head"), planned=True)
    """Data type of the KV cache. auto is the data type of the model. fp8 (e4m3) holds twice the tokens of a 16-bit type
    and rounds keys and values to 4 bits of precision. int8_per_token_head, only for CPUs, rounds keys and values to 8
    bits with a scale for each token and KV head. Default auto."""
    mambaSsmCacheDtype: str | None = schema_field(None, enum=capabilities.STATE_DTYPES, planned=True)
    """Data type of the recurrent matrices in the states of sequences (linear attention and Mamba-2). auto is float32.
    bfloat16 takes half the memory, and rounds the state after each token. Default auto."""
    blockSize: int | None = schema_field(None, enum=capabilities.BLOCK_SIZES, planned=True)
    """Tokens in a KV block. Small blocks share prefixes better and waste less memory; large blocks have shorter block
    tables. Default: 16, or 32 with very many long requests."""
    tensorParallelSize: int | None = schema_field(None, enum=capabilities.TENSOR_PARALLEL_SIZES, planned=True)
    """Number of GPUs that share each layer. On a CPU it is the number of processes, for experiments only. Default: on a
    CPU 1; on GPUs the smallest number, up to gpu.count, that divides the model and gives the longest context (up to
    32768 tokens). A small number is preferred because more replicas scale better than more GPUs in one replica."""
    pipelineParallelSize: int | None = schema_field(
        None, minimum=1, maximum=capabilities.MAX_PIPELINE_PARALLEL_SIZE, planned=True
    )
    """Number of nodes that share the layers of a replica: each computes some of the layers, with tensorParallelSize
    GPUs. With more than 1, a replica is a group of pods, one on each node, and the cluster needs LeaderWorkerSet. For a
    model that does not fit on one node. Default 1."""
    dtype: str | None = schema_field(
        None, enum=tuple(dtype for dtype in capabilities.DTYPES if dtype != "auto"), planned=True
    )
    """Data type of weights and activations. Default: the checkpoint's; float32 on a CPU without kernels for bfloat16.
    """
    quantization: str | None = schema_field(
        None,
        enum=("None", *dict.fromkeys((*capabilities.QUANTIZATIONS, *capabilities.CHECKPOINT_QUANTIZATIONS))),
        planned=True,
    )
    """Quantization of the weights. Default None: the weights of the checkpoint are used unchanged. A quantized
    checkpoint needs no value; the name of its quant_method is accepted. int8, int4 and fp8 quantize the weights of all
    linear layers and experts when a model is loaded. On a CPU int8 also quantizes the inputs of the layers, and on a
    GPU fp8 does, except for experts. CPUs need dtype bfloat16, and AVX-512 BF16, VBMI and VNNI, or AVX2, FMA and F16C,
    to be fast. Memory is planned for loading, which needs the size of the weights before they are quantized."""
    speculativeConfig: SpeculativeConfigSpec | None = schema_field(None)
    """Speculation: a step also verifies tokens that a proposer guessed, and can return several tokens of a request. The
    output has the same distribution as without speculation. Default: no speculation."""
    maxLogprobs: int | None = schema_field(None, minimum=-1, maximum=1048576)
    """Maximum number of log probabilities that a request can get for each position; -1 is the size of the vocabulary.
    Default 20, because every token of a response contains this many."""
    seed: int | None = schema_field(None, minimum=0, maximum=4294967295)
    """Seed of the generator that gives a seed to each request without one of its own. Default 0."""
    skipTokenizerInit: bool | None = schema_field(None)
    """Load no tokenizer: requests contain input_ids, outputs contain token ids, and text is rejected. If false, a model
    without a tokenizer does not start. Default false."""
    languageModelOnly: bool | None = schema_field(None)
    """Serve a checkpoint that reads images as a language model: its vision tower is not loaded, and requests with
    images are rejected. Default false."""
    limitMmPerPrompt: LimitMmPerPromptSpec | None = schema_field(None)
    """Limits of the inputs of a prompt that are not text. Default: 8 images."""
    modelImpl: str | None = schema_field(None, enum=capabilities.MODEL_IMPLS)
    """Classes that compute the model. quire: Quire's own. transformers: those of transformers, for more architectures
    and more slowly, on one GPU or a CPU. With auto, Quire's own, and those of transformers for other architectures.
    Default auto."""
    loadFormat: str | None = schema_field(None, enum=capabilities.LOAD_FORMATS)
    """Reader of the weights. safetensors reads only what a GPU needs. runai_streamer: Model Streamer, whose threads
    read ahead, for storage with a long latency; with an s3 source and cache.mode EmptyDir, pods read the weights from
    the bucket without a copy on the disk of the node. With auto, safetensors. Default auto."""
    convert: str | None = schema_field(None, enum=capabilities.CONVERSIONS)
    """What the model returns besides text. With auto, the checkpoint decides: embeddings if it has the files of
    sentence-transformers or no output projection, classes if it has the head of a classifier, otherwise nothing. embed:
    any model returns embeddings. classify: a model that generates returns the probability of the token yes against no.
    none: the model only generates. Default auto."""
    poolingType: str | None = schema_field(None, enum=capabilities.POOLING_TYPES)
    """Hidden states that an embedding is made of: that of the last token, that of the first one (cls), or the mean
    of all tokens. With auto, the checkpoint decides; without pooling in it, last, or cls for an encoder. Default
    auto."""
    kvTransfer: KVTransferSpec | None = schema_field(None, planned=True)
    """Pods read KV blocks of a prompt from the pod that the header x-kv-cache-source-host-port of a request names, if
    this is faster than computing them. Both must have the same tensorParallelSize and pipelineParallelSize. Not
    possible with speculativeConfig.model. Default: a pod computes what it does not have itself."""
    prefixCaching: bool = schema_field(True)
    """Reuse the KV blocks of prompts that have a common prefix. Default true: prefix caching does not change outputs,
    and its cost was not measurable."""
    minConcurrency: int = schema_field(2, minimum=1, maximum=4096, planned=True, restarts=Restarts.BY_PLAN)
    """Number of requests of length maxModelLen that must fit into the KV cache together. The planner shortens
    maxModelLen or uses more GPUs until they fit. Default 2, so that one long request never blocks all others."""
