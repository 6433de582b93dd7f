# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files fill the right parameters, and defects are rejected with the reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import make_checkpoint

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.weights import loader
from quire_engine.weights.loader import load_weights
from quire_engine.weights.param_shard import unsharded
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig

CPU = torch.device("cpu")
SINGLE = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


OPTIONS = {"stream": False}


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path, "llama")


@pytest.fixture(autouse=True, params=[False, True], ids=["safetensors", "streamer"])
def _reader(request, monkeypatch):
    monkeypatch.setitem(OPTIONS, "stream", request.param)


def _load(folder, dtype=torch.float32, **options):
    shape = ModelConfig.load(folder)
    model = get_model_class(shape.architecture)(shape, ParamFactory(dtype, CPU))
    load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name, **OPTIONS, **options)
    return dict(model.tensors())


def _rewrite(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def test_every_tensor_fills_its_parameter(folder):
    loaded, expected = _load(folder), load_file(folder / SINGLE)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_shards_equal_a_single_file(folder, tmp_path):
    expected = _load(folder)
    sharded = make_checkpoint(tmp_path / "sharded", "llama", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    loaded = _load(sharded)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_large_tensors_are_read_in_chunks(folder, monkeypatch):
    expected = _load(folder)
    monkeypatch.setattr(loader, "_CHUNK_BYTES", 1000)
    loaded = _load(folder)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conversion_rounds_to_nearest(folder, dtype):
    loaded, expected = _load(folder, dtype), load_file(folder / SINGLE)
    assert all(torch.equal(loaded[name], expected[name].to(dtype)) for name in expected)


def test_tied_checkpoint_can_contain_the_output_projection(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen2")
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    assert "lm_head.weight" not in _load(folder)


def test_rejects_a_tied_checkpoint_with_another_output_projection(tmp_path, monkeypatch):
    # transformers would use the output projection in spite of config.json.
    folder = make_checkpoint(tmp_path, "qwen2")
    monkeypatch.setattr(loader, "_CHUNK_BYTES", 1000)
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    embedding[-1, -1] += 1
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from model.embed_tokens.*tie_word_embeddings"):
        _load(folder)


def test_loads_checkpoints_saved_without_the_outer_module(tmp_path):
    folder = make_checkpoint(tmp_path, "opt")
    expected = _load(folder)
    tensors = load_file(folder / SINGLE)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / SINGLE)
    loaded = _load(folder)
    assert "decoder.layers.1.fc1.weight" in load_file(folder / SINGLE)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_loads_a_language_model_under_either_name(tmp_path):
    folder = make_checkpoint(tmp_path, "mistral3")
    expected = _load(folder)
    tensors = load_file(folder / SINGLE)
    assert "language_model.lm_head.weight" in tensors
    renamed = {name.replace("language_model.model.", "model.language_model."): t for name, t in tensors.items()}
    save_file({name.removeprefix("language_model."): t for name, t in renamed.items()}, folder / SINGLE)
    loaded = _load(folder)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_derived_tensors_of_old_checkpoints_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert name not in _load(folder)


def test_progress_bar_is_optional(folder, capsys):
    _load(folder)
    assert capsys.readouterr().err == ""
    _load(folder, progress=True)
    assert "weights: 100%" in capsys.readouterr().err


CHANGES = {
    "missing": (lambda t: t.pop(Q_PROJ), rf"{Q_PROJ} is missing; config.json does not match"),
    "unexpected": (
        lambda t: t.update({f"model.layers.{i}.self_attn.q_norm.weight": torch.zeros(1) for i in range(5)}),
        r"q_norm.weight, .*q_norm.weight, .*q_norm.weight and 2 more are unexpected",
    ),
    "another shape": (
        lambda t: t.update({Q_PROJ: torch.zeros(64, 63)}),
        rf"{Q_PROJ} has shape \(64, 63\); config.json implies \(64, 64\)",
    ),
    "quantized": (
        lambda t: t.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}),
        rf"{Q_PROJ} has dtype I8, but this dtype is supported only for linear layers that quantization_config",
    ),
}


@pytest.mark.parametrize(("change", "error"), CHANGES.values(), ids=CHANGES.keys())
def test_rejects_wrong_tensors_by_name(folder, change, error):
    _rewrite(folder, change)
    with pytest.raises(ConfigError, match=error):
        _load(folder)


def test_rejects_pickled_weights(folder):
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"'pytorch_model.bin' can run code .* convert .* --into .*-safetensors"):
        _load(folder)


def test_rejects_a_folder_without_weights(folder):
    (folder / SINGLE).unlink()
    with pytest.raises(ConfigError, match=r"found neither model\.safetensors nor model\.safetensors\.index\.json"):
        _load(folder)


@pytest.mark.parametrize("cut", [0, 7, 100, -100])
def test_rejects_a_truncated_file(folder, cut):
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:cut])
    with pytest.raises(ConfigError, match="not a safetensors file"):
        _load(folder)


INDICES = {
    "not JSON": ("{", "not an index of shards"),
    "no map": ("{}", "not an index of shards: KeyError"),
    "a list": ("[]", "not an index of shards: TypeError"),
    "a map that is a list": ('{"weight_map": []}', "not an index of shards: AttributeError"),
    "a file outside": (json.dumps({"weight_map": {"a": "../x.safetensors"}}), r"'../x.safetensors' is not the name of"),
    "a pickle": (json.dumps({"weight_map": {"a": "model-1.bin"}}), "'model-1.bin' is not the name of a safetensors"),
    "a missing shard": (json.dumps({"weight_map": {"a": "b.safetensors"}}), "'b.safetensors' is missing"),
}


@pytest.mark.parametrize(("content", "error"), INDICES.values(), ids=INDICES.keys())
def test_rejects_a_broken_index(folder, content, error):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=error):
        _load(folder)


def test_rejects_an_index_that_does_not_match_its_shards(folder):
    names = dict.fromkeys(load_file(folder / SINGLE), SINGLE)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    _rewrite(folder, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ConfigError, match=f"{Q_PROJ} is in the index but not in the file"):
        _load(folder)


def test_experts_in_one_tensor_equal_experts_in_single_tensors(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_5_moe")
    expected = _load(folder)

    def stack(tensors):
        num_experts = ModelConfig.load(folder).moe.num_experts
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(num_experts)])
                for name in ("gate", "up", "down")
            )
            tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
        tensors["mtp.layers.0.mlp.gate.weight"] = torch.zeros(1)

    _rewrite(folder, stack)
    loaded = _load(folder)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(unsharded(loaded[name]).tensor, unsharded(expected[name]).tensor) for name in expected)
