# SPDX-License-Identifier: Apache-2.0
"""Requests are tokenized in threads if they are long, and a cancelled preparation does no more work."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from support.chats import conversation
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.parsers.parser_names import ParserNames
from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.processor import RequestProcessor, run_without_waiting
from quire_engine.structured_outputs.composed_constraint import ComposedConstraint
from quire_engine.text.tokenizer_threads import TokenizerThreads
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import Conversation, GenerateRequest
from quire_spec.protocol.parsed_output import OutputParsing, ParsedOutput, merge_events

LIMITS = RequestLimits(max_model_len=4096, vocab_size=384, max_prompt_bytes=2**20)
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


class Renderer:
    """Renders every conversation to the same text, when the test allows it."""

    def __init__(self) -> None:
        self.allowed = asyncio.Event()

    async def render(self, chat: Conversation, template: str | None) -> str:
        await self.allowed.wait()
        return "fox"


class Checker:
    """Accepts every constraint."""

    async def check(self, constraint: StructuredOutputsParams | ComposedConstraint) -> str:
        return "grammar"


@pytest.fixture
def tokenizer(tmp_path: Path) -> RecordingTokenizer:
    return RecordingTokenizer(save_tokenizer(byte_level(), tmp_path))


@pytest.fixture
def processor(tokenizer: RecordingTokenizer) -> RequestProcessor:
    return RequestProcessor(LIMITS, tokenizer, Renderer(), Checker(), TokenizerThreads().run)


def make_request(prompt: str | None = None, token_ids: list[int] | None = None, **params: object) -> GenerateRequest:
    return GenerateRequest(1, "base", prompt, token_ids, SamplingParams.from_mapping(params), True)


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
    processor: RequestProcessor,
    tokenizer: RecordingTokenizer,
    text: str | None,
    token_ids: list[int] | None,
    params: dict[str, object],
):
    expected_ids = token_ids or tokenizer.encode(text or "", 9 if params.get("truncate_prompt_tokens") else None)
    tokenizer.threads.clear()
    prepared = await processor.prepare(make_request(text, token_ids, **params))
    assert prepared.prompt_token_ids == expected_ids
    assert bool(prepared.bad_word_ids) == ("bad_words" in params)
    assert tokenizer.threads and all(name.startswith("tokenize") for name in tokenizer.threads)


def test_short_text_is_prepared_without_waiting(processor: RequestProcessor, tokenizer: RecordingTokenizer):
    request = make_request("fox", bad_words=["the"], structured_outputs={"regex": "a", "begin_after_token_ids": [7]})
    prepared = run_without_waiting(processor.prepare(request))
    assert prepared.prompt_token_ids == tokenizer.encode("fox")
    assert (prepared.prompt, prepared.grammar, prepared.begin_after_token_ids) == ("fox", "grammar", [7])
    assert tokenizer.threads[0] == threading.current_thread().name


@pytest.mark.parametrize("prefix", ["", LONG_TEXT])
async def test_invalid_text_is_rejected(processor: RequestProcessor, prefix: str):
    with pytest.raises(InvalidArgument, match="lone surrogate"):
        await processor.prepare(make_request(prefix + "\ud800"))


async def test_a_request_cancelled_while_it_waits_for_a_thread_is_not_encoded(
    processor: RequestProcessor, tokenizer: RecordingTokenizer
):
    tokenizer.unblocked.clear()
    tasks = [asyncio.create_task(processor.prepare(make_request(LONG_TEXT))) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.sleep(0)
    tokenizer.unblocked.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [False, False, True]
    assert len(tokenizer.threads) == 2


async def test_a_request_cancelled_while_it_is_rendered_is_not_encoded(
    processor: RequestProcessor, tokenizer: RecordingTokenizer
):
    request = GenerateRequest(1, "base", None, None, SamplingParams(), True, chat=conversation())
    task = asyncio.create_task(processor.prepare(request))
    await asyncio.sleep(0)
    processor._chat_renderer.allowed.set()  # type: ignore[union-attr]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not tokenizer.threads


async def test_an_output_continues_the_reasoning_of_the_last_message(tokenizer: RecordingTokenizer):
    limits = replace(LIMITS, parser_names=ParserNames(None, "qwen3"))
    processor = RequestProcessor(limits, tokenizer, renderer := Renderer(), Checker())
    renderer.allowed.set()
    chat = conversation({"role": "assistant", "content": "<think>\n12 plus 7"}, continue_final_message=True)
    request = GenerateRequest(1, "base", None, None, SamplingParams(), True, chat=chat, parsing=OutputParsing())
    prepared = await processor.prepare(request)
    assert prepared.create_parser is not None
    text = " is 19.\n</think>\n\nThe answer is 19."
    events = prepared.create_parser().feed(tokenizer.encode(text, add_special_tokens=False), text, True)
    assert merge_events(events) == ParsedOutput("The answer is 19.", " is 19.", ())


async def test_a_schema_that_a_format_cannot_enforce_is_the_clients_error(tokenizer: RecordingTokenizer):
    limits = replace(LIMITS, parser_names=ParserNames("qwen3_coder"))
    processor = RequestProcessor(limits, tokenizer, renderer := Renderer(), Checker())
    renderer.allowed.set()
    parameters = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parsing, chat = OutputParsing("required"), conversation({"role": "user", "content": "a"}, tools=tools)
    request = GenerateRequest(1, "base", None, None, SamplingParams(), True, chat=chat, parsing=parsing)
    with pytest.raises(InvalidArgument, match="tools: 'f': the schema of the parameters has 'anyOf' at its top level"):
        await processor.prepare(request)
