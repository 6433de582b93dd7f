# SPDX-License-Identifier: Apache-2.0
"""Image processor of a checkpoint: decodes image files, resizes and normalizes them, and cuts them into patches.

The processor is that of transformers, on Pillow and NumPy. Image files are input of clients, so the text process runs
this module only in processes that may die (text/images/image_worker.py).
"""

import hashlib
import io
import math
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_spec.errors import InvalidArgument
from quire_spec.model.images.image_config import GEMMA4_TOWERS, QWEN_TOWERS, ImageConfig
from quire_spec.protocol.messages import ImageTensor

MAX_PIXELS = 40_000_000
"""Maximum number of pixels of an image, before it is resized. The decoded image takes 3 bytes for each."""
MAX_TENSOR_BYTES = 64 * 2**20
"""Maximum size of the tensors of an image. Images of which the tensors would be larger are scaled down."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_TENSORS = ("pixel_values", "image_grid_thw", "image_position_ids")


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as a vision tower reads it."""

    num_tokens: int
    grid: tuple[int, int]
    """See ImageInput."""
    digest: bytes
    tensors: dict[str, ImageTensor]
    line_length: int = 0
    """See ImageInput."""

    @property
    def num_embeddings(self) -> int:
        """Number of its tokens that are not tokens of text."""
        return self.num_tokens - (self.num_tokens // self.line_length if self.line_length else 0)


class ImageProcessor:
    """The processor of one checkpoint."""

    def __init__(self, folder: Path, images: ImageConfig) -> None:
        """Read the settings in `folder`. Raises OSError or ValueError if they cannot be read."""
        self._images = images
        self._processor = processor = _load_processor(folder, images)
        self._arguments: dict[str, Any] = {}
        if images.tower in QWEN_TOWERS:
            patch = processor.patch_size
            # A patch has three colors, and each of its pixels is a float of 4 bytes.
            max_patches = MAX_TENSOR_BYTES // (3 * processor.temporal_patch_size * patch**2 * 4)
            size = dict(processor.size)
            size["longest_edge"] = min(size["longest_edge"], max_patches * patch**2)
            self._arguments["size"] = size
        elif images.tower == "gemma4_unified":
            # transformers cuts patches and merges squares of them to larger ones. These are the same as large patches.
            self._arguments["patch_size"] = processor.patch_size * processor.pooling_kernel_size
            self._arguments["pooling_kernel_size"] = 1
        elif images.tower == "mistral3":
            edge = math.isqrt(MAX_TENSOR_BYTES // (3 * 4)) // images.token_pixels * images.token_pixels
            self._arguments["size"] = {"longest_edge": min(processor.size["longest_edge"], edge)}
            self._arguments["patch_size"] = images.token_pixels
        elif images.tower == "gemma3":
            # Pan and scan would make several images of one.
            self._arguments["do_pan_and_scan"] = False

    def process(self, data: bytes) -> ProcessedImage:
        """Return the tensors of an image file.

        Raises:
            InvalidArgument: the file is not an image of a known format, or the image is too large or too narrow.
        """
        image = _decode(data)
        try:
            outputs = self._processor(images=[image], return_tensors="np", **self._arguments)
        except ValueError as error:
            raise InvalidArgument(f"cannot be processed: {error}; send another image") from error
        tensors = {name: _to_tensor(outputs[name]) for name in _TENSORS if name in outputs}
        digest = hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            digest.update(struct.pack(f"<{1 + len(tensor.shape)}Q", len(tensor.shape), *tensor.shape))
            digest.update(name.encode())
            digest.update(tensor.data)
        if self._images.tower in GEMMA4_TOWERS:
            num_tokens = int(outputs["num_soft_tokens_per_image"][0])
            return ProcessedImage(num_tokens, (0, 0), digest.digest(), tensors)
        if self._images.tower == "mistral3":
            height, width = (int(value) // self._images.token_pixels for value in outputs["image_sizes"][0])
            # The last row has no token of text after it; the mark of the end takes its place.
            return ProcessedImage(height * (width + 1) - 1, (0, 0), digest.digest(), tensors, width + 1)
        if self._images.tower not in QWEN_TOWERS:
            return ProcessedImage(self._images.num_tokens, (0, 0), digest.digest(), tensors)
        _, rows, columns = (int(value) for value in outputs["image_grid_thw"][0])
        grid = rows // self._images.merge_size, columns // self._images.merge_size
        return ProcessedImage(grid[0] * grid[1], grid, digest.digest(), tensors)


def _load_processor(folder: Path, images: ImageConfig) -> Any:
    """Return the processor of transformers that works without torchvision."""
    if images.tower == "gemma4_unified":
        # The processor of this family needs torchvision. Only the cutting of patches differs, see above.
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil.from_pretrained(folder, local_files_only=True)
    from transformers import AutoImageProcessor

    auto_processor: Any = AutoImageProcessor
    return auto_processor.from_pretrained(folder, backend="pil", local_files_only=True)


def _decode(data: bytes) -> Any:
    """Return an image of Pillow in RGB. Only its first frame is used."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Pillow warns of images with many pixels, which are rejected below before they are decoded.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise InvalidArgument(
                f"has {image.width} x {image.height} pixels, but at most {MAX_PIXELS} are allowed; send a smaller one"
            )
        if image.mode.startswith("I;16"):
            # Pillow would cut off all values above 255, so that almost all of the image would be white.
            image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            # As in vLLM, a transparent background is white.
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    except InvalidArgument:
        raise
    except Image.DecompressionBombError:
        raise InvalidArgument(f"has too many pixels, at most {MAX_PIXELS} are allowed; send a smaller image") from None
    except Exception as error:
        # The decoders of Pillow raise many kinds of errors for invalid files.
        raise InvalidArgument(
            f"is not a valid image ({type(error).__name__}); send a file in one of the formats {', '.join(FORMATS)}"
        ) from error


def _to_tensor(values: Any) -> ImageTensor:
    if values.dtype.kind in "iu":
        return ImageTensor("int64", list(values.shape), values.astype("<i8").tobytes())
    return ImageTensor("float32", list(values.shape), values.astype("<f4").tobytes())
