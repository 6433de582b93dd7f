# SPDX-License-Identifier: Apache-2.0
"""Ways to run a model: numbers of GPUs, token budget and sequences, with what they cost and the context they lead to.

Pure. Ways are compared in one fixed order, and more memory only makes more of them fit: so it never leads to a worse
plan. planner.py takes the best one, advice.py looks at the others.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from quire_operator.api.quantity import to_bytes
from quire_operator.plan import device_memory, limits
from quire_operator.plan.device_memory import GIB, MIB, DeviceCosts
from quire_operator.plan.host_memory import host_costs
from quire_operator.plan.inputs import PlannerInputs

MEAN_SEQUENCE_LEN = 2048
"""Tokens that a sequence is assumed to hold on average, when sequences are counted."""
CONTEXT_STEP = 1024
MAX_BLOCK_SIZE = 128
"""Tokens are counted in blocks of the largest size, so that the choice of a size never shortens the context."""
GPU_MAX_NUM_SEQS = (512, 256, 128, 64, 32, 16)
CPU_MAX_NUM_SEQS = (64, 32, 16, 8, 4, 2, 1)
GPU_TOKEN_BUDGETS = ((70 * GIB, 8192), (32 * GIB, 4096), (0, 2048))
"""Token budget by memory: a large GPU needs more tokens in a step to be busy."""
CPU_TOKEN_BUDGET = 512
"""Token budget on a CPU: at 2048 one long prompt would hold up running answers for seconds."""
MAX_KV_TOKENS = 2**63 - 1
"""A status holds no larger number, and a spec may pin any size of the KV cache: its plan could not be written."""
MAX_CPU_KV_BYTES = 4 * GIB
"""Most that a KV cache on a CPU takes when nobody says how much memory there is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the model, and what it costs on each device."""

    tp: int
    max_num_batched_tokens: int
    max_num_seqs: int
    utilization: int
    """Thousandths of a GPU's memory; 0 on a CPU."""
    costs: DeviceCosts
    kv_bytes: int
    """For the KV cache; negative when not even the rest fits."""
    kv_tokens: int
    max_model_len: int
    """0: too little is left for a useful length."""


def generate_candidates(inputs: PlannerInputs) -> Iterator[Candidate]:
    """Every way that the rules allow, whether it fits or not; raises Unplannable as limits.tp_allowed does."""
    for tp in limits.allowed_tp_sizes(inputs):
        for tokens in _token_budgets(inputs):
            for seqs in _max_num_seqs_options(inputs):
                yield evaluate(
                    inputs, tp, max(tokens, seqs) if inputs.engine.maxNumBatchedTokens is None else tokens, seqs
                )


def best_candidate(inputs: PlannerInputs, candidates: Iterable[Candidate]) -> Candidate | None:
    """The highest in `rank` of those that fit."""
    return max((w for w in candidates if w.max_model_len), key=lambda w: sort_key(inputs, w), default=None)


def sort_key(inputs: PlannerInputs, candidate: Candidate) -> tuple[int, int, int, int]:
    """The order of ways: the longest context that minConcurrency requests can have at once, then the fewest GPUs, then
    the most sequences, then the largest token budget.

    Sequences count as far as each has MEAN_SEQUENCE tokens, so that none of them waits for blocks all the time.
    """
    context = min(candidate.max_model_len, candidate.kv_tokens // inputs.engine.minConcurrency)
    mean = min(MEAN_SEQUENCE_LEN, limits.max_context(inputs))
    fits_mean_length = candidate.max_num_seqs * mean <= candidate.kv_tokens
    return (
        context,
        -candidate.tp,
        candidate.max_num_seqs if fits_mean_length else -candidate.max_num_seqs,
        candidate.max_num_batched_tokens,
    )


def evaluate(inputs: PlannerInputs, tp: int, tokens: int, seqs: int) -> Candidate:
    """One way, with its costs and the length that it leads to."""
    shape, dtype_bytes = inputs.model.shape, limits.element_bytes(inputs)
    costs = DeviceCosts(
        weights=device_memory.weights_bytes(limits.loaded_weights_bytes(inputs), tp),
        activations=device_memory.activation_bytes(shape, tokens, seqs, dtype_bytes, tp),
        non_torch=device_memory.non_torch_bytes(tp) if inputs.gpu else 0,
        lora=device_memory.lora_bytes(shape, inputs.lora.maxLoaded, inputs.lora.maxRank, dtype_bytes),
    )
    utilization = _utilization(inputs, tp)
    per_token = device_memory.kv_bytes_per_token(shape, limits.kv_element_bytes(inputs), tp)
    kv_bytes = _kv_bytes(inputs, tp, costs, utilization, seqs, per_token)
    kv_tokens = min(max(0, kv_bytes // per_token), MAX_KV_TOKENS)
    return Candidate(tp, tokens, seqs, utilization, costs, kv_bytes, kv_tokens, _context_length(inputs, kv_tokens))


def choose_block_size(inputs: PlannerInputs, candidate: Candidate) -> int:
    """16 tokens, 32 for very many long requests, fewer where half-filled last blocks would waste over 2 %."""
    if inputs.engine.blockSize is not None:
        return inputs.engine.blockSize
    target = 32 if candidate.max_num_seqs >= 256 and candidate.max_model_len >= limits.MAX_DEFAULT_CONTEXT else 16
    sizes = [b for b in inputs.capabilities.block_sizes if b <= target]
    return max((b for b in sizes if candidate.max_num_seqs * (b - 1) * 25 <= candidate.kv_tokens), default=min(sizes))


def _utilization(inputs: PlannerInputs, tp: int) -> int:
    if inputs.gpu is None:
        return 0
    if inputs.engine.gpuMemoryUtilization is not None:
        return int(Fraction(inputs.engine.gpuMemoryUtilization) * 1000)
    return device_memory.utilization(inputs.model.shape, inputs.gpu.visible_bytes, tp)


def _kv_bytes(inputs: PlannerInputs, tp: int, costs: DeviceCosts, utilization: int, seqs: int, per_token: int) -> int:
    """Bytes left for the KV cache on each device, or for each process of a CPU; those pinned for it where they are
    left, else what they lack, negative."""
    pinned = None if inputs.engine.kvCacheMemory is None else to_bytes(inputs.engine.kvCacheMemory)
    if inputs.gpu is not None:
        available = inputs.gpu.visible_bytes * utilization // 1000 - costs.total
    elif inputs.memory_limit is not None:
        available = (
            ((inputs.memory_limit - host_costs(inputs, 0).rounded_total) // tp - costs.rounded_total) // MIB * MIB
        )
    else:
        available = pinned or _cpu_kv_bytes(inputs, tp, seqs, per_token)
    if pinned is None:
        return available
    return pinned if pinned <= available else available - pinned


def _cpu_kv_bytes(inputs: PlannerInputs, tp: int, seqs: int, per_token: int) -> int:
    """A KV cache on a CPU of unknown memory: room for all sequences, bounded, but never less than one of them."""
    length = round_up_to_blocks(limits.max_context(inputs))
    target = max(length * inputs.engine.minConcurrency, seqs * min(MEAN_SEQUENCE_LEN, length)) * per_token
    shortest = round_up_to_blocks(limits.min_context(inputs))
    min_tokens = length if inputs.engine.maxModelLen else shortest * inputs.engine.minConcurrency
    return -(-max(min(target, MAX_CPU_KV_BYTES // tp), min_tokens * per_token) // MIB) * MIB


def round_up_to_blocks(num_tokens: int) -> int:
    """So many tokens or more, in whole blocks."""
    return -(-num_tokens // MAX_BLOCK_SIZE) * MAX_BLOCK_SIZE


def _context_length(inputs: PlannerInputs, kv_tokens: int) -> int:
    block_tokens = kv_tokens // MAX_BLOCK_SIZE * MAX_BLOCK_SIZE
    if inputs.engine.maxModelLen is not None:
        return inputs.engine.maxModelLen if block_tokens >= inputs.engine.maxModelLen else 0
    limit = limits.max_context(inputs)
    length = min(limit, block_tokens // inputs.engine.minConcurrency)
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
    """Fewer than minConcurrency would make that a promise that cannot be kept; more than the budget cannot run."""
    if inputs.engine.maxNumSeqs is not None:
        return [inputs.engine.maxNumSeqs]
    default_options = GPU_MAX_NUM_SEQS if inputs.gpu else CPU_MAX_NUM_SEQS
    min_seqs = max(inputs.engine.minConcurrency, default_options[-1])
    max_seqs = inputs.engine.maxNumBatchedTokens or max(min_seqs, default_options[0])
    return sorted({min(min_seqs, max_seqs), *(seqs for seqs in default_options if min_seqs <= seqs <= max_seqs)})
