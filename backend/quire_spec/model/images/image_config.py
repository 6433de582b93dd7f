# SPDX-License-Identifier: Apache-2.0
"""How a model reads images, which is read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import HFConfigReader

QWEN_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Models whose images keep their aspect ratio, and whose tokens have a row and a column."""
GEMMA4_TOWERS = ("gemma4", "gemma4_unified")
"""Models whose images keep their aspect ratio, up to a number of tokens. The second one has no encoder: its patches are
only projected."""
IMAGE_TOWERS = (*QWEN_TOWERS, "gemma3", *GEMMA4_TOWERS, "mistral3")
"""Values of `model_type` of the models whose vision towers the engine runs."""

_DEEPSTACK: tuple[int, ...] = (8, 16, 24)
"""Default of deepstack_visual_indexes in Qwen3-VL."""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How a model reads images: a vision tower computes the embeddings of an image's tokens."""

    tower: str
    """One of IMAGE_TOWERS."""
    token_id: int
    """Id of the token that stands for each token of an image."""
    merge_size: int = 1
    """The tower merges squares of merge_size x merge_size patches to one token."""
    num_tokens: int = 0
    """Number of tokens of each image; 0 if it depends on the image."""
    num_deepstack: int = 0
    """Number of layers to whose outputs the tower adds further embeddings of the tokens."""
    bidirectional: str = ""
    """The layers in which the tokens of an image attend to each other in both directions: "all", "windows" (those with
    a sliding window), or "" for none."""
    start_token_id: int | None = None
    """Id of the token before the tokens of an image, if the processor of transformers writes it."""
    end_token_id: int | None = None
    """Id of the token after the tokens of an image, if the processor of transformers writes it."""
    pad_token_id: int = 0
    """The tokens of an image have the per-layer embeddings of this token; see LayerVariants."""
    token_pixels: int = 0
    """Width and height of a token in pixels, if the rows of an image have a token of text between them. Otherwise 0."""

    @property
    def is_bidirectional(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions in some layers."""
        return bool(self.bidirectional)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self | None:
        """Read config.json. Return None if the model has no vision tower that the engine runs.

        Raises:
            ConfigError: a value has the wrong type.
        """
        tower, vision = config.get("model_type"), config.get("vision_config")
        if tower not in IMAGE_TOWERS or not isinstance(vision, Mapping):
            return None
        reader = HFConfigReader(config)
        key = "image_token_id" if "image_token_id" in reader else "image_token_index"
        if tower in GEMMA4_TOWERS:
            return cls._from_gemma4(reader, tower)
        if key not in reader:
            return None
        token_id = _token_id(reader, key)
        if tower == "mistral3":
            merge_size = reader.get_int("spatial_merge_size", 2)
            patch_size = reader.get_section("vision_config").get_int("patch_size", 16)
            return cls(tower, token_id, merge_size, token_pixels=patch_size * merge_size)
        if tower not in QWEN_TOWERS:
            num_tokens = reader.get_int("mm_tokens_per_image", 256)
            return cls(tower, token_id, num_tokens=num_tokens, bidirectional="all")
        vision_reader = reader.get_section("vision_config")
        deepstack = _DEEPSTACK if tower == "qwen3_vl" else ()
        if deepstack and "deepstack_visual_indexes" in vision_reader:
            deepstack = vision_reader.get_int_list("deepstack_visual_indexes")
        return cls(tower, token_id, vision_reader.get_int("spatial_merge_size", 2), num_deepstack=len(deepstack))

    @classmethod
    def _from_gemma4(cls, reader: HFConfigReader, tower: str) -> Self:
        """Read config.json of Gemma 4."""
        text = reader.get_section("text_config")
        default = "vision" if tower == "gemma4_unified" else None
        direction = text.get_raw("use_bidirectional_attention") if "use_bidirectional_attention" in text else default
        return cls(
            tower,
            _token_id(reader, "image_token_id", 258_880),
            bidirectional="windows" if direction == "vision" else "",
            start_token_id=_token_id(reader, "boi_token_id", 255_999),
            end_token_id=_token_id(reader, "eoi_token_id", 258_882),
            pad_token_id=_token_id(text, "pad_token_id", 0),
        )


def _token_id(reader: HFConfigReader, key: str, default: int | None = None) -> int:
    """Return the token id at a key. Raises ConfigError if there is not exactly one."""
    token_ids = reader.get_token_ids(key)
    if not token_ids and default is not None:
        return default
    if len(token_ids) != 1:
        raise reader.error(key, list(token_ids), "one token id")
    return token_ids[0]


def mrope_axes(section: tuple[int, ...], num_pairs: int, *, is_interleaved: bool) -> tuple[int, ...]:
    """Return for each pair of rotated elements which of the three positions of a token rotates it: 0 for the time, 1
    for the row and 2 for the column of an image.

    Args:
        section: number of pairs of each axis.
        num_pairs: number of pairs of a head.
        is_interleaved: whether the axes alternate. Otherwise, the pairs of an axis are adjacent.

    Raises:
        ConfigError: the sections have another number of pairs.
    """
    if is_interleaved and len(section) == 3:
        return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(num_pairs))
    axes = tuple(axis % 3 for axis, length in enumerate(section) for _ in range(length))
    if len(axes) != num_pairs:
        raise ConfigError(
            f"config.json: mrope_section: must have 3 numbers that add up to {num_pairs}, got {list(section)}"
        )
    return axes
