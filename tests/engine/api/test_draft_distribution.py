# SPDX-License-Identifier: Apache-2.0
"""Chi-squared tests over whole engines: with every method, sampled tokens have the distribution of the model."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.draft_heads import random_eagle3_head, save_eagle3_head, save_medusa_heads

from quire_engine import SamplingParams
from quire_engine.sequence import Sequence
from quire_engine.speculation.proposer import DraftProposer

PROMPT, NUM_OUTPUTS, NUM_TOKENS = "abcabcab", 1000, 3
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 3}
METHODS = ("suffix", "scripted", "draft_model", "eagle3", "medusa")


class _FixedProposer(DraftProposer):
    """Proposes the second most likely tokens, of which some are accepted, and then one that is impossible."""

    def __init__(self, token_by_length: list[int]) -> None:
        self._tokens = token_by_length

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        return self._tokens[len(sequence.output_token_ids) :][:max_tokens]


@pytest.fixture(scope="module")
def distribution(models: Any) -> dict[tuple[int, ...], float]:
    """The probability of every output of NUM_TOKENS tokens, from transformers."""
    outputs: dict[tuple[int, ...], float] = {(): 1.0}
    prompt = models.llm.get_tokenizer().encode(PROMPT)
    for _ in range(NUM_TOKENS):
        outputs = {
            (*output, token): share * probability
            for output, share in outputs.items()
            for token, probability in _next_tokens(models.references[None], [*prompt, *output]).items()
        }
    return outputs


@torch.inference_mode()
def _next_tokens(model: Any, tokens: list[int]) -> dict[int, float]:
    logits = model(torch.tensor([tokens])).logits[0, -1].double() / SAMPLING["temperature"]
    top = logits.topk(int(SAMPLING["top_k"]))
    probabilities = top.values.softmax(dim=-1)
    kept = probabilities.cumsum(dim=-1) - probabilities < SAMPLING["top_p"]
    probabilities = probabilities[kept] / probabilities[kept].sum()
    return dict(zip(top.indices[kept].tolist(), probabilities.tolist(), strict=True))


@pytest.mark.parametrize(("method", "is_seeded"), [*((method, True) for method in METHODS), ("scripted", False)])
def test_outputs_have_the_distribution_of_the_model(
    models: Any, distribution: dict[tuple[int, ...], float], tmp_path: Path, method: str, is_seeded: bool
) -> None:
    if method == "eagle3":
        save_eagle3_head(tmp_path, random_eagle3_head(), "safeailab")
    if method == "medusa":
        save_medusa_heads(tmp_path)
    speculation: dict[str, Any] = {"method": "ngram" if method == "scripted" else method, "num_speculative_tokens": 3}
    if method in ("draft_model", "eagle3", "medusa"):
        speculation["model"] = str(models.model if method == "draft_model" else tmp_path)
    # Blocks limit the sequences of a step, so that rows are left for drafts.
    memory = {"block_size": 8, "kv_cache_memory_bytes": 100 * 8 * 2 * 2 * 2 * 16 * 4}
    llm = models.load(speculative_config=speculation, max_num_seqs=256, **memory)
    planner = llm.engine._scheduler.draft_planner
    planner._policy.draft_length = lambda *_: 3
    if method == "scripted":
        likely = sorted(distribution, key=lambda output: distribution[output])
        planner._proposer = _FixedProposer([*likely[-2][:2], 0, 0])
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed if is_seeded else None, **SAMPLING)
        for seed in range(NUM_OUTPUTS)
    ]
    outputs = [
        tuple(request.outputs[0].token_ids) for request in llm.generate([PROMPT] * NUM_OUTPUTS, params, use_tqdm=False)
    ]
    assert planner.counts.num_draft_tokens > NUM_OUTPUTS / 4
    assert planner.counts.num_accepted_tokens < planner.counts.num_draft_tokens
    _check_distribution(Counter(outputs), distribution)
    if is_seeded:
        sample = slice(0, 100)
        plain = models.llm.generate([PROMPT] * 100, params[sample], use_tqdm=False)
        assert outputs[sample] == [tuple(request.outputs[0].token_ids) for request in plain]


def _check_distribution(counts: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> None:
    """Chi-squared; outputs that are expected fewer than five times are one cell."""
    assert counts.keys() <= distribution.keys()
    cells: Counter[tuple[int, ...] | None] = Counter()
    expected: Counter[tuple[int, ...] | None] = Counter()
    for output, probability in distribution.items():
        cell = output if probability * NUM_OUTPUTS >= 5 else None
        cells[cell] += counts[output]
        expected[cell] += probability * NUM_OUTPUTS  # type: ignore[assignment]
    statistic = sum((cells[cell] - expected[cell]) ** 2 / expected[cell] for cell in expected)
    freedom = len(expected) - 1
    assert freedom >= 3
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom), (statistic, freedom)
