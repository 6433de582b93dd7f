# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints stay quantized where there are kernels, and give the logits of the dequantized weights."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_checkpoints import (
    FOLDER,
    QUANTIZED_LLAMAS,
    load_model,
    logits_of,
    open_checkpoint,
    write_dequantized,
)
from support.requirements_of_machine import requires_native_kernels
from support.tiny_checkpoints import make_checkpoint
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from quire_engine.distributed.communicator import Communicator
from quire_engine.weights.tensor_files import TensorFiles
from quire_kernels import QuantizedWeight, linear, quantized_linear
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard

NOT_PACKED = {"ct-fp8-block": "blocks of 48", "ct-int8-weights": "8 bits per group"}
"""Without a kernel."""
QUANTIZED_HEADS = {"ct-int4-zeros", "gptq-zeros", "gptq_v2"}
ROUNDED_CODEBOOKS = ("bitsandbytes-fp4", "bitsandbytes-nf4")
"""The kernels round the numbers that codes stand for to bfloat16, before they multiply them by a scale."""
ACT_ORDER = ("ct-actorder", "gptq-desc_act")
TENSOR_PARALLEL = ("awq", "bitsandbytes-nf4", "ct-fp8-channel", "ct-int8", "modelopt-nvfp4", *ACT_ORDER)
ATTENTION = {f"{name}_proj" for name in "qkvo"}
PROJECTIONS = ATTENTION | {"gate_proj", "up_proj", "down_proj"}


@requires_native_kernels
@pytest.mark.parametrize("name", QUANTIZED_LLAMAS)
def test_logits_equal_those_of_the_dequantized_weights(name, tmp_path):
    dequantized = write_dequantized(FOLDER / name, tmp_path)
    expected, rounded = (
        logits_of(load_model(dequantized, torch.float32)),
        logits_of(load_model(dequantized, torch.bfloat16)),
    )
    model = load_model(FOLDER / name, torch.bfloat16)
    found, scale = logits_of(model), expected.std()
    assert torch.equal(logits_of(load_model(FOLDER / name, torch.float32)), expected)
    # bfloat16 alone causes 0.02 in this model; quantized inputs 0.03.
    assert (found - expected).std() < (1.1 * (rounded - expected).std() if name != "ct-int8" else 0.04 * scale)
    linears = [linear for _, linear in model.linears()]
    is_packed = {path for linear in linears for path in linear.slices if isinstance(linear.weight, QuantizedWeight)}
    assert is_packed == (
        set() if name in NOT_PACKED else PROJECTIONS - ATTENTION if name == "ct-int4-group" else PROJECTIONS
    )
    assert isinstance(model.lm_head.weight, QuantizedWeight) == (name in QUANTIZED_HEADS)
    assert all((linear.input_order is not None) == (name in ACT_ORDER) for linear in linears)
    assert model.num_bytes < load_model(dequantized, torch.bfloat16).num_bytes or name in NOT_PACKED
    if name not in NOT_PACKED:  # a plan counts at least the bytes in memory
        assert model.num_bytes <= TensorFiles(FOLDER / name).num_bytes * model.shape.quantization.memory_percent / 100


@torch.inference_mode()
def _effective_weight(layer):
    """Return the weight that a packed linear layer multiplies with, as float32 [out_features, in_features]."""
    x = torch.eye(layer.in_features, dtype=torch.bfloat16)
    return linear(x if layer.input_order is None else x[:, layer.input_order], layer.weight, None).t().float()


@requires_native_kernels
@pytest.mark.parametrize(
    ("name", "size"),
    [(name, 1) for name in QUANTIZED_LLAMAS] + [(name, 2) for name in TENSOR_PARALLEL],
)
def test_packed_weights_equal_the_dequantized_weights(name, size, tmp_path):
    for rank in range(size):
        communicator = (
            None
            if size == 1
            else Communicator(TensorParallelShard(ModelConfig.load(FOLDER / name), rank, size), lambda: tmp_path)
        )
        packed = load_model(FOLDER / name, torch.bfloat16, communicator)
        dense = load_model(write_dequantized(FOLDER / name, tmp_path / str(rank)), torch.bfloat16, communicator)
        for (_, layer), (_, expected) in zip(packed.linears(), dense.linears(), strict=True):
            found, wanted = _effective_weight(layer), _effective_weight(expected)
            if isinstance(layer.weight, QuantizedWeight) and layer.weight.scheme == "w8a8":
                assert (found - wanted).abs().max() <= 2**-8 * wanted.abs().max()
            elif name in ROUNDED_CODEBOOKS:
                torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
            else:
                assert torch.equal(found, wanted), (name, rank, layer.slices)


@requires_native_kernels
@torch.inference_mode()
def test_blocks_of_128_stay_quantized(tmp_path):
    """In the layout of DeepSeek, as transformers writes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4, head_dim=64
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    _quantize_fp8(tmp_path, [128, 128], {})
    packed, dense = (
        load_model(tmp_path, torch.bfloat16),
        load_model(write_dequantized(tmp_path, tmp_path / "d"), torch.bfloat16),
    )
    for (_, layer), (_, expected) in zip(packed.linears(), dense.linears(), strict=True):
        assert isinstance(layer.weight, QuantizedWeight)
        assert torch.equal(_effective_weight(layer), _effective_weight(expected))


@pytest.mark.parametrize("name", ["qwen3_moe-mixed", "mistral3-ministral3", "mistral3-mistral4"])
def test_experts_and_a_language_model_with_another_prefix(name, tmp_path):
    """FP8 per tensor with static scales of activations, as Ministral 3 is published; experts are dequantized."""
    folder = make_checkpoint(tmp_path, name)
    original = logits_of(load_model(folder, torch.float32))
    ignored = ["vision_tower", "multi_modal_projector", "lm_head"]
    _quantize_fp8(folder, None, {"activation_scheme": "static", "modules_to_not_convert": ignored})
    found = logits_of(load_model(folder, torch.float32))
    assert torch.equal(found, logits_of(load_model(write_dequantized(folder, tmp_path / "dequantized"), torch.float32)))
    assert 0 < (found - original).std() < 0.5 * original.std()


def test_blocks_of_latent_attention(tmp_path):
    """The projection of keys and values is quantized, too, as in DeepSeek V3. The engine reads parts of it."""
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    original = logits_of(load_model(folder, torch.float32))
    _quantize_fp8(folder, [8, 8], {})
    assert open_checkpoint(folder).find_linear("model.layers.0.self_attn.kv_b_proj").scheme.block == (8, 8)
    dequantized = write_dequantized(folder, tmp_path / "dequantized")
    found = logits_of(load_model(folder, torch.float32))
    assert torch.equal(found, logits_of(load_model(dequantized, torch.float32)))
    assert 0 < (found - original).std() < 0.5 * original.std()
    for rank in range(2):
        shard = TensorParallelShard(ModelConfig.load(folder), rank, 2)
        models = [
            load_model(path, torch.float32, Communicator(shard, lambda: tmp_path)) for path in (folder, dequantized)
        ]
        projections = [model.layers[0].self_attn.kv_b_proj.weight for model in models]
        assert torch.equal(*projections) and len(projections[0]) == 2 * (16 + 24)


def _quantize_fp8(folder, block, config):
    """Quantize the projections of a checkpoint with transformers."""
    settings = FineGrainedFP8Config(weight_block_size=block)
    quantizer, tensors = Fp8Quantize(SimpleNamespace(quantization_config=settings)), {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_quantized = name.endswith("_proj.weight") and "vision" not in name
        tensors |= quantizer.convert({name: tensor}) if is_quantized else {name: tensor}
        if is_quantized and config:
            tensors[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.02)
    save_file(tensors, folder / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = settings.to_dict() | config
    (folder / "config.json").write_text(json.dumps(document))


def test_parts_that_are_computed_together_must_be_quantized_alike(tmp_path):
    folder = Path(shutil.copytree(FOLDER / "ct-int8", tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale").float()
    save_file(tensors, folder / "model.safetensors")
    error = r"config: parts of model.layers.0.self_attn.\* .* \(q_proj \(int8, channel\), k_proj \(not quantized\)"
    with pytest.raises(ConfigError, match=error):
        load_model(folder, torch.float32)


def test_the_planner_expects_weights_to_stay_quantized_where_there_are_kernels():
    has_gpu_kernel = quantized_linear.implementations("cuda") != ("reference",)
    assert (("cpu", "cuda") if has_gpu_kernel else ("cpu",)) == capabilities.QUANTIZED_KERNEL_DEVICES
    for name in QUANTIZED_LLAMAS:
        scheme = ModelConfig.load(FOLDER / name).quantization
        assert scheme.has_kernels(1) == (name not in NOT_PACKED)
        assert scheme.has_kernels(2) == (name not in {*NOT_PACKED, *ACT_ORDER})
