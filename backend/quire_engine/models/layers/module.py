# SPDX-License-Identifier: Apache-2.0
"""Base class of the parts of a decoder layer.

It finds the linear layers of a part, and the checkpoint tensors that fill the part's parameters.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from quire_engine.models.layers.linear import AdapterSite, Linear
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import HugePageArena


class Module:
    """A part of a model.

    Each attribute has the name that the checkpoint uses for it, unless NAMES has another name. The attributes are
    defined in the order in which the model computes them. A merged linear layer is an exception: its slices have the
    names that the checkpoint uses.
    """

    NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Maps attributes to the names that the checkpoint uses for them, if these differ."""

    def adapter_sites(self) -> Iterator[Linear | AdapterSite]:
        """Yield the linear layers, routers and projections of experts, which adapters can change."""
        for part in vars(self).values():
            if isinstance(part, Linear | AdapterSite):
                yield part
            elif isinstance(part, Module):
                yield from part.adapter_sites()

    @property
    def packed_bytes(self) -> int:
        """Size in bytes of the weights that `pack` repacks, which are those of linear layers and experts."""
        parts = vars(self).values()
        linears = sum(part.num_bytes for part in parts if isinstance(part, Linear))
        return linears + sum(part.packed_bytes for part in parts if isinstance(part, Module))

    @property
    def unread_bytes(self) -> int:
        """Size in bytes of the weights that `pack` reads from the checkpoint, as if they were stored in the model's
        dtype."""
        return sum(part.unread_bytes for part in vars(self).values() if isinstance(part, Linear | Module))

    def pack(self, arena: HugePageArena) -> None:
        """Repack the loaded weights for speed, see CausalLM.pack."""
        for part in vars(self).values():
            if isinstance(part, Linear | Module):
                part.pack(arena)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the checkpoint tensors under `prefix`, each with the parameter or shard that the tensor fills."""
        for attribute, part in vars(self).items():
            name = self.NAMES.get(attribute, attribute)
            if isinstance(part, Tensor):
                yield f"{prefix}{name}", part
            elif isinstance(part, Linear):
                yield from part.tensors(prefix)
            elif isinstance(part, Module):
                yield from part.tensors(f"{prefix}{name}.")
