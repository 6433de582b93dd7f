# SPDX-License-Identifier: Apache-2.0
"""Penalties, biases and forbidden tokens do to logits what transformers' processors do, row by row, step by step."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as oracle

from quire_engine.sequence import Sequence
from quire_engine.worker.sampling.logits_processors import LogitsProcessors
from quire_engine.worker.sampling.penalty_state import TokenCounts
from quire_engine.worker.sampling.sampler import Sampler, SamplingRow
from quire_kernels import apply_penalties
from quire_spec.engine.sampling_params import SamplingParams

VOCAB = 60
PROMPT = [1, 2, 3, 3, 9]
INF = float("inf")
CPU = torch.device("cpu")


def _sequence(bad_words: Any = (), stops: Any = (), prompt: list[int] | None = None, **params: Any) -> Sequence:
    words = tuple(map(tuple, bad_words))
    return Sequence(
        0, prompt or PROMPT, SamplingParams(**params), 0, 100, suppressed_token_ids=frozenset(stops), bad_words=words
    )


def _logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


class Steps:
    """Rows that are adjusted, and take a random token, step by step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.tally = TokenCounts(len(sequences), VOCAB, CPU)
        self.adjustment = LogitsProcessors.from_sequences(sequences, VOCAB, CPU, self.tally, sequences)

    def run(self, check: Callable[[torch.Tensor, torch.Tensor], None], num_steps: int = 12) -> None:
        draw = torch.Generator().manual_seed(1)
        for step in range(num_steps):
            logits = _logits(len(self.sequences), seed=step)
            assert self.adjustment is not None
            adjusted = self.adjustment(logits.clone(), [s.num_tokens for s in self.sequences])
            check(logits, adjusted)
            # From few tokens, so that many occur again.
            taken = torch.randint(0, 12, (len(self.sequences),), generator=draw)
            self.adjustment.count_tokens(taken)
            for sequence, token in zip(self.sequences, taken.tolist(), strict=True):
                sequence.output_token_ids.append(token)


def _ids(sequence: Sequence) -> torch.Tensor:
    return torch.tensor([sequence.prompt_token_ids + sequence.output_token_ids])


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    steps = Steps([_sequence(repetition_penalty=penalty), _sequence(prompt=[40], repetition_penalty=1 / penalty)])

    def check(logits: torch.Tensor, adjusted: torch.Tensor) -> None:
        for i, sequence in enumerate(steps.sequences):
            process = oracle.RepetitionPenaltyLogitsProcessor(sequence.params.repetition_penalty)
            torch.testing.assert_close(adjusted[i : i + 1], process(_ids(sequence), logits[i : i + 1].clone()))

    steps.run(check)


def test_frequency_and_presence_are_of_the_output_only() -> None:
    steps = Steps([_sequence(frequency_penalty=0.7), _sequence(presence_penalty=-1.5), _sequence(temperature=0.0)])

    def check(logits: torch.Tensor, adjusted: torch.Tensor) -> None:
        expected = logits.clone()
        for token in range(VOCAB):
            expected[0, token] -= 0.7 * steps.sequences[0].output_token_ids.count(token)
            expected[1, token] += 1.5 * (token in steps.sequences[1].output_token_ids)
        torch.testing.assert_close(adjusted, expected)

    steps.run(check)


def test_logit_bias_is_transformers() -> None:
    bias = {3: 5.0, 7: -100.0, 59: 0.5}
    steps = Steps([_sequence(), _sequence(logit_bias=bias)])
    process = oracle.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})

    def check(logits: torch.Tensor, adjusted: torch.Tensor) -> None:
        assert torch.equal(adjusted[0], logits[0])
        torch.testing.assert_close(adjusted[1:], process(_ids(steps.sequences[1]), logits[1:].clone()))

    steps.run(check, num_steps=2)


def test_an_allowed_token_comes_where_bad_words_would_leave_none() -> None:
    """What is wrong together from the start is refused; this shows only once the words have begun."""
    one = _sequence(bad_words=[[4, 4]], allowed_token_ids=[4])
    two = _sequence(bad_words=[[4, 4]], allowed_token_ids=[4, 5])
    held = _sequence(bad_words=[[4, 4]], allowed_token_ids=[4, 5], stops=[5], min_tokens=2)
    sequences = [one, two, held]
    adjustment = LogitsProcessors.from_sequences(sequences, VOCAB, CPU, TokenCounts(3, VOCAB, CPU), sequences)
    assert adjustment is not None
    for output, expected in (([], [[4], [4, 5], [4]]), ([4], [[4], [5], [4]]), ([4, 4], [[4], [5], [5]])):
        for sequence in sequences:
            sequence.output_token_ids = list(output)
        adjusted = adjustment(_logits(3), [sequence.num_tokens for sequence in sequences])
        assert [row.isfinite().nonzero()[:, 0].tolist() for row in adjusted] == expected


def test_bad_words_are_transformers() -> None:
    words = [[5], [2, 7], [2, 2, 7], [3, 3, 3, 3], [11, 0]]
    steps = Steps([_sequence(bad_words=words), _sequence(bad_words=[[4, 4]], temperature=0.0)])
    found = 0

    def check(logits: torch.Tensor, adjusted: torch.Tensor) -> None:
        nonlocal found
        for i, sequence in enumerate(steps.sequences):
            process = oracle.NoBadWordsLogitsProcessor([list(word) for word in sequence.bad_words])
            # As in vLLM, a word is found in the output alone: one that the prompt begins may be completed.
            output = torch.tensor([[VOCAB - 1, *sequence.output_token_ids]])
            torch.testing.assert_close(adjusted[i : i + 1], process(output, logits[i : i + 1].clone()))
            found += int((adjusted[i] == -INF).sum())

    steps.run(check, num_steps=60)
    assert found > 60 + 5


def test_min_tokens_is_transformers() -> None:
    stops = [4, 9]
    steps = Steps([_sequence(stops=stops, min_tokens=3), _sequence(stops=stops), _sequence(stops=[0], min_tokens=7)])

    def check(logits: torch.Tensor, adjusted: torch.Tensor) -> None:
        for i, sequence in enumerate(steps.sequences):
            process = oracle.MinNewTokensLengthLogitsProcessor(
                len(sequence.prompt_token_ids),
                sequence.params.min_tokens,
                sorted(sequence.suppressed_token_ids),
                device="cpu",
            )
            torch.testing.assert_close(adjusted[i : i + 1], process(_ids(sequence), logits[i : i + 1].clone()))

    steps.run(check)


def test_allowed_token_ids() -> None:
    steps = Steps([_sequence(allowed_token_ids=[5, 30]), _sequence()])

    def check(logits: torch.Tensor, adjusted: torch.Tensor) -> None:
        assert (adjusted[0] > -INF).nonzero().flatten().tolist() == [5, 30]
        assert torch.equal(adjusted[0, [5, 30]], logits[0, [5, 30]])
        assert torch.equal(adjusted[1], logits[1])

    steps.run(check, num_steps=2)


def test_everything_in_vllms_order() -> None:
    """Masks and bias come before the penalties: a biased logit is what a repetition penalty multiplies."""
    sequence = _sequence(
        bad_words=[[6]],
        logit_bias={3: 50.0, 6: 100.0},
        allowed_token_ids=[3, 6, 7],
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
    )
    sequence.output_token_ids += [3, 3, 7]
    adjustment = LogitsProcessors.from_sequences([sequence], VOCAB, CPU, TokenCounts(1, VOCAB, CPU), [sequence])
    assert adjustment is not None
    adjusted = adjustment(torch.full((1, VOCAB), -4.0), [sequence.num_tokens])[0]
    assert (adjusted > -INF).nonzero().flatten().tolist() == [3, 7]
    assert adjusted[[3, 7]].tolist() == [46.0 / 2.0 - 1.0 - 2 * 0.5, -4.0 * 2.0 - 1.0 - 0.5]


def test_who_asks_for_nothing_pays_nothing() -> None:
    tally = TokenCounts(2, VOCAB, CPU)
    plain = [_sequence(temperature=0.7, top_p=0.9, logprobs=3), _sequence(stops=[1])]
    assert LogitsProcessors.from_sequences(plain, VOCAB, CPU, tally, plain) is None
    waiting = [_sequence(stops=[1], min_tokens=2)]
    held = LogitsProcessors.from_sequences(waiting, VOCAB, CPU, tally, waiting)
    logits = _logits(1)
    assert held is not None and held(logits, [len(PROMPT) + 2]) is logits
    assert len(tally.counts) == 0


def _had(tally: TokenCounts, row: int) -> tuple[list[int], list[int]]:
    """Tokens of the prompt, and of the output as often as it has them."""
    counts = tally.counts[row]
    return tally.in_prompt[row].nonzero().flatten().tolist(), torch.arange(VOCAB).repeat_interleave(counts).tolist()


def test_a_row_of_the_tally_is_free_when_its_sequence_is_gone() -> None:
    tally = TokenCounts(2, VOCAB, CPU)
    first, second = _sequence(repetition_penalty=2.0, prompt=[1, 2]), _sequence(prompt=[1, 3])
    first.output_token_ids += [4, 4, 5]
    (row,) = tally.rows_for([first], [first])
    tally.add([row], torch.tensor([4]))
    assert tally.rows_for([first, second], [first, second]) == [row, 1 - row]
    assert _had(tally, row) == ([1, 2], [4, 4, 4, 5])
    del first
    gc.collect()
    third = _sequence(prompt=[7])
    assert tally.rows_for([second, third], [second, third]) == [1 - row, row]
    assert _had(tally, row) == ([7], [])


def test_who_does_not_run_gives_its_row_to_one_that_does_and_is_counted_again() -> None:
    tally = TokenCounts(2, VOCAB, CPU)
    kept, preempted, new = (_sequence(prompt=[i]) for i in range(3))
    rows = tally.rows_for([kept, preempted], [kept, preempted])
    for sequence, token in ((kept, 10), (preempted, 11)):
        sequence.output_token_ids.append(token)
    tally.add(rows, torch.tensor([10, 11]))
    assert tally.rows_for([kept, new], [kept, new]) == rows
    assert [_had(tally, row) for row in rows] == [([0], [10]), ([2], [])]
    assert tally.rows_for([preempted], [preempted, new]) == rows[:1]
    assert [_had(tally, row) for row in rows] == [([1], [11]), ([2], [])]
    assert len(tally.counts) == len(tally.in_prompt) == 2


def test_the_tally_lists_what_a_row_has_had_however_long_it_gets() -> None:
    tally = TokenCounts(2, VOCAB, CPU)
    draw = torch.Generator().manual_seed(2)
    sequences = [_sequence(prompt=[7, 7, 8]), _sequence(prompt=[1])]
    sequences[1].output_token_ids += [3, 3]
    rows = tally.rows_for(sequences, sequences)
    for step in range(600):
        taken = torch.randint(0, VOCAB if step > 300 else 5, (2,), generator=draw)
        tally.add(rows, taken)
        for sequence, token in zip(sequences, taken.tolist(), strict=True):
            sequence.output_token_ids.append(token)
        if step % 97 == 0:
            token_ids = tally.token_ids(rows)
            assert token_ids is not None
            for listed, row, sequence in zip(token_ids, rows, sequences, strict=True):
                assert set(listed.tolist()) == {*sequence.prompt_token_ids, *sequence.output_token_ids}
                output = torch.tensor(sequence.output_token_ids)
                assert torch.equal(tally.counts[row], output.bincount(minlength=VOCAB).int())


def test_penalize_leaves_forbidden_tokens_forbidden_and_other_rows_alone() -> None:
    logits = torch.full((3, 4), -INF)
    logits[1] = 1.0
    weights = [torch.tensor([1.0, -2.0]), torch.tensor([2.0, -2.0]), torch.tensor([3.0, 0.5])]
    token_ids = torch.tensor([[0, 1, 2, 3, 3], [0, 0, 1, 2, 3]])
    occurred = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.int32), torch.tensor([1, 0])
    for listed in (token_ids, None):
        apply_penalties(logits, torch.tensor([0, 2]), *occurred, *weights, listed)
    assert (logits[[0, 2]] == -INF).all() and (logits[1] == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sampler_counts_what_it_takes_and_leaves_logits_alone(dtype: torch.dtype) -> None:
    sampler = Sampler(8)
    # The two likeliest tokens differ by less than one occurrence costs, so that they alternate.
    logits = torch.zeros(2, VOCAB, dtype=dtype)
    logits[:, 20], logits[:, 30] = 10.0, 9.0
    before = logits.clone()
    penalized, plain = _sequence(temperature=0.0, frequency_penalty=1.5), _sequence(temperature=0.0)
    for _ in range(6):
        for result, sequence in zip(
            sampler(logits, [SamplingRow(s, s.num_tokens) for s in (penalized, plain)]), (penalized, plain), strict=True
        ):
            sequence.output_token_ids += result.token_ids
    assert penalized.output_token_ids == [20, 30, 20, 30, 20, 30]
    assert plain.output_token_ids == [20] * 6
    assert torch.equal(logits, before)
    # The batch changes: what was counted stays.
    [result] = sampler(logits[:1], [SamplingRow(penalized, penalized.num_tokens)])
    assert result.token_ids == [20]


def test_a_mask_of_the_step_holds_for_greedy_and_drawn_rows() -> None:
    mask = torch.zeros(3, VOCAB, dtype=torch.bool)
    mask[0, 7] = mask[1, 8] = True
    mask[2] = True
    logits = _logits(3)
    rows = [SamplingRow(s, 5) for s in (_sequence(temperature=0.0), _sequence(), _sequence(temperature=0.0))]
    tokens = [result.token_ids[0] for result in Sampler(8)(logits, rows, mask)]
    assert tokens == [7, 8, int(logits[2].argmax())]
