# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled ahead are those of the weights that a checkpoint has after loading."""

import pytest
import torch
from support.quantized_checkpoints import FOLDER, QUANTIZED_LLAMAS, open_checkpoint, quantized_mixture

from quire_engine.api import kernel_compilation
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.moe import MoE
from quire_engine.models.registry import get_model_class
from quire_engine.weights.loader import load_weights
from quire_engine.weights.quantized import packing
from quire_kernels import QuantizedWeight
from quire_spec.model.model_config import ModelConfig


def _layout(weight):
    """Everything that the kernel of a weight depends on."""
    if isinstance(weight, torch.Tensor):
        return tuple(weight.shape)
    tensors = weight.values, weight.scales, weight.zeros, weight.codebook
    shapes = [None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    return weight.scheme, weight.shape, weight.group_size, *shapes


def _models(folder, monkeypatch):
    """Return the loaded model, and the model whose kernels are compiled ahead."""
    shape = ModelConfig.load(folder)
    # The layout of a GPU: float32 has no panels.
    monkeypatch.setattr(packing, "has_quantized_kernel", lambda *_: True)
    monkeypatch.setattr(packing, "has_kernel_for_shape", lambda *_: True)
    monkeypatch.setattr(packing, "has_experts_kernel", lambda *_: True)
    checkpoint = open_checkpoint(folder)
    factory = ParamFactory(torch.float32, torch.device("cpu"), checkpoint=checkpoint)
    loaded = get_model_class(shape.architecture)(shape, factory)
    load_weights(folder, loaded.tensors(), checkpoint=checkpoint)
    loaded.pack()
    [compiled] = kernel_compilation._models(shape, (9, 0))
    return loaded, compiled


@pytest.mark.parametrize("name", QUANTIZED_LLAMAS)
def test_weights_of_a_quantized_checkpoint_have_the_compiled_layout(name, monkeypatch):
    loaded, compiled = _models(FOLDER / name, monkeypatch)
    expected = [_layout(linear.weight) for _, linear in loaded.linears()]
    assert [_layout(linear.weight) for _, linear in compiled.linears()] == expected
    has_kernel = all(scheme.has_kernel for _, scheme in loaded.shape.quantization.groups)
    assert any(isinstance(linear.weight, QuantizedWeight) for _, linear in loaded.linears()) == has_kernel


@pytest.mark.parametrize("name", [*QUANTIZED_LLAMAS, "mxfp4"])
def test_quantized_experts_and_the_linears_beside_them_have_the_compiled_layout(name, monkeypatch, tmp_path):
    loaded, compiled = _models(quantized_mixture(name, tmp_path), monkeypatch)
    for layer, compiled_layer in zip(loaded.layers, compiled.layers, strict=True):
        for weight in ("gate_up", "down"):
            expected = _layout(getattr(layer.mlp.experts, weight)) if isinstance(layer.mlp, MoE) else None
            if expected is not None:
                assert _layout(getattr(compiled_layer.mlp.experts, weight)) == expected
    expected = [_layout(linear.weight) for _, linear in loaded.linears()]
    assert [_layout(linear.weight) for _, linear in compiled.linears()] == expected


def test_experts_in_fp8_are_dequantized_where_a_gpu_cannot_convert_them(tmp_path):
    shape = ModelConfig.load(quantized_mixture("ct-fp8-channel", tmp_path))
    for capability, kind in (((9, 0), QuantizedWeight), ((8, 0), torch.Tensor)):
        [model] = kernel_compilation._models(shape, capability)
        [experts] = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoE)]
        assert isinstance(experts.gate_up, kind) and isinstance(experts.down, kind)
