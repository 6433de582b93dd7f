# SPDX-License-Identifier: Apache-2.0
"""The cores of a pod with several cores: sends each request to one of them, and survives the death of any of them.

    RequestManager -> CorePool -> CoreClient       (one for each core)
                   <-          <- ResultCoalescer <- CoreClient

All sequences of a request stay on one core. If a core ends or hangs, its requests that have no output yet move to
another core, once; those with output end with an error. dispatch.py chooses the core. A pod with one core has no pool:
its CoreClient takes the place of the pool.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec.structs import replace

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.text.cores.core_client import CoreClient, CoreListener
from quire_engine.text.cores.core_metrics import CoreMetrics
from quire_engine.text.cores.core_stats import CoreStats
from quire_engine.text.cores.dispatch import CoreLoad, Speeds, choose_core
from quire_engine.text.cores.prefix_index import PrefixIndex
from quire_engine.text.request_manager import FrontendSink
from quire_spec.constants import AdapterDigest, core_names
from quire_spec.documents.pod_status import CoreState
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol.client import RECONNECT_INTERVAL_S, ConnectionLost
from quire_spec.protocol.messages import AdapterEvent, SequenceRequest, StepResult

_FIRST_ADAPTER_LOAD_S = 0.05
"""Estimated seconds to load an adapter into a slot, before the first one was measured."""
_PING_INTERVAL_S = 5.0
_HANG_S = 30.0
"""A core whose process does not answer for this many seconds is treated as lost. The supervisor kills it later. Its
limit is longer, because it must not restart a slow core."""

logger = logging.getLogger(__name__)


class PoolListener(CoreListener, Protocol):
    """Receives the events of the pool. The request manager is the listener."""

    def on_sequences_lost(self, sequence_ids: Iterable[int], reason: str) -> None:
        """Called when sequences were lost with their core."""

    def reader_of(self, sequence_id: int) -> FrontendSink | None:
        """See ResultListener."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that a core runs."""

    open_ids: set[int]
    """Its unfinished sequences."""
    messages: Sequence[SequenceRequest]
    """The messages that make a core run it. Empty as soon as it has output, because it can then not be moved."""
    num_prompt_tokens: int
    adapter_digest: AdapterDigest | None
    rank: int | None
    """The core that the client chose."""
    hashes: Sequence[bytes] = ()
    """The hashes of the first blocks of its prompt. Empty as soon as it has output."""
    num_queued_tokens: int = 0
    """Prompt tokens that its core still has to compute."""
    was_moved: bool = False


@dataclass(slots=True, eq=False)
class _Core:
    """What the pool knows about one core."""

    client: CoreClient
    is_serving: bool = False
    """True from the first message of the core until it is lost. The system also connects to a core that hangs."""
    requests: dict[_Request, None] = field(default_factory=dict)
    """The requests that it runs, in the order in which they were sent."""
    num_requests: Counter[AdapterDigest] = field(default_factory=Counter)
    """Number of its requests for each adapter."""
    adapters: frozenset[AdapterDigest] = frozenset()
    """The adapters that the core has registered."""
    num_queued_tokens: int = 0
    num_running: int = 0
    """Unfinished sequences of requests that have output."""
    last_step_at: float = 0.0
    """Time of the last step, or of the first request after a time without requests."""


class CorePool:
    """The cores, and the requests that they run."""

    def __init__(
        self,
        clients: Sequence[CoreClient],
        metrics: CoreMetrics,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.listener: PoolListener | None = None
        """It must be set before `run`."""
        self._cores = [_Core(client) for client in clients]
        self._metrics = metrics
        self._config = config
        self._clock = clock
        self._stats = CoreStats()
        self._speeds = Speeds()
        self.prefix_index = PrefixIndex(len(clients))
        self._adapter_load_s = _FIRST_ADAPTER_LOAD_S
        self._request_by_sequence: dict[int, tuple[_Request, int]] = {}
        """The request of each unfinished sequence, and the number of its core."""

    async def run(self) -> None:
        """Keep the connections to all cores, and close those of cores that hang."""
        async with asyncio.TaskGroup() as group:
            for number, core in enumerate(self._cores):
                group.create_task(core.client.run())
                group.create_task(self._watch(number))
            if self._config.enable_prefix_caching:
                group.create_task(self._fetch_hasher())

    async def _fetch_hasher(self) -> None:
        """Ask the first core that serves how prompts are hashed. All cores of a pod hash alike."""
        while self.prefix_index.hasher is None:
            for core in self._cores:
                if core.is_serving:
                    with contextlib.suppress(QuireError):
                        self.prefix_index.hasher = await core.client.call("block_hasher", BlockHasher)
                        break
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    async def _watch(self, number: int) -> None:
        while True:
            await asyncio.sleep(_PING_INTERVAL_S)
            core = self._cores[number]
            if not core.requests or self._clock() - core.last_step_at < _PING_INTERVAL_S:
                continue
            try:
                # The event loop of the core answers this, also during a long step. The supervisor detects a step that
                # never ends.
                await core.client.call("block_hasher", msgspec.Raw, timeout_s=_HANG_S)
            except ConnectionLost:
                continue
            except Unavailable:
                logger.error("engine core hangs, using the others core=%d silent_s=%g", number, _HANG_S)
                await core.client.close()
            except QuireError as error:
                logger.warning("engine core cannot answer core=%d error=%s", number, error)

    def states(self) -> dict[str, CoreState]:
        """Return the state of each core by the name of its process."""
        stats = [self._stats[number] for number in range(len(self._cores))]
        return {
            name: CoreState(core.is_serving, s.num_running, s.num_waiting, s.num_used_blocks / max(1, s.num_blocks))
            for name, core, s in zip(core_names(len(self._cores)), self._cores, stats, strict=True)
        }

    # Requests

    def submit(self, requests: Sequence[SequenceRequest], sequence_ids: Iterable[int], rank: int | None) -> None:
        """Send all sequences of a request to one core: to core `rank`, or if that is None, to the best one.

        Raises:
            InvalidArgument: a message cannot be encoded.
            Unavailable: core `rank` does not serve.
        """
        first = requests[0]
        request = _Request(set(sequence_ids), requests, len(first.prompt_token_ids), first.adapter_digest, rank)
        request.hashes = self.prefix_index.hash_prompt(first.prompt_token_ids, first.adapter_digest, first.cache_salt)
        if rank is not None and not self._cores[rank].is_serving:
            raise Unavailable(f"data_parallel_rank: core {rank} is restarting; try again, or omit the rank")
        self._dispatch(request)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Stop sequences."""
        ids_by_core: dict[int, list[int]] = {}
        for sequence_id in sequence_ids:
            if (entry := self._request_by_sequence.get(sequence_id)) is not None:
                ids_by_core.setdefault(entry[1], []).append(sequence_id)
                self._end(sequence_id)
        for number, ids in ids_by_core.items():
            self._cores[number].client.abort(ids)

    def _dispatch(self, request: _Request) -> None:
        number = self._choose(request) if request.rank is None else request.rank
        core = self._cores[number]
        for message in request.messages:
            core.client.send(message)
        if not core.requests:
            core.last_step_at = self._clock()
        request.num_queued_tokens = self._num_uncached(number, request)
        self.prefix_index.expect(number, request.hashes)
        core.num_queued_tokens += request.num_queued_tokens
        core.requests[request] = None
        if request.adapter_digest is not None:
            core.num_requests[request.adapter_digest] += 1
        self._request_by_sequence |= dict.fromkeys(request.open_ids, (request, number))
        self._metrics.record_dispatched(number)

    def _choose(self, request: _Request) -> int:
        serving = [number for number, core in enumerate(self._cores) if core.is_serving]
        digest = request.adapter_digest
        # A core that has restarted gets requests for an adapter as soon as it has loaded it again.
        with_adapter = [n for n in serving if digest is None or digest in self._cores[n].adapters]
        return choose_core({number: self._load(number, request) for number in with_adapter or serving}, self._speeds)

    def _load(self, number: int, request: _Request) -> CoreLoad:
        core, stats, digest = self._cores[number], self._stats[number], request.adapter_digest
        is_loaded = digest is None or digest in stats.slot_adapters or core.num_requests[digest] > 0
        return CoreLoad(
            queued_tokens=core.num_queued_tokens,
            uncached_tokens=self._num_uncached(number, request),
            running_share=core.num_running / self._config.max_num_seqs,
            adapter_load_s=0.0 if is_loaded else self._adapter_load_s,
            silent_s=self._clock() - core.last_step_at if core.requests else 0.0,
            kv_usage=stats.num_used_blocks / max(1, stats.num_blocks),
            served_last=self.prefix_index.served_last(number, request.hashes),
        )

    def _num_uncached(self, number: int, request: _Request) -> int:
        """Return how many tokens of a prompt a core would have to compute. It computes at least the last one."""
        num_cached = self.prefix_index.num_cached_blocks(number, request.hashes) * self._config.block_size
        return max(1, request.num_prompt_tokens - num_cached)

    def _end(self, sequence_id: int) -> None:
        """Forget a sequence that has ended."""
        request, number = self._request_by_sequence.pop(sequence_id)
        core = self._cores[number]
        request.open_ids.discard(sequence_id)
        if not request.messages:
            core.num_running -= 1
        if not request.open_ids:
            self.prefix_index.end(number, request.hashes)
            core.num_queued_tokens -= request.num_queued_tokens
            del core.requests[request]
            if request.adapter_digest is not None:
                core.num_requests[request.adapter_digest] -= 1

    # Events of the cores

    def on_core_lost(self, number: int) -> None:
        """Called when a core has ended: move the requests that have no output, and end the others."""
        assert self.listener is not None
        core = self._cores[number]
        lost = core.requests
        self._cores[number] = _Core(core.client)
        self._metrics.set_lost(number)
        self.prefix_index.clear(number)
        for request in lost:
            for sequence_id in request.open_ids:
                del self._request_by_sequence[sequence_id]
        if not any(core.is_serving for core in self._cores):
            self._stats.clear()
            if core.is_serving:
                self.listener.on_core_lost()
            return
        self.listener.on_step(StepResult([], [], self._stats.remove(number)))
        for request in lost:
            if request.messages and not request.was_moved and request.rank is None:
                request.was_moved = True
                self._metrics.record_redispatched(number)
                self._dispatch(request)
            else:
                self.listener.on_sequences_lost(
                    request.open_ids, f"engine core {number} ended and is restarting; try again"
                )

    def on_step(self, number: int, step: StepResult) -> None:
        """Called for the results of each step of a core, after they were coalesced."""
        assert self.listener is not None
        core, now = self._cores[number], self._clock()
        if not core.is_serving:
            was_closed = not any(core.is_serving for core in self._cores)
            core.is_serving = True
            if was_closed:
                self.listener.on_core_connected()
        ran_step = bool(core.requests) and step.stats.num_steps > self._stats[number].num_steps
        if step.adapters is not None:
            core.adapters = frozenset(step.adapters)
        if step.block_changes is not None:
            self.prefix_index.apply(number, step.block_changes)
        num_queued_tokens, num_prefilled = core.num_queued_tokens, 0
        for result in step.results:
            if (entry := self._request_by_sequence.get(result.id)) is None:
                continue
            request = entry[0]
            if request.messages and result.error_code is None:
                self.prefix_index.end(number, request.hashes)
                request.messages = request.hashes = ()
                core.num_running += len(request.open_ids)
                core.num_queued_tokens -= request.num_queued_tokens
                request.num_queued_tokens = 0
                num_prefilled += request.num_prompt_tokens - (result.num_cached_tokens or 0)
            if result.finish_reason is not None or result.error_code is not None:
                self._end(result.id)
        if ran_step:
            self._speeds.record_step(now - core.last_step_at, num_prefilled, num_queued_tokens > 0)
            core.last_step_at = now
        for event in step.adapter_events:
            self._record_load(event)
        self._metrics.set_stats(number, step.stats)
        self.listener.on_step(replace(step, stats=self._stats.set(number, step.stats)))

    def reader_of(self, sequence_id: int) -> FrontendSink | None:
        """See ResultListener."""
        assert self.listener is not None
        return self.listener.reader_of(sequence_id)

    def _record_load(self, event: AdapterEvent) -> None:
        if event.kind == "slot":
            self._adapter_load_s += 0.2 * (event.duration_s - self._adapter_load_s)


class PoolMember:
    """The listener of one core's results. It passes them on to the pool with the number of the core."""

    def __init__(self, pool: CorePool, number: int) -> None:
        self._pool = pool
        self._number = number
        self.reader_of = pool.reader_of

    def on_core_connected(self) -> None:
        """See CoreListener. The core serves as soon as it sends its state."""

    def on_core_lost(self) -> None:
        """See CoreListener."""
        self._pool.on_core_lost(self._number)

    def on_step(self, step: StepResult) -> None:
        """See CoreListener."""
        self._pool.on_step(self._number, step)
