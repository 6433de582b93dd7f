# SPDX-License-Identifier: Apache-2.0
"""What determines the time of a step: the numbers that a recording contains and that a step model weights."""

from dataclasses import astuple, dataclass, fields
from typing import ClassVar

from quire_engine.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The work of one step."""

    constant: int
    """Always 1: the time that does not depend on the work."""
    prefill_tokens: int
    """Prompt tokens, in chunks of at most max_num_batched_tokens."""
    decode_rows: int
    """Sequences that decode a token."""
    kv_tokens: int
    """Tokens whose keys and values the decoding sequences read."""
    prefill_area: int
    """Pairs of a prompt token and a token that it attends to."""

    names: ClassVar[tuple[str, ...]]

    @classmethod
    def from_plan(cls, plan: StepPlan) -> "StepFeatures":
        """Return the features of a step."""
        prefill_tokens = decode_rows = kv_tokens = prefill_area = 0
        for span in plan.spans:
            if span.start < len(span.sequence.prompt_token_ids):
                prefill_tokens += span.length
                prefill_area += span.length * span.start + span.length * (span.length + 1) // 2
            else:
                decode_rows += span.length
                kv_tokens += span.length * span.end
        return cls(1, prefill_tokens, decode_rows, kv_tokens, prefill_area)

    def values(self) -> tuple[int, ...]:
        """Return the features in the order of `names`."""
        return astuple(self)


StepFeatures.names = tuple(field.name for field in fields(StepFeatures))
