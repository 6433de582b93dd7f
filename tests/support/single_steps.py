# SPDX-License-Identifier: Apache-2.0
"""Steps of a model runner without a scheduler: block tables, prompts and the outputs of one step."""

from collections.abc import Iterable
from typing import Any

import torch
from support.tiny_checkpoints import VOCAB

from quire_engine.sequence import BlockId, Sequence, SlotId
from quire_engine.step.plan import ScheduledSpan, SlotLoad, SpanOutput, StepPlan
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams

CONFIG = EngineConfig(
    model="m", dtype="float32", max_model_len=128, block_size=8, max_num_seqs=8, max_num_batched_tokens=64,
    enable_lora=True, max_loras=2, max_lora_rank=8,
)  # fmt: skip


class SequenceFactory:
    """Creates sequences with KV blocks of their own; greedy by default."""

    def __init__(self) -> None:
        self._next_block = 0

    def create(self, token_ids: list[int], **params: Any) -> Sequence:
        sampling_params = SamplingParams(**({"temperature": 0.0} | params))
        sequence = Sequence(0, token_ids, sampling_params, seed=0, max_output_tokens=50)
        num_blocks = -(-(len(token_ids) + 20) // CONFIG.block_size)
        sequence.block_table = [BlockId(i) for i in range(self._next_block, self._next_block + num_blocks)]
        self._next_block += num_blocks
        return sequence


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run_prompt(
    runner: DeviceModelRunner,
    token_ids: list[int],
    adapter_slot: int | None = None,
    loads: Iterable[tuple[str, int]] = (),
    **params: Any,
) -> SpanOutput:
    """Load adapters (digest, slot), then run a whole prompt alone."""
    for adapter_digest, slot in loads:
        runner.load_adapter_slot(SlotLoad(adapter_digest, SlotId(slot), slot * CONFIG.max_lora_rank))()
    slot_id = None if adapter_slot is None else SlotId(adapter_slot)
    sequence = SequenceFactory().create(token_ids, **params)
    (output,) = runner.execute(StepPlan([ScheduledSpan(sequence, 0, len(token_ids), slot_id)]))
    return output
