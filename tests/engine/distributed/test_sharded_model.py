# SPDX-License-Identifier: Apache-2.0
"""Shared layers: what each rank holds, what it reads of a checkpoint, and that together they are the model."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.tiny_checkpoints import CHECKPOINTS, VOCAB, make_checkpoint

from quire_engine.distributed.communicator import Communicator
from quire_engine.distributed.shm_ring import Doorbell, SharedMemoryRing
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.forward_batch import build_forward_batch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.sequence import BlockId, Sequence, SlotId
from quire_engine.step.input import GraphStepInput, StepInput, build_step_input, decode, encode, max_elements
from quire_engine.step.plan import BlockCopy, ScheduledSpan, SwapCopy
from quire_engine.weights import loader
from quire_engine.weights.loader import load_weights
from quire_engine.weights.param_shard import unsharded
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.tensor_parallel import TensorParallelShard, unsupported_reason

CPU = torch.device("cpu")
SIZES = (2, 3, 4)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def _model(folder, ranks=None):
    shape = ModelConfig.load(folder)
    local = shape if ranks is None else ranks.shard.local_config
    model = get_model_class(shape.architecture)(local, ParamFactory(torch.float32, CPU, ranks))
    load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name)
    return model


def _logits(model, prompt):
    """Of a prompt in two chunks, all tokens'."""
    sequence = Sequence(0, prompt, SamplingParams(prompt_logprobs=0), seed=0, max_output_tokens=1)
    sequence.block_table = [BlockId(3), BlockId(0), BlockId(2), BlockId(1)]
    kv = KVCache(model.shape, 4, 8, torch.float32, CPU)
    found = []
    with torch.inference_mode():
        for start, length in ((0, 19), (19, len(prompt) - 19)):
            work = build_step_input([ScheduledSpan(sequence, start, length, None)], 8, model.shape.long_rope_threshold)
            batch = build_forward_batch(work, kv, CPU)
            found.append(model.compute_logits(model(batch, kv), batch))
    return torch.cat(found)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_together_are_the_model(folder, size, tmp_path):
    shape = ModelConfig.load(folder)
    if unsupported_reason(shape, size):
        with pytest.raises(ConfigError, match=r"^tensor_parallel_size: \d: \d+ .* use (\d or )*1$"):
            TensorParallelShard(shape, 0, size).validate()
        return
    prompt = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = _logits(_model(folder), prompt)
    loaded = threading.Barrier(size)

    def one(rank):
        def meet():
            loaded.wait()
            return tmp_path / "meeting"

        ranks = Communicator(TensorParallelShard(shape, rank, size), meet, timeout_s=20)
        model = _model(folder, ranks)
        ranks.connect(CPU)
        assert ranks.all_reduce_min(10 - rank) == 10 - size + 1
        return _logits(model, prompt)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(one, range(size)))
    assert found[0].shape == expected.shape
    # The order of float32 sums, over logits around 30.
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_rank_reads_its_part_and_no_more(folder, monkeypatch):
    """Every element of a tensor goes to some rank, those of shared KV heads and of what is not split to several."""
    shape, size = ModelConfig.load(folder), 4
    if unsupported_reason(shape, size):
        size = 2
    monkeypatch.setattr(loader, "_CHUNK_BYTES", 1000)
    tensors = load_file(folder / "model.safetensors")
    seen = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    read = 0
    for rank in range(size):
        model = _model(folder, Communicator(TensorParallelShard(shape, rank, size), lambda: folder))
        for name, target in model.tensors():
            part = unsharded(target)
            source = tensors.get(name, tensors.get(name.removeprefix("model.")))
            columns = slice(None) if part.columns is None else slice(part.columns.start, part.columns.stop)
            index = torch.tensor([row for rows in part.rows for row in rows], dtype=torch.int64)
            expected = source[index] if source.dim() == 1 else source[index][:, columns]
            assert torch.equal(part.tensor, expected), name
            counted = seen[name if name in seen else name.removeprefix("model.")]
            (counted if counted.dim() == 1 else counted[:, columns])[index] += 1
            read += part.nbytes
    assert all(
        bool((count > 0).all())
        for name, count in seen.items()
        if name != "lm_head.weight" or not shape.tie_word_embeddings
    )
    split = sum(t.nbytes for name, t in tensors.items() if "proj.weight" in name or "embed_tokens" in name)
    assert read < size * sum(t.nbytes for t in tensors.values()) - split / 2


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}


def test_kv_heads_that_are_fewer_than_ranks_are_on_several():
    shape = ModelConfig.from_config(LLAMA)
    ranks = [TensorParallelShard(shape, rank, 4) for rank in range(4)]
    assert [r.output_ranges("self_attn.k_proj") for r in ranks] == [
        (range(8),),
        (range(8),),
        (range(8, 16),),
        (range(8, 16),),
    ]
    assert [r.output_ranges("self_attn.q_proj") for r in ranks] == [(range(16 * i, 16 * i + 16),) for i in range(4)]
    assert [r.input_ranges("mlp.down_proj") for r in ranks] == [(range(24 * i, 24 * i + 24),) for i in range(4)]
    assert [r.local_config.num_kv_heads for r in ranks] == [1] * 4
    assert [list(r.vocab_range) for r in ranks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_a_size_that_does_not_divide_is_refused_with_those_that_do():
    shape = ModelConfig.from_config(LLAMA)
    with pytest.raises(
        ConfigError,
        match="tensor_parallel_size: 3 is not supported for this model: the number of attention heads, 8, is not a "
        "multiple of 3; use 2 or 1",
    ):
        TensorParallelShard(shape, 0, 3).validate()
    shape = ModelConfig.from_config(LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8})
    with pytest.raises(ConfigError, match="KV heads, 6, is neither a multiple nor a divisor of 4; use 3 or 2 or 1"):
        TensorParallelShard(shape, 0, 4).validate()


ids = st.integers(0, 2**40)
pairs = st.lists(st.tuples(ids, ids), max_size=4)


@given(
    spans=st.lists(st.tuples(ids, ids, st.integers(-1, 9), st.booleans()), min_size=1, max_size=5),
    token_ids=st.lists(ids, max_size=20),
    blocks=st.lists(ids, max_size=20),
    logit_rows=st.lists(ids, max_size=9),
    moves=st.tuples(pairs, pairs, pairs),
    long=st.booleans(),
    pending=st.booleans(),
)
def test_work_is_the_same_after_its_way_through_memory(spans, token_ids, blocks, logit_rows, moves, long, pending):
    outs, ins, copies = moves
    starts, lengths, slots, beyond = (list(column) for column in zip(*spans, strict=True))
    work = StepInput(
        starts=starts,
        lengths=lengths,
        adapter_slots=slots,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        block_ids=torch.tensor(blocks, dtype=torch.int64),
        logit_rows=logit_rows,
        num_sampled=len(logit_rows) // 2,
        awaits_tokens=pending,
        long_rope=[int(b) for b in beyond] if long else [],
        swap_outs=[SwapCopy(*pair) for pair in outs],
        swap_ins=[SwapCopy(*pair) for pair in ins],
        copies=[BlockCopy(*pair) for pair in copies],
    )
    inputs = torch.tensor([starts, lengths, slots, starts], dtype=torch.int64)
    entries = torch.tensor(outs + ins, dtype=torch.int64).view(-1, 2).T.repeat(2, 1)[:3]
    moved = {name: getattr(work, name) for name in ("swap_outs", "swap_ins", "copies")}
    of_graph = GraphStepInput(len(spans), long, inputs, entries, pending, **moved)
    for form in (work, of_graph):
        row = torch.full((200,), 7, dtype=torch.int64)
        encode(form, row)
        found = decode(row)
        row.fill_(9)
        assert type(found) is type(form)
        for name in type(form).__slots__:
            mine, other = getattr(form, name), getattr(found, name)
            assert mine == other if isinstance(mine, (list, int)) else torch.equal(mine, other)


def test_two_steps_can_be_handed_out_before_the_first_is_read():
    memory, eventfd = os.memfd_create("ring"), os.eventfd(0, os.EFD_SEMAPHORE)
    SharedMemoryRing.allocate(memory, 8)
    writer, reader, bell = SharedMemoryRing(memory, 8), SharedMemoryRing(memory, 8), Doorbell(eventfd)
    for first in range(0, 8, 2):
        for number in (first, first + 1):
            writer.next_row().fill_(number)
            bell.notify()
        for number in (first, first + 1):
            bell.wait()
            assert reader.next_row().tolist() == [number] * 8
    os.close(memory)
    os.close(eventfd)


def test_the_largest_work_fits_its_row():
    sequence = Sequence(0, [1] * 64, SamplingParams(prompt_logprobs=0), seed=0, max_output_tokens=1)
    sequence.block_table = [BlockId(i) for i in range(8)]
    work = build_step_input([ScheduledSpan(sequence, 0, 64, SlotId(0))] * 3, 8, long_rope_threshold=10)
    work = StepInput(**{name: getattr(work, name) for name in StepInput.__slots__} | {"copies": [BlockCopy(0, 1)] * 3})
    row = torch.zeros(max_elements(3, 3 * 64, 8, 0), dtype=torch.int64)
    encode(work, row)
    assert decode(row).copies == work.copies
    row = torch.zeros(max_elements(3, 3, 8, 0), dtype=torch.int64)
    of_graph = GraphStepInput(3, True, torch.ones((4, 3)).long(), torch.ones((3, 24)).long(), copies=work.copies)
    encode(of_graph, row)
    assert decode(row).copies == work.copies
