# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: norms before and after attention and MLP, scaled embeddings, soft caps on scores and logits, a window in
every other layer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire_engine.batch import Batch
from quire_engine.layers import Placement, RMSNorm
from quire_engine.models.llama import DecoderLayer, LlamaForCausalLM
from quire_engine.part import Target
from quire_kernels import rms_norm
from quire_spec.model.model_config import ModelConfig


class Gemma2RMSNorm(RMSNorm):
    """Root-mean-square normalisation whose weight is the scale less one."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] to the same; all of it in float32, where 1 + weight loses nothing."""
        return rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)


class Gemma2DecoderLayer(DecoderLayer):
    """Llama's layer with what attention and MLP give normalised too, before it is added."""

    NORM = Gemma2RMSNorm

    def __init__(self, shape: ModelConfig, index: int, place: Placement) -> None:
        super().__init__(shape, index, place)
        self.pre_feedforward_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, place)
        self.post_feedforward_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, place)

    def __call__(self, hidden: Tensor, rope: tuple[Tensor, Tensor], cache: Tensor, batch: Batch) -> Tensor:
        """[num_tokens, hidden_size] to the same, in place."""
        attended = self.self_attn(self.input_layernorm(hidden), rope, cache, batch)
        hidden.add_(self.post_attention_layernorm(attended))
        fed = self.mlp(self.pre_feedforward_layernorm(hidden), batch)
        return hidden.add_(self.post_feedforward_layernorm(fed))

    def weights(self) -> None:
        """See DecoderLayer.weights."""

    def tensors(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """The checkpoint's tensors under `prefix`, each as the part of a parameter that it fills."""
        yield from super().tensors(prefix)
        yield from self.pre_feedforward_layernorm.tensors(f"{prefix}pre_feedforward_layernorm")
        yield from self.post_feedforward_layernorm.tensors(f"{prefix}post_feedforward_layernorm")


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Token ids to logits; see LlamaForCausalLM."""

    LAYER = Gemma2DecoderLayer

    def build(self, place: Placement) -> None:
        """See CausalLM.build."""
        super().build(place)
        # Rounded to the weights' type, as it was in training.
        self.embedding_scale = torch.tensor(self.shape.hidden_size**0.5, dtype=place.dtype).item()

    def embed(self, batch: Batch) -> Tensor:
        """See CausalLM.embed."""
        return super().embed(batch).mul_(self.embedding_scale)

    def project(self, hidden: Tensor, batch: Batch) -> Tensor:
        """See CausalLM.project."""
        logits, cap = super().project(hidden, batch), self.shape.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
