# SPDX-License-Identifier: Apache-2.0
"""Runs the requests of a benchmark: those alone, and those of each load."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from quire_operator.cli.bench.client import Client, Outcome
from quire_operator.cli.bench.workload import Load, TokensOfWords, Workload
from quire_spec.errors import Unavailable

NUM_CHECKED = 8
MAX_CHECKED_TOKENS = 64
"""Of an output that is compared. The requests alone take a time of their own."""
_CHECK_DISTANCE = 4
"""Every fourth request of a load is one whose output is compared, until all have been sent."""
_MAX_FAILURES = 20
"""A load with so many failed requests ends early."""
_FAILURE_PAUSE_S = 0.1
_CALIBRATION_WORDS = (40, 160)


@dataclass(slots=True)
class LoadResult:
    """What came of one load."""

    load: Load
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    checked: dict[int, Outcome] = field(default_factory=dict)
    """Outcomes of the requests that are compared, by their number in the list of those alone."""

    @property
    def num_failed(self) -> int:
        return sum(outcome.error is not None for outcome in (*self.outcomes, *self.checked.values()))


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a load ends."""

    num_prompts: int | None
    seconds: float | None
    ends_after_failures: bool = True


class Runner:
    """Runs one load after the other."""

    def __init__(self, client: Client, workload: Workload, limits: Limits, on_done: Callable[[Outcome], None]) -> None:
        """`on_done` is called after each request of a load."""
        self._client, self._workload, self._limits, self._on_done = client, workload, limits, on_done
        self._alone: list[Outcome] = []
        self._has_logprobs = True
        self._num_sent = 0

    @property
    def alone(self) -> list[Outcome]:
        """The requests that were sent alone."""
        return self._alone

    async def calibrate(self, model: str) -> None:
        """Measure how many tokens a word has, so that prompts get their length.

        Raises:
            Unavailable: a request failed.
        """
        words = replace(self._workload, weights={model: 1.0}, output_len=(1, 1), tokens_of_words=TokensOfWords())
        counts = []
        for number in _CALIBRATION_WORDS:
            outcome = await self._client.send(replace(words, input_len=(number, number)).request("calibration", 0))
            self._require_success(outcome)
            counts.append(outcome.num_input_tokens)
        few, many = _CALIBRATION_WORDS
        per_word = (counts[1] - counts[0]) / (many - few)
        if per_word > 0:  # a server that sends no usage keeps the default
            tokens = TokensOfWords(counts[1] - per_word * many, per_word)
            self._workload = replace(self._workload, tokens_of_words=tokens)

    async def run_alone(self) -> None:
        """Send the requests that are compared, one at a time. They also warm the server up.

        Raises:
            Unavailable: a request failed.
        """
        models = list(self._workload.weights)
        for number in range(NUM_CHECKED):
            request = self._workload.request("check", number)
            model = request.model if self._workload.dataset else models[number % len(models)]
            request = replace(request, model=model, max_tokens=min(request.max_tokens, MAX_CHECKED_TOKENS))
            outcome = await self._client.send(request, self._has_logprobs)
            if self._has_logprobs and outcome.error is not None:
                self._has_logprobs = False
                outcome = await self._client.send(request)
            self._require_success(outcome)
            self._alone.append(outcome)

    async def run(self, load: Load) -> LoadResult:
        """Run one load."""
        result = LoadResult(load)
        numbers = itertools.count()
        started_at = time.perf_counter()
        if load.concurrency is not None:
            async with asyncio.TaskGroup() as group:
                for _ in range(load.concurrency):
                    group.create_task(self._work(result, numbers, started_at))
        else:
            await self._run_arrivals(result, numbers, started_at, load.request_rate or 0.0)
        result.seconds = max(o.ended_at for o in (*result.outcomes, *result.checked.values())) - started_at
        self._num_sent += len(result.outcomes)
        return result

    async def _work(self, result: LoadResult, numbers: "itertools.count[int]", started_at: float) -> None:
        """Send one request after the other until the load ends."""
        while not self._is_over(result, started_at) and (number := next(numbers)) < (self._limits.num_prompts or 2**62):
            outcome = await self._send(result, number)
            if outcome.error is not None:
                await asyncio.sleep(_FAILURE_PAUSE_S)

    async def _run_arrivals(
        self, result: LoadResult, numbers: "itertools.count[int]", started_at: float, rate: float
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for seconds in self._workload.arrivals(rate):
                number = next(numbers)
                if number == self._limits.num_prompts or seconds >= (self._limits.seconds or float("inf")):
                    break
                await asyncio.sleep(started_at + seconds - time.perf_counter())
                if self._is_over(result, started_at):
                    break
                group.create_task(self._send(result, number))

    def _is_over(self, result: LoadResult, started_at: float) -> bool:
        if self._limits.ends_after_failures and result.num_failed >= _MAX_FAILURES:
            return True
        return self._limits.seconds is not None and time.perf_counter() - started_at >= self._limits.seconds

    async def _send(self, result: LoadResult, number: int) -> Outcome:
        check = self._check_of(result.load, number)
        if check is None:
            request = self._workload.request(f"load {result.load}", number, self._num_sent)
            outcome = await self._client.send(request)
            result.outcomes.append(outcome)
        else:
            outcome = await self._client.send(self._alone[check].request, self._has_logprobs)
            result.checked[check] = outcome
        self._on_done(outcome)
        return outcome

    def _check_of(self, load: Load, number: int) -> int | None:
        """Return the number of the comparison that this request of a load is for. The first is for one in the middle of
        those that start together, so that it never runs alone."""
        first = max(1, (load.concurrency or 1) // 2)
        if self._limits.num_prompts is not None:
            first = min(first, self._limits.num_prompts // 2)
        check, rest = divmod(number - first, _CHECK_DISTANCE)
        return check if rest == 0 and 0 <= check < len(self._alone) else None

    @staticmethod
    def _require_success(outcome: Outcome) -> None:
        if outcome.error is not None:
            raise Unavailable(f"model {outcome.request.model}: a request alone failed: {outcome.error}")
