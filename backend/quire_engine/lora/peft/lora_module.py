# SPDX-License-Identifier: Apache-2.0
"""The modules of a model that LoRA can change, by the names that PEFT gives them. Pure."""

from dataclasses import dataclass

from quire_spec.model.model_config import ModelConfig

NO_LAYER = -1
"""Layer number that stands for modules outside the layers: the embedding and the output projection."""


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """A linear layer that adapters can change, or the embedding."""

    name: str
    """Path of the module in the model; the keys of rank_pattern are matched against it."""
    layer: int
    path: str
    """Path of the module in its layer; for a module outside the layers, its name."""

    @property
    def key(self) -> tuple[int, str]:
        """(layer, target): identifies the module in a HostAdapter."""
        return self.layer, self.target

    @property
    def target(self) -> str:
        """Name in target_modules."""
        return self.path.rpartition(".")[2]

    def weight_name(self, shape: ModelConfig) -> str:
        """Return the name of the module's weight in the checkpoint."""
        return (self.path == "lm_head" and shape.tied_embedding_name) or f"{self.name}.weight"


def lora_modules(shape: ModelConfig) -> dict[str, LoRAModule]:
    """Return all modules that adapters can change, by name."""
    layer_modules = (
        LoRAModule(f"{shape.architecture_info.layers_path}.{layer}.{path}", layer, path)
        for layer in range(shape.num_layers)
        for path in shape.layer_linears(layer)
    )
    parent = shape.architecture_info.layers_path.removesuffix("layers")
    outer_modules = (
        LoRAModule(f"{parent}embed_tokens", NO_LAYER, "embed_tokens"),
        LoRAModule("lm_head", NO_LAYER, "lm_head"),
    )
    return {module.name: module for module in (*layer_modules, *outer_modules)}
