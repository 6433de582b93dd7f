# SPDX-License-Identifier: Apache-2.0
"""The engine on the card: decoding, saturated throughput, and latencies at request rates."""

from collections.abc import Iterator, Sequence

from card import Card

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

SATURATED = Load("1000 in, 1000 out, 512 requests", ((1000, 1000),) * 512)
LOADS = [
    Load("128 in, 1024 out, 256 requests", ((128, 1024),) * 256),
    Load("2048 in, 128 out, 512 requests", ((2048, 128),) * 512),
    Load("a mix like ShareGPT's, 1,024 requests", sharegpt_like(1024)),
]
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
    yield from trace.mixed_rows(engine, *((224, prompt, 512) if card.is_full else (2, prompt, 9)))
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


def _load_rows(card: Card, loads: Sequence[Load], key: str | None = None) -> Iterator[Row]:
    engine = _engine(card)
    prompt, output = (512, 16) if card.is_full else (12, 3)
    drive(engine, Load("warm up", ((prompt, output),) * 32))
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
