# SPDX-License-Identifier: Apache-2.0
"""Reading of PEFT adapters: deltas equal PEFT's, and invalid configs, tensors and files are rejected with the reason.
PEFT itself creates the adapters where it can. test_conformance covers LoraConfig field by field."""

import json
import math
import shlex
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import make_adapter, make_checkpoint

from quire_engine.__main__ import main
from quire_engine.lora.peft.adapter import read_adapter
from quire_engine.lora.peft.adapter_tensors import WEIGHTS_FILE
from quire_engine.lora.peft.config import CONFIG_FILE, PeftConfig
from quire_engine.weights.conversion_report import CONVERT_COMMAND
from quire_engine.weights.safetensors_reader import open_safetensors
from quire_spec.errors import InvalidArgument
from quire_spec.model.model_config import ModelConfig

MAX_RANK = 16
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def shape(checkpoint):
    return ModelConfig.load(checkpoint)


@pytest.fixture
def adapter(checkpoint, tmp_path):
    return make_adapter(checkpoint, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])


def _configure(folder, **changes):
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def test_gate_of_an_expert_without_up_is_rejected(tmp_path):
    model = make_checkpoint(tmp_path / "model", "qwen3_moe-mixed")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    name = "base_model.model.model.layers.1.mlp.experts.0.gate_proj.lora_{}.weight"
    new = {name.format("A"): torch.ones(8, 64), name.format("B"): torch.ones(48, 8)}
    _rewrite(adapter, lambda tensors: tensors.update(new))
    with pytest.raises(
        InvalidArgument,
        match="has tensors of gate_proj for experts, but none of up_proj: as in PEFT, both must be adapted",
    ):
        read_adapter(adapter, ModelConfig.load(model), MAX_RANK, torch.float32)


def test_dtype_is_converted_after_scaling(checkpoint, shape, tmp_path):
    folder = make_adapter(checkpoint, tmp_path, lora_alpha=5)
    wide = read_adapter(folder, shape, MAX_RANK, torch.float32)
    narrow = read_adapter(folder, shape, MAX_RANK, torch.bfloat16)
    for key, (a, b) in wide.pairs.items():
        assert torch.equal(narrow.pairs[key][0], a.bfloat16())
        assert torch.equal(narrow.pairs[key][1], b.bfloat16())
    assert narrow.num_bytes * 2 == wide.num_bytes


def test_half_precision_files_are_read(adapter, shape):
    wide = read_adapter(adapter, shape, MAX_RANK, torch.float32)
    _rewrite(adapter, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    narrow = read_adapter(adapter, shape, MAX_RANK, torch.float32)
    torch.testing.assert_close(narrow.pairs[0, "q_proj"], wide.pairs[0, "q_proj"], rtol=2**-8, atol=0)


@pytest.mark.parametrize(("name", "linear"), [("phi3", "self_attn.qkv_proj"), ("opt", "fc1")])
def test_rejects_an_adapter_of_another_family_and_lists_the_linears_of_this_one(name, linear, adapter, tmp_path):
    other = ModelConfig.load(make_checkpoint(tmp_path / name, name))
    with pytest.raises(InvalidArgument, match=f"of {other.architecture} are .*{linear}"):
        read_adapter(adapter, other, MAX_RANK, torch.float32)


@pytest.mark.parametrize("config", [{"r": 17}, {"rank_pattern": {"q_proj": 17}}], ids=str)
def test_rejects_a_rank_above_the_limit(config, checkpoint, shape, tmp_path):
    folder = make_adapter(checkpoint, tmp_path, **config)
    error = rf"^adapter '{tmp_path}': .*rank 17 exceeds max_lora_rank 16; raise it .spec.lora.maxRank or maxLoadedRanks"
    with pytest.raises(InvalidArgument, match=error):
        read_adapter(folder, shape, MAX_RANK, torch.float32)


CONFIGS = {
    "no method": ({"peft_type": None}, "peft_type None is not supported"),
    "something new": (
        {"use_quantum": True, "peft_version": "0.22.0.dev0"},
        "'use_quantum' True is not supported: PEFT '0.22.0.dev0' is newer than the fields that this version knows",
    ),
    "something new, odd version": ({"use_quantum": True, "peft_version": 1}, "'use_quantum' True is not supported"),
    "rank 0": ({"r": 0}, "r 0 is not a positive integer"),
    "rank true": ({"r": True}, "r True is not a positive integer"),
    "rank text": ({"r": "8"}, "r '8' is not a positive integer"),
    "alpha text": ({"lora_alpha": "16"}, "lora_alpha '16' is not a number"),
    "alpha NaN": ({"lora_alpha": math.nan}, "lora_alpha nan is not a number"),
    "huge alpha": ({"lora_alpha": 10**4000}, "lora_alpha 1000.* is not a number from -1e9 to 1e9"),
    "flag text": ({"use_rslora": "yes"}, "use_rslora 'yes' is neither true nor false"),
    "pattern list": ({"rank_pattern": ["q_proj"]}, "rank_pattern .* is not an object"),
    "pattern value": ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\] -1 is not a positive integer"),
    "invalid expression": (
        {"alpha_pattern": {"(q_proj": 1}},
        r"alpha_pattern: key '\(q_proj' is not a usable regular expression",
    ),
    "slow expression": ({"rank_pattern": {r"([\w.]+)+x": 1}}, "repeats a group"),
    "layers of a wrong type": (
        {"layers_to_transform": "1"},
        "layers_to_transform '1' is neither a layer number nor a list",
    ),
    "invalid layers_pattern": ({"layers_pattern": ["(h"]}, "layers_pattern .* is neither a module name nor a list"),
    "too many layers_pattern": ({"layers_pattern": ["h"] * 65}, "layers_pattern .* a list of at most 64 module names"),
    "long expression": ({"rank_pattern": {"a" * 300: 1}}, "is not a usable regular expression: it is too long"),
}


@pytest.mark.parametrize(("changes", "error"), CONFIGS.values(), ids=CONFIGS.keys())
def test_rejects_wrong_config_fields_by_name(changes, error, adapter, shape):
    _configure(adapter, **changes)
    with pytest.raises(InvalidArgument, match=error):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


NARROWER = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["query", "value"]},
    {"target_modules": r".*layers\.1.*_proj"},
    {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.down_proj"]},
    {"exclude_modules": ["down_proj"]},
    {"exclude_modules": r".*\.0\..*"},
    {"layers_to_transform": [1]},
    {"layers_to_transform": 0},
    {"layers_to_transform": [0], "layers_pattern": ["h", "layers"]},
    {"layers_to_transform": [0, 1], "exclude_modules": ["model.layers.1.mlp.down_proj"]},
    {"layers_pattern": "h", "layers_to_transform": [0, 1]},
]


@pytest.mark.parametrize("changes", NARROWER, ids=str)
def test_rejects_tensors_that_peft_would_ignore(changes, adapter, shape):
    _configure(adapter, **changes)
    config = LoraConfig.from_pretrained(adapter)
    stems = {
        name.removeprefix("base_model.model.").partition(".lora_")[0] for name in load_file(adapter / WEIGHTS_FILE)
    }
    ignored = sorted(stem for stem in stems if not check_target_module_exists(config, stem))
    assert ignored, "PEFT ignores no tensor with this config"
    field = "layers_to_transform" if "layers_pattern" in changes else list(changes)[-1]
    with pytest.raises(
        InvalidArgument, match=rf"the file has tensors for ({'|'.join(ignored)}), which {field} excludes"
    ):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_unsafe_target_modules_expression_is_not_checked(adapter, shape):
    """Fine-tuning tools write such expressions. PEFT has already matched it during training."""
    names = "|".join(["q_proj", "down_proj"] * 20)
    _configure(adapter, target_modules=rf"(?:.*?(?:language|text).*?(?:attn|mlp).*?(?:{names}).*?)|(?:nothing){{1,}}")
    assert read_adapter(adapter, shape, MAX_RANK, torch.float32).pairs


def test_unset_unknown_fields_are_accepted(adapter, shape):
    _configure(adapter, use_quantum=False, quantum_config=None, quantum_states=[])
    assert read_adapter(adapter, shape, MAX_RANK, torch.float32).pairs


TENSORS = {
    "half a pair": (lambda t: t.pop(f"{Q0}.lora_B.weight"), r"lora_A.weight' exists, but its lora_B is missing"),
    "truncated layer": (
        lambda t: [t.pop(k) for k in list(t) if ".1.mlp" in k],
        "target_modules contains down_proj, but layer 1 has no tensors for it",
    ),
    "empty": (lambda t: t.clear(), "contains no LoRA tensor"),
    "magnitudes": (
        lambda t: t.update({f"{Q0}.lora_magnitude_vector": torch.ones(64)}),
        "lora_magnitude_vector' exists, but use_dora is not set in adapter_config.json",
    ),
    "a target in the wrong module": (
        lambda t: t.update({"base_model.model.model.layers.0.mlp.q_proj.lora_A.weight": torch.ones(8, 64)}),
        "mlp.q_proj.lora_A.weight' is not a LoRA matrix",
    ),
    "an unknown target": (
        lambda t: t.update({"base_model.model.model.layers.0.mlp.router.lora_A.weight": torch.ones(8, 64)}),
        "mlp.router.lora_A.weight' is not a LoRA matrix of a linear layer; "
        "the linear layers of LlamaForCausalLM are self_attn.q_proj",
    ),
    "a layer too many": (
        lambda t: t.update({Q0.replace(".0.", ".2.") + ".lora_A.weight": torch.ones(8, 64)}),
        "the model has only 2 layers; check that the adapter is for this model",
    ),
    "layer number with a leading zero": (
        lambda t: t.update({Q0.replace(".0.", ".00.") + ".lora_A.weight": torch.ones(8, 64)}),
        "is not a LoRA matrix",
    ),
    "another width": (
        lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(8, 65)}),
        r"q_proj.lora_A.weight' has shape \(8, 65\); config and model require \(8, 64\)",
    ),
    "integers": (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(8, 64).int()}), "is I32; supported are F64"),
    "NaN": (lambda t: t[f"{Q0}.lora_A.weight"].__setitem__((3, 3), math.nan), "lora_A.weight contains NaN or infinity"),
    "overflow once scaled": (
        lambda t: t[f"{Q0}.lora_B.weight"].fill_(2e38),
        "lora_B.weight contains NaN or infinity, or overflows torch.float32 after scaling",
    ),
}


@pytest.mark.parametrize(("change", "error"), TENSORS.values(), ids=TENSORS.keys())
def test_rejects_wrong_tensors_by_name(change, error, adapter, shape):
    _rewrite(adapter, change)
    with pytest.raises(InvalidArgument, match=error):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_copies_of_base_weights_must_equal_the_base_model(module, adapter, shape, checkpoint):
    # save_pretrained(save_embedding_layers=True) writes such copies.
    weight = load_file(checkpoint / "model.safetensors")[f"{module}.weight"]
    _rewrite(adapter, lambda t: t.update({f"base_model.model.{module}.weight": weight.bfloat16()}))
    assert read_adapter(adapter, shape, MAX_RANK, torch.float32, checkpoint=checkpoint).pairs
    _rewrite(adapter, lambda t: t.update({f"base_model.model.{module}.weight": weight * 1.1}))
    with pytest.raises(InvalidArgument, match=f"{module}.weight differs from the base model's .*: rows were trained"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32, checkpoint=checkpoint)


def test_the_command_of_the_error_converts_pickled_weights(adapter, shape, capsys):
    pairs = read_adapter(adapter, shape, MAX_RANK, torch.float32).pairs
    torch.save(load_file(adapter / WEIGHTS_FILE), adapter / "adapter_model.bin")
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(InvalidArgument, match=r"adapter_model\.bin can run code when it is loaded") as error:
        read_adapter(adapter, shape, MAX_RANK, torch.float32)
    assert main(["convert", *shlex.split(str(error.value).partition(f"{CONVERT_COMMAND} ")[2])]) == 0
    assert f"tensors={2 * len(pairs)}" in capsys.readouterr().out
    converted = read_adapter(Path(f"{adapter}-safetensors"), shape, MAX_RANK, torch.float32).pairs
    assert all(torch.equal(a, b) for key in pairs for a, b in zip(converted[key], pairs[key], strict=True))


BIAS = f"{Q0}.lora_B.bias"
MAGNITUDE = f"{Q0}.lora_magnitude_vector"
ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("config", "change", "error"),
    [
        ({"use_dora": True}, {MAGNITUDE: None}, "use_dora is True, but the file has no such tensor for .*0.*q_proj"),
        ({"use_dora": True}, {MAGNITUDE: torch.ones(63)}, r"lora_magnitude_vector' has shape \(63,\)"),
        (
            {"use_dora": True},
            {MAGNITUDE: torch.full((64,), math.nan)},
            "magnitude or bias of .* contains NaN or infinity",
        ),
        ({"use_dora": True}, {MAGNITUDE: torch.full((64,), 3e38)}, "magnitude or bias of .* contains NaN or infinity"),
        ({"lora_bias": True}, {BIAS: None}, "lora_bias is True, but the file has no such tensor"),
        ({"lora_bias": True}, {BIAS: torch.full((64,), math.inf)}, "contains NaN or infinity"),
        ({}, {BIAS: torch.ones(64)}, "lora_B.bias' exists, but lora_bias is not set"),
        ({}, {f"{Q0}.bias": torch.ones(64)}, "biases were trained, but bias is 'none'"),
        ({"bias": "all"}, {f"{Q0}.bias": torch.ones(64)}, "the base model has no .*q_proj.bias"),
        ({}, {ROWS: torch.ones(1, 64)}, "trainable_token_indices: config and file must have rows of the same modules"),
        ({"trainable_token_indices": [5]}, {ROWS: torch.ones(2, 64)}, r"delta' has shape \(2, 64\)"),
        ({"trainable_token_indices": [5]}, {ROWS: torch.full((1, 64), math.nan)}, "rows of embed_tokens contain NaN"),
        ({"trainable_token_indices": [5]}, {ROWS: torch.full((1, 64), 1e5)}, "rows of embed_tokens .* or overflow"),
    ],
)
def test_rejects_wrong_magnitudes_biases_and_rows(config, change, error, checkpoint, shape, tmp_path):
    folder = make_adapter(checkpoint, tmp_path / "adapter", target_modules=["q_proj"], **config)
    assert read_adapter(folder, shape, MAX_RANK, torch.float32, checkpoint=checkpoint)

    def rewrite(tensors):
        for name, tensor in change.items():
            tensors.pop(name, None)
            tensors |= {} if tensor is None else {name: tensor}

    _rewrite(folder, rewrite)
    with pytest.raises(InvalidArgument, match=error):
        read_adapter(folder, shape, MAX_RANK, torch.float16, checkpoint=checkpoint)


HEAD = "base_model.model.lm_head.weight"
NORM = "base_model.model.model.norm.weight"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({HEAD: None}, "modules_to_save contains 'lm_head', but the file has no such module"),
        (
            {HEAD: torch.ones(321, 64)},
            "modules_to_save: lm_head has 321 rows, but the base model has 320; an adapter cannot add tokens. Train it",
        ),
        ({HEAD: torch.ones(320, 63)}, r"lm_head.weight' has shape \(320, 63\)"),
        ({HEAD: torch.full((320, 64), math.nan)}, "lm_head.weight contains NaN"),
        ({HEAD: torch.full((320, 64), 1e5)}, "Diverged: the rows of the update of lm_head have the norm 8e"),
        ({NORM: torch.ones(63)}, r"norm.weight' has shape \(63,\)"),
        ({NORM: torch.full((64,), math.inf)}, "norm.weight contains NaN or infinity"),
        (
            {NORM.replace("norm", "embed_tokens"): torch.ones(320, 64)},
            "embed_tokens.weight differs from the base model's",
        ),
        ({f"{Q0}.weight": torch.ones(64, 64)}, "q_proj.weight' is not a LoRA matrix"),
        ({HEAD.replace(".weight", ".lora_A.weight"): torch.ones(8, 64)}, "lora_A.* exists, but its lora_B is missing"),
    ],
)
def test_rejects_wrong_whole_modules(change, error, checkpoint, shape, tmp_path):
    modules = ["lm_head", "model.norm"]
    folder = make_adapter(checkpoint, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=modules)
    arguments = {"checkpoint": checkpoint, "has_vocab_modules": True, "norms": {"model.norm": 64}}
    assert len(read_adapter(folder, shape, MAX_RANK, torch.float32, **arguments).transforms) == 1

    def rewrite(tensors):
        for name, tensor in change.items():
            tensors.pop(name, None)
            tensors |= {} if tensor is None else {name: tensor}

    _rewrite(folder, rewrite)
    with pytest.raises(InvalidArgument, match=error):
        read_adapter(folder, shape, MAX_RANK, torch.float16, **arguments)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "model.norm"])
def test_whole_modules_except_norms_need_memory(module, checkpoint, shape, tmp_path):
    folder = make_adapter(checkpoint, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=[module])
    arguments = {"checkpoint": checkpoint, "norms": {"model.norm": 64}}
    if module == "model.norm":
        assert read_adapter(folder, shape, MAX_RANK, torch.bfloat16, **arguments).transforms
        return
    with pytest.raises(
        InvalidArgument, match=rf"modules_to_save contains {module}, .* set lora_modules_to_save .*true"
    ):
        read_adapter(folder, shape, MAX_RANK, torch.bfloat16, **arguments)


@pytest.mark.parametrize("version", [None, "0.9.0", "0.21.2"])
def test_fields_that_peft_does_not_know_are_ignored_with_one_warning(version, adapter, shape, caplog):
    _configure(adapter, lorap_emb_lr=1e-6, swift_type="LORA", trainer=None, peft_version=version)
    assert read_adapter(adapter, shape, MAX_RANK, torch.float32).pairs
    assert [record.getMessage() for record in caplog.records] == [
        "fields of adapter_config.json ignored, because PEFT does not know them: lorap_emb_lr, swift_type"
    ]


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_rejects_missing_files(name, adapter, shape):
    (adapter / name).unlink()
    with pytest.raises(InvalidArgument, match=f"{name} is missing"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\x00", '"text"', "[1]", "null"])
def test_rejects_a_config_that_is_not_a_json_object(content, adapter, shape):
    (adapter / CONFIG_FILE).write_text(content)
    with pytest.raises(InvalidArgument, match=f"{CONFIG_FILE} is not"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_rejects_a_huge_config_without_reading_it(adapter, shape):
    _configure(adapter, task_type="x" * (2 << 20))
    with pytest.raises(InvalidArgument, match="at most 1048576 are supported"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_rejects_a_file_larger_than_any_adapter_without_reading_it(adapter, shape):
    with (adapter / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(
        InvalidArgument,
        match="has 1073741824 bytes, but an adapter of rank 16 for all linear layers of this model",
    ):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


HEADERS = {
    "empty": b"",
    "short": b"\x08\x00\x00",
    "longer than the file": (10_000).to_bytes(8, "little") + b"{}",
    "longer than anything": (2**63).to_bytes(8, "little") + b"{}",
    "not JSON": (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
    "offsets outside": b"",
    "nested": (20_000).to_bytes(8, "little") + b"[" * 20_000,
}
_outside = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
HEADERS["offsets outside"] = len(_outside).to_bytes(8, "little") + _outside
_many = json.dumps({f"a{i}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for i in range(60_000)}).encode()
HEADERS["many tensors"] = len(_many).to_bytes(8, "little") + _many


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_rejects_hostile_headers(content, adapter, shape):
    (adapter / WEIGHTS_FILE).write_bytes(content)
    reasons = "is not a safetensors file|declares a header|has 60000 tensors, but"
    with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} ({reasons})"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_file_truncated_during_reading_raises_instead_of_crashing(cut, adapter):
    path = adapter / WEIGHTS_FILE
    with open_safetensors(path) as file:
        name = file.keys()[0]
        with path.open("r+b") as other:
            other.truncate(cut if cut >= 0 else path.stat().st_size + cut)
        # A memory-mapped file would raise SIGBUS here.
        with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} changed while it was read"):
            file.get_tensor(name)


def test_rejects_a_file_replaced_during_reading(adapter):
    path = adapter / WEIGHTS_FILE
    for header in (b"[]", b"{}", b'{"a": {"data_offsets": [0, -1]}}', b'{"a": {"data_offsets": "xy"}}', b"\xff"):
        save_file({"a": torch.ones(4)}, path)
        with open_safetensors(path) as file:
            path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 16)
            with pytest.raises(InvalidArgument, match="changed while it was read"):
                file.get_tensor("a")


def test_tensors_equal_those_read_by_safetensors(tmp_path):
    # F16 before F32: the second tensor starts at an offset that is not aligned for float32.
    tensors = {
        "a": torch.rand(3).half(),
        "b": torch.rand(2, 5),
        "c": torch.rand(7).bfloat16(),
        "d": torch.rand(2).double(),
    }
    save_file(tensors, tmp_path / "file")
    with open_safetensors(tmp_path / "file") as file:
        assert sorted(file.keys()) == list(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_rejects_a_folder_instead_of_the_weights_file(adapter, shape):
    (adapter / WEIGHTS_FILE).unlink()
    (adapter / WEIGHTS_FILE).mkdir()
    with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} is missing"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_rank_pattern_matches_by_pefts_rule(adapter):
    _configure(adapter, r=8, rank_pattern={"^model.layers.0": 1, "q_proj": 2, "model.layers.1.*": 3, "proj": 4})
    config = PeftConfig.load(adapter / CONFIG_FILE)
    assert config.rank("model.layers.0.self_attn.q_proj") == 2
    assert config.rank("model.layers.1.self_attn.k_proj") == 3
    # "proj" would have to match the whole last name.
    assert config.rank("model.layers.0.self_attn.k_proj") == 8
