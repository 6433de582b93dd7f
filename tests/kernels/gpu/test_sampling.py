# SPDX-License-Identifier: Apache-2.0
"""Sampling in interpreted Triton: the same tokens as the references, from the same seeds."""

import pytest
import torch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter

from quire_kernels import apply_penalties, apply_token_bitmask, argmax_first, sample, uniform
from quire_kernels.gpu import histogram_sampling
from quire_kernels.gpu import sample as by_rows
from quire_kernels.gpu import sampling as gpu

pytestmark = requires_interpreter


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """A small block, so that a row takes several iterations."""
    monkeypatch.setattr(gpu, "_BLOCK", 256)


@pytest.fixture(params=["bisection", "histogram"])
def kernel(request):
    """An implementation of `sample`."""
    return sample.get("cuda", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_argmax_takes_the_first_of_equal_logits(dtype):
    logits = torch.randn(5, 700).to(dtype)
    logits[1, [3, 600]] = 9.0
    logits[2] = 1.0
    logits[3] = float("-inf")
    logits[3, 699] = -5.0
    assert torch.equal(interpreted_kernel(argmax_first)(logits), argmax_first.reference(logits))


def test_uniforms_are_the_same_numbers():
    seeds = torch.tensor([0, 1, 2**63 - 1, 123456789, -7] * 30)
    positions = torch.arange(150) ** 3
    assert torch.equal(interpreted_kernel(uniform)(seeds, positions), uniform.reference(seeds, positions))


# temperature, top_k, top_p, min_p
PARAMS = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 1, 1.0, 0.0), (1.3, 5, 0.9, 0.0), (1.0, 50, 0.5, 0.1),
    (2.0, 300, 0.99, 0.0), (0.0, 3, 0.2, 0.3), (1.0, 0, 0.1, 0.0), (1.0, 0, 0.95, 0.0), (0.3, 20, 1.0, 0.0),
    (1.0, 0, 0.8, 0.05), (1.0, 0, 1.0, 0.02), (1e-6, 0, 0.9, 0.0), (1.0, 2000, 0.999, 0.0), (5.0, 0, 0.5, 0.0),
]  # fmt: skip


def _columns(params, repeats):
    temperature, top_k, top_p, min_p = zip(*params, strict=True)
    columns = torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)
    return [column.repeat(repeats) for column in columns]


def test_same_samples_from_the_same_seeds(kernel):
    logits = torch.randn(len(PARAMS), 300) * 3.0
    arguments = logits, *_columns(PARAMS, 1), torch.arange(len(logits)) // 3, torch.arange(len(logits)) % 7
    assert torch.equal(kernel(*arguments), sample.reference(*arguments))


def test_without_filters(kernel):
    logits = torch.randn(12, 900) * 2
    arguments = logits, *_columns([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0)], 4)
    arguments = *arguments, torch.arange(12), torch.full((12,), 5)
    assert torch.equal(kernel(*arguments, False), sample.reference(*arguments, False))


def test_ties_are_kept_together(kernel):
    logits = torch.zeros(6, 200)
    logits[:, :4] = 5.0
    arguments = (logits, *_columns([(1.0, 2, 1.0, 0.0), (1.0, 0, 0.3, 0.0)], 3), torch.arange(6), torch.zeros(6).long())
    found = kernel(*arguments)
    assert torch.equal(found, sample.reference(*arguments))
    assert set(found.tolist()) <= {0, 1, 2, 3}


def test_forbidden_tokens_are_never_sampled(kernel):
    logits = torch.full((6, 300), float("-inf"))
    logits[:, [129, 280]] = torch.tensor([0.0, -3.0])
    arguments = logits, *_columns([(1.0, 0, 1.0, 0.0), (1.0, 5, 0.99, 0.0), (1.0, 0, 1.0, 0.01)], 2)
    found = kernel(*arguments, torch.arange(6), torch.zeros(6).long())
    assert set(found.tolist()) <= {129, 280}


@pytest.mark.parametrize(
    ("rows", "vocab_size", "expected"),
    [(1, 128256, "histogram"), (4, 128256, "histogram"), (5, 128256, "bisection"), (1, 4096, "bisection")],
)
def test_few_rows_of_a_large_vocabulary_use_histograms(monkeypatch, rows, vocab_size, expected):
    """The parts of four rows run at the same time on 132 multiprocessors."""
    monkeypatch.undo()
    monkeypatch.setattr(by_rows, "_num_sms", lambda _: 132)
    for name, module in (("histogram", histogram_sampling), ("bisection", gpu)):
        monkeypatch.setattr(module, "sample", lambda *_, name=name: name)
    ones = torch.ones(rows)
    assert by_rows.sample(torch.empty(rows, vocab_size), ones, ones, ones, ones, ones, ones) == expected


def test_penalties_with_any_state_rows():
    logits = torch.randn(4, 500)
    logits[0, 7] = float("-inf")
    rows, tallied = torch.tensor([0, 3, 1]), torch.tensor([4, 0, 2])
    counts = torch.randint(3, (5, 500), dtype=torch.int32)
    in_prompt = torch.randint(2, (5, 500)).bool()
    in_prompt[4, 7] = True
    params = torch.tensor([0.5, 0.0, -1.0]), torch.tensor([0.1, 0.0, 2.0]), torch.tensor([1.2, 0.5, 1.0])
    expected = logits.clone()
    apply_penalties.reference(expected, rows, in_prompt, counts, tallied, *params)
    interpreted_kernel(apply_penalties)(logits, rows, in_prompt, counts, tallied, *params)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [40, 700])
def test_token_bitmask(vocab_size):
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=torch.int64).to(torch.int32)
    logits, rows = torch.randn(5, vocab_size), torch.tensor([4, 0, 2])
    expected = logits.clone()
    apply_token_bitmask.reference(expected, bits, rows)
    interpreted_kernel(apply_token_bitmask)(logits, bits, rows)
    assert torch.equal(logits, expected)
