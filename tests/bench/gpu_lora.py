# SPDX-License-Identifier: Apache-2.0
"""Adapters on the card: what a batch of many costs against the same engine's base, and their kernels by themselves."""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_engine as engines
import torch
from card import Card
from gpu_gate import own
from gpu_kernels import Limits, Row, Shape

import quire_kernels as ops
from quire_engine.core.engine import Engine
from quire_engine.lora.peft.adapter import NO_LAYER, HostAdapter
from quire_kernels.gpu import lora as forms

NUM_ADAPTERS, RANK, NUM_ROUNDS = 32, 16, 5
BARS = (
    ("adapters", "base, LoRA disabled", 0.88, 0.95),
    ("base, LoRA enabled", "base, LoRA disabled", 0.98, 1.0),
    ("adapters, side stream", "adapters", 1.0, 1.02),
)
"""What one row's tokens/s must be of another's, and should be; where the last one is not what it should be, a stream of
its own for what shrinks stays off."""


def add_adapters(engine: Engine, ranks: Sequence[int], everywhere: bool) -> list[str]:
    """Register random adapters, on every linear of every layer; `everywhere`: of embedding and output projection too.

    Those of a rank have the same numbers: they lie in slots of their own, and cost what others would.
    """
    runner: Any = engine._runner
    draw, made = torch.Generator().manual_seed(3), {}
    for rank in set(ranks):
        pairs = {}
        slots = runner.adapter_store.slots
        for places, module in zip(slots._module_keys, slots._slots.modules, strict=True):
            for place, width in zip(places, module.target.widths, strict=True):
                if everywhere or place[0] != NO_LAYER:
                    features = module.target.in_features
                    a, b = (torch.randn(shape, generator=draw) for shape in ((rank, features), (width, rank)))
                    pairs[place] = a / features**0.5, b / 8
        made[rank] = runner.adapter_store.pack(HostAdapter(rank, pairs))
    names = [f"adapter {i} of rank {rank}" for i, rank in enumerate(ranks)]
    for name, rank in zip(names, ranks, strict=True):
        engine.add_adapter(name, Path("made here"), made[rank])
    return names


def rows(card: Card, side: bool) -> Iterator[dict[str, Any]]:
    """Decoding with every sequence on one of many adapters, and without; medians of rounds. `side`: also by the form
    that shrinks on a stream of its own."""
    num, ranks = (NUM_ADAPTERS, [RANK] * NUM_ADAPTERS) if card.is_gpu else (2, [4, 4])
    lora = {"enable_lora": True, "max_loras": num, "max_lora_rank": max(ranks)}
    engine = engines.make_engine(card, **engines.settings(card))
    yield _row(card, engine, "base, LoRA disabled", ())
    engines.close(engine)
    engine = engines.make_engine(card, **(engines.settings(card) | lora))
    names = add_adapters(engine, ranks, everywhere=False)
    yield _row(card, engine, "base, LoRA enabled", ())
    yield _row(card, engine, "adapters", names)
    engines.close(engine)
    if not side:
        return
    with mock.patch.dict(ops.adapted_linear.dispatch_table, cuda=ops.adapted_linear.get("cuda", "side")):
        engine = engines.make_engine(card, **(engines.settings(card) | lora))
        yield _row(card, engine, "adapters, side stream", add_adapters(engine, ranks, everywhere=False))
        engines.close(engine)


def _row(card: Card, engine: Engine, name: str, adapters: Sequence[str]) -> dict[str, Any]:
    load = (256, 960, 120) if card.is_gpu else (3, 12, 6)
    # Compiles, and fills the slots.
    engines.decode_rate(engine, *load, adapters=adapters)
    found = [engines.decode_rate(engine, *load, adapters=adapters) for _ in range(NUM_ROUNDS if card.is_gpu else 1)]
    rates = [each["output_tokens_per_s"] for each in found if each["output_tokens_per_s"]]
    return {
        "row": name,
        "what": found[0]["what"],
        "output_tokens_per_s": statistics.median(rates) if rates else None,
        "all": rates,
        "graph_bytes": engines.graph_bytes(engine),
    }


def ratios(
    found: Sequence[dict[str, Any]], bars: Sequence[tuple[str, str, float, float]] = BARS
) -> list[dict[str, Any]]:
    """Each bar, and what was measured."""
    rates = {row["row"]: row["output_tokens_per_s"] for row in found}
    return [
        {"of": of, "to": to, "bar": bar, "aim": aim, "ratio": rates[of] / rates[to]}
        for of, to, bar, aim in bars
        if rates.get(of) and rates.get(to)
    ]


def kernel_rows(card: Card, limits: Limits, shape: Shape, quick: bool) -> Iterator[Row]:
    """Both launches of each linear, at a decoding step of many adapters and at a prompt of one; and the routing."""
    num, rank, tokens = _batch(card)
    slots = torch.arange(tokens, device=card.device) % num
    routing = ops.TokenRouting.empty(tokens, num, card.device)
    seconds = card.seconds([functools.partial(own(ops.route_tokens), slots, routing)])
    yield Row.of(f"route, {tokens} tokens to {num} slots", seconds, limits, 16.0 * tokens)
    sites = _sites(shape)
    for name, site in list(sites.items())[: 1 if quick or not card.is_gpu else None]:
        yield _kernel_row(card, limits, f"{num} adapters of rank {rank} on {name}", site, num, rank, slots)
    if card.is_gpu and not quick:
        for num_tokens in (256, 8192):
            of_one = torch.zeros(num_tokens, dtype=torch.int64, device=card.device)
            yield _kernel_row(card, limits, f"an adapter of rank {rank} on q, k, v", sites["q, k, v"], 1, rank, of_one)


def tune_rows(card: Card, limits: Limits, shape: Shape) -> Iterator[Row]:
    """Other sizes of tiles: what the constants of gpu/lora.py should be on this card."""
    num, rank, tokens = _batch(card)
    slots, sites = torch.arange(tokens, device=card.device) % num, _sites(shape)
    shrinks = [
        forms.LoRATiles(inputs=i, min_shrink_programs=p, shrink_num_stages=s)
        for i in (64, 128, 256)
        for p in (132, 264, 528)
        for s in (3, 4, 6)
    ]
    expands = [
        forms.LoRATiles(columns=c, max_expand_programs=p, expand_num_stages=s)
        for c in (64, 128, 256)
        for p in (528, 1056, 2112)
        for s in (2, 3, 4)
    ]
    tried = {"down": shrinks, "gate, up": expands} if card.is_gpu else {"down": shrinks[:1]}
    for name, all_tiles in tried.items():
        for tiles in all_tiles:
            sizes = ", ".join(f"{f.name} {getattr(tiles, f.name)}" for f in fields(tiles))
            with mock.patch.object(forms, "TILES", tiles):
                yield _kernel_row(card, limits, f"tune adapters on {name}: {sizes}", sites[name], num, rank, slots)
        with mock.patch.object(forms, "supports_pdl", lambda _: False):
            what = f"tune adapters on {name}: no early launch"
            yield _kernel_row(card, limits, what, sites[name], num, rank, slots)


def _batch(card: Card) -> tuple[int, int, int]:
    """Adapters, their rank, and tokens of a decoding step."""
    return (NUM_ADAPTERS, RANK, 256) if card.is_gpu else (2, 4, 3)


def _sites(shape: Shape) -> dict[str, ops.LoRATarget]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q, k, v": ops.LoRATarget(shape.hidden, (q, kv, kv)),
        "o": ops.LoRATarget(q, (shape.hidden,)),
        "gate, up": ops.LoRATarget(shape.hidden, (shape.intermediate, shape.intermediate)),
        "down": ops.LoRATarget(shape.intermediate, (shape.hidden,)),
    }


def _kernel_row(
    card: Card, limits: Limits, what: str, site: ops.LoRATarget, num_slots: int, rank: int, slots: torch.Tensor
) -> Row:
    # The interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if card.is_gpu else torch.float32
    size, matrices, tokens = dtype.itemsize, rank * (len(site.widths) * site.in_features + sum(site.widths)), len(slots)
    num_bytes = size * (num_slots * matrices + tokens * (site.in_features + 2 * sum(site.widths)))
    sets = card.num_sets(num_bytes)
    of_model = ops.LoRASlots([site] * sets, num_slots, rank, torch.empty(0, dtype=dtype, device=card.device))
    pairs = [(torch.randn(rank, site.in_features), torch.randn(width, rank)) for width in site.widths]
    packed = of_model.pack([pairs] * sets)
    for slot in range(num_slots):
        of_model.write(slot, packed)
    routing = ops.TokenRouting.empty(tokens, num_slots, card.device)
    batch = ops.LoRABatch(slots, routing=routing)
    own(ops.route_tokens)(slots, routing)
    calls: list[Callable[[], object]] = [
        functools.partial(
            own(ops.add_lora),
            card.random(tokens, sum(site.widths), dtype=dtype),
            card.random(tokens, site.in_features, dtype=dtype),
            module,
            batch,
        )
        for module in of_model.modules
    ]
    return Row.of(f"{what}, {tokens} tokens", card.seconds(calls), limits, num_bytes, 2.0 * tokens * matrices)
