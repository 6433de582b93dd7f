# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalization."""

from collections.abc import Iterator

from torch import Tensor

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import rms_norm


class RMSNorm:
    """Root-mean-square normalization with a learned scale."""

    def __init__(self, size: int, eps: float, factory: ParamFactory) -> None:
        self.eps = eps
        self.weight = factory.empty(size)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def tensors(self, name: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the checkpoint tensors of the module `name`."""
        yield f"{name}.weight", self.weight
