# SPDX-License-Identifier: Apache-2.0
"""Number of KV blocks for a memory budget, and the errors when a sequence does not fit."""

import dataclasses

import pytest
from support.single_steps import CONFIG

from quire_engine.worker.memory_budget import GIB, MemoryBudget, num_kv_blocks
from quire_spec.errors import ConfigError

BUDGET = MemoryBudget(total=20 * GIB, weights=4 * GIB, lora=1 * GIB, activations=3 * GIB)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "total", "expected"),
    [
        ({"kv_cache_memory_bytes": 100 * MIB + 1}, 20 * GIB, 100),
        # A quarter of the 12 GiB that are left.
        ({"device": "cpu", "max_num_seqs": 10_000}, 20 * GIB, 3 * 1024),
        # At most 4 GiB on a CPU.
        ({"device": "cpu", "max_num_seqs": 10_000}, 100 * GIB, 4 * 1024),
        # As many as 8 sequences of 16 blocks can use.
        ({"device": "cpu"}, 20 * GIB, 128),
        ({"device": "cuda"}, 20 * GIB, 12 * 1024),
    ],
)
def test_number_of_blocks(changes, total, expected):
    budget = dataclasses.replace(BUDGET, total=total)
    assert num_kv_blocks(dataclasses.replace(CONFIG, **changes), 128, MIB, budget) == expected


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"device": "cpu"}, "set kv_cache_memory_bytes to 16777216 or more, if the machine has it"),
        ({"device": "cuda"}, "raise gpu_memory_utilization, or lower max_num_batched_tokens or max_loras"),
    ],
)
@pytest.mark.parametrize("total", [8 * GIB + 15 * MIB, GIB])
def test_too_small_cache_error_names_the_setting_and_the_bytes(changes, fix, total):
    """With a little memory for the cache, and with less than the weights need."""
    budget = dataclasses.replace(BUDGET, total=total)
    with pytest.raises(ConfigError) as error:
        num_kv_blocks(dataclasses.replace(CONFIG, **changes), 128, MIB, budget)
    message = str(error.value)
    assert message.startswith(
        "max_model_len: a sequence of 128 tokens does not fit into the KV cache; lower max_model_"
    )
    assert fix in message.splitlines()[0]
    assert "adapter slots (2 with 16 LoRA ranks)" in message
    assert "4,294,967,296 bytes      4.00 GiB" in message


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_states_count_and_their_setting_is_named(device):
    config = dataclasses.replace(CONFIG, device=device, max_num_seqs=10_000)
    fits = dataclasses.replace(BUDGET, states=4 * GIB)
    assert num_kv_blocks(config, 128, MIB, fits) == (2 if device == "cpu" else 8) * 1024
    with pytest.raises(ConfigError) as error:
        num_kv_blocks(config, 128, MIB, dataclasses.replace(BUDGET, states=12 * GIB))
    message = str(error.value)
    assert "or lower max_num_seqs, which is 10000, because each sequence has a state" in message.splitlines()[0]
    assert "states of max_num_seqs sequences" in message
    config = dataclasses.replace(config, kv_cache_memory_bytes=18 * GIB)
    if device == "cpu":
        with pytest.raises(ConfigError, match=r"bytes that are free beside the states; lower it or max_num_seqs$"):
            num_kv_blocks(config, 128, MIB, fits)
