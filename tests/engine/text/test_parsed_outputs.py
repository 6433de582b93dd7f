# SPDX-License-Identifier: Apache-2.0
"""Outputs of chat requests from token ids to frames: equal events however steps, buffers and clients group them."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chats import conversation
from support.parser_vectors import TOOLS, VECTORS, Vector, expected, hermes, make_tokenizers, normalized
from support.recording_cores import RecordingCores
from support.written_calls import written_calls

from quire_engine.parsers.parser_names import ParserNames
from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.processor import RequestProcessor
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, QuireError
from quire_spec.protocol.framing import FrameDecoder, encode_frame
from quire_spec.protocol.messages import (
    Conversation,
    GenerateRequest,
    Message,
    OutputDelta,
    OutputDeltas,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
    merge_deltas,
)
from quire_spec.protocol.parsed_output import OutputParsing, ParsedOutput, ToolCallStart, merge_events

EOS = 1
LIMITS = RequestLimits(
    max_model_len=30_000,
    vocab_size=500,
    max_prompt_bytes=2000,
    has_chat_template=True,
    eos_token_ids=frozenset({EOS}),
)


class Renderer:
    """Renders every conversation to one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def render(self, chat: Conversation, template: str | None) -> str:
        return self.text


class MergingFrontend:
    """Receives deltas through frames, and merges three of them, as a client does that reads slowly."""

    is_blocked = False

    def __init__(self) -> None:
        self.deltas: list[OutputDelta] = []
        self._unmerged: list[OutputDelta] = []

    def send(self, delta: OutputDelta) -> None:
        [message] = FrameDecoder().feed(encode_frame(OutputDeltas([delta])))
        assert isinstance(message, OutputDeltas)
        self._unmerged += message.deltas
        if len(self._unmerged) == 3 or delta.final:
            self.deltas.append(merge_deltas(self._unmerged))
            self._unmerged = []

    def close_slow_reader(self, reason: str) -> None:
        raise AssertionError(reason)


async def submit(manager: RequestManager, frontend: MergingFrontend, request: GenerateRequest) -> None:
    manager.submit(frontend, request)
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return make_tokenizers(tmp_path_factory.mktemp("tokenizer"))


def run(
    vector: Vector, tokenizer: Tokenizer, size: int, stream: bool = True, choice: str = "auto", **options: Any
) -> list[OutputDelta]:
    """Return the deltas of a request whose core generates the vector in groups of `size` tokens, then an EOS."""
    sent: list[Message] = []
    limits = replace(LIMITS, parser_names=ParserNames(vector.tool_call_parser, vector.reasoning_parser))
    renderer = Renderer("Hi.<think>\n" if vector.is_open else "Hi.")
    manager = RequestManager(
        AdmissionController(limits, "base", 4),
        RequestProcessor(limits, tokenizer, renderer, None),
        RequestMetrics(EngineConfig("m"), "base", LIMITS.max_model_len),
        RecordingCores(sent),
    )
    manager.on_core_connected()
    manager.set_adapters({})
    frontend = MergingFrontend()
    parsing = OutputParsing(choice if vector.tool_call_parser else "none", **options)  # type: ignore[arg-type]
    request = GenerateRequest(
        1, "base", None, None, SamplingParams(max_tokens=None), stream, chat=conversation(tools=TOOLS), parsing=parsing
    )
    asyncio.run(submit(manager, frontend, request))
    if not sent:
        return frontend.deltas
    [sequence] = sent
    assert isinstance(sequence, SequenceRequest)
    token_ids = [*tokenizer.encode(vector.text, add_special_tokens=False), EOS]
    for start in range(0, len(token_ids), size):
        reason = "stop" if start + size >= len(token_ids) else None
        result = SequenceDelta(sequence.id, token_ids[start : start + size], reason)
        manager.on_step(StepResult([result], [], SchedulerStats()))
    assert frontend.deltas[-1].final and manager.num_open == 0
    return frontend.deltas


def output_of(deltas: list[OutputDelta]) -> ParsedOutput:
    text = "".join(delta.text for delta in deltas)
    events = [event for delta in deltas for event in delta.parsed or []]
    return merge_events(events) if deltas[-1].parsed is not None else ParsedOutput(text, "", ())


@pytest.mark.parametrize("kind", ["plain", "marked"])
def test_every_split_of_every_output_gives_the_same_events(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    for vector in VECTORS:
        num_tokens = len(tokenizer.encode(vector.text, add_special_tokens=False)) + 1
        # The tests of the parsers cover more sizes of groups.
        for size in {1 if num_tokens < 1000 else 7, 5, num_tokens}:
            for stream in (True, False):
                deltas = run(vector, tokenizer, size, stream)
                assert normalized(vector, output_of(deltas)) == expected(vector), (vector, size, stream)


def test_reasoning_tokens_are_counted_exactly(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, thoughts = tokenizers["marked"], "\nlong thoughts, 日本\n"
    num_tokens = len(tokenizer.encode(thoughts, add_special_tokens=False))
    for is_open in (True, False):
        text = ("" if is_open else "<think>") + thoughts + "</think>\n\nAnswer"
        vector = Vector("hermes", text, reasoning_parser="qwen3", is_open=is_open)
        for size in (1, 3, 1000):
            deltas = run(vector, tokenizer, size)
            assert deltas[-1].num_reasoning_tokens == num_tokens, (is_open, size)
            assert output_of(deltas).content == "Answer"
            assert "thoughts" in output_of(run(vector, tokenizer, size, separate_reasoning=False)).content


def test_special_tokens_in_an_answer_are_omitted(tokenizers: dict[str, Tokenizer]) -> None:
    vector = Vector("hermes", "a<s>b" + hermes("f", '{"a": "<s>1"}') + "<s>")
    assert output_of(run(vector, tokenizers["marked"], 2)).content == "ab"


def test_calls_have_ids_and_can_be_limited_to_one(tokenizers: dict[str, Tokenizer]) -> None:
    two_calls = hermes("f", "{}") + hermes("g", '{"a": 1}')
    for vector, length in ((Vector("hermes", two_calls), 46), (Vector("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]g{}"), 9)):
        deltas = run(vector, tokenizers["marked"], 3)
        ids = [call.id for call in output_of(deltas).tool_calls]
        assert [len(call_id) for call_id in ids] == [length, length] and len(set(ids)) == 2
        starts = [e for d in deltas for e in d.parsed or [] if isinstance(e, ToolCallStart)]
        assert [start.id for start in starts] == ids
        [call] = output_of(run(vector, tokenizers["marked"], 3, parallel_tool_calls=False)).tool_calls
        assert call.name == "f"


def test_kimi_keeps_the_ids_that_the_model_wrote(tokenizers: dict[str, Tokenizer]) -> None:
    """Its chat template needs them in the next request."""
    vector = Vector("kimi_k2", written_calls("kimi_k2", [("f", {}), ("g", {})]))
    calls = output_of(run(vector, tokenizers["marked"], 3)).tool_calls
    assert [call.id for call in calls] == ["functions.f:0", "functions.g:1"]


def test_calls_stay_in_the_text_with_tool_choice_none(tokenizers: dict[str, Tokenizer]) -> None:
    vector = Vector("hermes", hermes("f", "{}"))
    deltas = run(vector, tokenizers["marked"], 3, choice="none")
    assert output_of(deltas).content == vector.text and deltas[-1].parsed is None


def test_a_checkpoint_with_unknown_format_rejects_tools(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    admission = AdmissionController(LIMITS, "base", 4)
    admission.open()
    request = GenerateRequest(
        1, "base", None, None, SamplingParams(), True, chat=conversation(tools=TOOLS), parsing=OutputParsing("auto")
    )
    with pytest.raises(QuireError, match=r"tools: the format of tool calls of this model is unknown"):
        admission.admit(request, Counter())


@pytest.mark.parametrize(
    "target",
    ["requests.processor.compose_grammar", "parsers.output_parser.OutputParser.feed"],
    ids=["grammar", "feed"],
)
def test_a_defect_ends_one_request(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("defect")

    vector = Vector("hermes", "Hello")
    with monkeypatch.context() as patch:
        patch.setattr(f"quire_engine.{target}", fail)
        [delta] = run(vector, tokenizers["marked"], 1)
    assert delta.error_code == Code.INTERNAL and delta.final and "defect" not in delta.error
    assert output_of(run(vector, tokenizers["marked"], 1)).content == "Hello"
