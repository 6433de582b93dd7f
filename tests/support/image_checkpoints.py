# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints that read images, their prompts, and the oracle: transformers with the whole model."""

import io
import json
import random
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import BASE, CHECKPOINTS, VOCAB, write_checkpoint
from support.tokenizer import byte_level, save_tokenizer
from torch.nn import functional
from transformers.models.gemma4 import image_processing_pil_gemma4

from quire_engine.images.processor import ImageProcessor, ProcessedImage
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import ImageInput

IMAGE_TOKEN, VIDEO_TOKEN, START_TOKEN, END_TOKEN = range(VOCAB - 4, VOCAB)
GEMMA4 = ("gemma4-vision", "gemma4-e2b-vision", "gemma4_unified-vision")
MISTRAL3 = ("mistral3", "mistral3-mistral4")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5-vision", "gemma3-vision", *GEMMA4, *MISTRAL3)
MAX_SOFT_TOKENS = 9
"""Maximum number of tokens of an image of Gemma 4."""
MARKS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
CHAT_TEMPLATE = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}\
{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}assistant:"""
"""In the form of Qwen's templates."""
SIZES = ((60, 100), (130, 40), (64, 64), (90, 90))
"""Heights and widths of the images."""


def make_image_checkpoint(folder: Path, name: str, max_soft_tokens: int = MAX_SOFT_TOKENS) -> Path:
    """Write the checkpoint `name` of tiny_checkpoints with a vision tower of random weights, all of which have an
    effect, and the settings of its image processor. Other processes read images of Gemma 4 only with a number of
    `max_soft_tokens` that transformers accepts."""
    kind, overrides = CHECKPOINTS[name]
    config = kind(**(BASE | overrides))
    config.image_token_id, config.video_token_id = IMAGE_TOKEN, VIDEO_TOKEN
    config.vision_start_token_id, config.vision_end_token_id = START_TOKEN, END_TOKEN
    vision = config.vision_config
    if name == "qwen2_vl":
        vision.hidden_size = config.text_config.hidden_size  # the size of its outputs in this family
    if name in GEMMA4:
        config.boi_token_id, config.eoi_token_id = START_TOKEN, END_TOKEN
        if max_soft_tokens > MAX_SOFT_TOKENS:
            vision.position_embedding_size = 9 * max_soft_tokens
        write_checkpoint(folder, config, sum(map(ord, name)))
        _draw_tower(folder)
        # The processor accepts at least 70 tokens, with which the tests would take several times as long.
        image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS = (MAX_SOFT_TOKENS, 70)
        settings = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": max_soft_tokens}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return folder
    if name in MISTRAL3:
        if name == "mistral3-mistral4":
            config.vision_feature_layer = [0]
        write_checkpoint(folder, config, sum(map(ord, name)))
        _draw_tower(folder)
        settings = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 84}, "patch_size": 14}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return folder
    if name == "gemma3-vision":
        vision.image_size, config.mm_tokens_per_image, vision.vision_use_head = 84, 9, False
        write_checkpoint(folder, config, sum(map(ord, name)))
        _draw_tower(folder)
        settings = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 84, "width": 84}}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return folder
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"longest_edge": 20_000, "shortest_edge": 1000},
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    write_checkpoint(folder, config, sum(map(ord, name)))
    _draw_tower(folder)
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def _draw_tower(folder: Path) -> None:
    """Draw what transformers starts at fixed values in the vision tower of a checkpoint, where a mistake would not
    show."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if not re.search("vision|visual|multi_modal_projector", name):
            continue
        if name.endswith(("_min", "_max")):  # bounds of activations, low enough to clamp some
            scale = 0.05 if "down_proj" in name else 0.5
            bound = (torch.rand(()) + 0.5) * scale
            tensor.copy_(-bound if name.endswith("_min") else bound)
        elif tensor.dim() < 2:
            tensor.add_(torch.randn_like(tensor) * 0.3)
        elif len(tensor.unique()) == 1:
            tensor.normal_()
        else:
            tensor.mul_(20.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def add_image_tokenizer(folder: Path, marks: Sequence[str] = (MARKS[0], "<|video_pad|>", *MARKS[1:])) -> Path:
    """Write a tokenizer with the marks of images into the folder of a checkpoint. `marks` are the texts of IMAGE_TOKEN,
    VIDEO_TOKEN, START_TOKEN and END_TOKEN; the default is that of Qwen."""
    tokenizer = byte_level(300)
    tokenizer.add_tokens([f"filler {i} " for i in range(IMAGE_TOKEN - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens(list(marks))
    assert tokenizer.token_to_id(marks[0]) == IMAGE_TOKEN
    return save_tokenizer(tokenizer, folder)


def bomb() -> bytes:
    """Return a PNG file of a few bytes that claims to have 10 billion pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = [b"IHDR" + header, b"IDAT" + zlib.compress(b"")]
    parts = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png(seed: int) -> bytes:
    """Return the file of a random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIZES[seed % len(SIZES)], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images."""

    token_ids: list[int]
    images: list[ImageInput]

    def with_text_of(self, other: "ImagePrompt") -> "ImagePrompt":
        """Return this prompt with the text before its first image that another prompt has."""
        start = self.images[0].start
        return replace(self, token_ids=other.token_ids[:start] + self.token_ids[start:])


def image_prompts(folder: Path, plans: Sequence[Sequence[int | list[int]]], seed: int = 0) -> list[ImagePrompt]:
    """Return prompts. A number in a plan is that of random text tokens, and a list contains the seed of an image."""
    shape = ModelConfig.load(folder)
    assert shape.images is not None
    processor, processed = ImageProcessor(folder, shape.images), dict[int, ProcessedImage]()
    rng, prompts = random.Random(seed), []
    for plan in plans:
        token_ids: list[int] = []
        images: list[ImageInput] = []
        for part in plan:
            if isinstance(part, int):
                token_ids += (rng.randrange(IMAGE_TOKEN) for _ in range(part))
                continue
            image = processed.setdefault(part[0], processor.process(png(part[0])))
            start = len(token_ids) + 1
            sizes = image.grid, image.tensors, image.line_length
            images.append(ImageInput(start, image.num_tokens, image.digest, *sizes))
            length = image.line_length or image.num_tokens + 1
            row_ends = [(i + 1) % length == 0 for i in range(image.num_tokens)]
            token_ids += [START_TOKEN, *(VIDEO_TOKEN if is_end else IMAGE_TOKEN for is_end in row_ends), END_TOKEN]
        prompts.append(ImagePrompt(token_ids, images))
    return prompts


@torch.inference_mode()
def greedy(oracle: Any, prompt: ImagePrompt, num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Return the text tokens that transformers generates, and the log probabilities [num_tokens, IMAGE_TOKEN]. The
    token of an image in an output would stand for another image in transformers."""
    token_ids, logprobs, inputs = list(prompt.token_ids), [], _inputs(prompt.images)
    for _ in range(num_tokens):
        ids = torch.tensor([token_ids])
        types = {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if prompt.images else {}
        if types and oracle.config.model_type == "gemma4_unified":
            # Without a mask, its forward pass lets images attend in both directions in all layers, unlike `generate`.
            embeddings, positions = oracle.get_input_embeddings()(ids), torch.arange(ids.shape[1])[None]
            make_masks = oracle.create_masks_for_generate
            types["attention_mask"] = make_masks(oracle.config, embeddings, None, None, positions, **types)
        if oracle.config.model_type == "mistral3":
            types = {}
        if oracle.config.model_type == "gemma3":
            types = {"token_type_ids": (ids == IMAGE_TOKEN).int()}
        table = oracle(ids, **inputs, **types).logits[0, -1].float().log_softmax(-1)[:IMAGE_TOKEN]
        logprobs.append(table)
        token_ids.append(int(table.argmax()))
    return token_ids[len(prompt.token_ids) :], torch.stack(logprobs)


def _inputs(images: Sequence[ImageInput]) -> dict[str, torch.Tensor]:
    tensors: dict[str, list[torch.Tensor]] = {}
    for image in images:
        for name, tensor in image.tensors.items():
            values = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
            tensors.setdefault(name, []).append(values.view(tensor.shape))
    if images and images[0].line_length:  # images of several sizes are padded to the largest
        sizes = torch.tensor([list(pixels.shape[-2:]) for pixels in tensors["pixel_values"]])
        height, width = sizes.amax(0).tolist()
        padded = [functional.pad(p, (0, width - p.shape[-1], 0, height - p.shape[-2])) for p in tensors["pixel_values"]]
        return {"pixel_values": torch.cat(padded), "image_sizes": sizes}
    return {name: torch.cat(values) for name, values in tensors.items()}
