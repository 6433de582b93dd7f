# SPDX-License-Identifier: Apache-2.0
"""Logits processors give the same logits as those of transformers, for each row and step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as oracle

from quire_engine import SamplingParams
from quire_engine.sequence import Sequence
from quire_engine.worker.sampling.grammar_bitmask import TokenBitmask
from quire_engine.worker.sampling.logits_processors import LogitsProcessors
from quire_engine.worker.sampling.penalty_state import TokenCounts
from quire_engine.worker.sampling.sampler import Sampler, SamplingRow
from quire_kernels import apply_penalties

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
    """Runs the processors step by step, with a random sampled token per row."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.token_counts = TokenCounts(len(sequences), VOCAB, CPU)
        self.processors = LogitsProcessors.from_sequences(sequences, VOCAB, CPU, self.token_counts, sequences)

    def run(self, check: Callable[[torch.Tensor, torch.Tensor], None], num_steps: int = 12) -> None:
        draw = torch.Generator().manual_seed(1)
        for step in range(num_steps):
            logits = _logits(len(self.sequences), seed=step)
            assert self.processors is not None
            processed = self.processors(logits.clone(), [s.num_tokens for s in self.sequences])
            check(logits, processed)
            # From few tokens, so that many occur again.
            token_ids = torch.randint(0, 12, (len(self.sequences),), generator=draw)
            self.processors.count_tokens(token_ids)
            for sequence, token in zip(self.sequences, token_ids.tolist(), strict=True):
                sequence.output_token_ids.append(token)


def _ids(sequence: Sequence) -> torch.Tensor:
    return torch.tensor([sequence.prompt_token_ids + sequence.output_token_ids])


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    steps = Steps([_sequence(repetition_penalty=penalty), _sequence(prompt=[40], repetition_penalty=1 / penalty)])

    def check(logits: torch.Tensor, processed: torch.Tensor) -> None:
        for i, sequence in enumerate(steps.sequences):
            process = oracle.RepetitionPenaltyLogitsProcessor(sequence.params.repetition_penalty)
            torch.testing.assert_close(processed[i : i + 1], process(_ids(sequence), logits[i : i + 1].clone()))

    steps.run(check)


def test_frequency_and_presence_penalties_count_output_tokens_only() -> None:
    steps = Steps([_sequence(frequency_penalty=0.7), _sequence(presence_penalty=-1.5), _sequence(temperature=0.0)])

    def check(logits: torch.Tensor, processed: torch.Tensor) -> None:
        expected = logits.clone()
        for token in range(VOCAB):
            expected[0, token] -= 0.7 * steps.sequences[0].output_token_ids.count(token)
            expected[1, token] += 1.5 * (token in steps.sequences[1].output_token_ids)
        torch.testing.assert_close(processed, expected)

    steps.run(check)


def test_bad_words_never_forbid_all_allowed_tokens() -> None:
    """Such a combination of parameters is visible only after the bad words have begun."""
    one = _sequence(bad_words=[[4, 4]], allowed_token_ids=[4])
    two = _sequence(bad_words=[[4, 4]], allowed_token_ids=[4, 5])
    suppressed = _sequence(bad_words=[[4, 4]], allowed_token_ids=[4, 5], stops=[5], min_tokens=2)
    sequences = [one, two, suppressed]
    processors = LogitsProcessors.from_sequences(sequences, VOCAB, CPU, TokenCounts(3, VOCAB, CPU), sequences)
    assert processors is not None
    for output, expected in (([], [[4], [4, 5], [4]]), ([4], [[4], [5], [4]]), ([4, 4], [[4], [5], [5]])):
        for sequence in sequences:
            sequence.output_token_ids = list(output)
        processed = processors(_logits(3), [sequence.num_tokens for sequence in sequences])
        assert [row.isfinite().nonzero()[:, 0].tolist() for row in processed] == expected


def test_bad_words_are_transformers() -> None:
    words = [[5], [2, 7], [2, 2, 7], [3, 3, 3, 3], [11, 0]]
    steps = Steps([_sequence(bad_words=words), _sequence(bad_words=[[4, 4]], temperature=0.0)])
    num_forbidden = 0

    def check(logits: torch.Tensor, processed: torch.Tensor) -> None:
        nonlocal num_forbidden
        for i, sequence in enumerate(steps.sequences):
            process = oracle.NoBadWordsLogitsProcessor([list(word) for word in sequence.bad_words])
            # As in vLLM, only the output counts: a bad word that begins in the prompt can be completed.
            output = torch.tensor([[VOCAB - 1, *sequence.output_token_ids]])
            torch.testing.assert_close(processed[i : i + 1], process(output, logits[i : i + 1].clone()))
            num_forbidden += int((processed[i] == -INF).sum())

    steps.run(check, num_steps=60)
    assert num_forbidden > 60 + 5


def test_processors_run_in_vllms_order() -> None:
    """Masks and bias come before the penalties, so a repetition penalty multiplies a biased logit."""
    sequence = _sequence(
        bad_words=[[6]],
        logit_bias={3: 50.0, 6: 100.0},
        allowed_token_ids=[3, 6, 7],
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
    )
    sequence.output_token_ids += [3, 3, 7]
    processors = LogitsProcessors.from_sequences([sequence], VOCAB, CPU, TokenCounts(1, VOCAB, CPU), [sequence])
    assert processors is not None
    processed = processors(torch.full((1, VOCAB), -4.0), [sequence.num_tokens])[0]
    assert (processed > -INF).nonzero().flatten().tolist() == [3, 7]
    assert processed[[3, 7]].tolist() == [46.0 / 2.0 - 1.0 - 2 * 0.5, -4.0 * 2.0 - 1.0 - 0.5]


def test_batch_without_processing_has_no_processors() -> None:
    token_counts = TokenCounts(2, VOCAB, CPU)
    plain = [_sequence(temperature=0.7, top_p=0.9, logprobs=3), _sequence(stops=[1])]
    assert LogitsProcessors.from_sequences(plain, VOCAB, CPU, token_counts, plain) is None
    sequences = [_sequence(stops=[1], min_tokens=2)]
    processors = LogitsProcessors.from_sequences(sequences, VOCAB, CPU, token_counts, sequences)
    logits = _logits(1)
    assert processors is not None and processors(logits, [len(PROMPT) + 2]) is logits
    assert len(token_counts.counts) == 0


def test_penalties_keep_forbidden_tokens_and_other_rows() -> None:
    logits = torch.full((3, 4), -INF)
    logits[1] = 1.0
    weights = [torch.tensor([1.0, -2.0]), torch.tensor([2.0, -2.0]), torch.tensor([3.0, 0.5])]
    token_ids = torch.tensor([[0, 1, 2, 3, 3], [0, 0, 1, 2, 3]])
    occurred = torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.int32), torch.tensor([1, 0])
    for listed in (token_ids, None):
        apply_penalties(logits, torch.tensor([0, 2]), *occurred, *weights, listed)
    assert (logits[[0, 2]] == -INF).all() and (logits[1] == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampler_counts_sampled_tokens_and_does_not_modify_logits(dtype: torch.dtype) -> None:
    sampler = Sampler(8)
    # The two most likely tokens differ by less than the penalty of one occurrence, so they alternate.
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
    # The batch changes, but the counts stay.
    [result] = sampler(logits[:1], [SamplingRow(penalized, penalized.num_tokens)])
    assert result.token_ids == [20]


def test_bitmask_applies_to_greedy_and_random_rows() -> None:
    bits = torch.zeros(2, -(-VOCAB // 32), dtype=torch.int32)
    bits[0, 0], bits[1, 0] = 1 << 7, 1 << 8
    logits = _logits(3)
    before = logits.clone()
    sequences = [_sequence(temperature=0.0), _sequence(temperature=0.0), _sequence(logprobs=1)]
    rows = [SamplingRow(sequence, 5) for sequence in sequences]
    outputs = Sampler(8)(logits, rows, TokenBitmask([0, 2], bits))
    assert [output.token_ids for output in outputs] == [[7], [int(before[1].argmax())], [8]]
    # Log probabilities are those of the model.
    expected = before[2].float().log_softmax(-1)[8].item()
    assert outputs[2].logprobs[0][0].logprob == pytest.approx(expected, abs=1e-3)
