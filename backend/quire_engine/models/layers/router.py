# SPDX-License-Identifier: Apache-2.0
"""Router of a mixture of experts."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import AdapterSite, Linear, ParamFactory
from quire_engine.models.layers.module import Module
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import (
    HugePageArena,
    LinearWeight,
    Routing,
    adapted_linear,
    add_lora,
    choose_experts,
    linear,
    pack_weight,
    pad_outputs,
    weight_bytes,
)
from quire_spec.model.model_config import ModelConfig


class Router(Module):
    """Chooses the experts of each token. All tensor-parallel ranks have the whole router."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory, has_bias: bool = False) -> None:
        assert shape.moe is not None
        info, moe = shape.architecture_info, shape.moe
        self.names, self.num_experts = info.expert_names, moe.num_experts
        self.routing = Routing(
            top_k=moe.top_k,
            normalize=moe.normalize,
            scoring=info.router_scoring,
            scale=moe.scale,
            min_sum=moe.min_sum,
            num_groups=moe.num_groups,
            num_token_groups=moe.num_token_groups,
            num_group_scores=moe.num_group_scores,
        )
        # transformers and vLLM compute these logits in float32: of many experts, some have equal logits in bfloat16.
        self.dtype = torch.float32 if info.has_float32_router else factory.dtype
        weight = torch.empty(moe.num_experts, shape.hidden_size, dtype=self.dtype, device=factory.device)
        self.weight: LinearWeight = weight
        self.bias = factory.empty(moe.num_experts) if has_bias else None
        self.correction_bias: Tensor | None = None
        """[num_experts] float32 in any dtype of the model, because it is as large as the differences of scores."""
        if self.names.correction_bias:
            self.correction_bias = torch.empty(moe.num_experts, dtype=torch.float32, device=factory.device)
        self.site = AdapterSite(shape.hidden_size, {self.names.router: len(pad_outputs(weight))})

    def __call__(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the ids and the weights of the experts for the input [num_tokens, hidden_size]. See
        `choose_experts`."""
        logits = self.compute_logits(x, batch)[:, : self.num_experts]
        return choose_experts(logits, self.routing, self.correction_bias)

    def compute_logits(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the logits, [num_tokens, num_experts or more]."""
        adapters, bias = self.site.adapters, self.bias
        if adapters is None or batch.adapters is None or not self.site.applies_to(batch):
            return linear(x.to(self.dtype), self.weight, bias)
        if x.dtype == self.dtype:
            return adapted_linear(x, self.weight, bias, None, adapters, batch.adapters)
        # Adapters have the dtype of the model.
        delta = x.new_zeros(len(x), *self.site.slices.values())
        add_lora(delta, x, adapters, batch.adapters)
        return linear(x.to(self.dtype), self.weight, bias)[:, : self.num_experts] + delta[:, : self.num_experts]

    def adapter_sites(self) -> Iterator[Linear | AdapterSite]:
        """See Module.adapter_sites."""
        yield self.site

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors. `prefix` is the prefix of the mixture."""
        assert isinstance(self.weight, Tensor)
        name = self.names.router_in_checkpoints or self.names.router
        yield f"{prefix}{name}.weight", self.weight
        if self.bias is not None:
            yield f"{prefix}{name}.bias", self.bias
        if self.correction_bias is not None:
            # In Ernie's checkpoints, the bias has a row for each of several kinds of experts. Text has one kind.
            bias, name = self.correction_bias, self.names.correction_bias
            yield f"{prefix}{name}", bias[None] if name.startswith("moe_statics.") else bias

    def pack(self, arena: HugePageArena) -> None:
        """See Module.pack."""
        assert isinstance(self.weight, Tensor)
        padded = pad_outputs(self.weight)
        if self.bias is not None:
            self.bias = F.pad(self.bias, (0, len(padded) - len(self.weight)))
        self.weight = pack_weight(padded, arena)

    @property
    def packed_bytes(self) -> int:
        """See Module.packed_bytes."""
        return weight_bytes(self.weight)
