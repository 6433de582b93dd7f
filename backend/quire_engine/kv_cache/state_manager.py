# SPDX-License-Identifier: Apache-2.0
"""States of sequences: assigns rows of the state cache to sequences, and plans copies to and from snapshots.

The scheduler calls it for models whose layers have one state per sequence, which contains all
tokens so far. A state cannot be cut back to fewer tokens. Therefore, a prefix can be reused only where a snapshot of
the state exists, and a state never contains drafts. Those that are accepted are added by the next step.
"""

from collections.abc import Iterable

from quire_engine.kv_cache.host_states import HostStates
from quire_engine.kv_cache.prefix_cache import PrefixCache, PrefixHit
from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.sequence import Sequence
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import StateCopy, StepPlan

_MIN_DECODE_TOKENS = 64
"""A decoding sequence takes a snapshot after every so many tokens. Each costs as much as one more token. Only the last
one is kept."""


class StateManager:
    """The states of all running sequences.

    A snapshot is taken when a step starts at the end of a KV block, before the step changes the state. Prompts are
    computed up to the ends of two blocks in steps of their own: of the last full block before the last token, and of
    the last block that the KV cache already contains. The first makes a conversation continue from its last prompt. The
    second makes prompts with the same beginning continue where they begin to differ.
    """

    def __init__(
        self, pool: StatePool, host: HostStates, prefix_cache: PrefixCache, block_size: int, has_snapshots: bool
    ) -> None:
        self.pool = pool
        self.host = host
        """The snapshots in host memory."""
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._has_snapshots = has_snapshots
        self._decode_interval = max(_MIN_DECODE_TOKENS, block_size)
        self._fork_sources: dict[int, int] = {}
        """Maps the row of a beam that has not been computed yet to the row of the beam from which it forked."""
        self.num_snapshots_taken = 0

    def start(self, sequence: Sequence, prefix: PrefixHit, builder: StepPlanBuilder) -> None:
        """Give a sequence a row, and plan to fill it with the snapshot at the end of `prefix`. If the prefix is empty,
        the first step of the sequence zeroes the row."""
        if prefix.num_tokens:
            key = self._prefix_cache.block_hash(sequence, prefix.num_tokens // self._block_size - 1)
            if key in self.pool:
                sequence.state_row, source = self.pool.allocate_from(key)
                # As for KV blocks, the outputs of one request do not mean that other requests use this prompt, too.
                if sequence.parent_id is None and source != sequence.state_row:
                    self.host.request(key)
            else:
                source, sequence.state_row = self.host.load(key), self.pool.allocate()
            if source != sequence.state_row:
                builder.state_copies.append(StateCopy(source, sequence.state_row))
        else:
            sequence.state_row = self.pool.allocate()
        if self._has_snapshots:
            last = (sequence.num_prefill_tokens - 1) // self._block_size * self._block_size
            sequence.state_stops = tuple(sorted({sequence.num_matched_tokens, last} - {0, prefix.num_tokens}))

    def fork(self, beam: Sequence) -> None:
        """Give a new beam a row of its own. Until then, it has the row of the beam from which it forked."""
        source, beam.state_row = beam.state_row, self.pool.allocate()
        self._fork_sources[beam.state_row] = source

    def prepare_span(self, sequence: Sequence, builder: StepPlanBuilder) -> None:
        """Plan the copies of states that come before the next span of a sequence."""
        if (source := self._fork_sources.pop(sequence.state_row, None)) is not None:
            builder.state_copies.append(StateCopy(source, sequence.state_row))
        self._take_snapshot(sequence, builder)

    def _take_snapshot(self, sequence: Sequence, builder: StepPlanBuilder) -> None:
        """Plan to copy the state of a sequence before its next span, if the span starts at the end of a KV block."""
        start = sequence.num_computed_tokens
        if not self._has_snapshots or not start or start % self._block_size or sequence.num_replayed_tokens:
            return
        is_decoding = sequence.num_tokens - start == 1 and start not in sequence.state_stops
        if is_decoding and start % self._decode_interval:
            return
        key = self._prefix_cache.block_hash(sequence, start // self._block_size - 1)
        if is_decoding:
            if sequence.decode_snapshot not in (b"", key):
                self.pool.drop_snapshot(sequence.decode_snapshot)
            sequence.decode_snapshot = key
        if (row := self.pool.add_snapshot(key)) is not None:
            builder.state_copies.append(StateCopy(sequence.state_row, row))
            self.num_snapshots_taken += 1
            if sequence.prompt_keys is not None and not is_decoding:
                # Another pod reads this prompt soon.
                self.host.request(key)

    def max_draft_length(self, sequence: Sequence) -> int:
        """Return how many drafts the next span of a decoding sequence can have, so that the sequence takes its next
        snapshot.

        A step starts there, and its state contains all tokens, because the step before has no drafts."""
        if not self._has_snapshots:
            return sequence.max_output_tokens
        start = sequence.num_computed_tokens
        return max(0, self._decode_interval - start % self._decode_interval - 2)

    def store_requested(self, builder: StepPlanBuilder) -> None:
        """Plan the copy of a snapshot to host memory, after all other copies of the step."""
        self.host.plan_store(self.pool, builder)

    def free(self, sequence: Sequence) -> None:
        """Release the row of a sequence."""
        self._fork_sources.pop(sequence.state_row, None)
        self.pool.free(sequence.state_row)
        sequence.state_row, sequence.num_replayed_tokens = -1, 0

    def complete_step(self, plan: StepPlan, step_failed: bool) -> None:
        """Drop the snapshots of a failed step, because they may not have been written."""
        self.host.complete_step(plan, step_failed)
        for copy in plan.state_copies if step_failed else []:
            if (key := self.pool.key_of(copy.destination)) is not None:
                self.pool.drop_snapshot(key)

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Raise Internal unless exactly these sequences own rows."""
        self.pool.check_integrity(sequence.state_row for sequence in holders)
        self.host.check_integrity()
