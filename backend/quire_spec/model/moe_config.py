# SPDX-License-Identifier: Apache-2.0
"""Settings for the mixture of experts of a checkpoint.

They define which layers have experts, how many experts there are, and how tokens are routed to them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_spec.model.hf_config import HFConfigReader

# Models build tensors for each expert of a layer. This limit bounds their number, because config.json is untrusted
# input. Published models have up to 512 experts.
_MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Configuration of the experts that some layers have instead of an MLP."""

    layers: tuple[bool, ...]
    """For each layer, whether it has experts instead of an MLP."""
    num_experts: int
    top_k: int
    """num_experts_per_tok: each token is computed by this number of experts."""
    intermediate_size: int
    """Number of intermediate features that one expert has."""
    normalize: bool
    """norm_topk_prob: the router's weights for the experts of a token are divided by their sum."""
    scale: float = 1.0
    """routed_scaling_factor: the router's weights are multiplied by this factor."""
    min_sum: float = 0.0
    """moe_norm_min: the router's weights are divided by at least this number."""
    num_groups: int = 1
    """n_group: number of groups of experts."""
    num_token_groups: int = 1
    """topk_group: a token has experts only from this number of groups."""
    num_group_scores: int = 2
    """The score of a group is the sum of this number of its largest scores."""
    latent_size: int = 0
    """moe_latent_size: number of input and output features of an expert, if linear layers convert those of the layer to
    them; 0 if experts have the features of the layer."""
    shared_intermediate_size: int = 0
    """Number of intermediate features of the shared experts together; 0 if there are none."""

    @classmethod
    def from_hf_config(
        cls,
        config: HFConfigReader,
        uses_experts: Callable[[HFConfigReader, int], bool],
        defaults: Mapping[str, Any],
        num_layers: int,
    ) -> Self | None:
        """Read config.json.

        Args:
            config: reader of config.json.
            uses_experts: see Architecture.uses_experts.
            defaults: see Architecture.defaults. The architecture uses only keys that `defaults` contains.
            num_layers: number of layers of the model.

        Returns:
            None if no layer has experts.

        Raises:
            ConfigError: a value is missing or wrong.
        """
        layers = tuple(uses_experts(config, index) for index in range(num_layers))
        if not any(layers):
            return None
        # transformers 5 writes `num_local_experts` for every architecture.
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        num_experts, top_k = config.get_int(key, maximum=_MAX_EXPERTS), config.get_int("num_experts_per_tok")
        if top_k > num_experts:
            raise config.error("num_experts_per_tok", top_k, f"at most {key}, which is {num_experts}")
        size_key = "moe_intermediate_size" if "moe_intermediate_size" in defaults else "intermediate_size"
        inner = config.get_int(size_key)
        # DeepSeek V2 compares groups by their best expert, or has none.
        method = config.get_str("topk_method") if "topk_method" in defaults else None
        if method not in (None, "greedy", "group_limited_greedy"):
            raise config.error("topk_method", method, "greedy or group_limited_greedy")
        has_groups = "n_group" in defaults and method != "greedy"
        num_groups = config.get_int("n_group", 1) if has_groups else 1
        num_token_groups = config.get_int("topk_group", 1, maximum=num_groups) if has_groups else 1
        # Each group has at least two experts, because its two largest scores are added.
        if num_groups > 1 and (num_experts % num_groups or num_experts < 2 * num_groups):
            raise config.error("n_group", num_groups, f"a divisor of {key} {num_experts}, with 2 experts or more each")
        if top_k > num_token_groups * (num_experts // num_groups):
            raise config.error("num_experts_per_tok", top_k, "at most the number of experts in topk_group groups")
        return cls(
            layers=layers,
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=inner,
            normalize=config.get_bool("norm_topk_prob") if "norm_topk_prob" in defaults else True,
            scale=config.get_float("routed_scaling_factor") if "routed_scaling_factor" in defaults else 1.0,
            min_sum=config.get_float("moe_norm_min") if "moe_norm_min" in defaults else 0.0,
            num_groups=num_groups,
            num_token_groups=num_token_groups,
            num_group_scores=2 if method is None else 1,
            latent_size=_latent_size(config) if "moe_latent_size" in defaults else 0,
            shared_intermediate_size=config.get_int("shared_expert_intermediate_size")
            if "shared_expert_intermediate_size" in defaults
            else inner * (config.get_int("n_shared_experts", minimum=0) if "n_shared_experts" in defaults else 0),
        )


def _latent_size(config: HFConfigReader) -> int:
    return config.get_int("moe_latent_size") if "moe_latent_size" in config else 0
