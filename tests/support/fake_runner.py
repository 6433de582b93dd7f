# SPDX-License-Identifier: Apache-2.0
"""Fake model runner whose KV blocks contain the tokens themselves, so that a wrong block is detected at once."""

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.scheduling.beam_search import BeamSearch, Continuation, num_candidates
from quire_engine.sequence import PLACEHOLDER_TOKEN, Sequence
from quire_engine.step.plan import BeamCandidate, ScheduledSpan, SlotLoad, SpanOutput, StepPlan
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.model.kv_layout import KVLayout

VOCAB = 997

Cell: TypeAlias = tuple[int, int, str | None, int]


class TokenEchoRunner:
    """Fake of a ModelRunner for tests of policy: real keys and values cannot be compared with tokens.

    Each cell of a block contains the (token, position, adapter, layer group) that was written to it. The next token is
    a hash of all cells in the block table, which must contain exactly the tokens of the sequence; of a group with a
    window, the tokens in the window. So aliased, stale, unloaded or overwritten blocks and slots fail the test in the
    step where they occur.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        failure_rng: random.Random | None = None,
        swap_costs: SwapCosts | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self.layout = layout or KVLayout()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.memory = MeasuredMemory(0, 0, 0, num_blocks, block_size, 0, "float32", "cpu")
        self.cells: list[list[Cell | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.swap_costs = swap_costs or SwapCosts()
        self.background_image_encoder = None
        self.host_rows = None
        self.host_state_rows = None
        self.host_cells: dict[int, list[Cell | None]] = {}
        self.states: dict[int, list[Cell]] = {}
        """By row: what was written to the state since its first token."""
        self.state_drafts: dict[int, list[Cell]] = {}
        """By row: the drafts of the last step, which the state does not contain."""
        self.host_adapters: dict[str, object] = {}
        self.digest_by_adapter_slot: dict[int, str] = {}
        self.invocation_by_path: dict[str, tuple[int, ...]] = {}
        self.num_computed = 0
        """Tokens computed so far, including those of failed steps."""
        self.batches: list[list[tuple[int, int, int]]] = []
        """Spans of each step: (sequence id, start, length)."""
        self._failure_rng = failure_rng
        self._last_tokens: dict[Sequence, int] = {}
        """The tokens that the last step sampled, for the placeholders of the next one."""

    def read_adapter(self, path: Path) -> object:
        return path

    def adapter_info(self, packed_adapter: object) -> AdapterInfo:
        # Sizes differ. Tests that only count copies set no bound on bytes.
        num_bytes = 10 + 5 * (ord(str(packed_adapter)[-1]) % 3)
        return AdapterInfo(num_bytes, 8, self.invocation_by_path.get(str(packed_adapter), ()))

    def store_adapter(self, adapter_digest: str, packed_adapter: object) -> None:
        self.host_adapters[adapter_digest] = packed_adapter

    def discard_adapter(self, adapter_digest: str) -> None:
        del self.host_adapters[adapter_digest]

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        assert slot_load.adapter_digest in self.host_adapters, "load without a host copy"
        # Until the copy is complete, the slot contains neither adapter.
        self.digest_by_adapter_slot.pop(slot_load.adapter_slot, None)
        return lambda: self.digest_by_adapter_slot.update({slot_load.adapter_slot: slot_load.adapter_digest})

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Run `plan`. As on a device, a failure is raised by the returned function, and also fails later steps."""
        try:
            outputs = self.execute(plan)
        except RuntimeError as error:
            self._last_tokens, failure = {}, error

            def fail() -> list[SpanOutput]:
                raise failure

            return fail
        return lambda: outputs

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        assert plan.spans
        if any(PLACEHOLDER_TOKEN in self._last_token(s) and s.sequence not in self._last_tokens for s in plan.spans):
            raise RuntimeError("the device failed")
        self.batches.append([(s.sequence.id, s.start, s.length) for s in plan.spans])
        # A device can fail before, between or after its writes.
        fail_at = self._random_failure_index(len(plan.spans))
        for swap in plan.swap_outs:
            self.host_cells[swap.host_block] = list(self.cells[swap.block])
        for swap in plan.swap_ins:
            self.cells[swap.block] = list(self.host_cells[swap.host_block])
        assert not {c.source for c in plan.copies} & {c.destination for c in plan.copies}
        for copy in plan.copies:
            self.cells[copy.destination] = list(self.cells[copy.source])
        for state_copy in plan.state_copies:
            self.states[state_copy.destination] = list(self.states[state_copy.source])
        for index, span in enumerate(plan.spans):
            if index == fail_at:
                raise RuntimeError("the device failed")
            self._write(span)
        if fail_at == len(plan.spans):
            raise RuntimeError("the device failed")
        outputs = [self._output(span) for span in plan.spans]
        self._last_tokens = {
            span.sequence: output.token_ids[0]
            for span, output in zip(plan.spans, outputs, strict=True)
            if output.token_ids
        }
        return outputs

    def _random_failure_index(self, num_spans: int) -> int | None:
        if self._failure_rng is None or self._failure_rng.random() >= 0.005:
            return None
        return self._failure_rng.randint(0, num_spans)

    def _write(self, span: ScheduledSpan) -> None:
        sequence = span.sequence
        assert span.start == sequence.num_computed_tokens and span.length > 0
        adapter_digest = None if span.active_slot is None else self.digest_by_adapter_slot[span.active_slot]
        assert adapter_digest == sequence.adapter_until(span.end), "the slot contains a different adapter"
        self.num_computed += span.length
        size = self.block_size
        tokens = [*self._tokens(sequence, span.start, span.end - len(span.draft_token_ids)), *span.draft_token_ids]
        for group in range(self.layout.num_groups):
            table = sequence.block_table[group :: self.layout.num_groups]
            for index, token in enumerate(tokens):
                position, digest = span.start + index, None if index < span.num_base_tokens else adapter_digest
                self.cells[table[position // size]][position % size] = (token, position, digest, group)
        self._check_cells(span, self._tokens(sequence, 0, span.start) + tokens)
        if sequence.state_row >= 0:
            row, num_drafts = sequence.state_row, len(span.draft_token_ids)
            state = self.states[row] if span.start else []
            state = state + self.state_drafts.get(row, [])[: sequence.num_replayed_tokens]
            state = state + [
                (token, span.start + i, sequence.adapter_until(span.start + i + 1), 0) for i, token in enumerate(tokens)
            ]
            expected = enumerate(self._tokens(sequence, 0, span.start) + tokens)
            expected_state = [(token, i, sequence.adapter_until(i + 1), 0) for i, token in expected]
            assert state == expected_state, f"sequence {sequence.id}: wrong state"
            self.states[row] = state[: len(state) - num_drafts]
            self.state_drafts[row] = state[len(state) - num_drafts :]

    def _output(self, span: ScheduledSpan) -> SpanOutput:
        """Return the sampled tokens of a span, or the candidates of a beam that was computed completely."""
        sequence, sampled = span.sequence, self._sample(span)
        if (group := sequence.beam_group) is None or not sampled:
            return SpanOutput(sampled)
        score = group.scores[group.sequences.index(sequence)]
        tokens = sequence.tokens(0, sequence.num_tokens)
        digest = sequence.adapter_until(len(tokens))
        return SpanOutput([], candidates=beam_candidates(tokens, digest, score, group.num_candidates))

    def _sample(self, span: ScheduledSpan) -> list[int]:
        """Return the tokens that follow the accepted draft tokens and the last token; none inside a prompt."""
        sequence, sampled = span.sequence, list[int]()
        for num_drafts in range(span.num_sampled_rows):
            tokens = self._tokens(sequence, 0, sequence.num_tokens) + list(span.draft_token_ids[:num_drafts])
            self._check_cells(span, tokens)
            sampled.append(next_token(tokens, sequence.adapter_until(len(tokens))))
            if sampled[-1:] != list(span.draft_token_ids[num_drafts : num_drafts + 1]):
                break
        return sampled

    def _check_cells(self, span: ScheduledSpan, tokens: list[int]) -> None:
        """Check what the tokens of a span read: `tokens`, the sequence up to the last of them."""
        sequence, layout = span.sequence, self.layout
        for group in range(layout.num_groups):
            table = sequence.block_table[group :: layout.num_groups]
            is_full = layout.window is None or group < layout.num_full_groups
            first = 0 if is_full else max(span.start - layout.window + 1, 0)
            visible = [cell for block in table for cell in self.cells[block]][first : len(tokens)]
            expected = [(token, i, sequence.adapter_until(i + 1), group) for i, token in enumerate(tokens)][first:]
            assert visible == expected, f"sequence {sequence.id}: its blocks contain other tokens"

    def _tokens(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Return the tokens of a span, with the placeholder replaced by its token."""
        tokens = sequence.tokens(start, end)
        assert PLACEHOLDER_TOKEN not in tokens[:-1]
        return [self._last_tokens[sequence] if token == PLACEHOLDER_TOKEN else token for token in tokens]

    @staticmethod
    def _last_token(span: ScheduledSpan) -> list[int]:
        return span.sequence.tokens(span.end - 1, span.end)


def next_token(tokens: list[int], adapter_digest: str | None) -> int:
    """Return the token that TokenEchoRunner samples after `tokens`."""
    digest = hashlib.blake2b(repr((adapter_digest, tokens)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def beam_candidates(
    tokens: list[int], adapter_digest: str | None, score: float, num_candidates: int
) -> list[BeamCandidate]:
    """Return the continuations of a beam with TokenEchoRunner."""
    digests = [hashlib.blake2b(repr((adapter_digest, tokens, i)).encode()).digest() for i in range(num_candidates)]
    candidates = {int.from_bytes(digest[:4], "little") % VOCAB: score - 0.1 - digest[4] / 64 for digest in digests}
    return sorted((BeamCandidate(*entry) for entry in candidates.items()), key=lambda c: -c.score)


def expected_beam_outputs(sequence: Sequence) -> list[list[int]]:
    """Return the outputs of a beam search with TokenEchoRunner. `sequence` has the prompt, parameters and limits."""
    search, beams, scores = BeamSearch(sequence), [replace(sequence, output_token_ids=[])], [0.0]
    size = num_candidates(sequence.params, len(sequence.stop_token_ids))
    while not search.is_finished:
        chosen = search.extend(
            [
                Continuation(beam, candidate)
                for beam, score in zip(beams, scores, strict=True)
                for candidate in beam_candidates(
                    beam.tokens(0, beam.num_tokens), sequence.adapter_until(beam.num_tokens), score, size
                )
            ]
        )
        beams = [replace(c.beam, output_token_ids=[*c.beam.output_token_ids, c.candidate.token_id]) for c in chosen]
        scores = [c.candidate.score for c in chosen]
    return [output.token_ids for output in search.best_outputs()]


def expected_output(
    prompt: list[int],
    num_tokens: int,
    adapter_digest: str | None = None,
    stop_token_ids: Mapping[int, object] | frozenset[int] = frozenset(),
) -> list[int]:
    """Return the output of an engine with TokenEchoRunner: `num_tokens` tokens, or up to the first stop token."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < num_tokens:
        tokens.append(next_token(tokens, adapter_digest))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]
