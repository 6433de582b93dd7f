# SPDX-License-Identifier: Apache-2.0
"""The part of an adapter that a tensor-parallel rank needs. Pure."""

import torch
from torch import Tensor

from quire_engine.lora.peft.lora_module import NO_LAYER, LoRAModule
from quire_kernels import RowTransform
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard


def shard_pair(a: Tensor, b: Tensor, module: LoRAModule, shard: TensorParallelShard) -> tuple[Tensor, Tensor]:
    """Return the parts of A [rank, in_features] and B [out_features, rank] that a tensor-parallel rank needs.

    The results are copies, so that the full tensors are freed.
    """
    path = module.path
    if path == "embed_tokens":
        return _vocab_shard_rows(a.t(), shard).t(), b
    if path == "lm_head":
        return a, _vocab_shard_rows(b, shard)
    if module.num_experts:
        return _shard_expert_pair(a, b, path, shard)
    if path not in shard.model_config.architecture_info.linears:  # a router, or another linear that every rank has
        return a, b
    shard = shard.for_layer(module.layer)
    (input_columns,) = shard.input_ranges(path)
    return a[:, input_columns.start : input_columns.stop].clone(), torch.cat(
        [b[r.start : r.stop] for r in shard.output_ranges(path)]
    )


def _shard_expert_pair(a: Tensor, b: Tensor, path: str, shard: TensorParallelShard) -> tuple[Tensor, Tensor]:
    """Return the part for the intermediate features of every expert that a rank has. In gate_up, gate features come
    before up features, or both alternate."""
    part = shard.expert_range
    if path.endswith("down_proj"):
        return a[..., part.start : part.stop].clone(), b
    names = shard.model_config.architecture_info.expert_names
    if names.alternates:
        return a, b[:, 2 * part.start : 2 * part.stop].clone()
    halves = b.chunk(2 if names.is_gated else 1, dim=1)
    return a, torch.cat([half[:, part.start : part.stop] for half in halves], dim=1)


def shard_transform(transform: RowTransform, module: LoRAModule, shard: TensorParallelShard) -> RowTransform:
    """Return the part of a transform that a tensor-parallel rank needs. If the ranks add up their outputs, only the
    first one adds the addends."""
    path = module.path
    if path == "lm_head":
        return _vocab_shard_rows(transform.t(), shard).t().contiguous()
    if module.layer == NO_LAYER:
        return transform
    shard = shard.for_layer(module.layer)
    part = torch.cat([transform[:, r.start : r.stop] for r in shard.output_ranges(path)], dim=1)
    if shard.rank and shard.needs_all_reduce(path):
        part[1] = 0
    return part


def _vocab_shard_rows(rows: Tensor, shard: TensorParallelShard) -> Tensor:
    """Return the rows of the tokens that belong to a tensor-parallel rank's part of the vocabulary. The padding rows of
    the last rank are 0."""
    token_range = shard.vocab_range
    shard_rows = rows.new_zeros(shard.vocab_rows_per_rank, rows.shape[1])
    shard_rows[: len(token_range)] = rows[token_range.start : token_range.stop]
    return shard_rows
