# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3 head: one decoder layer that reads hidden states of the target model and proposes the target's next tokens.

The row at position i reads the hidden states of token i and the embedding of token i + 1, and proposes token i + 2.

Source: Li et al. 2025 (EAGLE-3), and the layouts of SafeAILab/EAGLE and speculators.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import Linear, ParamFactory
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import RMSNorm
from quire_engine.models.layers.rotary import RotaryEmbedding
from quire_engine.weights.loader import summarize_names
from quire_engine.weights.param_shard import unsharded
from quire_kernels import HugePageArena
from quire_spec.errors import ConfigError
from quire_spec.model.eagle3_config import Eagle3Config

EMBEDDING = "embed_tokens.weight"
"""Name of the embedding in the head's checkpoint. The draft model reads this tensor; the head does not use it."""
_UNUSED_TENSORS = ("t2d", EMBEDDING)
"""Tensors of the checkpoint that are not parameters of the head: the mask of the tokens in d2t, and the embedding."""


class Eagle3Layer(Module):
    """Decoder layer. The input of its attention is the concatenation of the normalized embedding and the normalized
    hidden state."""

    def __init__(self, config: Eagle3Config, factory: ParamFactory) -> None:
        shape = config.layer
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps, factory)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, factory)
        self.self_attn = RotaryAttention(shape, 0, factory)
        qkv = self.self_attn.qkv_proj
        self.self_attn.qkv_proj = Linear(2 * shape.hidden_size, qkv.slices, factory, shape.attention_bias)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, factory)
        self.mlp = MLP(shape, factory)
        self._norm_before_residual = config.norm_before_residual

    def __call__(
        self, embeddings: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Return the hidden states after the layer; both input tensors are [num_tokens, hidden_size]."""
        normalized = self.hidden_norm(hidden)
        residual = (normalized if self._norm_before_residual else hidden).clone()
        attention_input = torch.cat((self.input_layernorm(embeddings), normalized), dim=-1)
        self.self_attn(attention_input, rope, kv_cache, batch, residual=residual)
        return self.mlp(self.post_attention_layernorm(residual), batch, residual=residual)


class Eagle3AuxNorms(Module):
    """Normalizes the target's hidden states. The hidden states of each layer have a norm of their own. In the
    checkpoint, these norms have the numbers 0, 1 and so on."""

    def __init__(self, num_layers: int, size: int, eps: float, factory: ParamFactory) -> None:
        vars(self).update({str(i): RMSNorm(size, eps, factory) for i in range(num_layers)})

    def __call__(self, aux_hidden_states: Tensor) -> Tensor:
        """Normalize the hidden states of each layer. Both tensors are [num_tokens, num_layers * size]."""
        norms = vars(self).values()
        parts = aux_hidden_states.chunk(len(norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)


class Eagle3Head(Module):
    """Proposes tokens from hidden states. Most attributes have the names that SafeAILab's checkpoints use. The norms
    before `fc` have the names from the `speculators` project instead."""

    def __init__(self, config: Eagle3Config, target_hidden_size: int, factory: ParamFactory) -> None:
        """Allocate the parameters; `load` fills them."""
        shape, num_aux = config.layer, len(config.aux_layers)
        self.input_norm: RMSNorm | None = None
        self.fc_norm: Eagle3AuxNorms | None = None
        if config.norm_before_fc:
            self.input_norm = RMSNorm(num_aux * target_hidden_size, shape.norm_eps, factory)
        if config.fc_norm:
            self.fc_norm = Eagle3AuxNorms(num_aux, target_hidden_size, shape.norm_eps, factory)
        self.fc = Linear(num_aux * target_hidden_size, {"fc": shape.hidden_size}, factory)
        self.midlayer = Eagle3Layer(config, factory)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, factory)
        self.lm_head = Linear(shape.hidden_size, {"lm_head": config.draft_vocab_size}, factory)
        self._rotary = RotaryEmbedding(shape.ropes[0], factory.device)
        self._config = config
        self.d2t = torch.arange(config.draft_vocab_size, device=factory.device)
        """Maps each token id of the head to a token id of the target; [draft_vocab_size] int64. The checkpoint stores
        the difference between the two ids.
        """
        self.num_bytes = sum(unsharded(target).nbytes for _, target in self.tensors(""))

    def __call__(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Return hidden states [num_tokens, hidden_size].

        Args:
            embeddings: for each position of the batch, the embedding of the next token; [num_tokens, hidden_size].
            hidden: hidden states from `combine` in the first pass, and from this head in later passes.
            batch: positions, and where to write keys and values.
            kv_cache: KV cache of the layer.
        """
        rope = self._rotary(batch.positions, batch.long_rope, hidden.dtype)
        hidden = self.midlayer(embeddings, hidden, rope, kv_cache, batch)
        return self.norm(hidden) if self._config.norm_output else hidden

    def combine(self, aux_hidden_states: Tensor, batch: ForwardBatch) -> Tensor:
        """Convert the target's hidden states to the input of the first pass, [num_tokens, hidden_size]."""
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            aux_hidden_states = self.fc_norm(aux_hidden_states)
        return self.fc(aux_hidden_states, batch)

    def propose(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the most likely token for each row of hidden states. The result contains token ids of the target,
        [num_rows] int64."""
        normalized = hidden if self._config.norm_output else self.norm(hidden)
        return self.d2t[self.lm_head(normalized, batch).argmax(dim=-1)]

    def load(self, tensors: Mapping[str, Tensor], target_vocab_size: int) -> None:
        """Fill the parameters from a checkpoint, and repack them for speed.

        Raises:
            ConfigError: a tensor is missing, unexpected or has a wrong shape, or d2t contains tokens outside the
                vocabulary.
        """
        named = {
            name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()
        }
        offsets = named.pop("d2t", None)
        for name in _UNUSED_TENSORS:
            named.pop(name, None)
        targets = {name: unsharded(target).tensor for name, target in self.tensors("") if name != "d2t"}
        if named.keys() != targets.keys():
            missing, unexpected = sorted(targets.keys() - named), sorted(named.keys() - targets)
            problems = [
                f"{summarize_names(names)} {what}"
                for names, what in ((missing, "missing"), (unexpected, "unexpected"))
                if names
            ]
            raise ConfigError(
                f"speculative_config.model: not an EAGLE-3 head: {'; '.join(problems)}; give the folder of a head"
            )
        for name, parameter in targets.items():
            if named[name].shape != parameter.shape:
                raise ConfigError(
                    f"speculative_config.model: {name} has shape {tuple(named[name].shape)}; config.json and the model "
                    f"imply {tuple(parameter.shape)}"
                )
            parameter.copy_(named[name])
        size = self._config.draft_vocab_size
        if offsets is None and size != target_vocab_size:
            raise ConfigError(f"speculative_config.model: d2t is missing, but draft_vocab_size is {size}")
        if offsets is not None:
            if offsets.shape != (size,) or offsets.dtype != torch.int64:
                raise ConfigError(
                    f"speculative_config.model: d2t must contain {size} int64 values, got shape {tuple(offsets.shape)}"
                )
            self.d2t += offsets.to(self.d2t.device)
            if self.d2t.min() < 0 or self.d2t.max() >= target_vocab_size:
                raise ConfigError(f"speculative_config.model: d2t has tokens outside 0..{target_vocab_size - 1}")
        self.pack(HugePageArena())
