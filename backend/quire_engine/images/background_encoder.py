# SPDX-License-Identifier: Apache-2.0
"""Interface between the scheduler and the vision tower, which encodes images while steps run."""

from typing import Any, Protocol

from quire_spec.protocol.messages import ImageInput


class BackgroundImageEncoder(Protocol):
    """Computes the embeddings of images' tokens, and keeps them for steps."""

    def compute(self, image: ImageInput) -> object:
        """Return the embeddings of an image. This is slow. One thread can call it while steps run."""

    def store(self, digest: bytes, embeddings: Any) -> None:
        """Keep what `compute` returned. The least recently used embeddings are dropped, unless they are held."""

    def hold(self, digest: bytes) -> bool:
        """Keep the embeddings of an image until `release`. Return False if they are absent."""

    def release(self, digest: bytes) -> None:
        """Allow that the embeddings of a held image are dropped."""
