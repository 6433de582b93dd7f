# SPDX-License-Identifier: Apache-2.0
"""Dataclasses of the parameters and results of `LLM.beam_search`, with the names that vLLM uses."""

from dataclasses import dataclass
from typing import Literal

from quire_engine.api.outputs import LoRARequest
from quire_engine.api.sampling_params import SamplingParams
from quire_spec.engine.param_fields import check_range
from quire_spec.engine.sampling_params import MAX_OUTPUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    Raises:
        InvalidArgument: a value has the wrong type or is out of range; the message names the parameter.
    """

    beam_width: int
    """Number of beams, which is also the number of outputs."""
    max_tokens: int
    """Maximum number of output tokens."""
    ignore_eos: bool = False
    """If True, generation continues after the end-of-sequence token."""
    temperature: float = 0.0
    """Divides the logits; 0 and 1 leave the logits unchanged."""
    length_penalty: float = 1.0
    """`length_penalty` and `early_stopping` are explained in SamplingParams."""
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token in the text."""

    def __post_init__(self) -> None:
        self.to_sampling_params()

    def to_sampling_params(self) -> SamplingParams:
        """Return the equivalent parameters for `LLM.generate`."""
        if type(self.beam_width) is int:
            check_range("beam_width", self.beam_width, 1, MAX_OUTPUTS)
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One output of a beam search."""

    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float
    """Sum of the log probabilities of the output tokens."""
    text: str | None
    """Prompt and output; None for a model without a tokenizer."""
    finish_reason: str | None
    """stop or length."""
    stop_reason: int | str | None
    """The stop token id that ended the output. None if the output ended at the maximum length or with the
    end-of-sequence token."""
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """All outputs of the beam search for one prompt."""

    sequences: list[BeamSearchSequence]
    """Outputs of the search, best first."""
