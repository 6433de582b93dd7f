# SPDX-License-Identifier: Apache-2.0
"""Each request ends exactly once and in full, and its sequences leave the core, whichever component fails."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client.parser import text_string_to_metric_families
from support.recording_cores import RecordingCores
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.processor import RequestProcessor, TokenizerRunner, run_inline
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Internal, InvalidArgument
from quire_spec.protocol.messages import (
    AbortSequences,
    AdapterResidency,
    GenerateRequest,
    Message,
    OutputDelta,
    SchedulerStats,
    SequenceDelta,
    SequenceRequest,
    StartedSequence,
    StepResult,
    TokenLogprob,
)

LIMITS = RequestLimits(max_model_len=32, vocab_size=384, max_prompt_bytes=2000)
MAX_NUM_QUEUED_REQS = 4
PRIORITY = -3
with tempfile.TemporaryDirectory() as _folder:
    TOKENIZER = Tokenizer(save_tokenizer(byte_level(), Path(_folder)))


class Panic(BaseException):
    """Like PanicException of libraries that are written in Rust, which is no Exception."""


class RecordingFrontend:
    """A frontend that records the output deltas that it receives, by request."""

    is_blocked = False

    def __init__(self) -> None:
        self.deltas: dict[int, list[OutputDelta]] = {}

    def send(self, delta: OutputDelta) -> None:
        self.deltas.setdefault(delta.id, []).append(delta)

    def close_slow_reader(self, reason: str) -> None:
        raise AssertionError(reason)


class DeferredTokenizer:
    """Tokenizes when the test triggers it, in any order, as threads do."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[list[int]]] = []

    async def run(self, function: Callable[[], Any], num_chars: int) -> Any:
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return await future, []

    @property
    def pending(self) -> list[asyncio.Future[list[int]]]:
        """The calls that have not been answered or cancelled."""
        return [future for future in self._futures if not future.done()]


def sample_value(metrics: RequestMetrics, name: str, labels: dict[str, str]) -> float | None:
    """Return the value of a series as it is scraped; None if the series does not exist."""
    families = text_string_to_metric_families(metrics.render())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return next((sample.value for sample in samples if sample.labels == labels), None)


def make_manager(
    run_tokenizer: TokenizerRunner = run_inline,
    has_tokenizer: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[RequestManager, list[Message], RequestMetrics]:
    sent: list[Message] = []
    metrics = RequestMetrics(EngineConfig("m", enable_lora=True, max_loras=4), "base", LIMITS.max_model_len)
    limits = replace(LIMITS, has_tokenizer=has_tokenizer)
    processor = RequestProcessor(limits, TOKENIZER if has_tokenizer else None, None, None, run_tokenizer)
    admission = AdmissionController(limits, "base", MAX_NUM_QUEUED_REQS)
    return RequestManager(admission, processor, metrics, RecordingCores(sent), clock), sent, metrics


def connected_manager(
    has_tokenizer: bool = True,
) -> tuple[RequestManager, RecordingFrontend, list[Message], RequestMetrics]:
    manager, sent, metrics = make_manager(has_tokenizer=has_tokenizer)
    manager.on_core_connected()
    return manager, RecordingFrontend(), sent, metrics


async def settle() -> None:
    """Let all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def submit(manager: RequestManager, frontend: RecordingFrontend, request: GenerateRequest) -> None:
    manager.submit(frontend, request)
    await settle()


def make_request(
    id: int, prompt: str | None = "fox", ids: list[int] | None = None, stream: bool = True, **params: object
) -> GenerateRequest:
    return GenerateRequest(id, "base", prompt, ids, SamplingParams.from_mapping(params), stream, priority=PRIORITY)


@dataclass(frozen=True)
class _ExpectedOutputs:
    stream: bool
    n: int
    best_of: int


class RequestManagerMachine(RuleBasedStateMachine):
    """Frontends connect, cancel and disconnect, the core steps, dies and returns, threads tokenize."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.tokenizer = DeferredTokenizer()
        self.manager, self.sent, self.metrics = make_manager(self.tokenizer.run)
        self.frontends: list[RecordingFrontend] = [RecordingFrontend()]
        self.expected: dict[tuple[RecordingFrontend, int], _ExpectedOutputs] = {}
        """Requests that have or will have a final delta."""
        self.core: dict[int, SequenceRequest] | None = None
        """Running sequences; None while the core is down."""
        self.ended: set[int] = set()
        """Sequences that ended in the last step."""
        self.next_id = 0

    def teardown(self) -> None:
        self.call(*(partial(self.manager.on_frontend_closed, frontend) for frontend in self.frontends))
        self.loop.close()

    def call(self, *functions: Callable[[], object]) -> None:
        """Call functions on the event loop in one iteration, and then let all tasks run."""

        async def run() -> None:
            for function in functions:
                function()
            await settle()

        self.loop.run_until_complete(run())

    def deliver_to_core(self) -> None:
        for message in self.sent:
            assert self.core is not None, "a message was sent while the core was down"
            if isinstance(message, SequenceRequest):
                assert message.id not in self.core and message.priority == PRIORITY
                self.core[message.id] = message
                if message.parent_id is not None:
                    assert self.core[message.parent_id].prompt_token_ids == message.prompt_token_ids
            else:
                assert isinstance(message, AbortSequences)
                for id in message.ids:
                    # Or it ended in the step in which a sibling failed.
                    assert id in self.core or id in self.ended
                    self.core.pop(id, None)
        self.sent.clear()

    @rule()
    def connect_frontend(self):
        self.frontends.append(RecordingFrontend())

    @precondition(lambda self: self.core is None)
    @rule()
    def connect_core(self):
        self.core = {}
        self.manager.on_core_connected()

    @precondition(lambda self: self.core is not None)
    @rule()
    def lose_core(self):
        self.call(self.lose_core_now)

    def lose_core_now(self) -> None:
        self.deliver_to_core()
        self.core = None
        self.manager.on_core_lost()
        assert self.manager.num_open == 0
        # CoreClient drops messages while it is not connected.
        self.sent.clear()

    @rule(
        data=st.data(),
        is_text=st.booleans(),
        stream=st.booleans(),
        valid=st.booleans(),
        n=st.integers(1, 3),
        then=st.sampled_from(["", "", "cancel", "lose core"]),
    )
    def submit(self, data: st.DataObject, is_text: bool, stream: bool, valid: bool, n: int, then: str):
        """Submit a request. In the same iteration of the event loop, it can be cancelled or lose the core."""
        frontend = data.draw(st.sampled_from(self.frontends))
        self.next_id += 1
        token_ids = None if is_text else ([5, 6] if valid else [5, 384])
        num_queued = self.manager.num_queued
        best_of = n if stream else data.draw(st.sampled_from([n, n, 3]))
        params = {"stop": ["ab"], "logprobs": 1, "n": n, "best_of": best_of}
        request = make_request(self.next_id, "fox" if is_text else None, token_ids, stream, **params)
        self.expected[frontend, self.next_id] = _ExpectedOutputs(stream, n, best_of)
        is_rejected = self.core is None or (num_queued >= MAX_NUM_QUEUED_REQS and (is_text or valid))
        functions: list[Callable[[], object]] = [partial(self.manager.submit, frontend, request)]
        if then == "cancel":
            functions.append(partial(self.cancel_now, frontend, [self.next_id]))
        elif then == "lose core" and self.core is not None:
            functions.append(self.lose_core_now)
        self.call(*functions)
        if is_rejected:
            assert frontend.deltas[self.next_id][-1].error_code == "UNAVAILABLE"

    @precondition(lambda self: self.tokenizer.pending)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["ids", "too many", "error", "defect", "panic"]),
        then=st.sampled_from(["", "", "cancel", "lose core"]),
    )
    def tokenize(self, data: st.DataObject, outcome: str, then: str):
        """Tokenize a prompt. Before the request gets the result, it can be cancelled or lose the core."""
        future = data.draw(st.sampled_from(self.tokenizer.pending))
        functions: list[Callable[[], object]] = []
        if outcome == "error":
            functions.append(partial(future.set_exception, InvalidArgument("not text")))
        elif outcome == "defect":
            functions.append(partial(future.set_exception, RuntimeError("defect")))
        elif outcome == "panic":
            functions.append(partial(future.set_exception, Panic("in native code")))
        else:
            functions.append(partial(future.set_result, [5] * (3 if outcome == "ids" else 99)))
        if then == "cancel":
            functions += [partial(self.cancel_now, frontend, [request_id]) for frontend, request_id in self.expected]
        elif then == "lose core" and self.core is not None:
            functions.append(self.lose_core_now)
        self.call(*functions)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject):
        frontend = data.draw(st.sampled_from(self.frontends))
        ids = data.draw(st.lists(st.integers(1, self.next_id + 1), max_size=3, unique=True))
        self.call(partial(self.cancel_now, frontend, ids))

    def cancel_now(self, frontend: RecordingFrontend, ids: list[int]) -> None:
        self.manager.cancel(frontend, ids)
        for id in ids:
            self.expected.pop((frontend, id), None)

    @precondition(lambda self: len(self.frontends) > 1)
    @rule(data=st.data())
    def disconnect_frontend(self, data: st.DataObject):
        frontend = self.frontends.pop(data.draw(st.integers(0, len(self.frontends) - 1)))
        own_keys = [key for key in self.expected if key[0] is frontend]
        num_open = len([key for key in own_keys if not self.has_ended(key)])
        num_closed: list[int] = []
        self.call(lambda: num_closed.append(self.manager.on_frontend_closed(frontend)))
        assert num_closed == [num_open]
        for key in own_keys:
            del self.expected[key]

    @precondition(lambda self: self.core)
    @rule(data=st.data())
    def step(self, data: st.DataObject):
        self.deliver_to_core()
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
        step = StepResult(results, [StartedSequence(i, 0.0) for i in ids], SchedulerStats(num_blocks=4))
        self.call(partial(self.manager.on_step, step))

    @invariant()
    def each_request_ends_once_and_in_full(self):
        for (frontend, id), expected in self.expected.items():
            deltas = frontend.deltas.get(id, [])
            assert [delta.final for delta in deltas[:-1]] == [False] * (len(deltas) - 1)
            if deltas and deltas[-1].final and deltas[-1].error_code is None:
                assert expected.stream or len(deltas) == expected.n
                assert {delta.index for delta in deltas} == set(range(expected.n))
                outputs = [[delta for delta in deltas if delta.index == index] for index in range(expected.n)]
                for output in outputs:
                    assert [delta.finish_reason is not None for delta in output] == [False] * (len(output) - 1) + [True]
                    self.check_output(output)
                if expected.best_of > expected.n:
                    sums = [output[-1].cumulative_logprob for output in outputs]
                    assert sums == sorted(sums, reverse=True)

    def check_output(self, deltas: list[OutputDelta]) -> None:
        ids = [i for delta in deltas for i in delta.token_ids]
        text = "".join(delta.text for delta in deltas)
        raw = TOKENIZER.decode(ids)
        assert "ab" not in text
        assert raw.startswith(text) and len(raw) - len(text) <= 2
        assert deltas[-1].num_output_tokens == len(ids)
        assert sum(len(delta.logprobs or []) for delta in deltas) == len(ids)
        assert deltas[-1].cumulative_logprob == -0.5 * len(ids)

    def has_ended(self, key: tuple[RecordingFrontend, int]) -> bool:
        deltas = key[0].deltas.get(key[1])
        return bool(deltas) and deltas[-1].final

    @invariant()
    def manager_and_core_agree(self):
        self.deliver_to_core()
        num_tokenizing = len(self.tokenizer.pending)
        assert self.manager.num_open == len([key for key in self.expected if not self.has_ended(key)])
        # Each other open request has at least one sequence in the core, and a request that ended has none.
        assert num_tokenizing <= self.manager.num_open <= len(self.core or {}) + num_tokenizing
        assert bool(self.core) == (self.manager.num_open > num_tokenizing)
        assert 0 <= self.manager.num_queued <= min(self.manager.num_open, MAX_NUM_QUEUED_REQS)


RequestManagerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_random_histories = RequestManagerMachine.TestCase


async def test_drain_rejects_new_requests_and_calls_back_when_the_last_ends():
    manager, frontend, sent, _ = connected_manager()
    drained: list[bool] = []
    await submit(manager, frontend, make_request(1))
    manager.drain(lambda: drained.append(True))
    await submit(manager, frontend, make_request(2))
    assert "draining" in frontend.deltas[2][0].error and not drained
    manager.cancel(frontend, [1])
    assert drained == [True]
    manager.drain(lambda: drained.append(True))
    assert drained == [True, True]
    assert len(sent) == 2


async def test_adapter_names_resolve_to_the_current_digest():
    manager, frontend, sent, _ = connected_manager()
    manager.set_adapters({f"adapter-{i:02}": f"sha256:{i}" for i in range(15)})
    await submit(manager, frontend, GenerateRequest(1, "adapter-03", None, [5], SamplingParams(), True))
    assert isinstance(sent[0], SequenceRequest) and sent[0].adapter_digest == "sha256:3"
    manager.set_adapters({"adapter-03": "sha256:new"})
    await submit(manager, frontend, GenerateRequest(2, "adapter-03", None, [5], SamplingParams(), True))
    assert isinstance(sent[1], SequenceRequest) and sent[1].adapter_digest == "sha256:new"
    await submit(manager, frontend, GenerateRequest(3, "adapter-04", None, [5], SamplingParams(), True))
    assert frontend.deltas[3][0].error_code == "NOT_FOUND"
    sentence = "LoRA adapter-04 is not supported, we currently support ['adapter-03']"  # vllm_backend's
    assert frontend.deltas[3][0].error == f"model 'adapter-04' is not served; the base model is 'base': {sentence}"
    manager.set_adapters({f"adapter-{i:02}": "d" for i in range(15)})
    await submit(manager, frontend, GenerateRequest(4, "Base", None, [5], SamplingParams(), True))
    assert (
        "['adapter-00', " in frontend.deltas[4][0].error and "'adapter-09'] and 5 more" in frontend.deltas[4][0].error
    )


async def test_unknown_adapter_is_unavailable_until_names_are_announced():
    manager, frontend, sent, _ = connected_manager()
    await submit(manager, frontend, GenerateRequest(1, "sql", None, [5], SamplingParams(), True))
    assert frontend.deltas[1][0].error_code == "UNAVAILABLE"
    manager.set_adapters({"sql": "sha256:1"})
    await submit(manager, frontend, GenerateRequest(2, "sql", None, [5], SamplingParams(), True))
    # A core that has just restarted does not know the digest yet.
    manager.on_step(
        StepResult([SequenceDelta(sent[0].id, [], error_code="NOT_FOUND", error="adapter")], [], SchedulerStats())
    )
    assert frontend.deltas[2][0].error_code == "UNAVAILABLE"
    assert "try again" in frontend.deltas[2][0].error


async def test_an_adapter_that_is_loading_is_unavailable_and_an_unknown_one_is_not_found():
    manager, frontend, sent, _ = connected_manager()
    manager.set_loading_adapters({"sql"})
    for request_id, name in enumerate(("sql", "other")):
        await submit(manager, frontend, GenerateRequest(request_id, name, None, [5], SamplingParams(), True))
    assert [frontend.deltas[i][0].error_code for i in range(2)] == ["UNAVAILABLE", "NOT_FOUND"]
    assert "is not loaded yet" in frontend.deltas[0][0].error
    manager.set_adapters({"sql": "sha256:1"})
    await submit(manager, frontend, GenerateRequest(3, "sql", None, [5], SamplingParams(), True))
    assert len(sent) == 1


async def test_adapter_limits_reject_only_its_own_requests():
    manager, frontend, sent, metrics = connected_manager()
    limits = {"a": AdapterLimits(maxConcurrentRequests=1), "b": AdapterLimits(maxTokensPerSecond=1)}
    manager.set_adapters({"a": "d1", "b": "d2"}, limits)
    await submit(manager, frontend, GenerateRequest(1, "a", None, [5], SamplingParams(), True))
    await submit(manager, frontend, GenerateRequest(2, "a", None, [5], SamplingParams(), True))
    assert frontend.deltas[2][0].error_code == "UNAVAILABLE"
    assert "maxConcurrentRequests is 1" in frontend.deltas[2][0].error
    await submit(manager, frontend, GenerateRequest(3, "b", None, [5] * 7, SamplingParams(), True))
    request = sent[1]
    assert isinstance(request, SequenceRequest) and request.adapter_digest == "d2"
    # Prompt and output both count: 7 + 4 tokens exceed the burst of 10 s.
    manager.on_step(
        StepResult(
            [SequenceDelta(request.id, [65] * 4, "length")], [StartedSequence(request.id, 0.0)], SchedulerStats()
        )
    )
    await submit(manager, frontend, GenerateRequest(4, "b", None, [5], SamplingParams(), True))
    assert "maxTokensPerSecond is 1" in frontend.deltas[4][0].error
    await submit(manager, frontend, GenerateRequest(5, "base", None, [5], SamplingParams(), True))
    manager.cancel(frontend, [1])
    await submit(manager, frontend, GenerateRequest(6, "a", None, [5], SamplingParams(), True))
    assert not frontend.deltas.get(5) and not frontend.deltas.get(6)
    value = partial(sample_value, metrics)
    assert value("quire_requests_refused_total", {"model_name": "base", "code": "UNAVAILABLE"}) == 2


async def test_duplicate_request_id_is_rejected():
    manager, frontend, _, _ = connected_manager()
    await submit(manager, frontend, make_request(1))
    with pytest.raises(Internal, match="id 1"):
        await submit(manager, frontend, make_request(1))
    await submit(manager, RecordingFrontend(), make_request(1))
    assert manager.num_open == 2


async def test_metrics_of_a_request():
    now = 0.0
    tokenizer = DeferredTokenizer()
    manager, sent, metrics = make_manager(tokenizer.run, clock=lambda: now)
    manager.on_core_connected()
    await submit(manager, RecordingFrontend(), make_request(1))
    [future] = tokenizer.pending
    now = 0.5
    future.set_result([5, 6, 7])
    await settle()
    now = 10.0  # the first step took until now, and started after a second in the queue of the core
    (request,) = sent
    manager.on_step(StepResult([SequenceDelta(request.id, [65])], [StartedSequence(request.id, 1.0)], SchedulerStats()))
    now = 12.0
    manager.on_step(StepResult([SequenceDelta(request.id, [66], "length")], [], SchedulerStats()))
    await submit(manager, RecordingFrontend(), make_request(2, ids=[999], prompt=None))
    value, model = partial(sample_value, metrics), {"model_name": "base"}
    assert value("vllm:prompt_tokens_total", model) == 3
    assert value("vllm:generation_tokens_total", model) == 2
    assert value("vllm:request_success_total", model | {"finished_reason": "length"}) == 1
    seconds = {
        "request_queue_time": 1.5,
        "time_to_first_token": 10,
        "inter_token_latency": 2,
        "request_prefill_time": 8.5,
        "request_decode_time": 2,
        "request_inference_time": 10.5,
        "request_time_per_output_token": 2,
        "e2e_request_latency": 12,
    }
    for name, expected in seconds.items():
        assert value(f"vllm:{name}_seconds_count", model) == 1
        assert value(f"vllm:{name}_seconds_sum", model) == expected, name
    assert value("quire_requests_refused_total", model | {"code": "INVALID_ARG"}) == 1
    # A request that the core ends with an error is a failure, too, but was admitted.
    await submit(manager, RecordingFrontend(), make_request(3, ids=[5], prompt=None))
    failed = SequenceDelta(sent[-1].id, [], error_code="INVALID_ARG", error="no")
    manager.on_step(StepResult([failed], [], SchedulerStats()))
    assert value("vllm:request_failure_total", model | {"reason": "INVALID_ARG"}) == 2
    assert value("quire_requests_refused_total", model | {"code": "INVALID_ARG"}) == 1


async def test_adapter_residency_is_reported_by_name():
    manager, _, _, metrics = connected_manager()
    manager.set_adapters({"a": "d1", "also-a": "d1", "b": "d2"})

    def resident() -> dict[str, float | None]:
        labels = [{"model_name": "base", "adapter": name} for name in ("a", "also-a", "b")]
        return {x["adapter"]: sample_value(metrics, "quire_adapter_slot_residency", x) for x in labels}

    def found_by_pickers(names: str) -> bool:
        """Endpoint pickers send requests for an adapter to a pod that has it in a slot, also without requests."""
        manager.refresh_adapter_gauges()
        labels = {"max_lora": "4", "running_lora_adapters": names, "waiting_lora_adapters": ""}
        return sample_value(metrics, "vllm:lora_requests_info", labels) is not None

    def loaded() -> set[tuple[str, ...]]:
        families = text_string_to_metric_families(metrics.render())
        family = next(family for family in families if family.name == "vllm:lora_adapter_loaded")
        labels = [sample.labels for sample in family.samples]
        return {(x["adapter_name"], x["level"], x["pinned"], x["rank"]) for x in labels}

    def counts() -> list[float | None]:
        names = ("num_gpu_loaded", "num_cpu_loaded")
        return [sample_value(metrics, f"vllm:{name}_lora_adapters", {"model_name": "base"}) for name in names]

    def move(*changes: AdapterResidency) -> None:
        manager.on_step(StepResult([], [], SchedulerStats(), adapter_changes=list(changes)))

    move(AdapterResidency("d1", "slot", True, 16), AdapterResidency("d9", "slot"), AdapterResidency("d2", "disk"))
    assert resident() == {"a": 1, "also-a": 1, "b": 0} and counts() == [2, 2]
    assert found_by_pickers("a,also-a")
    expected = {("a", "gpu", "true", "16"), ("also-a", "gpu", "true", "16"), ("b", "disk", "false", "0")}
    assert loaded() == expected
    move(AdapterResidency("d1", "host"), AdapterResidency("d2", "slot"), AdapterResidency("d9", "removed"))
    assert resident() == {"a": 0, "also-a": 0, "b": 1} and counts() == [1, 2]
    assert found_by_pickers("b")
    manager.set_adapters({"a": "d2"})
    assert resident() == {"a": 1, "also-a": None, "b": None} and loaded() == {("a", "gpu", "false", "0")}
    assert found_by_pickers("a")
    assert metrics.adapter_metrics.residency.rows() == [
        {"name": "a", "digest": "d2", "level": "gpu", "pinned": False, "rank": 0}
    ]
    manager.on_core_lost()
    assert resident()["a"] == 0 and loaded() == set() and counts() == [0, 0]
    # Only adapters in slots and in host memory have series if there are many adapters.
    manager.set_adapters({f"n{i}": f"d{i}" for i in range(150)})
    states = {f"d{i}": "slot" if i < 4 else "host" if i < 20 else "disk" for i in range(150)}
    move(*(AdapterResidency(digest, state) for digest, state in states.items()))
    assert len(loaded()) == 20 and counts() == [4, 20]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
async def test_infinite_logprobs_are_replaced_by_a_finite_number(logprob):
    manager, frontend, sent, _ = connected_manager(has_tokenizer=False)
    await submit(manager, frontend, make_request(1, None, [5], logprobs=1))
    assert isinstance(sent[0], SequenceRequest)
    logprobs = [[(7, logprob, 300), (9, -1.0, 1)]]
    manager.on_step(StepResult([SequenceDelta(sent[0].id, [7], "length", logprobs)], [], SchedulerStats()))
    (delta,) = frontend.deltas[1]
    assert delta.logprobs == [[TokenLogprob(7, -9999.0, 300), TokenLogprob(9, -1.0, 1)]]
    assert (delta.text, delta.cumulative_logprob) == ("", -9999.0)
