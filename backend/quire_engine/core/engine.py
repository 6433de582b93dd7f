# SPDX-License-Identifier: Apache-2.0
"""The engine: a model, its scheduler and its model runner. Takes requests and returns tokens, one step at a time.

The engine does not own threads or sockets. The engine loop of the core process and the offline `LLM` call it. This
module imports torch only when `from_config` is called.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from quire_engine.core.input_processor import InputProcessor
from quire_engine.core.step_executor import StepExecutor, error_result
from quire_engine.kv_cache.block_events import BlockEvent, BlockEventLog
from quire_engine.kv_cache.block_hash import LAYOUT_VERSION, BlockHasher, group_of
from quire_engine.kv_cache.block_pool import BlockPool
from quire_engine.kv_cache.host_states import HostStates
from quire_engine.kv_cache.layout_choice import (
    check_attention,
    check_kv_offloading,
    choose_layout,
)
from quire_engine.kv_cache.state_pool import StatePool
from quire_engine.kv_transfer.host_leases import HostLeases, StateLeases
from quire_engine.kv_transfer.store import HostRows, KVStore
from quire_engine.lora.adapter_source import AdapterSource, weighted_folders
from quire_engine.lora.registry import AdapterRegistry
from quire_engine.scheduling.adapter_usage import AdapterUsage
from quire_engine.scheduling.image_encodings import ImageEncodings
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.speculation.draft_policy import DraftCounts
from quire_engine.step.plan import SlotLoad
from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.weights.hub import resolve_model
from quire_engine.worker.interface import ModelRunner
from quire_spec.constants import AdapterDigest
from quire_spec.documents.adapter_digest import adapter_digest
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.kv_transfer_config import KVTransferConfig, PeerAddress
from quire_spec.errors import Code, ConfigError, Internal, InvalidArgument, QuireError
from quire_spec.model.attention.state_config import num_state_rows
from quire_spec.model.capabilities import DTYPE_BYTES
from quire_spec.model.memory_sizing import lora_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol import kv_wire
from quire_spec.protocol.kv_wire import RowLayout
from quire_spec.protocol.messages import (
    AdapterEvent,
    AdapterResidency,
    BlockChanges,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
)
from quire_spec.protocol.results import SharedRows, UncachedPrompt

if TYPE_CHECKING:
    from quire_engine.kv_transfer.peer_store import Peers

MAX_LIVE_ADAPTERS = 256
"""Maximum number of adapters in a snapshot for the live page. The snapshot lists adapters with sequences first, then
adapters in slots, and then adapters in host memory."""

_STORE_WAIT_S = 0.05
_UNREAD = (
    Code.UNAVAILABLE,
    "kv_transfer_params: the KV blocks of the prompt cannot be read from the pod that computed it; try again",
)

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests with one model. Not thread-safe, except `read_adapter`.

    Raises:
        ConfigError: max_model_len exceeds the model's limit, or a sequence of max_model_len tokens does not fit in the
            KV cache.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        runner: ModelRunner,
        memory: MeasuredMemory,
        clock: Callable[[], float] = time.monotonic,
        store: KVStore | None = None,
    ) -> None:
        """Create an engine. `store` replaces the folder of `kv_offloading_folder`."""
        rows, state_store = runner.host_rows, None
        if store is None and config.kv_offloading_folder is not None:
            if rows is None:
                raise _too_few_rows(config)
            store = _open_store(config, rows, runner.host_state_rows, runner.swap_costs.num_host_blocks)
            if runner.host_state_rows is not None:
                state_store = _open_store(config, runner.host_state_rows, rows, 0)
        self.config = config
        self.shape: ModelConfig = checkpoint.shape
        self.memory = memory
        self.model_folder = checkpoint.folder
        self.max_model_len = check_max_model_len(config, checkpoint.shape)
        self.eos_token_ids = checkpoint.eos_token_ids
        self._runner = runner
        self._clock = clock
        self.input_processor = InputProcessor(config, checkpoint, self.max_model_len, clock)
        self._block_pool = BlockPool(memory.num_blocks)
        self._adapter_registry = _create_adapter_registry(config, checkpoint.shape, memory)
        kv_dtype = memory.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        layout = choose_layout(config, checkpoint.shape)
        self.block_hasher = BlockHasher(
            checkpoint.fingerprint,
            kv_dtype,
            config.block_size,
            memory.dtype,
            config.quantization,
            checkpoint.shape.long_rope_threshold,
            layout.groups if layout.num_groups > 1 else (),
        )
        self._peers: Peers | None = None
        self.row_layout: RowLayout | None = None
        """What the bytes of a row of host memory mean; None if no rows are shared with other pods."""
        if config.kv_transfer is not None:
            if rows is None:
                raise _too_few_rows(config)
            self.row_layout = _row_layout(config, self.block_hasher, rows, runner.host_state_rows)
            self._peers = _open_peers(config.kv_transfer, rows, self.row_layout, runner.host_state_rows)
            if rows.nodes is not None:
                rows.nodes.share(self.row_layout, runner.swap_costs.num_host_blocks)
        self._scheduler = Scheduler(
            config,
            self._block_pool,
            self._adapter_registry,
            self.block_hasher,
            self.max_model_len,
            runner.swap_costs,
            layout,
            store,
            _create_state_pool(config, checkpoint.shape),
            None if self._peers is None else self._peers.find,
            state_store,
        )
        self.leases: HostLeases | None = None
        """The leases of other pods on rows of host memory; None if no rows are shared with them."""
        if config.kv_transfer is not None and rows is not None:
            host_cache, state_leases = self._scheduler.host_cache, None
            if self._scheduler.states is not None and (state_rows := runner.host_state_rows) is not None:
                state_leases = StateLeases(
                    self._scheduler.states.host,
                    self._scheduler.states.pool,
                    self._scheduler.is_state_written,
                    lambda copies: state_rows.copy(copies, []),
                )
            self.leases = HostLeases(host_cache, self._block_pool, lambda copies: rows.copy(copies, []), state_leases)
            self._scheduler.leases = self.leases
        self._start_slot_copy: Callable[[SlotLoad, Callable[[], None]], None] = self._copy_slot_sync
        """Starts the copy of an adapter into a slot; see `delegate_slot_copies`."""
        self._slot_copy_started_at: dict[SlotLoad, float] = {}
        """Time at which each copy into a slot was requested, on the engine's clock."""
        self._adapter_events: list[AdapterEvent] = []
        # Results of sequences that failed outside a step. The next step() returns them.
        self._failed_results: list[SequenceDelta] = []
        self._step_executor = StepExecutor(
            self._scheduler,
            runner,
            config.uses_async_scheduling,
            clock,
            self._load_slots,
            config.max_steps_in_flight,
        )

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, progress: bool = False, on_lost: Callable[[str], None] | None = None
    ) -> Self:
        """Find the model, load it, and allocate the device's memory.

        Args:
            config: engine configuration. With several tensor-parallel ranks or pipeline stages, worker processes share
                the model. If one worker ends, all workers end, and each step raises RunnerLost.
            progress: show progress bars on stderr.
            on_lost: called with the reason when a worker process ends unexpectedly. The call runs in a thread of its
                own.

        Raises:
            ConfigError: the model cannot be found or served, or does not fit; the message contains the setting to
                change.
        """
        folder = resolve_model(config.model, config.revision, progress, config.download_dir)
        checkpoint = Checkpoint.load(folder, config.model_impl, full_digest=config.shares_blocks)
        check_max_model_len(config, checkpoint.shape)
        config = config.for_model(checkpoint.shape)
        check_kv_offloading(config, checkpoint.shape)
        check_attention(config, checkpoint.shape)
        # Imported here, so that importing the engine does not import torch.
        from quire_engine.executor.runner_factory import create_runner

        runner = create_runner(config, checkpoint.shape, checkpoint.folder, progress=progress, on_lost=on_lost)
        engine = cls(config, checkpoint, runner, runner.memory)
        effective = config.to_json() | {"max_model_len": engine.max_model_len, "dtype": engine.memory.dtype}
        logger.info("engine config %s", " ".join(f"{name}={value!r}" for name, value in effective.items()))
        return engine

    @property
    def has_work(self) -> bool:
        """True while a sequence is unfinished, a result is not reported yet, or a step is in flight."""
        return self._scheduler.has_work or bool(self._failed_results)

    @property
    def has_runnable(self) -> bool:
        """False if step() has nothing to do until another method is called, because all sequences wait for adapters."""
        return self._scheduler.has_runnable or bool(self._failed_results)

    def add(self, request: SequenceRequest) -> None:
        """Queue a request.

        Raises:
            InvalidArgument: a parameter or token id is invalid, or the prompt is empty or too long.
            NotFound: the adapter is not loaded.
        """
        sequence = self.input_processor.process(request)
        self._scheduler.add(sequence)
        if request.returns_prompt_keys:
            sequence.prompt_keys = self._scheduler.prefix_cache.prompt_keys(sequence)
        if request.kv_source_keys is not None and self._peers is not None and sequence.kv_source:
            keys = self._scheduler.prefix_cache.prompt_keys(sequence)
            if reason := keys.difference(request.kv_source_keys):
                if sequence.parent_id is None:
                    self._peers.count_difference(sequence.kv_source, reason, keys, request.kv_source_keys)
                self._scheduler.drop_kv_source(sequence)

    def uncached_prompt(self, request: SequenceRequest) -> UncachedPrompt:
        """Return how much of the prompt of a request would have to be computed. The request is not run."""
        num_tokens = self._scheduler.num_uncached_tokens(self.input_processor.process(request))
        return UncachedPrompt(num_tokens, num_tokens * self._runner.swap_costs.seconds_per_token)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """End sequences without returning a result for them; unknown ids are ignored."""
        sequence_ids = set(sequence_ids)
        self._scheduler.abort(sequence_ids)
        self._failed_results = [result for result in self._failed_results if result.id not in sequence_ids]
        self._discard_evicted_copies()

    def step(self) -> StepResult:
        """Run at most one step. With async scheduling or pipeline stages, launch the next step before waiting for this
        one.

        Returns:
            New tokens, and the sequences that failed since the last call.

        Raises:
            RunnerLost: no step can run any more; create a new engine.
        """
        results = self._step_executor.step()
        results += [error_result(sequence, *_UNREAD) for sequence in self._scheduler.fail_unread()]
        traffic = self._scheduler.store_traffic
        if traffic is not None and traffic.wake is None and not self._scheduler.has_runnable:
            traffic.wait(_STORE_WAIT_S)
        self._discard_evicted_copies()
        results += self._failed_results
        self._failed_results = []
        return StepResult(results, self._step_executor.pop_started(), self.stats(), self.pop_adapter_events())

    def lease_rows(self, lease: bytes, keys: list[bytes]) -> list[int | None]:
        """Pin the rows of host memory of blocks for another pod; see HostLeases. `synchronize_rows` waits for the
        copies of blocks to their rows."""
        assert self.leases is not None
        return list(self.leases.lease(lease, keys, self._clock()))

    def lease_state(self, lease: bytes, keys: list[bytes], first: int) -> tuple[int, int] | None:
        """Pin the row of a state for another pod; see HostLeases."""
        assert self.leases is not None
        return self.leases.lease_state(lease, keys, first, self._clock())

    def extend_leases(self, leases: list[bytes]) -> list[bool]:
        """Prolong leases, and return which of them exist."""
        assert self.leases is not None
        return [self.leases.extend(lease, self._clock()) for lease in leases]

    def expire_leases(self) -> int:
        """End the leases whose time is over; return how many rows the others pin."""
        assert self.leases is not None
        self.leases.expire(self._clock())
        return self.leases.num_rows

    def shared_rows(self) -> SharedRows:
        """Return where another process of this user finds the rows of host memory."""
        assert self.row_layout is not None and self._runner.host_rows is not None
        file = self._runner.host_rows.file
        assert file is not None
        layout, num_rows = self.row_layout, self._scheduler.host_cache.pool.num_blocks
        generation, addresses = 0, list[str]()
        if (nodes := self._runner.host_rows.nodes) is not None:
            assert self.config.kv_transfer is not None
            port = self.config.kv_transfer.port
            generation, addresses = nodes.generation, [str(PeerAddress(host, port)) for host in nodes.addresses]
        shared = SharedRows(os.getpid(), file, num_rows, layout, layout.row_bytes, generation, addresses)
        if (states := self._runner.host_state_rows) is None:
            return shared
        num_states, state_bytes = self._runner.swap_costs.num_host_states, len(states.buffers(0)[0])
        return msgspec.structs.replace(
            shared, states_start=states.start, num_states=num_states, state_bytes=state_bytes
        )

    def synchronize_rows(self) -> None:
        """Wait until the copies to host memory that were started before are complete. Any thread can call this."""
        for rows in (self._runner.host_rows, self._runner.host_state_rows):
            if rows is not None:
                rows.synchronize()

    def pop_adapter_events(self) -> list[AdapterEvent]:
        """Return the adapter events that occurred since the last call."""
        adapter_events, self._adapter_events = self._adapter_events, []
        return adapter_events + [
            AdapterEvent("evicted", digest) for digest in self._adapter_registry.slot_table.pop_evicted()
        ]

    def observe_blocks(self) -> None:
        """Record from now on which blocks are cached and evicted; see `pop_block_events`."""
        self._block_pool.event_log = self._scheduler.host_cache.pool.event_log = BlockEventLog()

    def pop_block_events(self) -> list[BlockEvent]:
        """Return the events of cached blocks since the last call, in order. After `observe_blocks`, call it after each
        step."""
        event_log = self._block_pool.event_log
        return [] if event_log is None else event_log.pop()

    def cached_blocks(self) -> BlockChanges:
        """Return all cached blocks of group 0, as the changes of a cache that was empty before."""
        return BlockChanges(
            [block_hash for block_hash in self._block_pool.cached_hashes() if group_of(block_hash) == 0]
        )

    def read_adapter(self, source: AdapterSource, digest: AdapterDigest | None = None) -> object:
        """Read the folder of an adapter, or those of a sum, for `add_adapter`. Reading is slow; any thread can call
        this method.

        If `digest` is given, the content of the folder must have this digest. Pass it if the folder can change.

        Raises:
            InvalidArgument: the engine has no adapter slots, the folder contains no adapter that this model can use,
                its tokenizer adds tokens, or its content has another digest.
        """
        self._check_lora_enabled(source)
        for folder in weighted_folders(source):
            self.input_processor.check_adapter_tokens(folder.path)
        packed_adapter = self._runner.read_adapter(source)
        if digest is not None and isinstance(source, Path):
            _check_digest(source, digest)
        return packed_adapter

    def add_adapter(
        self,
        digest: AdapterDigest,
        source: AdapterSource,
        packed_adapter: object,
        slot_pinned: bool | None = None,
        read_s: float = 0.0,
    ) -> None:
        """Register an adapter that `read_adapter` has read. Its key is the digest of its content.

        Args:
            digest: content digest of the adapter.
            source: folder of the adapter, or the folders of a sum that `pop_adapter_reads` returned.
            packed_adapter: result of `read_adapter`.
            slot_pinned: whether the adapter stays in a slot. With True or False, the adapter is registered even if it
                is being removed. None is for reads that `pop_adapter_reads` requested: if the adapter is already
                registered, its registration does not change.
            read_s: seconds that reading took.

        Raises:
            InvalidArgument: the engine has no adapter slots, or all of them are pinned already.
        """
        self._check_lora_enabled(digest)
        keep_copy = self._adapter_registry.add(digest, source, slot_pinned, self._runner.adapter_info(packed_adapter))
        self._discard_evicted_copies()
        if keep_copy:
            self._runner.store_adapter(digest, packed_adapter)
            self._adapter_events.append(AdapterEvent("host", digest, read_s))
        self._scheduler.on_resource_ready()

    def set_adapter_path(self, digest: AdapterDigest, path: Path) -> None:
        """Change the folder from which a registered adapter is read again."""
        self._adapter_registry.set_path(digest, path)

    def remove_adapter(self, digest: AdapterDigest) -> None:
        """Reject new sequences of an adapter, and unload the adapter when its last sequence has ended.

        Unknown digests are ignored.
        """
        self._adapter_registry.remove(digest)
        self._discard_evicted_copies()

    def pop_adapter_reads(self) -> list[tuple[AdapterDigest, AdapterSource]]:
        """Return the adapters that must be read again, because sequences wait for them. For each of them, the caller
        must call add_adapter or fail_adapter."""
        reads = self._adapter_registry.pop_reads()
        self._discard_evicted_copies()
        return reads

    def delegate_slot_copies(self, start_slot_copy: Callable[[SlotLoad, Callable[[], None]], None]) -> None:
        """Let the owner of the engine copy adapters into slots, in another thread. Without this call, each step copies
        in its own thread.

        `start_slot_copy` is called with a SlotLoad and with the function that copies the adapter. The owner must run
        this function, and then call `on_slot_loaded`.
        """
        self._start_slot_copy = start_slot_copy

    def delegate_store_waits(self, wake: Callable[[], None]) -> None:
        """Call `wake`, in any thread, when sequences may be able to run because a store has read their KV blocks. The
        owner must call `on_store_ready` then, and after `store_wait_s`. Without this call, `step` waits for the
        store."""
        if self._scheduler.store_traffic is not None:
            self._scheduler.store_traffic.wake = wake

    @property
    def store_wait_s(self) -> float | None:
        """Seconds after which a sequence stops waiting for a store; None if no sequence waits."""
        traffic = self._scheduler.store_traffic
        if traffic is None or not self._scheduler.num_waiting or traffic.next_deadline == math.inf:
            return None
        return max(0.0, traffic.next_deadline - self._clock())

    def on_store_ready(self) -> None:
        """Called when a store has read blocks or is late."""
        self._scheduler.on_resource_ready()

    def delegate_image_encoding(self, start: Callable[[Callable[[], object]], None]) -> None:
        """Let the owner of the engine encode images in another thread, if the device allows it. Without this call, or
        if the device does not allow it, steps encode images.

        `start` is called with a function that encodes an image. The owner must run this function, and then call
        `on_image_encoded` with its result, or `fail_image`.
        """
        encoder = self._runner.background_image_encoder
        if encoder is not None:
            self._scheduler.image_encodings = ImageEncodings(encoder, start)

    def on_image_encoded(self, embeddings: object) -> None:
        """Called with the result of a function that encodes an image."""
        assert self._scheduler.image_encodings is not None
        self._scheduler.image_encodings.on_encoded(embeddings)
        self._scheduler.on_resource_ready()

    def fail_image(self, error: QuireError) -> None:
        """Called when an image could not be encoded. The sequences that wait for it fail with this error."""
        assert self._scheduler.image_encodings is not None
        sequences = self._scheduler.fail_images(self._scheduler.image_encodings.on_failed())
        self._failed_results += [error_result(sequence, error.code, str(error)) for sequence in sequences]
        self._scheduler.on_resource_ready()

    def on_slot_loaded(self, slot_load: SlotLoad, error: QuireError | None = None) -> None:
        """Called when an adapter was copied into a slot. If `error` is given, the waiting sequences fail with this
        error."""
        self._adapter_registry.slot_table.on_loaded(slot_load, error is None)
        started_at = self._slot_copy_started_at.pop(slot_load)
        if error is None:
            self._adapter_events.append(AdapterEvent("slot", slot_load.adapter_digest, self._clock() - started_at))
        if error is not None:
            self._fail_waiting_sequences(slot_load.adapter_digest, error)
        self._scheduler.on_resource_ready()

    def fail_adapter(self, digest: AdapterDigest, error: QuireError) -> None:
        """Called when an adapter could not be read again. The sequences that wait for the adapter fail with
        `error`.
        """
        if self._adapter_registry.on_read_failed(digest):
            self._fail_waiting_sequences(digest, error)

    def read_pending_adapters(self, *, verify_digests: bool = False) -> None:
        """Read the adapters that `pop_adapter_reads` returns, in the calling thread.

        This method is for owners of an engine that have no other threads. If `verify_digests` is set, the sequences of
        an adapter fail if the content of its folder has changed.
        """
        reads = self.pop_adapter_reads()
        try:
            while reads:
                digest, path = reads[0]
                try:
                    packed_adapter = self.read_adapter(path, digest if verify_digests else None)
                except QuireError as error:
                    self.fail_adapter(digest, error)
                else:
                    self.add_adapter(digest, path, packed_adapter)
                del reads[0]
        finally:
            # Some reads remain only after Control-C, or if memory ran out. The next sequence of such an adapter
            # requests the read again.
            for digest, _ in reads:
                self.fail_adapter(digest, Internal(f"adapter {digest!r}: reading was interrupted"))

    def adapter_states(self) -> dict[AdapterDigest, str]:
        """Return the state of each registered adapter by digest: slot, host or disk."""
        return self._adapter_registry.adapter_states()

    def adapter_residencies(self) -> list[AdapterResidency]:
        """Return where each registered adapter is."""
        return self._adapter_registry.residencies()

    def pop_adapter_changes(self) -> list[AdapterResidency]:
        """Return the adapters that were registered, moved, pinned or removed since the last call."""
        return self._adapter_registry.pop_changes()

    def stats(self) -> SchedulerStats:
        """Return the current state of the scheduler."""
        scheduler, block_manager = self._scheduler, self._scheduler.block_manager
        host_cache, prefix_cache, traffic = scheduler.host_cache, scheduler.prefix_cache, scheduler.store_traffic
        host_block_bytes = self.memory.kv_bytes // max(1, self.memory.num_blocks)
        states = None if scheduler.states is None else scheduler.states.pool
        host_states = HostStates() if scheduler.states is None else scheduler.states.host
        state_traffic = None if traffic is None else traffic.states
        planner = scheduler.draft_planner
        drafts = DraftCounts() if planner is None else planner.counts
        return SchedulerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=self._block_pool.num_blocks,
            num_used_blocks=self._block_pool.num_used,
            num_states=0 if states is None else states.num_rows,
            num_used_states=0 if states is None else states.num_rows - states.num_available,
            num_state_snapshots=0 if states is None else states.num_snapshots,
            num_host_states=host_states.num_snapshots,
            num_stored_host_states=host_states.num_stored,
            num_loaded_host_states=host_states.num_loaded,
            num_folder_read_states=0 if state_traffic is None else state_traffic.num_read,
            num_folder_written_states=0 if state_traffic is None else state_traffic.num_written,
            prefix_cache_queries=scheduler.prefix_cache.num_queries,
            prefix_cache_hits=scheduler.prefix_cache.num_hits,
            num_preemptions=scheduler.num_preemptions,
            num_block_copies=block_manager.num_block_copies,
            num_swapped=scheduler.num_swapped,
            num_host_blocks=block_manager.num_host_blocks,
            num_used_host_blocks=block_manager.num_used_host_blocks,
            num_swapped_out_blocks=block_manager.num_swapped_out_blocks,
            num_swapped_in_blocks=block_manager.num_swapped_in_blocks,
            num_cached_host_blocks=host_cache.pool.num_cached,
            kv_offload_store_bytes=host_cache.num_stored_blocks * host_block_bytes,
            kv_offload_load_bytes=host_cache.num_loaded_blocks * host_block_bytes,
            num_folder_read_blocks=0 if traffic is None else traffic.num_read_blocks,
            num_folder_written_blocks=0 if traffic is None else traffic.num_written_blocks,
            folder_errors={} if traffic is None else dict(traffic.errors),
            num_peer_requested_blocks=0 if self._peers is None else self._peers.num_requested_blocks,
            num_peer_read_blocks=0 if traffic is None else traffic.num_peer_read_blocks,
            num_peer_read_states=0 if state_traffic is None else state_traffic.num_peer_read,
            peer_errors={} if self._peers is None else self._peers.errors,
            num_leased_rows=0 if self.leases is None else self.leases.num_rows,
            num_refused_leases=0 if self.leases is None else self.leases.num_refused,
            host_cache_queries=prefix_cache.num_host_queries if host_cache.is_caching else 0,
            host_cache_hits=prefix_cache.num_host_hits,
            num_steps=scheduler.num_steps,
            num_step_tokens=scheduler.num_step_tokens,
            num_adapter_evictions=self._adapter_registry.slot_table.num_evictions,
            num_host_adapters=self._adapter_registry.num_host,
            host_adapter_bytes=self._adapter_registry.host_bytes,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_draft_tokens=drafts.num_accepted_tokens,
            accepted_draft_tokens_per_position=list(drafts.accepted_per_position),
        )

    def live_snapshot(self) -> dict[str, Any]:
        """Return the state that the live page shows. The time that this takes grows with the number of sequences, but
        not with the number of KV blocks.

        `adapters` contains [digest, state, running sequences, waiting sequences, KV blocks] for at most
        MAX_LIVE_ADAPTERS adapters; the digest of the base model is None. `slots` contains the digests of the adapters
        in slots, in the order of the slots.
        """
        usage, states = self._scheduler.usage_by_adapter(), self._adapter_registry.adapter_states()
        order = {"slot": 0, "host": 1}
        idle = [digest for digest in states if digest not in usage]
        idle.sort(key=lambda digest: (order.get(states[digest], 2), digest))
        digests: list[AdapterDigest | None] = [None, *(digest for digest in usage if digest is not None), *idle]
        no_usage = AdapterUsage()
        rows = [
            [digest, "" if digest is None else states.get(digest, ""), u.num_running, u.num_waiting, u.num_blocks]
            for digest in digests[:MAX_LIVE_ADAPTERS]
            for u in (usage.get(digest, no_usage),)
        ]
        return {
            "stats": msgspec.structs.asdict(self.stats()),
            "slots": self._adapter_registry.slot_table.adapters_in_slots(),
            "adapters": rows,
            "num_adapters": len(states),
        }

    def check_integrity(self) -> None:
        """Check that the states of sequences, blocks and adapters agree.

        If they contradict each other, raise Internal with the counts.
        """
        self._scheduler.check_integrity()

    def _load_slots(self) -> bool:
        """Start copies of adapters into slots; return whether this allows further sequences to run."""
        slot_loads = self._adapter_registry.slot_table.pop_loads()
        self._slot_copy_started_at |= dict.fromkeys(slot_loads, self._clock())
        remaining = iter(slot_loads)
        try:
            for slot_load in remaining:
                self._start_slot_copy(slot_load, self._runner.load_adapter_slot(slot_load))
        finally:
            # Loads remain only after Control-C.
            for slot_load in remaining:
                self.on_slot_loaded(slot_load, slot_copy_error(slot_load, "interrupted"))
        return bool(slot_loads) and not self._scheduler.waiting_for_adapters

    def _copy_slot_sync(self, slot_load: SlotLoad, copy: Callable[[], None]) -> None:
        failure: QuireError | None = slot_copy_error(slot_load, "interrupted")
        try:
            copy()
            failure = None
        except Exception as error:  # a failed copy ends only the sequences of this adapter, not the engine
            failure = slot_copy_error(slot_load, f"{type(error).__name__}: {error}")
        finally:
            self.on_slot_loaded(slot_load, failure)

    def _fail_waiting_sequences(self, digest: AdapterDigest, error: QuireError) -> None:
        sequences = self._scheduler.fail_adapter(digest)
        self._failed_results += [error_result(sequence, error.code, str(error)) for sequence in sequences]
        self._discard_evicted_copies()

    def _check_lora_enabled(self, subject: object) -> None:
        if not self.config.enable_lora:
            raise InvalidArgument(f"adapter {str(subject)!r}: adapters are disabled; set enable_lora")

    def _discard_evicted_copies(self) -> None:
        for digest in self._adapter_registry.pop_evicted_copies():
            self._runner.discard_adapter(digest)


def _create_state_pool(config: EngineConfig, shape: ModelConfig) -> StatePool | None:
    if shape.states is None:
        return None
    return StatePool(num_state_rows(config.max_num_seqs, config.enable_prefix_caching))


def _create_adapter_registry(config: EngineConfig, shape: ModelConfig, memory: MeasuredMemory) -> AdapterRegistry:
    """Return an empty registry.

    Raises:
        ConfigError: cpu_lora_memory_bytes is less than the memory of all slots.
    """
    num_pages, max_host_bytes = config.num_lora_pages(shape), config.cpu_lora_memory_bytes
    min_host_bytes = lora_bytes(shape, num_pages, DTYPE_BYTES[memory.dtype], config.lora_experts)
    if max_host_bytes is None and config.max_loaded_lora_ranks is not None:
        max_host_bytes = -(-config.max_host_loras * min_host_bytes // config.max_loras)
    if max_host_bytes is not None and max_host_bytes < min_host_bytes:
        raise ConfigError(
            f"cpu_lora_memory_bytes: {max_host_bytes} is less than {min_host_bytes}. Host memory must have room for "
            f"the adapters in slots, whose LoRA ranks can add up to {num_pages}; raise cpu_lora_memory_bytes, or lower "
            "max_loaded_lora_ranks, max_loras or max_lora_rank"
        )
    return AdapterRegistry(config.max_loras, config.max_host_loras, max_host_bytes, config.max_lora_rank, num_pages)


def _check_digest(path: Path, digest: AdapterDigest) -> None:
    try:
        current_digest = adapter_digest(path)
    except OSError as error:
        raise InvalidArgument(f"adapter {str(path)!r} cannot be read: {error}") from error
    if current_digest != digest:
        raise InvalidArgument(
            f"adapter {str(path)!r}: its files changed while requests used them; call again, and write new files into "
            "another folder"
        )


def slot_copy_error(slot_load: SlotLoad, reason: str) -> Internal:
    """Return the error for the sequences of an adapter that could not be copied into a slot."""
    return Internal(f"adapter {slot_load.adapter_digest!r}: copying it into a slot failed: {reason}")


def check_max_model_len(config: EngineConfig, shape: ModelConfig) -> int:
    """Return the maximum number of prompt and output tokens of a sequence.

    Raises:
        ConfigError: max_model_len exceeds the limit of the model.
    """
    limit = shape.max_length
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} exceeds the model's limit {limit} ({shape.max_length_origin})"
        )
    return config.max_model_len or limit


def _open_store(config: EngineConfig, rows: HostRows, other_rows: HostRows | None, num_rows: int) -> KVStore:
    """Open the folder of `kv_offloading_folder` for KV blocks or states. `other_rows` are those of the other kind, if
    the folder holds both. `num_rows` is the number of rows that other nodes have, too.

    Raises:
        ConfigError: the folder cannot be used.
        Unavailable: another node cannot use its folder.
    """
    # Imported here, because most engines have no store.
    from quire_engine.kv_transfer.folder_store import FolderStore, row_bytes
    from quire_engine.kv_transfer.group_folder import GroupFolder

    assert config.kv_offloading_folder is not None
    size = config.kv_offloading_folder_size
    num_writers = config.data_parallel_size * config.nnodes * (1 if other_rows is None else 2)
    try:
        store = FolderStore(
            Path(config.kv_offloading_folder),
            rows,
            _parallel(config) + ("" if rows.nodes is None else ", node 0"),
            None if size is None else int(size * 2**30),
            num_writers,
            0 if other_rows is None else row_bytes(other_rows),
        )
    except OSError as error:
        raise ConfigError(
            f"kv_offloading_folder: {config.kv_offloading_folder!r} cannot be used: {error}; give a folder that this "
            "process can write"
        ) from error
    if rows.nodes is None:
        return store
    rows.nodes.open_folder(rows.layout, _parallel(config), num_rows)
    return GroupFolder(store, rows, rows.nodes)


def _too_few_rows(config: EngineConfig) -> ConfigError:
    return ConfigError(f"kv_offloading_size: {config.kv_offloading_size} GiB is less than one KV block; raise it")


def _open_peers(config: KVTransferConfig, rows: HostRows, layout: RowLayout, state_rows: HostRows | None) -> "Peers":
    """Return the pods from which the engine reads.

    Raises:
        ConfigError: the key cannot be used.
    """
    # Imported here, because most engines have no peers.
    from quire_engine.kv_transfer.peer_store import Peers

    peers = Peers(config, rows, layout, state_rows)
    try:
        peers.read_key()
    except QuireError as error:
        raise ConfigError(str(error)) from error
    return peers


def _parallel(config: EngineConfig) -> str:
    """Return how many ranks have parts of a row of host memory."""
    num_ranks, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    nodes = "" if config.nnodes == 1 else f", nodes {config.nnodes}"
    return "0/1" if config.ranks_per_core == 1 else f"tensor {num_ranks}, pipeline {num_stages}{nodes}"


def _row_layout(
    config: EngineConfig, block_hasher: BlockHasher, rows: HostRows, state_rows: HostRows | None
) -> RowLayout:
    states = "" if state_rows is None else f" {state_rows.layout}"
    return RowLayout(
        kv_wire.VERSION,
        block_hasher.block_size,
        block_hasher.kv_dtype,
        _parallel(config),
        block_hasher.root(None, None).hex(),
        f"{LAYOUT_VERSION} {rows.layout}{states}",
        sum(len(buffer) for buffer in rows.buffers(0)),
    )
