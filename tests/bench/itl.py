# SPDX-License-Identifier: Apache-2.0
"""Effect of adapter loads on requests with resident adapters: their inter-token latency at 80 % of saturation, without
and with concurrent loads, on one running core. residency.py starts the core on a CPU, gpu_phases/itl.py on a GPU.

Runs are pairs with the same sizes, arrivals and number of short requests; in one run of each pair the short requests
use adapters that must be loaded from disk. The order alternates. Prompts are new in each run, to avoid prefix cache
hits.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import random_adapters
from core_traffic import CoreRequest, CoreResponse, inter_token_seconds, logit_gap, poisson_arrivals, send_requests
from measure import MAX_GAP, WrongOutput, percentile, summarize_spread
from support.engine_processes import EngineProcesses

from quire_spec.errors import error_from_code
from quire_spec.protocol.messages import AdapterEvent, Call, Failure, Reply, to_raw

LOAD_FACTOR = 0.8
NUM_COMPARED_ADAPTERS = 8
MIN_LOADED = 0.9
"""Of the loads that a run asks for; where two requests of an adapter meet, one load serves both."""
SHORT_PROMPT = (5, 17, 99)


@dataclass(frozen=True, slots=True)
class ItlWorkload:
    """What is asked of the core."""

    runs: int
    seconds: float
    """Of each run."""
    num_loads: int
    """Short requests in each run."""
    prompt_tokens: int
    output_tokens: int
    num_saturating: int
    """Requests at once, more than run at a time, to find out what saturation is."""
    vocab_size: int
    """Prompts are drawn from so many token ids."""
    logit_deviation: float
    """Of the model's logits, in which it is judged how unlikely a token is."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AdapterSets:
    """Adapters, by their names in the core."""

    resident: Sequence[str]
    """Pinned to slots."""
    unloaded: Sequence[str]
    folders: Sequence[Path]
    """Of those that are cold, as many as there are different ones."""


def register_adapters(
    pod: EngineProcesses, folders: Sequence[Path], adapter_digests: Sequence[str], pinned: bool = False
) -> None:
    """Have the core know adapters; names beyond the folders are read from the same ones, as adapters of their own."""
    with pod.connect("core", "supervisor") as supervisor:
        # All at once: the core reads as many side by side as it can.
        for i, name in enumerate(adapter_digests):
            arguments = {"digest": name, "path": str(folders[i % len(folders)]), "pinned": pinned}
            supervisor.send(Call(i, "load_adapter", to_raw(arguments, "load_adapter")))
        for _ in adapter_digests:
            reply = supervisor.receive()
            if isinstance(reply, Failure):
                raise error_from_code(reply.error_code, reply.error)
            assert isinstance(reply, Reply)


def measure_itl(
    pod: EngineProcesses, workload: ItlWorkload, adapter_sets: AdapterSets, log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Check, find saturation, and run the pairs; after each, the figures of all so far.

    Raises:
        WrongOutput: an adapter's requests got what it does not say, or adapters were not loaded when they should have
            been, or were when they should not.
    """
    responses = send_requests(
        pod, [_short_request(0.0, name) for name in (*adapter_sets.resident, *adapter_sets.unloaded)], num_open=2
    )
    reference_outputs = {answer.request.adapter_digest or "": answer.token_ids for answer in responses}
    _check_outputs_differ(pod, workload, adapter_sets, reference_outputs)
    saturated = [_saturation(pod, workload, adapter_sets, i) for i in range(2)][-1]
    rate = LOAD_FACTOR * saturated / workload.output_tokens
    log(f"saturation {saturated:.0f} tokens/s, rate {rate:.2f} requests/s")
    runs: list[dict[str, float]] = []
    adapter_events: list[AdapterEvent] = []
    storage: set[str] = set()
    for i in range(workload.runs):
        variants = (("without", adapter_sets.resident), ("with", adapter_sets.unloaded))
        results: dict[str, float] = {}
        for kind, names in variants if i % 2 == 0 else variants[::-1]:
            storage.add(random_adapters.evict_from_page_cache(adapter_sets.folders))
            results |= _run(pod, workload, adapter_sets, (i, kind, rate, names), reference_outputs, adapter_events)
        log(f"round {i}: " + ", ".join(f"{name} {value:.1f}" for name, value in sorted(results.items())))
        runs.append(results)
        yield _figures(workload, saturated, rate, storage, runs, adapter_events)


def _figures(
    workload: ItlWorkload,
    saturated: float,
    rate: float,
    storage: set[str],
    runs: Sequence[dict[str, float]],
    adapter_events: Sequence[AdapterEvent],
) -> dict[str, Any]:
    return {
        "saturation_tokens_per_s": saturated,
        "requests_per_s": rate,
        "rounds": workload.runs,
        "loads_per_run": workload.num_loads,
        "seconds": workload.seconds,
        "read_from": " or ".join(sorted(storage)),
        **{name: summarize_spread([run[name] for run in runs]) for name in runs[0]},
        **{
            f"p{p}_ratio": summarize_spread([run[f"with_p{p}_ms"] / run[f"without_p{p}_ms"] for run in runs])
            for p in (50, 99)
        },
        **{
            f"{name}_s": _median([move.duration_s for move in adapter_events if move.kind == place])
            for name, place in _MOVE_NAMES.items()
        },
        "runs": list(runs),
    }


_MOVE_NAMES = {"read": "host", "copy": "slot"}


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def _run(
    pod: EngineProcesses,
    workload: ItlWorkload,
    adapter_sets: AdapterSets,
    variant: tuple[int, str, float, Sequence[str]],
    reference_outputs: dict[str, list[int]],
    adapter_events: list[AdapterEvent],
) -> dict[str, float]:
    """One run, and where adapters went in it."""
    index, kind, rate, names = variant
    new_events: list[AdapterEvent] = []
    answers = send_requests(
        pod, _mixed_requests(workload, index, kind, rate, adapter_sets.resident, names), adapter_events=new_events
    )
    adapter_events += new_events
    long_responses, short_responses = (
        [a for a in answers if a.request.kind == length_kind] for length_kind in ("long", "short")
    )
    _check_outputs(pod, workload, short_responses, reference_outputs)
    num_loaded = sum(move.kind == "slot" for move in new_events)
    if not (num_loaded >= MIN_LOADED * workload.num_loads if kind == "with" else num_loaded == 0):
        raise WrongOutput(
            f"a run {kind} loads loaded {num_loaded} adapters; its short requests are {workload.num_loads}"
        )
    seconds = max(a.token_times[-1] for a in long_responses) - min(a.sent_at for a in long_responses)
    times, ttfts = inter_token_seconds(long_responses), [a.token_times[0] - a.sent_at for a in short_responses]
    return {
        **{f"{kind}_p{p}_ms": 1e3 * percentile(times, p) for p in (50, 99)},
        **{f"{kind}_short_ttft_p{p}_ms": 1e3 * percentile(ttfts, p) for p in (50, 99)},
        f"{kind}_tokens_per_s": sum(len(a.token_ids) for a in long_responses) / seconds,
    }


def _short_request(arrival_s: float, name: str) -> CoreRequest:
    return CoreRequest(arrival_s, "short", name, list(SHORT_PROMPT), 1)


def _mixed_requests(
    workload: ItlWorkload, index: int, kind: str, rate: float, resident: Sequence[str], names: Sequence[str]
) -> list[CoreRequest]:
    arrival_rng, prompt_rng = (
        random.Random(f"{workload.seed} {index}"),
        random.Random(f"{workload.seed} {index} {kind}"),
    )

    def long_request(arrival_s: float) -> CoreRequest:
        prompt = [prompt_rng.randrange(workload.vocab_size) for _ in range(workload.prompt_tokens)]
        return CoreRequest(arrival_s, "long", arrival_rng.choice(resident), prompt, workload.output_tokens)

    # On a device that emulates slowly, none may arrive in the short time of a rehearsal.
    requests = list(poisson_arrivals(arrival_rng, rate, workload.seconds, long_request)) or [long_request(0.0)]
    return sorted(
        requests
        + [
            _short_request(workload.seconds * i / workload.num_loads, names[i % len(names)])
            for i in range(workload.num_loads)
        ]
    )


def _saturation(pod: EngineProcesses, workload: ItlWorkload, adapter_sets: AdapterSets, index: int) -> float:
    """Tokens a second of requests of the same sizes, all at once."""
    rng = random.Random(f"{workload.seed} saturation {index}")
    prompts = [
        [rng.randrange(workload.vocab_size) for _ in range(workload.prompt_tokens)]
        for _ in range(workload.num_saturating)
    ]
    names = adapter_sets.resident
    started = time.perf_counter()
    send_requests(
        pod, [CoreRequest(0.0, "long", names[i % len(names)], p, workload.output_tokens) for i, p in enumerate(prompts)]
    )
    return workload.num_saturating * workload.output_tokens / (time.perf_counter() - started)


def _check_outputs_differ(
    pod: EngineProcesses, workload: ItlWorkload, adapter_sets: AdapterSets, reference_outputs: dict[str, list[int]]
) -> None:
    """Check that the output of one adapter is unlikely under another, so that mixed-up adapters would be detected."""
    sample = list(adapter_sets.unloaded)[: NUM_COMPARED_ADAPTERS + 1]
    gaps_between = [_normalized_gap(pod, workload, name, reference_outputs[other]) for name, other in pairwise(sample)]
    num_different = sum(logit_gap_value > MAX_GAP for logit_gap_value in gaps_between)
    if num_different <= len(gaps_between) // 2:
        raise WrongOutput(
            f"of {len(gaps_between)} adapters' outputs, only {num_different} are unlikely by another's logits"
        )


def _check_outputs(
    pod: EngineProcesses,
    workload: ItlWorkload,
    answers: Sequence[CoreResponse],
    reference_outputs: dict[str, list[int]],
) -> None:
    """Check that outputs differ from those of single requests only at near ties, which rounding can reverse."""
    for name, ids in {(a.request.adapter_digest or "", tuple(a.token_ids)) for a in answers}:
        if (
            list(ids) != reference_outputs[name]
            and (deviations := _normalized_gap(pod, workload, name, list(ids))) > MAX_GAP
        ):
            raise WrongOutput(
                f"adapter {name!r} said {list(ids)} and alone {reference_outputs[name]}: {deviations:.2f} deviations "
                "below the "
                f"likeliest by its logits; {MAX_GAP} at most"
            )


def _normalized_gap(pod: EngineProcesses, workload: ItlWorkload, name: str, output: list[int]) -> float:
    return logit_gap(pod, name, list(SHORT_PROMPT), output) / workload.logit_deviation
