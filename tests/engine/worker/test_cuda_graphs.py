# SPDX-License-Identifier: Apache-2.0
"""Decoding steps over persistent tensors: everything except the capture, which requires a GPU."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch
from support.graph_captures import replace_captures

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.sequence import Sequence
from quire_engine.step.plan import ScheduledSpan, StepPlan
from quire_engine.worker.cuda_graphs import ADAPTER_SIZES_PER_DOUBLING, CudaGraphRunner, DeviceBlockTables, graph_sizes
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_kernels import paged_attention, route_tokens
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

CONFIG = EngineConfig(
    model="m", dtype="float32", max_model_len=96, block_size=8, max_num_seqs=6, max_num_batched_tokens=40,
)  # fmt: skip


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 8, 64, 200, 256])
def test_graph_sizes_increase_to_the_largest_batch_with_little_padding(max_num_seqs):
    sizes = graph_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    assert all(after / before <= 1.25 for before, after in itertools.pairwise(sizes) if before >= 8)


def test_number_of_graphs_for_256_sequences():
    assert len(graph_sizes(256)) == 24
    with_adapters = graph_sizes(256, ADAPTER_SIZES_PER_DOUBLING)
    assert len(with_adapters) == 14
    assert all(after / before <= 1.5 for before, after in itertools.pairwise(with_adapters) if before >= 8)


def _sequence(blocks):
    sequence = Sequence(0, [1, 2, 3], SamplingParams(), seed=0, max_output_tokens=50)
    sequence.block_table = blocks
    return sequence


def _rows(tables, *sequences):
    return tables.assign_rows([ScheduledSpan(sequence, 2, 1, None) for sequence in sequences])


def test_block_tables_send_only_new_blocks():
    tables, first, second = DeviceBlockTables(4), _sequence([5, 6]), _sequence([7])
    rows, entries = _rows(tables, first, second)
    assert entries == [(rows[0], 0, 5), (rows[0], 1, 6), (rows[1], 0, 7)]
    assert _rows(tables, second, first) == (rows[::-1], [])
    first.block_table += [9]
    assert _rows(tables, first) == (rows[:1], [(rows[0], 2, 9)])


@pytest.mark.parametrize("ahead", [False, True])
def test_graph_of_a_step_that_samples_nothing(llama_folder, monkeypatch, ahead):
    """With one token per step, graphs also compute prompts, of which only the last token samples."""
    config = dataclasses.replace(CONFIG, model=str(llama_folder), max_num_seqs=1, async_scheduling=ahead)
    outputs = []
    for num_tokens in (40, 1):
        replace_captures(monkeypatch, enabled=num_tokens == 1)
        engine = Engine.from_config(dataclasses.replace(config, max_num_batched_tokens=num_tokens))
        engine.add(SequenceRequest(0, [1, 2, 3], {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}))
        outputs.append([])
        while engine.has_work:
            for result in engine.step().results:
                assert result.error_code is None, result.error
                outputs[-1] += result.token_ids
    assert outputs[1] == outputs[0] and len(outputs[0]) == 5


def test_step_without_adapters_launches_no_lora_kernels(llama_folder, monkeypatch):
    """Such a step runs a graph that was captured without adapters."""
    routed, captured = [], []
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    monkeypatch.setitem(
        route_tokens.dispatch_table, "cpu", lambda *args: routed.append(args) or route_tokens.reference(*args)
    )
    config = dataclasses.replace(CONFIG, model=str(llama_folder), enable_lora=True, max_loras=2)
    runner = DeviceModelRunner(config, ModelConfig.load(llama_folder), llama_folder)
    kv = KVCache(runner._model.shape, 20, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    graphs = CudaGraphRunner(runner._model, kv, 6, 96, 2, capture=lambda step: captured.append(step) or step)
    assert len(captured) == len(graphs.sizes) + len(graphs.adapter_sizes)
    one = ScheduledSpan(_sequence([0]), 2, 1, None)
    base = graphs.run(graphs.build_input(StepPlan([one]))).clone()
    assert not routed
    # The slot is empty, so it changes nothing.
    two = StepPlan([one, dataclasses.replace(one, sequence=_sequence([1]), adapter_slot=1)])
    adapted = graphs.run(graphs.build_input(two))
    assert len(routed) == 1
    assert routed[0][0].tolist() == [-1, 1]
    torch.testing.assert_close(adapted, base.expand(2, -1))


def test_tensors_of_a_graph_stay_allocated_until_close(llama_folder):
    """A graph contains addresses and no tensors, so the captured step must stay alive."""
    config = dataclasses.replace(CONFIG, model=str(llama_folder), enable_lora=True, max_loras=2)
    runner = DeviceModelRunner(config, ModelConfig.load(llama_folder), llama_folder)
    kv = KVCache(runner._model.shape, 20, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    captured = []
    graphs = CudaGraphRunner(runner._model, kv, 2, 96, 2, capture=lambda step: captured.append(weakref.ref(step)))
    gc.collect()
    assert len(captured) == len(graphs.sizes) + len(graphs.adapter_sizes)
    assert all(step() is not None for step in captured)
    # Freed at once, without a garbage collection, so that the memory is not counted twice.
    graphs.close()
    assert all(step() is None for step in captured)


def test_rejects_attention_kernels_that_need_host_groups(llama_folder, monkeypatch):
    """A captured step has no groups, so such a kernel would silently compute no attention."""
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.get("cuda", "torch"))
    runner = DeviceModelRunner(
        dataclasses.replace(CONFIG, model=str(llama_folder)), ModelConfig.load(llama_folder), llama_folder
    )
    kv = KVCache(runner._model.shape, 20, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    graphs = CudaGraphRunner(runner._model, kv, 2, 96, capture=lambda step: step)
    with pytest.raises(ConfigError, match="QUIRE_GRAPHS=0"):
        graphs.run(graphs.build_input(StepPlan([ScheduledSpan(_sequence([0]), 2, 1, None)])))


def test_can_run_only_steps_of_single_tokens(llama_folder):
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
