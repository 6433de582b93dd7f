# SPDX-License-Identifier: Apache-2.0
"""The KV cache gives contents out and takes them in, block by block, and nothing else changes."""

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


def cache(num_blocks: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> KVCache:
    """A cache full of numbers."""
    made = KVCache(SHAPE, num_blocks, 8, dtype, torch.device(device))
    for index, layer in enumerate(made.layers):
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(100 * seed + index)))
    return made


def contents(made: KVCache) -> torch.Tensor:
    """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], on the CPU."""
    return torch.stack([as_indexable(layer) for layer in made.layers]).movedim(2, 0).cpu().clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_what_one_cache_exports_another_takes(device, dtype, at_once, monkeypatch):
    made, other = cache(12, device, dtype), cache(9, device, dtype, seed=1)
    monkeypatch.setattr(device_cache, "_MAX_COPY_BYTES", at_once * made.num_bytes // 12)
    before, target = contents(made), contents(other)
    host = made.allocate_host_blocks(6)
    assert host.is_pinned() == (device == "cuda")
    made.store_blocks([7, 2, 11, 3], host, [5, 0, 1, 4])
    other.load_blocks([8, 0, 1], host, [1, 5, 0])
    assert torch.equal(contents(made), before)
    target[[8, 0, 1]] = before[[11, 7, 2]]
    assert torch.equal(contents(other), target)


@pytest.mark.parametrize("device", DEVICES)
def test_copies(device):
    made = cache(6, device)
    expected = contents(made)
    expected[[1, 5, 4]] = expected[[0, 0, 3]]
    made.copy_blocks([0, 0, 3], [1, 5, 4])
    assert torch.equal(contents(made), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_swapper_copies_out_before_it_copies_in(device):
    made = cache(4, device)
    before = contents(made)
    swapper = HostSwap(made, 3)
    assert swapper.num_bytes == 3 * made.num_bytes // 4
    swapper.copy([SwapCopy(BlockId(1), BlockId(2))], [])
    # Block 3 goes where block 1, which comes back, has its place no more.
    swapper.copy([SwapCopy(BlockId(3), BlockId(0))], [SwapCopy(BlockId(3), BlockId(2))])
    swapper.copy([], [SwapCopy(BlockId(0), BlockId(0))])
    assert torch.equal(contents(made), before[[3, 1, 2, 1]])


@pytest.mark.parametrize("at_once", [1, 3])
def test_few_blocks_are_copied_at_a_time(at_once, monkeypatch):
    """Each sequence of a step may begin with a copy, or come back from the host; a GPU has no room for all of them."""
    made = cache(30, "cpu")
    of_block = made.num_bytes // 30
    monkeypatch.setattr(device_cache, "_MAX_COPY_BYTES", at_once * of_block)
    before, host = contents(made), made.allocate_host_blocks(10)
    moves = (
        lambda: made.copy_blocks(range(10), range(10, 20)),
        lambda: made.store_blocks(range(10), host, range(10)),
        lambda: made.load_blocks(range(20, 30), host, range(10)),
    )
    for move in moves:
        with PeakTensorBytes() as live:
            move()
        assert live.peak_bytes <= at_once * of_block + 1000
    assert made.max_blocks_per_copy == at_once
    assert torch.equal(contents(made)[10:], before[:10].repeat(2, 1, 1, 1, 1, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_swapper_measures_blocks_and_tokens(device):
    calls = []
    space = HostSwap(cache(4, device), 3).measure(lambda: calls.append(1) or 50)
    assert space.num_host_blocks == 3 and len(calls) == 4
    assert 0 < space.seconds_per_block < 1 and 0 < space.seconds_per_token < 1e-3
