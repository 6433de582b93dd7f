# SPDX-License-Identifier: Apache-2.0
"""Weighted sum of adapters as one adapter: the matrices are concatenated along the LoRA rank.

This equals PEFT's `add_weighted_adapter(..., combination_type="cat")`.
"""

from collections.abc import Sequence

import torch

from quire_engine.lora.adapter_info import check_combinable
from quire_engine.lora.peft.adapter import HostAdapter
from quire_engine.lora.peft.tensor_check import check_finite


def combine(adapters: Sequence[tuple[HostAdapter, float]]) -> HostAdapter:
    """Return the sum of adapters, each multiplied by its weight.

    Raises:
        InvalidArgument: an adapter cannot be part of a sum, or a product overflows.
    """
    if len(adapters) == 1 and adapters[0][1] == 1.0:
        return adapters[0][0]
    for adapter, _ in adapters:
        check_combinable(adapter.not_combinable)
    pairs = {}
    for key in dict.fromkeys(key for adapter, _ in adapters for key in adapter.pairs):
        present = [(*adapter.pairs[key], weight) for adapter, weight in adapters if key in adapter.pairs]
        a = torch.cat([a for a, _, _ in present], dim=-2)
        b = torch.cat([(b.float() * weight).to(b.dtype) for _, b, weight in present], dim=-1)
        check_finite(f"weighted matrix of {key[1]} contains", b, b.dtype)
        pairs[key] = a, b
    return HostAdapter(max(a.shape[-2] for a, _ in pairs.values()), pairs, {}, adapters[0][0].invocation_tokens)
