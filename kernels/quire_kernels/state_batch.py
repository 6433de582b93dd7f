# SPDX-License-Identifier: Apache-2.0
"""Which states the tokens of a step read and write.

A step can compute draft tokens, and the state of a sequence must not contain a rejected one. An old state cannot be
computed from a newer one. Therefore, the state keeps only the tokens before the drafts, and the inputs of the drafts
are kept beside it. The next step computes the accepted ones again, before its own tokens. For a Gated DeltaNet layer
of Qwen3.5-4B, the input of a token has 16 KB and a state has 2 MB. A step with three drafts reads a state once and
writes it once, like a step without drafts, and the processor's cache holds it meanwhile. A state for each draft, as in
vLLM, would be written four times, and would take four times the memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.host_device_copy import to_device_async

PROMPT_CHUNK = 64
"""Number of tokens of a prompt that a kernel for a GPU computes at once."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A prompt chunk of a step."""

    row: int
    """Row of the sequence's state."""
    start: int
    """Index of its first token in the batch."""
    end: int


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """The prompts of a step, and their chunks of `PROMPT_CHUNK` tokens, for kernels that compute all of them at once.

    The chunks of a prompt are adjacent. The last one can be shorter. An empty prompt has no chunk.
    """

    rows: Tensor
    """[num_prompts] int64: rows of the states of the prompts."""
    starts: Tensor
    """[num_prompts] int64: index of the first token of each prompt in the batch."""
    ends: Tensor
    """[num_prompts] int64: index after the last token of each prompt."""
    first_chunks: Tensor
    """[num_prompts] int64: index of the first chunk of each prompt."""
    prompts: Tensor
    """[num_chunks] int64: index of the prompt of each chunk."""


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Inputs of drafts that are kept for the next step, and those that this step computes again.

    The kept inputs are rows of a tensor, one for each draft of each state.
    """

    kept_tokens: Tensor
    """[num_drafts] int64: indices of the draft tokens in the step."""
    kept_rows: Tensor
    """[num_drafts] int64: rows for the inputs of these tokens."""
    read_rows: Tensor
    """[num_replayed] int64: rows with the inputs of the tokens that are computed again."""
    order: Tensor
    """[num_replayed + num_tokens] int64: the tokens of the batch. The first numbers stand for `read_rows`, and the
    numbers after them for the tokens of the step."""
    outputs: Tensor
    """[num_tokens] int64: index of each token of the step in the batch."""


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The tokens that a layer with states computes in a step, and the states that they read and write.

    They are the tokens of the step and, before them, the accepted drafts of the last step; see `drafts`. The tokens of
    a span that decodes are computed one after the other. Therefore, a token has the same output with and without
    drafts.
    """

    decode_tokens: Tensor
    """[num_decodes] int64: index of the first token of each span that decodes, longest span first."""
    decode_rows: Tensor
    """[num_decodes] int64: rows of their states. All rows are different."""
    decode_lengths: Tensor
    """[num_decodes] int64: number of their tokens."""
    decode_kept: Tensor
    """[num_decodes] int64: number of tokens after which their states are kept. The tokens after them are drafts."""
    rounds: tuple[tuple[int, Tensor | None], ...]
    """For each i: how many of these spans have a token i, and which of them keep the state after it, [num_kept] int64;
    None stands for all."""
    prompts: tuple[StateSpan, ...]
    """The other spans."""
    chunks: PromptChunks | None
    """The same spans; None if there are none."""
    rows: Tensor
    """[num_spans] int64: rows of the states of all spans."""
    starts: Tensor
    """[num_spans + 1] int64: index of the first token of each span, and the number of tokens."""
    kept: Tensor
    """[num_spans] int64: number of tokens after which the states of all spans are kept."""
    has_all: bool
    """Whether `decode_tokens` contains all tokens, in the order of the batch."""
    drafts: DraftInputs | None
    """None if the step has no draft, and computes none again."""


def build_state_batch(
    rows: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    num_drafts: Sequence[int] = (),
    num_replayed: Sequence[int] = (),
    max_drafts: int = 0,
) -> StateBatch:
    """Return the batch for the spans of a step.

    Args:
        rows: rows of the states of the spans.
        lengths: numbers of tokens of the spans, with their drafts.
        device: the device of the states.
        num_drafts: number of drafts at the end of each span; empty if there are none.
        num_replayed: for each span, how many drafts of the last step it computes again; empty if there are none.
        max_drafts: number of drafts of a state whose inputs can be kept.
    """
    num_drafts, num_replayed = num_drafts or [0] * len(rows), num_replayed or [0] * len(rows)
    decodes, prompts, starts, kept = [], [], [0], []
    for row, length, drafts, replayed in zip(rows, lengths, num_drafts, num_replayed, strict=True):
        start, total = starts[-1], replayed + length
        kept.append(total - drafts)
        if length - drafts == 1:
            decodes.append((start, row, total, total - drafts))
        else:
            prompts.append(StateSpan(row, start, start + total))
        starts.append(start + total)
    decodes.sort(key=lambda decode: -decode[2])
    columns = [list(column) for column in zip(*decodes, strict=True)] or [[], [], [], []]
    numbers = (
        to_device_async(torch.tensor(each, dtype=torch.int64), device) for each in (*columns, rows, starts, kept)
    )
    is_simple = not decodes or decodes[0][2] == 1
    decode_tokens, decode_rows, decode_lengths, decode_kept, all_rows, bounds, all_kept = numbers
    return StateBatch(
        decode_tokens=decode_tokens,
        decode_rows=decode_rows,
        decode_lengths=decode_lengths,
        decode_kept=decode_kept,
        rounds=((len(decodes), None),) if is_simple else _rounds(columns[2], columns[3], device),
        prompts=tuple(prompts),
        chunks=_prompt_chunks(prompts, device) if prompts else None,
        rows=all_rows,
        starts=bounds,
        kept=all_kept,
        has_all=is_simple and not prompts,
        drafts=_draft_inputs(rows, lengths, device, num_drafts, num_replayed, max_drafts)
        if any(num_drafts) or any(num_replayed)
        else None,
    )


def _prompt_chunks(prompts: Sequence[StateSpan], device: torch.device) -> PromptChunks:
    first_chunks, chunks = [], []  # type: list[int], list[int]
    for index, span in enumerate(prompts):
        first_chunks.append(len(chunks))
        chunks += [index] * -(-(span.end - span.start) // PROMPT_CHUNK)
    rows, starts, ends = zip(*((span.row, span.start, span.end) for span in prompts), strict=True)
    numbers = (rows, starts, ends, first_chunks, chunks)
    return PromptChunks(*(to_device_async(torch.tensor(each, dtype=torch.int64), device) for each in numbers))


def _rounds(lengths: list[int], kept: list[int], device: torch.device) -> tuple[tuple[int, Tensor | None], ...]:
    """See StateBatch.rounds. The lengths decrease."""
    rounds = []
    for i in range(lengths[0]):
        ends = torch.tensor([span for span, num in enumerate(kept) if num == i + 1], dtype=torch.int64)
        rounds.append((sum(length > i for length in lengths), to_device_async(ends, device)))
    return tuple(rounds)


def _draft_inputs(
    rows: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    num_drafts: Sequence[int],
    num_replayed: Sequence[int],
    max_drafts: int,
) -> DraftInputs:
    kept_tokens, kept_rows, read_rows, outputs = ([] for _ in range(4))  # type: list[int], list[int], list[int], list[int]
    order, end, first = [], 0, sum(num_replayed)
    for row, length, drafts, replayed in zip(rows, lengths, num_drafts, num_replayed, strict=True):
        order += [*range(len(read_rows), len(read_rows) + replayed), *range(first + end, first + end + length)]
        outputs += range(len(order) - length, len(order))
        read_rows += range(row * max_drafts, row * max_drafts + replayed)
        end += length
        kept_tokens += range(end - drafts, end)
        kept_rows += range(row * max_drafts, row * max_drafts + drafts)
    numbers = (kept_tokens, kept_rows, read_rows, order, outputs)
    return DraftInputs(*(to_device_async(torch.tensor(each, dtype=torch.int64), device) for each in numbers))
