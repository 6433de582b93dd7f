# SPDX-License-Identifier: Apache-2.0
"""Scores, ranks and classes through a real front, text and core process."""

import pytest
import torch
from support.openai_front import running_front
from support.pooling_checkpoints import classify, make_classifier
from support.tiny_checkpoints import make_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.timeout(120)

CONFIG = {"max_model_len": 96, "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64}
DOCUMENTS = ["the lazy dog", "Köln", "fox", "then sleeps"]
TEMPLATE = """{% for m in messages %}{% if m.role == "query" %}Q: {{ m.content }}
{% elif m.role == "document" %}D: {{ m.content }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """A classifier with one class and a template for pairs, and its front."""
    model = make_classifier(tmp_path_factory.mktemp("reranker"), num_labels=1)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with running_front(tmp_path_factory.mktemp("a"), model=model, **CONFIG) as front:
        yield model, front


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier with three classes, and its front."""
    model = make_classifier(tmp_path_factory.mktemp("labels"), id2label={0: "bad", 1: "good", 2: "other"})
    with running_front(tmp_path_factory.mktemp("b"), model=model, **CONFIG) as front:
        yield model, front


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """A model that generates, whose score is that of two tokens, and its front."""
    model = make_llama(tmp_path_factory.mktemp("llama"))
    text = (model / "config.json").read_text().rstrip().removesuffix("}")
    names = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens([70, 80])
    (model / "config.json").write_text(f'{text}, "classifier_from_token": ["{names[0]}", "{names[1]}"]}}')
    with running_front(tmp_path_factory.mktemp("c"), model=model, convert="classify", **CONFIG) as front:
        yield model, front


def _encode(model, text, start=()):
    return [*start, *AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)]


def test_scores_of_a_classifier_use_its_template(reranker):
    model, front = reranker
    prompts = [_encode(model, f"Q: brown\nD: {document}") for document in DOCUMENTS]
    expected = [torch.sigmoid(classify(model, prompt)).item() for prompt in prompts]
    answer = front.request("/v1/score", {"text_1": "brown", "text_2": DOCUMENTS})
    assert [entry["score"] for entry in answer.body["data"]] == pytest.approx(expected, abs=2e-5)
    assert answer.body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    order = sorted(range(4), key=lambda i: -expected[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = front.request(path, {"query": "brown", "documents": [{"text": d} for d in DOCUMENTS]}).body["results"]
        assert [result["index"] for result in results] == order
        assert [result["document"]["text"] for result in results] == [DOCUMENTS[i] for i in order]
    fields = {"query": "brown", "documents": DOCUMENTS, "top_n": 1, "return_documents": False, "use_activation": False}
    [result] = front.request("/v1/rerank", fields).body["results"]
    raw = classify(model, prompts[order[0]]).item()
    assert result == {"index": order[0], "relevance_score": pytest.approx(raw, abs=2e-5 * max(1, abs(raw)))}


def test_classes(classifier):
    model, front = classifier
    answer = front.request("/classify", {"input": DOCUMENTS, "model": "base"})
    assert answer.status == 200 and answer.body["object"] == "list"
    for entry, text in zip(answer.body["data"], DOCUMENTS, strict=True):
        expected = torch.softmax(classify(model, _encode(model, text, [0])), -1)
        assert entry["probs"] == pytest.approx(expected.tolist(), abs=2e-5) and entry["num_classes"] == 3
        assert entry["label"] == ["bad", "good", "other"][int(expected.argmax())]


def test_two_tokens_of_a_generating_model_are_a_score(generator):
    """Without a template for pairs, the two texts follow each other. The model also generates."""
    model, front = generator
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answer = front.request("/v1/score", {"data_1": "brown", "data_2": DOCUMENTS})
    for entry, document in zip(answer.body["data"], DOCUMENTS, strict=True):
        logits = oracle(torch.tensor([_encode(model, "brown" + document, [0])])).logits[0, -1].detach()
        assert entry["score"] == pytest.approx(torch.sigmoid(logits[80] - logits[70]).item(), abs=2e-5)
    assert front.complete(prompt="brown", max_tokens=2).status == 200


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("apply_softmax", [False, True])
def test_generative_scoring(generator, item_first, apply_softmax):
    model, front = generator
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    labels, items = [70, 80, 5], ["fox", [9, 8, 7]]
    fields = {"query": "the brown", "items": items, "label_token_ids": labels}
    answer = front.request("/generative_scoring", fields | {"item_first": item_first, "apply_softmax": apply_softmax})
    assert answer.status == 200, answer.body
    for entry, item in zip(answer.body["data"], items, strict=True):
        parts = [_encode(model, "the brown", [0]), item if isinstance(item, list) else _encode(model, item)]
        prompt = [token for part in (parts[::-1] if item_first else parts) for token in part]
        logits = oracle(torch.tensor([prompt])).logits[0, -1].detach()
        probabilities = torch.softmax(logits[labels] if apply_softmax else logits, -1)
        expected = probabilities[0 if apply_softmax else labels[0]].item()
        assert entry["score"] == pytest.approx(expected, abs=2e-5, rel=1e-3)
    assert answer.body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("kind", "path", "fields", "message"),
    [
        (
            "reranker",
            "/v1/score",
            {"text_1": "a"},
            "text_2: must be a text or a list of texts that are not empty, it is",
        ),
        (
            "reranker",
            "/v1/score",
            {"text_1": ["a", "b"], "text_2": "a"},
            "text_1: has 2 texts and text_2 has 1; give one",
        ),
        ("reranker", "/v1/score", {"text_1": "a", "text_2": ["a", 5]}, "text_2: must be a text or a list"),
        ("reranker", "/v1/score", {"text_1": "a", "text_2": ["a"] * 2049}, "text_2: at most 2048 texts are allowed"),
        ("reranker", "/v1/score", {"text_1": "a", "text_2": "fox " * 200}, "max_model_len is 96; shorten the input"),
        ("reranker", "/v1/rerank", {"query": ["a"], "documents": ["a"]}, "query: must be a text, got ['a']"),
        ("reranker", "/v1/rerank", {"query": "a", "documents": []}, "documents: must be a text or a list of texts"),
        ("reranker", "/v1/rerank", {"query": "a", "documents": [{"x": 1}]}, "documents: must be a text or a list"),
        ("reranker", "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n: must be 0 or more, got -1"),
        ("reranker", "/v1/embeddings", {"input": "a"}, "model: returns classes, and not embeddings; use /v1/classify"),
        (
            "classifier",
            "/v1/score",
            {"text_1": "a", "text_2": "b"},
            "model: has 3 classes, and a score needs a classifier",
        ),
        ("classifier", "/v1/classify", {}, "input: missing"),
        ("classifier", "/v1/completions", {"prompt": "a"}, "cannot generate; use /v1/classify"),
        (
            "classifier",
            "/generative_scoring",
            {"query": "a", "items": ["b"], "label_token_ids": [1]},
            "cannot generate",
        ),
        ("generator", "/generative_scoring", {"query": "a", "items": ["b"]}, "label_token_ids: missing"),
        (
            "generator",
            "/generative_scoring",
            {"query": "a", "items": [], "label_token_ids": [1]},
            "items: must be a list",
        ),
        (
            "generator",
            "/generative_scoring",
            {"query": 5, "items": ["b"], "label_token_ids": [1]},
            "query: must be a text",
        ),
        (
            "generator",
            "/generative_scoring",
            {"query": "a", "items": [None], "label_token_ids": [1]},
            "items[0]: must be",
        ),
        (
            "generator",
            "/generative_scoring",
            {"query": "a", "items": ["b"], "label_token_ids": [384]},
            "label_token_ids: 384 is not",
        ),
        (
            "generator",
            "/generative_scoring",
            {"query": "a", "items": ["b"], "label_token_ids": []},
            "label_token_ids: ",
        ),
        (
            "generator",
            "/generative_scoring",
            {"query": "a", "items": ["b"], "label_token_ids": [-1]},
            "label_token_ids",
        ),
    ],
    ids=str,
)
def test_a_wrong_request_gets_one_clear_error(request, kind, path, fields, message):
    _, front = request.getfixturevalue(kind)
    answer = front.request(path, fields)
    assert (answer.status, message in answer.message) == (400, True), answer.message
