# SPDX-License-Identifier: Apache-2.0
"""Images that are encoded while steps run: which one is encoded next, and which embeddings are kept until steps have
used them.

A vision tower can take seconds for a large image. In a step, this would delay the tokens of all sequences. Policy only:
the scheduler calls it in its thread, and another thread runs the tower.
"""

from collections.abc import Callable, Sequence
from functools import partial

from quire_engine.images.background_encoder import BackgroundImageEncoder
from quire_engine.sequence import Sequence as PromptSequence
from quire_spec.protocol.messages import ImageInput


class ImageEncodings:
    """The images of sequences that wait or compute their prompts. One image is encoded at a time.

    The most urgent sequence that could start otherwise gets the tower. From then on, the embeddings of its images are
    held until its prompt is computed. They take less memory than the images themselves, which each open request has
    anyway. A sequence that is preempted later starts again like a new one.
    """

    def __init__(self, encoder: BackgroundImageEncoder, start: Callable[[Callable[[], object]], None]) -> None:
        """`start` is called with a function that encodes an image. It runs this function in another thread. Then
        `on_encoded` must be called with its result, or `on_failed`."""
        self._encoder = encoder
        self._start = start
        self._users: dict[bytes, set[int]] = {}
        """The ids of the sequences that need each image."""
        self._held: set[bytes] = set()
        self._running: bytes | None = None

    def are_ready(self, sequence: PromptSequence, num_cached_tokens: int) -> bool:
        """Return whether the images of a waiting sequence are encoded, except those within its first
        `num_cached_tokens` tokens. If the tower is idle, it starts with the first one that is not."""
        needed = [i for i in sequence.images if i.start + i.num_tokens > num_cached_tokens]
        missing = [image for image in needed if not self._hold(image.digest, sequence.id)]
        if missing and self._running is None:
            self._running = missing[0].digest
            self._start(partial(self._encoder.compute, missing[0]))
        return not missing

    def release(self, sequence_id: int, images: Sequence[ImageInput]) -> None:
        """Called when the prompt of a sequence is computed, or when the sequence has ended."""
        for image in images:
            users = self._users.get(image.digest, set())
            users.discard(sequence_id)
            if not users:
                self._drop(image.digest)

    def on_encoded(self, embeddings: object) -> None:
        """Called with the embeddings of the image when the tower has ended."""
        assert self._running is not None
        digest, self._running = self._running, None
        self._encoder.store(digest, embeddings)
        if digest in self._users and self._encoder.hold(digest):
            self._held.add(digest)

    def on_failed(self) -> set[int]:
        """Called when the tower has failed. Return the ids of the sequences that need the image."""
        assert self._running is not None
        digest, self._running = self._running, None
        return set(self._users.get(digest, ()))

    def check_integrity(self, sequence_ids: set[int]) -> bool:
        """Return whether all users are among the unfinished sequences, and no other image is held."""
        return self._held <= self._users.keys() and all(
            users and users <= sequence_ids for users in self._users.values()
        )

    def _hold(self, digest: bytes, sequence_id: int) -> bool:
        self._users.setdefault(digest, set()).add(sequence_id)
        if digest not in self._held and self._encoder.hold(digest):
            self._held.add(digest)
        return digest in self._held

    def _drop(self, digest: bytes) -> None:
        self._users.pop(digest, None)
        if digest in self._held:
            self._held.remove(digest)
            self._encoder.release(digest)
