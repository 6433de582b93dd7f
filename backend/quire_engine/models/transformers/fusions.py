# SPDX-License-Identifier: Apache-2.0
"""Replaces modules of transformers by modules that compute the same with one kernel.

The classes of such modules have other names in each model. A module is replaced if it has the right parts, and if the
replacement gives the same for random inputs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire_engine.models.transformers.modules import GatedMLPModule, RMSNormModule

_GATED_PARTS = ("gate_proj", "up_proj", "down_proj")
_GATED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_MAX_ERROR = {torch.float32: 1e-5}
"""Largest error of a replacement, relative to the largest output, by dtype."""
_MAX_ERROR_IN_HALF = 2**-6


def fuse(model: nn.Module) -> None:
    """Replace the modules of a model for which there are kernels. Its linear layers must be those of torch."""
    for path, replacement in (*_find_norms(model), *_find_gated_mlps(model)):
        model.set_submodule(path, replacement)


def _find_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that divide by the root mean square and multiply by a weight."""
    for path, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            continue
        if len(list(module.parameters())) == 1:
            replacement = RMSNormModule(weight, eps)
            if _are_equal(module, replacement, len(weight), weight):
                yield path, replacement


def _find_gated_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that compute down(activation(gate(x)) * up(x)). Their linear layers keep their places."""
    for path, module in list(model.named_modules()):
        children = dict(module.named_children())
        linears = [child for name in _GATED_PARTS if isinstance(child := children.get(name), nn.Linear)]
        if len(children) != 4 or len(linears) != len(_GATED_PARTS):
            continue
        gate, up, down = linears
        for activation in _GATED_ACTIVATIONS:
            replacement = GatedMLPModule(gate, up, down, activation)
            if _are_equal(module, replacement, gate.in_features, gate.weight):
                yield path, replacement
                break


def _are_equal(module: nn.Module, replacement: nn.Module, size: int, like: Tensor) -> bool:
    x = torch.randn(1, 3, size, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        expected, result = module(x), replacement(x)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False
    if not isinstance(expected, Tensor) or expected.shape != result.shape or expected.dtype != result.dtype:
        return False
    max_error = _MAX_ERROR.get(like.dtype, _MAX_ERROR_IN_HALF)
    return bool((expected - result).abs().max() <= max_error * expected.abs().max())
