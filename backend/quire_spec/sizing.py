# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of memory: bytes of weights, KV blocks and adapter slots for a shape. Integers in, bytes out.

The planner uses it before there is an engine, the engine to lay its memory out; both log what they got.
"""

from quire_spec.shape import ModelShape


def kv_block_bytes(shape: ModelShape, block_size: int, element_bytes: int) -> int:
    """Bytes of one KV block over all layers: keys and values of `block_size` tokens."""
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_dim * element_bytes


def lora_slot_bytes(shape: ModelShape, max_rank: int, element_bytes: int) -> int:
    """Bytes of one adapter slot: A and B of every linear of every layer, of the embedding and of the output projection,
    at the largest rank. Ranks are even in memory, and every matrix begins at a multiple of 32 elements."""
    rank = max_rank + max_rank % 2
    sizes = [*linears(shape).values()] * shape.num_layers + [*vocabulary(shape).values()]
    return element_bytes * sum(-(-rank * size // 32) * 32 for pair in sizes for size in pair)


def weights_bytes(shape: ModelShape, element_bytes: int) -> int:
    """Bytes of a dense checkpoint, without biases and norms (0.2 % together at most)."""
    per_layer = sum(d_in * d_out for d_in, d_out in linears(shape).values())
    embeddings = shape.vocab_size * shape.embedding_size * (1 if shape.tie_word_embeddings else 2)
    positions = shape.num_learnt_positions * shape.hidden_size
    projections = 0 if shape.embedding_size == shape.hidden_size else 2 * shape.embedding_size * shape.hidden_size
    return (shape.num_layers * per_layer + embeddings + positions + projections) * element_bytes


def vocabulary(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Input and output size of the modules outside the layers that adapters can change, by their names."""
    hidden, tokens = shape.embedding_size, shape.vocab_size
    return {"embed_tokens": (tokens, hidden), "lm_head": (hidden, tokens)}


def linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Input and output size of each linear of a layer, by its path there in a Hugging Face checkpoint."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inner = shape.intermediate_size
    sizes = {"hidden": shape.hidden_size, "q": q, "kv": kv, "qkv": q + 2 * kv, "inner": inner, "gate_up": 2 * inner}
    return {path: (sizes[d_in], sizes[d_out]) for path, (d_in, d_out) in shape.family.linears.items()}
