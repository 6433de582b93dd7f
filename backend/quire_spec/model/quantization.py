# SPDX-License-Identifier: Apache-2.0
"""Describes how a checkpoint is quantized.

The description is read from `quantization_config` of config.json. This module does not import torch.

The package `weights/quantized/` of the engine reads the tensors. The planner checks that `spec.engine.quantization`
matches the method. The methods, formats and keys have the names that quantization tools write into checkpoints.
"""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_spec.errors import ConfigError
from quire_spec.model import capabilities
from quire_spec.model.hf_config import HFConfigReader

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that describe the quantization. The second one is the key of old releases of
compressed-tensors."""
MODELOPT_FILE = "hf_quant_config.json"
"""File in which ModelOpt describes the quantization. Old releases wrote only this file, and no section of
config.json."""
FP8_BLOCK = (128, 128)
"""Size of a block of float8_e4m3fn weights, as a number of output features and a number of input features. The kernels
support only this block size."""
LAYOUT_BY_FORMAT = {
    ("naive-quantized", "float", 8): "fp8",
    ("float-quantized", "float", 8): "fp8",
    ("naive-quantized", "int", 8): "int8",
    ("int-quantized", "int", 8): "int8",
    ("pack-quantized", "int", 4): "packed",
    ("pack-quantized", "int", 8): "packed",
    ("nvfp4-pack-quantized", "float", 4): "nvfp4_packed",
}
"""The key is the format, the type and the number of bits of a compressed-tensors group. The value is the layout of the
group's tensors."""
_STRATEGIES = ("tensor", "channel", "group", "block")
NVFP4_GROUP = 16
"""Number of input features that share a scale in NVFP4."""
_MODELOPT_SCHEMES = {
    "FP8": ("fp8", 8, "tensor", None, True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", 8, "channel", None, True),
    "FP8_PB_WO": ("fp8", 8, "block", FP8_BLOCK, False),
    "NVFP4": ("nvfp4", 4, "group", (1, NVFP4_GROUP), True),
    "W4A16_NVFP4": ("nvfp4", 4, "group", (1, NVFP4_GROUP), False),
}
"""Maps quant_algo of ModelOpt to a layout, bits, a strategy, a block, and whether inputs are quantized."""
_BITSANDBYTES_BLOCK = 64
"""Default number of weights that share a scale. The files contain the number."""
_MIXED = "MIXED_PRECISION"
_MEMORY_PERCENT = {"nvfp4": 134, "nvfp4_packed": 134, "bnb4": 110}
_AUTO_ROUND_FORMATS = {
    "auto_round:auto_gptq": ("gptq", True),
    "auto_round:gptqmodel": ("gptq", False),
    "auto_round": ("gptq", False),
    "auto_round:auto_awq": ("awq", False),
}
"""Maps packing_format of AutoRound to a layout, and to whether every zero point is stored minus 1."""
_UNQUANTIZED_BITS = 16
_GGUF_PERCENT = {"Q4_0": 104, "Q8_0": 104, "Q4_K": 134, "Q5_K": 182, "Q6_K": 153}
"""Maps a quantized type of GGUF to its `memory_percent`. The scales and minima of the K types have 6 or 8 bits in the
files and 32 in memory, and codes of 5 and 6 bits have 8."""
_MAX_PATTERN_LENGTH = 1000
_LINEAR_CLASS = "Linear"


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Describes how the quantized weights of some linear layers are stored."""

    layout: str
    """Format that defines which tensors there are and how they are arranged: fp8, int8, packed, awq, gptq, mxfp4, nvfp4
    (of ModelOpt), nvfp4_packed (of compressed-tensors), bnb4 or bnb_int8 (of bitsandbytes), or
    gguf."""
    num_bits: int
    strategy: str
    """Which weights share a scale.

    With tensor, the whole tensor has one scale. With channel, each output feature has one scale. With group, each
    output feature has one scale for each group of input features. With block, each block has one scale.
    """
    block: tuple[int, int] | None = None
    """A scale is shared by this number of output features and this number of input features. Set only for the
    strategies group and block."""
    has_zeros: bool = False
    """Whether the checkpoint contains zero points."""
    has_act_order: bool = False
    """Whether a group can contain input features that are not adjacent."""
    has_quantized_inputs: bool = False
    """Whether config.json of the checkpoint requires that the inputs of the layers are quantized, too."""
    zeros_minus_one: bool = False
    """Whether the checkpoint stores every zero point minus 1, as the first version of GPTQ did."""

    gguf_percent: int = 104
    """`memory_percent` of GGUF."""

    @property
    def has_kernel(self) -> bool:
        """Whether these weights can stay quantized in memory on a device that has kernels for quantized weights."""
        if self.layout == "fp8":
            return self.block in (None, FP8_BLOCK)
        if self.layout in ("int8", "bnb_int8"):
            return self.block is None
        return self.num_bits == 4 or self.layout == "gguf"

    @property
    def memory_percent(self) -> int:
        """How many bytes the weights need in memory if they stay quantized, as a percentage of their bytes in the
        files."""
        # The engine stores more scales than the files contain. A float8_e4m3fn block has one scale in the files, but
        # one scale for each of its rows in memory. A scale of NVFP4 or of double quantization has one byte in the
        # files, and four in memory.
        return self.gguf_percent if self.layout == "gguf" else _MEMORY_PERCENT.get(self.layout, 104)


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """Quantization of a checkpoint."""

    method: str
    """quant_method of config.json."""
    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    """Each pair consists of targets, and of the scheme for the modules that these targets select. A target is the name
    of a module, a pattern that starts with `re:`, or the class `Linear`."""
    ignore: tuple[str, ...]
    """Modules that are not quantized. Each item is a name or a pattern that starts with `re:`."""
    ignore_key: str
    """The key of config.json from which `ignore` was read."""

    @classmethod
    def from_hf_config(cls, config: HFConfigReader) -> Self | None:
        """Read the section `quantization_config` of config.json. Return None if the section is empty.

        Raises:
            ConfigError: the method or the value of a key is not supported. The message names the key and the supported
                values.
        """
        if config.is_empty:
            return None
        # Files that old releases of compressed-tensors wrote have no quant_method.
        method = config.get_str("quant_method", "compressed-tensors" if "config_groups" in config else None)
        if method not in _PARSERS:
            raise config.error("quant_method", method, f"one of {', '.join(_PARSERS)}")
        if method == "modelopt" and "quantization" in config:
            config = config.get_section("quantization")
        groups = _PARSERS[method](config)
        ignore_key = next((key for key in _IGNORE_KEYS if key in config), _IGNORE_KEYS[0])
        ignore = config.get_str_list(ignore_key) if ignore_key in config else ()
        for pattern in (*ignore, *(target for targets, _ in groups for target in targets)):
            _check_pattern(config, pattern)
        return cls(method, groups, ignore, ignore_key)

    def has_kernels(self, tensor_parallel_size: int, has_experts: bool = False) -> bool:
        """Return whether all weights can stay quantized in memory on a device that has kernels for quantized weights.

        With act order, the input features of a rank belong to many groups, none of which is complete. The kernels do
        not support this. The kernels also cannot reorder the inputs separately for each expert.
        """
        needs_order = tensor_parallel_size > 1 or has_experts
        return all(scheme.has_kernel and not (scheme.has_act_order and needs_order) for _, scheme in self.groups)

    @property
    def memory_percent(self) -> int:
        """See WeightScheme. The largest value of all groups."""
        return max(scheme.memory_percent for _, scheme in self.groups)

    @property
    def drops_fp4_inputs(self) -> bool:
        """Whether config.json requires 4-bit inputs for some layers. The engine does not quantize inputs to 4 bits."""
        return any(scheme.num_bits == 4 and scheme.has_quantized_inputs for _, scheme in self.groups)

    def scheme_of(self, module: str) -> WeightScheme:
        """Return the scheme of `module`. `module` is the name of a module that has quantized tensors in the checkpoint.

        Raises:
            ConfigError: according to config.json, the module is not quantized.
        """
        if any(_is_ignored(pattern, module, self.method) for pattern in self.ignore):
            raise ConfigError(
                f"config.json: quantization_config: {self.ignore_key}: contains {module}, but the checkpoint "
                "has quantized tensors of this module; remove the entry"
            )
        for targets, scheme in self.groups:
            if any(target != _LINEAR_CLASS and _matches(target, module) for target in targets):
                return scheme
        for targets, scheme in self.groups:
            if _LINEAR_CLASS in targets:
                return scheme
        raise ConfigError(
            f"config.json: quantization_config: config_groups: {module} is not a target of any group, but the "
            "checkpoint has quantized tensors of this module; add it to the targets of its group"
        )


_IGNORE_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")


def _matches(pattern: str, module: str) -> bool:
    """Return whether `pattern` selects `module`. `pattern` is a name, or starts with `re:`."""
    return module == pattern or (pattern.startswith("re:") and re.match(pattern[3:], module) is not None)


def _is_ignored(pattern: str, module: str, method: str) -> bool:
    """Return whether a pattern of modules that are not quantized selects `module`. In ModelOpt, the pattern can contain
    wildcards. In other methods, except compressed-tensors, it can be a part of the module's name."""
    if _matches(pattern, module):
        return True
    if method == "modelopt":
        return fnmatch.fnmatchcase(module, pattern)
    return method != "compressed-tensors" and f".{pattern}." in f".{module}."


def _check_pattern(config: HFConfigReader, pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern[3 : _MAX_PATTERN_LENGTH + 1])
    except (re.error, RecursionError, OverflowError) as error:
        raise config.error("ignore", pattern, f"a valid pattern ({error})") from error
    if len(pattern) > _MAX_PATTERN_LENGTH:
        raise config.error("ignore", pattern, f"a pattern of at most {_MAX_PATTERN_LENGTH} characters")


def _require(config: HFConfigReader, key: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        raise config.error(key, value, " or ".join(map(str, supported)))


def _for_all(scheme: WeightScheme) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    return (((_LINEAR_CLASS,), scheme),)


def _group_block(config: HFConfigReader, key: str) -> tuple[str, tuple[int, int] | None]:
    """Return the strategy and the block that belong to a group size.

    -1 means that each output feature has one group.
    """
    if config.get_raw(key) == -1:
        return "channel", None
    return "group", (1, config.get_int(key))


def _parse_fp8(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    # The engine ignores static scales of activations. It either computes a scale for each token, or it does not
    # quantize the activations.
    _require(config, "activation_scheme", config.get_str("activation_scheme", "dynamic"), ("dynamic", "static"))
    _require(config, "fmt", config.get_str("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    if "weight_block_size" not in config:
        return _for_all(WeightScheme("fp8", 8, "tensor"))
    return _for_all(WeightScheme("fp8", 8, "block", _get_block(config, "weight_block_size")))


def _parse_fbgemm_fp8(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    return _for_all(WeightScheme("fp8", 8, "channel"))


def _parse_mxfp4(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    return _for_all(WeightScheme("mxfp4", 4, "group", (1, 32)))


def _parse_awq(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    bits_key = "bits" if "bits" in config else "w_bit"
    _require(config, bits_key, config.get_int(bits_key), (4,))
    _require(config, "version", config.get_str("version", "gemm").lower(), ("gemm",))
    strategy, block = _group_block(config, "group_size" if "group_size" in config else "q_group_size")
    _require(config, "zero_point", config.get_bool("zero_point", True), (True,))
    return _for_all(WeightScheme("awq", 4, strategy, block, has_zeros=True))


def _parse_gptq(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    bits = config.get_int("bits")
    _require(config, "bits", bits, (4, 8))
    version = config.get_str("checkpoint_format", "gptq")
    _require(config, "checkpoint_format", version, ("gptq", "gptq_v2"))
    dynamic = config.get_section("dynamic")
    # A name that begins with - excludes modules. The tensors of these modules are not quantized.
    if changed := [key for key in dynamic if not key.startswith("-")]:
        raise config.error(
            "dynamic",
            changed[0],
            "a pattern that begins with '-' (different settings for some modules are not supported)",
        )
    strategy, block = _group_block(config, "group_size")
    act_order, minus_one = config.get_bool("desc_act", False), version == "gptq"
    return _for_all(WeightScheme("gptq", bits, strategy, block, True, act_order, zeros_minus_one=minus_one))


def _parse_auto_round(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    _require(config, "data_type", config.get_str("data_type", "int"), ("int",))
    default = _auto_round_scheme(config, config)
    groups: list[tuple[tuple[str, ...], WeightScheme]] = [((_LINEAR_CLASS,), default)]
    layers = config.get_section("extra_config")
    for name in layers:
        layer = layers.get_section(name)
        # With 16 bits, the layer is not quantized.
        if layer.get_int("bits", config.get_int("bits")) < _UNQUANTIZED_BITS:
            is_name = re.fullmatch(r"[\w.]+", name) is not None
            groups.append(((name if is_name else f"re:{name}",), _auto_round_scheme(config, layer)))
    return tuple(groups)


def _auto_round_scheme(config: HFConfigReader, layer: HFConfigReader) -> WeightScheme:
    """Return the scheme of a layer. `config` contains the values that `layer` does not contain."""
    packing = config.get_str("packing_format", "auto_round:auto_gptq")
    _require(config, "packing_format", packing, tuple(_AUTO_ROUND_FORMATS))
    layout, minus_one = _AUTO_ROUND_FORMATS[packing]
    bits = layer.get_int("bits", config.get_int("bits"))
    _require(layer, "bits", bits, (4,) if layout == "awq" else (4, 8))
    act_bits = layer.get_int("act_bits", config.get_int("act_bits", _UNQUANTIZED_BITS))
    if act_bits < _UNQUANTIZED_BITS:
        raise layer.error("act_bits", act_bits, "16 (quantized inputs are not supported)")
    strategy, block = _group_block(layer if "group_size" in layer else config, "group_size")
    return WeightScheme(layout, bits, strategy, block, True, zeros_minus_one=minus_one)


def _parse_bitsandbytes(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    if config.get_bool("load_in_8bit", False) or config.get_bool("_load_in_8bit", False):
        return _for_all(WeightScheme("bnb_int8", 8, "channel"))
    is_4bit = config.get_bool("load_in_4bit", False) or config.get_bool("_load_in_4bit", False)
    _require(config, "load_in_4bit", is_4bit, (True,))
    _require(config, "bnb_4bit_quant_type", config.get_str("bnb_4bit_quant_type", "fp4"), ("nf4", "fp4"))
    _require(config, "bnb_4bit_quant_storage", config.get_str("bnb_4bit_quant_storage", "uint8"), ("uint8",))
    return _for_all(WeightScheme("bnb4", 4, "group", (1, _BITSANDBYTES_BLOCK)))


def _parse_gguf(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    """Read what the converter of GGUF files has written."""
    types = config.get_str_list("types")
    for name in types:
        _require(config, "types", name, tuple(_GGUF_PERCENT))
    # Layers can have different types. A group has at least 16 features.
    percent = max((_GGUF_PERCENT[name] for name in types), default=100)
    return _for_all(WeightScheme("gguf", 8, "group", (1, 16), gguf_percent=percent))


def _parse_compressed_tensors(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    if not config.get_section("transform_config").is_empty:
        raise config.error("transform_config", config.get_raw("transform_config"), "null (no other value is supported)")
    sparsity = config.get_section("sparsity_config")
    if not sparsity.is_empty:
        _require(sparsity, "format", sparsity.get_str("format"), ("dense",))
    groups = config.get_section("config_groups")
    if groups.is_empty:
        raise config.error("config_groups", {}, "an object with at least one group")
    return tuple(_parse_group(config, groups.get_section(name)) for name in groups)


def _parse_group(config: HFConfigReader, group: HFConfigReader) -> tuple[tuple[str, ...], WeightScheme]:
    """Read one item of `config_groups`."""
    format_name = group.get_str("format", config.get_str("format", "mixed-precision"))
    weights = group.get_section("weights")
    if not group.get_section("output_activations").is_empty:
        raise group.error("output_activations", "an object", "null (no other value is supported)")
    kind, bits = weights.get_str("type", "int"), weights.get_int("num_bits", 8)
    layout = LAYOUT_BY_FORMAT.get((format_name, kind, bits))
    if layout is None:
        known = ", ".join(f"{name} with {kind} {bits}" for name, kind, bits in LAYOUT_BY_FORMAT)
        raise config.error("format", f"{format_name} with {kind} {bits}", f"one of {known}")
    default = "group" if "group_size" in weights and weights.get_raw("group_size") != -1 else "channel"
    strategy = weights.get_str("strategy", default)
    _require(weights, "strategy", strategy, ("tensor_group",) if layout == "nvfp4_packed" else _STRATEGIES)
    is_symmetric = weights.get_bool("symmetric", True)
    if layout != "packed" and not is_symmetric:
        raise weights.error("symmetric", False, f"true with format {format_name} (only pack-quantized supports false)")
    block = None
    if strategy in ("group", "tensor_group"):
        block = (1, weights.get_int("group_size"))
    elif strategy == "block":
        block = _get_block(weights, "block_structure")
    act_order = weights.get_raw("actorder") in ("group", "dynamic")
    has_quantized_inputs = not group.get_section("input_activations").is_empty
    scheme = WeightScheme(layout, bits, strategy, block, not is_symmetric, act_order, has_quantized_inputs)
    return group.get_str_list("targets"), scheme


def _parse_modelopt(config: HFConfigReader) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
    algorithm = config.get_str("quant_algo").upper()
    if algorithm != _MIXED:
        return _for_all(_modelopt_scheme(config, algorithm))
    layers = config.get_section("quantized_layers")
    if layers.is_empty:
        raise config.error("quantized_layers", {}, "an object with the layers that are quantized")
    targets: dict[WeightScheme, list[str]] = {}
    for name in layers:
        layer = layers.get_section(name)
        targets.setdefault(_modelopt_scheme(layer, layer.get_str("quant_algo").upper()), []).append(name)
    return tuple((tuple(names), scheme) for scheme, names in targets.items())


def _modelopt_scheme(config: HFConfigReader, algorithm: str) -> WeightScheme:
    _require(config, "quant_algo", algorithm, tuple(_MODELOPT_SCHEMES))
    layout, bits, strategy, block, has_quantized_inputs = _MODELOPT_SCHEMES[algorithm]
    if layout == "nvfp4" and "group_size" in config:
        _require(config, "group_size", config.get_int("group_size"), (NVFP4_GROUP,))
    return WeightScheme(layout, bits, strategy, block, has_quantized_inputs=has_quantized_inputs)


def _get_block(config: HFConfigReader, key: str) -> tuple[int, int]:
    value = config.get_raw(key)
    # Old releases of compressed-tensors wrote "128x128".
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", value, re.ASCII)):
        block: tuple[int, ...] = int(match[1]), int(match[2])
    else:
        block = config.get_int_list(key)
    if len(block) != 2 or min(block) < 1:
        raise config.error(key, list(block), "a list of 2 positive integers")
    return block[0], block[1]


_PARSERS = {
    "fp8": _parse_fp8,
    "fbgemm_fp8": _parse_fbgemm_fp8,
    "compressed-tensors": _parse_compressed_tensors,
    "awq": _parse_awq,
    "gptq": _parse_gptq,
    "mxfp4": _parse_mxfp4,
    "modelopt": _parse_modelopt,
    "auto-round": _parse_auto_round,
    "bitsandbytes": _parse_bitsandbytes,
    "gguf": _parse_gguf,
}
assert tuple(_PARSERS) == capabilities.CHECKPOINT_QUANTIZATIONS


def with_modelopt_file(config: Any, document: Any) -> Any:
    """Return the parsed config.json with the content of MODELOPT_FILE as `quantization_config`.

    Args:
        config: the parsed config.json. If it describes its quantization or is not an object, it is returned unchanged.
        document: the parsed MODELOPT_FILE; None if it does not exist.
    """
    if document is None or not needs_modelopt_file(config):
        return config
    fields = document if isinstance(document, Mapping) else {"quantization": document}
    return {**config, QUANTIZATION_KEYS[0]: {**fields, "quant_method": "modelopt"}}


def needs_modelopt_file(config: Any) -> bool:
    """Return whether the parsed config.json lacks a description of the quantization, so that MODELOPT_FILE can contain
    it."""
    return isinstance(config, Mapping) and not any(config.get(key) for key in QUANTIZATION_KEYS)


def resolve_quantization(quantization: str | None, scheme: QuantizationScheme | None) -> str | None:
    """Return the format to which the engine must quantize the weights while it loads them.

    None: it does not quantize them.

    Args:
        quantization: see EngineConfig.
        scheme: quantization of the checkpoint; None if the checkpoint is not quantized.

    Raises:
        ConfigError: `quantization` does not match the checkpoint.
    """
    if scheme is None and quantization in (None, *capabilities.QUANTIZATIONS):
        return quantization
    if scheme is None:
        raise ConfigError(
            f"quantization: is {quantization!r}, but config.json of the checkpoint has no quantization_config; remove "
            f"quantization, or use {' or '.join(capabilities.QUANTIZATIONS)} to quantize weights when they are loaded"
        )
    if quantization not in (None, scheme.method):
        raise ConfigError(
            f"quantization: is {quantization!r}, but quant_method in config.json of the checkpoint is "
            f"{scheme.method!r}; remove quantization"
        )
    return None
