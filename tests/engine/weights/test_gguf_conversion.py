# SPDX-License-Identifier: Apache-2.0
"""GGUF files become checkpoints with exactly the weights that ggml's package `gguf` and transformers read."""

import contextlib
import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.gguf_files import (
    K_TYPES,
    MIXTURES,
    OTHER_TYPES,
    random_blocks,
    tokenizer_metadata,
    write_gguf,
    write_quantized_llama,
    write_quantized_mixture,
)
from support.quantized_checkpoints import load_model, logits_of, open_checkpoint, write_dequantized
from support.requirements_of_machine import requires_native_kernels
from support.tiny_checkpoints import BASE, GEMMA2, GEMMA3, make_checkpoint, write_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma3TextConfig, LlamaConfig, MixtralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire_engine.__main__ import main
from quire_engine.tokenization.gguf_tokenizer import write_tokenizer
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.gguf_conversion import convert_gguf
from quire_engine.weights.hub import resolve_model
from quire_engine.weights.quantized.gguf import GGUF_TENSORS
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.weights.tensor_files import TensorFiles
from quire_kernels import QuantizedWeight
from quire_spec.errors import ConfigError
from quire_spec.model.gguf.config import architecture_of, checkpoint_name, config_from_header
from quire_spec.model.gguf.header import GGUFHeader, read_header
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.quantization import QuantizationScheme

SCALE = {"query_pre_attn_scalar": 24}
ROPES = {"full_attention": 1e6, "sliding_attention": 1e4}
GEMMA3_ROPE = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ROPES.items()}
CONFIGS = {
    "gemma2": Gemma2Config(**BASE | GEMMA2 | SCALE),
    "mixtral": MixtralConfig(**BASE | {"num_local_experts": 4, "sliding_window": None}),
    "gemma3": Gemma3TextConfig(
        **BASE | GEMMA3 | SCALE | {"rope_parameters": GEMMA3_ROPE, "layer_types": None, "num_hidden_layers": 7}
    ),
}
CAPS = {"gemma2.attn_logit_softcapping": 4.0, "gemma2.final_logit_softcapping": 60.0}
FAMILIES = [
    "llama",
    "llama-head_dim",
    "llama-biases",
    "qwen2",
    "qwen2-untied",
    "qwen3",
    "qwen3_moe",
    "gemma",
    *CONFIGS,
]
TYPES = {kind.TYPE.name: gguf.GGMLQuantizationType[kind.TYPE.name] for kind in GGUF_TENSORS.values()}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_original(name, tmp_path):
    folder = tmp_path / "original"
    original = write_checkpoint(folder, CONFIGS[name], 0) if name in CONFIGS else make_checkpoint(folder, name)
    metadata = tokenizer_metadata() | (CAPS if name == "gemma2" else {})
    convert_gguf(write_gguf(original, tmp_path / "m.gguf", metadata=metadata), tmp_path / "converted")
    found, expected = (logits_of(load_model(path, torch.float32)) for path in (tmp_path / "converted", original))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kinds", [K_TYPES, OTHER_TYPES], ids=["K types", "other types"])
def test_logits_equal_those_of_transformers(kinds, tmp_path):
    file = write_quantized_llama(tmp_path, kinds)
    convert_gguf(file, tmp_path / "converted")
    found = logits_of(load_model(tmp_path / "converted", torch.float32))
    oracle = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokens = torch.randint(0, 128, (1, len(found)), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = oracle(tokens).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.std().item() + 2e-5)
    assert torch.equal(found.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("kinds", [K_TYPES, OTHER_TYPES], ids=["K types", "other types"])
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_mixtures_equal_those_of_transformers(name, kinds, tmp_path):
    """Every block of a quantized weight is random, in experts, too."""
    convert_gguf(write_quantized_mixture(tmp_path, name, kinds), tmp_path / "converted")
    found = logits_of(load_model(tmp_path / "converted", torch.float32))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "dequantized", dtype=torch.float32).eval()
    tokens = torch.randint(0, 128, (1, len(found)), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = oracle(tokens).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * expected.std().item() + 2e-5)
    assert torch.equal(found.argmax(1), expected.argmax(1))


@requires_native_kernels
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_stay_quantized(name, tmp_path):
    convert_gguf(write_quantized_mixture(tmp_path, name, K_TYPES), tmp_path / "converted")
    expected = logits_of(load_model(tmp_path / "converted", torch.float32))
    model = load_model(tmp_path / "converted", torch.bfloat16)
    experts = model.layers[0].mlp.experts
    assert isinstance(experts.gate_up, QuantizedWeight) and isinstance(experts.down, QuantizedWeight)
    rounded = logits_of(load_model(write_dequantized(tmp_path / "converted", tmp_path / "dense"), torch.bfloat16))
    # Not the deviation: rounding changes which experts a few tokens choose.
    errors = [(logits - expected).abs().median() for logits in (logits_of(model), rounded)]
    assert errors[0] < 1.1 * errors[1]


@requires_native_kernels
@pytest.mark.parametrize("kinds", [K_TYPES, OTHER_TYPES], ids=["K types", "other types"])
def test_linear_layers_stay_quantized(kinds, tmp_path):
    convert_gguf(write_quantized_llama(tmp_path, kinds), tmp_path / "converted")
    expected = logits_of(load_model(tmp_path / "converted", torch.float32))
    model = load_model(tmp_path / "converted", torch.bfloat16)
    dense = [linear for _, linear in model.linears() if not isinstance(linear.weight, QuantizedWeight)]
    dequantized = {path for linear in dense for path in linear.slices}
    assert dequantized == (set() if kinds is K_TYPES else {"q_proj", "k_proj", "v_proj"})
    rounded = logits_of(load_model(write_dequantized(tmp_path / "converted", tmp_path / "dense"), torch.bfloat16))
    assert (logits_of(model) - expected).std() < 1.1 * (rounded - expected).std()
    header, embedding = read_header(tmp_path / "gguf/m.gguf"), model.embed_tokens.nbytes
    percent = model.shape.quantization.memory_percent
    assert kinds is OTHER_TYPES or model.num_bytes <= header.num_bytes * percent / 100 + embedding


@pytest.mark.parametrize("name", TYPES)
def test_each_type_is_dequantized_as_by_gguf(name, tmp_path):
    blocks = random_blocks(TYPES[name], (6, 1024), np.random.default_rng(0))
    save_file({f"m.weight_{name.lower()}": torch.from_numpy(blocks)}, tmp_path / "model.safetensors")
    scheme = QuantizationScheme.from_hf_config(HFConfigReader({"quant_method": "gguf", "types": [name]}))
    tensor = QuantizedTensors(TensorFiles(tmp_path), scheme).find("m.weight")
    expected = torch.from_numpy(gguf.dequantize(blocks, TYPES[name]))
    assert torch.equal(tensor.read(0, range(6), range(1024), torch.float32), expected)
    assert torch.equal(tensor.read(0, range(2, 5), range(37, 700), torch.float32), expected[2:5, 37:700])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_the_rope_mean_the_scaling_of_llama_3(factor, tmp_path):
    header = read_header(write_quantized_llama(tmp_path, OTHER_TYPES))
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=64, rope_parameters=scaling | {"rope_theta": 10000.0})
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    factors = (10000.0 ** -(torch.arange(0, 64, 2) / 64) / scaled).tolist()
    assert config_from_header(header, factors)["rope_scaling"] == scaling
    with pytest.raises(ConfigError, match=r"rope_freqs.weight is not the scaling of a known Llama 3 model; use the"):
        config_from_header(header, [*factors[:-1], 2.0])


def test_byte_level_tokenizer_equals_that_of_transformers(tmp_path):
    file = write_quantized_llama(tmp_path, OTHER_TYPES)
    convert_gguf(file, tmp_path / "converted")
    tokenizer, text = Tokenizer(tmp_path / "converted"), "then 12 (the) </s>"
    assert tokenizer.encode(text)[0] == 0
    oracle = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert tokenizer.encode(text) == oracle(text).input_ids
    assert oracle.convert_ids_to_tokens(tokenizer.encode("the"))[1:] == ["th", "e"]


def test_sentencepiece_tokenizer_equals_that_of_transformers(tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abct", "\u2581a", "ab", "<x>"]
    types = [2, 3, 3, *[6] * 256, *[1] * 7, 4]
    scores = [float(-i) for i in range(len(pieces))]
    values = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": types, "bos_token_id": 1}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (values | {"eos_token_id": 2}).items()}
    sizes = {"vocab_size": len(pieces)}
    checkpoint = write_checkpoint(tmp_path / "original", LlamaConfig(**BASE | sizes), 0)
    (tmp_path / "gguf").mkdir()
    convert_gguf(write_gguf(checkpoint, tmp_path / "gguf/m.gguf", None, metadata), tmp_path / "converted")
    tokenizer = Tokenizer(tmp_path / "converted")
    oracle = AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="m.gguf")
    for text in ("ab  cat", "a", "\u00e9b<x>"):
        assert tokenizer.encode(text) == oracle(text).input_ids
    assert tokenizer.encode("a")[0] == 1


def test_files_of_a_tokenizer_beside_the_file_are_used(tmp_path):
    file = write_quantized_llama(tmp_path, OTHER_TYPES)
    (file.parent / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    convert_gguf(file, tmp_path / "converted")
    assert json.loads((tmp_path / "converted/tokenizer_config.json").read_text()) == {"model_max_length": 7}
    assert not (tmp_path / "converted/tokenizer.json").exists()


def test_command_converts_and_the_engine_names_it(tmp_path, capsys):
    file = write_quantized_llama(tmp_path, OTHER_TYPES)
    with pytest.raises(
        ConfigError, match=r"is a GGUF file; convert it with: python -m quire_engine convert .*m.gguf --into"
    ):
        resolve_model(str(file), None, False)
    assert main(["convert", str(file), "--into", str(tmp_path / "converted")]) == 0
    assert "converted tensors=21" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "converted").find("model.layers.0.mlp.up_proj.weight").shape == (512, 256)
    assert main(["convert", str(file), "--into", str(tmp_path / "converted")]) == 1
    assert "already exists; give a new folder" in capsys.readouterr().err


def _embedding_info(kind):
    return b"token_embd.weight" + struct.pack("<IQQI", 2, 256, 128, kind)


def _header(changes: dict[str, object], file: Path) -> GGUFHeader:
    header = read_header(file)
    return GGUFHeader({**header.metadata, **changes}, header.tensors)


ERRORS = {
    "architecture": (
        {"general.architecture": "falcon"},
        "general.architecture 'falcon' is not supported; GGUF files of llama, ",
    ),
    "experts": (
        {"llama.expert_count": 8},
        "blk.0.ffn_down_exps.weight is missing or does not contain 8 experts; GGUF is supported only with",
    ),
    "no experts": (
        {"general.architecture": "qwen3moe"},
        "qwen3moe.expert_count is 0, which is not supported in GGUF; use the model's safetensors",
    ),
    "heads": ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count must be one integer, got"),
    "missing": ({"llama.context_length": None}, "llama.context_length is missing"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported in GGUF"),
}


@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS)
def test_rejects_other_models(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        config_from_header(_header(changes, write_quantized_llama(tmp_path, OTHER_TYPES)))


@pytest.mark.parametrize(
    "change", [{"expert_gating_func": 2}, {"expert_weights_scale": 2.5}, {"expert_group_count": 2}], ids=str
)
def test_rejects_other_routers(change, tmp_path):
    header = _header({f"qwen3moe.{key}": value for key, value in change.items()}, _mixture(tmp_path))
    (key,) = change
    with pytest.raises(ConfigError, match=f"{key} is not supported with this architecture in GGUF; use"):
        config_from_header(header)


def test_rejects_experts_that_are_not_in_one_tensor(tmp_path):
    """Mixtral files of the year 2023, and a dense layer among others."""
    header = read_header(_mixture(tmp_path))
    with pytest.raises(ConfigError, match=r"blk.1.ffn_down_exps.weight is missing or does not contain 4 experts"):
        config_from_header(
            GGUFHeader(header.metadata, {k: v for k, v in header.tensors.items() if k != "blk.1.ffn_down_exps.weight"})
        )
    with pytest.raises(ConfigError, match=r"blk.0.ffn_down.3.weight is not a tensor of Qwen3MoeForCausalLM; use"):
        checkpoint_name("blk.0.ffn_down.3.weight", architecture_of(header))


def _mixture(folder: Path) -> Path:
    return write_quantized_mixture(folder, "qwen3moe", OTHER_TYPES)


def test_rejects_tokenizers_that_cannot_be_built(tmp_path):
    for key, value, message in (
        ("pre", "other", "tokenizer.ggml.pre 'other' is not one of llama-bpe, .*; put the model's tokenizer.json"),
        ("model", "t5", "tokenizer.ggml.model 't5' is not supported; put"),
        ("merges", [1], "tokenizer.ggml.merges is missing or wrong; put"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_tokenizer(tokenizer_metadata() | {f"tokenizer.ggml.{key}": value}, tmp_path)


DAMAGES = {
    "not gguf": (lambda data: b"PK\3\4" + data[4:], "does not begin like a GGUF file"),
    "version": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "has version 1 of GGUF"),
    "truncated header": (lambda data: data[:100], r"not a complete GGUF file \(the header is truncated\); download"),
    "truncated data": (lambda data: data[:-100], "ends after the end of the file; download it again"),
    "long count": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "not a complete GGUF file"),
    "type": (
        lambda data: data.replace(_embedding_info(1), _embedding_info(10)),
        "token_embd.weight has type Q2_K, but only F32, .* are supported; use a file such as Q4_K_M",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGES.values(), ids=DAMAGES)
def test_rejects_damaged_files(change, message, tmp_path):
    file = write_quantized_llama(tmp_path, OTHER_TYPES)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        convert_gguf(file, tmp_path / "converted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gguf", "original"]


@given(st.integers(0, 4000), st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_one_error(damaged_header, position, data):
    """Any bytes at any place: an error of one line, or another model."""
    file, content = damaged_header
    file.write_bytes(content[:position] + data + content[position + len(data) :])
    with contextlib.suppress(ConfigError):
        config_from_header(read_header(file))


@pytest.fixture(scope="module")
def damaged_header(tmp_path_factory):
    file = write_quantized_llama(tmp_path_factory.mktemp("m"), OTHER_TYPES)
    return file, file.read_bytes()
