# SPDX-License-Identifier: Apache-2.0
"""Requests to a running engine core over its socket, and the arrival time of each token.

They bypass the text process, which coalesces tokens for clients: inter-token latencies behind it would measure its
interval and not the engine's steps.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from measure import WrongOutput, logit_shortfall
from support.engine_processes import EngineProcesses, IpcClient

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import AdapterEvent, SequenceRequest, StepResult


class CoreRequest(NamedTuple):
    """A request: greedy, and end-of-sequence is ignored."""

    arrival_s: float
    """Seconds from the start; with a closed loop, of no meaning."""
    kind: str
    adapter_digest: str | None
    prompt: list[int]
    num_tokens: int


@dataclass(slots=True)
class CoreResponse:
    """What came of it."""

    request: CoreRequest
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    """Of each step that brought tokens."""
    started_at: float = 0.0
    """Its first step was planned, as the core told."""


def send_requests(
    pod: EngineProcesses,
    requests: list[CoreRequest],
    num_open: int | None = None,
    adapter_events: list[AdapterEvent] | None = None,
) -> list[CoreResponse]:
    """Send each at its time, or with `num_open` as soon as fewer are open; the answers, when all are there, and in
    `moves` where adapters went meanwhile.

    Raises:
        WrongOutput: a request failed, or got another number of tokens than it asked for.
    """
    responses: dict[int, CoreResponse] = {}
    with pod.connect("core", "text") as text:
        stop, capacity = threading.Event(), threading.Semaphore(num_open or len(requests))
        sender = threading.Thread(target=_send_requests, args=(text, requests, responses, num_open, capacity, stop))
        sender.start()
        try:
            _receive_results(text, len(requests), responses, capacity, [] if adapter_events is None else adapter_events)
        finally:
            stop.set()
            sender.join()
    return list(responses.values())


def _send_requests(
    text: IpcClient,
    requests: list[CoreRequest],
    responses: dict[int, CoreResponse],
    num_open: int | None,
    capacity: threading.Semaphore,
    stop: threading.Event,
) -> None:
    start, first = time.perf_counter(), next(_request_ids)
    for i, request in enumerate(requests):
        if num_open is None:
            stop.wait(start + request.arrival_s - time.perf_counter())
        while not stop.is_set() and not capacity.acquire(timeout=0.2):
            pass
        if stop.is_set():
            return
        responses[first + i] = CoreResponse(request, time.perf_counter())
        params = {"temperature": 0.0, "max_tokens": request.num_tokens, "ignore_eos": True}
        text.send(
            SequenceRequest(first + i, request.prompt, SamplingParams.from_mapping(params), request.adapter_digest)
        )


_request_ids = itertools.count(1, 1_000_000)


def _receive_results(
    text: IpcClient,
    num_requests: int,
    responses: dict[int, CoreResponse],
    capacity: threading.Semaphore,
    adapter_events: list[AdapterEvent],
) -> None:
    num_finished = 0
    while num_finished < num_requests:
        step = text.receive()
        now = time.perf_counter()
        if not isinstance(step, StepResult):
            continue
        adapter_events += step.adapter_events
        for started in step.started:
            responses[started.id].started_at = now
        for result in step.results:
            response = responses[result.id]
            if result.error_code:
                raise WrongOutput(f"a request of adapter {response.request.adapter_digest!r} failed: {result.error}")
            if result.token_ids:
                response.token_ids += result.token_ids
                response.token_times.append(now)
            if result.finish_reason:
                num_finished += 1
                capacity.release()
                if len(response.token_ids) != response.request.num_tokens:
                    raise WrongOutput(f"asked for {response.request.num_tokens} tokens, got {len(response.token_ids)}")


def logit_gap(pod: EngineProcesses, adapter_digest: str, prompt: list[int], output: list[int]) -> float:
    """How far tokens fall short of the likeliest at worst, by the core's own logits with that adapter."""
    params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 1}
    prompt_logprobs: list[list[list[float]]] = []
    with pod.connect("core", "text") as text:
        text.send(
            SequenceRequest(next(_request_ids), [*prompt, *output], SamplingParams.from_mapping(params), adapter_digest)
        )
        while True:
            step = text.receive()
            for result in step.results if isinstance(step, StepResult) else ():
                if result.error_code:
                    raise WrongOutput(f"scoring with adapter {adapter_digest!r} failed: {result.error}")
                prompt_logprobs += result.prompt_logprobs or []
                if result.finish_reason:
                    return logit_shortfall(prompt_logprobs[-len(output) :])


def poisson_arrivals(
    rng: random.Random, rate: float, seconds: float, make_request: Callable[[float], CoreRequest]
) -> Iterator[CoreRequest]:
    """Requests of a Poisson process."""
    arrival_s = rng.expovariate(rate)
    while arrival_s < seconds:
        yield make_request(arrival_s)
        arrival_s += rng.expovariate(rate)


def zipf_weights(num: int, exponent: float) -> list[float]:
    """How likely each of `num` is, by its rank."""
    return [1 / rank**exponent for rank in range(1, num + 1)]


def inter_token_seconds(responses: list[CoreResponse]) -> list[float]:
    """Seconds between successive tokens of each answer, together."""
    return [b - a for response in responses for a, b in itertools.pairwise(response.token_times)]


def core_config(model: str, **overrides: Any) -> dict[str, Any]:
    """The engine's part of pod.json of the core that is measured."""
    lora = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16}
    return {"model": model, "kv_cache_memory_bytes": 1 << 30, **lora, **overrides}
