# SPDX-License-Identifier: Apache-2.0
"""Dataclasses of the inputs and results of offline generation, with the names that vLLM uses. `LLM` creates the
results."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from quire_spec.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to use for generation.

    Raises:
        InvalidArgument: a field has a wrong type; the message names it.
    """

    lora_name: str
    lora_int_id: int
    """Ignored, because the content of the folder identifies an adapter. Exists for compatibility with vLLM."""
    lora_path: str
    """Folder with adapter_config.json and adapter_model.safetensors."""
    base_model_name: str | None = field(default=None, kw_only=True, compare=False)
    """Ignored, and so are the fields below. They exist for compatibility with vLLM."""
    load_inplace: bool = field(default=False, kw_only=True, compare=False)
    """The content of the folder is always checked."""
    long_lora_max_len: int | None = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        field_types = (("lora_name", str), ("lora_int_id", int), ("lora_path", str | os.PathLike))
        for name, kind in field_types:
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidArgument(
                    f"lora_request: {name} has the wrong type {type(value).__name__}, got {str(value)[:80]!r}"
                )

    @property
    def name(self) -> str:
        """Alias of lora_name, as in vLLM."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Alias of lora_path, as in vLLM."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """Alias of lora_int_id, as in vLLM."""
        return self.lora_int_id


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token at its position."""

    logprob: float
    rank: int
    """Rank of the token; 1 is the most likely token."""
    decoded_token: str | None
    """None for a model without a tokenizer."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt."""

    index: int
    """Index among the outputs of its prompt."""
    text: str
    """Empty for a model without a tokenizer."""
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum of the log probabilities of the output tokens; None unless logprobs were requested."""
    logprobs: list[dict[int, Logprob]] | None
    """One dict for each output token. Its keys are token ids: first the sampled token, then the most likely tokens.
    None unless logprobs were requested.
    """
    finish_reason: str | None
    """stop or length."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended the output. None if the output ended at the maximum length or with
    the end-of-sequence token."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Return True, because offline outputs are complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, with the names of vLLM's RequestStateStats. Fields whose names end in _ts are times in
    seconds, which are all measured with the same clock."""

    arrival_time: float
    """Seconds since the epoch."""
    queued_ts: float
    """When the engine received the request."""
    scheduled_ts: float
    """Start of the first step that ran one of its sequences."""
    first_token_ts: float
    """End of the step that sampled its first token."""
    last_token_ts: float
    num_generation_tokens: int
    """Number of tokens of all outputs, including outputs that best_of drops."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from the arrival of the request to its first token."""
        return self.first_token_ts - self.queued_ts


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its outputs."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry for each prompt token, with its log probabilities; the entry of the first token is None. The field is
    None unless prompt_logprobs were requested."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache."""
    metrics: RequestMetrics | None = field(default=None, compare=False)
    """Times of the request."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of elements."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of `LLM.encode`."""

    data: "Tensor"
    """float32: [size] for a prompt, or [num_tokens, size] for its tokens."""


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of a prompt."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[_T]):
    """The result of a prompt whose hidden states are pooled."""

    request_id: str
    outputs: _T
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0
    """Number of prompt tokens that were found in the prefix cache."""

    def with_outputs(self, kind: Callable[[_T], _U]) -> "PoolingRequestOutput[_U]":
        """Return a copy whose outputs are converted."""
        return PoolingRequestOutput(
            self.request_id, kind(self.outputs), self.prompt_token_ids, self.finished, self.num_cached_tokens
        )
