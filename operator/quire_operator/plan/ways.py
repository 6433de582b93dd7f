# SPDX-License-Identifier: Apache-2.0
"""Ways to run a model: numbers of GPUs, token budget and sequences, with what they cost and the context they lead to.

Pure. Ways are compared in one fixed order, and more memory only makes more of them fit: so it never leads to a worse
plan. planner.py takes the best one, advice.py looks at the others.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from quire_operator.plan import limits, memory
from quire_operator.plan.host import host_of
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.memory import GIB, MIB, Costs
from quire_operator.quantity import num_bytes

MEAN_SEQUENCE = 2048
"""Tokens that a sequence is assumed to hold on average, when sequences are counted."""
LENGTH_STEP = 1024
WHOLE_BLOCKS = 128
"""Tokens are counted in blocks of the largest size, so that the choice of a size never shortens the context."""
GPU_SEQS = (512, 256, 128, 64, 32, 16)
CPU_SEQS = (64, 32, 16, 8, 4, 2, 1)
GPU_TOKENS = ((70 * GIB, 8192), (32 * GIB, 4096), (0, 2048))
"""Token budget by memory: a large GPU needs more tokens in a step to be busy."""
CPU_TOKENS = 512
"""Token budget on a CPU: at 2048 one long prompt would hold up running answers for seconds."""
MOST_TOKENS = 2**63 - 1
"""A status holds no larger number, and a spec may pin any size of the KV cache: its plan could not be written."""
CPU_KV_BYTES = 4 * GIB
"""Most that a KV cache on a CPU takes when nobody says how much memory there is."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model, and what it costs on each device."""

    tp: int
    max_num_batched_tokens: int
    max_num_seqs: int
    utilization: int
    """Thousandths of a GPU's memory; 0 on a CPU."""
    costs: Costs
    kv_bytes: int
    """For the KV cache; negative when not even the rest fits."""
    kv_tokens: int
    max_model_len: int
    """0: too little is left for a useful length."""


def all_ways(inputs: Inputs) -> Iterator[Way]:
    """Every way that the rules allow, whether it fits or not; raises Unplannable as limits.tp_allowed does."""
    for tp in limits.tp_allowed(inputs):
        for tokens in _token_budgets(inputs):
            for seqs in _seqs(inputs):
                yield way(inputs, tp, max(tokens, seqs) if inputs.engine.maxNumBatchedTokens is None else tokens, seqs)


def best(inputs: Inputs, ways: Iterable[Way]) -> Way | None:
    """The highest in `rank` of those that fit."""
    return max((w for w in ways if w.max_model_len), key=lambda w: rank(inputs, w), default=None)


def rank(inputs: Inputs, found: Way) -> tuple[int, int, int, int]:
    """The order of ways: the longest context that minConcurrency requests can have at once, then the fewest GPUs, then
    the most sequences, then the largest token budget.

    Sequences count as far as each has MEAN_SEQUENCE tokens, so that none of them waits for blocks all the time.
    """
    served = min(found.max_model_len, found.kv_tokens // inputs.engine.minConcurrency)
    mean = min(MEAN_SEQUENCE, limits.length_limit(inputs))
    housed = found.max_num_seqs * mean <= found.kv_tokens
    return served, -found.tp, found.max_num_seqs if housed else -found.max_num_seqs, found.max_num_batched_tokens


def way(inputs: Inputs, tp: int, tokens: int, seqs: int) -> Way:
    """One way, with its costs and the length that it leads to."""
    shape, element = inputs.model.shape, limits.element_bytes(inputs)
    costs = Costs(
        weights=memory.weights_bytes(limits.computed_bytes(inputs), tp),
        activations=memory.activation_bytes(shape, tokens, seqs, element, tp),
        non_torch=memory.non_torch_bytes(tp) if inputs.gpu else 0,
        lora=memory.lora_bytes(shape, inputs.lora.maxLoaded, inputs.lora.maxRank, element),
    )
    share = _utilization(inputs, tp)
    per_token = memory.token_bytes(shape, limits.kv_element_bytes(inputs), tp)
    kv_bytes = _kv_bytes(inputs, tp, costs, share, seqs, per_token)
    kv_tokens = min(max(0, kv_bytes // per_token), MOST_TOKENS)
    return Way(tp, tokens, seqs, share, costs, kv_bytes, kv_tokens, _length(inputs, kv_tokens))


def block_size(inputs: Inputs, found: Way) -> int:
    """16 tokens, 32 for very many long requests, fewer where half-filled last blocks would waste over 2 %."""
    if inputs.engine.blockSize is not None:
        return inputs.engine.blockSize
    wanted = 32 if found.max_num_seqs >= 256 and found.max_model_len >= limits.MAX_DEFAULT_LENGTH else 16
    sizes = [b for b in inputs.abilities.block_sizes if b <= wanted]
    return max((b for b in sizes if found.max_num_seqs * (b - 1) * 25 <= found.kv_tokens), default=min(sizes))


def _utilization(inputs: Inputs, tp: int) -> int:
    if inputs.gpu is None:
        return 0
    if inputs.engine.gpuMemoryUtilization is not None:
        return int(Fraction(inputs.engine.gpuMemoryUtilization) * 1000)
    return memory.utilization(inputs.model.shape, inputs.gpu.visible_bytes, tp)


def _kv_bytes(inputs: Inputs, tp: int, costs: Costs, share: int, seqs: int, per_token: int) -> int:
    """Bytes left for the KV cache on each device, or for each process of a CPU; those pinned for it where they are
    left, else what they lack, negative."""
    pinned = None if inputs.engine.kvCacheMemory is None else num_bytes(inputs.engine.kvCacheMemory)
    if inputs.gpu is not None:
        left = inputs.gpu.visible_bytes * share // 1000 - costs.total
    elif inputs.memory_limit is not None:
        left = ((inputs.memory_limit - host_of(inputs, 0).whole) // tp - costs.whole) // MIB * MIB
    else:
        left = pinned or _cpu_kv_bytes(inputs, tp, seqs, per_token)
    if pinned is None:
        return left
    return pinned if pinned <= left else left - pinned


def _cpu_kv_bytes(inputs: Inputs, tp: int, seqs: int, per_token: int) -> int:
    """A KV cache on a CPU of unknown memory: room for all sequences, bounded, but never less than one of them."""
    length = whole_blocks(limits.length_limit(inputs))
    wanted = max(length * inputs.engine.minConcurrency, seqs * min(MEAN_SEQUENCE, length)) * per_token
    shortest = whole_blocks(limits.least_length(inputs))
    least = length if inputs.engine.maxModelLen else shortest * inputs.engine.minConcurrency
    return -(-max(min(wanted, CPU_KV_BYTES // tp), least * per_token) // MIB) * MIB


def whole_blocks(num_tokens: int) -> int:
    """So many tokens or more, in whole blocks."""
    return -(-num_tokens // WHOLE_BLOCKS) * WHOLE_BLOCKS


def _length(inputs: Inputs, kv_tokens: int) -> int:
    whole = kv_tokens // WHOLE_BLOCKS * WHOLE_BLOCKS
    if inputs.engine.maxModelLen is not None:
        return inputs.engine.maxModelLen if whole >= inputs.engine.maxModelLen else 0
    limit = limits.length_limit(inputs)
    length = min(limit, whole // inputs.engine.minConcurrency)
    if length < limit:
        length = length // LENGTH_STEP * LENGTH_STEP
    return length if length >= limits.least_length(inputs) else 0


def _token_budgets(inputs: Inputs) -> list[int]:
    if inputs.engine.maxNumBatchedTokens is not None:
        return [inputs.engine.maxNumBatchedTokens]
    if inputs.gpu is None:
        return [CPU_TOKENS]
    return [tokens for least, tokens in GPU_TOKENS if inputs.gpu.visible_bytes >= least]


def _seqs(inputs: Inputs) -> list[int]:
    """Fewer than minConcurrency would make that a promise that cannot be kept; more than the budget cannot run."""
    if inputs.engine.maxNumSeqs is not None:
        return [inputs.engine.maxNumSeqs]
    usual = GPU_SEQS if inputs.gpu else CPU_SEQS
    least = max(inputs.engine.minConcurrency, usual[-1])
    most = inputs.engine.maxNumBatchedTokens or max(least, usual[0])
    return sorted({min(least, most), *(seqs for seqs in usual if least <= seqs <= most)})
