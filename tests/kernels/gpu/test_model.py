# SPDX-License-Identifier: Apache-2.0
"""Whole models on interpreted Triton kernels: the same log probabilities as on CPU kernels."""

import dataclasses

import pytest
import torch
from support.graph_captures import RerunCapture
from support.random_adapter import random_adapter
from support.requirements_of_machine import interpreted_kernel, requires_interpreter
from support.tiny_checkpoints import VOCAB, make_checkpoint

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.sequence import Sequence
from quire_engine.step.input import build_step_input, sort_spans
from quire_engine.step.plan import ScheduledSpan, StepPlan
from quire_engine.worker.cuda_graphs import CudaGraphRunner
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_kernels import (
    add_lora,
    add_lora_embedding,
    argmax_first,
    get_gated_op,
    paged_attention,
    rms_norm,
    rope_and_cache,
    route_tokens,
    sample,
)
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.model.model_config import ModelConfig

pytestmark = requires_interpreter

CONFIG = EngineConfig(model="m", dtype="float32", max_model_len=64, block_size=8, max_num_seqs=4)
FORMS = (
    sample,
    argmax_first,
    paged_attention,
    rms_norm,
    rope_and_cache,
    *map(get_gated_op, ("silu", "gelu_pytorch_tanh")),
)


ADAPTER_FORMS = (add_lora, add_lora_embedding, route_tokens)


def _run(folder):
    """Run a prompt, then a step with its next token and another prompt; return tokens and prompt log probabilities."""
    runner = DeviceModelRunner(dataclasses.replace(CONFIG, model=str(folder)), ModelConfig.load(folder), folder)
    draw = torch.Generator().manual_seed(1)
    sequences, num_blocks = [], 4 * runner._kv_cache.layout.num_groups
    for id, length in enumerate((21, 9)):
        prompt = torch.randint(VOCAB, (length,), generator=draw).tolist()
        params = SamplingParams(temperature=float(id), top_p=0.9, prompt_logprobs=0)
        sequences.append(Sequence(id, prompt, params, seed=3, max_output_tokens=9))
        sequences[-1].block_table = list(range(num_blocks * id, num_blocks * (id + 1)))
    first, second = sequences
    results = runner.execute(StepPlan([ScheduledSpan(first, 0, 21, None)]))
    first.num_computed_prompt_logprobs = 20
    first.output_token_ids += results[0].token_ids
    results += runner.execute(StepPlan([ScheduledSpan(first, 21, 1, None), ScheduledSpan(second, 0, 9, None)]))
    logprobs = [entries[0].logprob for result in results for entries in result.prompt_logprobs or []]
    return [result.token_ids for result in results], torch.tensor(logprobs)


# numpy, which the interpreter uses, warns when a number becomes infinite; a GPU does not, and 1 / infinity is intended.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["gemma2", "gemma4", "gemma4_unified", "qwen3", "phi3-partial"])
def test_equals_the_cpu_implementations(name, tmp_path, monkeypatch):
    """Together the models use soft caps, windows, head norms and partial rotation."""
    folder = make_checkpoint(tmp_path, name)
    expected = _run(folder)
    for op in FORMS:
        monkeypatch.setitem(op.dispatch_table, "cpu", interpreted_kernel(op))
    tokens, logprobs = _run(folder)
    assert tokens == expected[0]
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-4, atol=1e-4)


def test_graph_step_with_adapters(tmp_path, monkeypatch):
    """Sequences of two adapters and of the base in one step, with the inputs of a graph: the logits equal those of the
    CPU kernels, for which the host sorts tokens by adapter."""
    folder = make_checkpoint(tmp_path, "llama")
    config = dataclasses.replace(CONFIG, model=str(folder), enable_lora=True, max_loras=2, max_lora_rank=24)
    runner = DeviceModelRunner(config, ModelConfig.load(folder), folder)
    runner._kv_cache = KVCache(runner._model.shape, 12, 8, torch.float32, torch.device("cpu"), num_spare_blocks=1)
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    graphs = CudaGraphRunner(runner._model, runner._kv_cache, config, 64, RerunCapture())
    graphs.capture_all()
    draw = torch.Generator().manual_seed(1)
    spans = []
    for id, slot in enumerate((1, None, 0)):
        prompt = torch.randint(VOCAB, (9,), generator=draw).tolist()
        sequence = Sequence(id, prompt, SamplingParams(), seed=3, max_output_tokens=9)
        sequence.block_table = [4 * id, 4 * id + 1]
        spans.append(ScheduledSpan(sequence, 8, 1, slot))
    for ranks in ((24, 3), (2, 16)):
        for slot, rank in enumerate(ranks):
            runner.adapter_store.slots._slots.write(slot, random_adapter(runner, rank, draw).packed)
        runner.execute(StepPlan([ScheduledSpan(span.sequence, 0, 8, span.adapter_slot) for span in spans]))
        expected = _logits(runner, spans)
        with monkeypatch.context() as patched:
            for op in ADAPTER_FORMS:
                patched.setitem(op.dispatch_table, "cpu", interpreted_kernel(op))
            found = graphs.run(graphs.build_input(StepPlan(spans)))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for span, logits in zip(spans, expected, strict=True):
            without = _logits(runner, [dataclasses.replace(span, adapter_slot=None)])
            assert torch.allclose(logits, without, rtol=1e-2, atol=1e-2) == (span.adapter_slot is None)


def _logits(runner, spans):
    order = sort_spans(spans)
    work = build_step_input([spans[i] for i in order], 8)
    batch, hidden = runner._forward(work, runner._kv_cache, spans)
    logits = runner._model.compute_logits(hidden, batch.for_logit_rows(slice(len(spans))))
    return logits[torch.tensor(order).argsort()]
