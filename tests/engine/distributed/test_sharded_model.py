# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel shards: what each rank loads, the logits that all ranks compute together, and the step ring."""

import dataclasses
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


def _load_model(folder, communicator=None):
    shape = ModelConfig.load(folder)
    local = shape if communicator is None else communicator.shard.local_config
    model = get_model_class(shape.architecture)(local, ParamFactory(torch.float32, CPU, communicator))
    load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name)
    return model


def _logits(model, prompt):
    """Return the logits of all tokens of a prompt, computed in two chunks."""
    sequence = Sequence(0, prompt, SamplingParams(prompt_logprobs=0), seed=0, max_output_tokens=1)
    sequence.block_table = [BlockId(3), BlockId(0), BlockId(2), BlockId(1)]
    kv = KVCache(model.shape, 4, 8, torch.float32, CPU)
    logits = []
    with torch.inference_mode():
        for start, length in ((0, 19), (19, len(prompt) - 19)):
            step_input = build_step_input(
                [ScheduledSpan(sequence, start, length, None)], 8, model.shape.long_rope_threshold
            )
            batch = build_forward_batch(step_input, kv, CPU)
            logits.append(model.compute_logits(model(batch, kv), batch))
    return torch.cat(logits)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_together_compute_the_logits_of_the_model(folder, size, tmp_path):
    shape = ModelConfig.load(folder)
    if unsupported_reason(shape, size):
        with pytest.raises(ConfigError, match=r"^tensor_parallel_size: \d is not supported .* use (\d or )*1$"):
            TensorParallelShard(shape, 0, size).validate()
        return
    prompt = torch.randint(0, VOCAB, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = _logits(_load_model(folder), prompt)
    loaded = threading.Barrier(size)

    def run_rank(rank):
        def rendezvous():
            loaded.wait()
            return tmp_path / "store"

        communicator = Communicator(TensorParallelShard(shape, rank, size), rendezvous, timeout_s=20)
        model = _load_model(folder, communicator)
        communicator.connect(CPU)
        assert communicator.all_reduce_min(10 - rank) == 10 - size + 1
        return _logits(model, prompt)

    with ThreadPoolExecutor(size) as threads:
        logits = list(threads.map(run_rank, range(size)))
    assert logits[0].shape == expected.shape
    # Sums of float32 in another order, for logits around 30.
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_rank_reads_only_its_shard(folder, monkeypatch):
    """Every element of a tensor is loaded by a rank; replicated KV heads and unsharded tensors by several."""
    shape, size = ModelConfig.load(folder), 4
    if unsupported_reason(shape, size):
        size = 2
    monkeypatch.setattr(loader, "_CHUNK_BYTES", 1000)
    tensors = load_file(folder / "model.safetensors")
    load_counts = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    bytes_read = 0
    for rank in range(size):
        model = _load_model(folder, Communicator(TensorParallelShard(shape, rank, size), lambda: folder))
        for name, target in model.tensors():
            shard = unsharded(target)
            source = tensors.get(name, tensors.get(name.removeprefix("model.")))
            columns = slice(None) if shard.columns is None else slice(shard.columns.start, shard.columns.stop)
            index = torch.tensor([row for rows in shard.rows for row in rows], dtype=torch.int64)
            expected = source[index] if source.dim() == 1 else source[index][:, columns]
            assert torch.equal(shard.tensor, expected), name
            counts = load_counts[name if name in load_counts else name.removeprefix("model.")]
            (counts if counts.dim() == 1 else counts[:, columns])[index] += 1
            bytes_read += shard.nbytes
    assert all(
        bool((count > 0).all())
        for name, count in load_counts.items()
        if name != "lm_head.weight" or not shape.tie_word_embeddings
    )
    sharded_bytes = sum(t.nbytes for name, t in tensors.items() if "proj.weight" in name or "embed_tokens" in name)
    assert bytes_read < size * sum(t.nbytes for t in tensors.values()) - sharded_bytes / 2


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


def test_kv_heads_fewer_than_ranks_are_replicated():
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


def test_rejects_unsupported_sizes_and_names_supported_ones():
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
    swaps_and_copies=st.tuples(pairs, pairs, pairs),
    long=st.booleans(),
    awaits=st.booleans(),
)
def test_step_input_round_trips_through_a_ring_row(
    spans, token_ids, blocks, logit_rows, swaps_and_copies, long, awaits
):
    outs, ins, copies = swaps_and_copies
    starts, lengths, slots, beyond = (list(column) for column in zip(*spans, strict=True))
    step_input = StepInput(
        starts=starts,
        lengths=lengths,
        adapter_slots=slots,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        block_ids=torch.tensor(blocks, dtype=torch.int64),
        logit_rows=logit_rows,
        num_sampled=len(logit_rows) // 2,
        awaits_tokens=awaits,
        long_rope=[int(b) for b in beyond] if long else [],
        swap_outs=[SwapCopy(*pair) for pair in outs],
        swap_ins=[SwapCopy(*pair) for pair in ins],
        copies=[BlockCopy(*pair) for pair in copies],
    )
    inputs = torch.tensor([starts, lengths, slots, starts], dtype=torch.int64)
    entries = torch.tensor(outs + ins, dtype=torch.int64).view(-1, 2).T.repeat(2, 1)[:3]
    copy_lists = {name: getattr(step_input, name) for name in ("swap_outs", "swap_ins", "copies")}
    graph_input = GraphStepInput(len(spans), long, inputs, entries, awaits, **copy_lists)
    for original in (step_input, graph_input):
        row = torch.full((200,), 7, dtype=torch.int64)
        encode(original, row)
        decoded = decode(row)
        row.fill_(9)
        assert type(decoded) is type(original)
        for name in type(original).__slots__:
            expected, value = getattr(original, name), getattr(decoded, name)
            assert value == expected if isinstance(expected, (list, int)) else torch.equal(value, expected)


def test_ring_holds_two_unread_steps():
    memory, eventfd = os.memfd_create("ring"), os.eventfd(0, os.EFD_SEMAPHORE)
    SharedMemoryRing.allocate(memory, 8)
    writer, reader, doorbell = SharedMemoryRing(memory, 8), SharedMemoryRing(memory, 8), Doorbell(eventfd)
    for first in range(0, 8, 2):
        for number in (first, first + 1):
            writer.next_row().fill_(number)
            doorbell.notify()
        for number in (first, first + 1):
            doorbell.wait()
            assert reader.next_row().tolist() == [number] * 8
    os.close(memory)
    os.close(eventfd)


def test_largest_step_input_fits_its_row():
    sequence = Sequence(0, [1] * 64, SamplingParams(prompt_logprobs=0), seed=0, max_output_tokens=1)
    sequence.block_table = [BlockId(i) for i in range(8)]
    step_input = build_step_input([ScheduledSpan(sequence, 0, 64, SlotId(0))] * 3, 8, long_rope_threshold=10)
    step_input = dataclasses.replace(step_input, copies=[BlockCopy(0, 1)] * 3)
    row = torch.zeros(max_elements(3, 3 * 64, 8, 0), dtype=torch.int64)
    encode(step_input, row)
    assert decode(row).copies == step_input.copies
    row = torch.zeros(max_elements(3, 3, 8, 0), dtype=torch.int64)
    graph_input = GraphStepInput(
        3, True, torch.ones((4, 3)).long(), torch.ones((3, 24)).long(), copies=step_input.copies
    )
    encode(graph_input, row)
    assert decode(row).copies == step_input.copies
