# SPDX-License-Identifier: Apache-2.0
"""The KV cache stores and loads the contents of blocks, and changes no other block."""

import pytest
import torch
from support.peak_memory import PeakTensorBytes

from quire_engine.kv_cache import device_cache
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.host_swap import HostSwap
from quire_engine.sequence import BlockId
from quire_engine.step.plan import SwapCopy
from quire_kernels import as_indexable
from quire_spec.model.model_config import ModelConfig

SHAPE = ModelConfig.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 8,
        "vocab_size": 8,
        "max_position_embeddings": 64,
    }
)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]),
]


def random_cache(num_blocks: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> KVCache:
    """Return a cache with random contents."""
    kv_cache = KVCache(SHAPE, num_blocks, 8, dtype, torch.device(device))
    for index, layer in enumerate(kv_cache.layers):
        layer.copy_(10 * torch.randn(layer.shape, generator=torch.Generator().manual_seed(100 * seed + index)))
    return kv_cache


def contents(kv_cache: KVCache) -> torch.Tensor:
    """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], on the CPU."""
    return torch.stack([as_indexable(layer) for layer in kv_cache.layers]).movedim(2, 0).cpu().clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("blocks_per_copy", [1, 3, 100])
def test_blocks_stored_by_one_cache_load_into_another(device, dtype, blocks_per_copy, monkeypatch):
    kv_cache, other = random_cache(12, device, dtype), random_cache(9, device, dtype, seed=1)
    monkeypatch.setattr(device_cache, "_MAX_COPY_BYTES", blocks_per_copy * kv_cache.num_bytes // 12)
    contents_before, expected = contents(kv_cache), contents(other)
    host = kv_cache.allocate_host_blocks(6)
    assert host.is_pinned() == (device == "cuda")
    kv_cache.store_blocks([7, 2, 11, 3], host, [5, 0, 1, 4])
    other.load_blocks([8, 0, 1], host, [1, 5, 0])
    assert torch.equal(contents(kv_cache), contents_before)
    expected[[8, 0, 1]] = contents_before[[11, 7, 2]]
    assert torch.equal(contents(other), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_copies_blocks(device):
    kv_cache = random_cache(6, device)
    expected = contents(kv_cache)
    expected[[1, 5, 4]] = expected[[0, 0, 3]]
    kv_cache.copy_blocks([0, 0, 3], [1, 5, 4])
    assert torch.equal(contents(kv_cache), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_swap_out_precedes_swap_in(device):
    kv_cache = random_cache(4, device)
    contents_before = contents(kv_cache)
    host_swap = HostSwap([kv_cache], 3)
    assert host_swap.num_bytes == 3 * kv_cache.num_bytes // 4
    host_swap.copy([SwapCopy(BlockId(1), BlockId(2))], [])
    # Block 3 is swapped out and then overwritten with the contents of block 1 from host memory.
    host_swap.copy([SwapCopy(BlockId(3), BlockId(0))], [SwapCopy(BlockId(3), BlockId(2))])
    host_swap.copy([], [SwapCopy(BlockId(0), BlockId(0))])
    assert torch.equal(contents(kv_cache), contents_before[[3, 1, 2, 1]])


@pytest.mark.parametrize("blocks_per_copy", [1, 3])
def test_copies_use_a_small_temporary_buffer(blocks_per_copy, monkeypatch):
    """Every sequence of a step can start with a copy or a swap-in; a GPU has no memory to gather all of them."""
    kv_cache = random_cache(30, "cpu")
    bytes_per_block = kv_cache.num_bytes // 30
    monkeypatch.setattr(device_cache, "_MAX_COPY_BYTES", blocks_per_copy * bytes_per_block)
    contents_before, host = contents(kv_cache), kv_cache.allocate_host_blocks(10)
    copies = (
        lambda: kv_cache.copy_blocks(range(10), range(10, 20)),
        lambda: kv_cache.store_blocks(range(10), host, range(10)),
        lambda: kv_cache.load_blocks(range(20, 30), host, range(10)),
    )
    for copy in copies:
        with PeakTensorBytes() as peak:
            copy()
        assert peak.peak_bytes <= blocks_per_copy * bytes_per_block + 1000
    assert kv_cache.max_blocks_per_copy == blocks_per_copy
    assert torch.equal(contents(kv_cache)[10:], contents_before[:10].repeat(2, 1, 1, 1, 1, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_measures_seconds_per_block_and_per_token(device):
    calls = []
    swap_costs = HostSwap([random_cache(4, device)], 3).measure(lambda: calls.append(1) or 50)
    assert swap_costs.num_host_blocks == 3 and len(calls) == 4
    assert 0 < swap_costs.seconds_per_block < 1 and 0 < swap_costs.seconds_per_token < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_zero_writes_to_all_blocks(device):
    kv_cache = random_cache(4, device)
    kv_cache.zero()
    assert not contents(kv_cache).any()
