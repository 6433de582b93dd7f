# SPDX-License-Identifier: Apache-2.0
"""Coalesces step results before they reach the request manager. Results wait here for one of two reasons.

1. The number of responses per second is limited. A response costs 0.2 ms of CPU time in the stub, the server and the
   client together. In the OpenAI front, it costs a quarter of that. If the engine computes on the same cores, the next
   token is delayed by this time. `ResponseThrottle` decides when waiting results can be sent. The first tokens of a
   sequence and its end never wait for it.
2. The frontend of a stream does not read. Its results wait until it reads again. The number of waiting results is
   limited. Beyond the limit, the connection is closed, which protects other frontends.

Results are merged before detokenizing, so that several tokens cost hardly more than one. This module is used only on
the event loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from quire_engine.text.cores.core_client import CoreListener
from quire_engine.text.request_manager import FrontendSink
from quire_spec.protocol.messages import SequenceDelta, StepResult

RESPONSES_PER_S_PER_CORE = 250.0
"""Maximum rate of responses if the engine runs on the CPU. At this rate, the responses take 5 % of the time of each
core. A single stream gets each token at once, up to 250 tokens per second and core. If there are 64 streams on two
cores, each stream gets its new tokens every 128 ms, which is faster than a person reads.
"""
OPENAI_RESPONSE_COST = 0.25
"""CPU cost of a response of the OpenAI front, relative to a response of the server. Therefore, each of 64 streams gets
its new tokens every 32 ms."""

MAX_WAITING_BYTES = 128 * 2**20
"""Limit for the results that wait for one frontend, in bytes of Python objects. If a frontend does not read, 256
streams of 50 tokens/s reach this limit in 25 s. A healthy frontend reads the same amount in 1 s.
"""

MAX_WAITING_STREAM_BYTES = 4 * 2**20
"""Limit for the results that wait for one stream, in bytes. It is enough for 10,000 tokens, which take 200 s at 50
tokens/s. If each token has 20 log probabilities, it is enough for 600 tokens, which take 12 s. A healthy reader never
falls this far behind.
"""

# Approximate sizes of the Python objects.
_RESULT_BYTES = 380
_TOKEN_ID_BYTES = 36
_LOGPROB_BYTES = 330


class ResultListener(CoreListener, Protocol):
    """Receives the coalesced results. The request manager is the listener."""

    def reader_of(self, sequence_id: int) -> FrontendSink | None:
        """Return the frontend that reads the stream of a sequence; None if nothing is streamed."""


class ResponseThrottle:
    """Limits the rate of responses. After n responses were sent at the same time, the next ones wait for n intervals.
    The caller passes the time.
    """

    def __init__(self, responses_per_s: float | None) -> None:
        """If `responses_per_s` is None, nothing is delayed. This is used if the engine does not compute on the CPU."""
        self._interval_s = 1.0 / responses_per_s if responses_per_s else 0.0
        self._next_send_at = 0.0

    def delay_s(self, now: float) -> float:
        """Return the seconds from `now` until waiting responses can be sent; 0 if they can be sent now."""
        return max(0.0, self._next_send_at - now)

    def record_sent(self, num_responses: float, now: float) -> None:
        """Count the responses that were sent at `now`, including those that could not wait. A cheap response counts as
        a fraction of a response.
        """
        self._next_send_at = max(self._next_send_at, now) + num_responses * self._interval_s


class ResultCoalescer:
    """A CoreListener between the core client and the request manager."""

    def __init__(self, listener: ResultListener, throttle: ResponseThrottle) -> None:
        self._listener = listener
        self._throttle = throttle
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, list[SequenceDelta]] = {}
        """Maps the id of a sequence to its waiting results. The list is empty if the first tokens of the sequence were
        passed on and none of its results waits."""
        self._backlogs: dict[FrontendSink, _Backlog] = {}
        """The results that wait for frontends that do not read."""
        self._last_step: StepResult | None = None
        self._timer: asyncio.TimerHandle | None = None

    def on_core_connected(self) -> None:
        """Called when the core is connected."""
        self._listener.on_core_connected()

    def on_core_lost(self) -> None:
        """Discard all waiting results, because their sequences are lost with the core."""
        self._pending, self._backlogs, self._last_step = {}, {}, None
        self._listener.on_core_lost()

    def on_step(self, step: StepResult) -> None:
        """Pass on the results that cannot wait, and all others if the throttle allows it."""
        self._last_step = step
        delay_s = self._throttle.delay_s(self._loop.time())
        ready_results = [
            ready_result
            for result in step.results
            if not self._hold(result)
            for ready_result in self._add_result(result, delay_s > 0)
        ]
        if delay_s <= 0:
            ready_results += self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(delay_s, self._on_timer)
        self._listener.on_step(replace(step, results=ready_results))

    def on_frontend_writable(self, frontend: FrontendSink) -> None:
        """Pass on the results that waited for a frontend, because it reads again."""
        if (backlog := self._backlogs.pop(frontend, None)) is not None:
            assert self._last_step is not None, "a result was added"
            self._listener.on_step(StepResult(backlog.merged_results(), [], self._last_step.stats))

    def on_frontend_closed(self, frontend: FrontendSink) -> None:
        """Discard the results that waited for a frontend that disconnected."""
        self._backlogs.pop(frontend, None)

    def _hold(self, result: SequenceDelta) -> bool:
        """If the frontend of a stream does not read, keep the result and return True."""
        frontend = self._listener.reader_of(result.id)
        if frontend is None or not frontend.is_blocked:
            return False
        backlog = self._backlogs.setdefault(frontend, _Backlog())
        backlog.add([*self._pending.pop(result.id, ()), result])
        if overflow_reason := backlog.overflow_reason:
            del self._backlogs[frontend]
            frontend.close_slow_reader(overflow_reason)
        return True

    def _add_result(self, result: SequenceDelta, is_throttled: bool) -> list[SequenceDelta]:
        """Return the results to pass on now; the list is empty if this result has to wait."""
        pending = self._pending.get(result.id)
        if result.error_code is not None:
            self._pending.pop(result.id, None)
            return [coalesce(pending), result] if pending else [result]
        if result.finish_reason is not None:
            self._pending.pop(result.id, None)
        elif pending is None:
            self._pending[result.id] = []
        elif is_throttled:
            pending.append(result)
            return []
        elif pending:
            self._pending[result.id] = []
        return [coalesce([*pending, result])] if pending else [result]

    def _flush(self) -> list[SequenceDelta]:
        """Remove and return all waiting results.

        Sequences that have no waiting result and were not in the last step are forgotten, because they may have ended.
        """
        assert self._last_step is not None, "a result was added"
        pending_results = [results for results in self._pending.values() if results]
        live_ids = {results[-1].id for results in pending_results} | {result.id for result in self._last_step.results}
        self._pending = {sequence_id: [] for sequence_id in self._pending if sequence_id in live_ids}
        return [coalesce(results) for results in pending_results]

    def _on_timer(self) -> None:
        self._timer = None
        delay_s = self._throttle.delay_s(self._loop.time())
        if delay_s > 0:
            # Results that must not wait may have been sent in the meantime, so the next ones must wait longer.
            self._timer = self._loop.call_later(delay_s, self._on_timer)
        elif self._last_step is not None and (results := self._flush()):
            self._listener.on_step(StepResult(results, [], self._last_step.stats))


@dataclass(slots=True)
class _Backlog:
    """The results that wait for one frontend."""

    results: dict[int, list[SequenceDelta]] = field(default_factory=dict)
    """Results by sequence. They are merged only at the end; merging each one would take quadratic time."""
    num_bytes_by_sequence: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0
    overflow_reason: str | None = None
    """Description of the limit that the results exceed; None if they are within all limits."""

    def add(self, results: Sequence[SequenceDelta]) -> None:
        """Add successive results of one sequence."""
        sequence_id, num_new_bytes = results[0].id, sum(map(_estimate_bytes, results))
        self.results.setdefault(sequence_id, []).extend(results)
        num_stream_bytes = self.num_bytes_by_sequence.get(sequence_id, 0) + num_new_bytes
        self.num_bytes_by_sequence[sequence_id] = num_stream_bytes
        self.num_bytes += num_new_bytes
        for scope, num_bytes, limit in (
            (" of one request", num_stream_bytes, MAX_WAITING_STREAM_BYTES),
            ("", self.num_bytes, MAX_WAITING_BYTES),
        ):
            if num_bytes > limit:
                self.overflow_reason = f"{num_bytes} unsent bytes{scope} exceed the limit of {limit}"
                return

    def merged_results(self) -> list[SequenceDelta]:
        """Return all results. Those of one sequence are merged, except an error."""
        merged = []
        for results in self.results.values():
            *others, last = results
            if last.error_code is None:
                merged.append(coalesce(results))
            else:
                merged += [coalesce(others), last] if others else [last]
        return merged


def _estimate_bytes(result: SequenceDelta) -> int:
    num_logprobs = sum(map(len, (*(result.logprobs or ()), *(result.prompt_logprobs or ()))))
    return _RESULT_BYTES + _TOKEN_ID_BYTES * len(result.token_ids) + _LOGPROB_BYTES * num_logprobs


def coalesce(results: list[SequenceDelta]) -> SequenceDelta:
    """Merge successive results of one sequence into one result."""
    last_result = results[-1]
    if len(results) == 1:
        return last_result
    logprobs = [position for result in results for position in result.logprobs or []]
    prompt_logprobs = next((result.prompt_logprobs for result in results if result.prompt_logprobs is not None), None)
    num_cached_tokens = next((r.num_cached_tokens for r in results if r.num_cached_tokens is not None), None)
    return replace(
        last_result,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=num_cached_tokens,
        prompt_keys=next((result.prompt_keys for result in results if result.prompt_keys is not None), None),
        token_ids=[token_id for result in results for token_id in result.token_ids],
        logprobs=logprobs or None,
        num_drafts=sum(result.num_drafts for result in results),
        num_draft_tokens=sum(result.num_draft_tokens for result in results),
        num_accepted_draft_tokens=sum(result.num_accepted_draft_tokens for result in results),
    )
