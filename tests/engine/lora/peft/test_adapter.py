# SPDX-License-Identifier: Apache-2.0
"""Adapters as PEFT writes them: each feature is honoured exactly as PEFT does, or refused by name. Made by PEFT itself
wherever it can make them."""

import dataclasses
import json
import math

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import load_adapted_oracle, make_adapter, make_checkpoint

from quire_engine.lora.peft import config as engine_config
from quire_engine.lora.peft.adapter import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from quire_engine.lora.peft.config import PeftConfig
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


HONOURED = {
    "all linears": {},
    "some linears": {"target_modules": ["q_proj", "v_proj"]},
    "linears by expression": {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
    "some layers": {"target_modules": ["o_proj"], "layers_to_transform": [1]},
    "without one": {"exclude_modules": ["gate_proj"]},
    "rsLoRA": {"use_rslora": True, "lora_alpha": 3},
    "ranks by module": {"rank_pattern": {"q_proj": 4, r"model.layers.1.mlp.\w+_proj": 16, "layers.0.mlp.up_proj": 2}},
    "scales by module": {"alpha_pattern": {r"(k|v)_proj": 1, "^model.layers.0.self_attn.o_proj": 64}},
    "first pattern counts": {"rank_pattern": {".*_proj": 5, "q_proj": 7}},
    "all of it": {
        "use_rslora": True,
        "rank_pattern": {"down_proj": 1, "self_attn.*": 12},
        "alpha_pattern": {"down_proj": 5, ".*gate_proj": 9},
    },
    "orthogonal start": {"init_lora_weights": "orthogonal"},
    "Gaussian start": {"init_lora_weights": "gaussian"},
    "random start": {"init_lora_weights": False},
}


@pytest.mark.parametrize("config", HONOURED.values(), ids=HONOURED.keys())
def test_deltas_equal_peft(config, checkpoint, shape, tmp_path):
    folder = make_adapter(checkpoint, tmp_path, **config)
    adapter = read_adapter(folder, shape, MAX_RANK, torch.float32)
    modules = dict(load_adapted_oracle(checkpoint, folder).named_modules())
    deltas = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in modules.items()
        if hasattr(module, "get_delta_weight")
    }
    found = {}
    for (layer, target), (a, b) in adapter.pairs.items():
        parent = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        found[f"model.layers.{layer}.{parent}.{target}"] = b @ a
    assert found.keys() == deltas.keys()
    for name, delta in deltas.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-5, atol=1e-6)
    assert adapter.rank == max(a.shape[0] for a, _ in adapter.pairs.values())


def test_types_are_converted_after_scaling(checkpoint, shape, tmp_path):
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


def test_every_field_of_this_peft_is_known():
    known = (
        engine_config.IGNORED_FIELDS
        | engine_config.SUPPORTED_FIELDS
        | set(engine_config.UNSUPPORTED_FIELDS)
        | {"bias", "init_lora_weights"}
    )
    assert {f.name for f in dataclasses.fields(LoraConfig)} - known == set()


MADE_BY_PEFT = {
    "DoRA": ({"use_dora": True}, "'use_dora' True is not supported: there are magnitudes"),
    "bias of B": ({"lora_bias": True, "target_modules": ["q_proj"]}, "'lora_bias' True is not supported: B has a bias"),
    "biases": ({"bias": "lora_only"}, "bias 'lora_only': biases were trained"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"'modules_to_save' \['lm_head'\] is not supported"),
    "embedding rows": ({"trainable_token_indices": [1, 2]}, "'trainable_token_indices' .* rows of the embedding"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base model's weights"),
    "OLoRA": ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' changes the base model's weights"),
    "more layers": ({"layer_replication": [[0, 2], [1, 2]]}, "'layer_replication' .* other layers than the base"),
    "part of the tokens": ({"alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"}, "'alora_invocation_tokens'"),
    "too large a rank": ({"r": 17}, "rank 17 exceeds max_lora_rank 16; raise it .spec.lora.maxRank of an"),
    "too large a rank somewhere": ({"rank_pattern": {"q_proj": 32}}, "rank 32 exceeds max_lora_rank 16"),
}


@pytest.mark.parametrize(("name", "linear"), [("phi3", "self_attn.qkv_proj"), ("opt", "fc1")])
def test_an_adapter_of_another_family_is_refused_with_the_linears_of_this_one(name, linear, adapter, tmp_path):
    other = ModelConfig.load(make_checkpoint(tmp_path / name, name))
    with pytest.raises(InvalidArgument, match=f"of {other.architecture} are .*{linear}"):
        read_adapter(adapter, other, MAX_RANK, torch.float32)


@pytest.mark.parametrize(("config", "complaint"), MADE_BY_PEFT.values(), ids=MADE_BY_PEFT.keys())
def test_what_cannot_be_served_is_refused_by_name(config, complaint, checkpoint, shape, tmp_path):
    folder = make_adapter(checkpoint, tmp_path, **config)
    with pytest.raises(InvalidArgument, match=f"^adapter '{tmp_path}': .*{complaint}"):
        read_adapter(folder, shape, MAX_RANK, torch.float32)


CONFIGS = {
    "another method": ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported; only 'LORA' is"),
    "no method": ({"peft_type": None}, "peft_type None is not supported"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "'loftq' changes the base"),
    "CorDA": ({"init_lora_weights": "corda"}, "'corda' changes the base"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "'lora_ga' changes the base"),
    "parameters": ({"target_parameters": ["experts.down_proj"]}, "'target_parameters' .* no linears"),
    "QALoRA": ({"use_qalora": True}, "'use_qalora' True .* pooled"),
    "BD-LoRA": ({"use_bdlora": {"n_blocks": 2}}, "'use_bdlora' .* block-diagonal"),
    "KaSA": ({"kasa_config": {"beta": 1}}, "'kasa_config' .* diagonal"),
    "Arrow": ({"arrow_config": {"top_k": 3}}, "'arrow_config' .* mixture"),
    "something new": ({"use_quantum": True}, "'use_quantum' True is not supported: this version does not know"),
    "rank 0": ({"r": 0}, "r 0 is not a positive integer"),
    "rank true": ({"r": True}, "r True is not a positive integer"),
    "rank text": ({"r": "8"}, "r '8' is not a positive integer"),
    "alpha text": ({"lora_alpha": "16"}, "lora_alpha '16' is not a number"),
    "alpha NaN": ({"lora_alpha": math.nan}, "lora_alpha nan is not a number"),
    "huge alpha": ({"lora_alpha": 10**4000}, "lora_alpha 1000.* is not a number of at most 1e9"),
    "flag text": ({"use_rslora": "yes"}, "use_rslora 'yes' is neither true nor false"),
    "pattern list": ({"rank_pattern": ["q_proj"]}, "rank_pattern .* is not an object"),
    "pattern value": ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\] -1 is not a positive integer"),
    "no expression": ({"alpha_pattern": {"(q_proj": 1}}, r"alpha_pattern: key '\(q_proj' is not a usable expression"),
    "endless expression": ({"rank_pattern": {r"([\w.]+)+x": 1}}, "repeated group"),
    "layers' form": ({"layers_to_transform": "1"}, "layers_to_transform '1' is neither a layer's number nor a list"),
    "layers' pattern": ({"layers_pattern": ["(h"]}, "layers_pattern .* is neither a module's name nor a list"),
    "long expression": ({"rank_pattern": {"a" * 300: 1}}, "is not a usable expression: too long"),
}


@pytest.mark.parametrize(("changes", "complaint"), CONFIGS.values(), ids=CONFIGS.keys())
def test_wrong_configurations_are_refused_by_name(changes, complaint, adapter, shape):
    _configure(adapter, **changes)
    with pytest.raises(InvalidArgument, match=complaint):
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
def test_tensors_that_peft_would_leave_unread_are_refused(changes, adapter, shape):
    _configure(adapter, **changes)
    config = LoraConfig.from_pretrained(adapter)
    stems = {
        name.removeprefix("base_model.model.").partition(".lora_")[0] for name in load_file(adapter / WEIGHTS_FILE)
    }
    unread = sorted(stem for stem in stems if not check_target_module_exists(config, stem))
    assert unread, "this is no narrower"
    by = "layers_to_transform" if "layers_pattern" in changes else list(changes)[-1]
    with pytest.raises(InvalidArgument, match=rf"the file has tensors for ({'|'.join(unread)}), which {by} leaves out"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_an_expression_that_cannot_be_tried_says_nothing(adapter, shape):
    """As one that fine-tuning tools write; PEFT has tried it when it was trained."""
    names = "|".join(["q_proj", "down_proj"] * 20)
    _configure(adapter, target_modules=rf"(?:.*?(?:language|text).*?(?:attn|mlp).*?(?:{names}).*?)|(?:nothing){{1,}}")
    assert read_adapter(adapter, shape, MAX_RANK, torch.float32).pairs


def test_fields_that_are_unset_need_not_be_known(adapter, shape):
    _configure(adapter, use_quantum=False, quantum_config=None, quantum_states=[])
    assert read_adapter(adapter, shape, MAX_RANK, torch.float32).pairs


TENSORS = {
    "half a pair": (lambda t: t.pop(f"{Q0}.lora_B.weight"), r"lora_A.weight' is there and its lora_B is not"),
    "other half": (lambda t: t.pop(f"{Q0}.lora_A.weight"), r"lora_B.weight' is there and its lora_A is not"),
    "a layer cut off": (
        lambda t: [t.pop(k) for k in list(t) if ".1.mlp" in k],
        "target_modules has down_proj, and layer 1 has no tensors for it",
    ),
    "nothing": (lambda t: t.clear(), "holds no tensor"),
    "magnitudes": (
        lambda t: t.update({f"{Q0}.lora_magnitude_vector": torch.ones(64)}),
        "lora_magnitude_vector' is not a LoRA matrix",
    ),
    "adapter's name kept": (
        lambda t: t.update({f"{Q0}.lora_A.default.weight": t.pop(f"{Q0}.lora_A.weight")}),
        "lora_A.default.weight' is not a LoRA matrix",
    ),
    "a target in the wrong place": (
        lambda t: t.update({"base_model.model.model.layers.0.mlp.q_proj.lora_A.weight": torch.ones(8, 64)}),
        "mlp.q_proj.lora_A.weight' is not a LoRA matrix",
    ),
    "an unknown target": (
        lambda t: t.update({"base_model.model.model.layers.0.mlp.router.lora_A.weight": torch.ones(8, 64)}),
        "mlp.router.lora_A.weight' is not a LoRA matrix of a linear; those of LlamaForCausalLM are self_attn.q_proj",
    ),
    "a layer too many": (
        lambda t: t.update({Q0.replace(".0.", ".2.") + ".lora_A.weight": torch.ones(8, 64)}),
        "the model has 2 layers; is it for another model",
    ),
    "a layer spelt oddly": (
        lambda t: t.update({Q0.replace(".0.", ".00.") + ".lora_A.weight": torch.ones(8, 64)}),
        "is not a LoRA matrix",
    ),
    "another width": (
        lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(8, 65)}),
        r"q_proj.lora_A.weight' has shape \(8, 65\); config and model make it \(8, 64\)",
    ),
    "another rank": (
        lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(4, 64), f"{Q0}.lora_B.weight": torch.ones(64, 4)}),
        r"has shape \(4, 64\); config and model make it \(8, 64\)",
    ),
    "transposed": (
        lambda t: t.update({f"{Q0}.lora_B.weight": torch.ones(8, 64)}),
        r"q_proj.lora_B.weight' has shape \(8, 64\); config and model make it \(64, 8\)",
    ),
    "integers": (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(8, 64).int()}), "is I32; supported are F64"),
    "NaN": (lambda t: t[f"{Q0}.lora_A.weight"].__setitem__((3, 3), math.nan), "lora_A.weight holds NaN or infinity"),
    "infinity": (lambda t: t[f"{Q0}.lora_B.weight"].__setitem__((3, 3), math.inf), "lora_B.weight holds NaN or inf"),
    "overflow once scaled": (
        lambda t: t[f"{Q0}.lora_B.weight"].fill_(2e38),
        "lora_B.weight holds NaN or infinity, or overflows torch.float32, its scale applied",
    ),
}


@pytest.mark.parametrize(("change", "complaint"), TENSORS.values(), ids=TENSORS.keys())
def test_wrong_tensors_are_refused_by_name(change, complaint, adapter, shape):
    _rewrite(adapter, change)
    with pytest.raises(InvalidArgument, match=complaint):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_the_bases_own_weights_may_stand_beside(module, adapter, shape, checkpoint):
    # As save_pretrained(save_embedding_layers=True) writes them.
    weight = load_file(checkpoint / "model.safetensors")[f"{module}.weight"]
    _rewrite(adapter, lambda t: t.update({f"base_model.model.{module}.weight": weight.bfloat16()}))
    assert read_adapter(adapter, shape, MAX_RANK, torch.float32, checkpoint=checkpoint).pairs
    _rewrite(adapter, lambda t: t.update({f"base_model.model.{module}.weight": weight * 1.1}))
    with pytest.raises(InvalidArgument, match=f"{module}.weight differs from the base model's .*: rows were trained"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32, checkpoint=checkpoint)


def test_pickled_weights_are_refused(adapter, shape):
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    with pytest.raises(InvalidArgument, match=r"adapter_model\.bin can run code when read; only safetensors are"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_missing_files(name, adapter, shape):
    (adapter / name).unlink()
    with pytest.raises(InvalidArgument, match=f"{name} is missing"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\x00", '"text"', "[1]", "null"])
def test_a_configuration_that_is_no_object(content, adapter, shape):
    (adapter / CONFIG_FILE).write_text(content)
    with pytest.raises(InvalidArgument, match=f"{CONFIG_FILE} is not"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_a_huge_configuration_is_not_read(adapter, shape):
    _configure(adapter, task_type="x" * (2 << 20))
    with pytest.raises(InvalidArgument, match="at most 1048576 are read"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_a_file_larger_than_any_adapter_is_not_read(adapter, shape):
    with (adapter / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(InvalidArgument, match="has 1073741824 bytes; rank 16 on every linear of this model takes at m"):
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


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_hostile_headers_are_refused(content, adapter, shape):
    (adapter / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} (is not a safetensors file|claims a header)"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_file_that_is_cut_while_it_is_read_costs_an_error_and_not_the_process(cut, adapter):
    path = adapter / WEIGHTS_FILE
    with open_safetensors(path) as file:
        name = file.keys()[0]
        with path.open("r+b") as other:
            other.truncate(cut if cut >= 0 else path.stat().st_size + cut)
        # A mapped file would kill this process here.
        with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} changed while it was read"):
            file.get_tensor(name)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(adapter):
    path = adapter / WEIGHTS_FILE
    for header in (b"[]", b"{}", b'{"a": {"data_offsets": [0, -1]}}', b'{"a": {"data_offsets": "xy"}}', b"\xff"):
        save_file({"a": torch.ones(4)}, path)
        with open_safetensors(path) as file:
            path.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 16)
            with pytest.raises(InvalidArgument, match="changed while it was read"):
                file.get_tensor("a")


def test_tensors_are_read_as_the_library_reads_them(tmp_path):
    # F16 before F32: the second one begins where no float32 may lie.
    made = {
        "a": torch.rand(3).half(),
        "b": torch.rand(2, 5),
        "c": torch.rand(7).bfloat16(),
        "d": torch.rand(2).double(),
    }
    save_file(made, tmp_path / "file")
    with open_safetensors(tmp_path / "file") as file:
        assert sorted(file.keys()) == list(made)
        for name, tensor in made.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_folder_instead_of_a_file(adapter, shape):
    (adapter / WEIGHTS_FILE).unlink()
    (adapter / WEIGHTS_FILE).mkdir()
    with pytest.raises(InvalidArgument, match=f"{WEIGHTS_FILE} is missing"):
        read_adapter(adapter, shape, MAX_RANK, torch.float32)


def test_patterns_match_as_peft_says(adapter):
    _configure(adapter, r=8, rank_pattern={"^model.layers.0": 1, "q_proj": 2, "model.layers.1.*": 3, "proj": 4})
    config = PeftConfig.load(adapter / CONFIG_FILE, MAX_RANK)
    assert config.rank("model.layers.0.self_attn.q_proj") == 2
    assert config.rank("model.layers.1.self_attn.k_proj") == 3
    # "proj" would have to be the whole of the last name.
    assert config.rank("model.layers.0.self_attn.k_proj") == 8
