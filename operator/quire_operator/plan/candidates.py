# SPDX-License-Identifier: Apache-2.0
"""Candidates for a plan: combinations of a number of GPUs, a token budget and a maximum number of sequences.

This module computes the memory costs and the context length of each candidate. The order of the candidates is fixed,
and a candidate that fits also fits if there is more memory. Therefore, more memory never results in a worse plan. The
functions are pure. planner.py uses the best candidate; advice.py evaluates other candidates.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from quire_operator.api.quantity import to_bytes
from quire_operator.plan import device_memory, limits
from quire_operator.plan.device_memory import GIB, MIB, DeviceCosts
from quire_operator.plan.host_memory import host_costs
from quire_operator.plan.inputs import PlannerInputs
from quire_spec.model import capabilities
from quire_spec.model.model_config import ModelConfig

MEAN_SEQUENCE_LEN = 2048
"""The planner assumes that an average sequence has this number of tokens, and chooses maxNumSeqs accordingly."""
CONTEXT_STEP = 1024
MAX_BLOCK_SIZE = 128
"""Largest KV block in tokens. The planner counts in blocks of this size, so a smaller blockSize never shortens the
context."""
GPU_MAX_NUM_SEQS = (512, 256, 128, 64, 32, 16)
CPU_MAX_NUM_SEQS = (64, 32, 16, 8, 4, 2, 1)
GPU_TOKEN_BUDGETS = ((70 * GIB, 8192), (32 * GIB, 4096), (0, 2048))
"""Each pair contains a size of GPU memory, and the token budget for GPUs with at least this memory. A larger GPU is
fully utilized only if a step has more tokens."""
CPU_TOKEN_BUDGET = 512
"""Token budget of a step on a CPU. With 2048 tokens, one long prompt would delay running requests by seconds."""
MAX_KV_TOKENS = 2**63 - 1
"""Largest integer that a status can contain. The KV cache size in a spec can result in more tokens than this."""
MAX_CPU_KV_BYTES = 4 * GIB
"""Largest KV cache on a CPU if the spec sets neither kvCacheMemory nor a memory limit."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of settings, and the memory that it needs on each device."""

    tp: int
    max_num_batched_tokens: int
    max_num_seqs: int
    utilization: int
    """gpuMemoryUtilization in thousandths of a GPU's memory; 0 on a CPU."""
    costs: DeviceCosts
    kv_bytes: int
    """Memory for the KV cache in bytes; negative if weights and other costs alone exceed the memory."""
    kv_tokens: int
    max_model_len: int
    """Context length in tokens; 0 if the KV cache is too small for the minimum context."""


def generate_candidates(inputs: PlannerInputs) -> Iterator[Candidate]:
    """Yield every allowed candidate, including those that do not fit. Raises the errors of limits.allowed_tp_sizes."""
    for tp in limits.allowed_tp_sizes(inputs):
        for tokens in _token_budgets(inputs):
            for seqs in _max_num_seqs_options(inputs):
                yield evaluate(inputs, tp, inputs.engine.maxNumBatchedTokens or max(tokens, seqs), seqs)


def best_candidate(inputs: PlannerInputs, candidates: Iterable[Candidate]) -> Candidate | None:
    """Return the fitting candidate with the highest `sort_key`; None if no candidate fits."""
    return max((w for w in candidates if w.max_model_len), key=lambda w: sort_key(inputs, w), default=None)


def sort_key(inputs: PlannerInputs, candidate: Candidate) -> tuple[int, int, int, int]:
    """Return the sort key of a candidate; the best candidate has the highest key.

    The longest context for minConcurrency requests is best. Candidates with the same context are compared by three
    criteria, in this order: fewer GPUs, more sequences, larger token budget.

    More sequences are better only as long as the KV cache has MEAN_SEQUENCE_LEN tokens for each of them. Further
    sequences would often wait for KV blocks.
    """
    context = min(candidate.max_model_len, candidate.kv_tokens // inputs.engine.minConcurrency)
    mean = min(MEAN_SEQUENCE_LEN, limits.max_context(inputs))
    seqs = candidate.max_num_seqs
    seqs_key = seqs if seqs * mean <= candidate.kv_tokens else -seqs
    return context, -candidate.tp, seqs_key, candidate.max_num_batched_tokens


def evaluate(inputs: PlannerInputs, tp: int, tokens: int, seqs: int) -> Candidate:
    """Compute the memory costs and the context length of these settings, and return them as a candidate. Of several
    pipeline stages, the one whose KV cache has the fewest tokens decides."""
    candidates = [_evaluate_stage(inputs, stage, tp, tokens, seqs) for stage in limits.stages(inputs)]
    return min(candidates, key=lambda candidate: (candidate.kv_tokens, candidate.kv_bytes))


def _evaluate_stage(inputs: PlannerInputs, shape: ModelConfig, tp: int, tokens: int, seqs: int) -> Candidate:
    dtype_bytes, lora = limits.element_bytes(inputs), inputs.lora
    is_encoder = shape.encoder is not None
    if is_encoder:
        # The engine never divides a request of an encoder.
        tokens = max(tokens, limits.max_context(inputs))
    costs = DeviceCosts(
        weights=limits.stage_weights_bytes(inputs, tp, shape),
        activations=device_memory.activation_bytes(shape, tokens, seqs, dtype_bytes, tp, lora),
        non_torch=device_memory.non_torch_bytes(tp * inputs.pipeline_parallel_size) if inputs.gpu else 0,
        lora=device_memory.lora_bytes(
            shape, lora.maxLoaded, lora.total_rank, lora, dtype_bytes, limits.stages(inputs)[0]
        ),
        draft=limits.draft_bytes(inputs, tp),
        states=limits.state_bytes(inputs, tp, seqs),
    )
    utilization = _utilization(inputs, tp)
    per_token = limits.kv_bytes_per_token(inputs, tp, shape)
    if is_encoder:
        missing = min(_kv_bytes(inputs, tp, costs, utilization, seqs, per_token), 0)
        length = 0 if missing else limits.max_context(inputs)
        return Candidate(tp, tokens, seqs, utilization, costs, missing, seqs * length, length)
    kv_bytes = _kv_bytes(inputs, tp, costs, utilization, seqs, per_token)
    # This number of tokens fits if all layers keep all tokens. More fit if layers with a sliding window free KV blocks.
    pool_tokens = min(max(0, kv_bytes // per_token), MAX_KV_TOKENS)
    length = _context_length(inputs, pool_tokens)
    kv_tokens = pool_tokens
    if length:
        kv_tokens = min(limits.kv_layout(inputs).num_tokens(pool_tokens, length, MAX_BLOCK_SIZE), MAX_KV_TOKENS)
    return Candidate(tp, tokens, seqs, utilization, costs, kv_bytes, kv_tokens, length)


def choose_block_size(inputs: PlannerInputs, candidate: Candidate) -> int:
    """Return the number of tokens in a KV block.

    A block has 32 tokens if the candidate has many long sequences, and otherwise 16. Smaller blocks are chosen if
    partly filled blocks would waste more than 2 % of the KV cache.
    """
    if inputs.engine.blockSize is not None:
        return inputs.engine.blockSize
    target = 32 if candidate.max_num_seqs >= 256 and candidate.max_model_len >= limits.MAX_DEFAULT_CONTEXT else 16
    sizes = [b for b in capabilities.BLOCK_SIZES if b <= target]
    return max((b for b in sizes if candidate.max_num_seqs * (b - 1) * 25 <= candidate.kv_tokens), default=min(sizes))


def _utilization(inputs: PlannerInputs, tp: int) -> int:
    if inputs.gpu is None:
        return 0
    if inputs.engine.gpuMemoryUtilization is not None:
        return int(Fraction(inputs.engine.gpuMemoryUtilization) * 1000)
    return device_memory.utilization(inputs.model.shape, inputs.gpu.visible_bytes, tp)


def _kv_bytes(inputs: PlannerInputs, tp: int, costs: DeviceCosts, utilization: int, seqs: int, per_token: int) -> int:
    """Return the number of bytes for the KV cache on each GPU, or for each process on a CPU.

    If the spec sets a size that fits, return this size. If the size does not fit, return the missing bytes as a
    negative number.
    """
    requested = None if inputs.engine.kvCacheMemory is None else to_bytes(inputs.engine.kvCacheMemory)
    if inputs.gpu is not None:
        available = inputs.gpu.visible_bytes * utilization // 1000 - costs.total
    elif inputs.memory_limit is not None:
        model_bytes = inputs.memory_limit - host_costs(inputs, 0).rounded_total
        available = (model_bytes // inputs.num_ranks(tp) - costs.rounded_total) // MIB * MIB
    else:
        available = requested or _cpu_kv_bytes(inputs, tp, seqs, per_token)
    if requested is None:
        return available
    return requested if requested <= available else available - requested


def _cpu_kv_bytes(inputs: PlannerInputs, tp: int, seqs: int, per_token: int) -> int:
    """Return the size of the KV cache on a CPU if the container has no memory limit.

    The cache has space for all sequences, but it has at most MAX_CPU_KV_BYTES. It is larger only if the minimum context
    of the plan needs more.
    """
    length = round_up_to_blocks(limits.max_context(inputs))
    target = max(length * inputs.engine.minConcurrency, seqs * min(MEAN_SEQUENCE_LEN, length)) * per_token
    shortest = round_up_to_blocks(limits.min_context(inputs))
    min_tokens = length if inputs.engine.maxModelLen else shortest * inputs.engine.minConcurrency
    return -(-max(min(target, MAX_CPU_KV_BYTES // inputs.num_ranks(tp)), min_tokens * per_token) // MIB) * MIB


def round_up_to_blocks(num_tokens: int) -> int:
    """Round a number of tokens up to whole blocks."""
    return -(-num_tokens // MAX_BLOCK_SIZE) * MAX_BLOCK_SIZE


def _context_length(inputs: PlannerInputs, pool_tokens: int) -> int:
    block_tokens = pool_tokens // MAX_BLOCK_SIZE * MAX_BLOCK_SIZE
    if inputs.engine.maxModelLen is not None:
        return inputs.engine.maxModelLen if block_tokens >= inputs.engine.maxModelLen else 0
    limit = limits.max_context(inputs)
    length = limits.kv_layout(inputs).max_length(block_tokens, inputs.engine.minConcurrency, MAX_BLOCK_SIZE)
    length = min(limit, length)
    if length < limit:
        length = length // CONTEXT_STEP * CONTEXT_STEP
    return length if length >= limits.min_context(inputs) else 0


def _token_budgets(inputs: PlannerInputs) -> list[int]:
    if inputs.engine.maxNumBatchedTokens is not None:
        return [inputs.engine.maxNumBatchedTokens]
    if inputs.gpu is None:
        return [CPU_TOKEN_BUDGET]
    return [tokens for min_bytes, tokens in GPU_TOKEN_BUDGETS if inputs.gpu.visible_bytes >= min_bytes]


def _max_num_seqs_options(inputs: PlannerInputs) -> list[int]:
    """Return the values of maxNumSeqs to try, from minConcurrency to the token budget of a step."""
    if inputs.engine.maxNumSeqs is not None:
        return [inputs.engine.maxNumSeqs]
    default_options = GPU_MAX_NUM_SEQS if inputs.gpu else CPU_MAX_NUM_SEQS
    min_seqs = max(inputs.engine.minConcurrency, default_options[-1])
    max_seqs = inputs.engine.maxNumBatchedTokens or max(min_seqs, default_options[0])
    return sorted({min(min_seqs, max_seqs), *(seqs for seqs in default_options if min_seqs <= seqs <= max_seqs)})
