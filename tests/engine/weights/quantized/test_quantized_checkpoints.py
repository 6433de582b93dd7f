# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints that other programs wrote give the weights that those programs dequantize them to.

`hack/quantized_checkpoints.py` wrote the folders of `checkpoints`; `writer.txt` names the program. transformers writes
the others while the tests run.
"""

import hashlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.quantized_checkpoints import FOLDER, QUANTIZED_LLAMAS, open_checkpoint
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.weights import loader
from quire_engine.weights.loader import load_weights
from quire_engine.weights.param_shard import ParamShard
from quire_engine.weights.quantized.mxfp4 import decode_mxfp4, dequantize_mxfp4, mxfp4_values
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.quantization import QuantizationScheme

CPU = torch.device("cpu")
FOLDERS = {name: FOLDER / name for name in (*QUANTIZED_LLAMAS, "mxfp4")}
Q_PROJ, O_PROJ = (f"model.layers.0.self_attn.{name}_proj" for name in "qo")


def _load(folder, dtype=torch.float32):
    shape = ModelConfig.load(folder)
    model = get_model_class(shape.architecture)(shape, ParamFactory(dtype, CPU))
    load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name, checkpoint=open_checkpoint(folder))
    return dict(model.tensors())


def _digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.fixture
def copy(tmp_path):
    def copy_folder(name):
        return Path(shutil.copytree(FOLDERS[name], tmp_path / name))

    return copy_folder


def test_every_writer_is_named():
    assert len(QUANTIZED_LLAMAS) == 24
    assert all((folder / "writer.txt").read_text().strip() for folder in FOLDERS.values())


@pytest.mark.parametrize("name", QUANTIZED_LLAMAS)
@pytest.mark.parametrize("chunk_bytes", [None, 5000], ids=["whole", "in chunks"])
def test_weights_equal_the_writers_own(name, chunk_bytes, monkeypatch):
    if chunk_bytes is not None:
        monkeypatch.setattr(loader, "_CHUNK_BYTES", chunk_bytes)
    expected = json.loads((FOLDERS[name] / "dequantized.json").read_text())
    dtype = getattr(torch, expected["dtype"])
    loaded = _load(FOLDERS[name], dtype)
    assert {name: _digest(loaded[name]) for name in expected["sha256"]} == expected["sha256"]
    # The other tensors are those of the file.
    stored = load_file(FOLDERS[name] / "model.safetensors")
    others = loaded.keys() - expected["sha256"].keys()
    assert len(others) >= 4 and all(torch.equal(loaded[key], stored[key]) for key in others)


@pytest.mark.parametrize("name", [name for name in QUANTIZED_LLAMAS if name.startswith("ct-")])
def test_frozen_checkpoints_with_kv_scales_load_as_others(name, copy):
    folder = copy(name)
    document = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    document["quantization_config"] |= {"quantization_status": "frozen", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(document))
    scales = {f"model.layers.0.self_attn.{x}_scale": torch.tensor([0.5]) for x in "kv"}
    _rewrite(folder, lambda tensors: tensors | scales)
    expected, loaded = _load(FOLDERS[name]), _load(folder)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", QUANTIZED_LLAMAS)
def test_shards_equal_parts_of_the_weight(name, copy):
    # No bound is a multiple of what a format packs together.
    rows, columns, weight_name = (range(3, 40), range(70, 71)), range(7, 41), "model.layers.0.mlp.gate_proj.weight"
    weight, folder = _load(FOLDERS[name])[weight_name], copy(name)
    _rewrite(folder, lambda tensors: {k: t for k, t in tensors.items() if k.startswith("model.layers.0.mlp.gate_proj")})
    shard = ParamShard(torch.empty(38, 34), tuple(weight.shape), rows, columns)
    load_weights(folder, [(weight_name, shard)], checkpoint=open_checkpoint(folder))
    assert torch.equal(shard.tensor, torch.cat([weight[part.start : part.stop, 7:41] for part in rows]))


@torch.inference_mode()
@pytest.mark.parametrize("block", [[128, 128], None], ids=["blocks", "tensor"])
def test_fp8_of_transformers(block, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4, head_dim=64
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    settings = FineGrainedFP8Config(weight_block_size=block)
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    expected, tensors = {}, {}
    for name, tensor in model.state_dict().items():
        is_linear = "proj" in name
        tensors |= quantizer.convert({name: tensor}) if is_linear else {name: tensor.clone()}
        expected[name] = tensor
        if is_linear:
            pair = {"weight": tensors[name], "weight_scale_inv": tensors[f"{name}_scale_inv"]}
            expected[name] = Fp8Dequantize(quantizer.hf_quantizer).convert(pair)["weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document | {"quantization_config": settings.to_dict()}))
    loaded = _load(tmp_path)
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[key], expected[key]) for key in expected)


@given(st.integers(1, 9), st.integers(1, 80), st.sampled_from([16, 64, 100, 4096]), st.data())
def test_blocks_of_bitsandbytes_can_end_in_another_row(tmp_path_factory, rows, half_columns, block, data):
    columns, path = 2 * half_columns, tmp_path_factory.mktemp("m") / "model.safetensors"
    codes, codebook = torch.randint(0, 16, (rows * columns,), dtype=torch.uint8), torch.randn(16)
    scales = torch.rand(-(-rows * columns // block))
    state = json.dumps({"shape": [rows, columns], "blocksize": block}).encode()
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": scales,
        "weight.quant_map": codebook,
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(state), dtype=torch.uint8),
    }
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, path)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    scheme = QuantizationScheme.from_hf_config(HFConfigReader(config))
    tensor = QuantizedTensors(TensorFiles(path.parent), scheme).find("m.weight")
    expected = (codebook[codes.int()] * scales.repeat_interleave(block)[: rows * columns]).view(rows, columns)
    first_row, first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    found = tensor.read(0, range(first_row, rows), range(first, columns), torch.float32)
    assert torch.equal(found, expected[first_row:, first:])


@pytest.mark.parametrize(("block", "inner"), [((16, 32), 48), ((128, 128), 24), (None, 48), ("channel", 48)], ids=str)
def test_fp8_experts_in_one_tensor(block, inner, tmp_path):
    """As transformers 5 saves them, by the names of one expert and of all. A block of 128 contains gate and up."""
    num_experts, hidden = 3, 64
    grid = {None: (1, 1), "channel": (2 * inner, 1)}.get(block) or (-(-2 * inner // block[0]), -(-hidden // block[1]))
    codes = torch.randn(num_experts, 2 * inner, hidden).to(torch.float8_e4m3fn)
    scales = torch.rand(num_experts, *grid)
    sizes = (2 * inner // grid[0], hidden) if block in (None, "channel") else block
    weight = (
        codes.float() * scales.repeat_interleave(sizes[0], 1).repeat_interleave(sizes[1], 2)[:, : 2 * inner, :hidden]
    )
    tensors = {"m.experts.gate_up_proj": codes, "m.experts.gate_up_proj_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    is_block = isinstance(block, tuple)
    config = {"quant_method": "fp8", "weight_block_size": list(block)} if is_block else {"quant_method": "fbgemm_fp8"}
    scheme = QuantizationScheme.from_hf_config(HFConfigReader(config))
    found = QuantizedTensors(TensorFiles(tmp_path), scheme)
    rows, columns = range(5, inner), range(7, 40)
    for expert in range(num_experts):
        for i, name in enumerate(("gate_proj", "up_proj")):
            tensor = found.find(f"m.experts.{expert}.{name}.weight")
            assert tensor.shape == (inner, hidden)
            expected = weight[expert, i * inner :][rows.start : rows.stop, columns.start : columns.stop]
            torch.testing.assert_close(tensor.read(0, rows, columns, torch.float32), expected)
        whole = found.find("m.experts.gate_up_proj")
        assert whole.shape == weight.shape
        torch.testing.assert_close(whole.read(expert, range(2 * inner), range(hidden), torch.float32), weight[expert])
    assert all(map(found.is_known, tensors))
    with pytest.raises(ConfigError, match="has 3 experts"):
        found.find("m.experts.3.up_proj.weight")


def test_fp8_experts_whose_blocks_contain_gate_and_up_are_refused(tmp_path):
    codes, scales = torch.zeros(2, 48, 32, dtype=torch.float8_e4m3fn), torch.ones(2, 3, 2)
    save_file(
        {"m.experts.gate_up_proj": codes, "m.experts.gate_up_proj_scale_inv": scales}, tmp_path / "model.safetensors"
    )
    scheme = QuantizationScheme.from_hf_config(HFConfigReader({"quant_method": "fp8", "weight_block_size": [16, 16]}))
    with pytest.raises(ConfigError, match="block of 16 features contains features of gate and of up"):
        QuantizedTensors(TensorFiles(tmp_path), scheme).find("m.experts.0.up_proj.weight")


def test_mxfp4_experts():
    name, folder = "model.layers.1.mlp.experts.gate_up_proj", FOLDERS["mxfp4"]
    stored = load_file(folder / "model.safetensors")
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    # transformers' layout has the input features before the output features.
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(dequantize_mxfp4(blocks, scales, torch.float32), expected)
    assert torch.equal(dequantize_mxfp4(blocks, scales, torch.bfloat16), expected.bfloat16())
    values = mxfp4_values(torch.float32)[decode_mxfp4(blocks).long()]
    assert torch.equal(values, expected / torch.exp2(scales.float() - 127).repeat_interleave(32, -1))
    hashes = json.loads((folder / "dequantized.json").read_text())["sha256"]
    assert _digest(expected.transpose(1, 2).bfloat16()) == hashes[name]


def test_mxfp4_experts_fill_a_parameter_or_a_shard_of_it(copy):
    name, folder = "model.layers.1.mlp.experts.gate_up_proj", copy("mxfp4")
    stored = load_file(folder / "model.safetensors")
    expected = dequantize_mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"], torch.float32)
    _rewrite(folder, lambda tensors: {k: t for k, t in tensors.items() if k.startswith(f"{name}_") and "bias" not in k})
    quantization = ModelConfig.load(folder).quantization
    whole = torch.empty(4, 192, 64)
    load_weights(folder, [(name, whole)], checkpoint=QuantizedTensors(TensorFiles(folder), quantization))
    assert torch.equal(whole, expected)
    # Rows of gate and up alternate.
    part = ParamShard(torch.empty(4, 20, 20), (4, 192, 64), (range(10, 30, 2), range(11, 31, 2)), range(30, 50))
    load_weights(folder, [(name, part)], checkpoint=QuantizedTensors(TensorFiles(folder), quantization))
    assert torch.equal(part.tensor, torch.cat([expected[:, 10:30:2, 30:50], expected[:, 11:31:2, 30:50]], 1))
    _rewrite(folder, lambda tensors: tensors | {f"{name}_scales": torch.full((4, 192, 2), 255, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match="gate_up_proj_scales: contains NaN; download the checkpoint again"):
        load_weights(folder, [(name, whole)], checkpoint=QuantizedTensors(TensorFiles(folder), quantization))
    _rewrite(folder, lambda tensors: tensors | {f"{name}_scales": torch.ones(4, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match=r"gate_up_proj_scales \[4\]; mxfp4 requires \[experts, out, in / 32, 16\]"):
        load_weights(folder, [(name, whole)], checkpoint=QuantizedTensors(TensorFiles(folder), quantization))


def _rewrite(folder, change):
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def _without(*suffixes):
    return lambda tensors: {name: t for name, t in tensors.items() if not name.endswith(suffixes)}


def _replaced(name, tensor):
    return lambda tensors: tensors | {name: tensor}


ERRORS = {
    "scales": (
        "ct-fp8-channel",
        _without("q_proj.weight_scale"),
        rf"{Q_PROJ}.weight_scale is missing, .* for {Q_PROJ}",
    ),
    "zeros": ("gptq", _without("q_proj.qzeros"), rf"{Q_PROJ}.qzeros is missing, .* for {Q_PROJ}.qweight"),
    "packed zeros": ("ct-int4-zeros", _without("q_proj.weight_zero_point"), rf"{Q_PROJ}.weight_zero_point is missing"),
    "shape": ("awq", _replaced(f"{Q_PROJ}.scales", torch.ones(1, 64).half()), r"F16 of shape \(1, 64\); .*\(2, 64\)"),
    "dtype": (
        "ct-int8",
        _replaced(f"{Q_PROJ}.weight", torch.ones(64, 64).byte()),
        "U8 of shape .* implies I8 of shape",
    ),
    "groups": (
        "gptq-desc_act",
        _replaced(f"{Q_PROJ}.g_idx", torch.full((64,), 2)),
        r"q_proj.g_idx must contain .* 0 to 1",
    ),
    "not a matrix": ("ct-int8", _replaced(f"{Q_PROJ}.weight", torch.ones(64).char()), r"shape \(64,\), .* a matrix"),
    "columns": ("ct-actorder", _replaced(f"{Q_PROJ}.weight_shape", torch.tensor([64, -1])), "contains -1 columns"),
    "unexpected": ("gptq", _replaced(f"{Q_PROJ}.bias", torch.ones(64)), rf"{Q_PROJ}.bias is unexpected"),
    "tensor's scale": (
        "modelopt-nvfp4",
        _without("q_proj.weight_scale_2"),
        rf"{Q_PROJ}.weight_scale_2 is missing, .* for {Q_PROJ}.weight;",
    ),
    "shape of the tensor's scale": (
        "ct-nvfp4",
        _replaced(f"{Q_PROJ}.weight_global_scale", torch.ones(64)),
        r"global_scale is F32 of shape \(64,\); .* implies F32 of shape \(1,\)",
    ),
    "dtype of nvfp4 scales": (
        "modelopt-nvfp4",
        _replaced(f"{Q_PROJ}.weight_scale", torch.ones(64, 4)),
        r"F32 of shape .* implies F8_E4M3 of shape \(64, 4\)",
    ),
    "state": (
        "bitsandbytes-nf4",
        _replaced(f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4", torch.tensor([123], dtype=torch.uint8)),
        r"quant_state.bitsandbytes__nf4 is not a JSON document; download",
    ),
    "no state": (
        "bitsandbytes-nf4",
        _without("q_proj.weight.quant_state.bitsandbytes__nf4"),
        rf"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4 is missing, ",
    ),
    "nested scales": (
        "bitsandbytes-nf4",
        _replaced(f"{Q_PROJ}.weight.nested_absmax", torch.ones(2)),
        r"nested_absmax is F32 of shape \(2,\); .* implies F32 of shape \(1,\)",
    ),
    "number of codes": (
        "bitsandbytes-fp4",
        _replaced(f"{Q_PROJ}.weight", torch.ones(64, 1).byte()),
        r"weight is U8 of shape \(64, 1\); .* implies U8 of shape \(2048, 1\)",
    ),
    "scales of rows": (
        "bitsandbytes-int8",
        _without("q_proj.SCB"),
        rf"{Q_PROJ}.SCB is missing, .* for {Q_PROJ}.weight;",
    ),
    "order of groups": (
        "ct-actorder",
        _replaced(f"{Q_PROJ}.weight_g_idx", torch.full((64,), 2, dtype=torch.int32)),
        "weight_g_idx must contain only the numbers of groups, which are 0 to 1, got 2; download",
    ),
    "other format": ("awq", _replaced(f"{Q_PROJ}.weight_packed", torch.ones(1)), "is unexpected"),
}


@pytest.mark.parametrize(("name", "change", "error"), ERRORS.values(), ids=ERRORS)
def test_rejects_wrong_tensors_by_name(name, change, error, copy):
    folder = copy(name)
    _rewrite(folder, change)
    with pytest.raises(ConfigError, match=error):
        _load(folder)


@pytest.mark.parametrize("name", QUANTIZED_LLAMAS)
def test_scales_that_are_not_finite_are_refused(name, copy):
    folder = copy(name)
    tensors = load_file(folder / "model.safetensors")
    numbers = (".weight", ".bias", ".input_scale", ".input_global_scale")
    floats = {key.rpartition("_proj.")[2]: key for key, tensor in tensors.items() if tensor.is_floating_point()}
    scales = [key for key in floats.values() if "_proj." in key and not key.endswith(numbers)]
    for key, value in [(key, value) for key in scales for value in (math.nan, math.inf)]:
        changed = tensors[key].float()
        changed.flatten()[-1] = value  # float8_e4m3fn has no infinity
        save_file(tensors | {key: changed.to(tensors[key].dtype)}, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=r"_proj.*: its scales contain NaN or infinity; download"):
            _load(folder)
    assert scales


CONTRADICTIONS = {
    "ignored": ("ct-int8", {"ignore": [O_PROJ]}, rf"quantization_config: ignore: contains {O_PROJ}, but .* remove"),
    "ignored part": (
        "awq",
        {"modules_to_not_convert": ["self_attn"]},
        r"modules_to_not_convert: contains .*q_proj, but",
    ),
    "other method": ("awq", {"quant_method": "fp8"}, rf"describes {Q_PROJ} as fp8, but .* {Q_PROJ}.qweight; correct"),
    "no target": (
        "ct-int8",
        {"config_groups": {"g": {"targets": ["x"], "weights": {}}}},
        "q_proj is not a target of any group, but",
    ),
}


@pytest.mark.parametrize(("name", "change", "error"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_rejects_a_config_that_contradicts_the_tensors(name, change, error, copy):
    folder = copy(name)
    _change_config(folder, lambda config: config["quantization_config"].update(change))
    with pytest.raises(ConfigError, match=error):
        _load(folder)


def _change_config(folder, change):
    document = json.loads((folder / "config.json").read_text())
    change(document)
    (folder / "config.json").write_text(json.dumps(document))


def test_reads_the_file_of_modelopt(copy):
    folder = copy("modelopt-nvfp4")
    _change_config(folder, lambda config: config.pop("quantization_config"))
    expected, loaded = _load(FOLDERS["modelopt-nvfp4"]), _load(folder)
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_rejects_quantized_tensors_without_a_config(copy):
    for name in ("awq", "ct-fp8-tensor", "bitsandbytes-nf4", "bitsandbytes-int8"):
        folder = copy(name)
        _change_config(folder, lambda config: config.pop("quantization_config"))
        with pytest.raises(ConfigError, match=r"checkpoint is quantized, but config\.json has no quantization_config"):
            _load(folder)


def test_rejects_a_quantized_output_projection_that_is_tied(copy):
    folder = copy("gptq_v2")
    _change_config(folder, lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(
        ConfigError, match=r"lm_head.weight is quantized, but .* ties .*; set tie_word_embeddings to false"
    ):
        _load(folder)
