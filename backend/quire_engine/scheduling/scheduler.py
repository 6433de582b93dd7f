# SPDX-License-Identifier: Apache-2.0
"""Continuous-batching scheduler: decides which sequences run in each step, and how many tokens of each are computed.

The scheduler owns the life cycle of each Sequence. It is torch-free and does not depend on a runner. It is
deterministic: the caller passes the time, `kv_cache` chooses the block ids, and `lora.registry` chooses the adapter
slots.

The step executor calls schedule(), runs the plan, and calls update_from_step() or fail_step(). Between these calls it
can call schedule_async() once, or with pipeline stages, schedule_beside() several times. Several steps are then in
flight. The step that was planned first also completes first. The engine can call add() and abort() between any two of
these calls.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.kv_cache.block_manager import BlockManager
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.host_cache import HostCache
from quire_engine.kv_cache.host_states import HostStates
from quire_engine.kv_cache.prefix_cache import PrefixCache, PrefixHit
from quire_engine.kv_cache.state_manager import StateManager
from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.kv_transfer.host_leases import HostLeases
from quire_engine.kv_transfer.state_traffic import StateTraffic
from quire_engine.kv_transfer.store import KVStore
from quire_engine.kv_transfer.store_traffic import StoreTraffic
from quire_engine.lora.registry import AdapterRegistry
from quire_engine.scheduling.adapter_usage import AdapterUsage, count_usage
from quire_engine.scheduling.async_scheduling import apply_placeholders, reaches_max_tokens, remove_placeholder
from quire_engine.scheduling.beam_scheduler import BeamScheduler
from quire_engine.scheduling.capacity import CapacityCheck
from quire_engine.scheduling.image_encodings import ImageEncodings
from quire_engine.scheduling.in_flight_steps import InFlightSteps
from quire_engine.scheduling.request_checks import check_request, find_parent
from quire_engine.scheduling.request_queue import RequestQueue
from quire_engine.scheduling.virtual_clock import VirtualClock
from quire_engine.sequence import BeamGroup, FinishReason, Sequence, SequenceStatus
from quire_engine.speculation.draft_planner import DraftPlanner
from quire_engine.step.builder import StepPlanBuilder
from quire_engine.step.plan import ScheduledSpan, SpanOutput, StepPlan
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, Internal, InvalidArgument
from quire_spec.model.kv_layout import KVLayout
from quire_spec.protocol.messages import StartedSequence

MAX_SHARING_CLIENTS = 4
"""Maximum number of clients whose prompts a step computes in equal parts. With more clients, the parts would be so
small that all prompts end late."""


class Scheduler:
    """Continuous batching over one pool of KV blocks. The following rules always hold.

    Order. Sequences are sorted by priority, and then by the start tag of the virtual clock, which orders the sequences
    of one client by arrival, and gives all clients equal shares. This sort key never changes. All priorities are equal
    unless scheduling_policy is "priority". Waiting sequences start in this order, and partial prefills continue in this
    order. Therefore, a preempted sequence resumes before later ones start. A waiting sequence that does not fit delays
    all sequences behind it, except those of clients that have fewer running sequences. Otherwise, shorter prompts could
    overtake a long one forever. A sequence whose adapter has no slot yet does not delay others. A fork waits until the
    prompt of its parent is computed. In the meantime, one of the `max_num_seqs` places and one block are reserved for
    the fork.

    Clients. If several clients have prompts to compute, each gets an equal part of the step's token budget, and what is
    left goes to the most urgent prompts. At most MAX_SHARING_CLIENTS clients share a step. If a waiting sequence does
    not fit, running sequences of a client with at least twice as many running sequences are preempted, but never the
    most urgent sequence of all. So the first token of a new client waits for a few steps, and not for the queue of
    another client. An engine with a single client works as if there were no clients.

    Progress. A sequence gets the blocks for its whole prompt when it is admitted. After that, it needs new blocks only
    for decoding: one block per `block_size` tokens. If no block is free, the least urgent running sequence is
    preempted. Later, its blocks are restored from host memory or from the prefix cache, or they are computed again.
    Therefore, the most urgent sequence is never preempted while another sequence runs. A sequence that runs alone
    always fits, because the pool holds `max_model_len` tokens; this is checked at startup. It follows that the most
    urgent sequence finishes, and then another sequence becomes the most urgent one.

    Urgency. If a waiting sequence does not fit, running sequences that have a lower priority (a larger number) are
    preempted. The least urgent one is preempted first, and none is preempted if that would not free enough places and
    blocks. The waiting sequence then starts in the same step. By this rule, only a more urgent sequence can get the
    blocks of another one. A sequence of the same priority is preempted only for decoding (see Progress) or for another
    client (see Clients). Therefore, every sequence finishes, unless sequences that have a higher priority keep arriving
    forever. Without priorities, this rule never applies.

    Restart. When a sequence grows beyond the long-rope threshold of its model, the keys of all its tokens change. The
    sequence then returns to the waiting queue with the same sort key. This happens at most once per sequence. The
    sequence computes all its tokens again and does not reuse its earlier blocks.

    No thrash. A new or preempted sequence is admitted only if at least one free block per running sequence is left
    afterwards. A running sequence allocates at most one block in `block_size` steps. Therefore, at least `block_size`
    steps pass between an admission and the next preemption for decoding. A preempted sequence is never admitted again
    in the same step, because some of the blocks that it freed are already in use. If no other sequence runs, no free
    blocks are required.

    Beams. In a step, either all beams of a search decode or none of them does. All beams of a search are also preempted
    together. When a search starts, places for all its beams are reserved. If some beams of a search run, its waiting
    beams resume before other sequences start, and they can preempt any less urgent sequence. Therefore, two searches
    never wait for each other's blocks.

    Speculation. Draft tokens are added to the decode spans after all other tokens are planned. They use what remains of
    the step's token budget. The step computes draft tokens like a chunk of a prompt. The keys and values of rejected
    draft tokens are overwritten by the next step.

    Restoring. If blocks of a sequence are in host memory, the sequence gets all its blocks when it is admitted, and the
    next steps copy the contents back before anything is computed for it. While other sequences run, a step copies only
    a few blocks, so that it does not delay them. If nothing else runs, one step copies all of them. The step's copies
    come before its computations on the device, so the copies of earlier steps are complete as well.

    States. If layers have states, each running sequence also owns a state, and a prefix is reused only up to a snapshot
    of a state (see StateManager). A waiting sequence does not start while sequences that have finished, but are in a
    step in flight, own the last states.

    Store. A sequence whose blocks are in a store outside of the process is WAITING_FOR_KV while the store reads them
    into host memory, and delays no other sequence. It waits at most READ_DEADLINE_S, or longer for another pod. After
    that, it starts like every other sequence, with the blocks that were read.

    Images. If `image_encodings` is set, a sequence is WAITING_FOR_IMAGES while the vision tower computes the embeddings
    of its images in another thread, and delays no other sequence. Otherwise, steps run the tower.

    Async scheduling. While a step is in flight, the next step can be planned as if the step in flight were complete
    (see async_scheduling). Such a plan never preempts a sequence. If a preemption is necessary, planning waits until
    the step in flight is complete. A sequence that is aborted, or that turns out to
    be finished, keeps its blocks and its adapter slot until no step in flight contains it.

    Pipeline stages. So that all stages compute, several steps are in flight. A sequence is in at most one of them that
    reaches its end, but chunks of its prompt can follow each other. Each step has an equal part of the decoding
    sequences. As with async scheduling, such plans never preempt a sequence.

    Raises:
        ConfigError: the pool is smaller than one sequence of `max_model_len` tokens, or speculative decoding is set for
            a model with long rope.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_pool: BlockPool,
        adapter_registry: AdapterRegistry,
        block_hasher: BlockHasher,
        max_model_len: int,
        swap_costs: SwapCosts,
        layout: KVLayout,
        store: KVStore | None = None,
        state_pool: StatePool | None = None,
        find_peer: Callable[[str], KVStore | None] | None = None,
        state_store: KVStore | None = None,
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._block_pool = block_pool
        self._adapter_registry = adapter_registry
        self.host_cache = HostCache(swap_costs, config.block_size, config.kv_offloading_size > 0)
        self.leases: HostLeases | None = None
        """The leases of other pods. The engine sets this attribute if it serves them."""
        self._max_copies = swap_costs.max_copies(config.max_num_batched_tokens)
        enabled = config.enable_prefix_caching
        num_state_rows, num_host_states = 0 if state_pool is None else state_pool.num_rows, swap_costs.num_host_states
        host_states = HostStates(num_state_rows, num_host_states if self.host_cache.is_caching else 0)
        cache_pools = self.host_cache, state_pool, host_states
        self.prefix_cache = PrefixCache(block_pool, block_hasher, layout, enabled, *cache_pools)
        self.states: StateManager | None = None
        if state_pool is not None:
            self.states = StateManager(state_pool, host_states, self.prefix_cache, config.block_size, enabled)
        self.store_traffic: StoreTraffic | None = None
        if store is not None or find_peer is not None:
            peers = (lambda _: None, 0) if find_peer is None else (find_peer, config.kv_recompute_threshold)
            states = None
            if state_pool is not None and (state_store is not None or find_peer is not None):
                states = StateTraffic(state_store, host_states, state_pool)
            args = self.host_cache, config.block_size, *peers, states, self.prefix_cache.has_block
            self.store_traffic = StoreTraffic(store, *args)
        self.block_manager = BlockManager(block_pool, config.block_size, self.host_cache, layout)
        self.draft_planner = DraftPlanner.from_config(config, self.block_manager, self.states)
        self._has_long_rope = block_hasher.long_rope_threshold is not None
        self.image_encodings: ImageEncodings | None = None
        """The images that are encoded while steps run; None: steps encode them."""
        self._num_arrivals = 0
        self._clock = VirtualClock()
        self._sequences: dict[int, Sequence] = {}
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._beams = BeamScheduler(
            *(self.block_manager, block_pool.num_blocks, config.block_size, config.max_num_seqs),
            layout.window is not None,
        )
        self._capacity = CapacityCheck(config.max_num_seqs, self._running, block_pool, self.block_manager, self._beams)
        self._in_flight = InFlightSteps()
        # The step in flight whose sequences already contain placeholders for the tokens that it samples.
        self._placeholder_plan: StepPlan | None = None
        # Whether a step is being planned while another one is in flight.
        self._planning_async = False
        # While this is set, no step is planned while another one is in flight, until the next schedule(),
        # which can start a waiting sequence.
        self._async_deferred = False
        self.waiting_for_adapters = False
        """True if the last schedule() found nothing to run, and nothing has changed since."""
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_step_tokens = 0
        """Number of tokens that steps have computed."""
        if self._has_long_rope and self.draft_planner is not None:
            raise ConfigError(
                "speculative_config: speculative decoding does not support models with longrope; remove it"
            )
        if self.block_manager.num_blocks(max_model_len) > block_pool.num_blocks:
            raise ConfigError(
                f"max_model_len: {max_model_len} tokens need {self.block_manager.num_blocks(max_model_len)} KV blocks "
                f"of {config.block_size} tokens, but the cache has {block_pool.num_blocks} "
                f"({block_pool.num_blocks // layout.num_groups * config.block_size} tokens); "
                "lower max_model_len or raise kv_cache_memory_bytes or gpu_memory_utilization"
            )

    @property
    def has_work(self) -> bool:
        """True while a sequence is unfinished or a step is in flight."""
        return bool(self._sequences or self._in_flight)

    @property
    def has_runnable(self) -> bool:
        """True if a step is in flight, or if schedule() may find work.

        If schedule() has found nothing to run, it cannot find work before something changes.
        """
        return bool(self._running or self._in_flight or (self._waiting and not self.waiting_for_adapters))

    @property
    def num_running(self) -> int:
        """Number of sequences that have blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have no blocks, including preempted ones."""
        return len(self._waiting)

    @property
    def num_swapped(self) -> int:
        """Number of waiting sequences whose blocks were swapped out to host memory."""
        if not self.block_manager.num_used_host_blocks:
            return 0
        return sum(1 for sequence in self._waiting if sequence.host_blocks)

    @property
    def _clients(self) -> set[str]:
        """The clients that have unfinished sequences."""
        return self._running.num_by_client.keys() | self._waiting.num_by_client.keys()

    def is_state_written(self, row: int) -> bool:
        """Return whether no step in flight writes a row of states."""
        return all(copy.destination != row for plan in self._in_flight.plans for copy in plan.state_copies)

    def usage_by_adapter(self) -> dict[AdapterDigest | None, AdapterUsage]:
        """Return how many sequences and KV blocks each adapter has. The key None stands for the base model. A shared
        block is counted for each sequence that uses it.
        """
        return count_usage(self._running, self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            InvalidArgument: the sequence is too long for max_model_len; it is too long for one step and chunked prefill
                is off; its parent has a different prompt, adapter or salt; or its beams do not fit.
                Or its adapters cannot be added.
            NotFound: its adapter is not registered.
        """
        check_request(sequence, self._config, self._max_model_len)
        if self._config.scheduling_policy != "priority":
            sequence.priority = 0
        if sequence.id in self._sequences:
            raise InvalidArgument(f"id: {sequence.id} is in use by an unfinished sequence; choose another")
        sequence.parent = find_parent(sequence, self._sequences)
        if sequence.params.use_beam_search:
            self._beams.check_request(sequence)
        if sequence.adapter_digest is not None:
            self._adapter_registry.add_sequence(sequence.adapter_digest, sequence.adapter_parts, sequence.client)
            sequence.adapter_start = self._adapter_registry.adapter_start(
                sequence.adapter_digest, sequence.prompt_token_ids
            )
        if sequence.params.use_beam_search:
            self._beams.add(sequence)
        self._num_arrivals += 1
        sequence.sort_key = sequence.priority, self._clock.tag(sequence), self._num_arrivals, 0
        self._sequences[sequence.id] = sequence
        self._waiting.add(sequence)
        self.waiting_for_adapters = False

    def drop_kv_source(self, sequence: Sequence) -> None:
        """Read nothing for a waiting sequence from the pod that its request names, because that pod does not have its
        blocks. A sequence that requires them fails; see `fail_unread`."""
        assert self.store_traffic is not None
        if sequence.kv_source_required:
            self.store_traffic.unread.add(sequence.id)
        sequence.kv_source, sequence.kv_source_required = "", False

    def num_uncached_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence, which is not queued, are cached neither on the device nor in host
        memory."""
        if sequence.adapter_digest is not None:
            sequence.adapter_start = self._adapter_registry.adapter_start(
                sequence.adapter_digest, sequence.prompt_token_ids
            )
        return sequence.num_tokens - self.prefix_cache.match(sequence).num_tokens

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Finish sequences; ignore unknown ids. The id of a beam finishes its whole search. If a step in flight can
        still write to blocks of a sequence, these blocks are freed when the step is complete."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            # The ids of one search come in any order, and the id of the search itself may be no beam at the moment.
            group = self._beams.find(sequence_id) or (None if sequence is None else sequence.beam_group)
            if group is not None:
                self._finish_beams(group, FinishReason.ABORT)
            elif sequence is not None:
                self._finish_sequence(sequence, FinishReason.ABORT)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan a step; return None if nothing can run.

        `now` is the time in monotonic seconds. It is used to detect starved adapters. Decoding sequences come first and
        always get their token. Prompts get the rest of the token budget, and drafts get what is left after that.
        """
        assert not self._in_flight, "schedule() was called before update_from_step() or fail_step()"
        self._async_deferred = False
        sequences = self._running.snapshot()
        plan = self._plan_step(sequences, now, self._max_decodes(sequences))
        self.waiting_for_adapters = plan is None
        return plan

    def schedule_beside(self, now: float) -> StepPlan | None:
        """Plan a step of sequences whose next tokens do not depend on the steps in flight; return None if there are
        none, or if a step in flight must complete first.

        A step in flight must complete first if a block is missing, or if a waiting sequence can start only by a
        preemption.
        """
        if self._async_deferred:
            return None
        busy = set()
        for span in (span for plan in self._in_flight.plans for span in plan.spans):
            sequence = span.sequence
            if span.end >= sequence.num_tokens or sequence.requires_host_tokens:
                busy.add(sequence)
            elif sequence.status is not SequenceStatus.FINISHED:
                sequence.num_computed_tokens = span.end
        sequences = [sequence for sequence in self._running if sequence not in busy]
        max_decodes = self._max_decodes(self._running)
        decodes = [s for s in sequences if s.num_tokens - s.num_computed_tokens == 1][:max_decodes]
        num_lacking = sum(map(self.block_manager.needs_block, decodes))
        if num_lacking * self.block_manager.num_groups > self._block_pool.num_free:
            return None
        self._planning_async = True
        plan = self._plan_step(sequences, now, max_decodes)
        self._planning_async = False
        return plan

    def _max_decodes(self, running: Iterable[Sequence]) -> int:
        """Return how many sequences can decode in a step, so that all steps in flight have equal parts."""
        num_steps = self._config.max_steps_in_flight
        if num_steps == 1:
            return sys.maxsize
        return -(-sum(s.num_tokens - s.num_computed_tokens == 1 for s in running) // num_steps)

    def schedule_async(self, now: float) -> StepPlan | None:
        """Plan the next step as if the step in flight were complete; return None if the step in flight must complete
        first.

        The step in flight must complete first if a block is missing, if a waiting sequence can start only by a
        preemption, or if a sequence requires its tokens on the host. If the model has a long-rope threshold, the step
        in flight must always complete first.
        """
        [step_in_flight] = self._in_flight.plans
        if self._async_deferred or self._has_long_rope or any(s.requires_host_tokens for s in self._running):
            return None
        apply_placeholders(step_in_flight)
        self._placeholder_plan = step_in_flight
        sequences = [sequence for sequence in self._running if not reaches_max_tokens(sequence)]
        num_lacking = sum(map(self.block_manager.needs_block, sequences))
        if num_lacking * self.block_manager.num_groups > self._block_pool.num_free:
            return None
        self._planning_async = True
        plan = self._plan_step(sequences, now)
        self._planning_async = False
        return plan

    def _plan_step(self, sequences: list[Sequence], now: float, max_decodes: int = sys.maxsize) -> StepPlan | None:
        """Plan a step. `sequences` are the running sequences that continue. Of these, about `max_decodes` decode; a
        group of beams is not divided."""
        self._adapter_registry.begin_step(now)
        if self.store_traffic is not None:
            self.store_traffic.poll()
        builder = StepPlanBuilder(self._config.max_num_batched_tokens, copy_budget=self._max_copies)
        self._schedule_prefills(builder, self._schedule_decodes(sequences, builder, max_decodes), now)
        if not (builder.decodes or builder.prefills):
            restoring = next((sequence for sequence in self._running if sequence.host_blocks), None)
            if restoring is None:
                return None
            # Nothing else can run in this step, so all blocks of the most urgent sequence are copied at once.
            self.block_manager.restore(restoring, builder, len(restoring.host_blocks))
            self._continue_prefills(builder, [restoring])
        self.block_manager.store_requested(builder)
        if self.states is not None:
            self.states.store_requested(builder)
        if self.draft_planner is not None:
            self.draft_planner.extend_decodes(builder)
        return self._in_flight.add(builder.build())

    def update_from_step(self, plan: StepPlan, span_outputs: list[SpanOutput]) -> list[tuple[Sequence, SpanOutput]]:
        """Apply the outputs of the earliest step in flight. Return each sequence that has new tokens or was pooled,
        together with its output."""
        assert len(span_outputs) == len(plan.spans)
        self._complete_step(plan, step_failed=False)
        has_placeholders = plan is self._placeholder_plan
        updates = []
        beam_outputs: dict[Sequence, SpanOutput] = {}
        for span, span_output in zip(plan.spans, span_outputs, strict=True):
            sequence = span.sequence
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if has_placeholders:
                remove_placeholder(sequence)
            sequence.num_computed_tokens = span.end - len(span.draft_token_ids)
            sequence.num_replayed_tokens = 0
            if span.start <= sequence.last_image_token < span.end:
                self._release_images(sequence)
            self.prefix_cache.cache_full_blocks(sequence)
            self.block_manager.free_outside_window(sequence)
            if span_output.prompt_logprobs:
                sequence.prompt_logprobs += span_output.prompt_logprobs
                sequence.num_computed_prompt_logprobs += len(span_output.prompt_logprobs)
            if sequence.pools_all_tokens or sequence.pools_first_token:
                sequence.num_pooled_tokens = max(sequence.num_pooled_tokens, span.end)
            if span_output.pooled is not None:
                self._finish_sequence(sequence, FinishReason.STOP)
                updates.append((sequence, span_output))
            if span_output.candidates is not None:
                beam_outputs[sequence] = span_output
            if span_output.token_ids:
                num_draft_tokens, num_accepted_tokens = len(span.draft_token_ids), len(span_output.token_ids) - 1
                applied_output = self._append_tokens(sequence, span_output)
                if self.draft_planner is not None:
                    self._apply_draft(span, span_output)
                if num_draft_tokens:
                    applied_output = replace(
                        applied_output, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens
                    )
                updates.append((sequence, applied_output))
                if (
                    self._has_long_rope
                    and sequence.status is SequenceStatus.RUNNING
                    and self.prefix_cache.invalidate_if_rope_switched(sequence)
                ):
                    self._requeue(sequence)
        updates += self._extend_beams(beam_outputs)
        self._free_finished()
        return updates

    def _extend_beams(self, beam_outputs: dict[Sequence, SpanOutput]) -> list[tuple[Sequence, SpanOutput]]:
        """Extend the beams of a step; return the outputs of the searches that finished."""
        outputs: list[tuple[Sequence, SpanOutput]] = []
        for update in self._beams.extend(beam_outputs):
            outputs += update.outputs
            # Dropped beams are removed first, because forks take their ids.
            for beam in update.dropped:
                self._finish_sequence(beam, FinishReason.STOP)
            for fork in update.forks:
                self._start_fork(fork)
            group = update.group
            if update.outputs:
                self._beams.remove(group)
            elif self._has_long_rope and [
                b for b in group.sequences if self.prefix_cache.invalidate_if_rope_switched(b)
            ]:
                for beam in group.sequences:
                    self._requeue(beam)
                self._beams.share_prompt_blocks(group)
        return outputs

    def _start_fork(self, fork: Sequence) -> None:
        """Add a new beam to the running sequences; it already has its blocks.

        All beams of a search continue in the same step. So the state of the beam from which it forked does not change
        before this step copies it.
        """
        self._sequences[fork.id] = fork
        if self.states is not None:
            self.states.fork(fork)
        self._running.add(fork)
        if fork.adapter_digest is not None:
            self._adapter_registry.add_sequence(fork.adapter_digest, client=fork.client)
            self._adapter_registry.on_start(fork.adapter_digest)

    def _apply_draft(self, span: ScheduledSpan, output: SpanOutput) -> None:
        """Record a draft. The keys and values of all output tokens except the last one are already computed."""
        assert self.draft_planner is not None
        self.draft_planner.record(span, output)
        if span.sequence.status is SequenceStatus.RUNNING:
            span.sequence.num_computed_tokens += len(output.token_ids) - 1
            if self.states is not None:
                span.sequence.num_replayed_tokens = len(output.token_ids) - 1
            self.prefix_cache.cache_full_blocks(span.sequence)

    def fail_step(self, plan: StepPlan) -> list[Sequence]:
        """Finish and return the sequences of a failed step, which must be the earliest step in flight.

        Blocks computed by earlier steps stay valid. If other steps were planned in the meantime, the caller must fail
        them too, in their order.
        """
        self._complete_step(plan, step_failed=True)
        sequences = dict.fromkeys([*(span.sequence for span in plan.spans), *plan.restoring])
        failed_sequences = self._fail_sequences([s for s in sequences if s.status is not SequenceStatus.FINISHED])
        self._free_finished()
        return failed_sequences

    def fail_adapter(self, adapter_digest: AdapterDigest) -> list[Sequence]:
        """Finish and return the sequences that wait for an adapter that cannot be loaded."""
        return self._fail_sequences([s for s in self._waiting if s.adapter_digest == adapter_digest])

    def fail_images(self, sequence_ids: Iterable[int]) -> list[Sequence]:
        """Finish and return the sequences that wait for an image that cannot be encoded."""
        sequences = [self._sequences[sequence_id] for sequence_id in sequence_ids]
        return self._fail_sequences([s for s in sequences if s.status is not SequenceStatus.RUNNING])

    def fail_unread(self) -> list[Sequence]:
        """Finish and return the sequences whose blocks could not be read from another pod, and that require them."""
        unread = () if self.store_traffic is None else sorted(self.store_traffic.unread)
        return self._fail_sequences([self._sequences[sequence_id] for sequence_id in unread])

    def _fail_sequences(self, sequences: list[Sequence]) -> list[Sequence]:
        """Finish these sequences, and all beams of the searches to which they belong.

        Return the sequences whose failure must be reported. For a beam search, this is a single sequence, which has the
        id of the request.
        """
        failed_sequences = []
        for sequence in sequences:
            if (group := sequence.beam_group) is None:
                self._finish_sequence(sequence, FinishReason.ERROR)
                failed_sequences.append(sequence)
            elif self._beams.find(group.id) is not None:
                self._finish_beams(group, FinishReason.ERROR)
                failed_sequences.append(sequence if sequence.id == group.id else replace(sequence, id=group.id))
        return failed_sequences

    def on_resource_ready(self) -> None:
        """Called when an adapter was read or copied to a slot, a store has read blocks, or an image was encoded.

        Waiting sequences may now be able to run."""
        self.waiting_for_adapters = False

    def check_integrity(self) -> None:
        """Raise Internal if the states of sequences, blocks and adapters contradict each other."""
        finished = self._in_flight.finished_sequences
        block_holders = [*self._running, *finished]
        waiting_with_blocks = [s for s in self._waiting if s.block_table or s.num_computed_tokens]
        is_partitioned = Counter(s.id for s in (*self._waiting, *self._running)) == Counter(self._sequences.keys())
        is_sorted = all(
            a.sort_key < b.sort_key
            for request_queue in (self._waiting, self._running)
            for a, b in pairwise(request_queue)
        )
        if waiting_with_blocks or not is_partitioned or not is_sorted:
            raise Internal(
                f"scheduler: {len(self._waiting)} waiting ({len(waiting_with_blocks)} of them have blocks), "
                f"{len(self._running)} running, {len(self._sequences)} unfinished, sorted: {is_sorted}"
            )
        if self.image_encodings is not None and not self.image_encodings.check_integrity(set(self._sequences)):
            raise Internal("scheduler: embeddings of images are held for sequences that have ended")
        self._beams.check_integrity(self._sequences)
        held_rows = [] if self.store_traffic is None else self.store_traffic.held_rows
        held_rows += [] if self.leases is None else self.leases.held_rows
        self.block_manager.check_integrity(block_holders, self._waiting, self._in_flight.plans, held_rows)
        if self.states is not None:
            self.states.check_integrity(block_holders)
        self._adapter_registry.check_integrity(
            Counter(s.adapter_digest for s in (*self._sequences.values(), *finished) if s.adapter_digest is not None),
            Counter(s.adapter_digest for s in block_holders if s.adapter_digest is not None),
        )

    def _schedule_decodes(
        self, sequences: list[Sequence], builder: StepPlanBuilder, max_decodes: int
    ) -> list[Sequence]:
        """Plan the decoding sequences among `sequences`, and return the sequences that have partial prefills.

        The most urgent sequences are planned first, so a sequence that is preempted here has no span yet.
        """
        partial_prefills = []
        for sequence in sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                break
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                partial_prefills.append(sequence)
            elif len(builder.decodes) >= max_decodes:
                continue
            elif (group := sequence.beam_group) is not None:
                # The beams of a group are adjacent in the running queue; the best beam represents the group.
                if sequence is group.sequences[0] and group.can_decode:
                    self._schedule_beams(group, builder)
            elif self._ensure_block(sequence, builder):
                builder.decodes.append(self._make_span(sequence, 1, builder))
        builder.token_budget -= len(builder.decodes)
        return partial_prefills

    def _schedule_beams(self, group: BeamGroup, builder: StepPlanBuilder) -> None:
        """Plan the next token of all beams of a group. If blocks are missing, the group may be preempted instead."""
        while not self.block_manager.append_blocks(group.sequences, builder):
            victim = self._running.least_urgent
            self._preempt(victim, builder)
            if victim.beam_group is group:
                return
        builder.decodes += [self._make_span(beam, 1, builder) for beam in group.sequences]

    def _ensure_block(self, sequence: Sequence, builder: StepPlanBuilder) -> bool:
        """Ensure that a decoding sequence has a block for its token. Return False if it was preempted instead."""
        while not self.block_manager.append_block(sequence):
            victim = self._running.least_urgent
            assert len(self._running) > 1, "the pool always has room for one sequence of max_model_len tokens"
            self._preempt(victim, builder)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, builder: StepPlanBuilder) -> None:
        """Free the blocks of a sequence and of all beams of its group.

        When the sequences resume, they reuse the blocks that were swapped out or are still cached.
        """
        group = sequence.beam_group
        # The blocks of the first beam are freed last. By then, no other beam shares the blocks of the prompt, so they
        # can be swapped out.
        beams = [sequence] if group is None else sorted(group.sequences, key=lambda beam: beam.sort_key, reverse=True)
        for beam in beams:
            if beam.status is SequenceStatus.RUNNING:
                builder.remove_decode(beam)
                if group is not None:
                    self.block_manager.cancel_copy(beam, builder)
                self.block_manager.swap_out(beam, builder)
                self._requeue(beam)
                beam.num_preemptions += 1
                self.num_preemptions += 1
        if group is not None:
            self._beams.share_prompt_blocks(group)

    def _requeue(self, sequence: Sequence) -> None:
        """Move a running sequence that has no blocks back to the waiting queue."""
        self._running.remove(sequence)
        self._release_resources(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        self._waiting.add(sequence)

    def _schedule_prefills(self, builder: StepPlanBuilder, partial_prefills: list[Sequence], now: float) -> None:
        """Spend the token budget on prompts, in order of urgency.

        These are the prompts of partial prefills and of waiting sequences that fit.
        """
        waiting = self._waiting.snapshot()
        if self._beams.num_unused_places:
            # Beams that must resume come first. Until they resume, their group makes no progress but still occupies
            # blocks.
            waiting.sort(key=lambda sequence: not sequence.resumes_beam_group)
        clients = self._waiting.num_by_client.keys() | {sequence.client for sequence in partial_prefills}
        if len(clients) > 1 and self._config.enable_chunked_prefill:
            builder.client_share = builder.token_budget // min(len(clients), MAX_SHARING_CLIENTS)
            self._spend_budget(builder, partial_prefills, waiting, now)
            builder.lift_client_share()
            planned = {span.sequence for span in builder.prefills}
            partial_prefills = [sequence for sequence in partial_prefills if sequence not in planned]
            waiting = [sequence for sequence in waiting if sequence.status is not SequenceStatus.RUNNING]
        self._spend_budget(builder, partial_prefills, waiting, now)

    def _spend_budget(
        self, builder: StepPlanBuilder, partial_prefills: list[Sequence], waiting: list[Sequence], now: float
    ) -> None:
        """Plan prompts in order of urgency, until the token budget or the share of each client is spent."""
        partial_prefills = partial_prefills[::-1]
        delayed_clients: set[str] = set()
        for sequence in waiting:
            self._continue_prefills(builder, partial_prefills, sequence.sort_key)
            if builder.is_share_spent(sequence.client) or not self._may_start_before(delayed_clients, sequence.client):
                continue
            if not self._admit(sequence, builder, now):
                if builder.token_budget == 0 or len(self._waiting.num_by_client) == 1:
                    break
                delayed_clients.add(sequence.client)
        self._continue_prefills(builder, partial_prefills)

    def _may_start_before(self, delayed_clients: set[str], client: str) -> bool:
        """Return whether sequences of `client` can start before sequences of other clients that do not fit."""
        num_running = self._running.num_by_client
        return all(num_running[client] < num_running[delayed] for delayed in delayed_clients)

    def _continue_prefills(
        self,
        builder: StepPlanBuilder,
        partial_prefills: list[Sequence],
        before_sort_key: tuple[float, ...] = (sys.maxsize,),
    ) -> None:
        """Continue partial prefills, from the end of the list, as long as their sort keys are less than
        `before_sort_key`."""
        while partial_prefills and builder.token_budget and partial_prefills[-1].sort_key < before_sort_key:
            sequence = partial_prefills.pop()
            budget = builder.budget_of(sequence.client)
            if sequence.status is SequenceStatus.RUNNING and budget and self._restore(sequence, builder):
                remaining = sequence.num_prefill_tokens - sequence.num_computed_tokens
                builder.add_prefill(self._make_span(sequence, min(remaining, budget), builder))

    def _restore(self, sequence: Sequence, builder: StepPlanBuilder) -> bool:
        """Copy as many host blocks of a running sequence as the step has room for. Return whether none is left."""
        # Without chunked prefill, the rest of the prompt must fit into this step, as `_chunk_length` has checked.
        max_blocks = builder.copy_budget if self._config.enable_chunked_prefill else len(sequence.host_blocks)
        return self.block_manager.restore(sequence, builder, max(max_blocks, 0))

    def _admit(self, sequence: Sequence, builder: StepPlanBuilder, now: float) -> bool:
        """Start a waiting sequence, or skip it. Return False if the sequences after it in the queue must wait too."""
        if builder.token_budget == 0 and builder.prefills:
            return False
        if not self._capacity.has_free_seq(sequence, builder) and not self._capacity.can_preempt(sequence):
            return False
        if parent := sequence.awaited_parent:
            # For a beam, a place among the running sequences is already reserved.
            if sequence.beam_group is not None:
                return True
            if parent.status is SequenceStatus.RUNNING or parent.id in builder.pending_forks:
                builder.pending_forks.add(sequence.id)
            return True
        if not (self._adapter_ready(sequence, now) and self._kv_ready(sequence, now) and self._images_ready(sequence)):
            return True
        if (prefix := self._usable_prefix(sequence, builder)) is None:
            return False
        length = self._chunk_length(sequence.num_prefill_tokens - prefix.num_tokens, builder.budget_of(sequence.client))
        if length == 0 or (self.states is not None and not self.states.pool.num_available):
            return False
        self._waiting.remove(sequence)
        is_first_run = sequence.status is not SequenceStatus.PREEMPTED
        sequence.status = SequenceStatus.RUNNING
        if sequence.adapter_digest is not None:
            self._adapter_registry.on_start(sequence.adapter_digest)
        self._running.add(sequence)
        self.block_manager.allocate(sequence, prefix, builder)
        if self.states is not None:
            self.states.start(sequence, prefix, builder)
        if is_first_run:
            self._clock.advance(sequence, len(self._clients))
            builder.started.append(StartedSequence(sequence.id, now - sequence.arrival_time, sequence.adapter_wait_s))
            self.prefix_cache.record_hit(sequence, prefix)
        if self._restore(sequence, builder):
            builder.add_prefill(self._make_span(sequence, length, builder))
        return True

    def _adapter_ready(self, sequence: Sequence, now: float) -> bool:
        if sequence.adapter_digest is None:
            return True
        was_preempted = sequence.status is SequenceStatus.PREEMPTED
        can_run = self._adapter_registry.can_run(sequence.adapter_digest, now, is_new=not was_preempted)
        if not was_preempted:
            sequence.status = SequenceStatus.WAITING if can_run else SequenceStatus.WAITING_FOR_ADAPTER
            if can_run and sequence.adapter_wait_start is not None:
                sequence.adapter_wait_s += now - sequence.adapter_wait_start
                sequence.adapter_wait_start = None
            elif not can_run and sequence.adapter_wait_start is None:
                sequence.adapter_wait_start = now
        return can_run

    def _kv_ready(self, sequence: Sequence, now: float) -> bool:
        """Return whether a sequence need not wait for a store that reads its KV blocks into host memory."""
        if self.store_traffic is None or sequence.status is SequenceStatus.PREEMPTED:
            return True
        is_ready = self.store_traffic.is_ready(sequence, lambda: self.prefix_cache.missing_blocks(sequence), now)
        sequence.status = SequenceStatus.WAITING if is_ready else SequenceStatus.WAITING_FOR_KV
        return is_ready

    def _images_ready(self, sequence: Sequence) -> bool:
        """Return whether a sequence need not wait for the embeddings of its images."""
        if self.image_encodings is None or not sequence.images:
            return True
        is_ready = self.image_encodings.are_ready(sequence, self.prefix_cache.match(sequence).num_tokens)
        if sequence.status is not SequenceStatus.PREEMPTED:
            sequence.status = SequenceStatus.WAITING if is_ready else SequenceStatus.WAITING_FOR_IMAGES
        return is_ready

    def _release_images(self, sequence: Sequence) -> None:
        if self.image_encodings is not None:
            self.image_encodings.release(sequence.id, sequence.images)

    def _chunk_length(self, remaining: int, budget: int) -> int:
        """Return how many of the `remaining` prompt tokens to compute in this step."""
        if self._config.enable_chunked_prefill or remaining <= budget:
            return min(remaining, budget)
        # With its output, a preempted sequence can be too long for one step. It can then resume only in chunks.
        return budget if remaining > self._config.max_num_batched_tokens else 0

    def _usable_prefix(self, sequence: Sequence, builder: StepPlanBuilder) -> PrefixHit | None:
        """Return the cached prefix from which a sequence can start. Return None if there is not enough room for the
        rest of the sequence."""
        prefix = self.prefix_cache.match(sequence)
        # If this step itself fills a block by a copy, the block has no contents yet and cannot be copied.
        source_unwritten = any(copy.destination in prefix.copy_sources for copy in builder.copies)
        if not source_unwritten and self._ensure_capacity(sequence, prefix, builder):
            return prefix
        if not prefix.copy_sources:
            return None
        # Without the copied block the sequence needs one block less. So a sequence that runs alone always fits.
        prefix = self.prefix_cache.full_blocks_only(prefix)
        return prefix if self._ensure_capacity(sequence, prefix, builder) else None

    def _ensure_capacity(self, sequence: Sequence, prefix: PrefixHit, builder: StepPlanBuilder) -> bool:
        """Return whether a sequence can start; preempt less urgent sequences if that is necessary and sufficient."""
        victims = self._capacity.preemption_victims(sequence, prefix, builder)
        if victims is None:
            return False
        if self._planning_async and (victims or (self._config.uses_async_scheduling and sequence.requires_host_tokens)):
            self._async_deferred = True
            return False
        # The blocks of the victims are swapped out, which must not evict what the sequence restores.
        self.block_manager.hold_host_blocks(prefix)
        for victim in victims:
            # When a beam is preempted, its whole group is preempted, so a victim may no longer be running.
            if victim.status is SequenceStatus.RUNNING:
                self._preempt(victim, builder)
        self.block_manager.release_host_blocks(prefix)
        return True

    def _make_span(self, sequence: Sequence, length: int, builder: StepPlanBuilder) -> ScheduledSpan:
        """Return the next span of a sequence. It has at most `length` tokens, unless an image has more. It is empty if
        the step has no room for the image.
        """
        start = sequence.num_computed_tokens
        if self.states is not None:
            self.states.prepare_span(sequence, builder)
        end = sequence.chunk_end(start, start + length)
        if end == start:
            # The share of the client ends inside an image. The most urgent sequence gets the tokens of all clients.
            last = min(start + builder.token_budget, sequence.num_prefill_tokens)
            end = sequence.chunk_end(start, last)
        length = end - start
        adapter_slot = (
            None if sequence.adapter_digest is None else self._adapter_registry.get_slot(sequence.adapter_digest)
        )
        return ScheduledSpan(sequence, start, length, adapter_slot)

    def _append_tokens(self, sequence: Sequence, span_output: SpanOutput) -> SpanOutput:
        """Append tokens to the sequence, and return those that were appended. Tokens after the one that finishes the
        sequence are dropped."""
        output = sequence.output_token_ids
        for count, token in enumerate(span_output.token_ids, 1):
            if sequence.grammar is not None and not sequence.grammar.accept_token(token):
                self._finish_sequence(sequence, FinishReason.ERROR)
                return SpanOutput([])
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

    def _finish_beams(self, group: BeamGroup, reason: FinishReason) -> None:
        """Finish all beams of a search."""
        self._beams.remove(group)
        for beam in group.sequences:
            self._finish_sequence(beam, reason)

    def _finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a sequence. The sequence's resources are released now if no step is in flight, otherwise later."""
        del self._sequences[sequence.id]
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
        if self.draft_planner is not None and sequence.beam_group is None:
            self.draft_planner.finish(sequence)
        self._release_images(sequence)
        (self._running if was_running else self._waiting).remove(sequence)
        self.block_manager.drop_swapped(sequence)
        if self.store_traffic is not None:
            self.store_traffic.on_finished(sequence)
        if not (self._running.num_by_client[sequence.client] or self._waiting.num_by_client[sequence.client]):
            self._clock.forget(sequence.client)
        if was_running:
            if self._in_flight:
                self._in_flight.finished_sequences.append(sequence)
                return
            self._release_resources(sequence)
        self._drop_adapter_ref(sequence)

    def _release_resources(self, sequence: Sequence) -> None:
        """Release the blocks and the adapter slot of a running sequence that no step in flight contains."""
        self.block_manager.free(sequence)
        if self.states is not None:
            self.states.free(sequence)
        if sequence.adapter_digest is not None:
            self._adapter_registry.on_stop(sequence.adapter_digest)

    def _drop_adapter_ref(self, sequence: Sequence) -> None:
        if sequence.adapter_digest is not None:
            self._adapter_registry.remove_sequence(sequence.adapter_digest)
        self.waiting_for_adapters = False

    def _complete_step(self, plan: StepPlan, step_failed: bool) -> None:
        """Remove the earliest step in flight."""
        self._in_flight.complete(plan)
        self.num_steps += 1
        self.num_step_tokens += sum(span.length for span in plan.spans)
        self.block_manager.complete_step(plan, step_failed)
        if self.states is not None:
            self.states.complete_step(plan, step_failed)

    def _free_finished(self) -> None:
        """Release the resources of finished sequences that no step in flight contains."""
        for sequence in self._in_flight.pop_released():
            self._release_resources(sequence)
            self._drop_adapter_ref(sequence)
