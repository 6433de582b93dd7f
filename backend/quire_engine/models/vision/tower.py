# SPDX-License-Identifier: Apache-2.0
"""Vision towers: compute the embeddings of an image's tokens.

The towers are the modules of transformers. The engine loads their weights, and runs the language model itself. Only
this module and `quire_engine.images` import transformers, which the optional extra `images` installs.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire_engine.models.forward_batch import ImageFeatures
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.errors import ConfigError
from quire_spec.model.images.image_config import GEMMA4_TOWERS, QWEN_TOWERS, ImageConfig
from quire_spec.protocol.messages import ImageTensor

_DTYPES = {"float32": torch.float32, "int64": torch.int64}
_FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class VisionTower:
    """The vision tower of one checkpoint.

    Raises:
        ConfigError: a tensor is missing or has another shape or dtype than config.json implies.
    """

    def __init__(self, folder: Path, images: ImageConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Load the weights from `folder`."""
        self._dtype, self._device = dtype, device
        self._tower = images.tower
        with torch.device(device):
            self._module = _build_module(folder, images, dtype).eval().requires_grad_(False)
        state = self._module.state_dict()
        self.num_bytes = sum(tensor.nbytes for tensor in state.values())
        """Bytes of the weights."""
        _load(folder, state)

    @torch.inference_mode()
    def encode(self, tensors: Mapping[str, ImageTensor]) -> ImageFeatures:
        """Return the embeddings of the tokens of an image. `tensors` are those that the checkpoint's image processor
        makes of it."""
        inputs = {name: self._to_device(tensor) for name, tensor in tensors.items()}
        if self._tower == "gemma4_unified":
            positions = inputs["image_position_ids"]
            output = self._module.embed_vision(inputs["pixel_values"], positions).pooler_output
            return ImageFeatures(output[(positions != -1).all(dim=-1)])
        if self._tower == "gemma4":
            patches = self._module.vision_tower(inputs["pixel_values"], inputs["image_position_ids"]).last_hidden_state
            return ImageFeatures(self._module.embed_vision(inputs_embeds=patches))
        if self._tower in QWEN_TOWERS:
            output = self._module.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
            deepstack = tuple(getattr(output, "deepstack_features", None) or ())
            return ImageFeatures(output.pooler_output, deepstack)
        if self._tower == "mistral3":
            pixels = inputs["pixel_values"]
            sizes = [tuple(pixels.shape[-2:])]
            outputs = self._module.vision_tower(pixels, image_sizes=sizes, output_hidden_states=True).hidden_states
            patches = outputs[self._module.feature_layer][0]
            return ImageFeatures(self._module.multi_modal_projector(patches, sizes))
        patches = self._module.vision_tower(pixel_values=inputs["pixel_values"]).last_hidden_state
        return ImageFeatures(self._module.multi_modal_projector(patches).flatten(0, 1))

    def _to_device(self, tensor: ImageTensor) -> Tensor:
        values = torch.frombuffer(bytearray(tensor.data), dtype=_DTYPES[tensor.dtype]).view(tensor.shape)
        # Gemma 4 scales the pixels before it rounds them.
        is_rounded = values.is_floating_point() and self._tower not in GEMMA4_TOWERS
        return values.to(self._device, self._dtype if is_rounded else None)


def _build_module(folder: Path, images: ImageConfig, dtype: torch.dtype) -> Any:
    """Return a module whose children have the names that the checkpoint uses within `model`."""
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    config, auto_model = AutoConfig.from_pretrained(folder, local_files_only=True), cast(Any, AutoModel)
    module, previous = nn.Module(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            if images.tower == "qwen2_vl":
                from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

                build: Any = Qwen2VisionTransformerPretrainedModel._from_config
            else:
                build = auto_model.from_config
            if images.tower == "gemma4_unified":
                from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedVisionEmbedder

                module.embed_vision = Gemma4UnifiedVisionEmbedder(config.vision_config, config.text_config)
                return module
            tower = build(config.vision_config, dtype=dtype, attn_implementation="sdpa")
            if images.tower in QWEN_TOWERS:
                module.visual = tower
            elif images.tower == "gemma4":
                from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

                module.vision_tower = tower
                module.embed_vision = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)
            elif images.tower == "mistral3":
                from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

                module.vision_tower = tower
                module.multi_modal_projector = Mistral3MultiModalProjector(config)
                layers = config.vision_feature_layer
                layers = [layers] if isinstance(layers, int) else layers
                if len(layers) != 1:  # the projector of transformers fails for several
                    raise ConfigError(f"config.json: vision_feature_layer: must be one layer, got {layers}")
                module.feature_layer = layers[0]
            else:
                from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

                module.vision_tower = tower
                module.multi_modal_projector = Gemma3MultiModalProjector(config)
    finally:
        torch.set_default_dtype(previous)
    return module


_OTHER_NAMES = {
    r"^embed_vision\.(patch_|pos_)": r"vision_embedder.\1",
    r"^embed_vision\.multimodal_embedder\.": "embed_vision.",
    r"^vision_tower\.vision_model\.": "vision_tower.",
}
"""Parts of names in a module of transformers, and their names in checkpoints."""


def _load(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Fill the tensors of a module from a checkpoint."""
    files = TensorFiles(folder)
    # Early checkpoints have other paths: no `model`, and another module around the encoder of Gemma 3.
    plain = {re.sub(r"^model\.|(?<=vision_tower\.)vision_model\.", "", name): name for name in files.file_by_tensor}
    for name, target in state.items():
        other = name
        for pattern, replacement in _OTHER_NAMES.items():
            other = re.sub(pattern, replacement, other)
        source = plain.get(other, plain.get(name))
        if source is None:
            raise ConfigError(
                f"{folder}: model.{name} is missing; download the checkpoint again, or set language_model_only"
            )
        tensor = files.get_slice(source)[...]
        if tensor.shape != target.shape or tensor.dtype not in _FLOAT_DTYPES:
            raise ConfigError(
                f"{folder}: {source} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; the vision tower needs "
                f"{tuple(target.shape)} and a float dtype; set language_model_only to serve the language model"
            )
        target.copy_(tensor)
