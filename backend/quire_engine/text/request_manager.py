# SPDX-License-Identifier: Apache-2.0
"""The open requests of all frontends, from GenerateRequest to the final output delta.

Admits requests, prepares them, sends them to the engine core, and sends the results of each step to the frontends. It
runs on the event loop and has no knowledge of sockets. The text server and the result coalescer call it, and it calls
`FrontendSink.send` and the methods of `Cores`. Every request ends exactly once, and none of its sequences stays in a
core, even if a frontend or a core fails.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

from msgspec.structs import replace

from quire_engine.requests.processor import PreparedRequest, RequestProcessor
from quire_engine.requests.request_adapter import RequestAdapter
from quire_engine.requests.request_state import RequestState
from quire_engine.text.adapter_finder import AdapterFinder
from quire_engine.text.admission.adapter_versions import version_of
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_engine.text.admission.client_turns import ClientTurns
from quire_engine.text.admission.kv_transfer_roles import KVTransferRoles
from quire_engine.text.admission.rate_limiter import AdapterRateLimiter
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.tracing import NoTracer, Tracer
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.errors import PROCESS_ENDS, Code, Internal, InvalidArgument, QuireError, Unavailable, error_text
from quire_spec.protocol.messages import (
    GenerateRequest,
    OutputDelta,
    SequenceDelta,
    SequenceRequest,
    StartedSequence,
    StepResult,
)

logger = logging.getLogger(__name__)


class FrontendSink(Protocol):
    """The frontend that sent a request."""

    @property
    def is_blocked(self) -> bool:
        """True while the frontend does not read."""

    def send(self, delta: OutputDelta) -> None:
        """Send an output delta. Implementations of this method must not call the request manager."""

    def close_slow_reader(self, reason: str) -> None:
        """Close the connection later in this iteration of the event loop, because the frontend does not read."""


class Cores(Protocol):
    """The engine core, or the cores of a pod."""

    def submit(self, requests: Sequence[SequenceRequest], sequence_ids: Iterable[int], rank: int | None) -> None:
        """Run the sequences of a request. `sequence_ids` are the ids of its outputs, and `rank` is the core that the
        client chose.

        Raises:
            InvalidArgument: a message cannot be encoded.
            Unavailable: the core that the client chose is not connected.
        """

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Stop sequences, and send no more results for them."""


class RequestManager:
    """Open requests, by sequence id and by frontend."""

    def __init__(
        self,
        admission: AdmissionController,
        processor: RequestProcessor,
        metrics: RequestMetrics,
        cores: Cores,
        clock: Callable[[], float] = time.monotonic,
        finder: AdapterFinder | None = None,
        tracer: Tracer | None = None,
        kv_transfer_roles: KVTransferRoles | None = None,
    ) -> None:
        """Without `finder`, adapters that are not loaded do not exist. Without `kv_transfer_roles`, kv_transfer_params
        have no effect."""
        self._tracer = tracer or NoTracer()
        self._queued_by_client: Counter[str] = Counter()
        """Number of open requests that no step has run yet, for each client that has any."""
        self._admission = admission
        self._processor = processor
        self._metrics = metrics
        self._cores = cores
        self._clock = clock
        self._finder = finder
        self._kv_transfer_roles = kv_transfer_roles
        self._last_use: dict[AdapterName, float] = {}
        """Time of the last request of each adapter that had one."""
        # Ids start at the current time. So after a restart, the text process never uses an id that the core already
        # has.
        self._next_sequence_id = int(time.time() * 1000) << 16
        self._by_sequence: dict[int, tuple[RequestState, FrontendSink]] = {}
        """Unfinished sequences by id."""
        self._by_frontend: defaultdict[FrontendSink, dict[int, RequestState]] = defaultdict(dict)
        self._preparations: dict[RequestState, asyncio.Task[None]] = {}
        """Tasks of the requests that are being prepared."""
        self._client_turns = ClientTurns()
        self._drain_callbacks: list[Callable[[], None]] = []
        self._rate_limiter = AdapterRateLimiter()

    @property
    def num_queued(self) -> int:
        """Number of open requests that no step has run yet."""
        return self._queued_by_client.total()

    @property
    def num_open(self) -> int:
        """Number of open requests, including queued requests."""
        return sum(map(len, self._by_frontend.values()))

    def submit(self, frontend: FrontendSink, request: GenerateRequest) -> None:
        """Admit a request, tokenize it and send it to the core, or reject it with an error to the frontend.

        Raises:
            Internal: the frontend already has an open request with this id.
        """
        if request.id in self._by_frontend[frontend]:
            raise Internal(f"GenerateRequest: id {request.id} is already open")
        request = self._admission.choose_version(request, session=str(self._next_sequence_id))
        try:
            adapter = self._admission.admit(request, self._queued_by_client)
        except QuireError as error:
            self.reject(frontend, request.id, error)
            return
        try:
            self._rate_limiter.check(adapter.names, self._clock())
        except Unavailable as error:
            self._metrics.adapter_metrics.record_rate_limited(adapter.name)
            self.reject(frontend, request.id, error)
            return
        try:
            self._admission.api_key_access.admit(request.api_key_name, self._clock())
        except Unavailable as error:
            self._metrics.record_api_key_limited(request.api_key_name)
            self.reject(frontend, request.id, error)
            return
        missing = adapter if adapter.missing_names else None
        used = RequestAdapter() if missing else adapter
        request_state = RequestState(self._next_sequence_id, request, used, self._clock())
        # With beam search, the core uses one id per beam, even if it returns fewer outputs.
        self._next_sequence_id += request_state.params.num_sequences
        self._count_use(used)
        self._by_sequence |= dict.fromkeys(request_state.sequence_ids, (request_state, frontend))
        self._by_frontend[frontend][request.id] = request_state
        self._queued_by_client[request.client] += 1
        template = self._admission.chat_template_by_name.get(request.model)
        self._preparations[request_state] = asyncio.get_running_loop().create_task(
            self._prepare(request, request_state, template, missing)
        )

    def _count_use(self, adapter: RequestAdapter) -> None:
        """Count an admitted request of an adapter."""
        self._metrics.adapter_metrics.record_admitted(adapter.name)
        self._rate_limiter.acquire(adapter.names)
        self._last_use |= dict.fromkeys(adapter.names, self._clock())

    async def _find_adapter(
        self, request: GenerateRequest, request_state: RequestState, adapter: RequestAdapter
    ) -> str | None:
        """Have the supervisor load the missing adapters of a request, and return the file of its chat template."""
        assert self._finder is not None, "names are findable only if a supervisor has sent patterns"
        found = {
            name: await self._finder.find(name, request.client, request.api_key_name) for name in adapter.missing_names
        }
        template = self._admission.chat_template_by_name.get(request.model)
        self._admission.limits.check(request, template is not None)
        request_state.adapter = adapter.found(found)
        self._count_use(request_state.adapter)
        return template

    async def _prepare(
        self,
        request: GenerateRequest,
        request_state: RequestState,
        template: str | None,
        missing: RequestAdapter | None,
    ) -> None:
        """Prepare a request and send it to the core. The task is cancelled when the request ends before that.

        `missing` is the adapter of the request if it must be found first.
        """
        error: QuireError
        try:
            if missing is not None:
                template = await self._find_adapter(request, request_state, missing)
                request_state.adapter_wait_s = self._clock() - request_state.arrival_time
            if self._kv_transfer_roles is not None:
                request_state.request = await self._kv_transfer_roles.with_source(request_state.request)
            async with self._client_turns.turn(request.client):
                prepared = await self._processor.prepare(request, template)
        except QuireError as rejection:
            error = rejection
        except PROCESS_ENDS:
            raise
        except BaseException:
            logger.exception("request cannot be prepared, ending it")
            error = Internal("the request cannot be prepared; see the log of the text process")
        else:
            del self._preparations[request_state]
            self._submit_to_core(request_state, prepared)
            return
        del self._preparations[request_state]
        self._fail(request_state, error)

    def _submit_to_core(self, request_state: RequestState, prepared: PreparedRequest) -> None:
        num_tokens = len(prepared.prompt_token_ids)
        self._metrics.record_prompt_tokens(num_tokens, request_state.request.api_key_name)
        self._consume(request_state, num_tokens)
        tokenizer, eos_token_ids = self._processor.tokenizer, self._processor.limits.eos_token_ids
        try:
            requests = request_state.submit(prepared, tokenizer, eos_token_ids, self._clock())
            self._cores.submit(requests, request_state.sequence_ids, request_state.request.data_parallel_rank)
        except QuireError as error:
            # No core runs any of the sequences. If the request cannot be encoded, the first one has already failed,
            # because all have the same content.
            self._fail(request_state, error)

    def oversize_error(self, num_bytes: int) -> InvalidArgument:
        """Return the error for a message that was not read, because it exceeds the size limit."""
        return self._admission.limits.oversize_error(num_bytes)

    def cancel(self, frontend: FrontendSink, client_request_ids: Iterable[int]) -> None:
        """Abort requests of a frontend. Unknown ids are ignored, because those requests have ended."""
        open_requests = self._by_frontend[frontend]
        self._abort([open_requests[i] for i in client_request_ids if i in open_requests], frontend)

    def on_frontend_closed(self, frontend: FrontendSink) -> int:
        """Abort all requests of a frontend that disconnected. Return the number of these requests."""
        request_states = list(self._by_frontend[frontend].values())
        self._abort(request_states, frontend)
        del self._by_frontend[frontend]
        return len(request_states)

    def on_step(self, step: StepResult) -> None:
        """Send the results of a step of the engine core to the frontends.

        Then abort the sequences that have ended in the text process, but that the core still runs.
        """
        now = self._clock()
        for started in step.started:
            if (entry := self._by_sequence.get(started.id)) and entry[0].start_time is None:
                self._mark_started(entry[0], started)
        aborted_ids = [sequence_id for result in step.results for sequence_id in self._on_result(result, now)]
        if aborted_ids:
            self._cores.abort(aborted_ids)
        self._metrics.record_core_stats(step.stats)
        for adapter_event in step.adapter_events:
            self._metrics.adapter_metrics.record_adapter_event(adapter_event)
        self._metrics.adapter_metrics.residency.record(step.adapter_changes)

    def reader_of(self, sequence_id: int) -> FrontendSink | None:
        """Return the frontend that reads the stream of a sequence. Return None if the sequence is unknown, or if its
        output is sent as a whole."""
        entry = self._by_sequence.get(sequence_id)
        return entry[1] if entry is not None and entry[0].request.stream else None

    def on_core_connected(self) -> None:
        """Admit requests from now on."""
        self._admission.open()
        self._metrics.set_core_connected(True)

    def on_core_lost(self) -> None:
        """Fail every open request, and reject new ones until the engine core is connected again."""
        reason = "engine core is restarting; try again"
        self._admission.close(reason)
        self._metrics.set_core_connected(False)
        for request_state in self._open_requests():
            self._fail(request_state, Unavailable(reason))

    def on_sequences_lost(self, sequence_ids: Iterable[int], reason: str) -> None:
        """Fail the requests of sequences that were lost with one of several cores."""
        for request_state in {entry[0] for i in sequence_ids if (entry := self._by_sequence.get(i)) is not None}:
            self._fail(request_state, Unavailable(reason))

    def set_adapters(
        self,
        digest_by_name: Mapping[AdapterName, AdapterDigest],
        limits: Mapping[str, AdapterLimits] | None = None,
        chat_template_by_name: Mapping[str, str] | None = None,
        findable_names: Sequence[str] = (),
        sum_by_name: Mapping[AdapterName, str] | None = None,
    ) -> None:
        """Replace the adapters that requests can name, their limits, the files of their chat templates, and the
        patterns of further names that the supervisor can look up.

        Open requests keep their digest.
        """
        self._rate_limiter.set_limits(limits or {}, self._clock())
        self._admission.set_adapters(digest_by_name, chat_template_by_name or {}, findable_names, sum_by_name or {})
        self._last_use = {name: time for name, time in self._last_use.items() if name in digest_by_name}
        self._metrics.adapter_metrics.set_adapters({**self._admission.sum_digests(), **digest_by_name})

    def set_loading_adapters(self, names: Set[str]) -> None:
        """Replace the adapters that are being loaded. Requests that name such an adapter get UNAVAILABLE until it is
        loaded.
        """
        self._admission.set_loading_adapters(names)

    def adapter_idle_times(self) -> dict[AdapterName, float]:
        """Return for each adapter that had a request the seconds since its last one; 0 if a request is open."""
        now = self._clock()
        idle_times = {name: now - last_use for name, last_use in self._last_use.items()}
        return idle_times | {name: 0.0 for state in self._open_requests() for name in state.adapter.names}

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Reject new requests from now on; call `on_drained` when no request is open."""
        self._admission.start_draining()
        self._drain_callbacks.append(on_drained)
        self._notify_if_drained()

    def refresh_adapter_gauges(self) -> None:
        """Update the gauge of adapters in use. This is called each time before the metrics are rendered.

        An adapter in a slot counts as running, also without requests, because a request for it starts at once.
        """
        running: set[str] = {*self._metrics.adapter_metrics.residency.names_in_slots}
        waiting: set[str] = set()
        for request_state in self._open_requests():
            if (name := request_state.adapter.name) is not None:
                # Commas separate the names in the label.
                (waiting if request_state.start_time is None else running).add(name.replace(",", "+"))
        self._metrics.set_active_adapters(running, waiting)

    def status(self) -> dict[str, Any]:
        """Return the status for the supervisor: counts of requests, and the names of the parsers of chat outputs."""
        return {
            "num_open": self.num_open,
            "num_queued": self.num_queued,
            "core": not self._admission.closed_reason,
            "tool_call_parser": self._processor.limits.parser_names.tool_call_parser,
            "reasoning_parser": self._processor.limits.parser_names.reasoning_parser,
        }

    def reject(self, frontend: FrontendSink, client_request_id: int, error: QuireError) -> None:
        """Answer a request that was not admitted."""
        self._metrics.record_rejected(error.code)
        frontend.send(OutputDelta.from_error(client_request_id, error))

    def _fail(self, request_state: RequestState, error: QuireError) -> None:
        """End an open request with an error."""
        _, frontend = self._by_sequence[self._open_sequence_ids(request_state)[0]]
        self._metrics.record_failed(error.code)
        self._close(request_state, frontend, "error", error.code)
        frontend.send(request_state.to_error_delta(error.code, error_text(error)))

    def _mark_started(self, request_state: RequestState, started: StartedSequence) -> None:
        assert request_state.submit_time is not None, "the core runs only submitted requests"
        self._leave_queue(request_state)
        # Only the core can measure how long a request was in its queue, because the first result arrives after the
        # prompt was computed.
        request_state.start_time = request_state.submit_time + started.queued_s
        request_state.adapter_wait_s += started.adapter_wait_s
        self._metrics.record_started(request_state.adapter.name, request_state.start_time - request_state.arrival_time)

    def _on_result(self, result: SequenceDelta, now: float) -> list[int]:
        """Send a result to its frontend. Return the sequences that have ended in the text process, but that the core
        still runs.
        """
        entry = self._by_sequence.get(result.id)
        if entry is None:
            return []
        request_state, frontend = entry
        if result.num_drafts:
            self._metrics.adapter_metrics.record_drafts(request_state.adapter.name, result)
        completion = request_state.completion(result.id)
        num_tokens, last_token_time = completion.num_tokens, completion.last_token_time
        is_first = request_state.first_token_time is None
        try:
            deltas = request_state.update(_retryable(result), now)
        except PROCESS_ENDS:
            raise
        except BaseException:
            logger.exception("output of a request cannot be converted, ending it sequence_id=%d", result.id)
            aborted_ids = self._open_sequence_ids(request_state)
            self._fail(request_state, Internal("the output cannot be converted; see the log of the text process"))
            return aborted_ids
        if num_new_tokens := completion.num_tokens - num_tokens:
            if last_token_time is not None:
                self._metrics.record_next_token(now - last_token_time)
            elif is_first:
                self._metrics.record_first_token(request_state.adapter.name, now - request_state.arrival_time)
            self._metrics.record_generated_tokens(request_state.adapter.name, num_new_tokens)
            self._consume(request_state, num_new_tokens)
        aborted_ids = []
        if completion.finish_reason is not None or result.error_code is not None:
            del self._by_sequence[result.id]
            aborted_ids = [result.id] if result.finish_reason is None and result.error_code is None else []
        if deltas and deltas[-1].final:
            aborted_ids += self._open_sequence_ids(request_state)
            if error_code := deltas[-1].error_code:
                self._metrics.record_failed(error_code)
            reason = "error" if error_code else deltas[-1].finish_reason or ""
            self._close(request_state, frontend, reason, error_code or "")
        version = version_of(request_state.adapter.name or "")
        for delta in deltas:
            if delta.final and (response := self._kv_transfer_response(request_state)) is not None:
                delta = replace(delta, kv_transfer_params=response)
            frontend.send(replace(delta, adapter_version=version) if version else delta)
        return aborted_ids

    def _kv_transfer_response(self, request_state: RequestState) -> dict[str, Any] | None:
        request, roles = request_state.request, self._kv_transfer_roles
        if roles is None or request.kv_transfer_params is None:
            return None
        return roles.response(request, str(request_state.sequence_ids.start), request_state.prompt_keys)

    def _consume(self, request_state: RequestState, num_tokens: int) -> None:
        """Count tokens against the limits of the adapter and of the API key."""
        self._rate_limiter.consume(request_state.adapter.names, num_tokens)
        self._admission.api_key_access.consume(request_state.request.api_key_name, num_tokens)

    def _abort(self, request_states: list[RequestState], frontend: FrontendSink) -> None:
        submitted_ids = [
            sequence_id
            for request_state in request_states
            if request_state.submit_time is not None
            for sequence_id in self._open_sequence_ids(request_state)
        ]
        for request_state in request_states:
            self._close(request_state, frontend, "abort")
        if submitted_ids:
            self._cores.abort(submitted_ids)

    def _open_requests(self) -> list[RequestState]:
        return [
            request_state for requests_by_id in self._by_frontend.values() for request_state in requests_by_id.values()
        ]

    def _open_sequence_ids(self, request_state: RequestState) -> list[int]:
        """Return the unfinished sequences of a request."""
        return [sequence_id for sequence_id in request_state.sequence_ids if sequence_id in self._by_sequence]

    def _close(self, request_state: RequestState, frontend: FrontendSink, reason: str, error_code: str = "") -> None:
        if (preparation := self._preparations.pop(request_state, None)) is not None:
            preparation.cancel()
        self._rate_limiter.release(request_state.adapter.names)
        for sequence_id in self._open_sequence_ids(request_state):
            del self._by_sequence[sequence_id]
        request = request_state.request
        del self._by_frontend[frontend][request.id]
        if request_state.start_time is None:
            self._leave_queue(request_state)
        self._metrics.record_api_key_output(request.api_key_name, request_state.num_output_tokens)
        now = self._clock()
        self._metrics.record_finished(reason, request_state.summary(now))
        self._tracer.record(request_state, reason, error_code, now)
        self._notify_if_drained()

    def _leave_queue(self, request_state: RequestState) -> None:
        client = request_state.request.client
        self._queued_by_client[client] -= 1
        if not self._queued_by_client[client]:
            del self._queued_by_client[client]

    def _notify_if_drained(self) -> None:
        if not self._by_sequence:
            callbacks, self._drain_callbacks = self._drain_callbacks, []
            for callback in callbacks:
                callback()


def _retryable(result: SequenceDelta) -> SequenceDelta:
    """Replace the error NOT_FOUND by UNAVAILABLE.

    Admission has already found the adapter. Therefore, this error means that a restarted core has not loaded the
    adapter yet.
    """
    if result.error_code != Code.NOT_FOUND:
        return result
    return replace(result, error_code=Code.UNAVAILABLE, error="the adapter is being loaded after a restart; try again")
