# SPDX-License-Identifier: Apache-2.0
"""`LLM.beam_search` and stop strings of beams equal transformers."""

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quire_engine import BeamSearchParams, SamplingParams
from quire_spec.errors import InvalidArgument

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
TEXTS = ["the quick brown fox", "over the lazy dog"]


def _beams(models: Any, token_ids: list[int], name: str | None = None, **arguments: Any) -> list[list[int]]:
    ids = torch.tensor([token_ids])
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 4, "num_return_sequences": 4}
    with torch.inference_mode():
        rows = models.references[name].generate(ids, attention_mask=torch.ones_like(ids), **settings, **arguments)
    return [row[len(token_ids) :] for row in rows.tolist()]


@pytest.mark.parametrize("name", [None, "a"])
def test_beam_search_returns_the_outputs_of_transformers(models: Any, name: str | None) -> None:
    outputs = models.llm.beam_search(TEXTS, BeamSearchParams(beam_width=4, max_tokens=12), models.lora(name))
    for text, output in zip(TEXTS, outputs, strict=True):
        prompt = models.llm.tokenizer.encode(text)
        assert [s.tokens[len(prompt) :] for s in output.sequences] == _beams(models, prompt, name)
        assert all(s.tokens[: len(prompt)] == prompt and s.text.startswith(text) for s in output.sequences)
        scores = [s.cum_logprob / 12 for s in output.sequences]
        assert scores == sorted(scores, reverse=True) and scores[0] < 0


def test_a_stop_string_ends_the_beam_that_contains_it(models: Any) -> None:
    tokenizer, prompt = models.llm.tokenizer, models.llm.tokenizer.encode(TEXTS[0])
    first = _beams(models, prompt)
    # Strings of two tokens, so that each ends in the middle of some beams.
    stops = [tokenizer.decode(first[0][4:6]), tokenizer.decode(first[-1][7:9])]
    rows = _beams(
        models, prompt, stop_strings=stops, tokenizer=AutoTokenizer.from_pretrained(models.model), pad_token_id=0
    )
    params = SamplingParams(use_beam_search=True, n=4, max_tokens=12, stop=stops)
    [output] = models.llm.generate([TEXTS[0]], params, use_tqdm=False)
    lengths = [len(completion.token_ids) for completion in output.outputs]
    assert [completion.token_ids for completion in output.outputs] == [
        row[:length] for row, length in zip(rows, lengths, strict=True)
    ]
    assert min(lengths) < 12
    for completion, length in zip(output.outputs, lengths, strict=True):
        assert (completion.finish_reason == "stop") == (length < 12) == (completion.stop_reason in stops)
        assert not any(stop in completion.text for stop in stops)


def test_rejects_wrong_parameters(models: Any) -> None:
    with pytest.raises(InvalidArgument, match="'beam_width': must be from 1 to 128, got 0"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    with pytest.raises(InvalidArgument, match="params: must be BeamSearchParams, got SamplingParams"):
        models.llm.beam_search(TEXTS, SamplingParams())
