# SPDX-License-Identifier: Apache-2.0
"""Requests to a running engine core over its own socket, and when each of their tokens came.

The core is asked directly, as the text process asks it: between it and a client, tokens are joined at a pace, so that
times between them would tell of the pace and not of the steps.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from measure import WrongOutput, shortfall
from support.pod import Peer, Pod

from quire_spec.protocol.messages import AdapterEvent, SequenceRequest, StepResult


class Ask(NamedTuple):
    """A request: greedy, and end-of-sequence is ignored."""

    at: float
    """Seconds from the start; with a closed loop, of no meaning."""
    kind: str
    adapter: str | None
    prompt: list[int]
    num_tokens: int


@dataclass(slots=True)
class Answer:
    """What came of it."""

    ask: Ask
    sent: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Of each step that brought tokens."""
    started: float = 0.0
    """Its first step was planned, as the core told."""


def send(
    pod: Pod, asks: list[Ask], num_open: int | None = None, moves: list[AdapterEvent] | None = None
) -> list[Answer]:
    """Send each at its time, or with `num_open` as soon as fewer are open; the answers, when all are there, and in
    `moves` where adapters went meanwhile.

    Raises:
        WrongOutput: a request failed, or got another number of tokens than it asked for.
    """
    answers: dict[int, Answer] = {}
    with pod.peer("core", "text") as text:
        stop, room = threading.Event(), threading.Semaphore(num_open or len(asks))
        sender = threading.Thread(target=_send, args=(text, asks, answers, num_open, room, stop))
        sender.start()
        try:
            _receive(text, len(asks), answers, room, [] if moves is None else moves)
        finally:
            stop.set()
            sender.join()
    return list(answers.values())


def _send(
    text: Peer,
    asks: list[Ask],
    answers: dict[int, Answer],
    num_open: int | None,
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    start, first = time.perf_counter(), next(_ids)
    for i, ask in enumerate(asks):
        if num_open is None:
            stop.wait(start + ask.at - time.perf_counter())
        while not stop.is_set() and not room.acquire(timeout=0.2):
            pass
        if stop.is_set():
            return
        answers[first + i] = Answer(ask, time.perf_counter())
        params = {"temperature": 0.0, "max_tokens": ask.num_tokens, "ignore_eos": True}
        text.send(SequenceRequest(first + i, ask.prompt, params, ask.adapter))


_ids = itertools.count(1, 1_000_000)


def _receive(
    text: Peer, num: int, answers: dict[int, Answer], room: threading.Semaphore, moves: list[AdapterEvent]
) -> None:
    done = 0
    while done < num:
        step = text.receive()
        now = time.perf_counter()
        if not isinstance(step, StepResult):
            continue
        moves += step.adapter_events
        for id in step.started_ids:
            answers[id].started = now
        for result in step.results:
            answer = answers[result.id]
            if result.error_code:
                raise WrongOutput(f"a request of adapter {answer.ask.adapter!r} failed: {result.error}")
            if result.token_ids:
                answer.token_ids += result.token_ids
                answer.times.append(now)
            if result.finish_reason:
                done += 1
                room.release()
                if len(answer.token_ids) != answer.ask.num_tokens:
                    raise WrongOutput(f"asked for {answer.ask.num_tokens} tokens, got {len(answer.token_ids)}")


def gap(pod: Pod, adapter: str, prompt: list[int], output: list[int]) -> float:
    """How far tokens fall short of the likeliest at worst, by the core's own logits with that adapter."""
    params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 1}
    scored: list[list[list[float]]] = []
    with pod.peer("core", "text") as text:
        text.send(SequenceRequest(next(_ids), [*prompt, *output], params, adapter))
        while True:
            step = text.receive()
            for result in step.results if isinstance(step, StepResult) else ():
                if result.error_code:
                    raise WrongOutput(f"scoring with adapter {adapter!r} failed: {result.error}")
                scored += result.prompt_logprobs or []
                if result.finish_reason:
                    return shortfall(scored[-len(output) :])


def poisson(draw: random.Random, rate: float, seconds: float, make: Callable[[float], Ask]) -> Iterator[Ask]:
    """Requests of a Poisson process."""
    at = draw.expovariate(rate)
    while at < seconds:
        yield make(at)
        at += draw.expovariate(rate)


def zipf_weights(num: int, exponent: float) -> list[float]:
    """How likely each of `num` is, by its rank."""
    return [1 / rank**exponent for rank in range(1, num + 1)]


def gaps(answers: list[Answer]) -> list[float]:
    """Seconds between successive tokens of each answer, together."""
    return [b - a for answer in answers for a, b in itertools.pairwise(answer.times)]


def config_of(model: str, **more: Any) -> dict[str, Any]:
    """engine.json of the core that is measured."""
    lora = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16}
    return {"model": model, "kv_cache_memory_bytes": 1 << 30, **lora, **more}
