# SPDX-License-Identifier: Apache-2.0
"""Steps that are begun while the one before them is in flight: outputs are those of steps that wait."""

import dataclasses
from typing import Any

import pytest
import torch
from support.fake_runner import expected_output
from support.scheduler_harness import ALWAYS_SWAP, CONFIG, SchedulerHarness
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.sequence import SequenceStatus
from quire_spec.engine.config import EngineConfig
from quire_spec.protocol.messages import SequenceRequest

MAX_MODEL_LEN = 96
BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4
"""Of a block of 8 tokens in float32, over both layers of the checkpoint."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    return {f"d{i}": make_adapter(folder, tmp_path_factory.mktemp(f"d{i}"), seed=i, r=4) for i in range(3)}


def _prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class _Run:
    """An engine and all that came of its requests."""

    def __init__(self, folder, ahead: bool, num_blocks: int = 200, **settings: Any) -> None:
        made = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 8, "max_num_seqs": 6}
        made |= {"max_num_batched_tokens": 40, "kv_cache_memory_bytes": num_blocks * BLOCK_BYTES}
        config = {"model": str(folder), "async_scheduling": ahead, **made, **settings}
        self.engine = Engine.from_config(EngineConfig.from_json(config))
        self.found: dict[int, list[Any]] = {}
        self.num_ahead = 0
        schedule_ahead = self.engine._scheduler.schedule_ahead

        def counted(now: float) -> Any:
            plan = schedule_ahead(now)
            self.num_ahead += plan is not None
            return plan

        self.engine._scheduler.schedule_ahead = counted  # type: ignore[method-assign]

    def add(self, id: int, prompt: list[int], fields: dict[str, Any] | None = None, **params: Any) -> None:
        self.found[id] = [[], [], None, None]
        self.engine.add(SequenceRequest(id, prompt, {"temperature": 0.0, "max_tokens": 24, **params}, **fields or {}))

    def step(self) -> None:
        self.engine.read_pending_adapters()
        for result in self.engine.step().results:
            assert result.error_code is None, result.error
            tokens, logprobs, prompt_logprobs, end = self.found[result.id]
            assert end is None, "a token after the end"
            tokens += result.token_ids
            logprobs += result.logprobs or []
            self.found[result.id][2:] = [prompt_logprobs or result.prompt_logprobs, result.finish_reason]
        self.engine.check_integrity()

    def drain(self) -> dict[int, list[Any]]:
        while self.engine.has_work:
            self.step()
        stats = self.engine.stats()
        assert stats.num_used_blocks == stats.num_used_host_blocks == 0
        return self.found


STOPS = list(range(0, VOCAB, 9))
ASKED: list[dict[str, Any]] = [
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


def test_log_probabilities_come_with_their_tokens(folder):
    asked = [{"logprobs": 0}, {"logprobs": 3, "temperature": 1.0, "seed": 1}, {}, {"logprobs": 20, "max_tokens": 5}]
    runs = []
    for ahead in (False, True):
        runs.append(run := _Run(folder, ahead))
        for i, params in enumerate(asked):
            run.add(i, _prompt(9 + 15 * i, i), **params)
        run.drain()
    assert runs[1].found == runs[0].found
    assert [len(logprobs) for _, logprobs, *_ in runs[1].found.values()] == [24, 24, 0, 5]
    assert runs[1].num_ahead > 20


def _answers(folder, ahead: bool, **settings: Any) -> _Run:
    """Of requests in three waves, some of which share their beginning."""
    run = _Run(folder, ahead, **settings)
    beginning = _prompt(19, 100)
    for wave in range(3):
        for i, asked in enumerate(ASKED):
            own = _prompt(1 + 7 * i, i)
            run.add(len(run.found), beginning + own[:30] if i % 3 == wave else own, **asked)
        for _ in range(15):
            run.step()
    run.drain()
    return run


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 14}, {"num_blocks": 14, "enable_prefix_caching": False, "swap_space": 0.001}],
    ids=["room", "preempted", "swapped"],
)
def test_the_same_tokens_as_steps_that_wait(folder, settings, monkeypatch):
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    expected, found = _answers(folder, False, **settings), _answers(folder, True, **settings)
    assert found.found == expected.found
    assert expected.num_ahead == 0 and found.num_ahead > 60
    assert (found.engine.stats().num_preemptions > 0) == ("num_blocks" in settings)
    assert {end for *_, end in found.found.values()} == {"stop", "length"}


def test_the_same_tokens_where_the_host_has_to_know_them(folder):
    """Words that are not to be said, log probabilities of prompts and many of them: their steps wait, and no others."""
    asked = [{"logprobs": 50, "max_tokens": 9}, {"prompt_logprobs": 1}, {}, {"max_tokens": 40}]
    runs = []
    for ahead in (False, True):
        runs.append(run := _Run(folder, ahead, max_logprobs=50))
        for i, params in enumerate(asked):
            run.add(i, _prompt(9 + 15 * i, i), **params)
        bad = {"bad_word_ids": [[t] for t in range(0, VOCAB, 2)] + [[1, 3], [5, 7]]}
        run.add(9, _prompt(9, 2), bad, max_tokens=9)
        run.drain()
    assert runs[1].found == runs[0].found
    assert runs[1].found[0][1] and runs[1].found[1][2]
    assert 15 < runs[1].num_ahead < 35


def test_the_same_tokens_with_adapters_that_come_and_go(folder, adapters):
    runs = []
    for ahead in (False, True):
        runs.append(run := _Run(folder, ahead, enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=3))
        for digest, path in adapters.items():
            run.engine.add_adapter(digest, path, run.engine.read_adapter(path), pinned=False)
        for i in range(16):
            run.add(i, _prompt(5 + 3 * i, i), {"adapter_digest": [None, "d0", "d1", "d2"][i % 4]}, stop_token_ids=STOPS)
            for _ in range(i % 3):
                run.step()
        for digest in adapters:
            run.engine.remove_adapter(digest)
        run.drain()
        assert run.engine.adapter_states() == {}
    assert runs[1].found == runs[0].found
    assert runs[1].num_ahead > 20


def test_forks_follow_their_leader_ahead(folder):
    runs = []
    for ahead in (False, True):
        runs.append(run := _Run(folder, ahead))
        prompt = _prompt(45, 1)
        run.add(0, prompt, temperature=1.0, seed=0)
        for i in range(1, 5):
            run.add(i, prompt, {"parent_id": 0}, temperature=1.0, seed=i)
        run.drain()
        assert run.engine.stats().prefix_cache_hits > 100
    assert runs[1].found == runs[0].found
    assert runs[1].num_ahead > 15


def test_an_abort_between_steps_ends_a_sequence_at_once_and_no_other(folder):
    expected = _Run(folder, False)
    expected.add(0, _prompt(20, 0))
    expected.drain()
    run = _Run(folder, True)
    run.add(0, _prompt(20, 0))
    run.add(1, _prompt(20, 1))
    for _ in range(6):
        run.step()
    run.engine.abort([1])
    before = len(run.found[1][0])
    run.drain()
    assert run.found[0] == expected.found[0]
    assert len(run.found[1][0]) == before and run.found[1][3] is None
    # Its id is free at once, also while its last step is in flight.
    run.add(0, _prompt(20, 0))
    run.step()
    run.engine.abort([0])
    run.add(0, _prompt(20, 0))
    assert run.drain()[0] == expected.found[0]


# What the scheduler does ahead, and what not.


def _bench(**fields: Any) -> SchedulerHarness:
    return SchedulerHarness(lookahead=True, **fields)


def test_a_sequence_of_known_length_has_no_step_in_vain():
    bench = _bench()
    bench.add(5, 3)
    assert [bench.step() for _ in range(4)] == [[(0, 0, 5)], [(0, 5, 1)], [(0, 6, 1)], []]
    assert bench.outputs[0] == expected_output([0] * 5, 3)


def test_one_that_stops_has_a_token_computed_in_vain_and_keeps_its_blocks_until_then():
    bench = _bench()
    output = expected_output([0] * 7, 4)
    sequence = bench.add(7, 4, stop_token_ids=frozenset(output[1:2]))
    bench.step()
    bench.step()
    assert sequence.status is SequenceStatus.FINISHED and bench.outputs[0] == output[:2]
    assert bench.lookahead_step is not None and bench.block_pool.num_used == 2
    assert bench.scheduler.has_work and bench.scheduler.num_running == 0
    assert bench.step() == [(0, 8, 1)]
    assert bench.outputs[0] == output[:2] and bench.block_pool.num_used == 0
    assert not bench.scheduler.has_work


def test_prompts_start_and_go_on_ahead():
    bench = _bench(config=dataclasses.replace(CONFIG, max_num_batched_tokens=16))
    bench.add(4, 9)
    bench.step()
    bench.add(30, 2)
    batches = [bench.step() for _ in range(5)]
    assert batches[1:4] == [[(0, 5, 1), (1, 0, 15)], [(0, 6, 1), (1, 15, 15)], [(0, 7, 1), (1, 30, 1)]]
    bench.run()
    assert bench.outputs == {0: expected_output([0] * 4, 9), 1: expected_output([1] * 30, 2)}


def test_nobody_is_preempted_ahead():
    bench = _bench(num_blocks=6, max_model_len=40)
    bench.add(14, 20)
    bench.add(14, 20)
    waited = []
    while not bench.scheduler.num_preemptions:
        waited.append(bench.lookahead_step is None)
        bench.step()
    assert waited[-1] and sum(waited) == 2 and len(waited) > 10
    bench.run()
    assert bench.outputs == {i: expected_output([i] * 14, 20) for i in range(2)}


def test_the_urgent_wait_for_one_step_more():
    config = dataclasses.replace(CONFIG, max_num_seqs=1, scheduling_policy="priority")
    bench = _bench(config=config)
    bench.add(4, 30)
    bench.step()
    bench.add(4, 2, priority=-1)
    started = [any(of == 1 for of, _, _ in bench.step()) for _ in range(4)]
    assert started.index(True) <= 2
    bench.run()
    assert bench.outputs == {0: expected_output([0] * 4, 30), 1: expected_output([1] * 4, 2)}


def test_swapped_sequences_come_back_in_steps_that_wait():
    bench = _bench(num_blocks=8, max_model_len=56, swap=ALWAYS_SWAP)
    for _ in range(3):
        bench.add(14, 20)
    bench.run()
    assert bench.scheduler.block_manager.num_swapped_in_blocks > 0
    assert bench.outputs == {i: expected_output([i] * 14, 20) for i in range(3)}
