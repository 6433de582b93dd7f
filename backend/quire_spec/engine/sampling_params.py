# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of one request. They have the same names and meanings as in vLLM.

The values are checked once, where a request enters: in the stub, in the OpenAI front, or in the offline `LLM`. There,
`SamplingParams.from_mapping` or `SamplingParams.checked` builds an immutable value, which travels to the engine core as
it is. An unknown name is rejected. Otherwise, a parameter that is misspelt or not supported would be ignored silently.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from msgspec import Meta, Struct, structs, to_builtins

from quire_spec.engine.param_fields import check_parameter, check_range, describe_parameters, parse_text
from quire_spec.engine.structured_outputs import FORMER_NAMES, StructuredOutputsParams, merge_former_names
from quire_spec.errors import InvalidArgument, truncated_repr

MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 128
MAX_STOP_LENGTH = 1024
"""Maximum number of characters that a stop string or a bad word can have."""
MAX_BAD_WORDS = 128
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 65536
MAX_LOGPROB_TOKENS = 128
MAX_BIAS = 100.0
"""Largest absolute value of a logit bias. Larger values are clamped, as in vLLM and OpenAI's API."""
MAX_PROMPT_LOGPROBS = 2**20
"""Maximum number of log probabilities that are returned for one prompt in total. They take about 100 MB in the
response."""
MAX_OUTPUTS = 128
MAX_SEED = 2**63 - 1
_MAX_COUNT = 2**31 - 1
_StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """Sampling parameters of one request. All of them are keyword arguments.

    The constructor checks nothing. `checked` and `from_mapping` check the values of users and clients. The class of the
    offline API allows assignments (quire_engine.api.sampling_params).
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    """With 0, the most likely token is always selected. A higher value makes the output more random."""

    top_p: Annotated[float, Meta(ge=1e-6, le=1.0)] = 1.0
    """Sample only from the most likely tokens: the smallest set of them whose probabilities add up to at least this
    value."""

    top_k: Annotated[int, Meta(ge=-1, le=_MAX_COUNT)] = 0
    """Sample only from this number of most likely tokens. With 0 or -1, all tokens can be sampled."""

    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Exclude a token if its probability is less than min_p times the probability of the most likely token."""

    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """This value is subtracted from the logit of each token that already occurs in the output. A negative value favours
    repetition."""

    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    """The logit of a token is reduced by this value once for each occurrence of the token in the output."""

    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    """Applies to tokens that occur in the prompt or the output. A positive logit is divided by this value, and a
    negative logit is multiplied by it. 1 disables the penalty."""

    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    """Maps the id of a token to a value that is added to the token's logit. Each value is clamped to the range from
    -100 to 100."""

    allowed_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] | None = None
    """Only tokens with these ids can be sampled; None allows all tokens."""

    bad_words: Annotated[tuple[_StopString, ...], Meta(max_length=MAX_BAD_WORDS)] = ()
    """Words that the output must not contain. If only the last token of such a word is missing at the end of the
    output, that token cannot be sampled next."""

    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    """A request with a seed samples the same tokens each time, and the other requests in the batch do not change them.
    None or -1: it samples different tokens each time."""

    max_tokens: Annotated[int, Meta(ge=1, le=_MAX_COUNT)] | None = 16
    """Maximum number of output tokens. None: the output can be as long as max_model_len allows."""

    min_tokens: Annotated[int, Meta(ge=0, le=_MAX_COUNT)] = 0
    """Minimum number of output tokens. Until the output has this number of tokens, it does not end at an
    end-of-sequence token, a stop token or a stop string."""

    stop: Annotated[tuple[_StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    """The output ends when its text contains one of these strings. The returned text contains the stop string only if
    include_stop_str_in_output is set."""

    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    """The output ends with the first token whose id is in this list."""

    ignore_eos: bool = False
    """Do not end the output at an end-of-sequence token."""

    logprobs: Annotated[int, Meta(ge=-1, le=_MAX_COUNT)] | None = None
    """At each position, log probabilities are returned for this number of the most likely tokens.

    The log probability of the sampled token is returned, too. With -1, the log probabilities of all tokens are
    returned. The engine's max_logprobs is the largest value that is allowed.
    """

    logprob_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_LOGPROB_TOKENS)] | None = None
    """If logprobs is set, return the log probabilities of these token ids instead of those of the most likely
    tokens."""

    prompt_logprobs: Annotated[int, Meta(ge=-1, le=_MAX_COUNT)] | None = None
    """At each prompt position except the first, log probabilities are returned for this number of the most likely
    tokens. The whole prompt is then computed, even if the prefix cache contains a part of it."""

    detokenize: bool = True
    """Convert the output to text. If false, only token ids are returned."""

    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    spaces_between_special_tokens: bool = True
    """Some tokenizers insert a space between two adjacent added tokens. Keep this space."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_MAX_COUNT)] | None = None
    """Number of prompt tokens to keep. -1 means max_model_len minus max_tokens."""

    truncation_side: Literal["left", "right"] = "left"
    """Side of the prompt at which tokens are removed if truncate_prompt_tokens is set."""

    thinking_token_budget: Annotated[int, Meta(ge=-1, le=_MAX_COUNT)] | None = None
    """Maximum number of reasoning tokens. When the reasoning has this length, the engine forces the end mark of the
    reasoning. None or -1: the length is not limited."""

    n: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS)] = 1
    """Number of outputs that are returned for each prompt. If a seed is set, output number i uses seed + i. More than
    one output requires a temperature above 0."""

    best_of: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS)] | None = None
    """Number of outputs to generate. The default is n. Of these outputs, the n with the highest cumulative log
    probability are returned."""

    use_beam_search: bool = False
    """Use a beam search instead of sampling. The search uses best_of beams. The n outputs with the highest scores are
    returned."""

    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] = 1.0
    """An exponent. The score of a beam is (sum of its log probabilities) / length ** length_penalty."""

    early_stopping: bool | Literal["never"] = False
    """Decides when a beam search ends.

    With True, it ends when best_of outputs are complete. With False, it ends when best_of outputs are complete and it
    is unlikely that another beam gets a higher score. With "never", it ends when best_of outputs are complete and it is
    impossible that another beam gets a higher score.
    """

    structured_outputs: StructuredOutputsParams | None = None
    """Constraint that the output must match, such as a JSON schema. None allows any text."""

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always selected."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if any penalty is enabled."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def num_logprobs(self) -> int | None:
        """Number of tokens whose log probabilities are returned at each position, not counting the sampled token. None:
        no log probabilities are returned."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate. For a beam search, this is the number of beams."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_results(self) -> int:
        """Number of outputs that the engine core returns for the request."""
        return self.n if self.use_beam_search else self.num_sequences

    def child_params(self, index: int) -> Self:
        """Return the parameters for output number `index`. The engine core treats each output as a separate sequence.

        A beam search is an exception: the engine core treats it as one sequence, although it has several outputs.
        """
        if self.use_beam_search:
            return self
        selects_best = self.num_sequences > self.n
        return structs.replace(
            self,
            n=1,
            best_of=None,
            seed=None if self.seed is None else _offset_seed(self.seed, index),
            # To select the best outputs, their cumulative log probabilities are needed. logprobs=0 provides them at
            # little cost.
            logprobs=0 if selects_best and self.logprobs is None else self.logprobs,
            prompt_logprobs=None if index else self.prompt_logprobs,
            # The core receives the constraint separately, as a checked grammar. See SequenceRequest.
            structured_outputs=None,
        )

    def max_prompt_tokens(self, max_model_len: int) -> int | None:
        """Return how many tokens of the prompt to keep. None means all of them."""
        if self.truncate_prompt_tokens != -1:
            return self.truncate_prompt_tokens
        return max(1, max_model_len - (self.max_tokens or 1))

    def truncate_prompt(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Return `token_ids`, shortened to `max_prompt_tokens(max_model_len)` tokens."""
        if (limit := self.max_prompt_tokens(max_model_len)) is None:
            return token_ids
        return token_ids[-limit:] if self.truncation_side == "left" else token_ids[:limit]

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Build an instance from values that a user or a client gave. They can have all forms that vLLM accepts.

        Raises:
            InvalidArgument: a name is unknown, a value has the wrong type or is out of range, or the values contradict
                each other. The message names the parameter.
        """
        params = cls(**{name: check_value(name, value) for name, value in values.items()})
        params.check_consistency()
        return params

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], extra_names: Sequence[str] = ()) -> Self:
        """Build an instance from the parameters that a client sent.

        `param_fields.parse_text` describes the forms in which a client can send a value.

        `extra_names` are the names of other parameters that a request can have. If a name is unknown, the error can
        suggest one of them.

        Raises:
            InvalidArgument: a name is unknown or a value is wrong.
        """
        values = merge_former_names(values)
        if unknown := sorted(values.keys() - _PARAMETERS.keys()):
            raise _unknown_parameter(unknown[0], extra_names)
        return cls.checked(**{name: parse_text(_PARAMETERS[name], value) for name, value in values.items()})

    def to_mapping(self) -> dict[str, Any]:
        """Return the parameters that differ from their defaults. The result can be written as JSON, and `from_mapping`
        can read it."""
        mapping: dict[str, Any] = to_builtins(self)
        return mapping

    def check_consistency(self) -> None:
        """Raise InvalidArgument if the values contradict each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument(
                f"sampling parameter 'min_tokens': must be at most max_tokens {self.max_tokens}, got "
                f"{self.min_tokens}; lower it, or raise max_tokens"
            )
        if self.best_of is not None:
            check_range("best_of", self.best_of, self.n, MAX_OUTPUTS)
        for name, count in (("n", self.n), ("best_of", self.best_of or 1)):
            if count > 1 and self.greedy and not self.use_beam_search:
                raise InvalidArgument(
                    f"sampling parameter {name!r}: must be 1 with temperature 0, because all outputs would be equal, "
                    f"got {count}; use 1, or set a temperature"
                )
        self._check_beam_search()
        if self.truncate_prompt_tokens == 0:
            raise InvalidArgument("sampling parameter 'truncate_prompt_tokens': must be -1 or at least 1, got 0")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidArgument(
                "sampling parameter 'allowed_token_ids': must not be empty; omit it to allow all tokens"
            )
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise InvalidArgument(
                "sampling parameter 'logprob_token_ids': requires logprobs; set logprobs, or omit logprob_token_ids"
            )
        if self.logprob_token_ids is not None and not self.logprob_token_ids:
            raise InvalidArgument("sampling parameter 'logprob_token_ids': must not be empty; omit it")
        if self.stop and not self.detokenize:
            raise InvalidArgument("sampling parameter 'stop': requires detokenize; omit 'stop', or set detokenize")

    def _check_beam_search(self) -> None:
        if self.use_beam_search:
            for name in ("structured_outputs", "prompt_logprobs", "thinking_token_budget"):
                if getattr(self, name) is not None:
                    raise InvalidArgument(
                        f"sampling parameter {name!r}: not allowed with use_beam_search; omit one of the two"
                    )
            return
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if (value := getattr(self, name)) != default:
                raise InvalidArgument(
                    f"sampling parameter {name!r}: requires use_beam_search, got {value!r}; omit it, or set "
                    "use_beam_search"
                )


def _offset_seed(seed: int, offset: int) -> int:
    """Return the seed of an output. After the largest seed comes 0."""
    return seed + offset if seed < 0 else (seed + offset) % (MAX_SEED + 1)


def check_value(name: str, value: Any) -> Any:
    """Return the value of one parameter in the form that the field stores. Raises InvalidArgument if the name is
    unknown or the value is invalid."""
    if (parameter := _PARAMETERS.get(name)) is None:
        raise _unknown_parameter(name)
    value = check_parameter(parameter, value)
    if name in ("seed", "thinking_token_budget") and value == -1:
        return None
    if name == "logit_bias" and value is not None:
        return {token: float(max(-MAX_BIAS, min(MAX_BIAS, bias))) for token, bias in value.items()} or None
    return value


def _unknown_parameter(name: str, extra_names: Sequence[str] = ()) -> InvalidArgument:
    known = sorted(_PARAMETERS)
    suggestions = difflib.get_close_matches(
        name[:80].lower(), [other for other in (*known, *extra_names, *FORMER_NAMES) if other != name], n=1
    )
    suggestion_text = f"did you mean {suggestions[0]}? Known parameters" if suggestions else "known parameters"
    return InvalidArgument(
        f"unknown sampling parameter {truncated_repr(name)}; {suggestion_text} are {', '.join(known)}"
    )


_PARAMETERS = describe_parameters(SamplingParams)
