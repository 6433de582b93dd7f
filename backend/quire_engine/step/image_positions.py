# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of prompts with images (mrope): each token has a time, a row and a column.

The three positions of a text token are equal. The tokens of an image have one time, and their row and column are
counted from it. The token after an image has a position that is greater by one than all positions of the image.

Source: `get_rope_index` of Qwen2.5-VL and Qwen3-VL in transformers
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_spec.protocol.messages import ImageInput


def rope_positions(images: Sequence[ImageInput], start: int, end: int) -> Tensor:
    """Return the times, rows and columns [3, end - start] int64 of the tokens from position `start` to `end` of a
    sequence with these images."""
    positions = torch.arange(start, end).repeat(3, 1)
    shift = 0
    for image in images:
        rows, columns = image.grid
        if not rows or image.start >= end:
            break
        image_end = image.start + image.num_tokens
        first, last = max(start, image.start), min(end, image_end)
        if first < last:
            index = torch.arange(first - image.start, last - image.start)
            axes = torch.stack((torch.zeros_like(index), index // columns, index % columns))
            positions[:, first - start : last - start] = axes + (image.start + shift)
        shift += max(rows, columns) - image.num_tokens
        if last < end:
            rest = max(start, image_end)
            positions[:, rest - start :] = torch.arange(rest, end) + shift
    return positions
