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
    adapter_tokens: int = 0
    """Tokens of prompts and of decoding sequences that have an adapter."""
    num_adapters: int = 0
    """Different adapters of the step."""
    copied_blocks: int = 0
    """KV blocks that the step copies to host memory or back."""
    prompts: int = 0
    """Sequences of whose prompt the step computes a part."""

    names: ClassVar[tuple[str, ...]]

    @classmethod
    def from_plan(cls, plan: StepPlan) -> "StepFeatures":
        """Return the features of a step."""
        prefill_tokens = decode_rows = kv_tokens = prefill_area = adapter_tokens = prompts = 0
        slots = set()
        for span in plan.spans:
            if span.start < len(span.sequence.prompt_token_ids):
                prompts += 1
                prefill_tokens += span.length
                prefill_area += span.length * span.start + span.length * (span.length + 1) // 2
            else:
                decode_rows += span.length
                kv_tokens += span.length * span.end
            if span.active_slot is not None:
                adapter_tokens += span.length - span.num_base_tokens
                slots.add(span.active_slot)
        copied_blocks = len(plan.swap_outs) + len(plan.swap_ins)
        work = prefill_tokens, decode_rows, kv_tokens, prefill_area, adapter_tokens, len(slots), copied_blocks, prompts
        return cls(1, *work)

    def values(self) -> tuple[int, ...]:
        """Return the features in the order of `names`."""
        return astuple(self)


StepFeatures.names = tuple(field.name for field in fields(StepFeatures))
