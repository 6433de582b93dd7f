# SPDX-License-Identifier: Apache-2.0
"""Draft planner: adds draft tokens to the decode spans of a planned step, and records the accepted tokens. Torch-free.

The scheduler calls the planner last, when all other tokens of the step are planned. Therefore, drafts use only free
blocks and the rest of the token budget. They never delay a prompt and never preempt a sequence.
"""

from dataclasses import replace

from quire_engine.kv_cache.block_manager import BlockManager
from quire_engine.kv_cache.state_manager import StateManager
from quire_engine.sequence import Sequence
from quire_engine.speculation.draft_policy import DraftCounts, DraftPolicy
from quire_engine.speculation.model_proposer import ModelProposer
from quire_engine.speculation.proposer import DraftProposer, NgramProposer
from quire_engine.speculation.suffix_proposer import SuffixProposer
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import ScheduledSpan, SpanOutput
from quire_spec.engine.config import EngineConfig


class DraftPlanner:
    """Plans the drafts of one engine. A proposer chooses the draft tokens, and a policy limits the length of each
    draft."""

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        states: StateManager | None,
        proposer: DraftProposer,
        policy: DraftPolicy,
    ) -> None:
        self._config = config
        self._block_manager = block_manager
        self._states = states
        self._proposer = proposer
        self._policy = policy
        self._forced: set[int] = set()
        """Ids of the sequences whose draft in this step consists of tokens that a grammar forces."""

    @classmethod
    def from_config(
        cls, config: EngineConfig, block_manager: BlockManager, states: StateManager | None
    ) -> "DraftPlanner | None":
        """Return the planner that a configuration requires; None if speculative decoding is not configured. `states`
        are the states of sequences, if the model has them."""
        if (speculative := config.speculative_config) is None:
            return None
        proposer: DraftProposer
        if speculative.has_drafter:
            proposer = ModelProposer()
        elif speculative.method == "suffix":
            proposer = SuffixProposer(speculative)
        else:
            proposer = NgramProposer(speculative.lookup_lengths)
        policy = DraftPolicy(config.device, speculative.num_speculative_tokens)
        return cls(config, block_manager, states, proposer, policy)

    @property
    def counts(self) -> DraftCounts:
        """Counters of the verified drafts."""
        return self._policy.counts

    def extend_decodes(self, builder: StepPlanBuilder) -> None:
        """Add drafts to the decode spans of a step. The most urgent sequence gets its draft first."""
        self._forced.clear()
        num_rows = self._config.max_num_batched_tokens - builder.token_budget
        # The engine reserves memory for the logits of max_num_seqs rows, or of one draft if that has more rows.
        rows_left = max(self._config.max_num_seqs, 1 + self._policy.max_tokens)
        rows_left -= len(builder.decodes) + len(builder.prefills)
        for index, span in enumerate(builder.decodes):
            sequence = span.sequence
            # A beam gets no draft, because its next token depends on the other beams.
            if sequence.beam_group is not None:
                continue
            self._proposer.observe(sequence)
            max_tokens = min(
                rows_left,
                builder.token_budget,
                # The step returns the accepted draft tokens and one more token.
                sequence.max_output_tokens - len(sequence.output_token_ids) - 1,
                *([] if self._states is None else [self._states.max_draft_length(sequence)]),
            )
            draft = self._draft(sequence, num_rows, max_tokens) if max_tokens > 0 else []
            if draft and self._block_manager.reserve(sequence, span.end + len(draft)):
                builder.decodes[index] = replace(span, length=1 + len(draft), draft_token_ids=tuple(draft))
                builder.token_budget -= len(draft)
                rows_left -= len(draft)
        if isinstance(self._proposer, ModelProposer):
            self._reserve_lookahead(builder, num_rows)

    def _reserve_lookahead(self, builder: StepPlanBuilder, num_rows: int) -> None:
        """Request the next draft for each sequence that samples a token, and reserve the blocks to which the draft
        model writes."""
        for spans in (builder.decodes, builder.prefills):
            for index, span in enumerate(spans):
                sequence = span.sequence
                num_tokens = min(
                    self._policy.draft_length(sequence, num_rows)
                    if span.samples and sequence.beam_group is None
                    else 0,
                    # This step samples at least one token, and the step that verifies the draft samples at least one
                    # more.
                    sequence.max_output_tokens - len(sequence.output_token_ids) - len(span.draft_token_ids) - 2,
                )
                if num_tokens > 0 and self._block_manager.reserve(sequence, span.end + num_tokens):
                    spans[index] = replace(span, num_lookahead_tokens=num_tokens)

    def _draft(self, sequence: Sequence, num_rows: int, max_tokens: int) -> list[int]:
        """Return the draft of a sequence.

        If the grammar of the sequence forces the next tokens, they are the draft. Otherwise, the proposer proposes
        tokens, and the draft is the longest prefix of these tokens that the grammar allows.
        """
        grammar = sequence.grammar
        if grammar is not None and (forced := grammar.forced_token_ids()):
            draft = forced[: min(self._policy.max_forced_length(num_rows), max_tokens)]
            self._forced.add(sequence.id)
        else:
            # If a model computes the drafts, the length of this draft was chosen when the draft was requested.
            is_computed = isinstance(self._proposer, ModelProposer)
            length = max_tokens if is_computed else min(self._policy.draft_length(sequence, num_rows), max_tokens)
            draft = self._proposer.propose(sequence, length) if length else []
        return draft if grammar is None or not draft else grammar.validate_draft(draft)

    def record(self, span: ScheduledSpan, output: SpanOutput) -> None:
        """Record the output of a span, after its tokens were appended to the sequence."""
        num_tokens = len(output.token_ids)
        if isinstance(self._proposer, ModelProposer) and output.next_draft_token_ids:
            self._proposer.store(span.sequence, output.next_draft_token_ids)
        if span.draft_token_ids:
            is_forced = span.sequence.id in self._forced
            self._policy.record(span.sequence, len(span.draft_token_ids), num_tokens - 1, is_forced=is_forced)

    def finish(self, sequence: Sequence) -> None:
        """Tell the proposer that a sequence is finished, so that later drafts can use its output."""
        # The search may have dropped a beam. Then its tokens are not an output of a request.
        if sequence.beam_group is None:
            self._proposer.finish(sequence)
