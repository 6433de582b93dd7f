# SPDX-License-Identifier: Apache-2.0
"""The engine under everything at once: nothing leaks, nothing mixes, and one request's trouble stays its own."""

import logging
import queue
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_runner import VOCAB, TokenEchoRunner, expected_output

from quire_engine.core.engine import Engine
from quire_engine.core.engine_loop import EngineLoop
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
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


class Runner(TokenEchoRunner):
    """A token runner during whose steps something else happens."""

    during: Callable[[], None] | None = None

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        if self.during is not None:
            self.during()
        return super().execute(plan)


class World:
    """An engine, and its requests and adapters as their owner sees them."""

    def __init__(
        self,
        num_blocks: int = 30,
        failures: random.Random | None = None,
        swap_space: SwapCosts | None = None,
        **fields: Any,
    ) -> None:
        settings = {"block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 48, "enable_lora": True}
        settings |= {"max_loras": 2, "max_cpu_loras": 4}
        self.runner = Runner(num_blocks, 8, failure_rng=failures, swap_costs=swap_space)
        self.now = 0.0
        checkpoint = Checkpoint(PATH, SHAPE, frozenset({EOS}), "fingerprint")
        memory = MeasuredMemory(0, 0, 0, num_blocks, 8, 96, "float32", "cpu")
        config = EngineConfig.from_json(settings | {"model": "m"} | fields)
        self.engine = Engine(config, checkpoint, self.runner, memory, lambda: self.now)
        self.open: dict[int, SequenceRequest] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.started: list[int] = []
        self.num_added = 0

    def add(
        self,
        prompt: list[int],
        adapter: str | None = None,
        salt: str | None = None,
        fork_of: int | None = None,
        priority: int = 0,
        bad_words: list[list[int]] | None = None,
        **params: Any,
    ) -> int:
        request = SequenceRequest(self.num_added, prompt, params, adapter, salt, bad_words or [], fork_of, priority)
        self.engine.add(request)
        self.num_added += 1
        self.open[request.id], self.outputs[request.id] = request, []
        return request.id

    def abort(self, request_id: int) -> None:
        del self.open[request_id]
        self.engine.abort([request_id])

    def add_adapter(self, digest: str, pinned: bool | None = False) -> None:
        self.engine.add_adapter(digest, PATH / digest, digest, pinned)

    def step(self) -> None:
        self.now += 0.05
        result = self.engine.step()
        self.started += result.started_ids
        for item in result.results:
            self.take(item)

    def take(self, item: SequenceDelta) -> None:
        assert item.id in self.open, "a result for a request that is over"
        self.outputs[item.id] += item.token_ids
        if end := item.finish_reason or item.error_code:
            self.ends[item.id] = end
            # The runner finds fault by assertions; only the failures that a test asked for may come through.
            assert item.error in ("", "the step failed: RuntimeError: the device failed", "the disk is gone")
            request = self.open.pop(item.id)
            if item.finish_reason:
                assert self.outputs[item.id] == wanted(request)

    def fetch(self) -> None:
        for digest, _ in self.engine.pop_adapter_reads():
            self.add_adapter(digest, None)

    def drain(self) -> None:
        while self.engine.has_work:
            self.fetch()
            self.step()
        assert not self.open


def wanted(request: SequenceRequest) -> list[int]:
    """What a request is to answer."""
    num = min(request.params["max_tokens"], 96 - len(request.prompt_token_ids))
    return expected_output(request.prompt_token_ids, num, request.adapter_digest, frozenset({EOS}))


@pytest.mark.parametrize(("caching", "ahead"), [(True, True), (False, False)])
def test_ten_thousand_requests_leave_nothing_behind(
    caching: bool, ahead: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(
        logging.CRITICAL, "quire_engine.core.step_executor"
    )  # hundreds of failed steps, each with a traceback
    draw = random.Random(11)
    # Room for some, and little gain for short ones: both ways of preemption happen.
    settings = {"enable_prefix_caching": caching, "async_scheduling": ahead, "scheduling_policy": "priority"}
    world = World(14, draw, SwapCosts(9, 4.0, 1.0), **settings)
    engine, digests = world.engine, [f"sha256:{i}" for i in range(12)]
    asked: list[str] = []
    copies: list[tuple[SlotLoad, Callable[[], None]]] = []
    # Slots are filled while steps run.
    engine.slot_copier = lambda load, work: copies.append((load, work))

    def fill(load: SlotLoad, work: Callable[[], None]) -> None:
        failed = draw.random() < 0.05
        if not failed:
            work()
        engine.on_slot_loaded(load, Unavailable("the disk is gone") if failed else None)

    def requests(num_arrivals: int) -> None:
        for _ in range(num_arrivals):
            priority = draw.choice([0, 0, 0, 0, -1, 1])
            if world.open and draw.random() < 0.2:
                leader = world.open[draw.choice(list(world.open))]
                same = leader.prompt_token_ids, leader.adapter_digest, leader.cache_salt, leader.id
                with suppress(NotFound):
                    world.add(*same, priority, max_tokens=draw.randint(1, 40))
                continue
            adapter = draw.choice([None, *digests])
            prompt = [draw.randrange(2)] * draw.randint(1, 20) + [draw.randrange(VOCAB)] * draw.randint(0, 1)
            try:
                salt = draw.choice([None, None, "salt"])
                world.add(prompt, adapter, salt, None, priority, max_tokens=draw.randint(1, 40))
            except NotFound:
                assert adapter not in engine.adapter_states()
        if world.open and draw.random() < 0.08:
            world.abort(draw.choice(list(world.open)))

    def adapters() -> None:
        if draw.random() < 0.1:
            engine.remove_adapter(draw.choice(digests))
        if draw.random() < 0.3:
            try:
                world.add_adapter(draw.choice(digests), draw.random() < 0.2)
            except InvalidArgument as error:
                assert "all 2 slots are" in str(error)

    world.runner.during = lambda: requests(draw.randint(0, 1))
    while world.num_added < 10_000:
        requests(draw.randint(0, 3) if len(world.open) < 60 else 0)
        adapters()
        asked += [digest for digest, _ in engine.pop_adapter_reads()]
        while asked and draw.random() < 0.7:
            digest = asked.pop(draw.randrange(len(asked)))
            if draw.random() < 0.1:
                engine.fail_adapter(digest, Unavailable("the disk is gone"))
            else:
                world.add_adapter(digest, None)
        while copies and draw.random() < 0.6:
            fill(*copies.pop(draw.randrange(len(copies))))
        if draw.random() < 0.2:
            engine.check_integrity()
        world.step()
    for digest in asked:
        world.add_adapter(digest, None)
    while copies:
        fill(*copies.pop())
    engine.slot_copier = lambda load, work: fill(load, work)
    world.runner.during = None
    world.drain()
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_used_host_blocks == 0
    assert stats.num_swapped_in_blocks > 100 and stats.num_block_copies > 100
    assert stats.num_preemptions > 100 and stats.num_adapter_evictions > 100
    assert len(world.started) == len(set(world.started))
    ends = list(world.ends.values())
    assert {"stop", "length", "INTERNAL", "UNAVAILABLE"} == set(ends)
    # Aborts and failures are the exception: most of the outputs were compared.
    assert ends.count("length") + ends.count("stop") > 3500
    assert set(world.runner.host_adapters) == {d for d, state in engine.adapter_states().items() if state != "disk"}
    for digest in digests:
        engine.remove_adapter(digest)
    assert engine.adapter_states() == {} and world.runner.host_adapters == {}
    # The cache that all this left works: what it gives is checked by the runner in every step.
    world.runner._failure_rng = None
    for _ in range(2):
        before = engine.stats().prefix_cache_hits
        world.add([0] * 40, max_tokens=8)
        world.drain()
    assert engine.stats().prefix_cache_hits - before == (39 if caching else 0)


def test_requests_that_are_wrong_are_refused_and_change_nothing() -> None:
    world = World()
    good = world.add([1, 2, 3], max_tokens=20)
    world.step()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": []}, "prompt: empty"),
        ({"prompt": [VOCAB]}, f"prompt: token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ({"prompt": [-1]}, "prompt: not a list of token ids"),
        ({"prompt": ["1"]}, "prompt: not a list of token ids"),
        ({"prompt": [1.5]}, "prompt: not a list of token ids"),
        ({"prompt": None}, "prompt: not a list of token ids"),
        ({"prompt": [1] * 96}, "prompt: 96 tokens leave no room for output, max_model_len is 96"),
        ({"prompt": [1], "stop_token_ids": [VOCAB]}, f"stop_token_ids: token id {VOCAB}"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "best_off": 2}, "unknown sampling parameter 'best_off'"),
        ({"prompt": [1], "bad_words": [[2, 3], []]}, "bad_words: a word without tokens"),
        ({"prompt": [1], "adapter": "sha256:no"}, "adapter 'sha256:no' is not loaded"),
    ]
    for request, message in refused:
        with pytest.raises((InvalidArgument, NotFound), match=message):
            world.add(**request)
        world.engine.check_integrity()
    world.drain()
    assert world.ends == {good: "length"}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_step_is_reported_to_its_requests_only(ahead: bool) -> None:
    world = World(max_num_seqs=2, async_scheduling=ahead)
    ids = [world.add([i] * 5, max_tokens=3) for i in range(3)]

    def fail() -> None:
        raise MemoryError("no room")

    world.runner.during = fail
    world.now += 1
    results = world.engine.step().results
    assert [(r.id, r.error_code) for r in results] == [(ids[0], "INTERNAL"), (ids[1], "INTERNAL")]
    assert results[0].error == "the step failed: MemoryError: no room"
    world.runner.during = None
    del world.open[ids[0]], world.open[ids[1]]
    world.drain()
    assert world.ends == {ids[2]: "length"}


def test_a_step_that_fails_takes_the_one_begun_on_top_of_it_along() -> None:
    world = World(async_scheduling=True)
    old = world.add([1] * 5, max_tokens=9)
    world.step()
    new = world.add([2] * 5, max_tokens=9)

    def fail() -> None:
        world.runner.during = None
        raise MemoryError("no room")

    # Of the step in flight the outcome counts, though the one after it cannot be begun.
    world.runner.during = fail
    [result] = world.engine.step().results
    assert (result.id, result.token_ids, result.error_code) == (old, expected_output([1] * 5, 2)[1:], None)
    results = world.engine.step().results
    assert [(r.id, r.error_code) for r in results] == [(old, "INTERNAL"), (new, "INTERNAL")]
    world.open.clear()
    # One fails that has another on top of it.
    ids = [world.add([i] * 5, max_tokens=9) for i in (3, 4)]
    world.step()
    ids.append(world.add([6] * 5, max_tokens=9))
    flight = world.engine._step_executor._in_flight
    assert flight is not None

    def broken() -> list[SpanOutput]:
        raise MemoryError("no room")

    world.engine._step_executor._in_flight = replace(flight, get_outputs=broken)
    assert [(r.id, r.error_code) for r in world.engine.step().results] == [(i, "INTERNAL") for i in ids]
    assert not world.engine.has_work and world.engine.stats().num_used_blocks == 0
    world.engine.check_integrity()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_interrupted_step_leaves_the_engine_usable(ahead: bool) -> None:
    world = World(async_scheduling=ahead)
    world.add([1] * 5, max_tokens=3)

    def interrupt() -> None:
        raise KeyboardInterrupt

    world.runner.during = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.engine.step()
    world.runner.during = None
    world.open.clear()
    world.engine.check_integrity()
    world.add([1] * 5, max_tokens=3)
    world.drain()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("trouble", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["read", "copy"])
def test_what_cuts_the_loading_of_adapters_short_leaves_them_usable(
    where: str, trouble: type[BaseException], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without threads, as in an offline run: Control-C while adapters are read and copied, or no memory for them."""
    world = World(max_loras=2, max_cpu_loras=2, async_scheduling=ahead)
    for digest in "abcd":
        world.add_adapter(digest)
    world.add([9], max_tokens=20)
    world.step()
    for digest in "abcd":
        world.add([1, 2], digest, max_tokens=2)

    def fail(*_: object) -> None:
        raise trouble

    with monkeypatch.context() as patch:
        if where == "read":
            patch.setattr(world.runner, "read_adapter", fail)
        else:
            patch.setattr(world.runner, "load_adapter_slot", lambda slot_load: fail)
        with suppress(KeyboardInterrupt, MemoryError):
            for _ in range(9):
                world.engine.read_pending_adapters()
                world.engine.step()
    world.engine.abort(list(world.open))
    world.open.clear()
    world.engine.check_integrity()
    for digest in "abcd":
        world.add([1, 2], digest, max_tokens=2)
    for _ in range(20):
        world.engine.read_pending_adapters()
        world.step()
    assert not world.engine.has_work
    world.engine.check_integrity()


def test_an_adapter_that_cannot_be_read_fails_those_who_wait_for_it() -> None:
    world = World(max_loras=1, max_cpu_loras=1)
    for digest in "ab":
        world.add_adapter(digest)
    other = world.add([3], "b", max_tokens=2)
    waiting = [world.add([1], "a", max_tokens=2), world.add([2], "a", max_tokens=2)]
    assert world.engine.has_runnable
    # b is in host memory and has been waited for longer, so a is read when b has run.
    assert world.engine.pop_adapter_reads() == []
    world.step()
    world.step()
    assert world.ends == {other: "length"}
    assert world.engine.pop_adapter_reads() == [("a", PATH / "a")]
    world.step()
    assert not world.engine.has_runnable and world.engine.has_work
    world.engine.abort(waiting[1:])
    world.engine.fail_adapter("a", InvalidArgument("rank 128 exceeds 16"))
    assert world.engine.has_runnable
    world.engine.check_integrity()
    [result] = world.engine.step().results
    assert (result.id, result.error_code, result.error) == (waiting[0], "INVALID_ARG", "rank 128 exceeds 16")
    assert not world.engine.has_work
    assert world.engine.adapter_states() == {"a": "disk", "b": "disk"}


def test_seeds_differ_unless_given_and_are_those_of_the_configuration() -> None:
    seeds = []
    for _ in range(2):
        world = World(seed=3)
        for params in ({}, {}, {"seed": 7}, {"seed": 7}):
            world.add([1], max_tokens=1, **params)
        seeds.append([s.seed for s in world.engine._scheduler._waiting])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0][:2])) == 2 and seeds[0][2:] == [7, 7]


def test_end_of_sequence_stops_unless_ignored() -> None:
    prompt = next([i] for i in range(VOCAB) if EOS in expected_output([i], 40))
    world = World()
    stopped = world.add(prompt, max_tokens=40)
    world.drain()
    assert world.ends[stopped] == "stop" and world.outputs[stopped][-1] == EOS
    request = SequenceRequest(99, prompt, {"max_tokens": 40, "ignore_eos": True})
    world.engine.add(request)
    tokens: list[int] = []
    while world.engine.has_work:
        tokens += [token for result in world.engine.step().results for token in result.token_ids]
    assert tokens == expected_output(prompt, 40)


def test_without_slots_adapters_are_refused() -> None:
    world = World(enable_lora=False)
    with pytest.raises(InvalidArgument, match="set enable_lora"):
        world.add_adapter("a")


def test_steps_go_on_while_a_slot_is_filled_and_only_its_sequences_wait() -> None:
    world = World()
    copies: list[tuple[SlotLoad, Callable[[], None]]] = []
    world.engine.slot_copier = lambda load, work: copies.append((load, work))
    world.add_adapter("a")
    slow, quick = world.add([1, 2], "a", max_tokens=3), world.add([3, 4], max_tokens=9)
    for _ in range(4):
        world.step()
    assert world.started == [quick] and len(world.outputs[quick]) == 4
    assert [load.adapter_digest for load, _ in copies] == ["a"]
    ((load, work),) = copies
    work()
    world.engine.on_slot_loaded(load)
    world.step()
    assert world.started == [quick, slow]
    world.drain()
    assert len(copies) == 1


def test_a_copy_that_fails_ends_its_own_sequences() -> None:
    world = World()
    copies: list[SlotLoad] = []
    world.engine.slot_copier = lambda load, work: copies.append(load)
    world.add_adapter("a")
    failed, other = world.add([1, 2], "a", max_tokens=3), world.add([3, 4], max_tokens=3)
    world.step()
    world.engine.on_slot_loaded(copies.pop(), Unavailable("the disk is gone"))
    world.drain()
    assert world.ends == {failed: "UNAVAILABLE", other: "length"}
    # The next one is given another try.
    world.add([1, 2], "a", max_tokens=3)
    world.step()
    assert [load.adapter_digest for load in copies] == ["a"]
    world.engine.check_integrity()


@pytest.mark.parametrize("stepped", [False, True])
def test_what_became_of_adapters_waits_for_a_text_process_to_hear_it(stepped):
    world = World()
    told: queue.SimpleQueue[tuple[int, StepResult]] = queue.SimpleQueue()
    loop = EngineLoop(world.engine, lambda owner, result: told.put((owner, result)), lambda *_: None, lambda *_: None)
    world.add_adapter("d0")
    if stepped:
        loop._step()  # of sequences that a text process left behind
    threading.Thread(target=loop.run, daemon=True).start()
    loop.submit_call(lambda: None).result(10)  # a turn of the loop, in which there is something to report
    loop.submit_call(lambda: None).result(10)
    loop.attach_client(7)
    owner, result = told.get(timeout=10)
    assert (owner, [(move.kind, move.digest) for move in result.adapter_events]) == (7, [("host", "d0")])
