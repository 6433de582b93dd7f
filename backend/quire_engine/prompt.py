# SPDX-License-Identifier: Apache-2.0
"""Prompts and per-prompt arguments of an offline run, in the forms that vLLM takes, to one form. llm.py calls it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from quire_spec.errors import InvalidArgument

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, {"prompt": text}, {"prompt_token_ids": ids}, or token ids; the objects may have a cache_salt."""

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a prompt says; a text or token ids at least."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        """Read one prompt.

        Raises:
            InvalidArgument: it has an unknown key, or neither text nor token ids.
        """
        if isinstance(prompt, str):
            return cls(prompt, None)
        if not isinstance(prompt, Mapping):
            return cls(None, list(prompt))
        if unknown := sorted(set(prompt) - _KEYS):
            raise InvalidArgument(f"prompt: unknown key {unknown[0]!r}; use 'prompt' or 'prompt_token_ids'")
        text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if token_ids is None and not isinstance(text, str):
            raise InvalidArgument(f"prompt: {prompt!r} has neither a text 'prompt' nor 'prompt_token_ids'")
        if not isinstance(salt, str | None):
            raise InvalidArgument(f"prompt: cache_salt {salt!r} is no string")
        return cls(text, None if token_ids is None else list(token_ids), salt)


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Prompts one by one; one alone is a list of one."""
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [cast(Prompt, prompts)] if single else list(cast(Sequence[Prompt], prompts))


def per_prompt(name: str, value: Any, kind: type[Any], count: int) -> list[Any]:
    """One value for all prompts, or a list with one each.

    Raises:
        InvalidArgument: not as many as there are prompts.
    """
    values = [value] * count if value is None or isinstance(value, kind) else list(value)
    if len(values) != count:
        raise InvalidArgument(f"{name}: {len(values)} entries for {count} prompts; give one, or one per prompt")
    return values
