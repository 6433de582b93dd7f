# SPDX-License-Identifier: Apache-2.0
"""Samples are compared with published numbers and statistics, filters with sets computed by hand."""

import pytest
import torch

from quire_kernels import apply_token_bitmask, filter_top_k_top_p_min_p, inverse_transform, logsumexp, sample, uniform

MASK = 2**64 - 1


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_splitmix_is_the_published_generator():
    # First outputs of SplitMix64 seeded with 1234567, from the reference implementation.
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(_splitmix(state))
        state = (state + 0x9E3779B97F4A7C15) & MASK
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 123456789])
def test_uniform_is_splitmix_of_seed_and_position(seed):
    positions = [0, 1, 17, 2**20]
    mixed = [_splitmix((_splitmix(seed) + p * 0x9E3779B97F4A7C15) & MASK) for p in positions]
    expected = torch.tensor([(m >> 40) / 2**24 for m in mixed])
    assert torch.equal(uniform(torch.full((4,), seed), torch.tensor(positions)), expected)


def test_uniforms_are_uniform_over_positions_and_over_seeds():
    many, zero = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64)
    for draws in (uniform(zero + 7, many), uniform(many, zero + 7)):
        assert draws.min() >= 0.0
        assert draws.max() < 1.0
        counts = torch.histc(draws, bins=100, min=0, max=1)
        chi_square = ((counts - 1000) ** 2 / 1000).sum().item()
        # 99 degrees of freedom: 99.9 % of fair draws are below 149.
        assert chi_square < 149
        serial = torch.corrcoef(torch.stack((draws[:-1], draws[1:])))[0, 1].item()
        assert abs(serial) < 0.015


def _kept(probs, **params):
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    rows = torch.tensor([probs])
    args = (torch.tensor([defaults["top_k"]]), torch.tensor([defaults["top_p"]]), torch.tensor([defaults["min_p"]]))
    kept, reference = filter_top_k_top_p_min_p(rows, *args), filter_top_k_top_p_min_p.reference(rows, *args)
    assert torch.equal(kept, reference)
    return kept[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("probs", "params", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], {}, [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 2}, [2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 9}, [0, 1, 2, 3]),
        # Ties are kept together.
        ([0.2, 0.2, 0.2, 0.4], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.39}, [3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_p": 0.65}, [2, 3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_p": 1e-6}, [3]),
        ([0.1, 0.19, 0.31, 0.4], {"min_p": 0.5}, [2, 3]),
        # top_p applies after top_k: 0.4 is 0.57 of the 0.7 that top_k leaves.
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 2, "top_p": 0.5}, [3]),
        ([0.1, 0.2, 0.3, 0.4], {"top_k": 2, "top_p": 0.6}, [2, 3]),
    ],
)
def test_filters(probs, params, expected):
    assert _kept(probs, **params) == expected


@pytest.mark.parametrize("scale", [0.1, 3.0, 10.0], ids=["flat", "usual", "peaked"])
def test_mixed_rows_equal_reference(scale):
    generator = torch.Generator().manual_seed(3)
    probs = (torch.randn(12, 6000, generator=generator) * scale).softmax(-1)
    top_k = torch.tensor([0, 1, 5, 50, 1000, 6000, 0, 0, 0, 20, 0, 0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.5, 0.99, 0.9, 0.1, 0.95, 0.999, 1.0, 0.8, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.02])
    kept, reference = (
        f(probs, top_k, top_p, min_p) for f in (filter_top_k_top_p_min_p, filter_top_k_top_p_min_p.reference)
    )
    # Sums are rounded in a different order: a token exactly at the threshold may be kept or not.
    assert ((kept > 0) != (reference > 0)).sum(-1).max() <= 1
    assert torch.equal(kept[kept > 0], probs[kept > 0])


def test_a_row_does_not_depend_on_its_neighbours():
    generator = torch.Generator().manual_seed(4)
    probs = torch.randn(8, 3000, generator=generator).softmax(-1)
    top_k = torch.tensor([0, 3, 0, 700, 0, 0, 50, 0])
    top_p = torch.tensor([0.9, 1.0, 0.2, 0.7, 0.5, 0.999, 0.3, 0.9])
    min_p = torch.zeros(8)
    together = filter_top_k_top_p_min_p(probs, top_k, top_p, min_p)
    for i in range(8):
        row = slice(i, i + 1)
        assert torch.equal(filter_top_k_top_p_min_p(probs[row], top_k[row], top_p[row], min_p[row])[0], together[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 700, 6001])
def test_samples_equal_reference(dtype, vocab_size):
    """Compiled or not, with filtered and greedy rows between others, whose samples depend on their own row only."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(400, vocab_size, generator=generator) * 4).to(dtype)
    logits[::7, 0] = float("-inf")
    rows = torch.arange(400)
    temperatures = torch.where(rows % 5 == 0, 0.0, 0.3 + rows / 300)
    filters = torch.where(rows % 3 == 0, 2, 0), torch.where(rows % 4 == 0, 0.8, 1.0), torch.zeros(400)
    tokens = sample(logits, temperatures, *filters, rows, rows * 31)
    reference = sample.reference(logits, temperatures, *filters, rows, rows * 31)
    # Sums are rounded in a different order: a uniform at the border between two tokens may select either.
    assert (tokens != reference).sum() <= 1
    assert torch.equal(tokens[::5], logits[::5].float().argmax(-1))
    plain = (filters[0] == 0) & (filters[1] == 1)
    alone = sample(
        logits[plain], temperatures[plain], *(f[plain] for f in filters), rows[plain], rows[plain] * 31, False
    )
    assert torch.equal(alone, tokens[plain])
    if dtype is torch.bfloat16:
        assert torch.equal(sample(logits.float(), temperatures, *filters, rows, rows * 31), tokens)


def test_samples_follow_the_weights():
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 5.0, 0.0])
    uniforms = torch.linspace(0, 1, 8001)[:-1]
    counts = inverse_transform(weights.expand(8000, 6), uniforms).bincount(minlength=6)
    assert counts.tolist() == [0, 1000, 0, 2000, 5000, 0]


def test_tokens_of_weight_zero_are_never_sampled():
    weights = torch.tensor([[0.0, 0.1, 0.3, 0.0, 0.7, 0.0]])
    last = torch.tensor([1.0 - 2.0**-24])
    assert inverse_transform(weights, last).tolist() == [4]
    assert inverse_transform(weights, torch.tensor([0.0])).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 64, 700])
def test_token_bitmask(dtype, vocab_size):
    logits = torch.randn(4, vocab_size).to(dtype)
    is_allowed = torch.rand(2, vocab_size) < 0.5
    padded = torch.nn.functional.pad(is_allowed, (0, -vocab_size % 32)).view(2, -1, 32).to(torch.int64)
    bits = (padded << torch.arange(32)).sum(-1)
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    expected = logits.clone()
    expected[[3, 1]] = torch.where(is_allowed, expected[[3, 1]], float("-inf"))
    for function in (apply_token_bitmask.reference, apply_token_bitmask):
        masked = logits.clone()
        function(masked, bits, torch.tensor([3, 1]))
        assert torch.equal(masked, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_logsumexp_of_a_row_does_not_depend_on_the_other_rows(threads):
    torch.set_num_threads(threads)
    logits = torch.randn(33, 40_010) * 9
    logits[0, 7:] = float("-inf")
    together = logsumexp(logits)
    torch.testing.assert_close(together, logits.double().logsumexp(-1).float(), rtol=3e-7, atol=3e-7)
    assert torch.equal(together, torch.cat([logsumexp(row[None]) for row in logits]))
    assert torch.equal(together[::2], logsumexp(logits[::2]))
    torch.set_num_threads(1)
