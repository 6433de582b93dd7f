# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API of the example LLMService: adapters as models, and the same tokens as on the server's ports."""

import queue

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from support.quire_serve import EXAMPLES, example_adapters, grpc_flag, grpc_text, run_concurrently

from quire_engine import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.server

STORY = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 30}


@pytest.fixture(scope="module")
def offline():
    return LLM(EXAMPLES / "models/tiny", dtype="float32", device="cpu", enable_lora=True, max_lora_rank=16)


def test_models_list_the_adapters_with_their_base(service):
    cards = service.request("openai", "/v1/models").body["data"]
    assert [(card["id"], card["parent"]) for card in cards][:1] == [("tales", None)]
    assert {card["id"]: card["parent"] for card in cards[1:]} == {"pirate": "tales", "sql": "tales", "tools": "tales"}


@pytest.mark.parametrize("model", ["tales", *example_adapters()])
def test_greedy_tokens_are_the_same_on_all_paths(service, offline, model):
    """Offline, on both ports of the server, as a stream, and in the OpenAI API."""
    lora = None if model == "tales" else LoRARequest(model, 1, str(example_adapters()[model]))
    (expected,) = offline.generate(STORY, SamplingParams(**GREEDY), use_tqdm=False, lora_request=lora)
    tokens = expected.outputs[0].token_ids
    body = {"model": model, "prompt": STORY, "return_token_ids": True, **GREEDY}
    answer = service.request("openai", "/v1/completions", body)
    assert answer.status == 200, answer.body
    (choice,) = answer.body["choices"]
    assert (answer.body["model"], choice["text"]) == (model, expected.outputs[0].text)
    stream = run_concurrently(service.http_stream(model, STORY, return_output_ids=True, **GREEDY))[0]
    # The server writes a tensor of one element as a number.
    streamed = [token for event in stream.events for token in np.atleast_1d(event.get("output_ids", [])).tolist()]
    flags = [grpc_flag("stream", False), grpc_flag("return_output_ids", True)]
    responses: queue.SimpleQueue = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{service.ports['grpc']}") as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, [grpc_text(STORY), *flags], parameters=GREEDY)
        result, error = responses.get(timeout=60)
    assert error is None
    assert {
        "completions": choice["token_ids"],
        "generate": service.generate(model, STORY, return_output_ids=True, **GREEDY).body["output_ids"],
        "generate_stream": streamed,
        "gRPC": result.as_numpy("output_ids").tolist(),
    } == dict.fromkeys(("completions", "generate", "generate_stream", "gRPC"), tokens)


def test_beam_search_is_the_same_on_all_ports(service, offline):
    """Offline, on both ports of the server, as a stream, and in both routes of the OpenAI API."""
    params = {"use_beam_search": True, "n": 3, "max_tokens": 12, "length_penalty": 0.5, "early_stopping": "never"}
    (expected,) = offline.generate(STORY, SamplingParams(**params), use_tqdm=False)
    texts = [completion.text for completion in expected.outputs]
    assert len(set(texts)) == 3
    body = {"model": "tales", "prompt": STORY, **params}
    answer = service.request("openai", "/v1/completions", body)
    assert [choice["text"] for choice in answer.body["choices"]] == texts
    generated = service.generate("tales", STORY, exclude_input_in_output=True, **params).body
    (stream,) = run_concurrently(service.http_stream("tales", STORY, **params))
    parts = [event["text_output"] for event in stream.events]
    responses: queue.SimpleQueue = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{service.ports['grpc']}") as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        inputs = [grpc_text(STORY), grpc_flag("stream", False), grpc_flag("exclude_input_in_output", True)]
        client.async_stream_infer("tales", inputs, parameters=params)
        result, error = responses.get(timeout=60)
    assert error is None
    assert {
        "generate": generated["text_output"],
        "generate_stream": ["".join(pieces) for pieces in zip(*parts, strict=True)],
        "gRPC": [text.decode() for text in result.as_numpy("text_output")],
    } == dict.fromkeys(("generate", "generate_stream", "gRPC"), texts)
    chat = {"model": "tales", "messages": [{"role": "user", "content": STORY}], **params}
    choices = service.request("openai", "/v1/chat/completions", chat).body["choices"]
    assert len({str(choice["message"]) for choice in choices}) == 3, choices


def test_an_unknown_model_is_404(service):
    answer = service.request("openai", "/v1/completions", {"model": "absent", "prompt": STORY})
    assert answer.status == 404 and "tales" in answer.body["error"]["message"]


def test_the_status_contains_the_front(service):
    assert service.status()["processes"]["openai"]["state"] == "Ready"
