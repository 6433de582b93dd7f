# SPDX-License-Identifier: Apache-2.0
"""Outputs with async scheduling, which launches a step while the previous one is in flight, equal those without."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_runner import expected_output
from support.scheduler_harness import CONFIG, SchedulerHarness
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import SequenceStatus
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

MAX_MODEL_LEN = 96
BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4
"""Bytes of a block of 8 tokens in float32, over both layers of the checkpoint."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    return {f"d{i}": make_adapter(folder, tmp_path_factory.mktemp(f"d{i}"), seed=i, r=4) for i in range(3)}


def _prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class _EngineRun:
    """An engine, with the results of its requests."""

    def __init__(self, folder, overlap: bool, num_blocks: int = 200, **settings: Any) -> None:
        options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 8, "max_num_seqs": 6}
        options |= {"max_num_batched_tokens": 40, "kv_cache_memory_bytes": num_blocks * BLOCK_BYTES}
        config = {"model": str(folder), "async_scheduling": overlap, **options, **settings}
        self.engine = Engine.from_config(EngineConfig.from_json(config))
        self.results: dict[int, list[Any]] = {}
        self.num_lookahead = 0
        schedule_async = self.engine._scheduler.schedule_async

        def counting_schedule_async(now: float) -> Any:
            plan = schedule_async(now)
            self.num_lookahead += plan is not None
            return plan

        self.engine._scheduler.schedule_async = counting_schedule_async  # type: ignore[method-assign]

    def add(self, request_id: int, prompt: list[int], fields: dict[str, Any] | None = None, **params: Any) -> None:
        self.results[request_id] = [[], [], None, None]
        self.engine.add(
            SequenceRequest(
                request_id,
                prompt,
                SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 24, **params}),
                **fields or {},
            )
        )

    def step(self) -> None:
        self.engine.read_pending_adapters()
        for result in self.engine.step().results:
            assert result.error_code is None, result.error
            tokens, logprobs, prompt_logprobs, finish_reason = self.results[result.id]
            assert finish_reason is None, "a token after the last one"
            tokens += result.token_ids
            logprobs += result.logprobs or []
            self.results[result.id][2:] = [prompt_logprobs or result.prompt_logprobs, result.finish_reason]
        self.engine.check_integrity()

    def drain(self) -> dict[int, list[Any]]:
        while self.engine.has_work:
            self.step()
        stats = self.engine.stats()
        assert stats.num_used_blocks == stats.num_used_host_blocks == 0
        return self.results


STOPS = list(range(0, VOCAB, 9))
ALL_PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 1.0, "seed": 7, "stop_token_ids": STOPS, "min_tokens": 4},
    {"stop_token_ids": STOPS, "logit_bias": {3: 4.0, 11: -5.0}},
    {"allowed_token_ids": list(range(40, 90)), "temperature": 1.0, "seed": 8},
    {"max_tokens": 1},
    {"ignore_eos": True, "max_tokens": 60},
]


def _run_both(folder, drive: Callable[[_EngineRun], None], **settings: Any) -> _EngineRun:
    """Drive a synchronous and an asynchronous engine, and return the second one. Their results must be equal."""
    runs = [_EngineRun(folder, overlap, **settings) for overlap in (False, True)]
    for run in runs:
        drive(run)
        run.drain()
    assert runs[1].results == runs[0].results and runs[0].num_lookahead == 0
    return runs[1]


def test_logprobs_match_their_tokens(folder):
    def drive(run: _EngineRun) -> None:
        requests = [
            {"logprobs": 0},
            {"logprobs": 3, "temperature": 1.0, "seed": 1},
            {},
            {"logprobs": 20, "max_tokens": 5},
        ]
        for i, params in enumerate(requests):
            run.add(i, _prompt(9 + 15 * i, i), **params)

    run = _run_both(folder, drive)
    assert [len(logprobs) for _, logprobs, *_ in run.results.values()] == [24, 24, 0, 5]
    assert run.num_lookahead > 20


def _run_waves(run: _EngineRun) -> None:
    """Run requests in two waves. Some of them share a prefix."""
    prefix = _prompt(19, 100)
    for wave in range(2):
        for i, params in enumerate(ALL_PARAMS):
            suffix = _prompt(1 + 7 * i, i)
            run.add(len(run.results), prefix + suffix[:30] if i % 3 == wave else suffix, **params)
        for _ in range(15):
            run.step()


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 14}, {"num_blocks": 14, "enable_prefix_caching": False, "swap_space": 0.001}],
    ids=["large pool", "preempted", "swapped"],
)
def test_tokens_equal_those_of_synchronous_steps(folder, settings, monkeypatch):
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    run = _run_both(folder, _run_waves, **settings)
    assert run.num_lookahead > 60
    assert (run.engine.stats().num_preemptions > 0) == ("num_blocks" in settings)
    assert {finish_reason for *_, finish_reason in run.results.values()} == {"stop", "length"}


def test_tokens_are_equal_if_the_host_requires_them(folder):
    """Bad words, prompt logprobs and many logprobs make steps wait for each other; other parameters do not."""

    def drive(run: _EngineRun) -> None:
        for i, params in enumerate([{"logprobs": 50, "max_tokens": 9}, {"prompt_logprobs": 1}, {}, {"max_tokens": 40}]):
            run.add(i, _prompt(9 + 15 * i, i), **params)
        fields = {"bad_word_ids": [[t] for t in range(0, VOCAB, 2)] + [[1, 3], [5, 7]]}
        run.add(9, _prompt(9, 2), fields, max_tokens=9)

    run = _run_both(folder, drive, max_logprobs=50)
    assert run.results[0][1] and run.results[1][2]
    assert 15 < run.num_lookahead < 35


def test_tokens_are_equal_while_adapters_are_loaded_and_removed(folder, adapters):
    def drive(run: _EngineRun) -> None:
        for digest, path in adapters.items():
            run.engine.add_adapter(digest, path, run.engine.read_adapter(path), slot_pinned=False)
        for i in range(16):
            run.add(i, _prompt(5 + 3 * i, i), {"adapter_digest": [None, "d0", "d1", "d2"][i % 4]}, stop_token_ids=STOPS)
            for _ in range(i % 3):
                run.step()
        for digest in adapters:
            run.engine.remove_adapter(digest)

    run = _run_both(folder, drive, enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=3)
    assert run.engine.adapter_states() == {} and run.num_lookahead > 20


def test_forks_start_in_lookahead_steps(folder):
    def drive(run: _EngineRun) -> None:
        for i in range(5):
            run.add(i, _prompt(45, 1), {"parent_id": 0 if i else None}, temperature=1.0, seed=i)

    run = _run_both(folder, drive)
    assert run.engine.stats().prefix_cache_hits > 100 and run.num_lookahead > 15


def test_abort_between_steps_ends_only_that_sequence(folder):
    expected = _EngineRun(folder, False)
    expected.add(0, _prompt(20, 0))
    expected.drain()
    run = _EngineRun(folder, True)
    run.add(0, _prompt(20, 0))
    run.add(1, _prompt(20, 1))
    for _ in range(6):
        run.step()
    run.engine.abort([1])
    num_tokens_before = len(run.results[1][0])
    run.drain()
    assert run.results[0] == expected.results[0]
    assert len(run.results[1][0]) == num_tokens_before and run.results[1][3] is None
    # The id can be used again at once, even while the last step of the sequence is in flight.
    run.add(0, _prompt(20, 0))
    run.step()
    run.engine.abort([0])
    run.add(0, _prompt(20, 0))
    assert run.drain()[0] == expected.results[0]


# Scheduler only: what a lookahead step contains.


def lookahead_harness(**fields: Any) -> SchedulerHarness:
    return SchedulerHarness(lookahead=True, **fields)


def test_no_lookahead_step_after_max_tokens():
    harness = lookahead_harness()
    harness.add(5, 3)
    assert [harness.step() for _ in range(4)] == [[(0, 0, 5)], [(0, 5, 1)], [(0, 6, 1)], []]
    assert harness.outputs[0] == expected_output([0] * 5, 3)


def test_stopped_sequence_keeps_its_blocks_until_its_lookahead_step_completes():
    harness = lookahead_harness()
    output = expected_output([0] * 7, 4)
    sequence = harness.add(7, 4, stop_token_ids=frozenset(output[1:2]))
    harness.step()
    harness.step()
    assert sequence.status is SequenceStatus.FINISHED and harness.outputs[0] == output[:2]
    assert harness.lookahead_step is not None and harness.block_pool.num_used == 2
    assert harness.scheduler.has_work and harness.scheduler.num_running == 0
    assert harness.step() == [(0, 8, 1)]
    assert harness.outputs[0] == output[:2] and harness.block_pool.num_used == 0
    assert not harness.scheduler.has_work


def test_prefills_start_and_continue_in_lookahead_steps():
    harness = lookahead_harness(config=dataclasses.replace(CONFIG, max_num_batched_tokens=16))
    harness.add(4, 9)
    harness.step()
    harness.add(30, 2)
    batches = [harness.step() for _ in range(5)]
    assert batches[1:4] == [[(0, 5, 1), (1, 0, 15)], [(0, 6, 1), (1, 15, 15)], [(0, 7, 1), (1, 30, 1)]]
    harness.run()
    assert harness.outputs == {0: expected_output([0] * 4, 9), 1: expected_output([1] * 30, 2)}


def test_lookahead_never_preempts():
    harness = lookahead_harness(num_blocks=6, max_model_len=40)
    harness.add(14, 20)
    harness.add(14, 20)
    without_lookahead = []
    while not harness.scheduler.num_preemptions:
        without_lookahead.append(harness.lookahead_step is None)
        harness.step()
    assert without_lookahead[-1] and sum(without_lookahead) == 2 and len(without_lookahead) > 10
    harness.run()
    assert harness.outputs == {i: expected_output([i] * 14, 20) for i in range(2)}


def test_urgent_arrival_preempts_one_step_later():
    config = dataclasses.replace(CONFIG, max_num_seqs=1, scheduling_policy="priority")
    harness = lookahead_harness(config=config)
    harness.add(4, 30)
    harness.step()
    harness.add(4, 2, priority=-1)
    has_started = [any(sequence_id == 1 for sequence_id, _, _ in harness.step()) for _ in range(4)]
    assert has_started.index(True) <= 2
    harness.run()
    assert harness.outputs == {0: expected_output([0] * 4, 30), 1: expected_output([1] * 4, 2)}
