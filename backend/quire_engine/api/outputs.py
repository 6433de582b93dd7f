# SPDX-License-Identifier: Apache-2.0
"""What goes into and comes out of offline generation, as values with vLLM's names. llm.py fills them."""

import os
from dataclasses import dataclass

from quire_spec.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to generate with.

    Raises:
        InvalidArgument: a field has another type; the message names it.
    """

    lora_name: str
    lora_int_id: int
    """Not used: an adapter is what is in its folder. It keeps vLLM's scripts running."""
    lora_path: str
    """Folder with adapter_config.json and adapter_model.safetensors."""

    def __post_init__(self) -> None:
        field_types = (("lora_name", str), ("lora_int_id", int), ("lora_path", str | os.PathLike))
        for name, kind in field_types:
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidArgument(f"lora_request: {name} {str(value)[:80]!r} is a {type(value).__name__}")

    @property
    def name(self) -> str:
        """lora_name, as vLLM's has it."""
        return self.lora_name

    @property
    def path(self) -> str:
        """lora_path, as vLLM's has it."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """lora_int_id, as vLLM's has it."""
        return self.lora_int_id


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was at its position."""

    logprob: float
    rank: int
    """1 is the most likely."""
    decoded_token: str | None
    """None for a model without a tokenizer."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt."""

    index: int
    """Among the outputs of its prompt."""
    text: str
    """Empty for a model without a tokenizer."""
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over the output; None unless logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """Per position, by token id: the token taken, then the most likely ones; None unless asked for."""
    finish_reason: str | None
    """stop or length."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended the output; None for length and end-of-sequence."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """True: offline outputs are complete."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and what the model made of it."""

    request_id: str
    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per token of the prompt, None for the first; None unless asked for."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the prefix cache held."""
