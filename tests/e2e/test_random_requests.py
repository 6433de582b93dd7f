# SPDX-License-Identifier: Apache-2.0
"""Random valid and invalid requests, concurrently over HTTP and gRPC.

Each response equals that of the offline engine, and the pod's counters equal the totals of the clients. In float32, a
request rounds differently in a batch than alone. If a response differs, it must therefore equal that of an engine whose
weights differ by a rounding error.
"""

import asyncio
import functools
import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from support.quire_serve import EXAMPLES, StreamedResponse, run_concurrently

from quire_engine import LLM, LoRARequest, SamplingParams
from quire_spec.errors import InvalidArgument

pytestmark = pytest.mark.server

NUM_REQUESTS = 80
ROUNDING_ERROR = 2e-5
"""Relative change of the weights of a nearly equal engine. It changes log probabilities by about 5e-5, as much as the
batch of a request does."""
NUM_NEARLY_EQUAL = 16
TEXTS = [
    "Once upon a time",
    " the fox",
    "é",
    "e\u0301",
    "\u202e",
    "😀",
    "👨\u200d👩\u200d👧",
    "\U0010ffff",
    "\ufeff",
    "\x01",
]
TEXTS += ["<|bos|>", "<|eos|>", "日本語", '"', "\\u0041", "\r\n", " 42", "ﬁ", "\u2028", "{}"]
STOPS = ["e", ["the", "th"], [" Zoe", ". "], ["😀"], ["\ufffd"], ["ed a", "nd the"], ["<|eos|>"]]
VALID_VALUES = {
    "max_tokens": (1, 2, 8, "30", 60),
    "top_p": (0.1, 0.9, 1),
    "top_k": (-1, 0, 1, 50, 5000),
    "min_p": (0.0, 0.05, "0.5"),
    "presence_penalty": (-2, "0.5", 2),
    "frequency_penalty": (-0.5, 2),
    "repetition_penalty": (0.5, 1.5),
    "logit_bias": ({"300": 5, "5": -100}, {"1": 100}),
    # Byte tokens: mostly incomplete UTF-8 characters, and some complete ones.
    "allowed_token_ids": (list(range(100, 258)), [300, 301]),
    "bad_words": (["the"], ["said", "😀"]),
    "stop": STOPS,
    "stop_token_ids": ([260], list(range(300, 400))),
    "ignore_eos": (True, "true", "False"),
    "logprobs": (0, 2, "5"),
    "prompt_logprobs": (0, 3),
    "include_stop_str_in_output": (True, False),
    "skip_special_tokens": (True, "false"),
    "truncate_prompt_tokens": (-1, 1, 5),
    "truncation_side": ("left", "right"),
    "thinking_token_budget": (-1, 0, 3),
}
INVALID_VALUES = (-3, 1e9, "lots", "", "NaN", "[1.5]", [[1]], ["a", 1], {"a": 1}, [-1], "[" * 3000, "9" * 5000)


@dataclass
class Case:
    """One request and its response."""

    model: str
    prompt: str
    values: dict[str, Any]
    stream: StreamedResponse | None = None
    protocol: str = "http"


def cases():
    r = random.Random(20)
    for i in range(NUM_REQUESTS):
        values = (
            {"temperature": 0.0} if r.random() < 0.5 else {"temperature": r.choice((0.5, 1)), "seed": r.getrandbits(62)}
        )
        values |= {name: r.choice(VALID_VALUES[name]) for name in r.sample(sorted(VALID_VALUES), r.randint(0, 5))}
        if i % 4 == 0:
            values[r.choice(sorted(VALID_VALUES))] = r.choice(INVALID_VALUES)
        prompt = "".join(r.choices(TEXTS, k=r.randint(1, 8)))
        yield Case(r.choice(("tales", "pirate", "sql")), prompt, values, protocol=r.choice(("http", "grpc")))


async def send(service, case, gate):
    """Send a request, with parameters in the tensor (HTTP) or as request parameters (gRPC)."""
    async with gate:
        if case.protocol == "http":
            names = ("output_ids", "logprobs", "finish_reason", "num_input_tokens", "num_output_tokens")
            parameters = {"sampling_parameters": json.dumps(case.values)} | {f"return_{name}": True for name in names}
            case.stream = await service.http_stream(case.model, case.prompt, **parameters)
        else:
            parameters = {name: json.dumps(v) if isinstance(v, list | dict) else v for name, v in case.values.items()}
            case.stream = await service.grpc_stream(case.model, case.prompt, **parameters)


@pytest.fixture(scope="module")
def offline():
    return LLM(EXAMPLES / "models/tiny", dtype="float32", device="cpu", enable_lora=True, max_lora_rank=16)


def expected(offline, case):
    """Return the output of the offline engine, or its error message."""
    lora = None if case.model == "tales" else LoRARequest(case.model, 1, str(EXAMPLES / "adapters" / case.model))
    try:
        params = SamplingParams.from_mapping(case.values)
        return offline.generate(case.prompt, params, use_tqdm=False, lora_request=lora)[0], ""
    except InvalidArgument as error:
        return None, str(error)


@pytest.fixture(scope="module")
def nearly_equal_engines(tmp_path_factory):
    """Return a function that yields engines whose final norm differs from the example's by about a rounding error."""

    @functools.cache
    def engine(seed):
        folder = tmp_path_factory.mktemp("nearly-equal") / "tiny"
        shutil.copytree(EXAMPLES / "models/tiny", folder)
        tensors = load_file(folder / "model.safetensors")
        norm = tensors["model.norm.weight"].float()
        noise = torch.randn(norm.shape, generator=torch.Generator().manual_seed(seed))
        tensors["model.norm.weight"] = norm * (1 + ROUNDING_ERROR * noise)
        save_file(tensors, folder / "model.safetensors")
        return LLM(folder, dtype="float32", device="cpu", enable_lora=True, max_lora_rank=16)

    return lambda: map(engine, range(NUM_NEARLY_EQUAL))


def has_output(case, output):
    """Return whether the response of a case is this offline output."""
    (completion,) = output.outputs
    if case.stream.error is not None or case.stream.text != completion.text:
        return False
    token_ids = [token for event in case.stream.events for token in _list(event["output_ids"])]
    return case.protocol != "http" or token_ids == completion.token_ids


def matching_output(case, output, nearly_equal_engines):
    """Return the offline output that the response of a case equals: `output`, or that of a nearly equal engine."""
    others = (expected(engine, case)[0] for engine in nearly_equal_engines())
    return next((one for one in chain([output], others) if has_output(case, one)), None)


def test_a_wrong_token_is_no_rounding_error(offline, nearly_equal_engines):
    case = Case("tales", "Once upon a time", {"temperature": 1.0, "seed": 3, "max_tokens": 30}, protocol="grpc")
    output, _ = expected(offline, case)
    text = output.outputs[0].text
    for served, is_accepted in ((text, True), (text[:-1] + "é", False), (text[:-1], False)):
        case.stream = StreamedResponse([served])
        assert (matching_output(case, output, nearly_equal_engines) is not None) == is_accepted


def counted(service):
    """Return all counters summed over labels, and the number of running requests."""
    totals = Counter()
    for family in text_string_to_metric_families(service.metrics()):
        for sample in family.samples:
            if sample.name.endswith("_total") or sample.name == "vllm:num_requests_running":
                totals[sample.name] += int(sample.value)
    return totals


def test_random_requests_match_offline(service, offline, nearly_equal_engines):
    # Cancelled requests of earlier tests may still be ending.
    service.wait(lambda: not counted(service)["vllm:num_requests_running"], 20, "idle")
    requests, before = list(cases()), counted(service)

    async def send_all():
        gate = asyncio.Semaphore(24)
        await asyncio.gather(*(send(service, case, gate) for case in requests))

    run_concurrently(send_all(), timeout=60)
    num_valid = num_input = num_output = 0
    for case in requests:
        output, error = expected(offline, case)
        if output is None:
            assert case.stream.error is not None and error in case.stream.error, (case, error)
            continue
        num_valid += 1
        matching = matching_output(case, output, nearly_equal_engines)
        assert matching is not None, (case, output)
        num_input += len(output.prompt_token_ids)
        num_output += len(matching.outputs[0].token_ids)
        if case.protocol == "http":
            assert_same_output(case.stream.events, matching)
    assert 40 < num_valid < NUM_REQUESTS - 10, "expected both valid and invalid requests"

    def ended():
        now = counted(service)
        return sum(now[name] - before[name] for name in ("vllm:request_success_total", "quire_requests_refused_total"))

    service.wait(lambda: ended() >= NUM_REQUESTS, 5, "counted")
    now = counted(service)
    now.subtract(before)
    assert ended() == NUM_REQUESTS
    assert now["vllm:generation_tokens_total"] == num_output
    assert now["vllm:prompt_tokens_total"] >= num_input


def assert_same_output(events, output):
    """Assert that the concatenated events of a stream equal the offline output."""
    (offline_output,) = output.outputs
    assert events[-1]["finish_reason"] == offline_output.finish_reason
    assert {event["finish_reason"] for event in events[:-1]} <= {"None"}
    assert {int(event["num_input_tokens"]) for event in events} == {len(output.prompt_token_ids)}
    assert sum(int(event["num_output_tokens"]) for event in events) == len(offline_output.token_ids)
    logprobs = [json.loads(event["logprobs"]) for event in events]
    if offline_output.logprobs is None:
        assert logprobs == [None] * len(events)
        return
    positions = [position for event in logprobs for position in event]
    for token, position, by_token in zip(offline_output.token_ids, positions, offline_output.logprobs, strict=True):
        # The order of the other tokens can differ because of near ties.
        assert len(position) == len(by_token)
        assert position[str(token)]["logprob"] == pytest.approx(by_token[token].logprob, abs=1e-2)
        assert position[str(token)]["decoded_token"] == by_token[token].decoded_token


def _list(value):
    return value if isinstance(value, list) else [value]
