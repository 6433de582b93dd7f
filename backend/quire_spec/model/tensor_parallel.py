# SPDX-License-Identifier: Apache-2.0
"""Shard: which part of each layer a rank holds when several devices share the layers. Arithmetic of a shape.

Heads and the inner features of the MLP are split; what reads the residual stream is split by output (q, k, v, gate,
up), what writes it by input (o, down), so that a sum over the ranks ends attention and MLP. Ranks that are more than
the KV heads hold one each, several of them the same. Embedding and output projection are split by vocabulary.
"""

from dataclasses import dataclass, replace

from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig


def unsupported_reason(model_config: ModelConfig, size: int) -> str:
    """Why a model cannot be shared by `size` devices; empty when it can."""
    if model_config.num_heads % size:
        return f"{model_config.num_heads} attention heads are not a multiple of {size}"
    if model_config.num_kv_heads % size and size % model_config.num_kv_heads:
        return f"{model_config.num_kv_heads} KV heads neither divide by {size} nor divide it"
    if model_config.intermediate_size % size:
        return f"an intermediate size of {model_config.intermediate_size} is not a multiple of {size}"
    return ""


@dataclass(frozen=True, slots=True)
class TensorParallelShard:
    """The part of one rank."""

    model_config: ModelConfig
    """Of the whole model."""
    rank: int = 0
    size: int = 1
    """Ranks that share the layers."""

    def validate(self) -> None:
        """Raise ConfigError if a model of this shape cannot be shared by so many."""
        if reason := unsupported_reason(self.model_config, self.size):
            supported_sizes = [
                str(size) for size in range(self.size - 1, 0, -1) if not unsupported_reason(self.model_config, size)
            ]
            raise ConfigError(f"tensor_parallel_size: {self.size}: {reason}; use {' or '.join(supported_sizes)}")

    @property
    def local_config(self) -> ModelConfig:
        """The shape of what the rank holds: fewer heads and inner features, the vocabulary whole."""
        if self.size == 1:
            return self.model_config
        return replace(
            self.model_config,
            num_heads=self.model_config.num_heads // self.size,
            num_kv_heads=max(1, self.model_config.num_kv_heads // self.size),
            intermediate_size=self.model_config.intermediate_size // self.size,
        )

    @property
    def vocab_rows_per_rank(self) -> int:
        """Rows of embedding and output projection on each rank; the last ranks may not fill theirs."""
        return -(-self.model_config.vocab_size // self.size)

    @property
    def vocab_range(self) -> range:
        """Tokens whose rows the rank holds."""
        start = min(self.rank * self.vocab_rows_per_rank, self.model_config.vocab_size)
        return range(start, min(start + self.vocab_rows_per_rank, self.model_config.vocab_size))

    def output_ranges(self, path: str) -> tuple[range, ...]:
        """Output features of a layer's linear, by its path there, that the rank holds, in the order it holds them."""
        return self._ranges(self.model_config.architecture_info.linears[path][1])

    def input_ranges(self, path: str) -> tuple[range, ...]:
        """The same of its input features."""
        return self._ranges(self.model_config.architecture_info.linears[path][0])

    def needs_all_reduce(self, path: str) -> bool:
        """Whether the ranks' outputs of a linear have to be added up: each holds a part of its input."""
        return self.size > 1 and self.model_config.architecture_info.linears[path][0] != "hidden"

    def _ranges(self, kind: str) -> tuple[range, ...]:
        """Of the features of a kind, see `Family.linears`."""
        local_config, rank = self.local_config, self.rank
        heads, kv_heads, inner = local_config.num_heads, local_config.num_kv_heads, local_config.intermediate_size
        all_q, all_kv = self.model_config.num_heads, self.model_config.num_kv_heads
        q = range(rank * heads, (rank + 1) * heads)
        first = rank * all_kv // self.size
        kv = range(first, first + kv_heads)
        mlp = range(rank * inner, (rank + 1) * inner)
        if kind == "hidden":
            return (range(self.model_config.hidden_size),)
        if kind == "inner":
            return (mlp,)
        if kind == "gate_up":
            return (mlp, _shift_range(mlp, self.model_config.intermediate_size))
        head_ranges = {"q": (q,), "kv": (kv,), "qkv": (q, _shift_range(kv, all_q), _shift_range(kv, all_q + all_kv))}
        dim = self.model_config.head_dim
        return tuple(range(r.start * dim, r.stop * dim) for r in head_ranges[kind])


def _shift_range(source_range: range, offset: int) -> range:
    return range(source_range.start + offset, source_range.stop + offset)
