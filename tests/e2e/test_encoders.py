# SPDX-License-Identifier: Apache-2.0
"""Encoders in `quire serve`: embeddings, scores of pairs, and one clear error for routes that generate."""

import json

import pytest
import torch
from support.encoder_checkpoints import embed, load, make_encoder, score
from support.quire_serve import example_document, running_service

pytestmark = pytest.mark.server

TEXTS = ["the lazy dog, then sleeps.", "naïve café", "the quick brown fox jumps"]


def _document(folder):
    document = example_document()
    document["spec"]["model"]["source"] = {"path": str(folder)}
    document["spec"] |= {"adapters": []}
    return document


def test_embeddings_of_an_encoder(tmp_path):
    folder = make_encoder(tmp_path / "model", "xlm_roberta", pooling="mean_tokens")
    with running_service(_document(folder), tmp_path) as service:
        response = service.request("openai", "/v1/embeddings", {"model": "tales", "input": TEXTS})
        assert response.status == 200, response
        body = {"embedding_request": json.dumps({"input": TEXTS[0]})}
        tensor = service.request("http", "/v2/models/tales/generate", body)
        tokenized = service.request("openai", "/tokenize", {"model": "tales", "prompt": TEXTS[0]}).body["tokens"]
        expected = embed(load(folder), tokenized, "mean_tokens")
        for vector in (response.body["data"][0]["embedding"], json.loads(tensor.body["text_output"])):
            assert (torch.tensor(vector) - expected).abs().max() < 2e-5
        wrong = service.request("openai", "/v1/completions", {"model": "tales", "prompt": "a", "max_tokens": 2})
        assert wrong.status == 400 and "is an encoder, so it cannot generate; use /v1/embeddings" in str(wrong.body)


def test_scores_of_a_cross_encoder(tmp_path):
    folder = make_encoder(tmp_path / "model", "bert", "score", num_labels=1)
    expected = [torch.sigmoid(score(load(folder), folder, "the fox", text)).item() for text in TEXTS]
    with running_service(_document(folder), tmp_path) as service:
        body = {"model": "tales", "query": "the fox", "documents": TEXTS}
        response = service.request("openai", "/v1/rerank", body)
        assert response.status == 200, response
        results = response.body["results"]
        order = sorted(range(len(TEXTS)), key=lambda i: -expected[i])
        assert [result["index"] for result in results] == order
        for result in results:
            assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=2e-5)
        wrong = service.request("openai", "/v1/chat/completions", {"model": "tales", "messages": []})
        assert wrong.status == 400
