# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel shards: what each rank loads, and the logits that all ranks compute together."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import quantized_checkpoints
from support.caches import create_cache
from support.quantized_checkpoints import open_checkpoint
from support.tiny_checkpoints import CHECKPOINTS, VOCAB, make_checkpoint

from quire_engine.distributed.communicator import Communicator
from quire_engine.distributed.rendezvous import Rendezvous
from quire_engine.models.forward_batch import build_forward_batch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.sequence import BlockId, Sequence
from quire_engine.step.input import build_step_input
from quire_engine.step.plan import ScheduledSpan
from quire_engine.weights import loader
from quire_engine.weights.loader import load_weights
from quire_engine.weights.param_shard import unsharded
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard, unsupported_reason

CPU = torch.device("cpu")
TINY = Path(__file__).parents[3] / "examples/models/tiny"
SPLITS = (
    *("llama", "llama-linear", "llama-head_dim", "qwen2-untied", "qwen3_moe", "mixtral", "gpt_oss", "opt", "opt-350m"),
    *("phi3", "phi4", "gemma2", "gemma4", "gemma4_unified", "deepseek_v3", "olmo2", "gpt_neox", "glm4_moe"),
    *("hunyuan_moe", "qwen3_next", "qwen3_5_moe"),
)
"""Checkpoints that are divided among 3 and 4 ranks, too: each divides something that another one does not."""


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def _load_model(folder, communicator=None, quantization=None):
    shape = ModelConfig.load(folder)
    checkpoint = None if shape.quantization is None else open_checkpoint(folder)
    local = shape if communicator is None else communicator.shard.local_config
    model = get_model_class(shape.architecture)(
        local, ParamFactory(torch.float32, CPU, communicator, quantization, checkpoint)
    )
    load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name, checkpoint=checkpoint)
    if checkpoint is not None or quantization is not None:
        model.pack()
    return model


def _logits(model, prompt):
    """Return the logits of all tokens of a prompt, computed in two chunks."""
    sequence = Sequence(0, prompt, SamplingParams(prompt_logprobs=0), seed=0, max_output_tokens=1)
    kv = create_cache(model, 4)
    num_groups = kv.layout.num_groups
    sequence.block_table = [BlockId(i * num_groups + group) for i in (3, 0, 2, 1) for group in range(num_groups)]
    sequence.state_row = 2
    logits = []
    with torch.inference_mode():
        for start, length in ((0, 19), (19, len(prompt) - 19)):
            step_input = build_step_input(
                [ScheduledSpan(sequence, start, length, None)], 8, model.shape.long_rope_threshold, None, num_groups
            )
            batch = build_forward_batch(step_input, kv, CPU)
            logits.append(model.compute_logits(model(batch, kv), batch))
    return torch.cat(logits)


@pytest.mark.parametrize(
    ("folder", "size"),
    [(name, size) for name in CHECKPOINTS for size in ((2, 3, 4) if name in SPLITS else (2,))],
    indirect=["folder"],
)
def test_ranks_together_compute_the_logits_of_the_model(folder, size, tmp_path):
    shape = ModelConfig.load(folder)
    if unsupported_reason(shape, size):
        with pytest.raises(ConfigError, match=r"^tensor_parallel_size: \d is not supported .* use (\d or )*1$"):
            TensorParallelShard(shape, 0, size).validate()
        return
    _check_ranks(folder, size, VOCAB, tmp_path)


@pytest.mark.parametrize("name", ["awq", "ct-fp8-block", "ct-int4-zeros", "ct-int8", "gptq-desc_act"])
def test_ranks_read_their_parts_of_quantized_weights(name, tmp_path):
    _check_ranks(quantized_checkpoints.FOLDER / name, 2, quantized_checkpoints.VOCAB, tmp_path)


def test_ranks_quantize_their_parts(tmp_path):
    """No group of 32 inputs is cut, so the ranks find the scales that the whole model has."""
    _check_ranks(TINY, 2, ModelConfig.load(TINY).vocab_size, tmp_path, "int4")


def _check_ranks(folder, size, vocab_size, tmp_path, quantization=None):
    """Compare the logits of `size` ranks with those of the whole model."""
    shape = ModelConfig.load(folder)
    prompt = torch.randint(0, vocab_size, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = _logits(_load_model(folder, None, quantization), prompt)
    loaded = threading.Barrier(size)

    def run_rank(rank):
        def rendezvous():
            loaded.wait()
            return Rendezvous(str(tmp_path))

        communicator = Communicator(TensorParallelShard(shape, rank, size), rendezvous, timeout_s=20)
        model = _load_model(folder, communicator, quantization)
        communicator.connect(CPU)
        assert communicator.all_reduce_min(10 - rank) == 10 - size + 1
        return _logits(model, prompt)

    with ThreadPoolExecutor(size) as threads:
        logits = list(threads.map(run_rank, range(size)))
    assert logits[0].shape == expected.shape
    # Sums of float32 in another order, for logits around 30.
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def _split_experts(name, tensor):
    """Yield the projections of each expert if a tensor has those of all experts, as in checkpoints of Mistral 4 and
    Llama 4."""
    experts, _, projection = name.rpartition(".")
    if not experts.endswith(".experts") or tensor.dim() != 3:
        yield name, tensor
        return
    is_llama4 = ".feed_forward.experts." in name
    for expert, weights in enumerate(tensor.mT if is_llama4 else tensor):
        names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
        for part, values in zip(names, weights.chunk(len(names)), strict=True):
            yield f"{experts}.{expert}.{part}.weight", values


_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_projector"
    r"|mm_projector|visual)\."
)


def test_rank_reads_only_its_shard(folder, monkeypatch):
    """Every element of a tensor is loaded by a rank; replicated KV heads and unsharded tensors by several."""
    shape, size = ModelConfig.load(folder), 4
    if unsupported_reason(shape, size):
        size = 2
    monkeypatch.setattr(loader, "_CHUNK_BYTES", 1000)
    files = TensorFiles(folder)
    tensors = {
        name: tensor.squeeze(1)
        if name.endswith(("conv1d.weight", "conv.conv.weight"))
        else tensor.view(-1 if name.endswith("A_log") else tensor.shape or 1)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not _OTHER_PARTS.match(name)
    }
    names = {files.name_in_file(name) for name, _ in _load_model(folder, None).tensors()}
    tensors = dict(
        item
        for name, tensor in tensors.items()
        for item in ([(name, tensor)] if name in names else _split_experts(name, tensor))
    )
    load_counts = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    bytes_read = 0
    for rank in range(size):
        model = _load_model(folder, Communicator(TensorParallelShard(shape, rank, size), lambda: folder))
        for name, target in model.tensors():
            shard = unsharded(target)
            source = tensors[files.name_in_file(name)]
            columns = slice(None) if shard.columns is None else slice(shard.columns.start, shard.columns.stop)
            index = torch.tensor([row for rows in shard.rows for row in rows], dtype=torch.int64)
            expected = source[index] if source.dim() == 1 else source[..., index, :][..., columns]
            assert torch.equal(shard.tensor, expected), name
            counts = load_counts[files.name_in_file(name)]
            if counts.dim() == 1:
                counts[index] += 1
            else:
                counts[..., columns][..., index, :] += 1
            bytes_read += shard.nbytes
    assert all(
        bool((count > 0).all())
        for name, count in load_counts.items()
        if name != "lm_head.weight" or not shape.tie_word_embeddings
    )
    sharded_bytes = sum(
        t.nbytes for name, t in tensors.items() if name.endswith(("proj.weight", "_proj")) or "embed_tokens" in name
    )
    assert bytes_read < size * sum(t.nbytes for t in tensors.values()) - sharded_bytes / 2
