# SPDX-License-Identifier: Apache-2.0
"""Joiner: results of steps on their way to the desk, those of one sequence joined while the pace has them wait.

A sequence's first tokens and its end never wait. Joined here, before they become text, several tokens cost hardly more
than one in all that follows: text, events, responses. Belongs to the event loop; it knows no request.
"""

import asyncio
from dataclasses import replace

from quire_engine.core_link import CoreClient
from quire_engine.pace import Pace
from quire_spec.protocol.messages import SequenceDelta, StepResult


class Joiner:
    """Stands between the core's link and the desk."""

    def __init__(self, desk: CoreClient, pace: Pace) -> None:
        self._desk = desk
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, list[SequenceDelta]] = {}
        """Results that wait, by sequence; none for one that has nothing waiting but has had its first tokens."""
        self._last: StepResult | None = None
        self._timer: asyncio.TimerHandle | None = None

    def core_came(self) -> None:
        """The core is there."""
        self._desk.core_came()

    def core_left(self) -> None:
        """The core is gone, and every sequence with it."""
        self._held, self._last = {}, None
        self._desk.core_left()

    def take(self, step: StepResult) -> None:
        """The core made a step."""
        self._last = step
        wait_s = self._pace.wait_s(self._loop.time())
        now = [each for result in step.results for each in self._hold(result, wait_s > 0)]
        if wait_s <= 0:
            now += self._release()
        elif self._timer is None:
            self._timer = self._loop.call_later(wait_s, self._tick)
        self._desk.take(replace(step, results=now))

    def _hold(self, result: SequenceDelta, waits: bool) -> list[SequenceDelta]:
        """What goes on now; nothing for a result that waits."""
        held = self._held.get(result.id)
        if result.error_code is not None:
            self._held.pop(result.id, None)
            return [joined(held), result] if held else [result]
        if result.finish_reason is not None:
            self._held.pop(result.id, None)
        elif held is None:
            self._held[result.id] = []
        elif waits:
            held.append(result)
            return []
        elif held:
            self._held[result.id] = []
        return [joined([*held, result])] if held else [result]

    def _release(self) -> list[SequenceDelta]:
        """Everything that waits. Sequences that had nothing and were not in the last step may be over: forgotten."""
        assert self._last is not None, "something waits"
        waiting = [results for results in self._held.values() if results]
        alive = {results[-1].id for results in waiting} | {result.id for result in self._last.results}
        self._held = {id: [] for id in self._held if id in alive}
        return [joined(results) for results in waiting]

    def _tick(self) -> None:
        self._timer = None
        wait_s = self._pace.wait_s(self._loop.time())
        if wait_s > 0:
            # Others, which could not wait, went meanwhile.
            self._timer = self._loop.call_later(wait_s, self._tick)
        elif self._last is not None and (results := self._release()):
            self._desk.take(StepResult(results, [], self._last.stats))


def joined(results: list[SequenceDelta]) -> SequenceDelta:
    """One result that says what `results`, successive ones of a sequence, say together."""
    last = results[-1]
    if len(results) == 1:
        return last
    logprobs = [token for result in results for token in result.logprobs or []]
    return replace(
        last,
        token_ids=[token_id for result in results for token_id in result.token_ids],
        logprobs=logprobs or None,
    )
