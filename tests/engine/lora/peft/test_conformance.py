# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoraConfig, field by field: with the field set, logits equal those of an unmerged `PeftModel`, or the adapter
is rejected with the name of the field. A test compares the table in docs/adapters.md with this one."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.near_ties import assert_top_tokens
from support.tiny_checkpoints import load_adapted_oracle, make_adapter, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.lora.peft.adapter_tensors import WEIGHTS_FILE
from quire_engine.lora.peft.config import CONFIG_FILE
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import SequenceRequest

DOCUMENT = Path(__file__).resolve().parents[4] / "docs/adapters.md"
PROMPT = [(7 * i + 3) % 320 for i in range(24)]


class Row(NamedTuple):
    """A field with a value that differs from its default."""

    field: str
    verdict: str
    config: dict[str, Any]
    """Arguments with which PEFT creates the adapter."""
    written: Mapping[str, Any] = MappingProxyType({})
    """Written to adapter_config.json afterwards, if PEFT cannot create it here, for lack of a library or a model."""


def _honoured(field: str, **config: Any) -> Row:
    return Row(field, "honoured", config)


def _refused(field: str, **config: Any) -> Row:
    return Row(field, "refused", config)


def _ignored(field: str, value: Any) -> Row:
    return Row(field, "no effect", {}, {field: value})


# EVA writes one key for each module.
EVERY_MODULE = {
    f"model.layers.{layer}.{linear}": rank
    for layer in range(2)
    for linear, rank in (("self_attn.q_proj", 3), ("self_attn.o_proj", 16), ("mlp.up_proj", 5), ("mlp.down_proj", 9))
}

ROWS = [
    _honoured("r", r=3),
    _honoured("lora_alpha", lora_alpha=5),
    _honoured("target_modules", target_modules=["q_proj", "down_proj"]),
    _honoured("target_modules", target_modules=r".*\.1\.mlp\.(up|down)_proj"),
    _honoured("target_modules", target_modules="all-linear"),
    _honoured("target_modules", target_modules=["embed_tokens", "k_proj"]),
    _honoured("target_modules", target_modules=["lm_head", "k_proj"]),
    _honoured("exclude_modules", exclude_modules=["gate_proj"]),
    _honoured("exclude_modules", exclude_modules=r".*\.0\..*"),
    _honoured("use_rslora", use_rslora=True, lora_alpha=3),
    _honoured("rank_pattern", rank_pattern={"q_proj": 4, r"model.layers.1.mlp.\w+_proj": 16}),
    _honoured("rank_pattern", rank_pattern={r".*\.(?:0|1)\..*\.(?:q|v)_proj": 4, ".*layers.*self_attn.*k.*": 2}),
    _honoured("rank_pattern", rank_pattern=EVERY_MODULE),
    _honoured("alpha_pattern", alpha_pattern={r"(?:model\.)?layers\.[0-9]+\.mlp\.(?:up|down)_proj": 3}),
    _honoured("alpha_pattern", alpha_pattern={r"(k|v)_proj": 1, "^model.layers.0.self_attn.o_proj": 64}),
    _honoured("layers_to_transform", target_modules=["o_proj"], layers_to_transform=[1]),
    _honoured("layers_pattern", target_modules=["o_proj"], layers_to_transform=[0], layers_pattern="layers"),
    _honoured("lora_dropout", lora_dropout=0.5),
    _honoured("bias", bias="none"),
    _honoured("bias", bias="all"),
    _honoured("bias", bias="lora_only"),
    _honoured("r", r=64, rank_pattern={".*_proj": 8}),
    _honoured("init_lora_weights", init_lora_weights=False),
    _honoured("init_lora_weights", init_lora_weights="gaussian"),
    _honoured("init_lora_weights", init_lora_weights="orthogonal"),
    Row("init_lora_weights", "honoured", {}, {"init_lora_weights": "lora_ga"}),
    _honoured("task_type", task_type=None),
    _honoured("inference_mode", inference_mode=True),
    _honoured("revision", revision="main"),
    _honoured("trainable_token_indices", trainable_token_indices=PROMPT[3:9]),
    _honoured("trainable_token_indices", trainable_token_indices={"embed_tokens": PROMPT[:2], "lm_head": [4, 7, 319]}),
    _honoured("trainable_token_indices", trainable_token_indices={"lm_head": [4, 7, 319]}, use_dora=True),
    _honoured("ensure_weight_tying", trainable_token_indices=PROMPT[3:9], ensure_weight_tying=True),
    _honoured("use_dora", use_dora=True),
    _honoured("use_dora", use_dora=True, target_modules=["v_proj", "down_proj", "lm_head"], use_rslora=True, r=16),
    _honoured("target_parameters", target_modules=["v_proj"], target_parameters=["q_proj.weight", "down_proj.weight"]),
    _honoured("lora_bias", target_modules=["q_proj", "o_proj", "gate_proj"], lora_bias=True),
    _honoured("alora_invocation_tokens", alora_invocation_tokens=PROMPT[10:12]),
    _honoured("alora_invocation_tokens", alora_invocation_tokens=PROMPT[:1], use_rslora=True),
    _honoured("alora_invocation_tokens", alora_invocation_tokens=PROMPT[-3:], lora_bias=True),
    _honoured("alora_invocation_tokens", alora_invocation_tokens=PROMPT[-5:-4], target_modules=["k_proj", "lm_head"]),
    _honoured("alora_invocation_tokens", alora_invocation_tokens=[]),
    _honoured("modules_to_save", target_modules=["q_proj"], modules_to_save=["lm_head"]),
    _honoured("modules_to_save", target_modules=["q_proj"], modules_to_save=["embed_tokens"], use_dora=True),
    _honoured("modules_to_save", target_modules=["down_proj"], modules_to_save=["embed_tokens", "lm_head", "norm"]),
    _honoured("modules_to_save", target_modules=["k_proj"], modules_to_save=["post_attention_layernorm", "model.norm"]),
    _honoured(
        "ensure_weight_tying", modules_to_save=["embed_tokens"], ensure_weight_tying=True, target_modules=["v_proj"]
    ),
    _honoured("ensure_weight_tying", ensure_weight_tying=False),
    _ignored("peft_type", "LORA"),
    _ignored("peft_version", "0.0.1"),
    _ignored("auto_mapping", {"base_model_class": "LlamaForCausalLM"}),
    _ignored("base_model_name_or_path", "other/model"),
    _ignored("fan_in_fan_out", True),
    _ignored("megatron_config", {"tensor_model_parallel_size": 1}),
    _ignored("megatron_core", "megatron.core"),
    _ignored("loftq_config", {"loftq_bits": 4}),
    _ignored("eva_config", {"rho": 2.0}),
    _ignored("corda_config", {"corda_method": "kpm"}),
    _ignored("lora_ga_config", {"direction": "ArB2r"}),
    _ignored("qalora_group_size", 8),
    _ignored("runtime_config", {"ephemeral_gpu_offload": False}),
    _refused("modules_to_save", target_modules=["q_proj"], modules_to_save=["gate_proj"]),
    _refused("modules_to_save", target_modules=["q_proj"], modules_to_save=["mlp"]),
    *(Row("modules_to_save", "refused", {}, {"modules_to_save": value}) for value in (["score"], ["lm_head"], "norm")),
    _refused("init_lora_weights", init_lora_weights="pissa"),
    _refused("init_lora_weights", init_lora_weights="olora"),
    _refused("use_dora", use_dora=True, target_modules=["q_proj", "embed_tokens"]),
    _refused("trainable_token_indices", trainable_token_indices=list(range(17))),
    *(
        Row("trainable_token_indices", "refused", {}, {"trainable_token_indices": value})
        for value in ([3], [1, 1], [-1], ["a"], {"q_proj": [1]}, [2**40], 7)
    ),
    _refused("layer_replication", layer_replication=[[0, 2], [1, 2]]),
    _refused("alora_invocation_tokens", alora_invocation_tokens=[5], bias="all"),
    _refused("alora_invocation_tokens", alora_invocation_tokens=[5], trainable_token_indices=[4]),
    _refused("alora_invocation_tokens", alora_invocation_tokens=[5, 320]),
    *(
        Row("alora_invocation_tokens", "refused", config, {"alora_invocation_tokens": value})
        for value, config in (
            *((value, {}) for value in ("text", [-1], [True], [1.5], 7, {"a": 1}, [1] * 1025)),
            ([5], {"use_dora": True}),
            ([5], {"target_modules": ["k_proj"], "modules_to_save": ["norm"]}),
            ([5], {"target_modules": ["embed_tokens", "k_proj"]}),
        )
    ),
    *(Row("init_lora_weights", "refused", {}, {"init_lora_weights": v}) for v in ("loftq", "corda", "new")),
    Row("peft_type", "refused", {}, {"peft_type": "IA3"}),
    *(
        Row("target_parameters", "refused", {}, {"target_parameters": value})
        for value in (["experts.down_proj"], ["input_layernorm.weight"], "q_proj.weight", [1])
    ),
    Row("target_parameters", "refused", {"use_dora": True}, {"target_parameters": ["q_proj.weight"]}),
    Row("target_parameters", "refused", {"lora_bias": True}, {"target_parameters": ["q_proj.weight"]}),
    Row("use_qalora", "refused", {}, {"use_qalora": True}),
    Row("use_bdlora", "refused", {}, {"use_bdlora": {"n_blocks": 2}}),
    Row("kasa_config", "refused", {}, {"kasa_config": {"beta": 1}}),
    Row("arrow_config", "refused", {}, {"arrow_config": {"top_k": 3}}),
    Row("velora_config", "refused", {}, {"velora_config": {"num_groups": 4}}),
    Row("monteclora_config", "refused", {}, {"monteclora_config": {"n_samples": 2}}),
]


@pytest.fixture(scope="module", params=["llama", "llama-head_dim"], ids=["untied", "tied"])
def served_model(request, tmp_path_factory):
    """Return a checkpoint and its engine. The second one has tied embedding and output projection."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    return folder, _engine(folder)


def _adapter(row: Row, checkpoint: Path, folder: Path) -> Path:
    make_adapter(checkpoint, folder, **row.config)
    path = folder / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **row.written}))
    return folder


def _names(rows: list[Row]) -> list[str]:
    return [f"{row.field}={row.written.get(row.field, row.config.get(row.field))}" for row in rows]


SERVED = [row for row in ROWS if row.verdict != "refused"]
REFUSED = [row for row in ROWS if row.verdict == "refused"]


@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias")
@pytest.mark.parametrize("row", SERVED, ids=_names(SERVED))
def test_logits_equal_peft(row, served_model, tmp_path):
    checkpoint, engine = served_model
    folder = _adapter(row, checkpoint, tmp_path / "adapter")
    if row.verdict == "no effect":  # PEFT does not use the field when it applies the adapter, or cannot here
        oracle = load_adapted_oracle(checkpoint, _adapter(Row(row.field, "", {}), checkpoint, tmp_path / "plain"))
    else:
        oracle = load_adapted_oracle(checkpoint, folder)
    _assert_logits_equal(engine, folder, oracle)


def _assert_logits_equal(engine, folder, oracle):
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
        with oracle.disable_adapter():
            base = oracle(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    assert (expected - base).abs().max() > 1e-2, (
        "the adapter has no effect, so the test would not notice if it were ignored"
    )
    digest = str(folder)
    engine.add_adapter(digest, folder, engine.read_adapter(folder), slot_pinned=False)
    engine.add(
        SequenceRequest(
            1, PROMPT, SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 1, "logprobs": 20}), digest
        )
    )
    logprobs = []
    while engine.has_work:
        logprobs += [entries for result in engine.step().results for entries in result.logprobs]
    engine.remove_adapter(digest)
    assert len(logprobs) == 1
    assert_top_tokens([int(entry[0]) for entry in logprobs[0][1:]], expected)
    assert max(abs(entry[1] - expected[int(entry[0])].item()) for entry in logprobs[0]) < 1e-4


def _engine(checkpoint: Path, max_lora_rank: int = 16) -> Engine:
    config = {"model": str(checkpoint), "device": "cpu", "dtype": "float32", "enable_lora": True}
    config |= {"max_lora_rank": max_lora_rank, "lora_modules_to_save": True}
    return Engine.from_config(EngineConfig.from_json(config | {"max_model_len": 128, "max_loras": 2}))


def _rename(folder: Path, names: Mapping[str, str]) -> None:
    """Replace the starts of the names of all tensors."""
    path = folder / WEIGHTS_FILE
    tensors = {f"base_model.model.{k}": v for k, v in _module_tensors(path).items()}
    for old, new in names.items():
        tensors = {re.sub(rf"^base_model\.model\.{old}", f"base_model.model.{new}", k): v for k, v in tensors.items()}
    save_file(tensors, path)


def _module_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("rank", [1, 320, 512])
def test_smallest_and_largest_ranks_of_vllm_equal_peft(rank, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    adapter = make_adapter(checkpoint, tmp_path / "adapter", r=rank, lora_alpha=rank)
    _assert_logits_equal(_engine(checkpoint, rank), adapter, load_adapted_oracle(checkpoint, adapter))


@pytest.mark.parametrize("name", ["gemma3-vision", "mistral3", "mistral3-ministral3"])
def test_adapters_of_models_that_read_images_equal_peft(name, tmp_path, caplog):
    """Tensors of the vision tower have no effect on a text. Adapters before transformers 4.52 have other names."""
    checkpoint = make_checkpoint(tmp_path / "model", name)
    engine, adapter = _engine(checkpoint), tmp_path / "adapter"
    make_adapter(
        checkpoint, adapter, target_modules=["q_proj", "k_proj", "up_proj", "down_proj", "lm_head", "linear_1"]
    )
    tensors = _module_tensors(adapter / WEIGHTS_FILE)
    assert any("vision_tower" in tensor for tensor in tensors) and any("language_model" in tensor for tensor in tensors)
    oracle = load_adapted_oracle(checkpoint, adapter)
    with caplog.at_level("INFO"):
        _assert_logits_equal(engine, adapter, oracle)
    assert caplog.text.count("adapter tensors outside the language model ignored") == 1
    _rename(
        adapter,
        {
            r"model\.language_model\.": "language_model.model.",
            r"model\.(vision_tower|multi_modal_projector)": r"\1",
        },
    )
    assert "language_model.model.layers.0.self_attn.q_proj.lora_A.weight" in _module_tensors(adapter / WEIGHTS_FILE)
    _assert_logits_equal(engine, adapter, load_adapted_oracle(checkpoint, adapter))


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3-vision", "glm4", "granite", "mixtral", "opt", "opt-350m", "phi3", "qwen2"]
)
def test_magnitudes_and_trained_tokens_equal_peft_in_other_families(name, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", name)
    targets = {"opt": ["q_proj", "fc2"], "phi": ["qkv_proj", "down_proj"], "mix": ["q_proj", "o_proj"]}
    config = {"target_modules": targets.get(name[:3], ["q_proj", "down_proj"]), "trainable_token_indices": PROMPT[:5]}
    if "vision" in name:
        config["target_modules"] = r".*language_model.*\.(q_proj|down_proj)"
    adapter = make_adapter(checkpoint, tmp_path / "adapter", use_dora=True, **config)
    _assert_logits_equal(_engine(checkpoint), adapter, load_adapted_oracle(checkpoint, adapter))


@pytest.mark.parametrize(
    "name",
    ["gemma2", "gemma3-vision", "glm4", "granite", "mixtral", "gpt_oss", "opt", "opt-350m", "phi3", "qwen2", "qwen3"],
)
def test_whole_modules_equal_peft_in_other_families(name, tmp_path):
    """All norms, also those of queries and keys, the embedding and the output projection."""
    checkpoint = make_checkpoint(tmp_path / "model", name)
    targets = r".*language_model.*\.v_proj" if "vision" in name else ["qkv_proj" if name == "phi3" else "v_proj"]
    modules = ["norm", "embed_tokens", "lm_head"]
    adapter = make_adapter(checkpoint, tmp_path / "adapter", target_modules=targets, modules_to_save=modules)
    _assert_logits_equal(_engine(checkpoint), adapter, load_adapted_oracle(checkpoint, adapter))


def test_trained_tokens_of_an_adapted_module_are_rejected(served_model, tmp_path):
    """If embedding and output projection share a weight, both have the trained rows."""
    checkpoint, engine = served_model
    targets = ["q_proj", "lm_head"]
    folder = make_adapter(checkpoint, tmp_path, target_modules=targets, trainable_token_indices=PROMPT[:2])
    if not engine.shape.tie_word_embeddings:
        _assert_logits_equal(engine, folder, load_adapted_oracle(checkpoint, folder))
        return
    with pytest.raises(InvalidArgument, match="trainable_token_indices is not supported if lm_head is adapted, too"):
        engine.read_adapter(folder)


def test_tensors_of_a_vision_tower_are_refused_for_a_text_model(served_model, tmp_path):
    checkpoint, engine = served_model
    make_adapter(checkpoint, tmp_path)
    _rename(tmp_path, {r"model\.layers\.0": "model.vision_tower.layers.0"})
    with pytest.raises(InvalidArgument, match=r"vision_tower.* is not a LoRA matrix of a linear layer"):
        engine.read_adapter(tmp_path)


@pytest.mark.parametrize("row", REFUSED, ids=_names(REFUSED))
def test_rejects_unsupported_values_by_field_name(row, served_model, tmp_path):
    checkpoint, engine = served_model
    with pytest.raises(InvalidArgument, match=rf"\b{row.field}\b"):
        engine.read_adapter(_adapter(row, checkpoint, tmp_path))


def test_rejects_shared_adapters_of_tied_weights(served_model, tmp_path):
    checkpoint, engine = served_model
    row = Row("ensure_weight_tying", "", {"target_modules": ["embed_tokens", "q_proj"]}, {"ensure_weight_tying": True})
    folder = _adapter(row, checkpoint, tmp_path)
    if not engine.shape.tie_word_embeddings:
        assert engine.read_adapter(folder)
        return
    with pytest.raises(InvalidArgument, match="ensure_weight_tying True is not supported if embed_tokens is adapted"):
        engine.read_adapter(folder)


@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias")
@pytest.mark.parametrize(("bias", "targets"), [("all", ["down_proj"]), ("lora_only", ["q_proj", "down_proj"])])
def test_trained_biases_equal_peft(bias, targets, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "llama-biases")
    adapter = make_adapter(checkpoint, tmp_path / "adapter", bias=bias, target_modules=targets)
    engine, oracle = _engine(checkpoint), load_adapted_oracle(checkpoint, adapter)
    _assert_logits_equal(engine, adapter, oracle)
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "bias": "none"}))
    with pytest.raises(InvalidArgument, match=r"bias': biases were trained, but bias is 'none'"):
        engine.read_adapter(adapter)


def test_trained_biases_of_norms_are_rejected(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", "opt")
    adapter = make_adapter(checkpoint, tmp_path / "adapter", bias="all", target_modules=["q_proj"])
    with pytest.raises(InvalidArgument, match=r"norm.bias': bias of a module that is not a linear layer"):
        _engine(checkpoint).read_adapter(adapter)


def test_every_field_of_peft_has_a_row():
    assert {field.name for field in dataclasses.fields(LoraConfig)} == {row.field for row in ROWS}


def test_documentation_contains_this_table():
    documented: dict[str, set[str]] = {}
    for line in DOCUMENT.read_text().splitlines():
        if cells := re.fullmatch(r"\| `(\w+)` \| ([^|]+) \| [^|]+ \|", line):
            documented.setdefault(cells[1], set()).update(verdict.strip() for verdict in cells[2].split(","))
    tested: dict[str, set[str]] = {}
    for row in ROWS:
        tested.setdefault(row.field, set()).add(row.verdict)
    # These depend on the model.
    tested["ensure_weight_tying"].add("refused")
    tested["bias"].add("refused")
    assert documented == tested
