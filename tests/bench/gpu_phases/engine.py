# SPDX-License-Identifier: Apache-2.0
"""The engine on the card: decoding, saturated throughput, and latencies at request rates."""

from collections import abc
from collections.abc import Callable, Iterator
from typing import Any

from card import Card
from support.scripted_drafts import ScriptedProposer

from gpu_phases import trace
from gpu_phases.process import Context
from gpu_phases.random_engine import (
    Load,
    close,
    decode_rate,
    drive,
    graph_bytes,
    make_engine,
    numbers,
    settings,
    sharegpt_like,
)
from gpu_phases.store import Row
from quire_engine.core.engine import Engine
from quire_engine.sequence import Sequence
from quire_engine.speculation.draft_policy import DraftPolicy
from quire_spec.engine.speculative_config import SpeculativeConfig

SATURATED = Load("1000 in, 1000 out, 512 requests", ((1000, 1000),) * 512)
LOADS = [
    Load("128 in, 1024 out, 256 requests", ((128, 1024),) * 256),
    Load("2048 in, 128 out, 512 requests", ((2048, 128),) * 512),
    Load("a mix like ShareGPT's, 1,024 requests", sharegpt_like(1024)),
]
NUM_DRAFT_TOKENS = 3
TINY_LOAD = Load("12 in, 6 out", ((12, 6),) * 3)


def step_rows(context: Context) -> Iterator[Row]:
    """Single stream and a full batch; then traces of both."""
    card, engine = context.card, _engine(context.card)
    many, prompt, steps = (256, 960, 40) if card.is_full else (3, 12, 3)
    yield {"what": "graphs", "value": graph_bytes(engine) / 2**20, "unit": "MiB"}
    yield {
        "what": "KV cache",
        "value": engine.memory.kv_bytes / 1e9,
        "unit": "GB",
        "weights": engine.memory.weights_bytes,
    }
    drive(engine, Load("warm up", ((prompt, 4),) * many))
    single = decode_rate(engine, 1, 128 if card.is_full else 12, 4 * steps)
    # All weights but the embedding, of which a token reads one row.
    streamed = engine.memory.weights_bytes - engine.shape.vocab_size * engine.shape.hidden_size * 2
    rate = single["output_tokens_per_s"] or 0.0
    yield _rate(single, "single") | {"fraction": rate * streamed / context.limits().bytes_per_s}
    yield _rate(decode_rate(engine, many, prompt, 3 * steps), "decode")
    yield from trace.step_rows(engine, 1, 128 if card.is_full else 12, steps)
    yield from trace.step_rows(engine, many, prompt, steps)
    # Beyond the largest graph, and in one.
    for mixed in ((224, prompt, 512), (64, prompt, 256)) if card.is_full else ((2, prompt, 9),):
        yield from trace.mixed_rows(engine, *mixed)
    close(engine)


def saturated_rows(context: Context) -> Iterator[Row]:
    """Throughput of long prompts and outputs."""
    yield from _load_rows(context.card, [SATURATED], "saturated")


def mix_rows(context: Context) -> Iterator[Row]:
    """Latencies at request rates at which nearly every step has a prompt."""
    mix = sharegpt_like(1024)
    rates = [Load(f"the mix at {rate} requests a second", mix[: 12 * rate], float(rate)) for rate in (16, 32)]
    yield from _load_rows(context.card, rates if context.card.is_full else [Load("a mix", ((9, 4),) * 3, 20.0)])


def load_rows(context: Context) -> Iterator[Row]:
    """Throughput at other proportions of prompt and output."""
    yield from _load_rows(context.card, LOADS)


def speculation_rows(context: Context) -> Iterator[Row]:
    """Drafts of three tokens, each right with probability 0.8, against none, by the same engine: the drafts are the
    recorded outputs. Acceptance on random weights means nothing, so only its cost and its gain are measured."""
    card = context.card
    card.wait_free()
    speculation = SpeculativeConfig("ngram", NUM_DRAFT_TOKENS)
    options = settings(card) | {"async_scheduling": None, "enable_prefix_caching": False}
    engine = make_engine(card, **options, speculative_config=speculation)
    planner: Any = engine._scheduler.draft_planner
    prompt, output = (128, 256) if card.is_full else (12, 6)
    for num_seqs in (1, 8) if card.is_full else (2,):
        load = Load(f"drafts for {num_seqs}", ((prompt, output),) * num_seqs)
        prompts = [tuple(request.prompt_token_ids) for request in load.requests(engine.shape.vocab_size)]
        recorded: dict[tuple[int, ...], list[int]] = {each: [] for each in prompts}
        seconds = []
        # The first run records the outputs.
        for proposer in (None, None, ScriptedProposer(_continuation(recorded), 0.8)):
            planner._proposer = proposer or ScriptedProposer(lambda sequence, num_tokens: [])
            planner._policy = DraftPolicy(card.device.type, NUM_DRAFT_TOKENS)
            reply = drive(engine, load)
            seconds.append(reply["seconds"])
            recorded.update(zip(prompts, reply["token_ids"], strict=True))
        counts = planner._policy.counts
        yield {
            "what": f"{num_seqs} sequences, drafts / none",
            "value": seconds[1] / seconds[2],
            "unit": "",
            "tokens_per_s": num_seqs * output / seconds[2],
            "draft_tokens": counts.num_draft_tokens,
            "accepted": counts.num_accepted_tokens,
        }
    close(engine)


def _continuation(recorded: dict[tuple[int, ...], list[int]]) -> Callable[[Sequence, int], list[int]]:
    def continue_(sequence: Sequence, num_tokens: int) -> list[int]:
        end = len(sequence.output_token_ids)
        return recorded[tuple(sequence.prompt_token_ids)][end : end + num_tokens]

    return continue_


def _load_rows(card: Card, loads: abc.Sequence[Load], key: str | None = None) -> Iterator[Row]:
    engine = _engine(card)
    prompt, output, num = (512, 16, 32) if card.is_full else (12, 3, 4)
    drive(engine, Load("warm up", ((prompt, output),) * num))
    for load in loads if card.is_full or loads[0].rate else [TINY_LOAD]:
        found = numbers(engine, load)
        details = {name: found[name] for name in ("seconds", "ttft_ms", "itl_ms", "kv_waste")}
        row = {"what": load.what, "value": found["output_tokens_per_s"], "unit": "tokens/s", **details}
        yield row | ({"key": key} if key else {})
    close(engine)


def _engine(card: Card) -> Engine:
    card.wait_free()
    return make_engine(card, **settings(card))


def _rate(found: Row, key: str) -> Row:
    return {
        "what": found["what"],
        "key": key,
        "value": found["output_tokens_per_s"],
        "unit": "tokens/s",
        "step_ms": found["step_ms"],
    }
