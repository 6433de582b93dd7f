# SPDX-License-Identifier: Apache-2.0
"""Size of a checkpoint from its index, header or configuration."""

import pytest
from support.planning import (
    LLAMA_8B,
    checkpoint_info,
)

from quire_operator.plan.checkpoint import CheckpointInfo, SizeSource
from quire_spec.errors import ConfigError


def test_size_comes_from_index_then_header_then_configuration():
    header = {"__metadata__": {"format": "pt"}, "a": {"data_offsets": [0, 8]}, "b": {"data_offsets": [8, 100]}}
    checkpoints = [
        CheckpointInfo.from_files(LLAMA_8B, {"metadata": {"total_size": 16.0e9}}, header),
        CheckpointInfo.from_files(LLAMA_8B, None, header),
        CheckpointInfo.from_files(LLAMA_8B),
    ]
    assert [c.size_source for c in checkpoints] == [SizeSource.INDEX, SizeSource.HEADER, SizeSource.SHAPE]
    assert [c.weights_bytes for c in checkpoints[:2]] == [16_000_000_000, 100]
    assert checkpoints[2].weights_bytes == pytest.approx(16_060_522_496, rel=0.001)
    assert checkpoint_info(dict(reversed(LLAMA_8B.items()))).config_digest == checkpoints[0].config_digest


@pytest.mark.parametrize(
    ("config", "index", "header", "message"),
    [
        ([], None, None, "config.json: expected an object"),
        ({"architectures": ["X"]}, None, None, "'X' is not supported"),
        (LLAMA_8B | {"num_attention_heads": 0}, None, None, "num_attention_heads: must be a positive integer, got 0"),
        (LLAMA_8B | {"hidden_size": "4096"}, None, None, "config.json: "),
        (LLAMA_8B | {"vocab_size": True}, None, None, "vocab_size: must be a positive integer, got True"),
        (LLAMA_8B, {"metadata": {}}, None, "total_size must be the bytes of all tensors, got None"),
        (LLAMA_8B, {"metadata": {"total_size": -1}}, None, "total_size must be the bytes of all tensors, got -1"),
        (LLAMA_8B, None, {}, "contains no tensors"),
        (LLAMA_8B, None, {"a": {"data_offsets": "x"}}, "contains no tensors"),
    ],
)
def test_rejects_invalid_files(config, index, header, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointInfo.from_files(config, index, header)
