# SPDX-License-Identifier: Apache-2.0
"""Embeddings through the `openai` client and a real front, text and core process."""

import base64
import json
import math
import struct

import openai
import pytest
import torch
from support.openai_front import running_front
from support.pooling_checkpoints import embed, make_embedding_model
from transformers import AutoTokenizer

from quire_server.openai.pooling.pooling import entry_json
from quire_server.openai.pooling.vector_encoding import EncodedFields, vector_bytes
from quire_spec.engine.pooling_params import PoolingParams
from quire_spec.protocol.messages import OutputDelta

pytestmark = pytest.mark.timeout(120)

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TEXTS = ["the quick brown fox", "Grüße aus Köln", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_embedding_model(tmp_path_factory.mktemp("model"), matryoshka_dimensions=[16, 32])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def front(model, tmp_path_factory):
    config = {"max_model_len": 64, "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 32}
    with running_front(tmp_path_factory.mktemp("front"), model=model, **config) as front:
        yield front


@pytest.fixture(scope="module")
def client(front):
    with front.client() as client:
        yield client


def _tokens(model, text):
    return [0, *AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)]


def _assert_close(vector, expected):
    assert (torch.tensor(vector) - expected).abs().max() < 2e-5


def test_the_client_gets_the_embeddings_of_transformers(client, model):
    ids = [_tokens(model, text) for text in TEXTS]
    for value in (TEXTS, ids):
        answer = client.embeddings.create(model="base", input=value)
        assert [entry.index for entry in answer.data] == [0, 1, 2] and answer.model == "base"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        for entry, tokens in zip(answer.data, ids, strict=True):
            _assert_close(entry.embedding, embed(model, tokens))
    for value in (TEXTS[0], ids[0]):
        [entry] = client.embeddings.create(model="base", input=value, encoding_format="float").data
        _assert_close(entry.embedding, embed(model, ids[0]))


def test_base64_contains_the_same_numbers(front):
    bodies = [
        front.request("/v1/embeddings", {"input": TEXTS[0], "encoding_format": name}).body
        for name in ("float", "base64")
    ]
    plain, encoded = (body["data"][0]["embedding"] for body in bodies)
    assert list(struct.unpack("<64f", base64.b64decode(encoded))) == plain


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_vectors_have_the_bits_of_torch(dtype):
    kind = {"fp8_e4m3": torch.float8_e4m3fn}.get(dtype) or getattr(torch, dtype.replace("fp8", "float8"))
    scales = torch.tensor([1e-8, 1e-5, 1e-3, 1.0, 100.0])[:, None]
    vector = (torch.randn(5, 3000, generator=torch.Generator().manual_seed(1)) * scales).flatten()
    # Numbers in the middle of two others, too.
    exact = torch.arange(1, 120).to(torch.uint8).view(torch.float8_e4m3fn).float()
    vector = torch.cat((vector, (exact[1:] + exact[:-1]) / 2, torch.zeros(2) * -1))
    expected = vector.to(kind)
    fields = EncodedFields(embed_dtype=dtype, endianness="little")
    assert vector_bytes(vector.numpy().tobytes(), fields) == expected.view(torch.uint8).numpy().tobytes()
    swapped = vector_bytes(vector.numpy().tobytes(), EncodedFields(embed_dtype=dtype, endianness="big"))
    bits = expected.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.itemsize])
    assert swapped == bits.numpy().byteswap().tobytes()


@pytest.mark.parametrize(("path", "task"), [("/v1/embeddings", {}), ("/pooling", {"task": "token_embed"})])
def test_bytes_are_described_in_a_header(front, path, task):
    requests = [
        {"input": TEXTS, **task, "encoding_format": form, "embed_dtype": "float16"}
        for form in ("base64", "bytes", "bytes_only")
    ]
    plain, whole, alone = (front.request(path, request) for request in requests)
    assert whole.headers["content-type"] == alone.headers["content-type"] == "application/octet-stream"
    metadata = json.loads(whole.headers["metadata"])
    assert "metadata" not in alone.headers and metadata["usage"] == plain.body["usage"]
    for index, (place, entry) in enumerate(zip(metadata["data"], plain.body["data"], strict=True)):
        assert (place["index"], place["embed_dtype"], place["endianness"]) == (index, "float16", "native")
        numbers = [
            torch.frombuffer(bytearray(data), dtype=torch.float16)
            for data in (
                whole.body[place["start"] : place["end"]],
                base64.b64decode(entry.get("embedding", entry.get("data"))),
            )
        ]
        # The second request can be divided into other steps, so its last bits differ.
        torch.testing.assert_close(*numbers, rtol=0, atol=2e-3)
        assert math.prod(place["shape"]) == len(numbers[0]) and len(place["shape"]) == (2 if task else 1)
    assert len(whole.body) == metadata["data"][-1]["end"] == len(alone.body)


def test_a_conversation_has_the_vector_of_its_rendered_text(front):
    messages = [{"role": "user", "content": TEXTS[0]}]
    ids = front.request("/tokenize", {"messages": messages, "add_generation_prompt": False}).body["tokens"]
    for path, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        [chat], [tokens] = (
            front.request(path, request).body["data"] for request in ({"messages": messages}, {"input": ids})
        )
        assert chat[name] == pytest.approx(tokens[name], abs=1e-5)


def test_vectors_of_tokens(front, model):
    whole = front.request("/pooling", {"input": TEXTS[0]}).body["data"]
    _assert_close(whole[0]["data"], embed(model, _tokens(model, TEXTS[0])))
    bodies = [
        front.request(
            "/pooling", {"input": TEXTS, "task": "token_embed", "dimensions": 16, "encoding_format": name}
        ).body
        for name in ("float", "base64")
    ]
    for text, entry, encoded in zip(TEXTS, bodies[0]["data"], bodies[1]["data"], strict=True):
        tokens = _tokens(model, text)
        assert entry["object"] == "pooling" and len(entry["data"]) == len(tokens)
        for end, vector in enumerate(entry["data"], 1):
            expected = embed(model, tokens[:end])[:16]
            _assert_close(vector, expected / expected.norm())
        numbers = struct.unpack(f"<{16 * len(tokens)}f", base64.b64decode(encoded["data"]))
        # The second request can be divided into other steps, so its last bits differ.
        assert list(numbers) == pytest.approx([number for vector in entry["data"] for number in vector], abs=1e-5)
    for body, message in (
        ({"task": "token_classify"}, "model: returns embeddings, and not classes of tokens; use"),
        ({"task": "plugin"}, "task"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages: not possible with input"),
    ):
        answer = front.request("/pooling", {"input": "a", **body})
        assert answer.status == 400 and message in answer.body["error"]["message"], answer


def test_only_some_tokens_have_vectors():
    delta = OutputDelta(1, num_input_tokens=7, pooled=struct.pack("<4f", 1, 2, 3, 4))
    params = PoolingParams(task="token_classify")
    assert json.loads(entry_json(5, delta, params, EncodedFields(), 8)) == {
        "index": 5,
        "object": "pooling",
        "data": [[1, 2], [3, 4]],
    }


def test_a_vector_that_is_not_normalized(front, model):
    """`normalize` is the former name of the field in vLLM."""
    for name in ("use_activation", "normalize"):
        answer = front.request("/v1/embeddings", {"input": TEXTS[0], name: False, "embed_dtype": "float32"})
        vector = torch.tensor(answer.body["data"][0]["embedding"])
        assert abs(vector.norm() - 1) > 0.1
        _assert_close((vector / vector.norm()).tolist(), embed(model, _tokens(model, TEXTS[0])))
        assert "x-quire-ignored-fields" not in answer.headers


def test_dimensions(client, model):
    [entry] = client.embeddings.create(model="base", input=TEXTS[0], dimensions=16).data
    expected = embed(model, _tokens(model, TEXTS[0]))[:16]
    _assert_close(entry.embedding, expected / expected.norm())


def test_a_long_list_is_answered_in_order(front, model):
    """More texts than the queue would accept at once, with tokens that arrive in chunks."""
    inputs = [[i % 300 + 2] * (i % 40 + 1) for i in range(700)]
    answer = front.request("/v1/embeddings", {"input": inputs})
    assert answer.status == 200 and [entry["index"] for entry in answer.body["data"]] == list(range(700))
    for i in (0, 399, 699):
        _assert_close(answer.body["data"][i]["embedding"], embed(model, inputs[i]))


def test_truncation(front, model):
    ids = list(range(2, 102))
    fields = {"input": ids, "truncate_prompt_tokens": 10}
    for side, kept in ((None, ids[:10]), ("left", ids[-10:])):
        answer = front.request("/v1/embeddings", fields | ({"truncation_side": side} if side else {}))
        _assert_close(answer.body["data"][0]["embedding"], embed(model, kept))
        assert answer.body["usage"]["prompt_tokens"] == 10


def test_scores_are_the_cosine(front, model):
    expected = [float(embed(model, _tokens(model, TEXTS[0])) @ embed(model, _tokens(model, t))) for t in TEXTS]
    answer = front.request("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS})
    assert [entry["score"] for entry in answer.body["data"]] == pytest.approx(expected, abs=2e-5)
    pairs = front.request("/score", {"queries": TEXTS, "documents": TEXTS[::-1]}).body["data"]
    assert pairs[1]["score"] == pytest.approx(1) and pairs[0]["score"] == pytest.approx(expected[2], abs=2e-5)
    ranked = front.request("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).body["results"]
    assert [entry["index"] for entry in ranked] == sorted(range(3), key=lambda i: -expected[i])[:2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "input: missing; give a text"),
        ({"input": []}, "input: empty"),
        ({"input": [[]]}, "input: not of a valid form"),
        ({"input": [1, "a"]}, "input: not of a valid form"),
        ({"input": {"text": "a"}}, "input: not of a valid form"),
        ({"input": [math.inf]}, "body: is not JSON"),
        ({"input": ["a"] * 2049}, "input: at most 2048 prompts are allowed, got 2049; send fewer"),
        ({"input": [[5] * 65]}, "the input has 65 tokens and max_model_len is 64; shorten the input"),
        ({"input": [[5, 384]]}, "contains '384', which is not a token id"),
        ({"input": "a", "dimensions": 0}, "dimensions: must be at least 1, got 0"),
        ({"input": "a", "dimensions": 17}, "dimensions: must be one of 16, 32 for this model, got 17"),
        ({"input": "a", "dimensions": "x"}, "dimensions: expected `int"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format: invalid enum value 'hex'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "'truncate_prompt_tokens': must be -1 or at least 1, got 0"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages: images are not possible here"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype: invalid enum value 'int8'"),
        ({"input": "a", "chat_template": "x"}, "chat_template: is not supported by this route, got 'x'"),
        ({"input": "a", "use_activation": 5}, "use_activation: expected `bool`"),
        ({"input": "a", "cache_salt": "@"}, "cache_salt: must have"),
        ({"input": "a", "priority": 2**40}, "priority: must be a 32-bit integer"),
    ],
    ids=str,
)
def test_a_wrong_request_gets_one_clear_error(front, fields, message):
    answer = front.request("/v1/embeddings", fields)
    assert (answer.status, message in answer.message) == (400, True), answer.message


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client.embeddings.create(model="other", input="a")


def test_a_model_without_output_projection_does_not_generate(front):
    answer = front.request("/v1/completions", {"prompt": "a"})
    assert (answer.status, answer.message) == (
        400,
        "model: has no output projection, so it cannot generate; use /v1/embeddings",
    )


def test_a_client_that_disconnects_frees_the_engine(front):
    """The fixture checks at its end that no request is left."""
    http = front.client().with_options(timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        http.embeddings.create(model="base", input=[[5] * 64] * 2048)


def test_metrics_count_the_requests(front):
    before = _finished(front)
    front.request("/v1/embeddings", {"input": TEXTS})
    assert _finished(front) == before + 3


def _finished(front):
    lines = front.request("/metrics").body.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))
