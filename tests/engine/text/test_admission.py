# SPDX-License-Identifier: Apache-2.0
"""Admission accepts every valid request, and each rejection names the field and the limit."""

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.request_adapter import RequestAdapter
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, NotFound, Unavailable
from quire_spec.protocol.messages import GenerateRequest

LIMITS = RequestLimits(max_model_len=32, vocab_size=384, max_prompt_bytes=2000, max_logprobs=20)
VALID_REQUEST: dict[str, Any] = {
    "id": 1,
    "model": "base",
    "prompt": None,
    "prompt_token_ids": [1],
    "params": SamplingParams(),
    "stream": True,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt": "x"}, InvalidArgument, "a text or token ids, but not both"),
        ({"prompt_token_ids": None}, InvalidArgument, "a text or token ids, but not both"),
        ({"prompt_token_ids": []}, InvalidArgument, "empty"),
        ({"prompt_token_ids": [1] * 31}, None, ""),
        ({"prompt_token_ids": [1] * 32}, InvalidArgument, "has 32 tokens and max_model_len is 32"),
        (
            {"prompt_token_ids": [384]},
            InvalidArgument,
            "'384', which is not a token id of this model; use ids from 0 to 383",
        ),
        ({"prompt_token_ids": [-1]}, InvalidArgument, "'-1'"),
        ({"prompt_token_ids": None, "prompt": "x" * 2001}, InvalidArgument, "2001 bytes"),
        ({"prompt_token_ids": None, "prompt": "é" * 1001}, InvalidArgument, "2002 bytes"),
        ({"prompt_token_ids": None, "prompt": "é" * 1000}, None, ""),
        ({"model": "nope"}, NotFound, "LoRA nope is not supported, we currently support []"),
        ({"params": SamplingParams(stop_token_ids=(3, 384))}, InvalidArgument, "'stop_token_ids': 384 is not"),
        ({"params": SamplingParams(logit_bias={-1: 1.0})}, InvalidArgument, "'logit_bias': -1 is not"),
        ({"params": SamplingParams(allowed_token_ids=(384,))}, InvalidArgument, "'allowed_token_ids': 384"),
        ({"params": SamplingParams(logprobs=1, logprob_token_ids=(500,))}, InvalidArgument, "'logprob_token_ids'"),
        ({"params": SamplingParams(logprobs=21)}, InvalidArgument, "'logprobs': 21 is more than max_logprobs 20"),
        ({"params": SamplingParams(prompt_logprobs=-1)}, InvalidArgument, "-1 (all 384 tokens) is more than"),
        ({"params": SamplingParams(n=1, best_of=2)}, InvalidArgument, "'best_of'"),
        ({"params": SamplingParams(thinking_token_budget=1)}, InvalidArgument, "'thinking_token_budget'"),
        ({"prompt_token_ids": [1] * 99, "params": SamplingParams(truncate_prompt_tokens=31)}, None, ""),
        ({"cache_salt": "x" * 257}, InvalidArgument, "cache_salt"),
        ({"priority": 2**31}, InvalidArgument, "priority"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_admission_rejects_invalid_requests(change: dict[str, object], error: type[Exception] | None, message: str):
    admission = AdmissionController(LIMITS, "base", 4)
    admission.open()
    admission.set_adapters({}, {})
    request = GenerateRequest(**(VALID_REQUEST | change))
    if error is None:
        assert admission.admit(request, Counter()) == RequestAdapter()
        return
    with pytest.raises(error) as raised:
        admission.admit(request, Counter())
    assert message in str(raised.value)


def test_admission_without_a_tokenizer_and_while_closed():
    admission = AdmissionController(replace(LIMITS, has_tokenizer=False), "base", 4)
    with pytest.raises(Unavailable, match="starting"):
        admission.admit(GenerateRequest(**VALID_REQUEST), Counter())
    admission.open()
    admission.admit(GenerateRequest(**VALID_REQUEST), Counter({"": 3}))
    with pytest.raises(Unavailable, match="4 requests are waiting and max_num_queued_reqs is 4"):
        admission.admit(GenerateRequest(**VALID_REQUEST), Counter({"": 4}))
    with pytest.raises(InvalidArgument, match="has no tokenizer; send prompt_token_ids"):
        admission.admit(GenerateRequest(**VALID_REQUEST | {"prompt": "x", "prompt_token_ids": None}), Counter())
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        admission.admit(GenerateRequest(**VALID_REQUEST | {"params": SamplingParams(stop=("x",))}), Counter())


@pytest.mark.parametrize(
    ("queued_by_client", "is_admitted"),
    [
        ({"": 11}, True),
        ({"": 12}, False),
        ({"": 3, "a": 9}, True),
        ({"": 4, "a": 8}, False),
        ({"": 2, "a": 5, "b": 5}, True),
        ({"": 3, "a": 5, "b": 5}, False),
        ({"a": 12, "b": 12}, False),
    ],
)
def test_full_queue_has_room_for_a_client_with_less_than_its_share(
    queued_by_client: dict[str, int], is_admitted: bool
) -> None:
    admission = AdmissionController(LIMITS, "base", 12)
    admission.open()
    with contextlib.nullcontext() if is_admitted else pytest.raises(Unavailable, match="max_num_queued_reqs is 12"):
        admission.admit(GenerateRequest(**VALID_REQUEST), Counter(queued_by_client))
