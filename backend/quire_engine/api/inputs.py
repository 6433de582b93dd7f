# SPDX-License-Identifier: Apache-2.0
"""Prompts and per-prompt arguments of an offline run, in the forms that vLLM takes, to one form. llm.py calls it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any, NotRequired, Self, TypedDict, cast

from quire_spec.errors import InvalidArgument


class TextPrompt(TypedDict):
    """A prompt that is text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt that is token ids; its text, if it is told, comes back with the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, {"prompt": text}, {"prompt_token_ids": ids}, or token ids; the objects may have a cache_salt."""

_PROMPT_FORMATS = "use a text, {'prompt': text}, {'prompt_token_ids': ids} or a list of token ids"
_MAX_TOKEN_ID = 2**31 - 1
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """What a prompt says; a text or token ids at least."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None

    @classmethod
    def from_prompt(cls, prompt: Prompt) -> Self:
        """Read one prompt.

        Raises:
            InvalidArgument: it has an unknown key, or neither text nor token ids, or what is no token id.
        """
        if isinstance(prompt, str):
            return cls(prompt, None)
        if not isinstance(prompt, Mapping):
            return cls(None, _parse_token_ids(prompt))
        if unknown_keys := sorted(set(prompt) - _PROMPT_KEYS):
            raise InvalidArgument(f"prompt: unknown key {unknown_keys[0]!r}; use 'prompt' or 'prompt_token_ids'")
        text, token_ids, cache_salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if token_ids is None and not isinstance(text, str):
            raise InvalidArgument(f"prompt: {prompt!r} has neither a text 'prompt' nor 'prompt_token_ids'")
        if not isinstance(cache_salt, str | None):
            raise InvalidArgument(f"prompt: cache_salt {cache_salt!r} is no string")
        return cls(text, None if token_ids is None else _parse_token_ids(token_ids), cache_salt)


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts one by one; one alone is a list of one.

    Raises:
        InvalidArgument: neither.
    """
    if not isinstance(prompts, str | Mapping | Iterable):
        raise InvalidArgument(f"prompts: {str(prompts)[:80]} is no prompt; {_PROMPT_FORMATS}")
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        prompt_list = [prompts] if isinstance(prompts, bytes) else list(prompts)
    except TypeError as error:  # an array of no dimension
        raise InvalidArgument(f"prompts: {str(prompts)[:80]} is no prompt; {_PROMPT_FORMATS}") from error
    # numpy's integers are no int.
    is_single = len(prompt_list) > 0 and isinstance(prompt_list[0], Integral)
    return [cast(Prompt, prompt_list)] if is_single else cast(list[Prompt], prompt_list)


def broadcast_to_prompts(
    name: str, value: Any, expected_type: type[Any], num_prompts: int, optional: bool = False
) -> list[Any]:
    """One value for all prompts, or a list with one each; None is one if `optional`.

    Raises:
        InvalidArgument: not as many as there are prompts, or one that is no `kind`.
    """
    is_single = (
        value is None or isinstance(value, expected_type) or not isinstance(value, Sequence) or isinstance(value, str)
    )
    values = [value] * num_prompts if is_single else list(value)
    for item in values:
        if not (isinstance(item, expected_type) or (item is None and optional)):
            raise InvalidArgument(f"{name}: {str(item)[:80]!r} is no {expected_type.__name__}")
    if len(values) != num_prompts:
        raise InvalidArgument(f"{name}: {len(values)} entries for {num_prompts} prompts; give one, or one per prompt")
    return values


def _parse_token_ids(values: object) -> list[int]:
    """Integers of any library as plain ones; the engine knows the vocabulary and looks again."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidArgument(f"prompt: {str(values)[:80]!r} is no prompt; {_PROMPT_FORMATS}")
    try:
        token_ids = [index(value) for value in values]
    except TypeError as error:
        raise InvalidArgument(f"prompt: not a list of token ids: {error}") from error
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= _MAX_TOKEN_ID):
        invalid_id = next(i for i in token_ids if not 0 <= i <= _MAX_TOKEN_ID)
        raise InvalidArgument(f"prompt: {str(invalid_id)[:40]} is no token id")
    return token_ids
