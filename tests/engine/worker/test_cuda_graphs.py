# SPDX-License-Identifier: Apache-2.0
"""Steps over persistent tensors: everything except the capture, which requires a GPU."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch
from support.graph_captures import RerunCapture, replace_captures
from support.tiny_checkpoints import make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.sequence import Sequence
from quire_engine.step.plan import ScheduledSpan, StepPlan
from quire_engine.worker.cuda_graphs import CudaGraphRunner
from quire_engine.worker.device_block_tables import DeviceBlockTables
from quire_engine.worker.graph_shapes import GraphShape, GraphShapes
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
@pytest.mark.parametrize("max_num_tokens", [1, 2, 40, 512, 8192])
def test_shapes_increase_to_the_largest_step_with_little_padding(max_num_seqs, max_num_tokens):
    shapes = GraphShapes(max_num_seqs, max_num_tokens, True)
    for kind in shapes.kinds:
        sizes, (_, is_mixed, has_adapters) = [shape.num_tokens for shape in kind], kind[0]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == (min(max_num_tokens, 512) if is_mixed else max_num_seqs)
        smallest, growth = 64 if is_mixed else 8, 1.5 if has_adapters else 1.25
        assert all(after / before <= growth for before, after in itertools.pairwise(sizes) if before >= smallest)
        for shape in kind:
            # A mixed step has a span of several tokens, and its padding is one more span.
            assert shape.num_spans(max_num_seqs) <= shape.num_tokens
            for num_tokens in (1, shape.num_tokens):
                found = shapes.select(num_tokens, is_mixed=is_mixed, has_adapters=has_adapters)
                assert found == next(each for each in kind if each.num_tokens >= num_tokens)
        assert shapes.select(sizes[-1] + 1, is_mixed=is_mixed, has_adapters=has_adapters) is None
    assert GraphShapes(2, 8, False).select(1, is_mixed=False, has_adapters=True) is None


def test_number_of_graphs_for_256_sequences():
    assert [len(kind) for kind in GraphShapes(256, 2048, True).kinds] == [9, 15, 14, 24]


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


@pytest.mark.parametrize(("name", "ahead"), [("llama", False), ("llama", True), ("gemma4", True)])
def test_graph_of_a_step_that_samples_nothing(tmp_path, monkeypatch, name, ahead):
    """With one token per step, graphs also compute prompts, of which only the last token samples. In Gemma 4, layers
    have block tables of different widths."""
    folder = make_checkpoint(tmp_path, name)
    config = dataclasses.replace(CONFIG, model=str(folder), max_num_seqs=1, async_scheduling=ahead)
    outputs = []
    for num_tokens in (40, 1):
        replace_captures(monkeypatch, enabled=num_tokens == 1)
        engine = Engine.from_config(dataclasses.replace(config, max_num_batched_tokens=num_tokens))
        engine.add(
            SequenceRequest(
                0, [*range(40)], SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 5, "ignore_eos": True})
            )
        )
        outputs.append([])
        while engine.has_work:
            for result in engine.step().results:
                assert result.error_code is None, result.error
                outputs[-1] += result.token_ids
    assert outputs[1] == outputs[0] and len(outputs[0]) == 5


def test_step_without_adapters_launches_no_lora_kernels(llama_folder, monkeypatch):
    """Such a step runs a graph that was captured without adapters."""
    routed = []
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    monkeypatch.setitem(
        route_tokens.dispatch_table, "cpu", lambda *args: routed.append(args) or route_tokens.reference(*args)
    )
    config = dataclasses.replace(CONFIG, model=str(llama_folder), enable_lora=True, max_loras=2)
    graphs = _graphs(config, llama_folder)
    one = ScheduledSpan(_sequence([0]), 2, 1, None)
    routed.clear()
    base = graphs.run(graphs.build_input(StepPlan([one])))
    assert not routed
    # The slot is empty, so it changes nothing.
    two = StepPlan([one, dataclasses.replace(one, sequence=_sequence([1]), adapter_slot=1)])
    adapted = graphs.run(graphs.build_input(two))
    # The layers, and then the output projection.
    assert [tokens.tolist() for tokens, *_ in routed] == [[-1, 1]] * 2
    torch.testing.assert_close(adapted, base.expand(2, -1))


def test_tensors_of_a_graph_stay_allocated_until_close(llama_folder, monkeypatch):
    """A graph contains addresses and no tensors, so the captured step must stay alive."""
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    config = dataclasses.replace(CONFIG, model=str(llama_folder), enable_lora=True, max_loras=2)
    captured = []

    class References(RerunCapture):
        def __call__(self, step):
            captured.append(weakref.ref(step))

    graphs = _graphs(config, llama_folder, References())
    gc.collect()
    assert len(captured) == sum(map(len, graphs.shapes.kinds))
    assert all(step() is not None for step in captured)
    # Freed at once, without a garbage collection, so that the memory is not counted twice.
    graphs.close()
    assert all(step() is None for step in captured)


def test_rejects_attention_kernels_that_need_host_groups(llama_folder, monkeypatch):
    """A captured step has no groups, so such a kernel would silently compute no attention."""
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.get("cuda", "torch"))
    with pytest.raises(ConfigError, match="QUIRE_GRAPHS=0"):
        _graphs(dataclasses.replace(CONFIG, model=str(llama_folder)), llama_folder)


def test_selects_a_graph_by_the_tokens_of_a_step(llama_folder):
    graphs = CudaGraphRunner.__new__(CudaGraphRunner)
    graphs.shapes, graphs._max_num_seqs = GraphShapes(2, 20, False), 2
    shape = type("Shape", (), {"long_rope_threshold": None})
    graphs._model = type("Model", (), {"shape": shape, "eager_slots": {7}})
    sequence = _sequence([0])
    one, two = ScheduledSpan(sequence, 2, 1, None), ScheduledSpan(sequence, 1, 2, None)
    assert graphs._select_shape([one, one]) == GraphShape(2, False, False)
    assert graphs._select_shape([one, two]) == GraphShape(16, True, False)
    assert graphs._select_shape([one, dataclasses.replace(two, length=19)]) == GraphShape(20, True, False)
    assert graphs._select_shape([one, dataclasses.replace(two, length=20)]) is None
    assert graphs._select_shape([one, one, one]) is None
    assert graphs._select_shape([dataclasses.replace(one, adapter_slot=0)]) is None
    graphs.shapes = GraphShapes(2, 20, True)
    assert graphs._select_shape([one, dataclasses.replace(one, adapter_slot=0)]) == GraphShape(2, False, True)
    assert graphs._select_shape([one, dataclasses.replace(one, adapter_slot=7)]) is None


def _graphs(config, folder, capture=None):
    """Return graphs over an empty KV cache, of steps that run eagerly."""
    runner = DeviceModelRunner(config, ModelConfig.load(folder), folder)
    kv = KVCache(runner._model.shape, 20, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    graphs = CudaGraphRunner(runner._model, kv, config, 96, capture or RerunCapture())
    graphs.capture_all()
    return graphs
