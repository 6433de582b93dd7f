# SPDX-License-Identifier: Apache-2.0
"""Attention of transformers' models over the paged KV cache.

Models of transformers call the attention function whose name is in their config. This module registers such a function.
It writes keys and values to the KV cache, and attends to the cache. The function that makes the masks for it returns
no tensor, but a description of the mask, because the kernel computes the mask from the spans of the step.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.forward_batch import ForwardBatch
from quire_kernels import paged_attention, write_kv
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig

NAME = "quire"
"""Name of the function in transformers."""
_IGNORED_ARGUMENTS = frozenset(
    (
        *("position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("output_router_logits", "logits_to_keep", "cache_position", "num_items_in_batch", "training"),
    )
)
"""Arguments of the attention function that do not change what it computes for causal attention."""


@dataclass(frozen=True, slots=True)
class CausalMask:
    """What a model asks of its attention, in place of the tensor of a mask."""

    window: int | None
    """Number of keys to which a token attends, including its own. None: the number is not limited."""


@dataclass(slots=True)
class Pass:
    """A forward pass of one model, which its attention layers and its linear layers read."""

    shape: ModelConfig
    batch: ForwardBatch
    batches: Sequence[ForwardBatch] = ()
    """The batch of each layer; empty outside the layers."""
    kv_cache: KVCache | None = None
    num_calls: list[int] = field(default_factory=list)
    """For each layer, how often it has called the attention function."""

    @classmethod
    def of_layers(cls, shape: ModelConfig, batch: ForwardBatch, kv_cache: KVCache) -> "Pass":
        """Return the pass of all layers."""
        num_layers = shape.num_layers
        batches = [batch.groups[group] for group in kv_cache.layer_groups] if batch.groups else [batch] * num_layers
        return cls(shape, batch, batches, kv_cache, [0] * num_layers)


CURRENT_PASS: ContextVar[Pass] = ContextVar("CURRENT_PASS")
"""The pass that this thread computes."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to the KV cache, and attend to it. This is an attention function of transformers.

    Args:
        module: the attention layer; its `layer_idx` is the index of the layer.
        query: [1, num_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: like `key`.
        attention_mask: what `make_mask` has returned.
        scaling: factor of the scores; None: 1 / sqrt(head_dim).
        dropout: not used, because models do not train.
        sliding_window: see CausalMask.window.
        softcap: see `quire_kernels.paged_attention`.
        s_aux: the sinks of `paged_attention`.
        other: arguments that the model passes through its layers. Those that are not known must be None.

    Returns:
        [1, num_tokens, num_heads, head_dim], and None in place of the attention weights.

    Raises:
        ConfigError: the layer needs something that the kernel does not compute.
    """
    current = CURRENT_PASS.get()
    shape, layer = current.shape, getattr(module, "layer_idx", None)
    assert current.kv_cache is not None
    if type(layer) is not int or not 0 <= layer < shape.num_layers:
        raise ConfigError(f"an attention layer has the index {layer}, which is not one of {shape.num_layers} layers")
    current.num_calls[layer] += 1
    if current.num_calls[layer] == 1:
        window = _check_call(shape, layer, query, key, value, attention_mask, sliding_window, other)
    else:
        raise ConfigError(f"layer {layer} calls attention more than once, but it has only one KV cache")
    batch, cache = current.batches[layer], current.kv_cache.layers[layer]
    write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1).contiguous(), cache, batch.addresses)
    queries = query[0].transpose(0, 1).contiguous()
    scale = shape.head_dim**-0.5 if scaling is None else float(scaling)
    return paged_attention(queries, cache, batch.attention, scale, window, softcap, s_aux)[None], None


def make_mask(**arguments: Any) -> CausalMask:
    """Describe the mask that a model asks for. This is a mask function of transformers; see its `sdpa_mask` for the
    arguments.

    Raises:
        ConfigError: the mask is neither causal nor that of a sliding window.
    """
    if arguments.get("use_vmap") or "allow_is_bidirectional_skip" in arguments:
        raise ConfigError("its attention is not causal")
    if getattr(arguments["config"], "attention_chunk_size", None) is not None and arguments.get("local_size"):
        raise ConfigError("its attention is divided into chunks")
    return CausalMask(arguments.get("local_size"))


def _check_call(
    shape: ModelConfig,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    sliding_window: int | None,
    other: dict[str, Any],
) -> int | None:
    """Return the window of a layer, after a check of everything that a model can pass to its attention."""
    sizes = (shape.num_heads, query.shape[2], shape.head_dim), (shape.num_kv_heads, query.shape[2], shape.head_dim)
    if query.shape[1:] != sizes[0] or key.shape[1:] != sizes[1] or value.shape != key.shape:
        raise ConfigError(
            f"layer {layer} has {query.shape[1]} heads of {query.shape[3]} elements, with keys "
            f"{tuple(key.shape[1:])} and values {tuple(value.shape[1:])}, but config.json implies {shape.num_heads} "
            f"heads and {shape.num_kv_heads} KV heads of {shape.head_dim} elements"
        )
    if other.pop("is_causal", None) is False:
        raise ConfigError(f"the attention of layer {layer} is not causal")
    if not isinstance(mask, CausalMask | None):
        raise ConfigError(f"layer {layer} changes the mask of its attention")
    if unknown := sorted(name for name, each in other.items() if each is not None and name not in _IGNORED_ARGUMENTS):
        raise ConfigError(f"layer {layer} passes {', '.join(unknown)} to its attention, which is not supported")
    window = sliding_window if mask is None or mask.window is None else mask.window
    if shape.sliding_windows[layer] not in (None, window):
        raise ConfigError(
            f"layer_types of config.json gives layer {layer} a window of {shape.sliding_windows[layer]} tokens, but "
            f"its attention has a window of {window}"
        )
    return window


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
