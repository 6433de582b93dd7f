# SPDX-License-Identifier: Apache-2.0
"""Shared expert: an MLP that computes every token beside the experts that a router chooses."""

from collections.abc import Iterator

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import AdapterSite, Linear, ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.moe import MoE
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import HugePageArena, get_gated_op
from quire_spec.model.model_config import ModelConfig

_PATH = "mlp.shared_expert"


class GatedSharedExpert(Module):
    """A gated MLP whose output is multiplied with the sigmoid of one more linear layer."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        paths = [f"{_PATH}.gate_proj", f"{_PATH}.up_proj"]
        self.gate_up_proj = build_linear(shape, paths, factory, False)
        self.down_proj = build_linear(shape, [f"{_PATH}.down_proj"], factory, False)
        self.shared_expert_gate = build_linear(shape, [f"{_PATH}_gate"], factory, False)
        self.activate = get_gated_op(shape.activation)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the output for the input [num_tokens, hidden_size]."""
        out = self.down_proj(self.activate(self.gate_up_proj(x, batch)), batch)
        return out.mul_(self.shared_expert_gate(x, batch).sigmoid())


class SharedExpertMoE(MoE):
    """A mixture of experts with a shared expert."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        super().__init__(shape, factory)
        self.shared_expert = GatedSharedExpert(shape, factory)

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See MoE."""
        shared = self.shared_expert(x, batch)
        return super().__call__(x, batch, shared if residual is None else residual.add_(shared))

    def adapter_sites(self) -> Iterator[Linear | AdapterSite]:
        """See Module.adapter_sites."""
        yield from self.shared_expert.adapter_sites()
        yield from super().adapter_sites()

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        yield from super().tensors(prefix)
        # The names of the slices begin with the name of the shared expert.
        yield from self.shared_expert.tensors(prefix)

    def pack(self, arena: HugePageArena) -> None:
        """See Module.pack."""
        super().pack(arena)
        self.shared_expert.pack(arena)

    @property
    def packed_bytes(self) -> int:
        """See Module.packed_bytes."""
        return super().packed_bytes + self.shared_expert.packed_bytes

    @property
    def unread_bytes(self) -> int:
        """See Module.unread_bytes."""
        return super().unread_bytes + self.shared_expert.unread_bytes
