# SPDX-License-Identifier: Apache-2.0
"""Joiner: results of steps on their way to the desk, those of one sequence joined while the pace has them wait.

A sequence's first tokens and its end never wait. Joined here, before they become text, several tokens cost hardly more
than one in all that follows: text, events, responses. Belongs to the event loop; it knows no request.
"""

import asyncio
from dataclasses import replace

from quire_engine.text.core_client import CoreListener
from quire_spec.protocol.messages import SequenceDelta, StepResult

RESPONSES_PER_S_PER_CORE = 250.0
"""Where the engine computes on the CPU: 5 % of each core. A stream alone gets each token at once (up to 250 a second
and core); 64 streams on two cores get theirs every 128 ms, faster than anyone reads."""


class ResponseThrottle:
    """When waiting responses may go out: after some did, not before as many could have gone one by one."""

    def __init__(self, responses_per_s: float | None) -> None:
        """`responses_per_s` None: at once, always; for an engine on a device of its own."""
        self._interval_s = 1.0 / responses_per_s if responses_per_s else 0.0
        self._next_send_at = 0.0

    def delay_s(self, now: float) -> float:
        """Seconds from `now` until responses that can wait may go out; 0 when they may now."""
        return max(0.0, self._next_send_at - now)

    def record_sent(self, num_responses: int, now: float) -> None:
        """So many went out just now, those included that could not wait."""
        self._next_send_at = max(self._next_send_at, now) + num_responses * self._interval_s


class ResultCoalescer:
    """Stands between the core's link and the desk."""

    def __init__(self, listener: CoreListener, throttle: ResponseThrottle) -> None:
        self._listener = listener
        self._throttle = throttle
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, list[SequenceDelta]] = {}
        """Results that wait, by sequence; none for one that has nothing waiting but has had its first tokens."""
        self._last_step: StepResult | None = None
        self._timer: asyncio.TimerHandle | None = None

    def on_core_connected(self) -> None:
        """The core is there."""
        self._listener.on_core_connected()

    def on_core_lost(self) -> None:
        """The core is gone, and every sequence with it."""
        self._pending, self._last_step = {}, None
        self._listener.on_core_lost()

    def on_step(self, step: StepResult) -> None:
        """The core made a step."""
        self._last_step = step
        delay_s = self._throttle.delay_s(self._loop.time())
        ready_results = [
            ready_result for result in step.results for ready_result in self._add_result(result, delay_s > 0)
        ]
        if delay_s <= 0:
            ready_results += self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(delay_s, self._on_timer)
        self._listener.on_step(replace(step, results=ready_results))

    def _add_result(self, result: SequenceDelta, is_throttled: bool) -> list[SequenceDelta]:
        """What goes on now; nothing for a result that waits."""
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
        """Everything that waits. Sequences that had nothing and were not in the last step may be over: forgotten."""
        assert self._last_step is not None, "something waits"
        pending_results = [results for results in self._pending.values() if results]
        live_ids = {results[-1].id for results in pending_results} | {result.id for result in self._last_step.results}
        self._pending = {sequence_id: [] for sequence_id in self._pending if sequence_id in live_ids}
        return [coalesce(results) for results in pending_results]

    def _on_timer(self) -> None:
        self._timer = None
        delay_s = self._throttle.delay_s(self._loop.time())
        if delay_s > 0:
            # Others, which could not wait, went meanwhile.
            self._timer = self._loop.call_later(delay_s, self._on_timer)
        elif self._last_step is not None and (results := self._flush()):
            self._listener.on_step(StepResult(results, [], self._last_step.stats))


def coalesce(results: list[SequenceDelta]) -> SequenceDelta:
    """One result that says what `results`, successive ones of a sequence, say together."""
    last_result = results[-1]
    if len(results) == 1:
        return last_result
    logprobs = [position for result in results for position in result.logprobs or []]
    return replace(
        last_result,
        token_ids=[token_id for result in results for token_id in result.token_ids],
        logprobs=logprobs or None,
    )
