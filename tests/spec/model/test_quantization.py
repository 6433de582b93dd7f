# SPDX-License-Identifier: Apache-2.0
"""quantization_config of config.json: published configurations are read, and others are rejected with their key."""

import pytest

from quire_spec.errors import ConfigError
from quire_spec.model.capabilities import CHECKPOINT_QUANTIZATIONS, QUANTIZATIONS
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.quantization import QuantizationScheme, WeightScheme, resolve_quantization, with_modelopt_file

LAYER = "model.layers.0.mlp.down_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
NVFP4 = "nvfp4-pack-quantized"
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}


def _compressed(weights=INT4, format_name="pack-quantized", **values):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}} | values


def _read(values):
    return QuantizationScheme.from_hf_config(HFConfigReader(values, location="config.json: quantization_config"))


CONFIGS = {
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        WeightScheme("fp8", 8, "block", (128, 128)),
    ),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, WeightScheme("fp8", 8, "tensor")),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, WeightScheme("fp8", 8, "channel")),
    "compressed fp8": (_compressed(FP8, "float-quantized"), WeightScheme("fp8", 8, "channel")),
    "compressed fp8 blocks": (
        _compressed(FP8 | {"strategy": "block", "block_structure": "128x128"}, "float-quantized"),
        WeightScheme("fp8", 8, "block", (128, 128)),
    ),
    "compressed int4": (_compressed(), WeightScheme("packed", 4, "group", (1, 128))),
    "compressed, no method": (
        {key: value for key, value in _compressed().items() if key != "quant_method"},
        WeightScheme("packed", 4, "group", (1, 128)),
    ),
    "compressed zeros": (
        _compressed(INT4 | {"symmetric": False, "strategy": "channel"}),
        WeightScheme("packed", 4, "channel", has_zeros=True),
    ),
    "awq, old keys": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
        WeightScheme("awq", 4, "group", (1, 64), has_zeros=True),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "dynamic": {"-:a": {}}},
        WeightScheme("gptq", 4, "group", (1, 128), True, has_act_order=True, zeros_minus_one=True),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        WeightScheme("gptq", 8, "channel", has_zeros=True),
    ),
    "compressed nvfp4": (
        _compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, NVFP4),
        WeightScheme("nvfp4_packed", 4, "tensor_group", (1, 16)),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*.gate"]},
        WeightScheme("nvfp4", 4, "group", (1, 16), has_quantized_inputs=True),
    ),
    "modelopt fp8, as in hf_quant_config.json": (
        {"quant_method": "modelopt", "producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["x"]}},
        WeightScheme("fp8", 8, "tensor", has_quantized_inputs=True),
    ),
    "auto-round": (
        AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 16}, ".*up_proj": {"bits": 8}}},
        WeightScheme("gptq", 4, "group", (1, 128), True, zeros_minus_one=True),
    ),
    "auto-round, one layer": (
        AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "extra_config": {LAYER: {"bits": 8, "group_size": -1}}},
        WeightScheme("gptq", 8, "channel", None, True),
    ),
    "auto-round, awq": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {".*down.*": {"group_size": 32}}},
        WeightScheme("awq", 4, "group", (1, 32), True),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        WeightScheme("bnb4", 4, "group", (1, 64)),
    ),
    "llm.int8": (
        {"quant_method": "bitsandbytes", "_load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
        WeightScheme("bnb_int8", 8, "channel"),
    ),
    "gguf": (
        {"quant_method": "gguf", "types": ["Q4_K", "Q6_K"]},
        WeightScheme("gguf", 8, "group", (1, 16), gguf_percent=153),
    ),
    "modelopt, mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {LAYER: {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "a": {"quant_algo": "FP8"}},
        },
        WeightScheme("nvfp4", 4, "group", (1, 16)),
    ),
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]},
        WeightScheme("mxfp4", 4, "group", (1, 32)),
    ),
}


@pytest.mark.parametrize(("values", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_reads_published_configurations(values, expected):
    scheme = _read(values)
    assert scheme.scheme_of(LAYER) == expected
    assert scheme.method in CHECKPOINT_QUANTIZATIONS


@pytest.mark.parametrize("status", ["compressed", "frozen", "calibration", None])
def test_labels_without_effect_on_the_weights_are_ignored(status):
    scheme = _read(_compressed(quantization_status=status, kv_cache_scheme={"num_bits": 8, "type": "float"}))
    assert scheme == _read(_compressed())


def test_an_empty_section_means_not_quantized():
    assert _read({}) is None


def test_a_named_target_precedes_the_class():
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4},
        "b": {"targets": ["re:.*down_proj$"], "weights": FP8, "format": "float-quantized"},
    }
    scheme = _read(_compressed(config_groups=groups, ignore=["lm_head", "re:.*gate$"]))
    assert scheme.scheme_of(LAYER).layout == "fp8"
    assert scheme.scheme_of("model.layers.0.mlp.up_proj").layout == "packed"
    for ignored in ("lm_head", "model.layers.0.mlp.gate"):
        with pytest.raises(ConfigError, match=rf"quantization_config: ignore: contains {ignored}, but"):
            scheme.scheme_of(ignored)


@pytest.mark.parametrize("pattern", ["model.layers.0*", "*down_proj", LAYER])
def test_patterns_of_modelopt_select_modules(pattern):
    scheme = _read({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [pattern]})
    assert scheme.scheme_of("model.layers.1.mlp.up_proj").layout == "fp8"
    with pytest.raises(ConfigError, match=rf"exclude_modules: contains {LAYER}, but"):
        scheme.scheme_of(LAYER)


def test_the_file_of_modelopt_replaces_a_missing_section_only():
    document = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    config = with_modelopt_file({"hidden_size": 1}, document)
    assert _read(config["quantization_config"]).scheme_of(LAYER).layout == "nvfp4"
    described = {"quantization_config": {"quant_method": "awq"}}
    assert with_modelopt_file(described, document) is described and with_modelopt_file([], document) == []
    with pytest.raises(ConfigError, match=r"quantization: expected an object, got \[\]"):
        _read(with_modelopt_file({}, [])["quantization_config"])


def test_quantization_must_match_the_checkpoint():
    awq = _read({"quant_method": "awq", "bits": 4, "group_size": 128})
    assert [resolve_quantization(name, None) for name in (None, *QUANTIZATIONS)] == [None, *QUANTIZATIONS]
    assert resolve_quantization(None, awq) is None and resolve_quantization("awq", awq) is None
    for name in ("int8", "gptq"):
        with pytest.raises(ConfigError, match=rf"^quantization: is '{name}', but quant_method .* is 'awq'; remove"):
            resolve_quantization(name, awq)
    with pytest.raises(ConfigError, match=r"^quantization: is 'awq', but .* has no quantization_config; .* use int8"):
        resolve_quantization("awq", None)


ERRORS = {
    "method": ({"quant_method": "quark"}, "quant_method: must be one of fp8, .*, gguf, got 'quark'"),
    "type of gguf": ({"quant_method": "gguf", "types": ["Q2_K"]}, "types: must be Q4_0 or .* or Q6_K, got 'Q2_K'"),
    "bits": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: must be 4 or 8, got 3"),
    "group": ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size: must be a positive integer, got 0"),
    "version": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: must be gemm, got 'gemv'"),
    "no zeros": ({"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": False}, "zero_point: must be True"),
    "marlin": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        "checkpoint_format: must be gptq or gptq_v2, got 'marlin'",
    ),
    "dynamic": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:x": {"bits": 8}}},
        r"dynamic: .*x'",
    ),
    "activations": ({"quant_method": "fp8", "activation_scheme": "x"}, "activation_scheme: must be dynamic or static"),
    "block": ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size: .* 2 positive integers, got"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: must be e4m3 or"),
    "format": (_compressed(format_name=NVFP4), f"format: must be one of .*{NVFP4} with float 4, got '{NVFP4} with int"),
    "nvfp4 groups": (_compressed({"num_bits": 4, "type": "float", "group_size": 16}, NVFP4), "must be tensor_group"),
    "algorithm": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo: must be FP8 or .*'NVFP4_AWQ'"),
    "packing": (
        AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"},
        "packing_format: must be auto_round:auto",
    ),
    "bits of a layer": (
        AUTO_ROUND | {"extra_config": {"a": {"bits": 2}}},
        "extra_config: a: bits: must be 4 or 8, got 2",
    ),
    "quantized inputs": (AUTO_ROUND | {"act_bits": 8}, r"act_bits: must be 16 \(quantized inputs .*\), got 8"),
    "data type": (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type: must be int, got 'mx_fp'"),
    "storage": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        "bnb_4bit_quant_storage: must be uint8, got 'bfloat16'",
    ),
    "neither 4 nor 8 bits": ({"quant_method": "bitsandbytes"}, "load_in_4bit: must be True, got False"),
    "no layers": ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers: must be an object"),
    "int3": (_compressed(INT4 | {"num_bits": 3}), "format: must be .*got 'pack-quantized with int 3'"),
    "strategy": (_compressed(INT4 | {"strategy": "tensor_group"}), "weights: strategy: must be tensor or channel or"),
    "asymmetric": (_compressed(FP8 | {"symmetric": False}, "float-quantized"), "weights: symmetric: must be true"),
    "sparse": (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: format: must be dense"),
    "rotated": (_compressed(transform_config={"config_groups": {"a": {}}}), "transform_config: must be null"),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups: must be an object with at least one group"),
    "pattern": (_compressed(ignore=["re:("]), "ignore: must be a valid pattern"),
    "long pattern": (_compressed(ignore=["re:" + "a" * 1000]), "ignore: must be a pattern of at most 1000 characters"),
}


@pytest.mark.parametrize(("values", "message"), ERRORS.values(), ids=ERRORS)
def test_error_names_the_key_and_what_is_supported(values, message):
    with pytest.raises(ConfigError, match=f"^config.json: quantization_config: .*{message}"):
        _read(values)
