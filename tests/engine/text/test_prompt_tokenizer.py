# SPDX-License-Identifier: Apache-2.0
"""Long texts are encoded in threads, short ones at once, and every outcome reaches the callback on the event loop."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from support.tokenizer import byte_level, save_tokenizer

from quire_engine import SamplingParams
from quire_engine.text.admission import AdmittedRequest
from quire_engine.text.prompt_tokenizer import PromptTokenizer, TokenizedPrompt
from quire_engine.text.request_state import RequestState
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import InvalidArgument, QuireError
from quire_spec.protocol.messages import GenerateRequest

LONG_TEXT = "the quick brown fox " * 200


class RecordingTokenizer(Tokenizer):
    """A tokenizer that records the threads that used it, and can block them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.threads: list[str] = []
        self.unblocked = threading.Event()
        self.unblocked.set()

    def _encode(
        self, texts: Sequence[str], input_name: str, add_special_tokens: bool = True
    ) -> list[tokenizers.Encoding]:
        self.threads.append(threading.current_thread().name)
        assert self.unblocked.wait(30)
        return super()._encode(texts, input_name, add_special_tokens)


@pytest.fixture
def tokenizer(tmp_path: Path) -> RecordingTokenizer:
    return RecordingTokenizer(save_tokenizer(byte_level(), tmp_path))


def make_request(
    prompt: str | None = None, token_ids: list[int] | None = None, **params: object
) -> tuple[GenerateRequest, RequestState]:
    request = GenerateRequest(1, "base", prompt, token_ids, SamplingParams.from_mapping(params), True)
    return request, RequestState(7, request, AdmittedRequest(SamplingParams.from_mapping(params), None, None), 0.0)


async def tokenize(tokenizer: Tokenizer, request: GenerateRequest, state: RequestState) -> TokenizedPrompt | QuireError:
    done: asyncio.Future[TokenizedPrompt | QuireError] = asyncio.get_running_loop().create_future()
    PromptTokenizer(tokenizer, max_model_len=4096).tokenize(request, state, done.set_result)
    return await done


@pytest.mark.parametrize(
    ("text", "token_ids", "params"),
    [
        (LONG_TEXT, None, {}),
        (LONG_TEXT, None, {"truncate_prompt_tokens": 9}),
        ("fox", None, {"bad_words": ["the " * 250, "fox " * 250]}),
        (None, [5, 6], {"bad_words": ["the " * 250, "fox " * 250]}),
    ],
)
async def test_long_text_is_encoded_in_a_thread(
    tokenizer: RecordingTokenizer, text: str | None, token_ids: list[int] | None, params: dict[str, object]
):
    request, request_state = make_request(text, token_ids, **params)
    expected_ids = token_ids or tokenizer.encode(text or "", 9 if params.get("truncate_prompt_tokens") else None)
    tokenizer.threads.clear()
    tokenized = await tokenize(tokenizer, request, request_state)
    assert isinstance(tokenized, TokenizedPrompt)
    assert tokenized.token_ids == expected_ids
    assert bool(tokenized.bad_word_ids) == ("bad_words" in params)
    assert tokenizer.threads and all(name.startswith("tokenize") for name in tokenizer.threads)


async def test_short_text_is_encoded_before_the_call_returns(tokenizer: RecordingTokenizer):
    results: list[TokenizedPrompt | QuireError] = []
    PromptTokenizer(tokenizer, 4096).tokenize(*make_request("fox", bad_words=["the"]), results.append)
    (tokenized,) = results
    assert isinstance(tokenized, TokenizedPrompt) and tokenized.token_ids == tokenizer.encode("fox")
    assert tokenizer.threads[0] == threading.current_thread().name


@pytest.mark.parametrize("prefix", ["", LONG_TEXT])
async def test_invalid_text_is_an_error_for_the_callback(tokenizer: RecordingTokenizer, prefix: str):
    assert isinstance(await tokenize(tokenizer, *make_request(prefix + "\ud800")), InvalidArgument)


async def test_request_cancelled_while_it_waits_for_a_thread_is_not_encoded(tokenizer: RecordingTokenizer):
    prompt_tokenizer, results = PromptTokenizer(tokenizer, 4096), []
    tokenizer.unblocked.clear()
    requests = [make_request(LONG_TEXT) for _ in range(3)]
    done = asyncio.Event()
    for request, request_state in requests:
        prompt_tokenizer.tokenize(request, request_state, lambda tokenized: (results.append(tokenized), done.set()))
    requests[2][1].is_closed = True
    assert not results, "the call waited for a thread"
    tokenizer.unblocked.set()
    while len(results) < 3:
        done.clear()
        await done.wait()
    assert len(tokenizer.threads) == 2
