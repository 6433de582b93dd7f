# SPDX-License-Identifier: Apache-2.0
"""Encoder of images: runs the vision tower, and keeps the outputs of recent images.

A chunk of a prompt can end inside an image, a preempted sequence computes its images again, and other requests send
the same image: the output of the tower is then in the cache. A step encodes an image that is not in the cache, so the
size of the cache changes only the speed. Outputs that were computed ahead of a step are held until the step has run.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.images.support import why_no_images
from quire_engine.models.forward_batch import ImageFeatures
from quire_engine.models.vision.tower import VisionTower
from quire_engine.step.plan import ScheduledSpan
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import ImageInput


class ImageEncoder:
    """Encoder of one engine. Tensor-parallel ranks other than 0 have none."""

    def __init__(self, tower: VisionTower, max_cached_tokens: int) -> None:
        """The outputs of at most `max_cached_tokens` tokens are kept, and at least that of the last image. Those that
        are held are not counted."""
        self._tower = tower
        self._max_cached_tokens = max_cached_tokens
        self._cache: OrderedDict[bytes, ImageFeatures] = OrderedDict()
        self._num_cached_tokens = 0
        self._held: dict[bytes, ImageFeatures] = {}
        self._num_threads: int | None = None
        self.num_bytes = tower.num_bytes
        """Bytes of the weights of the tower."""
        self.num_encoded = 0
        """Number of images that the tower has encoded."""

    def encode(self, spans: Sequence[ScheduledSpan]) -> ImageFeatures | None:
        """Return the embeddings of the tokens of images that a step computes, in the order of the spans; None if the
        step computes none."""
        parts = []
        for span in spans:
            for image, tokens in span.image_tokens:
                features = self._features(image)
                first = tokens.start - image.start
                if image.line_length:
                    first -= first // image.line_length  # tokens of text before these have no embeddings here
                rows = slice(first, first + len(tokens))
                parts.append((features.embeddings[rows], *(each[rows] for each in features.deepstack)))
        if not parts:
            return None
        embeddings, *deepstack = (torch.cat(each) for each in zip(*parts, strict=True))
        return ImageFeatures(embeddings, tuple(deepstack))

    def compute(self, image: ImageInput) -> ImageFeatures:
        """Run the tower. Another thread can use the rest of this object meanwhile."""
        if self._num_threads is not None:
            # A background thread begins with one core (lora/io_threads.py). An engine without other work has more.
            torch.set_num_threads(self._num_threads)
        return self._tower.encode(image.tensors)

    def store(self, digest: bytes, features: ImageFeatures) -> None:
        """Put the output of the tower into the cache."""
        self.num_encoded += 1
        self._add(digest, features)

    def allow_background(self) -> None:
        """Let other threads call `compute`, on as many cores as the calling thread uses."""
        self._num_threads = torch.get_num_threads()

    def hold(self, digest: bytes) -> bool:
        """Keep the output for an image until `release`. Return False if it is not in the cache."""
        features = self._cache.pop(digest, None)
        if features is not None:
            self._num_cached_tokens -= len(features.embeddings)
            self._held[digest] = features
        return features is not None

    def release(self, digest: bytes) -> None:
        """Return a held output to the cache."""
        self._add(digest, self._held.pop(digest))

    def _add(self, digest: bytes, features: ImageFeatures) -> None:
        self._cache[digest] = features
        self._num_cached_tokens += len(features.embeddings)
        while self._num_cached_tokens > self._max_cached_tokens and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._num_cached_tokens -= len(dropped.embeddings)

    def _features(self, image: ImageInput) -> ImageFeatures:
        if (held := self._held.get(image.digest)) is not None:
            return held
        if image.digest not in self._cache:
            self.store(image.digest, self.compute(image))
        self._cache.move_to_end(image.digest)
        return self._cache[image.digest]


def build_image_encoder(
    config: EngineConfig, shape: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device
) -> ImageEncoder | None:
    """Return the encoder of the model in `folder`; None if the engine reads no images. Raises ConfigError if the
    weights of the vision tower cannot be loaded."""
    if shape.images is None or why_no_images(config, shape, folder) is not None:
        return None
    return ImageEncoder(VisionTower(folder, shape.images, dtype, device), config.max_num_batched_tokens)


def broadcast_features(features: ImageFeatures | None, communicator: Communicator, empty: Tensor) -> ImageFeatures:
    """Send the embeddings of rank 0 to the other ranks, which pass None. Every rank gets the same result. `empty`
    [1 + number of deepstack layers, num_image_tokens, hidden_size] is overwritten."""
    if features is not None:
        torch.stack((features.embeddings, *features.deepstack), out=empty)
    embeddings, *deepstack = communicator.broadcast(empty).unbind()
    return ImageFeatures(embeddings, tuple(deepstack))
