# SPDX-License-Identifier: Apache-2.0
"""Embeddings and classes of the offline API."""

import pytest
import torch
from support.pooling_checkpoints import classify, embed, make_classifier, make_embedding_model, make_pooled_adapter
from support.tiny_checkpoints import make_llama

from quire_engine import LLM, LoRARequest, PoolingParams
from quire_spec.errors import InvalidArgument


def test_embed(tmp_path):
    model = make_embedding_model(tmp_path / "model", is_matryoshka=True)
    adapter = make_pooled_adapter(model, tmp_path / "adapter")
    llm = LLM(str(model), dtype="float32", max_model_len=128, enable_lora=True)
    requests = [None, LoRARequest("a", 1, str(adapter))]
    outputs = llm.embed(["the quick", "the quick"], use_tqdm=False, lora_request=requests)
    for output, folder in zip(outputs, (None, adapter), strict=True):
        expected = embed(model, output.prompt_token_ids, folder)
        assert (torch.tensor(output.outputs.embedding) - expected).abs().max() < 2e-5
        assert output.finished and output.outputs.hidden_size == 64
    [short] = llm.embed({"prompt_token_ids": [5, 6]}, use_tqdm=False, pooling_params=PoolingParams(dimensions=8))
    assert len(short.outputs.embedding) == 8 and short.prompt_token_ids == [5, 6]
    with pytest.raises(InvalidArgument, match="model: returns embeddings, and not classes"):
        llm.classify("a", use_tqdm=False)
    with pytest.raises(InvalidArgument, match="has no output projection"):
        llm.generate("a", use_tqdm=False)


def test_classify(tmp_path):
    model = make_classifier(tmp_path)
    [output] = LLM(str(model), dtype="float32", max_model_len=128).classify("the quick", use_tqdm=False)
    expected = torch.softmax(classify(model, output.prompt_token_ids), -1)
    assert output.outputs.probs == pytest.approx(expected.tolist(), abs=2e-5) and output.outputs.num_classes == 3


def test_a_model_that_generates_needs_the_argument_convert(tmp_path):
    model = make_llama(tmp_path)
    [output] = LLM(str(model), dtype="float32", max_model_len=128, task="embed").embed("a", use_tqdm=False)
    assert torch.tensor(output.outputs.embedding).allclose(embed(model, output.prompt_token_ids), atol=2e-5)
    llm = LLM(str(model), dtype="float32", max_model_len=128)
    with pytest.raises(InvalidArgument, match=r"only generates, so it has no embeddings; start .* --convert embed"):
        llm.embed("a", use_tqdm=False)
