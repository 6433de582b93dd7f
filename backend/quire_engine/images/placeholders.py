# SPDX-License-Identifier: Apache-2.0
"""Places of images in a prompt: a chat template writes one mark for each image, which is replaced by a token for each
token of the image."""

import re
from collections.abc import Iterator, Sequence

from quire_engine.images.processor import ProcessedImage
from quire_engine.tokenization.control_tokens import END, START
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument
from quire_spec.model.images.image_config import ImageConfig
from quire_spec.protocol.messages import ImageInput

_GEMMA3_START, _GEMMA3_END = "<start_of_image>", "<end_of_image>"
_MISTRAL_BREAK, _MISTRAL_END = "[IMG_BREAK]", "[IMG_END]"


class Placeholders:
    """The places of images in the prompts of one model."""

    def __init__(self, images: ImageConfig, tokenizer: Tokenizer) -> None:
        self._token_id = images.token_id
        self._token = tokenizer.added_tokens.get(images.token_id, "")
        self._mark_text, self._before, self._after = self._token, "", ""
        if images.tower == "gemma3":
            self._mark_text = _GEMMA3_START
            self._before, self._after = f"\n\n{_GEMMA3_START}", f"{_GEMMA3_END}\n\n"
        if images.tower == "mistral3":
            self._after = _MISTRAL_END
        if images.start_token_id is not None:
            self._before = tokenizer.added_tokens.get(images.start_token_id, "")
        if images.end_token_id is not None:
            self._after = tokenizer.added_tokens.get(images.end_token_id, "")
        # Users cannot write a mark: in their messages, control tokens are between two other characters.
        mark = f"(?<!{START}){re.escape(self._mark_text)}(?!{END})"
        self._mark = re.compile(mark if self._token else "(?!)")

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """Return the text of a prompt in which each mark is replaced by the tokens of its image.

        Raises:
            InvalidArgument: the number of marks is not that of the images.
        """
        num_marks = len(self._mark.findall(text))
        if num_marks != len(images):
            raise InvalidArgument(
                f"images: the prompt has {num_marks} places for {len(images)} images; check that the chat template "
                f"writes {self._mark_text!r} for each image part, or write it once for each image in a prompt"
            )
        remaining = iter(images)
        return self._mark.sub(lambda match: self._tokens(next(remaining)), text)

    def locate(self, token_ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[ImageInput]:
        """Return the images with the positions of their tokens. `token_ids` are those of an expanded text.

        Raises:
            InvalidArgument: the prompt has other tokens of images.
        """
        runs = list(self._runs(token_ids, images))
        num_tokens = sum(token_id == self._token_id for token_id in token_ids)
        if len(runs) != len(images) or num_tokens != sum(image.num_embeddings for image in images):
            raise InvalidArgument(
                f"images: the prompt has {num_tokens} tokens of images, and its images have "
                f"{sum(image.num_embeddings for image in images)}; write {self._mark_text!r} once for each image"
            )
        return [
            ImageInput(start, image.num_tokens, image.digest, image.grid, image.tensors, image.line_length)
            for start, image in zip(runs, images, strict=True)
        ]

    def _tokens(self, image: ProcessedImage) -> str:
        if not image.line_length:
            return f"{self._before}{self._token * image.num_tokens}{self._after}"
        num_rows, row = (image.num_tokens + 1) // image.line_length, self._token * (image.line_length - 1)
        return self._before + _MISTRAL_BREAK.join([row] * num_rows) + self._after

    def _runs(self, token_ids: Sequence[int], images: Sequence[ProcessedImage]) -> Iterator[int]:
        """Yield where the tokens of each image begin, as far as they are adjacent."""
        end = 0
        for image in images:
            try:
                start = token_ids.index(self._token_id, end)
            except ValueError:
                return
            end = start + image.num_tokens
            length = image.line_length or image.num_tokens + 1
            expected = [(i + 1) % length > 0 for i in range(image.num_tokens)]
            if [token_id == self._token_id for token_id in token_ids[start:end]] != expected:
                return
            yield start
