# SPDX-License-Identifier: Apache-2.0
"""The cores of a pod with several cores: sends each request to one of them, and survives the death of any of them.

    RequestManager -> CorePool -> CoreClient       (one for each core)
                   <-          <- ResultCoalescer <- CoreClient

All sequences of a request stay on one core. If a core ends or hangs, its requests that have no output yet move to
another core, once; those with output end with an error. dispatcher.py knows the work of each core and chooses the core
of a request. A pod with one core has no pool: its CoreClient takes the place of the pool.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec.structs import replace

from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.text.cores.core_client import CoreClient, CoreListener
from quire_engine.text.cores.core_metrics import CoreMetrics
from quire_engine.text.cores.core_stats import CoreStats
from quire_engine.text.cores.dispatcher import DispatchedRequest, Dispatcher
from quire_engine.text.request_manager import FrontendSink
from quire_spec.constants import core_names
from quire_spec.documents.pod_status import CoreState
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol.client import RECONNECT_INTERVAL_S, ConnectionLost
from quire_spec.protocol.messages import SequenceRequest, StepResult

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
class _Core:
    """The connection to one core."""

    client: CoreClient
    is_serving: bool = False
    """True from the first message of the core until it is lost. The system also connects to a core that hangs."""


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
        self.dispatcher = Dispatcher(len(clients), config, clock)

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
        prefix_index = self.dispatcher.prefix_index
        while prefix_index.hasher is None:
            for core in self._cores:
                if core.is_serving:
                    with contextlib.suppress(QuireError):
                        prefix_index.hasher = await core.client.call("block_hasher", BlockHasher)
                        break
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    async def _watch(self, number: int) -> None:
        while True:
            await asyncio.sleep(_PING_INTERVAL_S)
            core, work = self._cores[number], self.dispatcher.cores[number]
            if not work.requests or self._clock() - work.last_step_at < _PING_INTERVAL_S:
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
        if rank is not None and not self._cores[rank].is_serving:
            raise Unavailable(f"data_parallel_rank: core {rank} is restarting; try again, or omit the rank")
        self._dispatch(self.dispatcher.create_request(requests, sequence_ids, rank))

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Stop sequences."""
        ids_by_core: dict[int, list[int]] = {}
        for sequence_id in sequence_ids:
            if (number := self.dispatcher.core_of(sequence_id)) is not None:
                ids_by_core.setdefault(number, []).append(sequence_id)
                self.dispatcher.end(sequence_id)
        for number, ids in ids_by_core.items():
            self._cores[number].client.abort(ids)

    def _dispatch(self, request: DispatchedRequest) -> None:
        number = request.rank
        if number is None:
            serving = [number for number, core in enumerate(self._cores) if core.is_serving]
            number = self.dispatcher.choose(request, serving)
        for message in request.messages:
            self._cores[number].client.send(message)
        self.dispatcher.add(number, request)
        self._metrics.record_dispatched(number)

    # Events of the cores

    def on_core_lost(self, number: int) -> None:
        """Called when a core has ended: move the requests that have no output, and end the others."""
        assert self.listener is not None
        core = self._cores[number]
        digests = list(self.dispatcher.cores[number].adapters)
        lost = self.dispatcher.clear(number)
        self._cores[number] = _Core(core.client)
        self._metrics.set_lost(number)
        if not any(core.is_serving for core in self._cores):
            self._stats.clear()
            if core.is_serving:
                self.listener.on_core_lost()
            return
        adapter_changes = list(map(self.dispatcher.residency, digests))
        self.listener.on_step(StepResult([], [], self._stats.remove(number), adapter_changes=adapter_changes))
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
        core = self._cores[number]
        if not core.is_serving:
            was_closed = not any(core.is_serving for core in self._cores)
            core.is_serving = True
            if was_closed:
                self.listener.on_core_connected()
        self.dispatcher.on_step(number, step)
        self._metrics.set_stats(number, step.stats)
        adapter_changes = [self.dispatcher.residency(change.digest) for change in step.adapter_changes]
        stats = self._stats.set(number, step.stats)
        self.listener.on_step(replace(step, stats=stats, adapter_changes=adapter_changes))

    def reader_of(self, sequence_id: int) -> FrontendSink | None:
        """See ResultListener."""
        assert self.listener is not None
        return self.listener.reader_of(sequence_id)


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
