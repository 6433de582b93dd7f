# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel split of a model. It defines which part of each layer a rank stores. Pure arithmetic.

The attention heads are divided between the ranks, and so are the intermediate features of the MLP or of every expert.
The linears q, k, v, gate and up are column-parallel: each rank stores some of the output features. The linears o and
down are row-parallel: each rank stores some of the input features, and an all-reduce adds up the outputs. If there are
more ranks than KV heads, each rank stores one KV head. Several ranks then store a copy of the same head. The embedding
and the output projection are divided by vocabulary.
"""

from dataclasses import dataclass, replace

from quire_spec.errors import ConfigError
from quire_spec.model.architectures import UNSHARDED_KINDS
from quire_spec.model.model_config import ModelConfig


def unsupported_reason(model_config: ModelConfig, size: int) -> str:
    """Return the reason why a model cannot be split over `size` ranks. The result is empty if it can be split."""
    if not model_config.is_native:
        return "" if size == 1 else "model_impl transformers runs on one rank"
    if model_config.num_heads % size:
        return f"the number of attention heads, {model_config.num_heads}, is not a multiple of {size}"
    if model_config.num_kv_heads % size and size % model_config.num_kv_heads:
        return f"the number of KV heads, {model_config.num_kv_heads}, is neither a multiple nor a divisor of {size}"
    full_heads = model_config.variants.full_num_kv_heads if model_config.variants else model_config.num_kv_heads
    # With fewer heads than ranks, the sizes of the two kinds of layers would have another ratio on a rank.
    if full_heads != model_config.num_kv_heads and full_heads % size:
        return f"the number of KV heads of layers without a window, {full_heads}, is not a multiple of {size}"
    if model_config.intermediate_size % size:
        return f"the intermediate size, {model_config.intermediate_size}, is not a multiple of {size}"
    if model_config.moe is not None and model_config.moe.intermediate_size % size:
        return f"the intermediate size of an expert, {model_config.moe.intermediate_size}, is not a multiple of {size}"
    if model_config.moe is not None and model_config.moe.shared_intermediate_size % size:
        shared = model_config.moe.shared_intermediate_size
        return f"the intermediate size of the shared experts, {shared}, is not a multiple of {size}"
    return "" if model_config.states is None else model_config.states.unsupported_reason(size)


@dataclass(frozen=True, slots=True)
class TensorParallelShard:
    """The part of a model that one tensor-parallel rank stores."""

    model_config: ModelConfig
    """Configuration of the whole model."""
    rank: int = 0
    size: int = 1
    """Number of tensor-parallel ranks."""

    def for_layer(self, layer: int) -> "TensorParallelShard":
        """Return the part of one layer, see ModelConfig.for_layer."""
        return replace(self, model_config=self.model_config.for_layer(layer))

    def validate(self) -> None:
        """Raise ConfigError if the model cannot be split over `size` ranks."""
        if reason := unsupported_reason(self.model_config, self.size):
            supported_sizes = [
                str(size) for size in range(self.size - 1, 0, -1) if not unsupported_reason(self.model_config, size)
            ]
            raise ConfigError(
                f"tensor_parallel_size: {self.size} is not supported for this model: {reason}; use "
                f"{' or '.join(supported_sizes)}"
            )

    @property
    def local_config(self) -> ModelConfig:
        """Configuration of the part that the rank stores.

        It has fewer heads and fewer intermediate features than the model, but the same vocabulary.
        """
        if self.size == 1:
            return self.model_config
        moe, variants = self.model_config.moe, self.model_config.variants
        states = self.model_config.states
        return replace(
            self.model_config,
            variants=variants and replace(variants, full_num_kv_heads=max(1, variants.full_num_kv_heads // self.size)),
            moe=moe
            and replace(
                moe,
                intermediate_size=moe.intermediate_size // self.size,
                shared_intermediate_size=moe.shared_intermediate_size // self.size,
            ),
            states=states and states.shard(self.size),
            num_heads=self.model_config.num_heads // self.size,
            num_kv_heads=max(1, self.model_config.num_kv_heads // self.size),
            intermediate_size=self.model_config.intermediate_size // self.size,
        )

    @property
    def vocab_rows_per_rank(self) -> int:
        """Number of rows of the embedding and of the output projection that each rank stores. It is possible that the
        last ranks do not use all of them."""
        return -(-self.model_config.vocab_size // self.size)

    @property
    def vocab_range(self) -> range:
        """The rank stores the embedding rows of these token ids."""
        start = min(self.rank * self.vocab_rows_per_rank, self.model_config.vocab_size)
        return range(start, min(start + self.vocab_rows_per_rank, self.model_config.vocab_size))

    @property
    def expert_range(self) -> range:
        """Indices of the intermediate features that the rank stores. They are the same for every expert."""
        moe = self.local_config.moe
        assert moe is not None
        return range(self.rank * moe.intermediate_size, (self.rank + 1) * moe.intermediate_size)

    def output_ranges(self, path: str) -> tuple[range, ...]:
        """For the linear `path`, return the output features that the rank stores, in the order in which it stores
        them."""
        return self._ranges(self.model_config.linears[path][1])

    def input_ranges(self, path: str) -> tuple[range, ...]:
        """For the linear `path`, return the input features that the rank stores, in the order in which it stores
        them."""
        return self._ranges(self.model_config.linears[path][0])

    def needs_all_reduce(self, path: str) -> bool:
        """Return whether the linear `path` is row-parallel. If it is, an all-reduce must add up the outputs of the
        ranks."""
        return self.size > 1 and self.model_config.linears[path][0] not in UNSHARDED_KINDS

    def _ranges(self, kind: str) -> tuple[range, ...]:
        """Return which features of one kind the rank stores, as ranges. The kinds are those of
        `Architecture.linears`."""
        local_config, rank = self.local_config, self.rank
        if self.model_config.states is not None and kind.startswith("state_"):
            return self.model_config.states.feature_ranges(kind, rank, self.size)
        if kind == "one":
            return (range(1),)
        if kind == "shared_inner":
            assert local_config.moe is not None
            size = local_config.moe.shared_intermediate_size
            return (range(rank * size, (rank + 1) * size),)
        heads, kv_heads, inner = local_config.num_heads, local_config.num_kv_heads, local_config.intermediate_size
        all_q, all_kv = self.model_config.num_heads, self.model_config.num_kv_heads
        q = range(rank * heads, (rank + 1) * heads)
        first = rank * all_kv // self.size
        kv = range(first, first + kv_heads)
        mlp = range(rank * inner, (rank + 1) * inner)
        mla = self.model_config.mla
        if kind in UNSHARDED_KINDS:
            sizes = {"hidden": self.model_config.hidden_size, "per_layer": self.model_config.per_layer_size}
            if mla is not None:
                sizes |= {"query_latent": mla.query_rank, "kv_latent": mla.kv_rank, "latent_row": mla.row_size}
            if self.model_config.moe is not None:
                sizes["expert_latent"] = self.model_config.moe.latent_size
            return (range(sizes[kind]),)
        if mla is not None and kind in ("keys_and_values", "values"):
            size = heads * (mla.value_dim + (mla.plain_dim if kind == "keys_and_values" else 0))
            return (range(rank * size, (rank + 1) * size),)
        if kind == "inner":
            return (mlp,)
        if kind == "qkv_by_head":  # query, key and value of a head are neighbors
            return (range(3 * self.model_config.head_dim * q.start, 3 * self.model_config.head_dim * q.stop),)
        if kind == "gate_up":
            return (mlp, _shift_range(mlp, self.model_config.intermediate_size))
        if kind == "q_gate":
            return (range(2 * q.start * self.model_config.head_dim, 2 * q.stop * self.model_config.head_dim),)
        head_ranges = {"q": (q,), "kv": (kv,), "qkv": (q, _shift_range(kv, all_q), _shift_range(kv, all_q + all_kv))}
        dim = self.model_config.head_dim
        return tuple(range(r.start * dim, r.stop * dim) for r in head_ranges[kind])


def _shift_range(source_range: range, offset: int) -> range:
    return range(source_range.start + offset, source_range.stop + offset)
