# SPDX-License-Identifier: Apache-2.0
"""An engine with a fake runner under concurrent events: no leaks, no mixed outputs, and isolated failures."""

import logging
import queue
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.block_mirror import BlockMirror
from support.fake_runner import VOCAB, TokenEchoRunner, expected_output

from quire_engine.core.engine import Engine
from quire_engine.core.engine_loop import EngineLoop
from quire_engine.kv_cache.block_events import BlockEvent, BlocksRemoved
from quire_engine.kv_cache.block_hash import BlockHasher
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, NotFound, Unavailable
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest, StepResult

EOS = 5
SHAPE = ModelConfig.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 96,
    }
)
PATH = Path("/adapters")


class HookedRunner(TokenEchoRunner):
    """A TokenEchoRunner that calls a hook during its steps."""

    step_hook: Callable[[], None] | None = None

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        if self.step_hook is not None:
            self.step_hook()
        return super().execute(plan)


class EngineHarness:
    """An engine with the state of its requests."""

    def __init__(
        self,
        num_blocks: int = 30,
        failure_rng: random.Random | None = None,
        swap_costs: SwapCosts | None = None,
        **fields: Any,
    ) -> None:
        options = {"block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 48, "enable_lora": True}
        options |= {"max_loras": 2, "max_cpu_loras": 4}
        self.runner = HookedRunner(num_blocks, 8, failure_rng=failure_rng, swap_costs=swap_costs)
        self.now = 0.0
        checkpoint = Checkpoint(PATH, SHAPE, frozenset({EOS}), "fingerprint")
        memory = MeasuredMemory(0, 0, 0, num_blocks, 8, 96, "float32", "cpu")
        config = EngineConfig.from_json(options | {"model": "m"} | fields)
        self.engine = Engine(config, checkpoint, self.runner, memory, lambda: self.now)
        self.open_requests: dict[int, SequenceRequest] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.started_ids: list[int] = []
        self.num_added = 0

    def add(
        self,
        prompt: list[int],
        adapter_digest: str | None = None,
        salt: str | None = None,
        parent_id: int | None = None,
        priority: int = 0,
        bad_words: list[list[int]] | None = None,
        **params: Any,
    ) -> int:
        request = SequenceRequest(
            self.num_added,
            prompt,
            SamplingParams.from_mapping(params),
            adapter_digest,
            salt,
            bad_words or [],
            parent_id,
            priority,
        )
        self.engine.add(request)
        self.num_added += 1
        self.open_requests[request.id], self.outputs[request.id] = request, []
        return request.id

    def abort(self, request_id: int) -> None:
        del self.open_requests[request_id]
        self.engine.abort([request_id])

    def add_adapter(self, digest: str, pinned: bool | None = False) -> None:
        self.engine.add_adapter(digest, PATH / digest, digest, pinned)

    def step(self) -> None:
        self.now += 0.05
        result = self.engine.step()
        self.started_ids += [started.id for started in result.started]
        for delta in result.results:
            self.update(delta)

    def update(self, delta: SequenceDelta) -> None:
        assert delta.id in self.open_requests, "a result for a finished request"
        self.outputs[delta.id] += delta.token_ids
        if end := delta.finish_reason or delta.error_code:
            self.ends[delta.id] = end
            # The runner reports bugs by assertions. Only injected failures are allowed here.
            assert delta.error in ("", "the step failed: RuntimeError: the device failed", "the disk is gone")
            request = self.open_requests.pop(delta.id)
            if delta.finish_reason:
                assert self.outputs[delta.id] == expected_tokens(request)

    def read_adapters(self) -> None:
        for digest, _ in self.engine.pop_adapter_reads():
            self.add_adapter(digest, None)

    def drain(self) -> None:
        while self.engine.has_work:
            self.read_adapters()
            self.step()
        assert not self.open_requests


def expected_tokens(request: SequenceRequest) -> list[int]:
    """Return the output tokens that a request must have."""
    assert request.params.max_tokens is not None
    num = min(request.params.max_tokens, 96 - len(request.prompt_token_ids))
    return expected_output(request.prompt_token_ids, num, request.adapter_digest, frozenset({EOS}))


@pytest.mark.parametrize(
    ("caching", "overlap"),
    [(True, {"async_scheduling": True}), (False, {"async_scheduling": False}), (True, {"pipeline_parallel_size": 3})],
)
def test_thousands_of_requests_leak_nothing(
    caching: bool, overlap: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    # Otherwise hundreds of failed steps would log a traceback each.
    caplog.set_level(logging.CRITICAL, "quire_engine.core.step_executor")
    rng = random.Random(11)
    # Few host blocks, and little gain for short sequences: some are swapped, others are computed again.
    options = {"enable_prefix_caching": caching, "scheduling_policy": "priority"} | overlap
    harness = EngineHarness(14, rng, SwapCosts(9, 4.0, 1.0), **options)
    engine, digests = harness.engine, [f"sha256:{i}" for i in range(12)]
    reads: list[str] = []
    copies: list[tuple[SlotLoad, Callable[[], None]]] = []
    # Slots are filled while steps run.
    engine.delegate_slot_copies(lambda slot_load, copy: copies.append((slot_load, copy)))

    def finish_copy(slot_load: SlotLoad, copy: Callable[[], None]) -> None:
        failed = rng.random() < 0.05
        if not failed:
            copy()
        engine.on_slot_loaded(slot_load, Unavailable("the disk is gone") if failed else None)

    def change_requests(num_arrivals: int) -> None:
        for _ in range(num_arrivals):
            priority = rng.choice([0, 0, 0, 0, -1, 1])
            if harness.open_requests and rng.random() < 0.2:
                parent = harness.open_requests[rng.choice(list(harness.open_requests))]
                fork_fields = parent.prompt_token_ids, parent.adapter_digest, parent.cache_salt, parent.id
                with suppress(NotFound):
                    harness.add(*fork_fields, priority, max_tokens=rng.randint(1, 40))
                continue
            adapter_digest = rng.choice([None, *digests])
            prompt = [rng.randrange(2)] * rng.randint(1, 20) + [rng.randrange(VOCAB)] * rng.randint(0, 1)
            try:
                salt = rng.choice([None, None, "salt"])
                harness.add(prompt, adapter_digest, salt, None, priority, max_tokens=rng.randint(1, 40))
            except NotFound:
                assert adapter_digest not in engine.adapter_states()
        if harness.open_requests and rng.random() < 0.08:
            harness.abort(rng.choice(list(harness.open_requests)))

    def change_adapters() -> None:
        if rng.random() < 0.1:
            engine.remove_adapter(rng.choice(digests))
        if rng.random() < 0.3:
            try:
                harness.add_adapter(rng.choice(digests), rng.random() < 0.2)
            except InvalidArgument as error:
                assert "all 2 slots are pinned" in str(error)

    harness.runner.step_hook = lambda: change_requests(rng.randint(0, 1))
    num_requests, min_copies, min_compared = (
        (2_000, 10, 350) if "pipeline_parallel_size" in overlap else (4_000, 40, 1_400)
    )
    while harness.num_added < num_requests:
        change_requests(rng.randint(0, 3) if len(harness.open_requests) < 60 else 0)
        change_adapters()
        reads += [digest for digest, _ in engine.pop_adapter_reads()]
        while reads and rng.random() < 0.7:
            digest = reads.pop(rng.randrange(len(reads)))
            if rng.random() < 0.1:
                engine.fail_adapter(digest, Unavailable("the disk is gone"))
            else:
                harness.add_adapter(digest, None)
        while copies and rng.random() < 0.6:
            finish_copy(*copies.pop(rng.randrange(len(copies))))
        if rng.random() < 0.2:
            engine.check_integrity()
        harness.step()
    for digest in reads:
        harness.add_adapter(digest, None)
    while copies:
        finish_copy(*copies.pop())
    engine.delegate_slot_copies(finish_copy)
    harness.runner.step_hook = None
    harness.drain()
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_used_host_blocks == 0
    assert stats.num_swapped_in_blocks > 40 and stats.num_block_copies > min_copies
    assert stats.num_preemptions > 40 and stats.num_adapter_evictions > 40
    assert len(harness.started_ids) == len(set(harness.started_ids))
    ends = list(harness.ends.values())
    assert {"stop", "length", "INTERNAL", "UNAVAILABLE"} == set(ends)
    # Aborts and failures are rare, so most outputs were compared. With stages, a failure ends the sequences of three
    # steps, of which there are more.
    assert ends.count("length") + ends.count("stop") > min_compared
    assert set(harness.runner.host_adapters) == {d for d, state in engine.adapter_states().items() if state != "disk"}
    for digest in digests:
        engine.remove_adapter(digest)
    assert engine.adapter_states() == {} and harness.runner.host_adapters == {}
    # The prefix cache still works: the runner checks its blocks in every step.
    harness.runner._failure_rng = None
    for _ in range(2):
        hits_before = engine.stats().prefix_cache_hits
        harness.add([0] * 40, max_tokens=8)
        harness.drain()
    assert engine.stats().prefix_cache_hits - hits_before == (39 if caching else 0)


def test_steps_of_a_pipeline_have_equal_parts_of_the_decoding_sequences() -> None:
    """Chunks of a prompt follow each other in the steps in flight. A sequence decodes in one of three steps."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_blocks": 90}
    harness = EngineHarness(**sizes, pipeline_parallel_size=3)
    batches = harness.runner.batches
    harness.add([1] * 60, max_tokens=24)
    harness.step()
    assert batches == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 16)]]
    for i in range(1, 8):
        harness.add([i] * 3, max_tokens=24)
    while len(batches) < 12:
        harness.step()
    for first in range(9, 21):
        harness.step()
        steps = batches[first : first + 3]
        assert sorted(map(len, steps)) == [2, 3, 3]
        assert {span[0] for step in steps for span in step} == set(range(8))
    harness.drain()
    # One step is in flight at a time.
    alone = EngineHarness(**sizes, pipeline_parallel_size=3, pipeline_micro_batches=1)
    alone.add([1] * 60, max_tokens=24)
    alone.step()
    assert alone.runner.batches == [[(0, 0, 16)]]
    alone.drain()


def test_rejects_invalid_requests_without_side_effects() -> None:
    harness = EngineHarness()
    valid_id = harness.add([1, 2, 3], max_tokens=20)
    harness.step()
    invalid_requests: list[tuple[dict[str, Any], str]] = [
        ({"prompt": [1] * 96}, "prompt: 96 tokens leave no room for output, max_model_len is 96"),
        ({"prompt": [1], "adapter_digest": "sha256:no"}, "adapter 'sha256:no' is not loaded"),
    ]
    for request, message in invalid_requests:
        with pytest.raises((InvalidArgument, NotFound), match=message):
            harness.add(**request)
        harness.engine.check_integrity()
    harness.drain()
    assert harness.ends == {valid_id: "length"}


def test_failed_step_also_fails_the_step_launched_after_it() -> None:
    harness = EngineHarness(async_scheduling=True)
    old = harness.add([1] * 5, max_tokens=9)
    harness.step()
    new = harness.add([2] * 5, max_tokens=9)

    def fail() -> None:
        harness.runner.step_hook = None
        raise MemoryError("out of memory")

    # The outputs of the step in flight count, although the next step cannot be launched.
    harness.runner.step_hook = fail
    [result] = harness.engine.step().results
    assert (result.id, result.token_ids, result.error_code) == (old, expected_output([1] * 5, 2)[1:], None)
    results = harness.engine.step().results
    assert [(r.id, r.error_code) for r in results] == [(old, "INTERNAL"), (new, "INTERNAL")]
    harness.open_requests.clear()
    # A step fails after the next one was launched.
    ids = [harness.add([i] * 5, max_tokens=9) for i in (3, 4)]
    harness.step()
    ids.append(harness.add([6] * 5, max_tokens=9))
    [in_flight_step] = harness.engine._step_executor._in_flight

    def raise_memory_error() -> list[SpanOutput]:
        raise MemoryError("out of memory")

    harness.engine._step_executor._in_flight[0] = replace(in_flight_step, get_outputs=raise_memory_error)
    assert [(r.id, r.error_code) for r in harness.engine.step().results] == [(i, "INTERNAL") for i in ids]
    assert not harness.engine.has_work and harness.engine.stats().num_used_blocks == 0
    harness.engine.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error_type", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("operation", ["read", "copy"])
def test_adapters_are_usable_after_interrupted_loading(
    operation: str, error_type: type[BaseException], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without threads, as in an offline run: Control-C or MemoryError while adapters are read or copied."""
    harness = EngineHarness(max_loras=2, max_cpu_loras=2, async_scheduling=overlap)
    for digest in "abcd":
        harness.add_adapter(digest)
    harness.add([9], max_tokens=20)
    harness.step()
    for digest in "abcd":
        harness.add([1, 2], digest, max_tokens=2)

    def fail(*_: object) -> None:
        raise error_type

    with monkeypatch.context() as patch:
        if operation == "read":
            patch.setattr(harness.runner, "read_adapter", fail)
        else:
            patch.setattr(harness.runner, "load_adapter_slot", lambda slot_load: fail)
        with suppress(KeyboardInterrupt, MemoryError):
            for _ in range(9):
                harness.engine.read_pending_adapters()
                harness.engine.step()
    harness.engine.abort(list(harness.open_requests))
    harness.open_requests.clear()
    harness.engine.check_integrity()
    for digest in "abcd":
        harness.add([1, 2], digest, max_tokens=2)
    for _ in range(20):
        harness.engine.read_pending_adapters()
        harness.step()
    assert not harness.engine.has_work
    harness.engine.check_integrity()


def test_unreadable_adapter_fails_its_waiting_sequences() -> None:
    harness = EngineHarness(max_loras=1, max_cpu_loras=1)
    for digest in "ab":
        harness.add_adapter(digest)
    other = harness.add([3], "b", max_tokens=2)
    waiting = [harness.add([1], "a", max_tokens=2), harness.add([2], "a", max_tokens=2)]
    assert harness.engine.has_runnable
    # b is in host memory and has the older need, so a is read after b has run.
    assert harness.engine.pop_adapter_reads() == []
    harness.step()
    harness.step()
    assert harness.ends == {other: "length"}
    assert harness.engine.pop_adapter_reads() == [("a", PATH / "a")]
    harness.step()
    assert not harness.engine.has_runnable and harness.engine.has_work
    harness.engine.abort(waiting[1:])
    harness.engine.fail_adapter("a", InvalidArgument("rank 128 exceeds 16"))
    assert harness.engine.has_runnable
    harness.engine.check_integrity()
    [result] = harness.engine.step().results
    assert (result.id, result.error_code, result.error) == (waiting[0], "INVALID_ARG", "rank 128 exceeds 16")
    assert not harness.engine.has_work
    assert harness.engine.adapter_states() == {"a": "disk", "b": "disk"}


def test_seeds_differ_and_derive_from_the_config_unless_given() -> None:
    seeds = []
    for _ in range(2):
        harness = EngineHarness(seed=3)
        for params in ({}, {}, {"seed": 7}, {"seed": 7}):
            harness.add([1], max_tokens=1, **params)
        seeds.append([s.seed for s in harness.engine._scheduler._waiting])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0][:2])) == 2 and seeds[0][2:] == [7, 7]


def test_rejects_adapters_if_lora_is_disabled() -> None:
    harness = EngineHarness(enable_lora=False)
    with pytest.raises(InvalidArgument, match="set enable_lora"):
        harness.add_adapter("a")


def test_slot_copy_delays_and_fails_only_sequences_of_its_adapter() -> None:
    harness = EngineHarness()
    copies: list[tuple[SlotLoad, Callable[[], None]]] = []
    harness.engine.delegate_slot_copies(lambda slot_load, copy: copies.append((slot_load, copy)))
    harness.add_adapter("a")
    failed, other = harness.add([1, 2], "a", max_tokens=3), harness.add([3, 4], max_tokens=9)
    harness.step()
    harness.engine.on_slot_loaded(copies.pop()[0], Unavailable("the disk is gone"))
    harness.step()
    assert harness.ends == {failed: "UNAVAILABLE"}
    # The next sequence triggers another copy, and waits for it.
    slow = harness.add([1, 2], "a", max_tokens=3)
    for _ in range(4):
        harness.step()
    assert harness.started_ids == [other] and len(harness.outputs[other]) == 6
    ((slot_load, copy),) = copies
    copy()
    harness.engine.on_slot_loaded(slot_load)
    harness.step()
    assert harness.started_ids == [other, slow]
    harness.drain()
    assert len(copies) == 1


@pytest.mark.parametrize("with_step", [False, True])
def test_adapter_events_are_kept_until_a_text_process_connects(with_step):
    harness = EngineHarness()
    published: queue.SimpleQueue[tuple[int, StepResult]] = queue.SimpleQueue()
    engine_loop = EngineLoop(
        harness.engine, lambda client_id, result: published.put((client_id, result)), *[lambda *_: None] * 3
    )
    harness.add_adapter("d0")
    if with_step:
        engine_loop._step()  # of sequences that a disconnected text process left
    threading.Thread(target=engine_loop.run, daemon=True).start()
    engine_loop.submit_call(lambda: None).result(10)  # one iteration of the loop, with an event to publish
    engine_loop.submit_call(lambda: None).result(10)
    engine_loop.attach_client(7)
    client_id, result = published.get(timeout=10)
    assert (client_id, [(event.kind, event.digest) for event in result.adapter_events]) == (7, [("host", "d0")])


def test_text_process_receives_the_changes_of_the_prefix_cache() -> None:
    harness = EngineHarness(num_blocks=14)
    published: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
    recorded: list[BlockEvent] = []
    publisher = Mock(publish=recorded.extend, num_dropped=3)
    engine_loop = EngineLoop(
        harness.engine, lambda _, result: published.put(result), *[lambda *_: None] * 3, publisher, True
    )
    threading.Thread(target=engine_loop.run, daemon=True).start()
    cached: set[bytes] = set()

    def next_result() -> StepResult:
        result = published.get(timeout=10)
        assert result.stats.num_dropped_kv_events == 3
        if result.block_changes is not None:
            cached.difference_update(result.block_changes.removed)
            cached.update(result.block_changes.stored)
        return result

    for client_id in (1, 2):
        # The second text process begins with nothing, and receives the state of the cache at once.
        cached.clear()
        engine_loop.attach_client(client_id)
        next_result()
        assert cached == set(harness.engine.cached_blocks().stored) and bool(cached) == (client_id == 2)
        for i in range(6):
            params = SamplingParams.from_mapping({"max_tokens": 9})
            engine_loop.generate(client_id, SequenceRequest(i, [client_id * 10 + i] * 20, params))
            while not any(delta.finish_reason for delta in next_result().results):
                pass
        assert cached == set(harness.engine.cached_blocks().stored)
    mirror = BlockMirror(BlockHasher("fingerprint", "float32", 8, "float32"))
    mirror.apply(recorded)
    assert mirror.keys == cached and any(isinstance(event, BlocksRemoved) for event in recorded)


def test_queue_time_ends_when_the_first_step_starts() -> None:
    harness = EngineHarness(max_num_seqs=1)

    def take_2_seconds() -> None:
        harness.now += 2.0

    harness.runner.step_hook = take_2_seconds
    first, second = harness.add([1, 2], max_tokens=3), harness.add([3, 4], max_tokens=1)
    started: dict[int, float] = {}
    while harness.engine.has_work:
        started |= {item.id: item.queued_s for item in harness.engine.step().started}
    # The second sequence waits for the three steps of the first one. Neither time includes a step of the sequence.
    assert started == {first: 0.0, second: 6.0}
