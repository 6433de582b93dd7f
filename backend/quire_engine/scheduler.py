# SPDX-License-Identifier: Apache-2.0
"""Scheduler: which sequences run in a step, and how many tokens of each. Owns the life of a Sequence.

Torch-free and deterministic: the clock is passed in, block ids and slots come from blocks.py and adapters.py. The
engine calls schedule(), has a runner carry the plan out, and calls finish() or fail(); between those two calls it may
add and abort.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from quire_engine.adapters import AdapterRegistry
from quire_engine.blocks import BlockPool, ContentKey
from quire_engine.draft import Draft
from quire_engine.prefix import Prefix, PrefixCache
from quire_engine.request import BlockId, FinishReason, Sequence, Status
from quire_engine.step import BlockCopy, Sampled, Span, StepPlan
from quire_spec.config import EngineConfig
from quire_spec.errors import ConfigError, Internal, InvalidArgument


class Scheduler:
    """Continuous batching over one pool of blocks.

    Order. Waiting sequences start first come first served, preempted ones before all others. One that does not fit
    yet holds back those behind it, so that a long prompt is not overtaken for ever; one whose adapter has no slot yet
    holds back nobody.
    A fork waits until its leader's prompt is computed; a seat and a block are kept for it meanwhile.

    Progress. A prompt gets all its blocks when it is admitted, so only decoding takes more of them, one block per
    `block_size` tokens; when there is none, the sequence that was admitted last gives up its blocks and starts over
    later. The one admitted first is thus never preempted while another runs, and alone it always fits, because the
    pool holds `max_model_len` tokens (checked at start): it ends, then the next one is first.

    No thrash. A sequence, new or preempted, is admitted only if afterwards one block per running sequence stays free.
    Running sequences take at most one block each in `block_size` steps, so at least that many steps pass between an
    admission and the next preemption. Nobody is admitted in a step that preempts: the victim is next in line, and the
    blocks that it gave up, less the one that was missing, are too few for it. (With nothing else running the reserve
    is not needed.)

    Raises:
        ConfigError: the pool is smaller than one sequence of `max_model_len` tokens.
    """

    def __init__(
        self, config: EngineConfig, blocks: BlockPool, adapters: AdapterRegistry, key: ContentKey, max_model_len: int
    ) -> None:
        self._block_size = config.block_size
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._max_model_len = max_model_len
        self._blocks = blocks
        self._adapters = adapters
        self.prefixes = PrefixCache(blocks, key, config.enable_prefix_caching)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        # In order of admission.
        self._running: dict[int, Sequence] = {}
        self._in_flight: StepPlan | None = None
        # Ended while the step in flight may still write to their blocks.
        self._aborted: list[Sequence] = []
        self._stalled = False
        self.num_preemptions = 0
        self.num_block_copies = 0
        self.num_steps = 0
        if self._num_blocks(max_model_len) > blocks.num_blocks:
            raise ConfigError(
                f"max_model_len: {max_model_len} tokens need {self._num_blocks(max_model_len)} KV blocks of "
                f"{self._block_size} tokens, the cache has {blocks.num_blocks} ({blocks.num_blocks * self._block_size} "
                "tokens); lower max_model_len or raise kv_cache_memory_bytes or gpu_memory_utilization"
            )

    @property
    def has_work(self) -> bool:
        """Any sequence that is not over."""
        return bool(self._sequences)

    @property
    def runnable(self) -> bool:
        """Whether schedule() may find something to run; False until something changes once it did not."""
        return bool(self._running or (self._waiting and not self._stalled))

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not, preempted ones included."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            InvalidArgument: it can never run: too long for max_model_len, or for one step without chunked prefill;
                or the sequence that it forks has another prompt, adapter or salt.
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
        sequence.leader = self._leader(sequence)
        if sequence.adapter is not None:
            self._adapters.open(sequence.adapter)
        self._sequences[sequence.id] = self._waiting[sequence.id] = sequence
        self._stalled = False

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences, unknown ids ignored. Blocks that the step in flight may write go back after it."""
        for sequence_id in ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            if self._in_flight is not None and sequence.status is Status.RUNNING:
                del self._sequences[sequence_id], self._running[sequence_id]
                sequence.status, sequence.finish_reason = Status.FINISHED, FinishReason.ABORT
                self._aborted.append(sequence)
            else:
                self._end(sequence, FinishReason.ABORT)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan a step; None when nothing can run. `now`: monotonic seconds, for adapters that wait too long.

        Decoding sequences come first and always get their token; what is left of the token budget goes to prompts
        that are partly through, then to waiting ones.
        """
        assert self._in_flight is None, "schedule() again before finish() or fail()"
        self._adapters.begin_step(now)
        draft = self._continue_running()
        self._admit(draft, now)
        self._stalled = not (draft.decodes or draft.prefills)
        if self._stalled:
            return None
        self.num_steps += 1
        self.num_block_copies += len(draft.copies)
        self._in_flight = draft.plan(self._adapters.slots.take_loads())
        return self._in_flight

    def finish(self, plan: StepPlan, sampled: list[Sampled]) -> list[tuple[Sequence, Sampled]]:
        """Take in what the step computed; returns the sequences with new tokens, and which of the tokens count."""
        assert len(sampled) == len(plan.spans)
        self._land(plan)
        progress = []
        for span, result in zip(plan.spans, sampled, strict=True):
            sequence = span.sequence
            if sequence.status is Status.FINISHED:
                continue
            sequence.num_computed_tokens = span.end
            self.prefixes.publish(sequence, span.start, span.end)
            if result.prompt_logprobs:
                sequence.prompt_logprobs += result.prompt_logprobs
                sequence.num_scored_tokens += len(result.prompt_logprobs)
            if result.token_ids:
                progress.append((sequence, self._append(sequence, result)))
        self._release_aborted()
        return progress

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The step in flight failed: end its sequences, and return them. Blocks computed before stay good."""
        self._land(plan)
        failed = [span.sequence for span in plan.spans if span.sequence.status is not Status.FINISHED]
        for sequence in failed:
            self._end(sequence, FinishReason.ERROR)
        self._release_aborted()
        self._adapters.slots.lose(plan.loads)
        return failed

    def fail_adapter(self, digest: str) -> list[Sequence]:
        """End, and return, the sequences that wait for an adapter that cannot be had."""
        failed = [sequence for sequence in self._waiting.values() if sequence.adapter == digest]
        for sequence in failed:
            self._end(sequence, FinishReason.ERROR)
        return failed

    def wake(self) -> None:
        """Something outside changed (an adapter was read): sequences that could not run may now."""
        self._stalled = False

    def check_integrity(self) -> None:
        """Raise Internal unless sequences, blocks and adapters agree."""
        holders = [*self._running.values(), *self._aborted]
        idle = [s for s in self._waiting.values() if s.block_table or s.num_computed_tokens]
        split = {**self._waiting, **self._running} == self._sequences and not set(self._waiting) & set(self._running)
        short = [s for s in holders if len(s.block_table) < self._num_blocks(s.num_computed_tokens)]
        if idle or short or not split:
            raise Internal(
                f"scheduler: {len(self._waiting)} waiting ({len(idle)} of them hold blocks), {len(self._running)} "
                f"running ({len(short)} of them lack blocks), {len(self._sequences)} open"
            )
        plan = self._in_flight
        copied = [copy.source for copy in plan.copies] if plan is not None else []
        self._blocks.check_integrity([*(s.block_table for s in holders), copied])
        if plan is not None:
            self._check_writes(plan.spans, Counter(block for s in holders for block in s.block_table))
        self._adapters.check_integrity(
            Counter(s.adapter for s in (*self._sequences.values(), *self._aborted) if s.adapter is not None),
            Counter(s.adapter for s in holders if s.adapter is not None),
        )

    def _check_writes(self, spans: list[Span], num_holders: Counter[BlockId]) -> None:
        """Raise Internal if a span writes a block that anybody else reads, or may find in the cache."""
        for span in spans:
            written = span.sequence.block_table[span.start // self._block_size : self._num_blocks(span.end)]
            if shared := [b for b in written if num_holders[b] > 1 or self._blocks.hash_of(b) is not None]:
                raise Internal(f"scheduler: sequence {span.sequence.id} writes blocks {shared}, which others may read")

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

    def _continue_running(self) -> Draft:
        """A step of decoding and of partly prefilled sequences.

        Goes through them in order of admission, so that whoever is preempted has no span yet.
        """
        decoding = sum(1 for s in self._running.values() if s.num_tokens - s.num_computed_tokens == 1)
        draft = Draft(self._max_num_batched_tokens - decoding)
        for sequence in list(self._running.values()):
            if sequence.status is not Status.RUNNING:
                break
            remaining = sequence.num_tokens - sequence.num_computed_tokens
            if remaining == 1:
                if self._grow(sequence):
                    draft.decodes.append(self._span(sequence, 1))
            elif length := min(remaining, draft.budget):
                draft.prefill(self._span(sequence, length))
        return draft

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure that a decoding sequence has a block for its token; False when it was preempted instead."""
        if sequence.num_computed_tokens < len(sequence.block_table) * self._block_size:
            return True
        while self._blocks.num_free == 0:
            victim = next(reversed(self._running.values()))
            assert len(self._running) > 1, "the pool holds max_model_len tokens"
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_table += self._blocks.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it computes its tokens again later, those still in the prefix cache excepted."""
        self._stop(sequence)
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[sequence.id] = sequence
        self._waiting.move_to_end(sequence.id, last=False)

    def _admit(self, draft: Draft, now: float) -> None:
        """Start waiting sequences within the draft's budget."""
        admitted = []
        for sequence in self._waiting.values():
            if draft.budget == 0 or len(self._running) + len(draft.promised) >= self._max_num_seqs:
                break
            if leader := _awaited_leader(sequence):
                if leader.status is Status.RUNNING or leader.id in draft.promised:
                    draft.promised.add(sequence.id)
                continue
            if not self._adapter_ready(sequence, now):
                continue
            prefix = self._usable_prefix(sequence, draft)
            length = self._chunk(sequence.num_tokens - prefix.num_tokens, draft.budget)
            if length == 0 or not self._fits(sequence, prefix, draft):
                break
            admitted.append(sequence)
            if sequence.status is not Status.PREEMPTED:
                draft.started.append(sequence.id)
                self.prefixes.count(sequence.num_tokens, prefix.num_tokens)
            draft.copies += self._start(sequence, prefix)
            draft.prefill(self._span(sequence, length))
        for sequence in admitted:
            del self._waiting[sequence.id]

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

    def _usable_prefix(self, sequence: Sequence, draft: Draft) -> Prefix:
        """What of a sequence is there already; without the part that needs a copy where there can be none."""
        prefix = self.prefixes.find(sequence)
        if prefix.partial is None:
            return prefix
        # A block that this step fills by a copy has nothing to copy yet; and the last free block is better computed
        # in than copied to, so that a sequence always fits alone.
        unfilled = any(copy.destination == prefix.partial for copy in draft.copies)
        return self.prefixes.whole(prefix) if unfilled or not self._fits(sequence, prefix, draft) else prefix

    def _fits(self, sequence: Sequence, prefix: Prefix, draft: Draft) -> bool:
        needed = self._num_blocks(sequence.num_tokens) - len(prefix.blocks) + self._blocks.num_idle(prefix.blocks)
        if prefix.partial is not None:
            needed += self._blocks.num_idle([prefix.partial])
        reserve = len(self._running) + len(draft.promised) + 1 if self._running else 0
        return needed + reserve <= self._blocks.num_free

    def _start(self, sequence: Sequence, prefix: Prefix) -> list[BlockCopy]:
        """Give a sequence its blocks; returns the copy that the first fresh one begins as, if it does."""
        # Shared before anything is allocated, which might evict them; what is copied, until the step is over.
        copied = [] if prefix.partial is None else [prefix.partial]
        self._blocks.share(prefix.blocks + copied)
        fresh = self._blocks.allocate(self._num_blocks(sequence.num_tokens) - len(prefix.blocks))
        sequence.block_table = prefix.blocks + fresh
        sequence.num_computed_tokens = prefix.num_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = prefix.num_tokens
        sequence.status = Status.RUNNING
        if sequence.adapter is not None:
            self._adapters.start(sequence.adapter)
        self._running[sequence.id] = sequence
        return [BlockCopy(source, fresh[0]) for source in copied]

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
        del self._sequences[sequence.id]
        self._waiting.pop(sequence.id, None)
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        self._close(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Give back what a running sequence holds; nothing of it is in flight."""
        self._running.pop(sequence.id, None)
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        if sequence.adapter is not None:
            self._adapters.stop(sequence.adapter)

    def _close(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self._adapters.close(sequence.adapter)
        self._stalled = False

    def _land(self, plan: StepPlan) -> None:
        """The step in flight is over."""
        assert plan is self._in_flight
        self._in_flight = None
        self._blocks.release([copy.source for copy in plan.copies])

    def _release_aborted(self) -> None:
        for sequence in self._aborted:
            self._stop(sequence)
            self._close(sequence)
        self._aborted.clear()

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _awaited_leader(sequence: Sequence) -> Sequence | None:
    """The leader of a fork that never ran, while its prompt is being computed or waits to be."""
    leader = sequence.leader
    if leader is None or Status.PREEMPTED in (sequence.status, leader.status) or leader.status is Status.FINISHED:
        return None
    return leader if leader.num_computed_tokens < len(leader.prompt_token_ids) else None
