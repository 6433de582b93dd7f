# SPDX-License-Identifier: Apache-2.0
"""Scheduler: which sequences run in a step, and how many tokens of each. Owns the life of a Sequence.

Torch-free and deterministic: the clock is passed in, block ids and slots come from blocks.py and adapters.py. The
engine calls schedule(), has a runner carry the plan out, and calls finish() or fail(); between those two calls it may
add and abort. Between them it may also call schedule_ahead(), once: then two steps are in flight, which end in order.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.kv_cache.block_manager import BlockManager
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.prefix_cache import PrefixCache, PrefixHit
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.lora.registry import AdapterRegistry
from quire_engine.scheduling.async_scheduling import apply_placeholders, reaches_max_tokens, remove_placeholder
from quire_engine.scheduling.capacity import CapacityCheck
from quire_engine.scheduling.request_queue import RequestQueue
from quire_engine.sequence import FinishReason, Sequence, SequenceStatus
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import ScheduledSpan, SpanOutput, StepPlan
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, Internal, InvalidArgument


class Scheduler:
    """Continuous batching over one pool of blocks.

    Order. Every sequence has a rank for life: its priority (one for all, unless scheduling_policy is priority), then
    its number in order of arrival. Waiting sequences start and prompts go on in order of rank, so a preempted one goes
    before all that came after it. One that does not fit yet holds back those behind it, so that a long prompt is not
    overtaken for ever; one whose adapter has no slot yet holds back nobody. A fork waits until its leader's prompt is
    computed; a seat and a block are kept for it meanwhile.

    Progress. A prompt gets all its blocks when it is admitted, so only decoding takes more of them, one block per
    `block_size` tokens; when there is none, the last in rank of the running ones gives up its blocks, and later gets
    back what host memory or the prefix cache kept and computes the rest. The first in rank is thus never preempted
    while another runs, and alone it always fits, because the pool holds `max_model_len` tokens (checked at start): it
    ends, then the next one is first.

    Urgency. A waiting sequence that does not fit has running ones of lower priority (a larger number) preempted, the
    last in rank first, if that makes room for it, and starts in the same step. That gives the blocks to a better rank,
    and a sequence is never preempted for one of its own priority but by growth: so it, too, comes to an end once
    nothing more urgent arrives, and without priorities it never happens.

    Restart. A sequence that grows beyond the switch of its model's rope needs other keys for all its tokens: it goes
    back to its place in line once and computes them, sharing nothing with its shorter self.

    No thrash. A sequence, new or preempted, is admitted only if afterwards one block per running sequence stays free.
    Running sequences take at most one block each in `block_size` steps, so at least that many steps pass between an
    admission and the next preemption by growth. Whoever is preempted is not admitted again in the same step: what it
    gave up, less what was missing, is too little for it. (With nothing else running the reserve is not needed.)

    Ahead. A step may be planned while the one before it is in flight, as if that were over (foresight.py). It takes
    nothing from anybody: where it would have to preempt or to swap in, the step in flight is waited for. A sequence
    that turns out to have ended, or is aborted, keeps its blocks and its adapter's slot until no step in flight has it.

    Raises:
        ConfigError: the pool is smaller than one sequence of `max_model_len` tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_pool: BlockPool,
        adapter_registry: AdapterRegistry,
        block_hasher: BlockHasher,
        max_model_len: int,
        swap_costs: SwapCosts,
    ) -> None:
        self._block_size = config.block_size
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._chunked_prefill = config.enable_chunked_prefill
        self._max_model_len = max_model_len
        self._block_pool = block_pool
        self._adapter_registry = adapter_registry
        self.prefix_cache = PrefixCache(block_pool, block_hasher, config.enable_prefix_caching)
        self.block_manager = BlockManager(block_pool, config.block_size, swap_costs)
        self._has_long_rope = block_hasher.long_rope_threshold is not None
        self._policy = config.scheduling_policy
        self._num_arrivals = 0
        self._sequences: dict[int, Sequence] = {}
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._capacity = CapacityCheck(config.max_num_seqs, self._running, block_pool, self.block_manager)
        # Two at most, the one that is computed first.
        self._in_flight: list[StepPlan] = []
        # Ended while a step in flight may still write to their blocks.
        self._finished_in_flight: list[Sequence] = []
        # The step in flight of which the sequences are as they will be after it.
        self._lookahead_plan: StepPlan | None = None
        # The step that is being planned comes after one in flight.
        self._planning_ahead = False
        # The next one has to wait, so that somebody who could not start ahead can.
        self._defer_lookahead = False
        self.waiting_for_adapters = False
        """The last call of schedule() found nothing to run, and nothing has changed since."""
        self.num_preemptions = 0
        self.num_steps = 0
        if self.block_manager.num_blocks(max_model_len) > block_pool.num_blocks:
            raise ConfigError(
                f"max_model_len: {max_model_len} tokens need {self.block_manager.num_blocks(max_model_len)} KV blocks "
                "of "
                f"{self._block_size} tokens, the cache has {block_pool.num_blocks} "
                f"({block_pool.num_blocks * self._block_size} "
                "tokens); lower max_model_len or raise kv_cache_memory_bytes or gpu_memory_utilization"
            )

    @property
    def has_work(self) -> bool:
        """Any sequence that is not over, or a step in flight."""
        return bool(self._sequences or self._in_flight)

    @property
    def has_runnable(self) -> bool:
        """Whether a step is in flight or schedule() may find something to run; False until something changes once it
        did not."""
        return bool(self._running or self._in_flight or (self._waiting and not self.waiting_for_adapters))

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not, preempted ones included."""
        return len(self._waiting)

    @property
    def num_swapped(self) -> int:
        """Waiting sequences of which host memory keeps what was computed."""
        return (
            sum(1 for sequence in self._waiting if sequence.host_blocks)
            if self.block_manager.num_used_host_blocks
            else 0
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            InvalidArgument: it can never run: too long for max_model_len, or for one step without chunked prefill;
                it has a priority where there is none; or the one that it forks has another prompt, adapter or salt.
            NotFound: its adapter is not registered.
        """
        num_tokens = sequence.num_tokens
        if num_tokens >= self._max_model_len:
            raise InvalidArgument(
                f"prompt: {num_tokens} tokens leave no room for output; max_model_len is {self._max_model_len}"
            )
        if not self._chunked_prefill and num_tokens > self._max_num_batched_tokens:
            raise InvalidArgument(
                f"prompt: {num_tokens} tokens exceed max_num_batched_tokens {self._max_num_batched_tokens}, and "
                "enable_chunked_prefill is off; shorten the prompt"
            )
        if sequence.id in self._sequences:
            raise InvalidArgument(f"id {sequence.id}: a sequence of this id is open; choose another")
        if sequence.priority and self._policy != "priority":
            raise InvalidArgument(
                f"priority: {sequence.priority}, but scheduling_policy is {self._policy}; leave it out, or use priority"
            )
        sequence.parent = self._fork_parent(sequence)
        if sequence.adapter_digest is not None:
            self._adapter_registry.add_sequence(sequence.adapter_digest)
        self._num_arrivals += 1
        sequence.sort_key = sequence.priority, self._num_arrivals
        self._sequences[sequence.id] = sequence
        self._waiting.add(sequence)
        self.waiting_for_adapters = False

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences, unknown ids ignored. Blocks that a step in flight may write go back after it."""
        for sequence_id in sequence_ids:
            if sequence := self._sequences.get(sequence_id):
                self._finish_sequence(sequence, FinishReason.ABORT)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan a step; None when nothing can run. `now`: monotonic seconds, for adapters that wait too long.

        Decoding sequences come first and always get their token; what is left of the token budget goes to prompts.
        """
        assert not self._in_flight, "schedule() again before finish() or fail()"
        self._defer_lookahead = False
        plan = self._plan_step(self._running.snapshot(), now)
        self.waiting_for_adapters = plan is None
        return plan

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """Plan the step after the one in flight, as if that were over; None when it has to be waited for first.

        It is waited for when a block is missing, when somebody is to start who takes blocks or host memory from others
        or gives some back, when a sequence needs to know its tokens, and always where keys may have to be rotated anew.
        """
        [step_in_flight] = self._in_flight
        if (
            self._defer_lookahead
            or self._has_long_rope
            or any(sequence.requires_host_tokens for sequence in self._running)
        ):
            return None
        apply_placeholders(step_in_flight)
        self._lookahead_plan = step_in_flight
        sequences = [sequence for sequence in self._running if not reaches_max_tokens(sequence)]
        if sum(map(self.block_manager.needs_block, sequences)) > self._block_pool.num_free:
            return None
        self._planning_ahead = True
        plan = self._plan_step(sequences, now)
        self._planning_ahead = False
        return plan

    def _plan_step(self, sequences: list[Sequence], now: float) -> StepPlan | None:
        """Plan a step; `members`: running sequences that go on."""
        self._adapter_registry.begin_step(now)
        builder = StepPlanBuilder(self._max_num_batched_tokens)
        self._schedule_prefills(builder, self._schedule_decodes(sequences, builder), now)
        if not (builder.decodes or builder.prefills):
            return None
        self._in_flight.append(builder.build())
        return self._in_flight[-1]

    def update_from_step(self, plan: StepPlan, span_outputs: list[SpanOutput]) -> list[tuple[Sequence, SpanOutput]]:
        """Take in what the first step in flight computed; returns the sequences with new tokens, and which of the
        tokens count."""
        assert len(span_outputs) == len(plan.spans)
        self._complete_step(plan, step_failed=False)
        has_placeholders = plan is self._lookahead_plan
        updates = []
        for span, span_output in zip(plan.spans, span_outputs, strict=True):
            sequence = span.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if has_placeholders:
                remove_placeholder(sequence)
            sequence.num_computed_tokens = span.end
            self.prefix_cache.cache_full_blocks(sequence)
            if span_output.prompt_logprobs:
                sequence.prompt_logprobs += span_output.prompt_logprobs
                sequence.num_computed_prompt_logprobs += len(span_output.prompt_logprobs)
            if span_output.token_ids:
                updates.append((sequence, self._append_tokens(sequence, span_output)))
                if (
                    self._has_long_rope
                    and sequence.status is SequenceStatus.RUNNING
                    and self.prefix_cache.invalidate_if_rope_switched(sequence)
                ):
                    self._requeue(sequence)
        self._free_finished()
        return updates

    def fail_step(self, plan: StepPlan) -> list[Sequence]:
        """The first step in flight failed: end its sequences, and return them. Blocks computed before stay good.

        A step that was planned ahead of its end has failed with it: this is to be called again, for that one.
        """
        self._complete_step(plan, step_failed=True)
        failed_sequences = [span.sequence for span in plan.spans if span.sequence.status is not SequenceStatus.FINISHED]
        for sequence in failed_sequences:
            self._finish_sequence(sequence, FinishReason.ERROR)
        self._free_finished()
        return failed_sequences

    def fail_adapter(self, adapter_digest: str) -> list[Sequence]:
        """End, and return, the sequences that wait for an adapter that cannot be had."""
        failed_sequences = [sequence for sequence in self._waiting if sequence.adapter_digest == adapter_digest]
        for sequence in failed_sequences:
            self._finish_sequence(sequence, FinishReason.ERROR)
        return failed_sequences

    def on_adapter_ready(self) -> None:
        """Something outside changed (an adapter was read): sequences that could not run may now."""
        self.waiting_for_adapters = False

    def check_integrity(self) -> None:
        """Raise Internal unless sequences, blocks and adapters agree."""
        block_holders = [*self._running, *self._finished_in_flight]
        waiting_with_blocks = [s for s in self._waiting if s.block_table or s.num_computed_tokens]
        is_partitioned = Counter(s.id for s in (*self._waiting, *self._running)) == Counter(self._sequences.keys())
        is_sorted = all(
            a.sort_key < b.sort_key
            for request_queue in (self._waiting, self._running)
            for a, b in pairwise(request_queue)
        )
        if waiting_with_blocks or not is_partitioned or not is_sorted:
            raise Internal(
                f"scheduler: {len(self._waiting)} waiting ({len(waiting_with_blocks)} of them hold blocks), "
                f"{len(self._running)} "
                f"running, {len(self._sequences)} open, in order of rank: {is_sorted}"
            )
        self.block_manager.check_integrity(block_holders, self._waiting, self._in_flight)
        self._adapter_registry.check_integrity(
            Counter(
                s.adapter_digest
                for s in (*self._sequences.values(), *self._finished_in_flight)
                if s.adapter_digest is not None
            ),
            Counter(s.adapter_digest for s in block_holders if s.adapter_digest is not None),
        )

    def _fork_parent(self, fork: Sequence) -> Sequence | None:
        """The sequence that `fork` shares its prompt with, if that is still open."""
        if fork.parent_id is None or (parent := self._sequences.get(fork.parent_id)) is None:
            return None
        for name in ("prompt_token_ids", "adapter_digest", "cache_salt"):
            if getattr(fork, name) != getattr(parent, name):
                raise InvalidArgument(
                    f"parent_id: sequence {parent.id} has another {name}; prompt, adapter and salt must be the same"
                )
        return parent

    def _schedule_decodes(self, sequences: list[Sequence], builder: StepPlanBuilder) -> list[Sequence]:
        """Plan those of `members` that decode; returns those whose prompts are partly through.

        Goes through them in order of rank, so that whoever is preempted has no span yet.
        """
        partial_prefills = []
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                break
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                partial_prefills.append(sequence)
            elif self._ensure_block(sequence, builder):
                builder.decodes.append(self._make_span(sequence, 1))
        builder.token_budget -= len(builder.decodes)
        return partial_prefills

    def _ensure_block(self, sequence: Sequence, builder: StepPlanBuilder) -> bool:
        """Make sure that a decoding sequence has a block for its token; False when it was preempted instead."""
        while not self.block_manager.append_block(sequence):
            victim = self._running.least_urgent
            assert len(self._running) > 1, "the pool holds max_model_len tokens"
            self._preempt(victim, builder)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, builder: StepPlanBuilder) -> None:
        """Take a sequence's blocks; later it starts from what is swapped out or still cached."""
        builder.remove_decode(sequence)
        self.block_manager.swap_out(sequence, builder)
        self._requeue(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        """Put a running sequence back to its place in line, without blocks."""
        self._running.remove(sequence)
        self._release_resources(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        self._waiting.add(sequence)

    def _schedule_prefills(self, builder: StepPlanBuilder, partial_prefills: list[Sequence], now: float) -> None:
        """Spend the budget on prompts in order of rank: those partly through, and those that wait and fit."""
        partial_prefills.reverse()
        for sequence in self._waiting.snapshot():
            self._continue_prefills(builder, partial_prefills, sequence.sort_key)
            if not self._admit(sequence, builder, now):
                break
        self._continue_prefills(builder, partial_prefills)

    def _continue_prefills(
        self,
        builder: StepPlanBuilder,
        partial_prefills: list[Sequence],
        before_sort_key: tuple[int, ...] = (sys.maxsize,),
    ) -> None:
        """Go on with prompts from the end of `prefilling`, up to a rank."""
        while partial_prefills and builder.token_budget and partial_prefills[-1].sort_key < before_sort_key:
            sequence = partial_prefills.pop()
            if sequence.status is SequenceStatus.RUNNING:
                remaining = sequence.num_tokens - sequence.num_computed_tokens
                builder.add_prefill(self._make_span(sequence, min(remaining, builder.token_budget)))

    def _admit(self, sequence: Sequence, builder: StepPlanBuilder, now: float) -> bool:
        """Start a waiting sequence, or let it wait aside; False if it holds back those behind it."""
        if builder.token_budget == 0 and builder.prefills:
            return False
        if not self._capacity.has_free_seq(builder) and sequence.priority >= self._running.least_urgent.priority:
            return False
        if parent := _awaited_parent(sequence):
            if parent.status is SequenceStatus.RUNNING or parent.id in builder.pending_forks:
                builder.pending_forks.add(sequence.id)
            return True
        if not self._adapter_ready(sequence, now):
            return True
        if (prefix := self._usable_prefix(sequence, builder)) is None:
            return False
        length = self._chunk_length(sequence.num_tokens - prefix.num_tokens, builder.token_budget)
        if length == 0:
            return False
        self._waiting.remove(sequence)
        is_first_run = sequence.status is not SequenceStatus.PREEMPTED
        self._start_sequence(sequence, prefix, builder)
        if is_first_run:
            builder.started_ids.append(sequence.id)
            self.prefix_cache.record_hit(sequence, prefix)
        builder.add_prefill(self._make_span(sequence, length))
        return True

    def _adapter_ready(self, sequence: Sequence, now: float) -> bool:
        if sequence.adapter_digest is None:
            return True
        was_preempted = sequence.status is SequenceStatus.PREEMPTED
        can_run = self._adapter_registry.can_run(sequence.adapter_digest, now, is_new=not was_preempted)
        if not was_preempted:
            sequence.status = SequenceStatus.WAITING if can_run else SequenceStatus.WAITING_FOR_ADAPTER
        return can_run

    def _chunk_length(self, remaining: int, budget: int) -> int:
        """How many of `remaining` prompt tokens to run now."""
        if self._chunked_prefill or remaining <= budget:
            return min(remaining, budget)
        # Output may have made a preempted sequence longer than a whole step: chunks are then its only way back.
        return budget if remaining > self._max_num_batched_tokens else 0

    def _usable_prefix(self, sequence: Sequence, builder: StepPlanBuilder) -> PrefixHit | None:
        """What of a sequence is there already, when there is room for the rest; None when there is not."""
        prefix = self.prefix_cache.match(sequence)
        # A block that this step fills by a copy has nothing to copy yet.
        source_unwritten = any(copy.destination in prefix.copy_sources for copy in builder.copies)
        if not source_unwritten and self._ensure_capacity(sequence, prefix, builder):
            return prefix
        if not prefix.copy_sources:
            return None
        # Without a copy it takes one block less, so that a sequence always fits alone.
        prefix = self.prefix_cache.full_blocks_only(prefix)
        return prefix if self._ensure_capacity(sequence, prefix, builder) else None

    def _ensure_capacity(self, sequence: Sequence, prefix: PrefixHit, builder: StepPlanBuilder) -> bool:
        """Whether a sequence can start, if need be because less urgent ones are preempted."""
        victims = self._capacity.preemption_victims(sequence, prefix, builder)
        if victims is None:
            return False
        if self._planning_ahead and (victims or prefix.host_blocks or sequence.requires_host_tokens):
            self._defer_lookahead = True
            return False
        for victim in victims:
            self._preempt(victim, builder)
        return True

    def _start_sequence(self, sequence: Sequence, prefix: PrefixHit, builder: StepPlanBuilder) -> None:
        sequence.status = SequenceStatus.RUNNING
        if sequence.adapter_digest is not None:
            self._adapter_registry.on_start(sequence.adapter_digest)
        self._running.add(sequence)
        self.block_manager.allocate(sequence, prefix, builder)

    def _make_span(self, sequence: Sequence, length: int) -> ScheduledSpan:
        adapter_slot = (
            None if sequence.adapter_digest is None else self._adapter_registry.get_slot(sequence.adapter_digest)
        )
        return ScheduledSpan(sequence, sequence.num_computed_tokens, length, adapter_slot)

    def _append_tokens(self, sequence: Sequence, span_output: SpanOutput) -> SpanOutput:
        """Add the tokens up to the one that ends the sequence, if any does."""
        output = sequence.output_token_ids
        for count, token in enumerate(span_output.token_ids, 1):
            output.append(token)
            if token in sequence.stop_token_ids and len(output) > sequence.params.min_tokens:
                self._finish_sequence(sequence, FinishReason.STOP)
            elif len(output) == sequence.max_output_tokens:
                self._finish_sequence(sequence, FinishReason.LENGTH)
            else:
                continue
            logprobs = None if span_output.logprobs is None else span_output.logprobs[:count]
            return SpanOutput(span_output.token_ids[:count], logprobs)
        return span_output

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence; what it holds goes back at once if no step is in flight."""
        del self._sequences[sequence.id]
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
        if was_running:
            self._running.remove(sequence)
            if self._in_flight:
                self._finished_in_flight.append(sequence)
                return
            self._release_resources(sequence)
        else:
            self._waiting.remove(sequence)
            self.block_manager.drop_swapped(sequence)
        self._drop_adapter_ref(sequence)

    def _release_resources(self, sequence: Sequence) -> None:
        """Give back what a running sequence holds; nothing of it is in flight."""
        self.block_manager.free(sequence)
        if sequence.adapter_digest is not None:
            self._adapter_registry.on_stop(sequence.adapter_digest)

    def _drop_adapter_ref(self, sequence: Sequence) -> None:
        if sequence.adapter_digest is not None:
            self._adapter_registry.remove_sequence(sequence.adapter_digest)
        self.waiting_for_adapters = False

    def _complete_step(self, plan: StepPlan, step_failed: bool) -> None:
        """The first step in flight is over."""
        assert plan is self._in_flight[0]
        del self._in_flight[0]
        self.num_steps += 1
        self.block_manager.complete_step(plan, step_failed)

    def _free_finished(self) -> None:
        """Give back what sequences held that are over, those that a step in flight has excepted."""
        finished, self._finished_in_flight = self._finished_in_flight, []
        sequences_in_flight = {span.sequence for plan in self._in_flight for span in plan.spans} if finished else set()
        for sequence in finished:
            if sequence in sequences_in_flight:
                self._finished_in_flight.append(sequence)
            else:
                self._release_resources(sequence)
                self._drop_adapter_ref(sequence)


def _awaited_parent(sequence: Sequence) -> Sequence | None:
    """The leader of a fork that never ran, while its prompt is being computed or waits to be."""
    parent = sequence.parent
    if (
        parent is None
        or SequenceStatus.PREEMPTED in (sequence.status, parent.status)
        or parent.status is SequenceStatus.FINISHED
    ):
        return None
    return parent if parent.num_computed_tokens < len(parent.prompt_token_ids) else None
