# SPDX-License-Identifier: Apache-2.0
"""Shard: which part of each layer a rank holds when several devices share the layers. Arithmetic of a shape.

Heads and the inner features of the MLP are split; what reads the residual stream is split by output (q, k, v, gate,
up), what writes it by input (o, down), so that a sum over the ranks ends attention and MLP. Ranks that are more than
the KV heads hold one each, several of them the same. Embedding and output projection are split by vocabulary.
"""

from dataclasses import dataclass, replace

from quire_spec.errors import ConfigError
from quire_spec.shape import ModelShape


def why_not_shared(shape: ModelShape, size: int) -> str:
    """Why a model cannot be shared by `size` devices; empty when it can."""
    if shape.num_heads % size:
        return f"{shape.num_heads} attention heads are not a multiple of {size}"
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        return f"{shape.num_kv_heads} KV heads neither divide by {size} nor divide it"
    if shape.intermediate_size % size:
        return f"an intermediate size of {shape.intermediate_size} is not a multiple of {size}"
    return ""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one rank."""

    shape: ModelShape
    """Of the whole model."""
    rank: int = 0
    size: int = 1
    """Ranks that share the layers."""

    def check(self) -> None:
        """Raise ConfigError if a model of this shape cannot be shared by so many."""
        if why := why_not_shared(self.shape, self.size):
            possible = [str(size) for size in range(self.size - 1, 0, -1) if not why_not_shared(self.shape, size)]
            raise ConfigError(f"tensor_parallel_size: {self.size}: {why}; use {' or '.join(possible)}")

    @property
    def local(self) -> ModelShape:
        """The shape of what the rank holds: fewer heads and inner features, the vocabulary whole."""
        if self.size == 1:
            return self.shape
        return replace(
            self.shape,
            num_heads=self.shape.num_heads // self.size,
            num_kv_heads=max(1, self.shape.num_kv_heads // self.size),
            intermediate_size=self.shape.intermediate_size // self.size,
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and output projection on each rank; the last ranks may not fill theirs."""
        return -(-self.shape.vocab_size // self.size)

    @property
    def vocab(self) -> range:
        """Tokens whose rows the rank holds."""
        start = min(self.rank * self.vocab_rows, self.shape.vocab_size)
        return range(start, min(start + self.vocab_rows, self.shape.vocab_size))

    def outputs(self, path: str) -> tuple[range, ...]:
        """Output features of a layer's linear, by its path there, that the rank holds, in the order it holds them."""
        return self._ranges(self.shape.family.linears[path][1])

    def inputs(self, path: str) -> tuple[range, ...]:
        """The same of its input features."""
        return self._ranges(self.shape.family.linears[path][0])

    def sums(self, path: str) -> bool:
        """Whether the ranks' outputs of a linear have to be added up: each holds a part of its input."""
        return self.size > 1 and self.shape.family.linears[path][0] != "hidden"

    def _ranges(self, kind: str) -> tuple[range, ...]:
        """Of the features of a kind, see `Family.linears`."""
        local, rank = self.local, self.rank
        heads, kv_heads, inner = local.num_heads, local.num_kv_heads, local.intermediate_size
        all_q, all_kv = self.shape.num_heads, self.shape.num_kv_heads
        q = range(rank * heads, (rank + 1) * heads)
        first = rank * all_kv // self.size
        kv = range(first, first + kv_heads)
        mlp = range(rank * inner, (rank + 1) * inner)
        if kind == "hidden":
            return (range(self.shape.hidden_size),)
        if kind == "inner":
            return (mlp,)
        if kind == "gate_up":
            return (mlp, _moved(mlp, self.shape.intermediate_size))
        of_heads = {"q": (q,), "kv": (kv,), "qkv": (q, _moved(kv, all_q), _moved(kv, all_q + all_kv))}
        dim = self.shape.head_dim
        return tuple(range(r.start * dim, r.stop * dim) for r in of_heads[kind])


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)
