# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: how one request wants its tokens chosen. Names and meanings are vLLM's.

Validated where a request enters (frontend, text process, offline LLM) and trusted from there on. A name that is not
here is refused, so that a misspelt or unsupported parameter never changes nothing silently.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Self

from quire_spec.errors import InvalidArgument

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling parameters.

    Raises:
        InvalidArgument: a value has the wrong type or is out of range; the message names the parameter.
    """

    temperature: float = 1.0
    """0 takes the most likely token; higher is more random."""

    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities add up to this."""

    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1 keeps all."""

    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""

    seed: int | None = None
    """Makes the draw repeatable, whatever else is in the batch; None draws differently each time."""

    max_tokens: int | None = 16
    """Output tokens at most; None goes on to max_model_len."""

    min_tokens: int = 0
    """Output tokens before an end-of-sequence or stop token may end the output."""

    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it unless include_stop_str_in_output."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output."""

    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""

    logprobs: int | None = None
    """Log probabilities of this many most likely tokens at each position, and of the token taken."""

    include_stop_str_in_output: bool = False
    """Leave the stop string at the end of the text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    n: int = 1
    """Outputs per prompt; only 1 for now."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, ())
            elif isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        self._check_types()
        self._check_ranges()
        self._check_stops()

    @property
    def greedy(self) -> bool:
        """True when no randomness is wanted."""
        return self.temperature == 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Parameters by name, as clients send them.

        Numbers and booleans may come as strings ("0.5", "true": clients of NVIDIA's vllm_backend do that), lists as
        JSON strings ('["a", "b"]': the server's generate endpoint takes no arrays).

        Raises:
            InvalidArgument: a name is unknown, or a value is wrong.
        """
        kinds = {f.name: _kind(f) for f in fields(cls)}
        if unknown := sorted(set(values) - set(kinds)):
            raise InvalidArgument(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(sorted(kinds))}")
        return cls(**{name: _from_text(kinds[name], value) for name, value in values.items()})

    def to_mapping(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, fit for `from_mapping` and JSON."""
        pairs = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return {name: list(v) if isinstance(v, tuple) else v for name, v, default in pairs if v != default}

    def _check_types(self) -> None:
        for f in fields(self):
            value, kind = getattr(self, f.name), _kind(f)
            if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, f.name, float(value))
                continue
            good = {
                "float": isinstance(value, float) and math.isfinite(value),
                "int": isinstance(value, int) and not isinstance(value, bool),
                "int | None": value is None or (isinstance(value, int) and not isinstance(value, bool)),
                "bool": isinstance(value, bool),
                "tuple[str, ...]": isinstance(value, tuple) and all(isinstance(v, str) for v in value),
                "tuple[int, ...]": isinstance(value, tuple)
                and all(isinstance(v, int) and not isinstance(v, bool) for v in value),
            }[kind]
            if not good:
                raise InvalidArgument(f"sampling parameter {f.name!r}: {_short(value)} is not {_WANTED[kind]}")

    def _check_ranges(self) -> None:
        bounds: list[tuple[str, float | None, float, float]] = [
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 1e-6, 1.0),
            ("top_k", self.top_k, -1, 2**31 - 1),
            ("min_p", self.min_p, 0.0, 1.0),
            ("seed", self.seed, 0, MAX_SEED),
            ("max_tokens", self.max_tokens, 1, 2**31 - 1),
            ("min_tokens", self.min_tokens, 0, self.max_tokens or 2**31 - 1),
            ("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            ("n", self.n, 1, 1),
        ]
        for name, value, low, high in bounds:
            if value is not None and not low <= value <= high:
                allowed = f"{low:g}" if low == high else f"{low:g} to {high:g}"
                raise InvalidArgument(f"sampling parameter {name!r}: {value!r} is out of range; use {allowed}")

    def _check_stops(self) -> None:
        for name, count in (("stop", len(self.stop)), ("stop_token_ids", len(self.stop_token_ids))):
            if count > MAX_STOP_STRINGS:
                raise InvalidArgument(
                    f"sampling parameter {name!r}: {count} entries; at most {MAX_STOP_STRINGS} are allowed"
                )
        for text in self.stop:
            if not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidArgument(
                    f"sampling parameter 'stop': {_short(text)} has {len(text)} characters; use 1 to {MAX_STOP_LENGTH}"
                )


_WANTED = {
    "float": "a finite number",
    "int": "an integer",
    "int | None": "an integer or null",
    "bool": "true or false",
    "tuple[str, ...]": "a string or a list of strings",
    "tuple[int, ...]": "a list of integers",
}


def _kind(field: Field[Any]) -> str:
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def _from_text(kind: str, value: Any) -> Any:
    """Undo the stringification that clients and the server's parameter types force; leave what does not parse."""
    if not isinstance(value, str):
        return value
    if kind.startswith("tuple") and not value.startswith("["):
        return value
    if kind == "float":
        try:
            return float(value)
        except ValueError:
            return value
    try:
        return json.loads(value.lower() if kind == "bool" else value)
    except ValueError:
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
