# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization."""

from torch import Tensor

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.module import Module
from quire_kernels import rms_norm


class RMSNorm(Module):
    """Root-mean-square normalization with a learned scale."""

    def __init__(self, size: int, eps: float, factory: ParamFactory) -> None:
        self.eps = eps
        self.weight = factory.empty(size)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        return rms_norm(x, self.weight, self.eps)
