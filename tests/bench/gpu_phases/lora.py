# SPDX-License-Identifier: Apache-2.0
"""Decoding with every sequence on one of many adapters, against the base."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from card import Card

from gpu_phases.process import Context
from gpu_phases.random_engine import close, decode_rate, make_engine, settings
from gpu_phases.store import Row
from quire_engine.core.engine import Engine
from quire_engine.lora.peft.adapter import HostAdapter
from quire_engine.lora.peft.lora_module import NO_LAYER

NUM_ADAPTERS, RANK, NUM_ROUNDS = 32, 16, 3


def add_adapters(engine: Engine, ranks: Sequence[int], everywhere: bool) -> list[str]:
    """Register random adapters on every linear of every layer; `everywhere`: also on embedding and output projection.

    Adapters of one rank have the same numbers. They are in slots of their own, so they cost as much as different ones.
    """
    runner: Any = engine._runner
    draw, made = torch.Generator().manual_seed(3), {}
    for rank in set(ranks):
        pairs = {}
        slots = runner.adapter_store.slots
        for places, module in zip(slots._module_keys, slots._slots.modules, strict=True):
            for place, width in zip(places, module.target.widths, strict=True):
                if not module.target.is_norm and (everywhere or place[0] != NO_LAYER):
                    features = module.target.in_features
                    a, b = (torch.randn(shape, generator=draw) for shape in ((rank, features), (width, rank)))
                    pairs[place] = a / features**0.5, b / 8
        made[rank] = runner.adapter_store.pack(HostAdapter(rank, pairs))
    names = [f"adapter {i} of rank {rank}" for i, rank in enumerate(ranks)]
    for name, rank in zip(names, ranks, strict=True):
        engine.add_adapter(name, Path("made here"), made[rank])
    return names


def engine_rows(context: Context) -> Iterator[Row]:
    """Medians of rounds, and the ratios that have bars."""
    card = context.card
    num, ranks = (NUM_ADAPTERS, [RANK] * NUM_ADAPTERS) if card.is_full else (2, [4, 4])
    options = {"enable_lora": True, "max_loras": num, "max_lora_rank": max(ranks)}
    card.wait_free()
    engine = make_engine(card, **settings(card))
    yield (base := _row(card, engine, "base, LoRA disabled", ()))
    close(engine)
    engine = make_engine(card, **(settings(card) | options))
    names = add_adapters(engine, ranks, everywhere=False)
    yield (adapters := _row(card, engine, f"{num} adapters", names))
    yield _ratio(adapters, base, "adapters")
    yield (enabled := _row(card, engine, "base, LoRA enabled", ()))
    yield _ratio(enabled, base, "lora_enabled")
    close(engine)


def _row(card: Card, engine: Engine, name: str, adapters: Sequence[str]) -> Row:
    load = (256, 960, 120) if card.is_full else (3, 12, 6)
    # Compiles, and fills the slots.
    decode_rate(engine, *load, adapters=adapters)
    found = [decode_rate(engine, *load, adapters=adapters) for _ in range(NUM_ROUNDS if card.is_full else 1)]
    rates = [each["output_tokens_per_s"] for each in found if each["output_tokens_per_s"]]
    return {"what": f"{name}: {found[0]['what']}", "value": statistics.median(rates), "unit": "tokens/s", "all": rates}


def _ratio(one: Row, other: Row, key: str) -> Row:
    return {
        "what": f"{one['what']} / {other['what']}",
        "key": key,
        "value": one["value"] / other["value"],
        "unit": "ratio",
    }
