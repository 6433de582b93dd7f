# SPDX-License-Identifier: Apache-2.0
"""Step executor: plans the steps of an engine, and runs them on the model runner one at a time or asynchronously.

With async scheduling, each step is launched while the previous one is in flight. With pipeline stages, as many steps
are in flight as there are stages. The engine owns the step executor and
calls it from one thread. A device error ends the sequences of the step, but not the engine.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import msgspec

from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.sequence import FinishReason, Logprob, Sequence
from quire_engine.step.plan import InFlightStep, RunnerLost, SpanOutput, StepPlan
from quire_engine.worker.interface import ModelRunner
from quire_spec.engine.pooling_params import NOT_FINITE, TOO_LARGE, too_large_error
from quire_spec.errors import PROCESS_ENDS, Code, Internal, InvalidArgument
from quire_spec.protocol.messages import RankedToken, SequenceDelta, StartedSequence

logger = logging.getLogger(__name__)


class StepExecutor:
    """Runs the steps of a scheduler on a model runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        async_scheduling: bool,
        clock: Callable[[], float],
        load_slots: Callable[[], bool],
        max_in_flight: int = 1,
    ) -> None:
        """Create an executor.

        Args:
            scheduler: plans the steps.
            runner: runs the steps.
            async_scheduling: where possible, launch a step while the previous step is still in flight.
            clock: monotonic seconds.
            load_slots: starts to copy adapters into slots. It returns whether further sequences can run because of
                this.
            max_in_flight: number of steps in flight without async scheduling.
        """
        self._scheduler = scheduler
        self._runner = runner
        self.async_scheduling = async_scheduling
        self._clock = clock
        self._load_slots = load_slots
        self._max_in_flight = max_in_flight
        # The steps that were launched while an earlier one was in flight.
        self._in_flight: deque[InFlightStep] = deque()
        self._started: list[StartedSequence] = []

    def step(self) -> list[SequenceDelta]:
        """Run at most one step. With async scheduling or pipeline stages, launch the next step before waiting for this
        one.

        Raises:
            RunnerLost: no step can run any more.
        """
        if self.async_scheduling:
            return self._step_async()
        return self._step_sync() if self._max_in_flight == 1 else self._step_staged()

    def pop_started(self) -> list[StartedSequence]:
        """Return the sequences whose first step ended after the previous call of this method."""
        started, self._started = self._started, []
        return started

    def _step_sync(self) -> list[SequenceDelta]:
        """Plan a step and run it."""
        plan = self._plan_step()
        return [] if plan is None else self._complete(InFlightStep(plan, lambda: self._runner.execute(plan)))

    def _step_staged(self) -> list[SequenceDelta]:
        """Launch steps until all stages have one, then complete the earliest step."""
        while len(self._in_flight) < self._max_in_flight:
            step = self._launch(self._plan_step() if not self._in_flight else self._plan_beside())
            if step is None:
                break
            self._in_flight.append(step)
            if step.launch_failed:
                break
        return self._complete(self._in_flight.popleft()) if self._in_flight else []

    def _step_async(self) -> list[SequenceDelta]:
        """Launch the next step, then complete the one in flight."""
        step = self._in_flight.popleft() if self._in_flight else self._sample_tokens(self._launch(self._plan_step()))
        if step is None:
            return []
        if not step.launch_failed:
            next_plan = self._scheduler.schedule_async(self._clock())
            try:
                self._load_slots()
            except BaseException as error:  # Control-C
                if next_plan is not None:
                    self._in_flight.append(InFlightStep(next_plan, partial(_raise, error), launch_failed=True))
                self._fail_step(step)
                raise
            if (next_step := self._launch(next_plan)) is not None:
                self._in_flight.append(next_step)
        results = self._complete(step)
        if (next_step := self._sample_tokens(self._in_flight.popleft() if self._in_flight else None)) is not None:
            self._in_flight.append(next_step)
        return results

    def _plan_step(self) -> StepPlan | None:
        plan = self._scheduler.schedule(self._clock())
        try:
            slots_loaded = self._load_slots()
        except BaseException:  # Control-C
            if plan is not None:
                self._scheduler.fail_step(plan)
            raise
        return self._scheduler.schedule(self._clock()) if slots_loaded and plan is None else plan

    def _plan_beside(self) -> StepPlan | None:
        self._load_slots()
        return self._scheduler.schedule_beside(self._clock())

    def _launch(self, plan: StepPlan | None) -> InFlightStep | None:
        """Launch a step. If the launch fails, the exception is stored. It is raised when the step is completed.

        In this way, the step that is already in flight completes first.
        """
        if plan is None:
            return None
        try:
            return InFlightStep(plan, self._runner.execute_async(plan))
        except BaseException as error:
            return InFlightStep(plan, partial(_raise, error), launch_failed=True)

    def _sample_tokens(self, step: InFlightStep | None) -> InFlightStep | None:
        """Run only the sampling that was postponed because a step has grammars. Do nothing for other steps.

        Grammars need the tokens of the previous step.
        """
        if step is None or step.launch_failed or not any(span.sequence.grammar for span in step.plan.spans):
            return step
        try:
            self._runner.sample_tokens()
        except BaseException as error:
            return InFlightStep(step.plan, partial(_raise, error), launch_failed=True)
        return step

    def _complete(self, step: InFlightStep) -> list[SequenceDelta]:
        """Wait for a step and apply its outputs."""
        self._started += step.plan.started
        try:
            span_outputs = step.get_outputs()
        except RunnerLost:
            self._fail_step(step)
            raise
        except PROCESS_ENDS:
            # Control-C can interrupt an offline run. The caller must be able to use the engine afterwards.
            self._fail_step(step)
            raise
        except BaseException as error:  # a device error ends only the sequences of this step, not the engine
            logger.exception("step failed num_sequences=%d", len(step.plan.spans))
            reason = f"the step failed: {type(error).__name__}: {str(error)[:200]}"
            return [error_result(sequence, Internal.code, reason) for sequence in self._fail_step(step)]
        return [
            _sequence_result(sequence, span_output)
            for sequence, span_output in self._scheduler.update_from_step(step.plan, span_outputs)
        ]

    def _fail_step(self, step: InFlightStep) -> list[Sequence]:
        """Finish the sequences of a failed step and the sequences of the steps that were launched after it."""
        sequences = self._scheduler.fail_step(step.plan)
        while self._in_flight:
            next_step = self._in_flight.popleft()
            self._started += next_step.plan.started
            try:
                next_step.get_outputs()
            except PROCESS_ENDS:
                raise
            except BaseException as error:  # its outputs are useless; only its completion matters
                logger.info("step after a failed step also failed error=%s: %s", type(error).__name__, str(error)[:200])
            finally:
                sequences += self._scheduler.fail_step(next_step.plan)
        return sequences


def error_result(sequence: Sequence, code: Code, error_message: str) -> SequenceDelta:
    """Return the result of a sequence that failed."""
    return SequenceDelta(sequence.id, [], error_code=code, error=error_message)


def _sequence_result(sequence: Sequence, span_output: SpanOutput) -> SequenceDelta:
    if sequence.finish_reason is FinishReason.ERROR and sequence.grammar is not None:
        return error_result(sequence, InvalidArgument.code, sequence.grammar.error)
    if sequence.finish_reason is FinishReason.ERROR and sequence.beam_group is not None:
        return error_result(sequence, Internal.code, "beam search: the model returned no finite log probability")
    if span_output.pooled == NOT_FINITE:
        return error_result(sequence, Internal.code, "pooling: the model returned NaN or infinity; check its weights")
    if span_output.pooled == TOO_LARGE:
        return error_result(sequence, InvalidArgument.code, too_large_error(len(sequence.prompt_token_ids)))
    logprobs = None if span_output.logprobs is None else _logprob_lists(span_output.logprobs)
    reason = None if sequence.finish_reason is None else sequence.finish_reason.value
    result = SequenceDelta(
        sequence.id,
        span_output.token_ids,
        reason,
        logprobs,
        num_drafts=int(span_output.num_draft_tokens > 0),
        num_draft_tokens=span_output.num_draft_tokens,
        num_accepted_draft_tokens=span_output.num_accepted_tokens,
        cumulative_logprob=span_output.cumulative_logprob,
        pooled=span_output.pooled,
    )
    if len(sequence.output_token_ids) > len(span_output.token_ids):
        return result
    computed_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    prompt_logprobs = None if sequence.params.prompt_logprobs is None else _logprob_lists(computed_logprobs)
    return msgspec.structs.replace(
        result,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=sequence.num_cached_tokens,
        prompt_keys=sequence.prompt_keys,
    )


def _logprob_lists(positions: list[list[Logprob]]) -> list[list[RankedToken]]:
    return [[(entry.token_id, entry.logprob, entry.rank) for entry in entries] for entries in positions]


def _raise(error: BaseException) -> NoReturn:
    raise error
