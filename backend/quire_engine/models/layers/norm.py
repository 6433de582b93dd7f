# SPDX-License-Identifier: Apache-2.0
"""Normalization, with the weights that adapters replace."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.module import Module
from quire_kernels import ModuleSlots, rms_norm


class Norm(Module, ABC):
    """Normalization with a learned scale, and in some architectures with a learned shift. An adapter can have its own
    scale and shift."""

    weight: Tensor | None
    bias: Tensor | None = None

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.adapters: ModuleSlots | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        """Normalize [num_tokens, ..., size]. Without `batch`, adapters are not applied."""
        out = self.normalize(x, self.weight, self.bias)
        if batch is not None and self.is_replaced(batch):
            self.replace_rows(out, x, batch)
        return out

    @property
    def size(self) -> int:
        """Number of learned weights; 0 if there are none."""
        return 0 if self.weight is None else len(self.weight)

    @abstractmethod
    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalize [..., size] with a scale and a shift."""

    def is_replaced(self, batch: ForwardBatch) -> bool:
        """Return whether an adapter of the batch has its own scale and shift."""
        return batch.adapters is not None and self.adapters is not None and self.adapters.transforms(batch.adapters)

    def replace_rows(self, out: Tensor, x: Tensor, batch: ForwardBatch) -> None:
        """Normalize the tokens of such adapters again. `out` is written in place; it must not share memory with `x`."""
        assert batch.adapters is not None and self.adapters is not None
        for slot, rows in batch.adapters.iter_slot_tokens():
            if (transform := self.adapters.get_transform(slot, 0)) is not None:
                weight, bias = transform
                out[rows] = self.normalize(x[rows], weight, bias)


class RMSNorm(Norm):
    """Root-mean-square normalization with a learned scale."""

    weight: Tensor

    def __init__(self, size: int, eps: float, factory: ParamFactory) -> None:
        super().__init__(eps)
        self.weight = factory.empty(size)

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See Norm.normalize."""
        assert weight is not None
        return rms_norm(x, weight, self.eps)


class UnitOffsetRMSNorm(RMSNorm):
    """Root-mean-square normalization with the factor 1 + weight."""

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalize in float32, because 1 + weight would lose precision in a narrower dtype; see Norm.normalize."""
        assert weight is not None
        return rms_norm(x.float(), 1.0 + weight.float(), self.eps).to(x.dtype)


class WideRMSNorm(RMSNorm):
    """Root-mean-square normalization, computed in float32."""

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See Norm.normalize."""
        assert weight is not None
        return rms_norm(x.float(), weight.float(), self.eps).to(x.dtype)


class LayerNorm(Norm):
    """Normalization to mean 0 and variance 1, with a learned scale and shift."""

    def __init__(self, size: int, eps: float, factory: ParamFactory) -> None:
        super().__init__(eps)
        self.weight = factory.empty(size)
        self.bias = factory.empty(size)

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See Norm.normalize."""
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)


class UnitOffsetLayerNorm(LayerNorm):
    """LayerNorm with the factor 1 + weight."""

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See Norm.normalize."""
        assert weight is not None
        return super().normalize(x, weight + 1.0, bias)


class BiaslessLayerNorm(LayerNorm):
    """LayerNorm without a shift."""

    def __init__(self, size: int, eps: float, factory: ParamFactory) -> None:
        super().__init__(size, eps, factory)
        self.bias = None

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """See Norm.normalize."""
        return super().normalize(x, weight, None)


def find_norms(part: Module, path: str) -> Iterator[tuple[str, Norm]]:
    """Yield the norms of a part of a model, which can itself be a norm, each with its path."""
    if isinstance(part, Norm):
        yield path, part
    for name, each in vars(part).items():
        if isinstance(each, Module):
            yield from find_norms(each, f"{path}.{part.NAMES.get(name, name)}")
