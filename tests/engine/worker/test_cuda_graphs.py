# SPDX-License-Identifier: Apache-2.0
"""Decoding steps over memory that stays: everything but the capture, which only a GPU can do."""

import dataclasses
import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from support.random_adapter import random_adapter
from support.tiny_checkpoints import VOCAB, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.sequence import Sequence
from quire_engine.step.plan import ScheduledSpan, StepPlan
from quire_engine.worker import cuda_graphs as of_decoding
from quire_engine.worker.cuda_graphs import ADAPTER_SIZES_PER_DOUBLING, CudaGraphRunner, DeviceBlockTables, graph_sizes
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_engine.worker.startup import RunnerStartup
from quire_kernels import paged_attention, route_tokens
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

CONFIG = EngineConfig(
    model="m", dtype="float32", max_model_len=96, block_size=8, max_num_seqs=6, max_num_batched_tokens=40,
)  # fmt: skip


@pytest.mark.parametrize("most", [1, 2, 7, 8, 64, 200, 256])
def test_sizes_rise_to_the_largest_batch_and_pad_little(most):
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(after / before <= 1.25 for before, after in itertools.pairwise(sizes) if before >= 8)


def test_two_hundred_and_fifty_six_sequences_need_few_graphs():
    assert len(graph_sizes(256)) == 24
    with_adapters = graph_sizes(256, ADAPTER_SIZES_PER_DOUBLING)
    assert len(with_adapters) == 14
    assert all(after / before <= 1.5 for before, after in itertools.pairwise(with_adapters) if before >= 8)


def _sequence(blocks):
    made = Sequence(0, [1, 2, 3], SamplingParams(), seed=0, max_output_tokens=50)
    made.block_table = blocks
    return made


def _rows(tables, *sequences):
    return tables.assign_rows([ScheduledSpan(sequence, 2, 1, None) for sequence in sequences])


def test_only_new_blocks_are_sent():
    tables, first, second = DeviceBlockTables(4), _sequence([5, 6]), _sequence([7])
    rows, entries = _rows(tables, first, second)
    assert entries == [(rows[0], 0, 5), (rows[0], 1, 6), (rows[1], 0, 7)]
    assert _rows(tables, second, first) == (rows[::-1], [])
    first.block_table += [9]
    assert _rows(tables, first) == (rows[:1], [(rows[0], 2, 9)])


def test_a_preempted_sequence_sends_its_new_table():
    tables, sequence = DeviceBlockTables(2), _sequence([5, 6])
    (row,), _ = _rows(tables, sequence)
    sequence.block_table = []
    sequence.block_table = [3, 4]
    assert _rows(tables, sequence) == ([row], [(row, 0, 3), (row, 1, 4)])


def test_rows_of_those_that_do_not_run_are_taken_over():
    tables, kept, gone = DeviceBlockTables(3), _sequence([1]), [_sequence([i]) for i in range(2, 4)]
    (row, *others), _ = _rows(tables, kept, *gone)
    new = [_sequence([8]), _sequence([9])]
    rows, entries = _rows(tables, kept, *new)
    assert rows[0] == row
    assert sorted(rows[1:]) == sorted(others)
    assert [block for _, _, block in entries] == [8, 9]
    # One of those comes back.
    (again,), entries = _rows(tables, gone[0])
    assert entries == [(again, 0, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


class _Replays:
    """A recording that runs the step again each time, and counts."""

    def __init__(self):
        self.num = 0

    def __call__(self, step):
        def replay():
            self.num += 1
            return step()

        return replay


def _answers(folder, monkeypatch, replays, adapters=(), seen=None, ahead=False):
    """Tokens of nine requests, which come in two waves, with more than the blocks can hold at once; `adapters`: of the
    requests in turn, `seen`: takes the slots and adapters of each replayed step, `ahead`: begin steps before the last
    one is over."""
    # The gathering form wants groups that the host has made; a step of a graph has none.
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    monkeypatch.setattr(RunnerStartup, "_capture_graphs", lambda self, kv_cache: None)
    config = dataclasses.replace(CONFIG, model=str(folder), kv_cache_memory_bytes=13 * 8 * 2 * 2 * 2 * 16 * 4)
    config = dataclasses.replace(config, async_scheduling=ahead)
    if adapters:
        config = dataclasses.replace(config, enable_lora=True, max_loras=2, max_lora_rank=16)
    engine = Engine.from_config(config)
    runner = engine._runner
    if adapters:
        draw = torch.Generator().manual_seed(5)
        for i, rank in enumerate((3, 16, 8)):
            engine.add_adapter(f"adapter {i}", Path("not read"), random_adapter(runner, rank, draw))
    if replays is not None:
        shape = runner._model.shape
        runner._kv_cache = KVCache(
            shape, runner.memory.num_blocks, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1
        )
        runner._graphs = CudaGraphRunner(runner._model, runner._kv_cache, 6, 96, 2 if adapters else 0, capture=replays)
        work_of, steps = runner._graphs.build_input, [] if seen is None else seen

        def seen_work(plan):
            if (work := work_of(plan)) is not None:
                steps.append({(s.adapter_slot, s.sequence.adapter_digest) for s in plan.spans})
            return work

        runner._graphs.build_input = seen_work
    prompts = [
        torch.randint(VOCAB, (3 + 7 * i,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(9)
    ]
    params = [{"temperature": t, "seed": 3, "max_tokens": 20, "ignore_eos": True} for t in (0.0, 1.0, 0.0)]
    found: dict[int, list[int]] = {}
    for wave in (range(4), range(4, 9)):
        for i in wave:
            engine.add(
                SequenceRequest(
                    i, prompts[i], params[i % 3], adapter_digest=adapters[i % len(adapters)] if adapters else None
                )
            )
        for _ in range(1000 if 8 in wave else 12):
            for result in engine.step().results if engine.has_work else []:
                assert result.error_code is None, result.error
                found.setdefault(result.id, []).extend(result.token_ids)
    assert not engine.has_work
    return found, engine.stats().num_preemptions


@pytest.mark.parametrize("ahead", [False, True])
def test_the_same_tokens_as_without(folder, monkeypatch, ahead):
    replays = _Replays()
    expected, _ = _answers(folder, monkeypatch, None)
    found, num_preemptions = _answers(folder, monkeypatch, replays, ahead=ahead)
    assert found == expected
    assert replays.num > 20
    assert num_preemptions > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_chooses_no_token(folder, monkeypatch, ahead):
    """With one token a step, a graph computes prompts too, and their tokens but the last choose nothing."""
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    config = dataclasses.replace(CONFIG, model=str(folder), max_num_seqs=1, async_scheduling=ahead)
    found = []
    for num_tokens in (40, 1):
        monkeypatch.setattr(of_decoding, "should_capture", lambda device, wanted=num_tokens == 1: wanted)
        monkeypatch.setattr(of_decoding, "GraphCapture", lambda device: _Replays())
        engine = Engine.from_config(dataclasses.replace(config, max_num_batched_tokens=num_tokens))
        engine.add(SequenceRequest(0, [1, 2, 3], {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}))
        found.append([])
        while engine.has_work:
            for result in engine.step().results:
                assert result.error_code is None, result.error
                found[-1] += result.token_ids
    assert found[1] == found[0] and len(found[0]) == 5


@pytest.mark.parametrize("ahead", [False, True])
def test_the_same_tokens_with_adapters(folder, monkeypatch, ahead):
    """Three adapters take turns in two slots, beside sequences without: what a slot holds changes between replays."""
    adapters, seen = (None, "adapter 0", "adapter 1", "adapter 2"), []
    expected, _ = _answers(folder, monkeypatch, None, adapters)
    found, num_preemptions = _answers(folder, monkeypatch, _Replays(), adapters, seen, ahead)
    assert found == expected
    assert num_preemptions > 0
    assert found != _answers(folder, monkeypatch, None)[0]
    assert any({None, 0, 1} <= {slot for slot, _ in step} for step in seen)
    assert any(len(step) == 1 for step in seen)
    held = {slot: {adapter for step in seen for at, adapter in step if at == slot} for slot in (0, 1)}
    assert max(map(len, held.values())) > 1


def test_a_step_without_adapters_launches_nothing_for_them(folder, monkeypatch):
    """Its graph is one of those that were recorded without."""
    routed, recorded = [], []
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    monkeypatch.setitem(
        route_tokens.dispatch_table, "cpu", lambda *args: routed.append(args) or route_tokens.reference(*args)
    )
    config = dataclasses.replace(CONFIG, model=str(folder), enable_lora=True, max_loras=2)
    runner = DeviceModelRunner(config, ModelConfig.load(folder), folder)
    kv = KVCache(runner._model.shape, 20, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    graphs = CudaGraphRunner(runner._model, kv, 6, 96, 2, capture=lambda step: recorded.append(step) or step)
    assert len(recorded) == len(graphs.sizes) + len(graphs.adapter_sizes)
    one = ScheduledSpan(_sequence([0]), 2, 1, None)
    base = graphs.run(graphs.build_input(StepPlan([one]))).clone()
    assert not routed
    # Nothing was copied into the slot yet, so it changes nothing.
    two = StepPlan([one, dataclasses.replace(one, sequence=_sequence([1]), adapter_slot=1)])
    adapted = graphs.run(graphs.build_input(two))
    assert len(routed) == 1
    assert routed[0][0].tolist() == [-1, 1]
    torch.testing.assert_close(adapted, base.expand(2, -1))


def test_what_a_graph_reads_stays_allocated(folder):
    """A graph has addresses and holds no tensor: the step that was recorded must live as long."""
    config = dataclasses.replace(CONFIG, model=str(folder), enable_lora=True, max_loras=2)
    runner = DeviceModelRunner(config, ModelConfig.load(folder), folder)
    kv = KVCache(runner._model.shape, 20, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    recorded = []
    graphs = CudaGraphRunner(runner._model, kv, 2, 96, 2, capture=lambda step: recorded.append(weakref.ref(step)))
    gc.collect()
    assert len(recorded) == len(graphs.sizes) + len(graphs.adapter_sizes)
    assert all(step() is not None for step in recorded)
    # Then at once, so that its memory is not counted twice: nothing waits for a collection.
    graphs.close()
    assert all(step() is None for step in recorded)


def test_a_form_that_wants_spans_in_groups_is_refused(folder, monkeypatch):
    """A captured step has none: it would compute nothing of attention, and say nothing."""
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.get("cuda", "torch"))
    runner = DeviceModelRunner(dataclasses.replace(CONFIG, model=str(folder)), ModelConfig.load(folder), folder)
    kv = KVCache(runner._model.shape, 20, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    graphs = CudaGraphRunner(runner._model, kv, 2, 96, capture=lambda step: step)
    with pytest.raises(ConfigError, match="QUIRE_GRAPHS=0"):
        graphs.run(graphs.build_input(StepPlan([ScheduledSpan(_sequence([0]), 2, 1, None)])))


def test_steps_of_more_than_a_token_are_left_to_others(folder):
    graphs = CudaGraphRunner.__new__(CudaGraphRunner)
    graphs.sizes, graphs._num_adapter_slots = (1, 2), 0
    graphs._model = type("Model", (), {"shape": type("Shape", (), {"long_rope_threshold": None})})
    sequence = _sequence([0])
    one, two = ScheduledSpan(sequence, 2, 1, None), ScheduledSpan(sequence, 1, 2, None)
    assert graphs.can_run([one, one])
    assert not graphs.can_run([one, two])
    assert not graphs.can_run([one, one, one])
    assert not graphs.can_run([dataclasses.replace(one, adapter_slot=0)])
    graphs._num_adapter_slots = 2
    assert graphs.can_run([one, dataclasses.replace(one, adapter_slot=0)])
