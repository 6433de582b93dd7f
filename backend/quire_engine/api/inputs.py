# SPDX-License-Identifier: Apache-2.0
"""Parser for the prompts and the per-prompt arguments of an offline run, in all formats that vLLM accepts.

`LLM` calls it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from numbers import Integral
from operator import index
from typing import Any, NotRequired, Self, TypedDict, cast

from quire_spec.errors import InvalidArgument, truncated_repr


class TextPrompt(TypedDict):
    """A text prompt."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt of token ids. The prompt's text, if given, is returned with the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Mapping[str, Any] | Sequence[int]
"""A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; the dicts can also contain cache_salt.

{"prompt": text} can also contain multi_modal_data: {"image": one image or a list}. An image is the content of a file or
an image of Pillow, and the text contains the model's mark of an image once for each.
"""

_PROMPT_FORMATS = "use a text, {'prompt': text}, {'prompt_token_ids': ids} or a list of token ids"
_MAX_TOKEN_ID = 2**31 - 1
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"}


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """A parsed prompt, in which the text, the token ids or both are set."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    images: list[bytes] = field(default_factory=list)

    @classmethod
    def from_prompt(cls, prompt: Prompt) -> Self:
        """Parse one prompt.

        Raises:
            InvalidArgument: the prompt has an unknown key or an invalid token id, or lacks both text and token ids.
        """
        if isinstance(prompt, str):
            return cls(prompt, None)
        if not isinstance(prompt, Mapping):
            return cls(None, _parse_token_ids(prompt))
        if unknown_keys := sorted(set(prompt) - _PROMPT_KEYS):
            raise InvalidArgument(f"prompt: unknown key {unknown_keys[0]!r}; use 'prompt' or 'prompt_token_ids'")
        text, token_ids, cache_salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if token_ids is None and not isinstance(text, str):
            raise InvalidArgument(
                f"prompt: must contain 'prompt' (text) or 'prompt_token_ids', got {str(prompt)[:80]!r}"
            )
        if not isinstance(cache_salt, str | None):
            raise InvalidArgument(f"prompt: cache_salt must be a string, got {str(cache_salt)[:80]!r}")
        images = _parse_images(prompt.get("multi_modal_data"))
        if images and token_ids is not None:
            raise InvalidArgument("prompt: images are not possible with prompt_token_ids; give the text as prompt")
        return cls(text, None if token_ids is None else _parse_token_ids(token_ids), cache_salt, images)


def _parse_images(data: object) -> list[bytes]:
    """Return the contents of image files."""
    if data is None:
        return []
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        raise InvalidArgument(f"multi_modal_data: must be {{'image': one image or a list}}, got {truncated_repr(data)}")
    images = data.get("image", [])
    files = []
    for i, image in enumerate(images if isinstance(images, list | tuple) else [images]):
        if hasattr(image, "save"):
            file = BytesIO()
            image.save(file, "PNG")
            image = file.getvalue()
        if not isinstance(image, bytes):
            raise InvalidArgument(
                f"multi_modal_data.image[{i}]: must be the content of a file or an image of Pillow, got "
                f"{truncated_repr(image)}"
            )
        files.append(image)
    return files


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a single prompt becomes a list of one.

    Raises:
        InvalidArgument: the argument is neither a prompt nor a list of prompts.
    """
    if not isinstance(prompts, str | Mapping | Iterable):
        raise InvalidArgument(f"prompts: invalid prompt {str(prompts)[:80]}; {_PROMPT_FORMATS}")
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        prompt_list = [prompts] if isinstance(prompts, bytes) else list(prompts)
    except TypeError as error:  # a zero-dimensional array
        raise InvalidArgument(f"prompts: invalid prompt {str(prompts)[:80]}; {_PROMPT_FORMATS}") from error
    # Integral also includes the integers of NumPy, which are not instances of int.
    is_single = len(prompt_list) > 0 and isinstance(prompt_list[0], Integral)
    return [cast(Prompt, prompt_list)] if is_single else cast(list[Prompt], prompt_list)


def broadcast_to_prompts(
    name: str, value: Any, expected_type: type[Any], num_prompts: int, optional: bool = False
) -> list[Any]:
    """Return a list with one value per prompt; a single value is repeated for every prompt. If `optional` is True,
    values can be None.

    Raises:
        InvalidArgument: a list does not have one value per prompt, or a value is not of `expected_type`.
    """
    is_single = (
        value is None or isinstance(value, expected_type) or not isinstance(value, Sequence) or isinstance(value, str)
    )
    values = [value] * num_prompts if is_single else list(value)
    for item in values:
        if not (isinstance(item, expected_type) or (item is None and optional)):
            raise InvalidArgument(f"{name}: must be of type {expected_type.__name__}, got {str(item)[:80]!r}")
    if len(values) != num_prompts:
        raise InvalidArgument(
            f"{name}: got {len(values)} entries for {num_prompts} prompts; give one entry, or one per prompt"
        )
    return values


def _parse_token_ids(values: object) -> list[int]:
    """Convert token ids to int. They can also be integers of another library, such as NumPy. The engine checks later
    that the ids are in the vocabulary."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidArgument(f"prompt: invalid prompt {str(values)[:80]!r}; {_PROMPT_FORMATS}")
    try:
        token_ids = [index(value) for value in values]
    except TypeError as error:
        raise InvalidArgument(f"prompt: must be a list of token ids: {error}") from error
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= _MAX_TOKEN_ID):
        invalid_id = next(i for i in token_ids if not 0 <= i <= _MAX_TOKEN_ID)
        raise InvalidArgument(f"prompt: {str(invalid_id)[:40]} is not a token id")
    return token_ids
