# SPDX-License-Identifier: Apache-2.0
"""Modules of torch that replace those of a model of transformers, and compute the same with Quire's layers and kernels.

They read the batch, and with it its adapters, from CURRENT_PASS. Inputs have the shape [1, num_tokens, features].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import Linear
from quire_engine.models.transformers.paged_attention import CURRENT_PASS
from quire_kernels import get_gated_op, linear, rms_norm
from quire_spec.errors import ConfigError


class MergedLinear:
    """Several linear layers with the same input, such as q, k and v, which are computed together.

    The first one that reads an input computes all of them. The others return their part of the result.
    """

    def __init__(self, layer: Linear) -> None:
        self.layer = layer
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute all layers for [..., in_features]."""
        if self._output is None or self._input is not x:
            self._output = _apply(self.layer, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._input = x
        return self._output

    def release(self) -> None:
        """Forget the last input and output."""
        self._input = self._output = None


class LinearModule(nn.Module):
    """One of the layers of a MergedLinear, or the only one."""

    def __init__(self, merged: MergedLinear, start: int, end: int) -> None:
        super().__init__()
        self.merged, self._start, self._end = merged, start, end
        self.in_features, self.out_features = merged.layer.in_features, end - start
        self._is_last = end == sum(merged.layer.slices.values())

    @property
    def weight(self) -> object:
        """The weight, of which some models read the dtype or the device."""
        return self.merged.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias, of which some models read whether it exists."""
        return self.merged.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to [..., in_features]."""
        output = self.merged(x)
        if self._is_last:
            self.merged.release()
        return output if self._start == 0 and self._is_last else output[..., self._start : self._end]


class EmbeddingModule(nn.Module):
    """The embedding of a model's tokens, with the changes of adapters."""

    def __init__(self, embed: Callable[[ForwardBatch], Tensor], original: nn.Embedding) -> None:
        super().__init__()
        self._embed = embed
        self._scale: Tensor | float | None = getattr(original, "embed_scale", None)
        self.padding_idx, self.num_embeddings = original.padding_idx, original.num_embeddings

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of the tokens of the pass, [1, num_tokens, embedding_size]."""
        embeddings, scale = self._embed(CURRENT_PASS.get().batch)[None], self._scale
        if scale is None:
            return embeddings
        return embeddings * (scale.to(embeddings.dtype) if isinstance(scale, Tensor) else scale)


class RMSNormModule(nn.Module):
    """Root-mean-square normalization with a learned scale."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., size]."""
        # The compiled kernel reads rows.
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.variance_epsilon).view(x.shape)


class GatedMLPModule(nn.Module):
    """Computes down(activation(gate(x)) * up(x))."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module, activation: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._activate = get_gated_op(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output for the input [..., hidden_size]."""
        gate, up = self.gate_proj, self.up_proj
        if isinstance(gate, LinearModule) and isinstance(up, LinearModule) and gate.merged is up.merged:
            gate_up = gate.merged(x)
            gate.merged.release()
        else:
            gate_up = torch.cat((gate(x), up(x)), dim=-1)
        inner: Tensor = self._activate(gate_up.view(-1, gate_up.shape[-1])).view(*x.shape[:-1], -1)
        output: Tensor = self.down_proj(inner)
        return output


@dataclass
class HiddenStates(ModelOutput):
    """What the layers of a model return, of any class."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class IdentityModel(nn.Module):
    """Takes the place of the layers when only the output projection is computed."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> HiddenStates:
        """Return the hidden states, as the layers do."""
        return HiddenStates(last_hidden_state=inputs_embeds)


def _apply(layer: Linear, rows: Tensor) -> Tensor:
    current = CURRENT_PASS.get()
    batch = current.batch
    if layer.adapters is not None and current.kv_cache is not None and len(rows) != len(batch.token_ids):
        names = ", ".join(layer.slices)
        raise ConfigError(f"{names} does not read one row for each token, so adapters cannot change it; disable LoRA")
    if layer.adapters is None or batch.adapters is None:
        return linear(rows if layer.input_order is None else rows[:, layer.input_order], layer.weight, layer.bias, None)
    return layer(rows, batch)
