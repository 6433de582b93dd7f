# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: how one request wants its tokens chosen. Names and meanings are vLLM's.

Validated where a request enters (frontend, text process, offline LLM) and trusted from there on. A name that is not
here is refused, so that a misspelt or unsupported parameter never changes nothing silently.
"""

import difflib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from quire_spec.engine.param_fields import check_range, in_range, max_entries, normalize, parse_text, validate
from quire_spec.errors import InvalidArgument, truncated_repr

MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 128
MAX_STOP_LENGTH = 1024
"""Characters of a stop string or bad word."""
MAX_BAD_WORDS = 128
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 65536
MAX_BIAS = 100.0
"""Biases beyond are taken as this, as vLLM and OpenAI do."""
MAX_PROMPT_LOGPROBS = 2**20
"""Log probabilities of one prompt together: about 100 MB on their way to the client."""
MAX_OUTPUTS = 128
MAX_SEED = 2**63 - 1
_MAX_COUNT = 2**31 - 1


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters, given by name.

    Not frozen, because vLLM's scripts assign to them (`params.max_tokens = 64`): each value is checked when it is
    assigned, how they fit together when they are made and when they are used.

    Raises:
        InvalidArgument: a value has the wrong type or is out of range; the message names the parameter.
    """

    temperature: float = field(default=1.0, metadata=in_range(0.0, 100.0))
    """0 takes the most likely token; higher is more random."""

    top_p: float = field(default=1.0, metadata=in_range(1e-6, 1.0))
    """Keep the smallest set of tokens whose probabilities add up to this."""

    top_k: int = field(default=0, metadata=in_range(-1, _MAX_COUNT))
    """Keep this many most likely tokens; 0 or -1 keeps all."""

    min_p: float = field(default=0.0, metadata=in_range(0.0, 1.0))
    """Drop tokens less likely than this share of the most likely one."""

    presence_penalty: float = field(default=0.0, metadata=in_range(-2.0, 2.0))
    """Taken off the logit of each token that the output has; negative values favour repeating."""

    frequency_penalty: float = field(default=0.0, metadata=in_range(-2.0, 2.0))
    """Taken off a token's logit for each time that the output has it."""

    repetition_penalty: float = field(default=1.0, metadata=in_range(1e-6, 1e6))
    """Divides positive logits, and multiplies negative ones, of tokens that prompt or output have; 1 is off."""

    logit_bias: dict[int, float] | None = field(default=None, metadata=max_entries(MAX_BIASED_TOKENS))
    """Added to the logits of these token ids; from -100 to 100, values beyond are clamped."""

    allowed_token_ids: tuple[int, ...] | None = field(default=None, metadata=max_entries(MAX_ALLOWED_TOKENS))
    """Only these tokens may be taken; None allows all."""

    bad_words: tuple[str, ...] = field(default=(), metadata=max_entries(MAX_BAD_WORDS))
    """Words that the output must not have: the last token of one is not taken after those before it."""

    seed: int | None = field(default=None, metadata=in_range(-1, MAX_SEED))
    """Makes the draw repeatable, whatever else is in the batch; None or -1 draws differently each time."""

    max_tokens: int | None = field(default=16, metadata=in_range(1, _MAX_COUNT))
    """Output tokens at most; None goes on to max_model_len."""

    min_tokens: int = field(default=0, metadata=in_range(0, _MAX_COUNT))
    """Output tokens before an end-of-sequence or stop token may be taken, or a stop string end the output."""

    stop: tuple[str, ...] = field(default=(), metadata=max_entries(MAX_STOP_STRINGS))
    """Strings that end the output; they are not part of it unless include_stop_str_in_output."""

    stop_token_ids: tuple[int, ...] = field(default=(), metadata=max_entries(MAX_STOP_TOKENS))
    """Tokens that end the output."""

    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""

    logprobs: int | None = field(default=None, metadata=in_range(-1, _MAX_COUNT))
    """Log probabilities of this many most likely tokens at each position, and of the token taken; -1 is all. The
    engine's max_logprobs bounds it."""

    prompt_logprobs: int | None = field(default=None, metadata=in_range(-1, _MAX_COUNT))
    """The same for each token of the prompt but the first. Such a request computes all of its prompt."""

    detokenize: bool = True
    """Turn the output into text; False gives token ids only."""

    include_stop_str_in_output: bool = False
    """Leave the stop string at the end of the text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    spaces_between_special_tokens: bool = True
    """Keep the space that some tokenizers put between two added tokens that follow each other."""

    truncate_prompt_tokens: int | None = field(default=None, metadata=in_range(-1, _MAX_COUNT))
    """Keep only this many tokens of the prompt, its last ones; -1 keeps what fits beside max_tokens."""

    n: int = field(default=1, metadata=in_range(1, MAX_OUTPUTS))
    """Outputs per prompt. Of a seed, each has its own: seed, seed + 1 and so on. More than one needs a temperature."""

    best_of: int | None = field(default=None, metadata=in_range(1, MAX_OUTPUTS))
    """Outputs to make, of which the n of highest cumulative log probability are given, best first; None makes n."""

    def __post_init__(self) -> None:
        self._check_consistency()

    def __setattr__(self, name: str, value: Any) -> None:
        if (parameter := type(self).__dataclass_fields__.get(name)) is None:
            raise _unknown_parameter(name)
        value = validate(parameter, normalize(parameter, value))
        if name == "seed" and value == -1:
            value = None
        elif name == "logit_bias" and value is not None:
            value = {token: float(max(-MAX_BIAS, min(MAX_BIAS, b))) for token, b in value.items()} or None
        elif name in ("stop", "bad_words"):
            for text in value:
                _check_length(name, text)
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when no randomness is wanted."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True when tokens are penalized for having occurred."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def num_sequences(self) -> int:
        """Outputs that are made."""
        return self.n if self.best_of is None else self.best_of

    def clone(self) -> Self:
        """A copy, to be changed without this one."""
        return deepcopy(self)

    def child_params(self, index: int) -> Self:
        """The parameters of one of the outputs, which is a request of its own to the engine core."""
        selects_best = self.num_sequences > self.n
        return replace(
            self,
            n=1,
            best_of=None,
            seed=None if self.seed is None else (self.seed + index) % (MAX_SEED + 1),
            # Costs little, and is what the best are chosen by.
            logprobs=0 if selects_best and self.logprobs is None else self.logprobs,
            prompt_logprobs=None if index else self.prompt_logprobs,
        )

    def max_prompt_tokens(self, max_model_len: int) -> int | None:
        """Tokens of a longer prompt that are kept; None keeps all."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - (self.max_tokens or 1))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], extra_names: Sequence[str] = ()) -> Self:
        """Parameters by name, as clients send them: `parameter.from_text` says in which forms. `beside`: other names
        that go with a request, one of which an unknown name may have been meant for.

        Raises:
            InvalidArgument: a name is unknown, or a value is wrong.
        """
        known = {f.name: f for f in fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise _unknown_parameter(unknown[0], extra_names)
        return cls(**{name: parse_text(known[name], value) for name, value in values.items()})

    def to_mapping(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, fit for `from_mapping` and JSON."""
        pairs = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return {name: list(v) if isinstance(v, tuple) else v for name, v, default in pairs if v != default}

    def _check_consistency(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                f"sampling parameter 'min_tokens': {self.min_tokens} is more than max_tokens {self.max_tokens}; lower "
                "it, or raise max_tokens"
            )
        if self.best_of is not None:
            check_range("best_of", self.best_of, self.n, MAX_OUTPUTS)
        for name, count in (("n", self.n), ("best_of", self.best_of or 1)):
            if count > 1 and self.greedy:
                raise InvalidArgument(
                    f"sampling parameter {name!r}: {count} outputs of temperature 0 are all the same; use 1"
                )
        if self.truncate_prompt_tokens == 0:
            raise InvalidArgument("sampling parameter 'truncate_prompt_tokens': 0 leaves no prompt; use -1 or a count")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidArgument("sampling parameter 'allowed_token_ids': [] leaves no token to take; leave it out")
        if self.stop and not self.detokenize:
            raise InvalidArgument("sampling parameter 'stop': needs text to be looked for in; leave detokenize on")


def _unknown_parameter(name: str, extra_names: Sequence[str] = ()) -> InvalidArgument:
    known = sorted(f.name for f in fields(SamplingParams))
    suggestions = difflib.get_close_matches(
        name[:80].lower(), [other for other in (*known, *extra_names) if other != name], n=1
    )
    suggestion_text = f"did you mean {suggestions[0]}? Known" if suggestions else "known"
    return InvalidArgument(
        f"unknown sampling parameter {truncated_repr(name)}; {suggestion_text} are {', '.join(known)}"
    )


def _check_length(name: str, text: str) -> None:
    if not text or len(text) > MAX_STOP_LENGTH:
        raise InvalidArgument(
            f"sampling parameter {name!r}: {truncated_repr(text)} has {len(text)} characters; use 1 to "
            f"{MAX_STOP_LENGTH}"
        )
