# SPDX-License-Identifier: Apache-2.0
"""What loading adapters costs those whose adapters are there: time between their tokens at 80 % of saturation, without
loads and with loads beside them, of one running core. residency.py starts one on a CPU, gpu_itl.py on a GPU.

Runs come in pairs with the same sizes, arrivals and number of short requests; in one of each pair the short ones are of
adapters that must be loaded from disk. Which comes first alternates. Prompts are new in each run, so that no prefix
cache knows them.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import adapters
from core_traffic import Answer, Ask, gap, gaps, poisson, send
from measure import MAX_GAP, WrongOutput, percentile, spread
from support.pod import Pod

from quire_spec.errors import error_from_code
from quire_spec.protocol.messages import AdapterEvent, ControlRequest, ControlResponse

LOAD_FACTOR = 0.8
NUM_TOLD_APART = 8
MIN_LOADED = 0.9
"""Of the loads that a run asks for; where two requests of an adapter meet, one load serves both."""
SHORT_PROMPT = (5, 17, 99)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of the core."""

    runs: int
    seconds: float
    """Of each run."""
    loads: int
    """Short requests in each run."""
    prompt_tokens: int
    output_tokens: int
    num_saturating: int
    """Requests at once, more than run at a time, to find out what saturation is."""
    vocab_size: int
    """Prompts are drawn from so many token ids."""
    deviation: float
    """Of the model's logits, in which it is judged how unlikely a token is."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Cast:
    """Adapters, by their names in the core."""

    resident: Sequence[str]
    """Pinned to slots."""
    cold: Sequence[str]
    folders: Sequence[Path]
    """Of those that are cold, as many as there are different ones."""


def register(pod: Pod, folders: Sequence[Path], names: Sequence[str], pinned: bool = False) -> None:
    """Have the core know adapters; names beyond the folders are read from the same ones, as adapters of their own."""
    with pod.peer("core", "supervisor") as supervisor:
        # All at once: the core reads as many side by side as it can.
        for i, name in enumerate(names):
            args = {"digest": name, "path": str(folders[i % len(folders)]), "pinned": pinned}
            supervisor.send(ControlRequest(i, "load_adapter", args))
        for _ in names:
            reply = supervisor.receive()
            assert isinstance(reply, ControlResponse)
            if reply.error_code:
                raise error_from_code(reply.error_code, reply.error)


def measure_itl(pod: Pod, plan: Plan, cast: Cast, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Check, find saturation, and run the pairs; after each, the figures of all so far.

    Raises:
        WrongOutput: an adapter's requests got what it does not say, or adapters were not loaded when they should have
            been, or were when they should not.
    """
    quiet = send(pod, [_short(0.0, name) for name in (*cast.resident, *cast.cold)], num_open=2)
    alone = {answer.ask.adapter or "": answer.token_ids for answer in quiet}
    _check_told_apart(pod, plan, cast, alone)
    saturated = [_saturation(pod, plan, cast, i) for i in range(2)][-1]
    rate = LOAD_FACTOR * saturated / plan.output_tokens
    say(f"saturation {saturated:.0f} tokens/s, rate {rate:.2f} requests/s")
    runs: list[dict[str, float]] = []
    moves: list[AdapterEvent] = []
    where: set[str] = set()
    for i in range(plan.runs):
        both = (("without", cast.resident), ("with", cast.cold))
        pair: dict[str, float] = {}
        for kind, names in both if i % 2 == 0 else both[::-1]:
            where.add(adapters.leave_memory(cast.folders))
            pair |= _run(pod, plan, cast, (i, kind, rate, names), alone, moves)
        say(f"round {i}: " + ", ".join(f"{name} {value:.1f}" for name, value in sorted(pair.items())))
        runs.append(pair)
        yield _figures(plan, saturated, rate, where, runs, moves)


def _figures(
    plan: Plan,
    saturated: float,
    rate: float,
    where: set[str],
    runs: Sequence[dict[str, float]],
    moves: Sequence[AdapterEvent],
) -> dict[str, Any]:
    return {
        "saturation_tokens_per_s": saturated,
        "requests_per_s": rate,
        "rounds": plan.runs,
        "loads_per_run": plan.loads,
        "seconds": plan.seconds,
        "read_from": " or ".join(sorted(where)),
        **{name: spread([run[name] for run in runs]) for name in runs[0]},
        **{f"p{p}_ratio": spread([run[f"with_p{p}_ms"] / run[f"without_p{p}_ms"] for run in runs]) for p in (50, 99)},
        **{f"{name}_s": _median([m.duration_s for m in moves if m.kind == place]) for name, place in _HOPS.items()},
        "runs": list(runs),
    }


_HOPS = {"read": "host", "copy": "slot"}


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def _run(
    pod: Pod,
    plan: Plan,
    cast: Cast,
    which: tuple[int, str, float, Sequence[str]],
    alone: dict[str, list[int]],
    moves: list[AdapterEvent],
) -> dict[str, float]:
    """One run, and where adapters went in it."""
    index, kind, rate, names = which
    own: list[AdapterEvent] = []
    answers = send(pod, _mixed(plan, index, kind, rate, cast.resident, names), moves=own)
    moves += own
    long, short = ([a for a in answers if a.ask.kind == wanted] for wanted in ("long", "short"))
    _check(pod, plan, short, alone)
    loaded = sum(move.kind == "slot" for move in own)
    if not (loaded >= MIN_LOADED * plan.loads if kind == "with" else loaded == 0):
        raise WrongOutput(f"a run {kind} loads loaded {loaded} adapters; its short requests are {plan.loads}")
    seconds = max(a.times[-1] for a in long) - min(a.sent for a in long)
    times, waits = gaps(long), [a.times[0] - a.sent for a in short]
    return {
        **{f"{kind}_p{p}_ms": 1e3 * percentile(times, p) for p in (50, 99)},
        **{f"{kind}_short_ttft_p{p}_ms": 1e3 * percentile(waits, p) for p in (50, 99)},
        f"{kind}_tokens_per_s": sum(len(a.token_ids) for a in long) / seconds,
    }


def _short(at: float, name: str) -> Ask:
    return Ask(at, "short", name, list(SHORT_PROMPT), 1)


def _mixed(plan: Plan, index: int, kind: str, rate: float, resident: Sequence[str], names: Sequence[str]) -> list[Ask]:
    draw, words = random.Random(f"{plan.seed} {index}"), random.Random(f"{plan.seed} {index} {kind}")

    def long(at: float) -> Ask:
        prompt = [words.randrange(plan.vocab_size) for _ in range(plan.prompt_tokens)]
        return Ask(at, "long", draw.choice(resident), prompt, plan.output_tokens)

    asks = list(poisson(draw, rate, plan.seconds, long))
    return sorted(asks + [_short(plan.seconds * i / plan.loads, names[i % len(names)]) for i in range(plan.loads)])


def _saturation(pod: Pod, plan: Plan, cast: Cast, index: int) -> float:
    """Tokens a second of requests of the same sizes, all at once."""
    draw = random.Random(f"{plan.seed} saturation {index}")
    prompts = [[draw.randrange(plan.vocab_size) for _ in range(plan.prompt_tokens)] for _ in range(plan.num_saturating)]
    names = cast.resident
    begun = time.perf_counter()
    send(pod, [Ask(0.0, "long", names[i % len(names)], p, plan.output_tokens) for i, p in enumerate(prompts)])
    return plan.num_saturating * plan.output_tokens / (time.perf_counter() - begun)


def _check_told_apart(pod: Pod, plan: Plan, cast: Cast, alone: dict[str, list[int]]) -> None:
    """What one adapter says must be unlikely by another, or nobody would notice if they were mixed up."""
    some = list(cast.cold)[: NUM_TOLD_APART + 1]
    found = [_gap(pod, plan, name, alone[other]) for name, other in pairwise(some)]
    unlikely = sum(each > MAX_GAP for each in found)
    if unlikely <= len(found) // 2:
        raise WrongOutput(f"of {len(found)} adapters' outputs, only {unlikely} are unlikely by another's logits")


def _check(pod: Pod, plan: Plan, answers: Sequence[Answer], alone: dict[str, list[int]]) -> None:
    """What differs from what was said alone is a near tie, which rounding turns round in another batch."""
    for name, ids in {(a.ask.adapter or "", tuple(a.token_ids)) for a in answers}:
        if list(ids) != alone[name] and (found := _gap(pod, plan, name, list(ids))) > MAX_GAP:
            raise WrongOutput(
                f"adapter {name!r} said {list(ids)} and alone {alone[name]}: {found:.2f} deviations below the "
                f"likeliest by its logits; {MAX_GAP} at most"
            )


def _gap(pod: Pod, plan: Plan, name: str, output: list[int]) -> float:
    return gap(pod, name, list(SHORT_PROMPT), output) / plan.deviation
