# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of a small model: with graphs, own kernels and steps begun ahead, against references in plain steps."""

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

from card import Card
from measure import logit_shortfall
from workload import Request

import quire_kernels
from gpu_phases import lora
from gpu_phases.random_engine import Load, close, drive, make_engine, settings
from quire_engine.core.engine import Engine
from quire_kernels.dispatch import collect_ops
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

MAX_TIE = 1e-4
"""Deviations of the logits within which rounding decides between two tokens: a hundred times the rounding of float32.
The likeliest token of 2,000 is 0.25 above the next one on average, so 1 wrong token in 2,500 passes as a tie."""


def check_graphs(card: Card, has_adapters: bool) -> tuple[int, int]:
    """Return how many greedy tokens differ, and how many there are.

    Requests use three adapters in turn on two slots, one of them of more ranks than one product takes. If two tokens
    are equally likely but for rounding, either is accepted, and others after it.
    """
    small = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 2000, "num_attention_heads": 8}
    small |= {"num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024}
    load = Load("check", tuple((5 + 37 * i % 200, 24) for i in range(20)) if card.is_full else ((9, 4), (17, 3)))
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 128} if has_adapters else {}
    found: list[list[list[int]]] = []
    for plain in (False, True):
        engine = make_engine(
            card,
            **(
                settings(card)
                | options
                | {"dtype": "float32", "max_model_len": 512 if card.is_full else 64}
                | ({"async_scheduling": False} if plain else {})
            ),
            model_config=small if card.is_full else {},
            kv_cache_memory_bytes=1 << (30 if card.is_full else 20),
        )
        with _references() if plain else mock.patch.dict({}):
            if plain:
                engine._runner._graphs = None  # type: ignore[attr-defined]
            names = (*lora.add_adapters(engine, (4, 70, 16), everywhere=True), None) if has_adapters else ()
            found.append(drive(engine, load, names)["token_ids"])
            if plain:
                requests = load.requests(engine.shape.vocab_size)
                own, expected = found
                others = [
                    _others(engine, request, *pair, names[i % len(names)] if names else None)
                    for i, (request, *pair) in enumerate(zip(requests, own, expected, strict=True))
                ]
        close(engine)
    return sum(others), sum(map(len, expected))


def _others(
    engine: Engine, request: Request, output: Sequence[int], expected: Sequence[int], adapter: str | None
) -> int:
    """Return the number of unexpected tokens; 0 if the first of them is as likely by this engine's logits."""
    differ = [i for i, (a, b) in enumerate(zip(output, expected, strict=True)) if a != b]
    if not differ or gap(engine, request, output[: differ[0] + 1], adapter) <= MAX_TIE:
        return 0
    return len(differ)


def gap(engine: Engine, request: Request, output: Sequence[int], adapter: str | None) -> float:
    """Return how far tokens fall short of the likeliest at most, by an engine's logits, whose deviation is 1."""
    params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": 1}
    engine.add(SequenceRequest(0, [*request.prompt_token_ids, *output], SamplingParams.from_mapping(params), adapter))
    scored: list[list[list[float]]] = []
    while engine.has_work:
        for result in engine.step().results:
            if result.error_code is not None:
                raise RuntimeError(f"scoring: {result.error}")
            scored += result.prompt_logprobs or []
    return logit_shortfall(scored[-len(output) :])


def _references() -> Any:
    """Replace all operations by their references in a context."""
    stack = contextlib.ExitStack()
    for op in collect_ops(vars(quire_kernels)):
        stack.enter_context(mock.patch.dict(op.dispatch_table, {"cuda": op.reference}))
    return stack
