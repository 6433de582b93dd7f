# SPDX-License-Identifier: Apache-2.0
"""Admission accepts every valid request, and each rejection names the field and the limit."""

import pytest

from quire_engine.text.admission import AdmissionController, RequestLimits
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, NotFound, Unavailable
from quire_spec.protocol.messages import GenerateRequest

LIMITS = RequestLimits(max_model_len=32, vocab_size=384, max_num_queued_reqs=4, max_prompt_bytes=2000)
VALID_REQUEST = {
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
        ({"cache_salt": "x" * 257}, InvalidArgument, "cache_salt"),
        ({"priority": 1}, InvalidArgument, "priority: got 1, but scheduling_policy is fcfs"),
        ({"priority": 2**31}, InvalidArgument, "priority"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_admission_rejects_invalid_requests(change: dict[str, object], error: type[Exception] | None, message: str):
    admission = AdmissionController(LIMITS, "base", has_tokenizer=True)
    admission.open()
    admission.set_adapters({}, {})
    request = GenerateRequest(**(VALID_REQUEST | change))
    if error is None:
        assert admission.admit(request, 0).params == SamplingParams()
        return
    with pytest.raises(error) as raised:
        admission.admit(request, 0)
    assert message in str(raised.value)


def test_admission_without_a_tokenizer_and_while_closed():
    admission = AdmissionController(LIMITS, "base", has_tokenizer=False)
    with pytest.raises(Unavailable, match="starting"):
        admission.admit(GenerateRequest(**VALID_REQUEST), 0)
    admission.open()
    admission.admit(GenerateRequest(**VALID_REQUEST), 3)
    with pytest.raises(Unavailable, match="4 requests are waiting and max_num_queued_reqs is 4"):
        admission.admit(GenerateRequest(**VALID_REQUEST), 4)
    with pytest.raises(InvalidArgument, match="has no tokenizer; send prompt_token_ids"):
        admission.admit(GenerateRequest(**VALID_REQUEST | {"prompt": "x", "prompt_token_ids": None}), 0)
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        admission.admit(GenerateRequest(**VALID_REQUEST | {"params": SamplingParams(stop=("x",))}), 0)
