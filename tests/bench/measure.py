# SPDX-License-Identifier: Apache-2.0
"""Computes measurements from an engine's reply. Pure functions; one definition of every number for all engines.

A reply is the result of a run of any engine's process: `seconds` from the start to the last token; `token_ids` of each
output; `events` of each request, [[seconds from the start, tokens that came then], ...], or None where not known; and
from this engine offline `kv`, after each step [seconds, sequences that run, blocks they hold].
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from workload import Request

MAX_GAP = 0.5
"""Standard deviations of the logits that a token may fall short of the likeliest one. Computing in bfloat16 costs up to
0.1 (random weights, 30 layers); a wrong token is 4 below."""
MAX_QUANTIZED_GAP = 2.0
"""The same for quantized weights."""


class WrongOutput(Exception):
    """An engine generated wrong output, so its speed is not reported."""


def percentile(values: Iterable[float], p: float) -> float:
    """The smallest value that `p` percent of them do not exceed (nearest rank); NaN if there are none."""
    if not (ordered := sorted(values)):
        return math.nan
    return ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)]


def summarize_spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def logit_shortfall(positions: Sequence[Sequence[Sequence[float]]]) -> float:
    """How far tokens fall short of the likeliest at worst, from `prompt_logprobs`: of each position [token, logprob]
    pairs, its own token first."""
    return max(max(candidate[1] for candidate in position) - position[0][1] for position in positions)


def measure(requests: Sequence[Request], offsets: Sequence[float] | None, reply: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one run; `offsets` None: all requests came at the start.

    Raises:
        WrongOutput: a request got another number of tokens than it asked for.
    """
    expected = [request.num_output_tokens for request in requests]
    streamed = reply["events"] and [sum(count for _, count in events) for events in reply["events"]]
    for counts in ([len(ids) for ids in reply["token_ids"]], streamed or expected):
        if counts != expected:
            raise WrongOutput(f"asked for {expected} output tokens, found {counts}")
    return {
        "num_requests": len(requests),
        "num_input_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "num_output_tokens": sum(expected),
        "seconds": reply["seconds"],
        "output_tokens_per_s": sum(expected) / reply["seconds"],
        **_latencies(offsets or [0.0] * len(requests), reply["events"] or []),
    }


def _latencies(offsets: Sequence[float], events: Sequence[Any]) -> dict[str, Any]:
    """Times to first token and between tokens; several tokens that come together are one arrival."""
    ttfts = [request[0][0] - offset for request, offset in zip(events, offsets, strict=False)]
    inter_token = [b[0] - a[0] for request in events for a, b in pairwise(request)]
    tails = (
        {f"p{p}": 1e3 * percentile(times, p) for p in (50, 99)} if times else None for times in (ttfts, inter_token)
    )
    return dict(zip(("ttft_ms", "itl_ms"), tails, strict=True))


def kv_usage(requests: Sequence[Request], reply: dict[str, Any]) -> list[dict[str, float]]:
    """Return allocated KV blocks and the tokens in them, after each step.

    A sequence's last output token is not in the cache yet. Steps that leave a prompt read in part are left out: how
    many of its tokens are in the cache is not known from outside.
    """
    # In order of time, each with what it adds to the tokens in the cache; a thousand requests have half a million.
    arrivals = deque(
        sorted((seconds, i, count) for i, events in enumerate(reply["events"]) for seconds, count in events)
    )
    num_left_events = [len(events) for events in reply["events"]]
    open_tokens: dict[int, int] = {}
    samples, num_cached_tokens = [], 0
    for at, num_running, num_blocks in reply["kv"]:
        while arrivals and arrivals[0][0] <= at:
            _, i, count = arrivals.popleft()
            num_left_events[i] -= 1
            if i not in open_tokens:
                open_tokens[i] = 0
                num_cached_tokens += len(requests[i].prompt_token_ids) - 1
            open_tokens[i] += count
            num_cached_tokens += count
            if num_left_events[i] == 0:
                num_cached_tokens -= len(requests[i].prompt_token_ids) - 1 + open_tokens.pop(i)
        if open_tokens and len(open_tokens) == num_running:
            samples.append(
                {"seconds": at, "num_running": num_running, "num_blocks": num_blocks, "num_tokens": num_cached_tokens}
            )
    return samples
