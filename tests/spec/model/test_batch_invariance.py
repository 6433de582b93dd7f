# SPDX-License-Identifier: Apache-2.0
"""The reasons why an engine is not batch-invariant. tests/engine/core/test_batch_invariance.py compares bits."""

from dataclasses import replace

import pytest

from quire_kernels import PANEL_COLUMNS, attention
from quire_spec.model import batch_invariance
from quire_spec.model.attention.mamba2_config import Mamba2Config
from quire_spec.model.attention.short_conv_config import ShortConvConfig
from quire_spec.model.batch_invariance import CpuKernels, describe, variance_reason
from quire_spec.model.model_config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
SHAPE = ModelConfig.from_config(LLAMA)


@pytest.mark.parametrize(
    ("changes", "arguments", "reason"),
    [
        ({}, {}, None),
        ({}, {"device": "cuda"}, "GPU kernels"),
        ({}, {"dtype": "float32"}, "bfloat16, not in float32"),
        ({}, {"num_ranks": 2}, "sum over tensor-parallel ranks"),
        ({}, {"kernels": CpuKernels(has_compiled=False)}, "torch computes"),
        ({}, {"kernels": CpuKernels(has_amx=True)}, "oneDNN computes"),
        ({}, {"kernels": CpuKernels(override="linear=torch")}, "QUIRE_KERNELS is linear=torch"),
        ({"head_dim": 24}, {}, "the model has 24 and 9 to 3"),
        ({"vocab_size": 49153}, {}, None),
        ({"activation": "gelu"}, {}, "torch computes the activation gelu"),
        (
            {"intermediate_size": 1500},
            {},
            "mlp.gate_proj has 1500 outputs, and the compiled kernels need a multiple of 32",
        ),
    ],
    ids=str,
)
def test_reasons(changes, arguments, reason):
    found = variance_reason(replace(SHAPE, **changes), **({"device": "cpu", "dtype": "bfloat16"} | arguments))
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    assert describe(found) == ("batch-invariant: yes" if found is None else f"batch-invariant: no ({found})")


@pytest.mark.parametrize(("state", "is_invariant"), [("short_conv", True), ("mamba2", False)])
def test_recurrences_are_not_invariant(state, is_invariant):
    layers = (True, False), (False, True), 4
    states = {
        "short_conv": ShortConvConfig(*layers, 64, False),
        "mamba2": Mamba2Config(*layers, 4, 16, 2, 8, False, False, False, (0.0, 1.0), True, True),
    }
    reason = variance_reason(replace(SHAPE, states=states[state]), "cpu", "bfloat16")
    assert reason is None if is_invariant else "a recurrence rounds differently" in (reason or "")


def test_limits_are_those_of_the_kernels():
    assert batch_invariance._PANEL_COLUMNS == PANEL_COLUMNS
    assert batch_invariance._HEAD_DIMS == attention._HEAD_DIMS
    assert batch_invariance._MAX_HEADS_PER_KV_HEAD == attention._MAX_HEADS_PER_KV_HEAD
