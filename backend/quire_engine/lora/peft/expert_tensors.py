# SPDX-License-Identifier: Apache-2.0
"""The tensors of experts in an adapter's file.

There are two layouts. PEFT adapts parameters that contain the weights of all experts. It wraps the module of the
experts once for each adapted parameter, and the depth of this nesting tells which parameter a tensor belongs to. A has
the ranks of all experts below each other, B has the experts of a rank beside each other. Other trainers, such as
Megatron and ms-swift, write tensors for each projection of each expert. As in PEFT, gate and up are then fused: A has
the ranks of both, and B is block-diagonal.

Source: `ParamWrapper` in PEFT 0.21, tuners/lora/layer.py, and utils/transformers_weight_conversion.py
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_engine.lora.peft.config import CONFIG_FILE, PeftConfig
from quire_engine.lora.peft.lora_module import LoRAModule, lora_modules
from quire_engine.lora.peft.tensor_check import check_tensor
from quire_engine.weights.safetensors_reader import SafetensorsReader
from quire_spec.errors import InvalidArgument
from quire_spec.model.model_config import ModelConfig

_NAME = re.compile(
    r"base_model\.model\.(?P<block>[\w.]{1,200}?\.(?P<layer>\d{1,5})(\.\w{1,50})?)\.experts\."
    r"((?P<nesting>(base_layer\.){0,8})|(?P<expert>\d{1,5})\.(?P<projection>\w{1,50})\.)lora_(?P<half>[AB])\.weight"
)
ExpertPair = dict[str, str]
"""Names of A and B."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Names of the tensors of one projection of all experts in a layer."""

    stacked: ExpertPair | None = None
    """A is [num_experts * rank, in_features], and B is [out_features, rank * num_experts]. If `is_exchanged` is true,
    the sizes of inputs and outputs are exchanged."""
    by_expert: tuple[tuple[ExpertPair, ...], ...] = ()
    """For each expert, those of its projections that are fused: gate and up; otherwise one of them."""
    is_exchanged: bool = False
    """See ExpertNames.has_exchanged_matrices."""

    def rank(self, module: LoRAModule, config: PeftConfig) -> int:
        """Return the LoRA rank of an expert, after gate and up are fused."""
        return config.rank(module.name) if self.stacked else config.r * len(self.by_expert[0])

    def check(self, file: SafetensorsReader, module: LoRAModule, config: PeftConfig, size: tuple[int, int]) -> None:
        """Raise InvalidArgument if a tensor has another shape than an adapter of a projection of this size."""
        rank, (d_in, d_out) = self.rank(module, config), size
        if self.stacked is not None:
            num_ranks = rank * module.num_experts
            size_of_a, size_of_b = (d_out, d_in) if self.is_exchanged else (d_in, d_out)
            check_tensor(file, self.stacked["A"], (num_ranks, size_of_a))
            check_tensor(file, self.stacked["B"], (size_of_b, num_ranks))
        for pairs in self.by_expert:
            for pair in pairs:
                check_tensor(file, pair["A"], (config.r, d_in))
                check_tensor(file, pair["B"], (d_out // len(pairs), config.r))

    def read(self, file: SafetensorsReader, module: LoRAModule, config: PeftConfig) -> tuple[Tensor, Tensor]:
        """Return A [num_experts, rank, in_features] in the dtype of the file, and B [num_experts, out_features, rank]
        with the scale of the adapter, float32."""
        if self.stacked is not None:
            a, b = file.get_tensor(self.stacked["A"]), file.get_tensor(self.stacked["B"]).float()
            a, b = a.view(module.num_experts, -1, a.shape[1]), b.view(len(b), -1, module.num_experts).permute(2, 0, 1)
            if self.is_exchanged:
                a, b = b.to(a.dtype).mT, a.float().mT
            return a, b * config.scale(module.name)
        a = torch.stack([torch.cat([file.get_tensor(pair["A"]) for pair in pairs]) for pairs in self.by_expert])
        blocks = [[file.get_tensor(pair["B"]).float() for pair in pairs] for pairs in self.by_expert]
        b = torch.stack([torch.block_diag(*each) for each in blocks])  # type: ignore[no-untyped-call]
        return a, b * config.default_scale


@dataclass(slots=True)
class _Layer:
    """What a file contains for the experts of a layer."""

    stacked: dict[int, ExpertPair] = field(default_factory=dict)
    """By the depth of the nesting."""
    by_expert: dict[tuple[int, str], ExpertPair] = field(default_factory=dict)
    """By expert and projection."""
    block: str = ""
    """Path of the mixture in the model."""


def find_expert_tensors(
    keys: Collection[str], config: PeftConfig, shape: ModelConfig
) -> tuple[dict[LoRAModule, ExpertTensors], set[str]]:
    """Return the tensors of all projections of experts, and the names of these tensors.

    Raises:
        InvalidArgument: tensors are missing or contradict the config.
    """
    names, layers, used = shape.architecture_info.expert_names, dict[int, _Layer](), set[str]()
    num_experts = 0 if shape.moe is None else shape.moe.num_experts
    single = {name for parts in names.adapted_projections.values() for name in parts}
    blocks = {
        f"{shape.architecture_info.layers_path}.{layer}.{block}".removesuffix(".")
        for layer in range(shape.num_layers)
        if shape.has_experts(layer)
        for block in (names.module, names.block)
    }
    for key in sorted(keys):
        match = _NAME.fullmatch(key)
        if match is None or match["block"] not in blocks:
            continue
        layer, projection = int(match["layer"]), match["projection"]
        if projection and (projection not in single or int(match["expert"]) >= num_experts):
            continue
        used.add(key)
        found = layers.setdefault(layer, _Layer())
        if projection:
            found.block = match["block"]
            found.by_expert.setdefault((int(match["expert"]), projection), {})[match["half"]] = key
        else:
            found.stacked.setdefault(match["nesting"].count("."), {})[match["half"]] = key
    tensors: dict[LoRAModule, ExpertTensors] = {}
    modules = lora_modules(shape)
    for layer, found in layers.items():
        projections = [m for m in modules.values() if m.layer == layer and m.num_experts]
        for pair in (*found.stacked.values(), *found.by_expert.values()):
            if len(pair) == 1:
                (half, key), other = next(iter(pair.items())), {"A": "B", "B": "A"}
                raise InvalidArgument(f"tensor {key!r} exists, but its lora_{other[half]} is missing")
        if found.stacked and found.by_expert:
            key = min(pair["A"] for pair in found.stacked.values())
            raise InvalidArgument(f"the file has tensors for each expert of layer {layer}, and also {key!r} for all")
        if found.stacked:
            tensors |= _stacked(layer, found, projections, config, names.has_exchanged_matrices)
        tensors |= _by_expert(found, projections, config) if found.by_expert else {}
    return tensors, used


def _stacked(
    layer: int, found: _Layer, projections: list[LoRAModule], config: PeftConfig, is_exchanged: bool
) -> dict[LoRAModule, ExpertTensors]:
    """Assign tensors to parameters: PEFT wraps parameters in the order in which the model defines them."""
    targets = [module for module in projections if config.targets_parameter(module.parameter)]
    if sorted(found.stacked) != list(range(len(targets))):
        raise InvalidArgument(
            f"the file has tensors of {len(found.stacked)} parameters of the experts of layer {layer}, but "
            f"target_parameters in {CONFIG_FILE} names {' and '.join(module.target for module in targets) or 'none'}; "
            "use the config and the weights of the same adapter"
        )
    return {
        module: ExpertTensors(found.stacked[len(targets) - 1 - i], is_exchanged=is_exchanged)
        for i, module in enumerate(targets)
    }


def _by_expert(found: _Layer, projections: list[LoRAModule], config: PeftConfig) -> dict[LoRAModule, ExpertTensors]:
    gate, up = projections[0].projections[0], projections[0].projections[-1]  # the same without a gate
    adapted = {projection for _, projection in found.by_expert}
    if (gate in adapted) != (up in adapted):
        one, other = (gate, up) if gate in adapted else (up, gate)
        raise InvalidArgument(
            f"the file has tensors of {one} for experts, but none of {other}: as in PEFT, both must be adapted, "
            "because their weights are one parameter"
        )
    if gate in adapted and gate != up and config.use_rslora:
        raise InvalidArgument(
            f"use_rslora with tensors of {gate} and {up} for each expert is not supported, because PEFT fuses them to "
            "another rank and so scales them otherwise than the trainer; save the adapter without use_rslora"
        )
    for projection in sorted(adapted):
        name = f"{found.block}.experts.0.{projection}"
        if (excluding := config.target_modules.excluding_field(name)) is not None:
            raise InvalidArgument(
                f"the file has tensors for {name}, which {excluding} excludes; "
                "use the config and the weights of the same adapter"
            )
        if config.rank(name) != config.r or config.scale(name) != config.default_scale:
            raise InvalidArgument(f"rank_pattern and alpha_pattern of single experts are not supported: {name}")
    tensors = {}
    for module in projections:
        parts = module.projections
        if parts[0] not in adapted:
            continue
        pairs = []
        for expert in range(module.num_experts):
            for part in parts:
                if (expert, part) not in found.by_expert:
                    raise InvalidArgument(f"the file has no tensors for {found.block}.experts.{expert}.{part}")
            pairs.append(tuple(found.by_expert[expert, part] for part in parts))
        tensors[module] = ExpertTensors(by_expert=tuple(pairs))
    return tensors
