# SPDX-License-Identifier: Apache-2.0
"""KV caches for tests that run a model without an engine."""

import torch

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.state_cache import StateCache
from quire_engine.models.base import CausalLM
from quire_spec.model.kv_layout import KVLayout


def create_cache(model: CausalLM, num_blocks: int, dtype: torch.dtype = torch.float32, block_size: int = 8) -> KVCache:
    """Return a cache on the CPU for `num_blocks` times `block_size` tokens.

    It has one group of layers if they have equal heads. If layers have states, it has `num_blocks` states.
    """
    shape, device = model.shape, torch.device("cpu")
    layout = None if shape.variants is None else KVLayout.from_model(shape, 512)
    states = None
    if shape.states is not None:
        states = StateCache(shape.states, num_blocks, dtype, torch.float32, device)
    num_groups = 1 if layout is None else layout.num_groups
    return KVCache(shape, num_blocks * num_groups, block_size, dtype, device, layout=layout, states=states)
