# SPDX-License-Identifier: Apache-2.0
"""Whole models on forms of the kernel language, interpreted: the same log probabilities as on the forms for CPUs."""

import dataclasses

import pytest
import torch
from support.interpreter import own
from support.tiny import VOCAB, make_checkpoint

from quire_engine.request import Sequence
from quire_engine.runner import TorchRunner
from quire_engine.step import Span, StepPlan
from quire_kernels import choose, gated, most_likely, paged_attention, rms_norm, rotate_and_write
from quire_spec.config import EngineConfig
from quire_spec.sampling import SamplingParams
from quire_spec.shape import ModelShape

CONFIG = EngineConfig(model="m", dtype="float32", max_model_len=64, block_size=8, max_num_seqs=4)
FORMS = (choose, most_likely, paged_attention, rms_norm, rotate_and_write, *map(gated, ("silu", "gelu_pytorch_tanh")))


def _run(folder):
    """A prompt, then a step of its next token and another prompt; tokens, and log probabilities of the prompts."""
    runner = TorchRunner(dataclasses.replace(CONFIG, model=str(folder)), ModelShape.load(folder), folder)
    draw = torch.Generator().manual_seed(1)
    sequences = []
    for id, length in enumerate((21, 9)):
        prompt = torch.randint(VOCAB, (length,), generator=draw).tolist()
        params = SamplingParams(temperature=float(id), top_p=0.9, prompt_logprobs=0)
        sequences.append(Sequence(id, prompt, params, seed=3, max_output_tokens=9))
        sequences[-1].block_table = list(range(8 * id, 8 * id + 4))
    first, second = sequences
    results = runner.execute(StepPlan([Span(first, 0, 21, None)]))
    first.num_scored_tokens = 20
    first.output_token_ids += results[0].token_ids
    results += runner.execute(StepPlan([Span(first, 21, 1, None), Span(second, 0, 9, None)]))
    logprobs = [entries[0].logprob for result in results for entries in result.prompt_logprobs or []]
    return [result.token_ids for result in results], torch.tensor(logprobs)


# numpy, which interprets, says when a number becomes infinite; a GPU goes on, and 1 / infinity is meant.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["gemma2", "qwen3", "phi3-partial"])
def test_equals_the_forms_for_cpus(name, tmp_path, monkeypatch):
    """Between them: soft caps, windows, norms of heads, partial rotation."""
    folder = make_checkpoint(tmp_path, name)
    expected = _run(folder)
    for op in FORMS:
        monkeypatch.setitem(op.forms, "cpu", own(op))
    tokens, logprobs = _run(folder)
    assert tokens == expected[0]
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-4, atol=1e-4)
