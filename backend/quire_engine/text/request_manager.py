# SPDX-License-Identifier: Apache-2.0
"""Desk: the open requests of all frontends, between their Submit and their last event. No I/O, one thread.

Requests come in from frontends, go to the engine core, and results come back as events. The text server calls it and
gives it two ways out: `frontend.post` for events, `send` for messages to the core. Whatever happens to a frontend or
to the core, every request ends exactly once and nothing of it stays in the core.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from quire_engine.text.admission import AdmissionController
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.rate_limiter import AdapterRateLimiter
from quire_engine.text.request_state import RequestState
from quire_engine.tokenization.completion import CompletionState
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.errors import Code, Internal, QuireError, Unavailable
from quire_spec.protocol.messages import (
    AbortSequences,
    AdapterEvent,
    GenerateRequest,
    IpcMessage,
    OutputDelta,
    SequenceDelta,
    StepResult,
)

_MAX_UNNAMED_ADAPTER_EVENTS = 256
"""Moves of adapters that have no name yet, kept for when they get one."""


class FrontendSink(Protocol):
    """Where a request came from."""

    def send(self, delta: OutputDelta) -> None:
        """Send an event; must not call the desk back."""


class RequestManager:
    """Open requests, by sequence id and by frontend."""

    def __init__(
        self,
        admission: AdmissionController,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics,
        send_to_core: Callable[[IpcMessage], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_queued = 0
        """Open requests that have not run yet."""
        self._admission = admission
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._send_to_core = send_to_core
        self._clock = clock
        # Not from zero: after a restart of the text process, its ids differ from those that the core still knows.
        self._next_sequence_id = int(time.time() * 1000) << 16
        self._by_sequence: dict[int, tuple[RequestState, FrontendSink]] = {}
        """By sequence: those whose output is not over."""
        self._by_frontend: defaultdict[FrontendSink, dict[int, RequestState]] = defaultdict(dict)
        self._drain_callbacks: list[Callable[[], None]] = []
        self._names_by_digest: dict[str, list[str]] = {}
        """Adapter names by digest."""
        self._resident_digests: list[str] = []
        self._rate_limiter = AdapterRateLimiter()
        self._unnamed_adapter_events: deque[AdapterEvent] = deque(maxlen=_MAX_UNNAMED_ADAPTER_EVENTS)

    @property
    def num_open(self) -> int:
        """Open requests, queued ones included."""
        return sum(map(len, self._by_frontend.values()))

    def is_open(self, request_state: RequestState) -> bool:
        """Whether a request is still wanted; may be asked from another thread."""
        return not request_state.is_closed

    def max_prompt_tokens(self, request_state: RequestState) -> int | None:
        """To how many tokens a request wants its prompt cut; may be asked from another thread."""
        return request_state.params.max_prompt_tokens(self._admission.limits.max_model_len)

    def submit(self, frontend: FrontendSink, request: GenerateRequest) -> RequestState | None:
        """A request comes. Returns it if it has text to be tokenized: `tokenized` or `fail` goes on.

        Raises:
            Internal: the frontend has a request of this id open; its connection is not to be trusted.
        """
        if type(request.id) is not int or request.id in self._by_frontend[frontend]:
            raise Internal(f"GenerateRequest with id {request.id!r}, which is open already or no integer")
        try:
            admitted_request = self._admission.admit(request, self.num_queued)
        except QuireError as error:
            self._reject(frontend, request.id, error)
            return None
        try:
            self._rate_limiter.check(admitted_request.adapter_name, self._clock())
        except Unavailable as error:
            self._metrics.adapter_metrics.record_rate_limited(admitted_request.adapter_name)
            self._reject(frontend, request.id, error)
            return None
        request_state = RequestState(self._next_sequence_id, request, admitted_request, self._clock())
        self._next_sequence_id = request_state.sequence_ids.stop
        self._metrics.adapter_metrics.record_admitted(request_state.adapter_name)
        self._rate_limiter.acquire(request_state.adapter_name)
        self._by_sequence |= dict.fromkeys(request_state.sequence_ids, (request_state, frontend))
        self._by_frontend[frontend][request.id] = request_state
        self.num_queued += 1
        if request.prompt_token_ids is None or admitted_request.params.bad_words:
            return request_state
        self.on_tokenized(request_state, request.prompt_token_ids)
        return None

    def reject_oversize(self, frontend: FrontendSink, client_request_id: int, num_bytes: int) -> None:
        """A request came that was too long to be read."""
        self._reject(frontend, client_request_id, self._admission.oversize_error(num_bytes))

    def on_tokenized(
        self, request_state: RequestState, token_ids: list[int], bad_word_ids: Sequence[list[int]] = ()
    ) -> None:
        """The prompt and the bad words of a request are tokenized. Does nothing if the request is over."""
        if not self.is_open(request_state):
            return
        try:
            token_ids = self._admission.check_prompt(token_ids, request_state.params)
        except QuireError as error:
            self.fail(request_state, error)
        else:
            self._metrics.record_prompt_tokens(len(token_ids))
            self._rate_limiter.consume(request_state.adapter_name, len(token_ids))
            for sequence_request in request_state.to_core_requests(token_ids, self._tokenizer, list(bad_word_ids)):
                self._send_to_core(sequence_request)

    def fail(self, request_state: RequestState, error: QuireError) -> None:
        """End a request with an error. Does nothing if it is over."""
        if self.is_open(request_state):
            _, frontend = self._by_sequence[self._open_sequence_ids(request_state)[0]]
            self._close(request_state, frontend, "error")
            frontend.send(request_state.to_error_delta(error.code, str(error)))

    def cancel(self, frontend: FrontendSink, client_request_ids: Iterable[int]) -> None:
        """A frontend wants no more events for some of its requests. Unknown ids are over already."""
        open_requests = self._by_frontend[frontend]
        self._abort([open_requests[i] for i in client_request_ids if i in open_requests], frontend)

    def on_frontend_closed(self, frontend: FrontendSink) -> int:
        """A frontend is gone, and its requests with it. Returns how many were open."""
        request_states = list(self._by_frontend[frontend].values())
        self._abort(request_states, frontend)
        del self._by_frontend[frontend]
        return len(request_states)

    def on_step(self, step: StepResult) -> None:
        """The engine core made a step."""
        now = self._clock()
        for sequence_id in step.started_ids:
            if (entry := self._by_sequence.get(sequence_id)) and not entry[0].is_started:
                self._mark_started(entry[0], now)
        aborted_ids = [id for result in step.results for id in self._on_result(result, now)]
        if aborted_ids:
            self._send_to_core(AbortSequences(aborted_ids))
        self._metrics.record_core_stats(step.stats)
        for adapter_event in step.adapter_events:
            self._record_adapter_event(adapter_event)
        if step.stats.slot_adapters != self._resident_digests:
            self._resident_digests = step.stats.slot_adapters
            self._metrics.adapter_metrics.set_resident_adapters(
                [name for digest in self._resident_digests for name in self._names_by_digest.get(digest, [])]
            )

    def on_core_connected(self) -> None:
        """The engine core is there: requests are taken."""
        self._admission.closed_reason = ""
        self._metrics.set_core_connected(True)

    def on_core_lost(self) -> None:
        """The engine core is gone, and with it every open request; new ones are refused until it is back."""
        self._admission.closed_reason = "engine core is restarting; try again"
        self._metrics.set_core_connected(False)
        for request_state in self._open_requests():
            self.fail(request_state, Unavailable(self._admission.closed_reason))

    def set_adapters(
        self, digests_by_name: Mapping[str, str], limits: Mapping[str, AdapterLimits] | None = None
    ) -> None:
        """Replace the table of adapter names, and their limits; open requests keep the digest that they began with."""
        self._rate_limiter.set_limits(limits or {}, self._clock())
        self._admission.digests_by_name = dict(digests_by_name)
        self._names_by_digest = {}
        for name, digest in digests_by_name.items():
            self._names_by_digest.setdefault(digest, []).append(name)
        self._metrics.adapter_metrics.set_adapter_names(digests_by_name)
        self._resident_digests = []
        adapter_events, self._unnamed_adapter_events = (
            self._unnamed_adapter_events,
            deque(maxlen=_MAX_UNNAMED_ADAPTER_EVENTS),
        )
        for adapter_event in adapter_events:
            self._record_adapter_event(adapter_event)

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Refuse new requests from now on; call `on_empty` when no request is open."""
        self._admission.draining = True
        self._drain_callbacks.append(on_drained)
        self._notify_if_drained()

    def refresh_adapter_gauges(self) -> None:
        """Bring the metrics' list of adapters in use up to date, before it is read."""
        running: set[str] = set()
        waiting: set[str] = set()
        for request_state in self._open_requests():
            if request_state.adapter_name is not None:
                (running if request_state.is_started else waiting).add(request_state.adapter_name)
        self._metrics.set_active_adapters(running, waiting)

    def status(self) -> dict[str, Any]:
        """Counts for the supervisor."""
        return {"num_open": self.num_open, "num_queued": self.num_queued, "core": not self._admission.closed_reason}

    def _reject(self, frontend: FrontendSink, client_request_id: int, error: QuireError) -> None:
        self._metrics.record_rejected(error.code)
        frontend.send(OutputDelta(client_request_id, error_code=error.code, error=str(error)))

    def _record_adapter_event(self, adapter_event: AdapterEvent) -> None:
        names = self._names_by_digest.get(adapter_event.digest, [])
        if not names:
            # The core has an adapter before anyone is told its name.
            self._unnamed_adapter_events.append(adapter_event)
        for name in names:
            self._metrics.adapter_metrics.record_adapter_event(name, adapter_event)

    def _mark_started(self, request_state: RequestState, now: float) -> None:
        request_state.is_started = True
        self.num_queued -= 1
        self._metrics.record_started(request_state.adapter_name, now - request_state.arrival_time)

    def _on_result(self, result: SequenceDelta, now: float) -> list[int]:
        """Pass a result on. Returns the sequences that are over here while the engine core still runs them."""
        entry = self._by_sequence.get(result.id)
        if entry is None:
            return []
        request_state, frontend = entry
        completion = request_state.completion(result.id)
        num_tokens_before = completion.num_tokens
        deltas = request_state.update(_retryable(result))
        self._record_tokens(request_state, completion, completion.num_tokens - num_tokens_before, now)
        aborted_ids = []
        if completion.finish_reason is not None or result.error_code is not None:
            del self._by_sequence[result.id]
            aborted_ids = [result.id] if result.finish_reason is None and result.error_code is None else []
        if deltas and deltas[-1].final:
            aborted_ids += self._open_sequence_ids(request_state)
            self._close(request_state, frontend, "error" if deltas[-1].error_code else deltas[-1].finish_reason or "")
        for delta in deltas:
            frontend.send(delta)
        return aborted_ids

    def _record_tokens(
        self, request_state: RequestState, completion: CompletionState, num_tokens: int, now: float
    ) -> None:
        if not num_tokens:
            return
        if completion.last_token_time is not None:
            self._metrics.record_next_token(now - completion.last_token_time)
        elif all(sibling.last_token_time is None for sibling in request_state.completions):
            self._metrics.record_first_token(request_state.adapter_name, now - request_state.arrival_time)
        completion.last_token_time = now
        self._metrics.record_generated_tokens(request_state.adapter_name, num_tokens)
        self._rate_limiter.consume(request_state.adapter_name, num_tokens)

    def _abort(self, request_states: list[RequestState], frontend: FrontendSink) -> None:
        submitted_ids = [
            sequence_id
            for request_state in request_states
            if request_state.is_submitted
            for sequence_id in self._open_sequence_ids(request_state)
        ]
        for generation in request_states:
            self._close(generation, frontend, "abort")
        if submitted_ids:
            self._send_to_core(AbortSequences(submitted_ids))

    def _open_requests(self) -> list[RequestState]:
        return [
            request_state for requests_by_id in self._by_frontend.values() for request_state in requests_by_id.values()
        ]

    def _open_sequence_ids(self, request_state: RequestState) -> list[int]:
        """Those whose output is not over."""
        return [sequence_id for sequence_id in request_state.sequence_ids if sequence_id in self._by_sequence]

    def _close(self, request_state: RequestState, frontend: FrontendSink, reason: str) -> None:
        request_state.is_closed = True
        self._rate_limiter.release(request_state.adapter_name)
        for sequence_id in self._open_sequence_ids(request_state):
            del self._by_sequence[sequence_id]
        del self._by_frontend[frontend][request_state.client_request_id]
        if not request_state.is_started:
            self.num_queued -= 1
        latency_s = self._clock() - request_state.arrival_time
        token_counts = request_state.num_input_tokens, request_state.num_output_tokens
        self._metrics.record_finished(reason, latency_s, *token_counts, request_state.params)
        self._notify_if_drained()

    def _notify_if_drained(self) -> None:
        if not self._by_sequence:
            callbacks, self._drain_callbacks = self._drain_callbacks, []
            for callback in callbacks:
                callback()


def _retryable(result: SequenceDelta) -> SequenceDelta:
    """A digest that the core does not know is one that a restarted core has yet to load: the name was found here."""
    if result.error_code != Code.NOT_FOUND:
        return result
    return replace(result, error_code=Code.UNAVAILABLE, error="the adapter is being loaded after a restart; try again")
