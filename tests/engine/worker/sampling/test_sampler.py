# SPDX-License-Identifier: Apache-2.0
"""Sampling: greedy, random according to softmax, and independent of the rest of the batch."""

import math

import pytest
import torch
from transformers.generation import logits_process

from quire_engine import SamplingParams
from quire_engine.sequence import Sequence
from quire_engine.worker.sampling import sampler as sampler_module
from quire_engine.worker.sampling.sampler import Sampler, SamplingRow

VOCAB = 50
PROMPT = [1, 2, 3]


def _row(position=3, seed=0, stops=(), **params):
    sequence = Sequence(0, PROMPT, SamplingParams(**params), seed, 100, suppressed_token_ids=frozenset(stops))
    return SamplingRow(sequence, position)


def _tokens(logits, rows):
    sampled = Sampler(64)(logits, rows)
    assert all(len(result.token_ids) == 1 for result in sampled)
    return [result.token_ids[0] for result in sampled]


def _logits(num_rows, vocab=VOCAB, seed=0, scale=2.0):
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def _chi_square(tokens, probs):
    """Return statistic and degrees of freedom; tokens expected less than 5 times are pooled."""
    counts = torch.tensor(tokens).bincount(minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    pooled = (torch.cat((x[common], x[~common].sum()[None])) for x in (counts, expected))
    counts, expected = pooled
    counts, expected = counts[expected > 0], expected[expected > 0]
    return ((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1


def _fits(tokens, probs):
    """Return whether the statistic is within 4 standard deviations of its mean for samples of `probs`."""
    statistic, freedom = _chi_square(tokens, probs)
    return statistic <= freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_selects_the_most_likely_token():
    logits = _logits(7)
    assert _tokens(logits, [_row(temperature=0.0)] * 7) == logits.argmax(-1).tolist()


PARAMS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def _expected(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Return the distribution of transformers, in vLLM's order: temperature, min_p, top_k, top_p."""
    scores = logits[None].double() / temperature
    warpers = [logits_process.MinPLogitsWarper(min_p)] if min_p else []
    warpers += [logits_process.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [logits_process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warp in warpers:
        scores = warp(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_samples_follow_softmax(params):
    logits = _logits(1, scale=1.0)
    num = 4_000
    over_seeds = _tokens(logits.expand(num, -1), [_row(seed=i, **params) for i in range(num)])
    over_positions = _tokens(logits.expand(num, -1), [_row(position=3 + i, seed=5, **params) for i in range(num)])
    expected = _expected(logits[0], **params)
    assert _fits(over_seeds, expected)
    assert _fits(over_positions, expected)


def test_sample_depends_on_its_own_row_only(monkeypatch):
    logits = _logits(40, vocab=700)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.3}]
    rows = [_row(position=3 + i % 5, seed=i, **kinds[i % len(kinds)]) for i in range(40)]
    together = _tokens(logits, rows)
    assert together == [_tokens(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    assert _tokens(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    monkeypatch.setattr(sampler_module, "CPU_CHUNK_BYTES", 3 * 4 * 700)
    assert _tokens(logits, rows) == together


def test_extreme_parameters():
    logits = _logits(6) * 1e4
    best = logits.argmax(-1).tolist()
    rows = [
        _row(temperature=1e-38),
        _row(top_k=1, temperature=100.0),
        _row(top_p=1e-6, temperature=100.0),
        _row(min_p=1.0, temperature=100.0),
        _row(top_k=2**31 - 1, temperature=1e-6),
        _row(top_k=-1, temperature=1e-6),
    ]
    assert _tokens(logits, rows) == best


def test_nan_logits_give_a_token_of_the_vocabulary():
    logits = torch.full((3, VOCAB), math.nan)
    rows = [_row(temperature=0.0), _row(), _row(top_k=3, top_p=0.5, min_p=0.1)]
    assert all(0 <= token < VOCAB for token in _tokens(logits, rows))


def test_logprobs_are_those_of_the_unprocessed_distribution():
    logits = _logits(4)
    rows = [
        _row(temperature=0.0, logprobs=3),
        _row(temperature=5.0, top_k=9, seed=3, logprobs=0),
        _row(temperature=1.0),
        _row(temperature=0.0, logprobs=2, min_tokens=9, stops=[int(logits[3].argmax())]),
    ]
    sampled = Sampler(64)(logits, rows)
    table = logits.double().log_softmax(-1)
    assert sampled[2].logprobs is None
    for i, count in ((0, 3), (1, 0), (3, 2)):
        (entries,) = sampled[i].logprobs
        ranked = table[i].argsort(descending=True).tolist()
        token_id = sampled[i].token_ids[0]
        assert [e.token_id for e in entries] == [token_id, *ranked[:count]]
        assert [e.rank for e in entries] == [ranked.index(token_id) + 1, *range(1, count + 1)]
        assert [e.logprob for e in entries] == pytest.approx(table[i][[e.token_id for e in entries]].tolist(), abs=1e-5)
    assert sampled[3].logprobs[0][0].rank == 2


def test_logprobs_are_limited_to_the_vocabulary():
    (entries,) = Sampler(64)(_logits(1, vocab=4), [_row(logprobs=20)])[0].logprobs
    assert len(entries) == 5
