# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled ahead are those of the weights that a checkpoint has after loading."""

import pytest
import torch
from support.quantized_checkpoints import FOLDER, QUANTIZED_LLAMAS, open_checkpoint

from quire_engine.api import kernel_compilation
from quire_engine.models.layers.linear import ParamFactory
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


@pytest.mark.parametrize("name", QUANTIZED_LLAMAS)
def test_weights_of_a_quantized_checkpoint_have_the_compiled_layout(name, monkeypatch):
    folder = FOLDER / name
    shape = ModelConfig.load(folder)
    # The layout of a GPU: float32 has no panels.
    monkeypatch.setattr(packing, "has_quantized_kernel", lambda *_: True)
    monkeypatch.setattr(packing, "has_kernel_for_shape", lambda *_: True)
    checkpoint = open_checkpoint(folder)
    factory = ParamFactory(torch.float32, torch.device("cpu"), checkpoint=checkpoint)
    loaded = get_model_class(shape.architecture)(shape, factory)
    load_weights(folder, loaded.tensors(), checkpoint=checkpoint)
    loaded.pack()
    [compiled] = kernel_compilation._models(shape)
    expected = [_layout(linear.weight) for _, linear in loaded.linears()]
    assert [_layout(linear.weight) for _, linear in compiled.linears()] == expected
    has_kernel = all(scheme.has_kernel for _, scheme in shape.quantization.groups)
    assert any(isinstance(linear.weight, QuantizedWeight) for _, linear in loaded.linears()) == has_kernel
