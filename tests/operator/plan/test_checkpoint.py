# SPDX-License-Identifier: Apache-2.0
"""Size of a checkpoint from its index, header or configuration."""

import dataclasses

import pytest
from support.planning import H100, LLAMA_8B, checkpoint_info, planner_inputs

from quire_operator.plan import limits
from quire_operator.plan.checkpoint import CheckpointInfo, SizeSource
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities


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
        (LLAMA_8B, {"metadata": {}}, None, "must be the size of all tensors in bytes, got None"),
        (LLAMA_8B, {"metadata": {"total_size": -1}}, None, "must be the size of all tensors in bytes, got -1"),
        (LLAMA_8B, None, {}, "contains no tensors"),
        (LLAMA_8B, None, {"a": {"data_offsets": "x"}}, "contains no tensors"),
    ],
)
def test_rejects_invalid_files(config, index, header, message):
    with pytest.raises(ConfigError, match=message):
        CheckpointInfo.from_files(config, index, header)


def test_quantized_weights_take_the_bytes_of_their_files_only_where_they_stay_quantized():
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    header = {"a": {"data_offsets": [0, 5_700_000_000]}}
    dense = checkpoint_info(LLAMA_8B).weights_bytes

    def loaded_bytes(dtype, quantization=awq, gpu=None, tp=1, **config):
        model = CheckpointInfo.from_files(LLAMA_8B | {"quantization_config": quantization} | config, None, header)
        inputs = planner_inputs("8b", gpu, f"engine: {{dtype: {dtype}}}")
        return limits.loaded_weights_bytes(dataclasses.replace(inputs, model=model), tp)

    assert loaded_bytes("bfloat16") == loaded_bytes("bfloat16", tp=2) == 5_700_000_000 * 104 // 100
    # Without kernels they are dequantized: in float32, 8 bits per group, on a GPU, act order on several ranks
    # or of experts.
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    assert loaded_bytes("float32") == 2 * dense
    assert loaded_bytes("bfloat16", gptq) == 5_700_000_000 * 104 // 100
    for found in (loaded_bytes("bfloat16", gptq | {"bits": 8}), loaded_bytes("bfloat16", gptq, tp=2)):
        assert found == dense
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    assert loaded_bytes("bfloat16", **experts) == 5_700_000_000 * 104 // 100
    assert loaded_bytes("bfloat16", gptq, **experts) == checkpoint_info(LLAMA_8B | experts).weights_bytes > 4 * dense
    assert (loaded_bytes("bfloat16", gpu=H100) == dense) == ("cuda" not in capabilities.QUANTIZED_KERNEL_DEVICES)
