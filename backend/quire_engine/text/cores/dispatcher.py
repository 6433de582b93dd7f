# SPDX-License-Identifier: Apache-2.0
"""The requests that each core of a pod runs, and with them the loads from which dispatch.py chooses a core.

Pure: no socket, and the caller passes the clock. The core pool calls it for real cores, the simulator for simulated
ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from quire_engine.lora.invocation import adapter_start
from quire_engine.text.cores.dispatch import CoreLoad, Speeds, choose_core
from quire_engine.text.cores.prefix_index import PrefixIndex
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.protocol.messages import AdapterEvent, AdapterResidency, SchedulerStats, SequenceRequest, StepResult

_FIRST_ADAPTER_LOAD_S = 0.05
"""Estimated seconds to load an adapter into a slot, before the first one was measured."""


@dataclass(slots=True, eq=False)
class DispatchedRequest:
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
class CoreWork:
    """The requests of one core, and what is known about its state."""

    requests: dict[DispatchedRequest, None] = field(default_factory=dict)
    """The requests that it runs, in the order in which they were sent."""
    num_requests: Counter[AdapterDigest] = field(default_factory=Counter)
    """Number of its requests for each adapter."""
    adapters: dict[AdapterDigest, AdapterResidency] = field(default_factory=dict)
    """Where each adapter is that the core has registered."""
    in_slots: set[AdapterDigest] = field(default_factory=set)
    """The adapters that are in slots of the core."""
    num_queued_tokens: int = 0
    num_running: int = 0
    """Unfinished sequences of requests that have output."""
    last_step_at: float = 0.0
    """Time of the last step, or of the first request after a time without requests."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """The latest statistics of the core; all zero if there are none."""

    def move(self, change: AdapterResidency) -> None:
        """Record that an adapter was registered, moved, pinned or removed."""
        self.in_slots.discard(change.digest)
        if change.state == "slot":
            self.in_slots.add(change.digest)
        self.adapters[change.digest] = change
        if change.state == "removed":
            del self.adapters[change.digest]


class Dispatcher:
    """The work of each core."""

    def __init__(self, num_cores: int, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.cores = [CoreWork() for _ in range(num_cores)]
        self.prefix_index = PrefixIndex(num_cores)
        self._config = config
        self._clock = clock
        self._speeds = Speeds()
        self._adapter_load_s = _FIRST_ADAPTER_LOAD_S
        self._request_by_sequence: dict[int, tuple[DispatchedRequest, int]] = {}
        """The request of each unfinished sequence, and the number of its core."""

    def create_request(
        self, messages: Sequence[SequenceRequest], sequence_ids: Iterable[int], rank: int | None = None
    ) -> DispatchedRequest:
        """Return a request that runs on no core yet. Its messages have the same prompt, adapter and salt."""
        first = messages[0]
        start = self._adapter_start(first)
        hashes = self.prefix_index.hash_prompt(first.prompt_token_ids, first.adapter_digest, first.cache_salt, start)
        num_tokens = len(first.prompt_token_ids)
        return DispatchedRequest(set(sequence_ids), messages, num_tokens, first.adapter_digest, rank, hashes)

    def _adapter_start(self, request: SequenceRequest) -> int:
        digests = _required_adapters(request)
        known = next((core.adapters[d] for core in self.cores for d in digests & core.adapters.keys()), None)
        return 0 if known is None else adapter_start(request.prompt_token_ids, known.invocation_tokens)

    def choose(self, request: DispatchedRequest, serving: Sequence[int]) -> int:
        """Return the best core for a request among those that serve."""
        # A core that has restarted gets requests for an adapter as soon as it has loaded it again.
        required = _required_adapters(request.messages[0])
        with_adapter = [n for n in serving if required <= self.cores[n].adapters.keys()]
        return choose_core({number: self._load(number, request) for number in with_adapter or serving}, self._speeds)

    def add(self, number: int, request: DispatchedRequest) -> None:
        """Record that a request is sent to a core."""
        core = self.cores[number]
        if not core.requests:
            core.last_step_at = self._clock()
        request.num_queued_tokens = self._num_uncached(number, request)
        self.prefix_index.expect(number, request.hashes)
        core.num_queued_tokens += request.num_queued_tokens
        core.requests[request] = None
        if request.adapter_digest is not None:
            core.num_requests[request.adapter_digest] += 1
        self._request_by_sequence |= dict.fromkeys(request.open_ids, (request, number))

    def core_of(self, sequence_id: int) -> int | None:
        """Return the core of an unfinished sequence."""
        entry = self._request_by_sequence.get(sequence_id)
        return None if entry is None else entry[1]

    def end(self, sequence_id: int) -> None:
        """Forget a sequence that has ended."""
        request, number = self._request_by_sequence.pop(sequence_id)
        core = self.cores[number]
        request.open_ids.discard(sequence_id)
        if not request.messages:
            core.num_running -= 1
        if not request.open_ids:
            self.prefix_index.end(number, request.hashes)
            core.num_queued_tokens -= request.num_queued_tokens
            del core.requests[request]
            if request.adapter_digest is not None:
                core.num_requests[request.adapter_digest] -= 1

    def clear(self, number: int) -> list[DispatchedRequest]:
        """Forget the work of a core that has ended, and return its requests."""
        lost = list(self.cores[number].requests)
        self.cores[number] = CoreWork()
        self.prefix_index.clear(number)
        for request in lost:
            for sequence_id in request.open_ids:
                del self._request_by_sequence[sequence_id]
        return lost

    def on_step(self, number: int, step: StepResult) -> None:
        """Record the results of a step."""
        core, now = self.cores[number], self._clock()
        ran_step = bool(core.requests) and step.stats.num_steps > core.stats.num_steps
        core.stats = step.stats
        for change in step.adapter_changes:
            core.move(change)
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
                self.end(result.id)
        if ran_step:
            self._speeds.record_step(now - core.last_step_at, num_prefilled, num_queued_tokens > 0)
            core.last_step_at = now
        for event in step.adapter_events:
            self._record_load(event)

    def residency(self, digest: AdapterDigest) -> AdapterResidency:
        """Return where an adapter is in the pod: on the core that is closest to serving it."""
        known = [core.adapters[digest] for core in self.cores if digest in core.adapters]
        order = {"slot": 0, "host": 1}
        best = min(known, key=lambda residency: order.get(residency.state, 2), default=None)
        if best is None:
            return AdapterResidency(digest, "removed")
        return replace(best, pinned=any(residency.pinned for residency in known))

    def _load(self, number: int, request: DispatchedRequest) -> CoreLoad:
        core, digest = self.cores[number], request.adapter_digest
        is_loaded = digest is None or digest in core.in_slots or core.num_requests[digest] > 0
        return CoreLoad(
            queued_tokens=core.num_queued_tokens,
            uncached_tokens=self._num_uncached(number, request),
            running_share=core.num_running / self._config.max_num_seqs,
            adapter_load_s=0.0 if is_loaded else self._adapter_load_s,
            evicts_adapter=not is_loaded and len(core.in_slots) >= self._config.max_loras,
            silent_s=self._clock() - core.last_step_at if core.requests else 0.0,
            kv_usage=core.stats.num_used_blocks / max(1, core.stats.num_blocks),
            served_last=self.prefix_index.served_last(number, request.hashes),
        )

    def _num_uncached(self, number: int, request: DispatchedRequest) -> int:
        """Return how many tokens of a prompt a core would have to compute. It computes at least the last one."""
        num_cached = self.prefix_index.num_cached_blocks(number, request.hashes) * self._config.block_size
        return max(1, request.num_prompt_tokens - num_cached)

    def _record_load(self, event: AdapterEvent) -> None:
        if event.kind == "slot":
            self._adapter_load_s += 0.2 * (event.duration_s - self._adapter_load_s)


def _required_adapters(request: SequenceRequest) -> set[AdapterDigest]:
    """Return the adapters that a core must have loaded: that of the request, or the parts of a sum."""
    parts = {part for part, _ in request.adapter_parts}
    return parts or ({request.adapter_digest} if request.adapter_digest is not None else set())
