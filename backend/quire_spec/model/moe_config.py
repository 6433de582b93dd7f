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
    shared_intermediate_size: int = 0
    """Number of intermediate features of the shared expert, which computes every token beside the experts that the
    router chooses; 0 if there is none."""

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
        return cls(
            layers=layers,
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=config.get_int(size_key),
            normalize=config.get_bool("norm_topk_prob") if "norm_topk_prob" in defaults else True,
            shared_intermediate_size=config.get_int("shared_expert_intermediate_size")
            if "shared_expert_intermediate_size" in defaults
            else 0,
        )
