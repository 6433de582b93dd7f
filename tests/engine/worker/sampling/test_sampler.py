# SPDX-License-Identifier: Apache-2.0
"""Sampling: greedy, random according to softmax, and independent of the rest of the batch."""

import math

import pytest
import torch
from transformers.generation import logits_process

from quire_engine.sequence import Sequence
from quire_engine.worker.sampling import sampler as sampler_module
from quire_engine.worker.sampling.sampler import Sampler, SamplingRow
from quire_spec.engine.sampling_params import SamplingParams

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_not_modified(dtype):
    logits = _logits(3).to(dtype)
    before = logits.clone()
    rows = [_row(temperature=0.7, top_p=0.5, logprobs=2), _row(temperature=0.0, min_tokens=5, stops=[0]), _row()]
    Sampler(64)(logits, rows)
    assert torch.equal(logits, before)


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
    """Compute the distribution token by token, in vLLM's order: temperature, min_p, top_k, top_p."""
    probs = (logits.double() / temperature).softmax(-1)
    ranked = [t for t in probs.argsort(descending=True).tolist() if probs[t] >= min_p * probs.max()]
    ranked = ranked[:top_k] if top_k else ranked
    mass = probs[ranked].sum()
    kept, reached = [], 0.0
    for token in ranked:
        if reached >= top_p:
            break
        kept.append(token)
        reached += float(probs[token] / mass)
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept] / probs[kept].sum()
    return cut


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_samples_follow_softmax(params):
    logits = _logits(1, scale=1.0)
    num = 10_000
    over_seeds = _tokens(logits.expand(num, -1), [_row(seed=i, **params) for i in range(num)])
    over_positions = _tokens(logits.expand(num, -1), [_row(position=3 + i, seed=5, **params) for i in range(num)])
    expected = _expected(logits[0], **params)
    assert _fits(over_seeds, expected)
    assert _fits(over_positions, expected)


WARPERS = {
    "top_k": (logits_process.TopKLogitsWarper, (1, 7, 49)),
    "top_p": (logits_process.TopPLogitsWarper, (0.05, 0.5, 0.93)),
    "min_p": (logits_process.MinPLogitsWarper, (0.01, 0.2, 0.9)),
}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, (_, values) in WARPERS.items() for v in values])
def test_filtered_tokens_equal_transformers(name, value):
    logits = _logits(1, scale=1.5)
    kept = WARPERS[name][0](value)(None, logits.clone())[0] > -math.inf
    num = 8000
    drawn = set(_tokens(logits.expand(num, -1), [_row(seed=i, **{name: value}) for i in range(num)]))
    assert drawn <= set(kept.nonzero().flatten().tolist())
    # All tokens that are likely enough to be sampled.
    probs = logits[0].where(kept, -math.inf).softmax(-1)
    assert drawn >= set((probs > 20 / num).nonzero().flatten().tolist())


def test_statistic_detects_a_wrong_distribution():
    logits = _logits(1, scale=1.0)
    tokens = _tokens(logits.expand(10_000, -1), [_row(seed=i, temperature=1.2) for i in range(10_000)])
    assert not _fits(tokens, logits[0].softmax(-1))


def test_sample_depends_on_its_own_row_only(monkeypatch):
    logits = _logits(40, vocab=700)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 300, "top_p": 0.3}]
    rows = [_row(position=3 + i % 5, seed=i, **kinds[i % len(kinds)]) for i in range(40)]
    together = _tokens(logits, rows)
    assert together == [_tokens(logits[i : i + 1], [rows[i]])[0] for i in range(40)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    assert _tokens(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    monkeypatch.setattr(sampler_module, "_CHUNK_BYTES", 3 * 4 * 700)
    assert _tokens(logits, rows) == together


def test_seed_and_position_determine_the_sample():
    logits = _logits(1, scale=0.1).expand(64, -1)
    assert len(set(_tokens(logits, [_row(seed=7)] * 64))) == 1
    assert len(set(_tokens(logits, [_row(seed=i) for i in range(64)]))) > 10
    assert len(set(_tokens(logits, [_row(seed=7, position=3 + i) for i in range(64)]))) > 10


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_suppresses_stop_tokens(temperature):
    logits = torch.zeros(4, VOCAB)
    logits[:, [4, 9]] = 100.0
    logits[:, 5] = 50.0
    rows = [
        _row(position=3, min_tokens=2, stops=[4, 9], temperature=temperature),
        _row(position=4, min_tokens=2, stops=[4, 9], temperature=temperature),
        _row(position=5, min_tokens=2, stops=[4, 9], temperature=temperature),
        _row(position=3, min_tokens=2, stops=[4], temperature=temperature),
    ]
    tokens = _tokens(logits, rows)
    assert tokens[:2] == [5, 5]
    assert tokens[2] in (4, 9)
    assert tokens[3] == 9


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
