# SPDX-License-Identifier: Apache-2.0
"""Chain drafter: after each step of the target, it runs a draft model token by token.

The draft model has its own KV cache. A block id stands for the same tokens in this cache and in the cache of the
target. After a step, the draft model computes the same positions as the target. It skips the positions of rejected
draft tokens. As a result, if a block contains valid keys of the target, it also contains valid keys of the draft model.
Therefore, the drafter does not need any state for sequences. Then the draft model continues each sequence token by
token. It uses the blocks that the scheduler has reserved for drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache, block_bytes
from quire_engine.models.forward_batch import ForwardBatch, build_forward_batch
from quire_engine.step.input import StepInput, int64_tensor
from quire_engine.step.plan import BlockCopy, ScheduledSpan, SpanOutput
from quire_engine.worker.drafting.draft_model import DraftModel
from quire_engine.worker.drafting.drafter import Drafter
from quire_kernels import to_device_async


@dataclass(slots=True)
class _Chain:
    """The draft of one sequence so far, and the tokens that the first pass reads for it."""

    index: int
    """Position of the sequence's span in the list of spans of the step."""
    span: ScheduledSpan
    token_ids: list[int]
    draft: list[int]

    @property
    def end(self) -> int:
        """The position after the last token that the draft model has read. This token can be a draft token."""
        return self.span.start + len(self.token_ids) + max(0, len(self.draft) - 1)


class ChainDrafter(Drafter):
    """A draft model and its KV cache."""

    def __init__(self, model: DraftModel, cache_dtype: torch.dtype, device: torch.device, block_size: int) -> None:
        self._model = model
        self._cache_dtype = cache_dtype
        self._device = device
        self._block_size = block_size
        self._kv_cache: KVCache | None = None
        self.num_bytes = model.num_bytes
        self.block_bytes = block_bytes(model.shape, block_size, cache_dtype)

    def allocate(self, num_blocks: int) -> KVCache:
        """See Drafter."""
        self._kv_cache = KVCache(self._model.shape, num_blocks, self._block_size, self._cache_dtype, self._device)
        return self._kv_cache

    def load(self) -> None:
        """See Drafter."""
        self._model.load()

    @torch.inference_mode()
    def propose(
        self,
        spans: Sequence[ScheduledSpan],
        outputs: list[SpanOutput],
        copies: Sequence[BlockCopy],
        aux_hidden_states: Tensor | None,
    ) -> list[SpanOutput]:
        """See Drafter."""
        assert self._kv_cache is not None
        if copies:
            self._kv_cache.copy_blocks([copy.source for copy in copies], [copy.destination for copy in copies])
        chains = [
            self._first_tokens(i, span, output) for i, (span, output) in enumerate(zip(spans, outputs, strict=True))
        ]
        # Attention expects spans of one token first, and then the longer spans. Both parts must be sorted by decreasing
        # context.
        chains = sorted((c for c in chains if c.token_ids), key=lambda c: (len(c.token_ids) > 1, -c.span.start))
        hidden = None
        if aux_hidden_states is not None:
            offsets = [0, *accumulate(span.length for span in spans)]
            rows = [offsets[c.index] + i for c in chains for i in range(len(c.token_ids))]
            hidden = aux_hidden_states[to_device_async(rows, self._device)]
        if chains:
            self._run_chains(chains, hidden)
        drafts = {chain.index: chain.draft for chain in chains}
        return [replace(o, next_draft_token_ids=tuple(drafts.get(i, ()))) for i, o in enumerate(outputs)]

    def _first_tokens(self, index: int, span: ScheduledSpan, output: SpanOutput) -> _Chain:
        """Return the tokens that the draft model reads in the first pass.

        These are the tokens at the positions of the step. If a draft follows, the token at the next position is
        included.
        """
        sequence, num_draft = span.sequence, len(span.draft_token_ids)
        tokens = sequence.tokens(span.start, span.end - num_draft)
        # The output contains the accepted draft tokens and, after them, the token that was sampled. For a beam, no
        # token is sampled yet.
        next_tokens = output.token_ids if span.samples else sequence.tokens(span.end, span.end + 1)
        if self._model.reads_hidden_states:
            return _Chain(index, span, (tokens + next_tokens)[1:], [])
        # If no draft follows, the next step computes the last token.
        num_read = len(next_tokens) if span.num_lookahead_tokens else len(next_tokens) - 1
        return _Chain(index, span, tokens + next_tokens[: max(0, num_read)], [])

    def _run_chains(self, chains: list[_Chain], hidden: Tensor | None) -> None:
        """Compute the first tokens of all chains, then extend each draft one token at a time."""
        active = [chain for chain in chains if chain.span.num_lookahead_tokens]
        rows = [end - 1 for end in accumulate(len(chain.token_ids) for chain in chains)]
        logit_rows = [row for row, chain in zip(rows, chains, strict=True) if chain.span.num_lookahead_tokens]
        batch = self._batch(chains, [(chain.span.start, chain.token_ids) for chain in chains], logit_rows)
        if hidden is not None:
            hidden = self._model.convert(hidden, batch)
        assert self._kv_cache is not None
        if not active:
            self._model.fill_cache(batch, self._kv_cache, hidden)
            return
        while True:
            hidden, proposed = self._model(batch, self._kv_cache, hidden)
            for chain, token_id in zip(active, proposed.tolist(), strict=True):
                chain.draft.append(token_id)
            remaining = [i for i, c in enumerate(active) if len(c.draft) < c.span.num_lookahead_tokens]
            if not remaining:
                return
            if hidden is not None:
                hidden = hidden[to_device_async(remaining, self._device)]
            active = [active[i] for i in remaining]
            tokens = [(chain.end, chain.draft[-1:]) for chain in active]
            batch = self._batch(active, tokens, list(range(len(active))))

    def _batch(self, chains: list[_Chain], tokens: list[tuple[int, list[int]]], logit_rows: list[int]) -> ForwardBatch:
        """Return the batch for one pass.

        For each chain, `tokens` contains the chain's tokens and the position of the first of them.
        """
        assert self._kv_cache is not None
        block_ids: list[int] = []
        for chain, (start, token_ids) in zip(chains, tokens, strict=True):
            num_blocks = -(-(start + len(token_ids)) // self._block_size)
            block_ids += chain.span.sequence.block_table[:num_blocks]
        step_input = StepInput(
            starts=[start for start, _ in tokens],
            lengths=[len(token_ids) for _, token_ids in tokens],
            adapter_slots=[-1] * len(chains),
            token_ids=int64_tensor([token for _, token_ids in tokens for token in token_ids]),
            block_ids=int64_tensor(block_ids),
            logit_rows=logit_rows,
            num_sampled=len(logit_rows),
        )
        return build_forward_batch(step_input, self._kv_cache, self._device)
