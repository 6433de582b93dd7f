# SPDX-License-Identifier: Apache-2.0
"""Routing of tokens to experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.dispatch import Op


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses experts and weights their outputs. The fields can be combined."""

    top_k: int
    """Number of experts for each token."""
    normalize: bool = True
    """Whether the weights of a token are divided by their sum."""
    scoring: str = "softmax"
    """The function that computes scores from the router's logits: "softmax" or "sigmoid"."""
    scale: float = 1.0
    """The weights are multiplied by this factor, after they are normalized."""
    min_sum: float = 0.0
    """The weights are divided by at least this number."""
    num_groups: int = 1
    """The experts form this number of groups of neighbors. A token has experts only from the best groups, which are
    those with the largest sum of their `num_group_scores` largest scores."""
    num_token_groups: int = 1
    """Number of groups from which a token can have experts."""
    num_group_scores: int = 2


@Op
def choose_experts(logits: Tensor, routing: Routing, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and compute their weights.

    Args:
        logits: [num_tokens, num_experts], any float dtype.
        routing: how to choose.
        correction_bias: [num_experts] float32, added to the scores to choose experts, but not to their weights.

    Returns:
        Ids [num_tokens, top_k] int64, best first, and weights [num_tokens, top_k] float32.

    Source: the routers of Mixtral (softmax), DeepSeek-V2 (groups by their best expert), DeepSeek-V3 (sigmoid, groups,
    correction bias) and Ernie 4.5.
    """
    scores = logits.softmax(-1, dtype=torch.float32) if routing.scoring == "softmax" else logits.float().sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias
    if routing.num_groups > 1:
        by_group = choice.unflatten(-1, (routing.num_groups, -1))
        group_scores = by_group.topk(routing.num_group_scores, dim=-1).values.sum(-1)
        groups = group_scores.topk(routing.num_token_groups, dim=-1).indices
        is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, groups, False)
        choice = by_group.masked_fill(is_excluded[..., None], float("-inf")).flatten(-2)
    weights, ids = choice.topk(routing.top_k, dim=-1)
    if choice is not scores:
        weights = scores.gather(-1, ids)
    if routing.normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total.clamp(min=routing.min_sum) if routing.min_sum else total)
    return ids, weights if routing.scale == 1 else weights * routing.scale
