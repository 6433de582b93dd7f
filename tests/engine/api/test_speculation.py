# SPDX-License-Identifier: Apache-2.0
"""With draft tokens, right and wrong ones, the offline engine returns the same outputs in fewer steps."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.scripted_drafts import ScriptedProposer

from quire_engine import SamplingParams
from quire_engine.sequence import BlockId, Sequence
from quire_engine.step.plan import ScheduledSpan
from quire_engine.worker.sampling.rejection_sampler import RejectionSampler
from quire_engine.worker.sampling.sampler import Sampler

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
PROMPTS = ["abcabcab", "once upon a time once upon", "xyzzy"]
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "seed": 7, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 2},
    "stops": {"temperature": 1.0, "seed": 3, "min_tokens": 5, "stop_token_ids": list(range(0, 300, 5))},
    "bad words": {"temperature": 0.0, "bad_words": ["a", "b"]},
    "n": {"temperature": 1.0, "seed": 1, "n": 2},
}


def _outputs(models: Any, llm: Any, params: dict[str, Any], adapter: str | None) -> list[Any]:
    sampling_params = SamplingParams(**({"max_tokens": 30} | params))
    requests = llm.generate(PROMPTS, sampling_params, lora_request=models.lora(adapter), use_tqdm=False)
    return [
        (list(output.token_ids), output.finish_reason, [list(position) for position in output.logprobs or []])
        for request in requests
        for output in request.outputs
    ]


@pytest.mark.parametrize("adapter", [None, "a"])
def test_outputs_are_equal_with_scripted_drafts(models: Any, adapter: str | None) -> None:
    """Random weights continue no prompt predictably, so the drafts are the recorded outputs with wrong tokens."""
    # Prompts are computed in chunks.
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 24, "block_size": 8}
    plain = models.load(**settings)
    speculating = models.load(**settings, speculative_config=NGRAM)
    planner = speculating.engine._scheduler.draft_planner
    # The policy would stop drafts in a step with six sequences.
    planner._policy.draft_length = lambda *_: 3
    for name, params in VARIANTS.items():
        steps_before = plain.engine.stats().num_steps, speculating.engine.stats().num_steps
        expected = _outputs(models, plain, params, adapter)
        planner._proposer = ScriptedProposer(_continuation([tokens for tokens, *_ in expected]), 0.8)
        assert _outputs(models, speculating, params, adapter) == expected, name
        speculating.engine.check_integrity()
        num_plain = plain.engine.stats().num_steps - steps_before[0]
        num_speculating = speculating.engine.stats().num_steps - steps_before[1]
        assert num_speculating < 0.8 * num_plain or name in ("bad words", "stops"), (name, num_plain)
    assert 0 < planner.counts.num_accepted_tokens < planner.counts.num_draft_tokens


def _continuation(outputs: list[list[int]]) -> Callable[[Sequence, int], list[int]]:
    """Return a function that continues a sequence by the first output that starts with the output of the sequence."""

    def continue_(sequence: Sequence, num_tokens: int) -> list[int]:
        output, end = sequence.output_token_ids, len(sequence.output_token_ids)
        return next((tokens[end : end + num_tokens] for tokens in outputs if tokens[:end] == output), [])

    return continue_


@pytest.mark.parametrize("config", [NGRAM, SUFFIX])
def test_lookup_returns_equal_tokens(models: Any, config: dict[str, Any]) -> None:
    prompts = [text * 3 for text in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    expected = models.tokens(prompts, params)
    # The second time, the suffix tree contains the outputs.
    for _ in range(2):
        assert models.tokens(prompts, params, speculative_config=config) == expected


def test_sampled_tokens_have_the_distribution_of_the_model() -> None:
    """Chi-squared: the first token by the first row, the second by the second row where the draft was accepted."""
    vocab, num_sequences, draft_token = 12, 4000, 3
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, min_p=0.05)
    spans = [
        ScheduledSpan(_sequence(seed, params), 1, 2, None, draft_token_ids=(draft_token,))
        for seed in range(num_sequences)
    ]
    outputs = RejectionSampler(Sampler(num_sequences)).sample(spans, logits.repeat(num_sequences, 1), None)
    tokens = [output.token_ids for output in outputs]
    assert all(len(row) == 1 + (row[0] == draft_token) for row in tokens)
    for row, column in enumerate(([t[0] for t in tokens], [t[1] for t in tokens if len(t) == 2])):
        probabilities = torch.softmax(logits[row] / 0.8, dim=-1).double()
        probabilities[probabilities < 0.05 * probabilities.max()] = 0
        expected = probabilities / probabilities.sum() * len(column)
        counts = torch.tensor(column).bincount(minlength=vocab).double()
        possible = expected > 0
        assert not counts[~possible].any()
        statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
        freedom = int(possible.sum()) - 1
        assert statistic <= freedom + 4 * math.sqrt(2 * freedom)


def _sequence(seed: int, params: SamplingParams) -> Sequence:
    sequence = Sequence(seed, [1, 2], params, seed, 10)
    sequence.block_table = [BlockId(0)]
    return sequence
