# SPDX-License-Identifier: Apache-2.0
"""The kernels of adapters by themselves, in the shapes of each linear."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields
from unittest import mock

import torch
from card import Card

import quire_kernels as ops
from gpu_phases.gate_cases import own
from gpu_phases.lora import NUM_ADAPTERS, RANK
from gpu_phases.store import Row
from gpu_phases.timing import Shape, Timer
from quire_kernels.gpu import lora as forms


def rows(timer: Timer) -> Iterator[Row]:
    """Both launches of each linear, in a decoding step of many adapters and in a prompt of one; and the routing."""
    card, shape = timer.card, timer.shape
    num, rank, tokens = _batch(card)
    slots = torch.arange(tokens, device=card.device) % num
    routing = ops.TokenRouting.empty(tokens, num, card.device)
    call = functools.partial(own(ops.route_tokens), slots, routing)
    yield timer.row(f"route, {tokens} tokens to {num} slots", [call], 16.0 * tokens)
    sites = _sites(shape)
    for name, site in list(sites.items())[: 1 if not card.is_full else None]:
        yield _row(timer, f"{num} adapters of rank {rank} on {name}", site, num, rank, slots)
    if card.is_full:
        for num_tokens in (256, 8192):
            of_one = torch.zeros(num_tokens, dtype=torch.int64, device=card.device)
            yield _row(timer, f"an adapter of rank {rank} on q, k, v", sites["q, k, v"], 1, rank, of_one)


def tune_rows(timer: Timer) -> Iterator[Row]:
    """Other sizes of tiles; the fastest belong in LoRATiles of gpu/lora.py."""
    card, shape = timer.card, timer.shape
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
    tried = {"down": shrinks, "gate, up": expands} if card.is_full else {"down": shrinks[:1]}
    for name, all_tiles in tried.items():
        for tiles in all_tiles:
            sizes = ", ".join(f"{f.name} {getattr(tiles, f.name)}" for f in fields(tiles))
            with mock.patch.object(forms, "TILES", tiles):
                yield _row(timer, f"tune adapters on {name}: {sizes}", sites[name], num, rank, slots)
        with mock.patch.object(forms, "supports_pdl", lambda _: False):
            what = f"tune adapters on {name}: no early launch"
            yield _row(timer, what, sites[name], num, rank, slots)


def _batch(card: Card) -> tuple[int, int, int]:
    """Return the adapters, their rank, and the tokens of a decoding step."""
    return (NUM_ADAPTERS, RANK, 256) if card.is_full else (2, 4, 3)


def _sites(shape: Shape) -> dict[str, ops.LoRATarget]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q, k, v": ops.LoRATarget(shape.hidden, (q, kv, kv)),
        "o": ops.LoRATarget(q, (shape.hidden,)),
        "gate, up": ops.LoRATarget(shape.hidden, (shape.intermediate, shape.intermediate)),
        "down": ops.LoRATarget(shape.intermediate, (shape.hidden,)),
    }


def _row(timer: Timer, what: str, site: ops.LoRATarget, num_slots: int, rank: int, slots: torch.Tensor) -> Row:
    card, dtype = timer.card, timer.dtype
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
    return timer.row(f"{what}, {tokens} tokens", calls, num_bytes, 2.0 * tokens * matrices)
