# SPDX-License-Identifier: Apache-2.0
"""The modules of a model that LoRA can change, by the names that PEFT gives them. Pure."""

from dataclasses import dataclass

from quire_spec.model.architectures import module_name
from quire_spec.model.memory_sizing import expert_sizes, layer_linear_sizes, outer_module_sizes
from quire_spec.model.model_config import ModelConfig

NO_LAYER = -1
"""Layer number that stands for modules outside the layers: the embedding and the output projection."""


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """A linear layer or a router that adapters can change, the embedding, or one projection of all experts."""

    name: str
    """Path of the module in the model; for a projection of experts, path of the parameter with their weights. The keys
    of rank_pattern are matched against it."""
    layer: int
    path: str
    """Path of the module in its layer; for a module outside the layers, its name."""
    num_experts: int = 0
    """Number of experts of the projection; 0 for other modules."""
    projections: tuple[str, ...] = ()
    """For a projection of experts, its names in files with tensors for each expert: gate and up, or up, or down. Empty
    if there are no such files."""

    @property
    def key(self) -> tuple[int, str]:
        """(layer, target): identifies the module in a HostAdapter."""
        return self.layer, module_name(self.path)

    @property
    def target(self) -> str:
        """Name in target_modules or target_parameters."""
        return self.path.rpartition(".")[2]

    @property
    def parameter(self) -> str:
        """Path of the module's weight in transformers 5, for target_parameters."""
        return self.name if self.num_experts else f"{self.name}.weight"

    def weight_name(self, shape: ModelConfig) -> str:
        """Return the name of the module's weight in the checkpoint."""
        if self.path == "lm_head" and shape.tied_embedding_name:
            return shape.tied_embedding_name
        return f"{self.name.removesuffix(self.path)}{shape.architecture_info.checkpoint_path(self.path)}.weight"


def lora_modules(shape: ModelConfig) -> dict[str, LoRAModule]:
    """Return all modules that adapters can change, by name."""
    layers_path, moe = shape.architecture_info.layers_path, shape.moe
    names = shape.architecture_info.expert_names
    layer_modules = [
        LoRAModule(f"{layers_path}.{layer}.{path}", layer, path)
        for layer in range(shape.num_layers)
        for path in (
            *shape.layer_linears(layer),
            *([router_path(shape)] if shape.has_experts(layer) else ()),
        )
    ]
    if moe is not None:
        layer_modules += [
            LoRAModule(f"{layers_path}.{layer}.{path}", layer, path, moe.num_experts, parts)
            for layer in range(shape.num_layers)
            if shape.has_experts(layer)
            for path, parts in ((names.path_of(name), parts) for name, parts in names.adapted_projections.items())
        ]
    parent = shape.architecture_info.parent_path
    outer_names = {"embed_tokens": f"{parent}{shape.architecture_info.embedding}", "lm_head": "lm_head"}
    outer_modules = [
        LoRAModule(outer_names.get(path, f"{parent}{path}"), NO_LAYER, path) for path in outer_module_sizes(shape)
    ]
    return {module.name: module for module in (*layer_modules, *outer_modules)}


def router_path(shape: ModelConfig) -> str:
    """Return the path of the router in a layer with experts."""
    names = shape.architecture_info.expert_names
    return names.path_of(names.router)


def module_sizes(shape: ModelConfig) -> dict[tuple[int, str], tuple[int, int]]:
    """Return the input size and the output size of all modules, by their layers and paths."""
    sizes = {(NO_LAYER, path): size for path, size in outer_module_sizes(shape).items()}
    for layer in range(shape.num_layers):
        sizes |= {(layer, path): size for path, size in layer_linear_sizes(shape, layer).items()}
        if shape.moe is not None and shape.has_experts(layer):
            sizes[layer, router_path(shape)] = shape.hidden_size, shape.moe.num_experts
            path_of = shape.architecture_info.expert_names.path_of
            sizes |= {(layer, path_of(name)): size for name, size in expert_sizes(shape).items()}
    return sizes
