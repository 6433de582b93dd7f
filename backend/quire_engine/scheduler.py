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

from quire_engine.adapters import AdapterRegistry
from quire_engine.blocks import BlockPool, ContentKey
from quire_engine.draft import Draft
from quire_engine.foresight import foresee, settle, will_end
from quire_engine.line import Line
from quire_engine.prefix import Prefix, PrefixCache
from quire_engine.request import FinishReason, Sequence, Status
from quire_engine.room import Room
from quire_engine.step import Sampled, Span, StepPlan
from quire_engine.swap import SwapSpace
from quire_engine.tables import BlockTables
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
        blocks: BlockPool,
        adapters: AdapterRegistry,
        key: ContentKey,
        max_model_len: int,
        swap: SwapSpace,
    ) -> None:
        self._block_size = config.block_size
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._max_model_len = max_model_len
        self._blocks = blocks
        self._adapters = adapters
        self.prefixes = PrefixCache(blocks, key, config.enable_prefix_caching)
        self.tables = BlockTables(blocks, config.block_size, swap)
        self._switches = key.rope_switch is not None
        self._policy = config.scheduling_policy
        self._num_arrivals = 0
        self._sequences: dict[int, Sequence] = {}
        self._waiting = Line()
        self._running = Line()
        self._room = Room(config.max_num_seqs, self._running, blocks, self.tables)
        # Two at most, the one that is computed first.
        self._in_flight: list[StepPlan] = []
        # Ended while a step in flight may still write to their blocks.
        self._ended: list[Sequence] = []
        # The step in flight of which the sequences are as they will be after it.
        self._foreseen: StepPlan | None = None
        # The step that is being planned comes after one in flight.
        self._ahead = False
        # The next one has to wait, so that somebody who could not start ahead can.
        self._waits = False
        self.stalled = False
        """The last call of schedule() found nothing to run, and nothing has changed since."""
        self.num_preemptions = 0
        self.num_steps = 0
        if self.tables.num_blocks(max_model_len) > blocks.num_blocks:
            raise ConfigError(
                f"max_model_len: {max_model_len} tokens need {self.tables.num_blocks(max_model_len)} KV blocks of "
                f"{self._block_size} tokens, the cache has {blocks.num_blocks} ({blocks.num_blocks * self._block_size} "
                "tokens); lower max_model_len or raise kv_cache_memory_bytes or gpu_memory_utilization"
            )

    @property
    def has_work(self) -> bool:
        """Any sequence that is not over, or a step in flight."""
        return bool(self._sequences or self._in_flight)

    @property
    def runnable(self) -> bool:
        """Whether a step is in flight or schedule() may find something to run; False until something changes once it
        did not."""
        return bool(self._running or self._in_flight or (self._waiting and not self.stalled))

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
        return sum(1 for sequence in self._waiting if sequence.host_blocks) if self.tables.num_used_host_blocks else 0

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
        if not self._chunked and num_tokens > self._max_num_batched_tokens:
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
        sequence.leader = self._leader(sequence)
        if sequence.adapter is not None:
            self._adapters.open(sequence.adapter)
        self._num_arrivals += 1
        sequence.rank = sequence.priority, self._num_arrivals
        self._sequences[sequence.id] = sequence
        self._waiting.add(sequence)
        self.stalled = False

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences, unknown ids ignored. Blocks that a step in flight may write go back after it."""
        for sequence_id in ids:
            if sequence := self._sequences.get(sequence_id):
                self._end(sequence, FinishReason.ABORT)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan a step; None when nothing can run. `now`: monotonic seconds, for adapters that wait too long.

        Decoding sequences come first and always get their token; what is left of the token budget goes to prompts.
        """
        assert not self._in_flight, "schedule() again before finish() or fail()"
        self._waits = False
        plan = self._plan(self._running.members(), now)
        self.stalled = plan is None
        return plan

    def schedule_ahead(self, now: float) -> StepPlan | None:
        """Plan the step after the one in flight, as if that were over; None when it has to be waited for first.

        It is waited for when a block is missing, when somebody is to start who takes blocks or host memory from others
        or gives some back, when a sequence needs to know its tokens, and always where keys may have to be rotated anew.
        """
        [before] = self._in_flight
        if self._waits or self._switches or any(sequence.needs_tokens for sequence in self._running):
            return None
        foresee(before)
        self._foreseen = before
        members = [sequence for sequence in self._running if not will_end(sequence)]
        if sum(map(self.tables.lacks_block, members)) > self._blocks.num_free:
            return None
        self._ahead = True
        plan = self._plan(members, now)
        self._ahead = False
        return plan

    def _plan(self, members: list[Sequence], now: float) -> StepPlan | None:
        """Plan a step; `members`: running sequences that go on."""
        self._adapters.begin_step(now)
        draft = Draft(self._max_num_batched_tokens)
        self._prefill(draft, self._decode(members, draft), now)
        if not (draft.decodes or draft.prefills):
            return None
        self._in_flight.append(draft.plan())
        return self._in_flight[-1]

    def finish(self, plan: StepPlan, sampled: list[Sampled]) -> list[tuple[Sequence, Sampled]]:
        """Take in what the first step in flight computed; returns the sequences with new tokens, and which of the
        tokens count."""
        assert len(sampled) == len(plan.spans)
        self._land(plan, failed=False)
        foreseen = plan is self._foreseen
        progress = []
        for span, result in zip(plan.spans, sampled, strict=True):
            sequence = span.sequence
            if sequence.status is Status.FINISHED:
                continue
            if foreseen:
                settle(sequence)
            sequence.num_computed_tokens = span.end
            self.prefixes.publish(sequence)
            if result.prompt_logprobs:
                sequence.prompt_logprobs += result.prompt_logprobs
                sequence.num_scored_tokens += len(result.prompt_logprobs)
            if result.token_ids:
                progress.append((sequence, self._append(sequence, result)))
                if self._switches and sequence.status is Status.RUNNING and self.prefixes.outgrown(sequence):
                    self._restart(sequence)
        self._release_ended()
        return progress

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The first step in flight failed: end its sequences, and return them. Blocks computed before stay good.

        A step that was planned ahead of its end has failed with it: this is to be called again, for that one.
        """
        self._land(plan, failed=True)
        failed = [span.sequence for span in plan.spans if span.sequence.status is not Status.FINISHED]
        for sequence in failed:
            self._end(sequence, FinishReason.ERROR)
        self._release_ended()
        return failed

    def fail_adapter(self, digest: str) -> list[Sequence]:
        """End, and return, the sequences that wait for an adapter that cannot be had."""
        failed = [sequence for sequence in self._waiting if sequence.adapter == digest]
        for sequence in failed:
            self._end(sequence, FinishReason.ERROR)
        return failed

    def wake(self) -> None:
        """Something outside changed (an adapter was read): sequences that could not run may now."""
        self.stalled = False

    def check_integrity(self) -> None:
        """Raise Internal unless sequences, blocks and adapters agree."""
        holders = [*self._running, *self._ended]
        idle = [s for s in self._waiting if s.block_table or s.num_computed_tokens]
        split = Counter(s.id for s in (*self._waiting, *self._running)) == Counter(self._sequences.keys())
        ordered = all(a.rank < b.rank for line in (self._waiting, self._running) for a, b in pairwise(line))
        if idle or not split or not ordered:
            raise Internal(
                f"scheduler: {len(self._waiting)} waiting ({len(idle)} of them hold blocks), {len(self._running)} "
                f"running, {len(self._sequences)} open, in order of rank: {ordered}"
            )
        self.tables.check_integrity(holders, self._waiting, self._in_flight)
        self._adapters.check_integrity(
            Counter(s.adapter for s in (*self._sequences.values(), *self._ended) if s.adapter is not None),
            Counter(s.adapter for s in holders if s.adapter is not None),
        )

    def _leader(self, fork: Sequence) -> Sequence | None:
        """The sequence that `fork` shares its prompt with, if that is still open."""
        if fork.fork_of is None or (leader := self._sequences.get(fork.fork_of)) is None:
            return None
        for name in ("prompt_token_ids", "adapter", "cache_salt"):
            if getattr(fork, name) != getattr(leader, name):
                raise InvalidArgument(
                    f"fork_of: sequence {leader.id} has another {name}; prompt, adapter and salt must be the same"
                )
        return leader

    def _decode(self, members: list[Sequence], draft: Draft) -> list[Sequence]:
        """Plan those of `members` that decode; returns those whose prompts are partly through.

        Goes through them in order of rank, so that whoever is preempted has no span yet.
        """
        prefilling = []
        for sequence in members:
            if sequence.status is not Status.RUNNING:
                break
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                prefilling.append(sequence)
            elif self._grow(sequence, draft):
                draft.decodes.append(self._span(sequence, 1))
        draft.budget -= len(draft.decodes)
        return prefilling

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """Make sure that a decoding sequence has a block for its token; False when it was preempted instead."""
        while not self.tables.grow(sequence):
            victim = self._running.last
            assert len(self._running) > 1, "the pool holds max_model_len tokens"
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Take a sequence's blocks; later it starts from what is swapped out or still cached."""
        draft.drop(sequence)
        self.tables.swap_out(sequence, draft)
        self._restart(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _restart(self, sequence: Sequence) -> None:
        """Put a running sequence back to its place in line, without blocks."""
        self._running.remove(sequence)
        self._stop(sequence)
        sequence.status = Status.PREEMPTED
        self._waiting.add(sequence)

    def _prefill(self, draft: Draft, prefilling: list[Sequence], now: float) -> None:
        """Spend the budget on prompts in order of rank: those partly through, and those that wait and fit."""
        prefilling.reverse()
        for sequence in self._waiting.members():
            self._continue(draft, prefilling, sequence.rank)
            if not self._admit(sequence, draft, now):
                break
        self._continue(draft, prefilling)

    def _continue(self, draft: Draft, prefilling: list[Sequence], before: tuple[int, ...] = (sys.maxsize,)) -> None:
        """Go on with prompts from the end of `prefilling`, up to a rank."""
        while prefilling and draft.budget and prefilling[-1].rank < before:
            sequence = prefilling.pop()
            if sequence.status is Status.RUNNING:
                remaining = sequence.num_tokens - sequence.num_computed_tokens
                draft.prefill(self._span(sequence, min(remaining, draft.budget)))

    def _admit(self, sequence: Sequence, draft: Draft, now: float) -> bool:
        """Start a waiting sequence, or let it wait aside; False if it holds back those behind it."""
        if draft.budget == 0 and draft.prefills:
            return False
        if not self._room.has_seat(draft) and sequence.priority >= self._running.last.priority:
            return False
        if leader := _awaited_leader(sequence):
            if leader.status is Status.RUNNING or leader.id in draft.promised:
                draft.promised.add(sequence.id)
            return True
        if not self._adapter_ready(sequence, now):
            return True
        if (prefix := self._fitting_prefix(sequence, draft)) is None:
            return False
        length = self._chunk(sequence.num_tokens - prefix.num_tokens, draft.budget)
        if length == 0:
            return False
        self._waiting.remove(sequence)
        new = sequence.status is not Status.PREEMPTED
        self._start(sequence, prefix, draft)
        if new:
            draft.started.append(sequence.id)
            self.prefixes.started(sequence, prefix)
        draft.prefill(self._span(sequence, length))
        return True

    def _adapter_ready(self, sequence: Sequence, now: float) -> bool:
        if sequence.adapter is None:
            return True
        preempted = sequence.status is Status.PREEMPTED
        ready = self._adapters.ready(sequence.adapter, now, new=not preempted)
        if not preempted:
            sequence.status = Status.WAITING if ready else Status.WAITING_ADAPTER
        return ready

    def _chunk(self, remaining: int, budget: int) -> int:
        """How many of `remaining` prompt tokens to run now."""
        if self._chunked or remaining <= budget:
            return min(remaining, budget)
        # Output may have made a preempted sequence longer than a whole step: chunks are then its only way back.
        return budget if remaining > self._max_num_batched_tokens else 0

    def _fitting_prefix(self, sequence: Sequence, draft: Draft) -> Prefix | None:
        """What of a sequence is there already, when there is room for the rest; None when there is not."""
        prefix = self.prefixes.find(sequence)
        # A block that this step fills by a copy has nothing to copy yet.
        unfilled = any(copy.destination in prefix.copied for copy in draft.copies)
        if not unfilled and self._make_room(sequence, prefix, draft):
            return prefix
        if not prefix.copied:
            return None
        # Without a copy it takes one block less, so that a sequence always fits alone.
        prefix = self.prefixes.whole(prefix)
        return prefix if self._make_room(sequence, prefix, draft) else None

    def _make_room(self, sequence: Sequence, prefix: Prefix, draft: Draft) -> bool:
        """Whether a sequence can start, if need be because less urgent ones are preempted."""
        leavers = self._room.leavers(sequence, prefix, draft)
        if leavers is None:
            return False
        if self._ahead and (leavers or prefix.host_blocks or sequence.needs_tokens):
            self._waits = True
            return False
        for victim in leavers:
            self._preempt(victim, draft)
        return True

    def _start(self, sequence: Sequence, prefix: Prefix, draft: Draft) -> None:
        sequence.status = Status.RUNNING
        if sequence.adapter is not None:
            self._adapters.start(sequence.adapter)
        self._running.add(sequence)
        self.tables.start(sequence, prefix, draft)

    def _span(self, sequence: Sequence, length: int) -> Span:
        slot = None if sequence.adapter is None else self._adapters.slot(sequence.adapter)
        return Span(sequence, sequence.num_computed_tokens, length, slot)

    def _append(self, sequence: Sequence, result: Sampled) -> Sampled:
        """Add the tokens up to the one that ends the sequence, if any does."""
        output = sequence.output_token_ids
        for count, token in enumerate(result.token_ids, 1):
            output.append(token)
            if token in sequence.stop_token_ids and len(output) > sequence.params.min_tokens:
                self._end(sequence, FinishReason.STOP)
            elif len(output) == sequence.max_output_tokens:
                self._end(sequence, FinishReason.LENGTH)
            else:
                continue
            logprobs = None if result.logprobs is None else result.logprobs[:count]
            return Sampled(result.token_ids[:count], logprobs)
        return result

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence; what it holds goes back at once if no step is in flight."""
        del self._sequences[sequence.id]
        running = sequence.status is Status.RUNNING
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        if running:
            self._running.remove(sequence)
            if self._in_flight:
                self._ended.append(sequence)
                return
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
            self.tables.forget(sequence)
        self._close(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Give back what a running sequence holds; nothing of it is in flight."""
        self.tables.stop(sequence)
        if sequence.adapter is not None:
            self._adapters.stop(sequence.adapter)

    def _close(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._adapters.close(sequence.adapter)
        self.stalled = False

    def _land(self, plan: StepPlan, failed: bool) -> None:
        """The first step in flight is over."""
        assert plan is self._in_flight[0]
        del self._in_flight[0]
        self.num_steps += 1
        self.tables.land(plan, failed)

    def _release_ended(self) -> None:
        """Give back what sequences held that are over, those that a step in flight has excepted."""
        ended, self._ended = self._ended, []
        in_flight = {span.sequence for plan in self._in_flight for span in plan.spans} if ended else set()
        for sequence in ended:
            if sequence in in_flight:
                self._ended.append(sequence)
            else:
                self._stop(sequence)
                self._close(sequence)


def _awaited_leader(sequence: Sequence) -> Sequence | None:
    """The leader of a fork that never ran, while its prompt is being computed or waits to be."""
    leader = sequence.leader
    if leader is None or Status.PREEMPTED in (sequence.status, leader.status) or leader.status is Status.FINISHED:
        return None
    return leader if leader.num_computed_tokens < len(leader.prompt_token_ids) else None
