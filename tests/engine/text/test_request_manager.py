# SPDX-License-Identifier: Apache-2.0
"""Whatever frontends and the engine core do, each request ends once, in full, and the core is left with nothing."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.text.admission import AdmissionController, RequestLimits
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.text.request_state import RequestState
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Internal, InvalidArgument, NotFound, Unavailable
from quire_spec.protocol.messages import (
    AbortSequences,
    GenerateRequest,
    IpcMessage,
    OutputDelta,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StepResult,
)

LIMITS = RequestLimits(max_model_len=32, vocab_size=384, max_num_queued_reqs=4, max_prompt_bytes=2000)
with tempfile.TemporaryDirectory() as _folder:
    TOKENIZER = Tokenizer(save_tokenizer(byte_level(), Path(_folder)))


class RecordingFrontend:
    """A frontend: what it was sent, by request."""

    def __init__(self) -> None:
        self.events: dict[int, list[OutputDelta]] = {}

    def send(self, delta: OutputDelta) -> None:
        self.events.setdefault(delta.id, []).append(delta)


def make_desk(tokenizer: Tokenizer | None = TOKENIZER) -> tuple[RequestManager, list[IpcMessage], RequestMetrics]:
    sent: list[IpcMessage] = []
    metrics = RequestMetrics(EngineConfig("m"), "base", LIMITS.max_model_len)
    return (
        RequestManager(AdmissionController(LIMITS, "base", tokenizer is not None), tokenizer, metrics, sent.append),
        sent,
        metrics,
    )


def submit(id: int, prompt: str | None = "fox", ids: list[int] | None = None, stream: bool = True, **params: object):
    return GenerateRequest(id, "base", prompt, ids, dict(params), stream)


def begin(desk: RequestManager, frontend: RecordingFrontend, request: GenerateRequest) -> None:
    generation = desk.submit(frontend, request)
    if generation is not None:
        assert request.prompt is not None
        desk.on_tokenized(generation, TOKENIZER.encode(request.prompt))


@dataclass(frozen=True)
class _Wanted:
    """What a request asked for."""

    stream: bool
    n: int
    made: int


class DeskMachine(RuleBasedStateMachine):
    """Frontends that come, cancel and go, a core that steps, dies and returns, threads that tokenize."""

    def __init__(self) -> None:
        super().__init__()
        self.desk, self.sent, self.metrics = make_desk()
        self.frontends: list[RecordingFrontend] = [RecordingFrontend()]
        self.wanted: dict[tuple[RecordingFrontend, int], _Wanted] = {}
        """Requests whose final event is owed."""
        self.tokenizing: list[RequestState] = []
        self.core: dict[int, SequenceRequest] | None = None
        self.ended: set[int] = set()
        """Sequences that ended in the last step."""
        self.next_id = 0

    def take_sent(self) -> None:
        for message in self.sent:
            assert self.core is not None, "a message to a core that is not there"
            if isinstance(message, SequenceRequest):
                assert message.id not in self.core
                self.core[message.id] = message
                if message.parent_id is not None:
                    assert self.core[message.parent_id].prompt_token_ids == message.prompt_token_ids
            else:
                assert isinstance(message, AbortSequences)
                for id in message.ids:
                    # Or it ended in the step that made a sibling fail.
                    assert id in self.core or id in self.ended
                    self.core.pop(id, None)
        self.sent.clear()

    @rule()
    def come(self):
        self.frontends.append(RecordingFrontend())

    @precondition(lambda self: self.core is None)
    @rule()
    def core_comes(self):
        self.core = {}
        self.desk.on_core_connected()

    @precondition(lambda self: self.core is not None)
    @rule()
    def core_dies(self):
        self.take_sent()
        self.core = None
        self.desk.on_core_lost()
        assert self.desk.num_open == 0
        # Aborts for what was open are not sent into the void by the desk's caller; here nothing may be left to send.
        self.sent.clear()

    @rule(data=st.data(), text=st.booleans(), stream=st.booleans(), good=st.booleans(), n=st.integers(1, 3))
    def submit(self, data: st.DataObject, text: bool, stream: bool, good: bool, n: int):
        frontend = data.draw(st.sampled_from(self.frontends))
        self.next_id += 1
        prompt = None if text else ([5, 6] if good else [5, 384])
        queued = self.desk.num_queued
        made = n if stream else data.draw(st.sampled_from([n, n, 3]))
        asked = {"stop": ["ab"], "logprobs": 1, "n": n, "best_of": made}
        request = submit(self.next_id, "fox" if text else None, prompt, stream, **asked)
        self.wanted[frontend, self.next_id] = _Wanted(stream, n, made)
        if generation := self.desk.submit(frontend, request):
            self.tokenizing.append(generation)
        if self.core is None or (queued >= LIMITS.max_num_queued_reqs and (text or good)):
            assert frontend.events[self.next_id][-1].error_code == "UNAVAILABLE"

    @precondition(lambda self: self.tokenizing)
    @rule(data=st.data(), how=st.sampled_from(["ids", "too many", "error"]))
    def tokenized(self, data: st.DataObject, how: str):
        generation = self.tokenizing.pop(data.draw(st.integers(0, len(self.tokenizing) - 1)))
        if how == "error":
            self.desk.fail(generation, InvalidArgument("no text"))
        else:
            self.desk.on_tokenized(generation, [5] * (3 if how == "ids" else 99))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject):
        frontend = data.draw(st.sampled_from(self.frontends))
        ids = data.draw(st.lists(st.integers(1, self.next_id + 1), max_size=3, unique=True))
        self.desk.cancel(frontend, ids)
        for id in ids:
            self.wanted.pop((frontend, id), None)

    @precondition(lambda self: len(self.frontends) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject):
        frontend = self.frontends.pop(data.draw(st.integers(0, len(self.frontends) - 1)))
        mine = [key for key in self.wanted if key[0] is frontend]
        assert self.desk.on_frontend_closed(frontend) == len([key for key in mine if not self.over(key)])
        for key in mine:
            del self.wanted[key]

    @precondition(lambda self: self.core)
    @rule(data=st.data())
    def step(self, data: st.DataObject):
        self.take_sent()
        assert self.core is not None
        self.ended.clear()
        ids = data.draw(st.lists(st.sampled_from([*self.core, 17]), max_size=4, unique=True)) if self.core else []
        results = []
        for id in ids:
            end = data.draw(st.sampled_from([None, None, "length", "stop", "error"]))
            tokens = [TOKENIZER.encode(c)[1] for c in data.draw(st.text("abc", min_size=1, max_size=2))]
            if end == "error":
                results.append(SequenceDelta(id, [], error_code="INTERNAL", error="device"))
            else:
                logprobs = [[[t, -0.5, 1], [9, -1.0, 2]] for t in tokens]
                results.append(SequenceDelta(id, tokens, end, logprobs))
            if end is not None and id in self.core:
                del self.core[id]
                self.ended.add(id)
        self.desk.on_step(StepResult(results, ids, SchedulerStats(num_blocks=4)))

    @invariant()
    def each_request_ends_once_and_in_full(self):
        for (frontend, id), wanted in self.wanted.items():
            events = frontend.events.get(id, [])
            assert [e.final for e in events[:-1]] == [False] * (len(events) - 1)
            if events and events[-1].final and events[-1].error_code is None:
                assert wanted.stream or len(events) == wanted.n
                assert {e.index for e in events} == set(range(wanted.n))
                outputs = [[e for e in events if e.index == index] for index in range(wanted.n)]
                for output in outputs:
                    assert [e.finish_reason is not None for e in output] == [False] * (len(output) - 1) + [True]
                    self.check_answer(output)
                if wanted.made > wanted.n:
                    sums = [output[-1].cumulative_logprob for output in outputs]
                    assert sums == sorted(sums, reverse=True)

    def check_answer(self, events: list[OutputDelta]) -> None:
        ids = [i for e in events for i in e.token_ids]
        text = "".join(e.text for e in events)
        raw = TOKENIZER.decode(ids)
        assert "ab" not in text
        assert raw.startswith(text) and len(raw) - len(text) <= 2
        assert events[-1].num_output_tokens == len(ids)
        assert sum(len(e.logprobs or []) for e in events) == len(ids)
        assert events[-1].cumulative_logprob == -0.5 * len(ids)

    def over(self, key: tuple[RecordingFrontend, int]) -> bool:
        events = key[0].events.get(key[1])
        return bool(events) and events[-1].final

    @invariant()
    def the_desk_and_the_core_agree(self):
        self.take_sent()
        waiting = sum(1 for g in self.tokenizing if self.desk.is_open(g))
        assert self.desk.num_open == len([key for key in self.wanted if not self.over(key)])
        # Of the others, one sequence at least is still in the core, and none of a request that is over.
        assert waiting <= self.desk.num_open <= len(self.core or {}) + waiting
        assert bool(self.core) == (self.desk.num_open > waiting)
        assert 0 <= self.desk.num_queued <= min(self.desk.num_open, LIMITS.max_num_queued_reqs)


DeskMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_desk = DeskMachine.TestCase


def test_a_stop_string_that_the_core_does_not_know_is_aborted_there():
    desk, sent, _ = make_desk()
    desk.on_core_connected()
    inbox = RecordingFrontend()
    begin(desk, inbox, submit(1, stop="b"))
    request = sent.pop()
    assert isinstance(request, SequenceRequest)
    tokens = [TOKENIZER.encode(c)[1] for c in "abc"]
    desk.on_step(StepResult([SequenceDelta(request.id, tokens)], [request.id], SchedulerStats()))
    (event,) = inbox.events[1]
    assert (event.text, event.token_ids, event.finish_reason) == ("a", tokens[:2], "stop")
    assert sent == [AbortSequences([request.id])]
    desk.on_step(StepResult([SequenceDelta(request.id, tokens, "length")], [], SchedulerStats()))
    assert len(inbox.events[1]) == 1 and len(sent) == 1


def test_drain_refuses_new_requests_and_tells_when_the_last_is_over():
    desk, sent, _ = make_desk()
    desk.on_core_connected()
    inbox, told = RecordingFrontend(), []
    begin(desk, inbox, submit(1))
    desk.drain(lambda: told.append(True))
    begin(desk, inbox, submit(2))
    assert "draining" in inbox.events[2][0].error and not told
    desk.cancel(inbox, [1])
    assert told == [True]
    desk.drain(lambda: told.append(True))
    assert told == [True, True]
    assert len(sent) == 2


def test_names_of_adapters():
    desk, sent, _ = make_desk()
    desk.on_core_connected()
    inbox = RecordingFrontend()
    desk.set_adapters({f"adapter-{i:02}": f"sha256:{i}" for i in range(15)})
    begin(desk, inbox, GenerateRequest(1, "adapter-03", None, [5], {}, True))
    assert isinstance(sent[0], SequenceRequest) and sent[0].adapter_digest == "sha256:3"
    desk.set_adapters({"adapter-03": "sha256:new"})
    begin(desk, inbox, GenerateRequest(2, "adapter-03", None, [5], {}, True))
    assert isinstance(sent[1], SequenceRequest) and sent[1].adapter_digest == "sha256:new"
    begin(desk, inbox, GenerateRequest(3, "adapter-04", None, [5], {}, True))
    assert inbox.events[3][0].error_code == "NOT_FOUND"
    assert inbox.events[3][0].error == "model 'adapter-04' is not served; served are base, adapter-03"
    desk.set_adapters({f"adapter-{i:02}": "d" for i in range(15)})
    begin(desk, inbox, GenerateRequest(4, "Base", None, [5], {}, True))
    assert "base, adapter-00" in inbox.events[4][0].error and "and 6 more" in inbox.events[4][0].error


def test_names_are_unavailable_not_unknown_while_nobody_has_told_them():
    desk, sent, _ = make_desk()
    desk.on_core_connected()
    inbox = RecordingFrontend()
    begin(desk, inbox, GenerateRequest(1, "sql", None, [5], {}, True))
    assert inbox.events[1][0].error_code == "UNAVAILABLE"
    desk.set_adapters({"sql": "sha256:1"})
    begin(desk, inbox, GenerateRequest(2, "sql", None, [5], {}, True))
    # A core that has just come back does not know the digest yet.
    desk.on_step(
        StepResult([SequenceDelta(sent[0].id, [], error_code="NOT_FOUND", error="adapter")], [], SchedulerStats())
    )
    assert inbox.events[2][0].error_code == "UNAVAILABLE"
    assert "try again" in inbox.events[2][0].error


def test_limits_of_an_adapter_refuse_its_requests_and_no_others():
    desk, sent, metrics = make_desk()
    desk.on_core_connected()
    inbox = RecordingFrontend()
    limits = {"a": AdapterLimits(maxConcurrentRequests=1), "b": AdapterLimits(maxTokensPerSecond=1)}
    desk.set_adapters({"a": "d1", "b": "d2"}, limits)
    begin(desk, inbox, GenerateRequest(1, "a", None, [5], {}, True))
    begin(desk, inbox, GenerateRequest(2, "a", None, [5], {}, True))
    assert inbox.events[2][0].error_code == "UNAVAILABLE" and "maxConcurrentRequests is 1" in inbox.events[2][0].error
    begin(desk, inbox, GenerateRequest(3, "b", None, [5] * 7, {}, True))
    request = sent[1]
    assert isinstance(request, SequenceRequest) and request.adapter_digest == "d2"
    # Prompt and output count: 7 and 4 are more than the ten seconds' worth.
    desk.on_step(StepResult([SequenceDelta(request.id, [65] * 4, "length")], [request.id], SchedulerStats()))
    begin(desk, inbox, GenerateRequest(4, "b", None, [5], {}, True))
    assert "maxTokensPerSecond is 1" in inbox.events[4][0].error
    begin(desk, inbox, GenerateRequest(5, "base", None, [5], {}, True))
    desk.cancel(inbox, [1])
    begin(desk, inbox, GenerateRequest(6, "a", None, [5], {}, True))
    assert not inbox.events.get(5) and not inbox.events.get(6)
    value = metrics.registry.get_sample_value
    assert value("quire_requests_refused_total", {"model_name": "base", "code": "UNAVAILABLE"}) == 2


def test_two_requests_of_one_id_are_a_broken_frontend():
    desk, _, _ = make_desk()
    desk.on_core_connected()
    inbox = RecordingFrontend()
    begin(desk, inbox, submit(1))
    with pytest.raises(Internal, match="id 1"):
        desk.submit(inbox, submit(1))
    begin(desk, RecordingFrontend(), submit(1))
    assert desk.num_open == 2


def test_metrics_of_a_request():
    desk, sent, metrics = make_desk()
    desk.on_core_connected()
    inbox = RecordingFrontend()
    begin(desk, inbox, submit(1, ids=[5, 6, 7], prompt=None))
    request = sent[0]
    assert isinstance(request, SequenceRequest)
    desk.on_step(
        StepResult([SequenceDelta(request.id, [65])], [request.id], SchedulerStats(num_blocks=9, num_used_blocks=3))
    )
    desk.on_step(StepResult([SequenceDelta(request.id, [66], "length")], [], SchedulerStats(num_blocks=9)))
    desk.submit(inbox, submit(2, ids=[999], prompt=None))
    value = metrics.registry.get_sample_value
    model = {"model_name": "base"}
    assert value("vllm:prompt_tokens_total", model) == 3
    assert value("vllm:generation_tokens_total", model) == 2
    assert value("vllm:request_success_total", model | {"finished_reason": "length"}) == 1
    for name in ("time_to_first_token", "inter_token_latency", "request_queue_time", "e2e_request_latency"):
        assert value(f"vllm:{name}_seconds_count", model) == 1, name
    assert value("quire_requests_refused_total", model | {"code": "INVALID_ARG"}) == 1


def test_residency_of_adapters_is_shown_by_name():
    desk, _, metrics = make_desk()
    desk.on_core_connected()
    desk.set_adapters({"a": "d1", "also-a": "d1", "b": "d2"})

    def resident() -> dict[str, float | None]:
        labels = [{"model_name": "base", "adapter": name} for name in ("a", "also-a", "b")]
        return {x["adapter"]: metrics.registry.get_sample_value("quire_adapter_slot_residency", x) for x in labels}

    desk.on_step(StepResult([], [], SchedulerStats(slot_adapters=["d1", "d9"])))
    assert resident() == {"a": 1, "also-a": 1, "b": None}
    desk.on_step(StepResult([], [], SchedulerStats(slot_adapters=["d2"])))
    assert resident() == {"a": 0, "also-a": 0, "b": 1}
    desk.set_adapters({"a": "d2"})
    desk.on_step(StepResult([], [], SchedulerStats(slot_adapters=["d2"])))
    assert resident() == {"a": 1, "also-a": None, "b": None}


GOOD = {"id": 1, "model": "base", "prompt": None, "prompt_token_ids": [1], "params": {}, "stream": True}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"prompt": "x"}, InvalidArgument, "not both or neither"),
        ({"prompt_token_ids": None}, InvalidArgument, "not both or neither"),
        ({"prompt_token_ids": []}, InvalidArgument, "empty"),
        ({"prompt_token_ids": [1] * 31}, None, ""),
        ({"prompt_token_ids": [1] * 32}, InvalidArgument, "has 32 tokens and max_model_len is 32"),
        ({"prompt_token_ids": [384]}, InvalidArgument, "'384', which is no token id; ids of this model are 0 to 383"),
        ({"prompt_token_ids": [-1]}, InvalidArgument, "'-1'"),
        ({"prompt_token_ids": [1, "x"]}, InvalidArgument, "'x'"),
        ({"prompt_token_ids": [True]}, InvalidArgument, "'True'"),
        ({"prompt_token_ids": {"a": 1}}, InvalidArgument, "list"),
        ({"prompt_token_ids": None, "prompt": 5}, InvalidArgument, "string"),
        ({"prompt_token_ids": None, "prompt": "x" * 2001}, InvalidArgument, "2001 bytes"),
        ({"prompt_token_ids": None, "prompt": "é" * 1001}, InvalidArgument, "2002 bytes"),
        ({"prompt_token_ids": None, "prompt": "é" * 1000}, None, ""),
        ({"model": "nope"}, NotFound, "'nope' is not served; served are base"),
        ({"model": ["base"]}, NotFound, "not served"),
        ({"params": {"temprature": 1}}, InvalidArgument, "temprature"),
        ({"params": {"top_p": 7}}, InvalidArgument, "top_p"),
        ({"params": [1]}, InvalidArgument, "object"),
        ({"cache_salt": 5}, InvalidArgument, "cache_salt"),
        ({"cache_salt": "x" * 257}, InvalidArgument, "cache_salt"),
        ({"priority": 1}, InvalidArgument, "priority: 1, but this server runs requests in order of arrival"),
        ({"priority": 2**31}, InvalidArgument, "priority"),
        ({"priority": "1"}, InvalidArgument, "priority"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_admission(change: dict[str, object], error: type[Exception] | None, said: str):
    admission = AdmissionController(LIMITS, "base", has_tokenizer=True)
    admission.closed_reason, admission.digests_by_name = "", {}
    request = GenerateRequest(**(GOOD | change))
    if error is None:
        assert admission.admit(request, 0).params == SamplingParams()
        return
    with pytest.raises(error) as caught:
        admission.admit(request, 0)
    assert said in str(caught.value)


def test_admission_without_a_tokenizer_and_when_it_is_closed():
    admission = AdmissionController(LIMITS, "base", has_tokenizer=False)
    with pytest.raises(Unavailable, match="starting"):
        admission.admit(GenerateRequest(**GOOD), 0)
    admission.closed_reason = ""
    admission.admit(GenerateRequest(**GOOD), 3)
    with pytest.raises(Unavailable, match="4 requests are waiting and max_num_queued_reqs is 4"):
        admission.admit(GenerateRequest(**GOOD), 4)
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        admission.admit(GenerateRequest(**GOOD | {"prompt": "x", "prompt_token_ids": None}), 0)
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        admission.admit(GenerateRequest(**GOOD | {"params": {"stop": "x"}}), 0)


@pytest.mark.parametrize("lost", [float("-inf"), float("nan")])
def test_infinite_logprobs_become_a_number_that_json_has(lost):
    desk, sent, _ = make_desk(tokenizer=None)
    desk.on_core_connected()
    inbox = RecordingFrontend()
    desk.submit(inbox, submit(1, None, [5], logprobs=1))
    assert isinstance(sent[0], SequenceRequest)
    logprobs = [[[7, lost, 300], [9, -1.0, 1]]]
    desk.on_step(StepResult([SequenceDelta(sent[0].id, [7], "length", logprobs)], [], SchedulerStats()))
    (event,) = inbox.events[1]
    assert event.logprobs == [
        {
            "7": {"logprob": -9999.0, "rank": 300, "decoded_token": None},
            "9": {"logprob": -1.0, "rank": 1, "decoded_token": None},
        }
    ]
    assert (event.text, event.cumulative_logprob) == ("", -9999.0)
