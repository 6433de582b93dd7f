# SPDX-License-Identifier: Apache-2.0
"""Steps: plans steps and has the runner carry them out, one at a time or each begun while the last one is in flight.

The engine owns it and calls it from one thread. What a device throws costs the sequences of a step, never the engine.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

from quire_engine.request import Logprob, Sequence
from quire_engine.scheduler import Scheduler
from quire_engine.step import Flight, Runner, RunnerLost, Sampled, StepPlan
from quire_spec.errors import Code, Internal
from quire_spec.protocol.messages import SequenceDelta

logger = logging.getLogger(__name__)


class Steps:
    """Runs a scheduler's steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ahead: bool,
        clock: Callable[[], float],
        load_slots: Callable[[], bool],
    ) -> None:
        """`ahead`: begin each step, where that can be, while the last one is in flight. `load_slots` has adapters
        copied into slots; it returns whether sequences may run now that could not before."""
        self._scheduler = scheduler
        self._runner = runner
        self.ahead = ahead
        self._clock = clock
        self._load_slots = load_slots
        # Begun while the one before it was in flight.
        self._flight: Flight | None = None
        self._started: list[int] = []

    def advance(self) -> list[SequenceDelta]:
        """Run at most one step, with the next one begun before it is over if steps are begun ahead.

        Raises:
            RunnerLost: no step can run any more.
        """
        return self._overlap() if self.ahead else self._run()

    def take_started(self) -> list[int]:
        """Ids of the sequences that ran for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def _run(self) -> list[SequenceDelta]:
        """Plan a step and run it."""
        plan = self._plan()
        return [] if plan is None else self._finish(Flight(plan, lambda: self._runner.execute(plan)))

    def _overlap(self) -> list[SequenceDelta]:
        """Take what the step in flight computed, with the next one begun before."""
        flight = self._flight or self._begin(self._plan())
        self._flight = None
        if flight is None:
            return []
        if not flight.failed:
            following = self._scheduler.schedule_ahead(self._clock())
            try:
                self._load_slots()
            except BaseException as error:  # Control-C
                if following is not None:
                    self._flight = Flight(following, partial(_throw, error), failed=True)
                self._fail(flight)
                raise
            self._flight = self._begin(following)
        return self._finish(flight)

    def _plan(self) -> StepPlan | None:
        plan = self._scheduler.schedule(self._clock())
        try:
            loaded = self._load_slots()
        except BaseException:  # Control-C
            if plan is not None:
                self._scheduler.fail(plan)
            raise
        return self._scheduler.schedule(self._clock()) if loaded and plan is None else plan

    def _begin(self, plan: StepPlan | None) -> Flight | None:
        """What is thrown here comes when it is the step's turn: the one before it goes on to its end."""
        if plan is None:
            return None
        try:
            return Flight(plan, self._runner.begin(plan))
        except BaseException as error:
            return Flight(plan, partial(_throw, error), failed=True)

    def _finish(self, flight: Flight) -> list[SequenceDelta]:
        """Wait for a step and take what it computed."""
        self._started += flight.plan.started
        try:
            sampled = flight.outcome()
        except RunnerLost:
            self._fail(flight)
            raise
        except Exception as error:  # whatever a device throws costs this step's sequences, never the engine
            logger.exception("step failed num_sequences=%d", len(flight.plan.spans))
            reason = f"the step failed: {type(error).__name__}: {str(error)[:200]}"
            return [failure(sequence, Internal.code, reason) for sequence in self._fail(flight)]
        except BaseException:
            # Control-C in an offline run: the caller goes on with the engine, or could.
            self._fail(flight)
            raise
        return [_result(sequence, new) for sequence, new in self._scheduler.finish(flight.plan, sampled)]

    def _fail(self, flight: Flight) -> list[Sequence]:
        """End the sequences of a step that failed, and those of the one that was begun on top of it."""
        failed = self._scheduler.fail(flight.plan)
        following, self._flight = self._flight, None
        if following is not None:
            self._started += following.plan.started
            try:
                following.outcome()
            except Exception as error:  # nothing of it is of use, only that it is over
                logger.info("the step after the one that failed: %s: %s", type(error).__name__, str(error)[:200])
            finally:
                failed += self._scheduler.fail(following.plan)
        return failed


def failure(sequence: Sequence, code: Code, message: str) -> SequenceDelta:
    """The last word on a sequence that failed."""
    return SequenceDelta(sequence.id, [], error_code=code, error=message)


def _result(sequence: Sequence, new: Sampled) -> SequenceDelta:
    logprobs, reason = None if new.logprobs is None else _plain(new.logprobs), sequence.finish_reason
    result = SequenceDelta(sequence.id, new.token_ids, reason and reason.value, logprobs)
    if len(sequence.output_token_ids) > len(new.token_ids):
        return result
    scored, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    prompt_logprobs = None if sequence.params.prompt_logprobs is None else _plain(scored)
    return replace(result, prompt_logprobs=prompt_logprobs, num_cached_tokens=sequence.num_cached_tokens)


def _plain(positions: list[list[Logprob]]) -> list[list[list[float]]]:
    return [[[entry.token_id, entry.logprob, entry.rank] for entry in entries] for entries in positions]


def _throw(error: BaseException) -> NoReturn:
    raise error
