# SPDX-License-Identifier: Apache-2.0
"""Memory sizing: compute how many bytes the weights, the KV blocks and the adapter slots of a model take.

Pure arithmetic on integers.

The planner calls these functions before an engine exists. The engine calls them to divide its memory. Both log the
results.
"""

import functools
import math

from quire_spec.model.model_config import ModelConfig

_ROUTER_ALIGNMENT = 32
"""Compiled CPU kernels compute this number of outputs of a router together."""


def kv_block_bytes(
    model_config: ModelConfig,
    block_size: int,
    element_bytes: int,
    scale_bytes: int = 0,
    num_layers: int | None = None,
) -> int:
    """Return the size of a KV block in bytes. A block contains the keys and values of `block_size` tokens.

    `scale_bytes` is the size of the scale that belongs to each key and each value. 0 means that there are no scales.
    `num_layers` is the number of layers for which the block has room. The default is all layers with keys and values.
    If layers have keys of different sizes, those with the smallest ones are counted.
    """
    num_kv_heads, head_dim = model_config.smallest_heads
    row_bytes = head_dim * element_bytes + scale_bytes
    num_layers = model_config.num_kv_layers if num_layers is None else num_layers
    return model_config.num_kv_tensors * num_layers * block_size * num_kv_heads * row_bytes


def lora_pages(
    model_config: ModelConfig, num_slots: int, rank: int, has_experts: bool = False, has_vocab_modules: bool = False
) -> int:
    """Return the number of pages for adapters in slots whose LoRA ranks add up to `rank`. An odd rank is padded to an
    even number. If `has_vocab_modules` is true, each slot has further pages for a whole embedding and a whole output
    projection."""
    vocab_pages = 0
    if has_vocab_modules:
        sizes = [size for pair in vocab_module_sizes(model_config).values() for size in pair]
        elements = sum(-(-vocab_module_rank(model_config) * size // 32) * 32 for size in sizes)
        vocab_pages = -(-elements // _page_elements(model_config, has_experts))
    return rank + rank % 2 + num_slots * vocab_pages


def lora_bytes(model_config: ModelConfig, num_pages: int, element_bytes: int, has_experts: bool = False) -> int:
    """Return the size of the pages of the adapter slots in bytes.

    A page has the memory of one LoRA rank of an adapter with the matrices A and B of the embedding, of the output
    projection, of every linear and of the router in every layer, and if `has_experts` is true, of every expert.
    """
    return num_pages * _page_elements(model_config, has_experts) * element_bytes


# The planner asks for each candidate.
@functools.lru_cache(maxsize=64)
def _page_elements(model_config: ModelConfig, has_experts: bool) -> int:
    """Return half of the elements that two LoRA ranks need. Every matrix starts at a multiple of 32 elements."""
    sizes = [
        size for layer in range(model_config.num_layers) for size in layer_linear_sizes(model_config, layer).values()
    ]
    sizes += outer_module_sizes(model_config).values()
    if model_config.moe is not None:
        num_experts, num_layers = model_config.moe.num_experts, sum(model_config.moe.layers)
        router = model_config.hidden_size, -(-num_experts // _ROUTER_ALIGNMENT) * _ROUTER_ALIGNMENT
        sizes += [router] * num_layers
        if has_experts:
            sizes += [*expert_sizes(model_config).values()] * (num_layers * num_experts)
    elements = sum(-(-2 * size // 32) * 16 for pair in sizes for size in pair)
    return -(-elements // 32) * 32


def vocab_module_rank(model_config: ModelConfig) -> int:
    """Return the LoRA rank, even, with which an adapter can change the embedding or the output projection to any other
    weight."""
    return model_config.embedding_size + model_config.embedding_size % 2


def expert_sizes(model_config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input size and the output size of the projections of an expert. Gate and up are one projection. The
    key is the path of the parameter with the weights of all experts, in the mixture."""
    assert model_config.moe is not None
    hidden = model_config.moe.latent_size or model_config.hidden_size
    inner, names = model_config.moe.intermediate_size, model_config.architecture_info.expert_names
    sizes = (hidden, 2 * inner if names.is_gated else inner), (inner, hidden)
    return dict(zip(names.adapted_projections, sizes, strict=True))


def weights_bytes(model_config: ModelConfig, element_bytes: int) -> int:
    """Return the size of a checkpoint's weights in bytes.

    All experts are counted. Biases and norms are not counted, because they are at most 0.2 % of the weights.
    """
    layers = sum(layer_bytes(model_config, layer, 1) for layer in range(model_config.num_layers))
    if not model_config.has_outer_parts:
        return layers * element_bytes
    embeddings = model_config.vocab_size * model_config.embedding_size * (1 if model_config.tie_word_embeddings else 2)
    per_layer = model_config.num_layers * model_config.per_layer_size
    embeddings += (model_config.vocab_size + model_config.hidden_size) * per_layer
    positions = model_config.num_learned_positions * model_config.hidden_size
    projections = (
        0
        if model_config.embedding_size == model_config.hidden_size
        else 2 * model_config.embedding_size * model_config.hidden_size
    )
    state = model_config.states
    convolutions = 0 if state is None else state.num_layers * state.conv_size * state.kernel_size
    return (layers + embeddings + positions + projections + convolutions) * element_bytes


def computed_elements(model_config: ModelConfig) -> int:
    """Return how many elements of the layers a prompt token is multiplied with. Of the experts, only those count that
    compute the token."""
    moe, elements = model_config.moe, 0
    for layer in range(model_config.num_layers):
        experts = _expert_elements(model_config, layer)
        if moe is not None:
            experts = experts * moe.top_k // moe.num_experts
        elements += layer_bytes(model_config, layer, 1) - _expert_elements(model_config, layer) + experts
    return elements


def layer_bytes(model_config: ModelConfig, layer: int, element_bytes: int) -> int:
    """Return the size of the linears and the experts of a layer in bytes."""
    linears = sum(math.prod(size) for size in layer_linear_sizes(model_config, layer).values())
    return (linears + _expert_elements(model_config, layer)) * element_bytes


def _expert_elements(model_config: ModelConfig, layer: int) -> int:
    """Return how many elements the experts and the router of a layer have. An expert has three matrices: gate, up and
    down; without a gate, it has two."""
    moe, hidden = model_config.moe, model_config.hidden_size
    if moe is None or not moe.layers[layer]:
        return 0
    num_matrices = 3 if model_config.architecture_info.expert_names.is_gated else 2
    return moe.num_experts * (num_matrices * moe.intermediate_size * (moe.latent_size or hidden) + hidden)


def vocab_module_sizes(model_config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input size and the output size of the modules that adapters can change.

    Only modules outside the layers are included. The key is the name of the module.
    """
    hidden, tokens = model_config.embedding_size, model_config.vocab_size
    return {"embed_tokens": (tokens, hidden), "lm_head": (hidden, tokens)}


def outer_module_sizes(model_config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input size and the output size of all modules outside the layers that adapters can change."""
    if not model_config.has_outer_parts:
        return {}
    sizes = vocab_module_sizes(model_config)
    if model_config.per_layer_size:
        width = model_config.num_layers * model_config.per_layer_size
        sizes["per_layer_model_projection"] = model_config.hidden_size, width
    return sizes


def layer_linear_sizes(model_config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the input size and the output size of the linears that a layer has, by path."""
    sizes = linear_sizes(model_config.for_layer(layer))
    return {path: sizes[path] for path in model_config.layer_linears(layer)}


def linear_sizes(model_config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input size and the output size of each linear in a layer. The key is the path of the linear in a
    checkpoint, relative to its layer. If layers differ, pass the result of `ModelConfig.for_layer`."""
    q, kv = model_config.num_heads * model_config.head_dim, model_config.num_kv_heads * model_config.head_dim
    inner = model_config.intermediate_size
    sizes = {
        "hidden": model_config.hidden_size,
        "q": q,
        "kv": kv,
        "qkv": q + 2 * kv,
        "qkv_by_head": 3 * q,
        "inner": inner,
        "gate_up": 2 * inner,
        "per_layer": model_config.per_layer_size,
        "q_gate": 2 * q,
        "one": 1,
    }
    if (mla := model_config.mla) is not None:
        sizes |= {"query_latent": mla.query_rank, "kv_latent": mla.kv_rank, "latent_row": mla.row_size}
        sizes["keys_and_values"] = model_config.num_heads * (mla.plain_dim + mla.value_dim)
        sizes["values"] = model_config.num_heads * mla.value_dim
    if model_config.states is not None:
        sizes |= model_config.states.feature_sizes
    if model_config.moe is not None:
        sizes["expert_latent"] = model_config.moe.latent_size
        sizes["shared_inner"] = model_config.moe.shared_intermediate_size
    # A model without experts or without states has no features of their kinds.
    linears = model_config.linears.items()
    return {path: (sizes.get(d_in, 0), sizes.get(d_out, 0)) for path, (d_in, d_out) in linears}
