# SPDX-License-Identifier: Apache-2.0
"""Finds the quantized tensors of a checkpoint. It recognizes them by their names in the files."""

from quire_engine.weights.quantized.awq import AWQTensor
from quire_engine.weights.quantized.bitsandbytes import BitsAndBytesInt8Tensor, BitsAndBytesTensor
from quire_engine.weights.quantized.gguf import GGUF_TENSORS
from quire_engine.weights.quantized.gptq import GPTQTensor
from quire_engine.weights.quantized.mxfp4 import MXFP4Tensor
from quire_engine.weights.quantized.nvfp4 import NVFP4Tensor, PackedNVFP4Tensor
from quire_engine.weights.quantized.pack_quantized import PackQuantizedTensor
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.scaled import FP8Tensor, Int8Tensor, ScaledTensor
from quire_engine.weights.quantized.stacked_experts import (
    EXPERT,
    StackedTensor,
    expert_matrix,
    stacked_name,
    stacked_tensor,
)
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.errors import ConfigError
from quire_spec.model.quantization import QuantizationScheme

_CLASS_BY_LAYOUT: dict[str, type[QuantizedTensor]] = {
    "fp8": FP8Tensor,
    "int8": Int8Tensor,
    "packed": PackQuantizedTensor,
    "awq": AWQTensor,
    "gptq": GPTQTensor,
    "bnb4": BitsAndBytesTensor,
    "bnb_int8": BitsAndBytesInt8Tensor,
    "nvfp4": NVFP4Tensor,
    "nvfp4_packed": PackedNVFP4Tensor,
}
_WEIGHT = ".weight"
_PACKED_MARKERS = (".qweight", ".weight_packed", *GGUF_TENSORS)
_CODE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8", "U8")
_UNUSED_SUFFIXES = (".k_scale", ".v_scale", ".q_scale")
"""Name suffixes of scales of the KV cache. The engine does not read them."""
_MARKERS = (
    *_PACKED_MARKERS,
    *(suffix for tensor_class in _CLASS_BY_LAYOUT.values() for suffix in tensor_class.SCALES if suffix != ".scales"),
    MXFP4Tensor.MARKER,
)


class QuantizedTensors:
    """The quantized tensors among the files of a checkpoint."""

    def __init__(self, files: TensorFiles, scheme: QuantizationScheme | None) -> None:
        self.files = files
        self._scheme = scheme
        self._modules: set[str] = set()
        self._found: set[str] = set()

    def find(self, name: str) -> QuantizedTensor | MXFP4Tensor | StackedTensor | None:
        """Return the quantized tensor that replaces tensor `name` in the files, or None if `name` is not quantized.

        Raises:
            ConfigError: a part of the tensor is missing or wrong, or the tensor contradicts config.json.
        """
        if self._scheme is None:
            return None
        if f"{name}{MXFP4Tensor.MARKER}" in self.files:
            return self._find_mxfp4(name)
        module = name.removesuffix(_WEIGHT)
        marker = self._marker(module)
        if marker is None or not name.endswith(_WEIGHT):
            return self._find_stacked(name)
        scheme = self._scheme.scheme_of(module)
        tensor_class = GGUF_TENSORS.get(marker) if scheme.layout == "gguf" else _CLASS_BY_LAYOUT.get(scheme.layout)
        if tensor_class is None or marker != tensor_class.MARKER:
            raise ConfigError(
                f"config.json: quantization_config: describes {module} as {scheme.layout}, but the checkpoint contains "
                f"{module}{marker}; correct quant_method or format"
            )
        used = (*dict.fromkeys((marker, *tensor_class.SCALES)), *tensor_class.REQUIRED, *tensor_class.OPTIONAL)
        suffixes = [suffix for suffix in used if f"{module}{suffix}" in self.files]
        self._modules.add(module)
        self._found.update(f"{module}{suffix}" for suffix in (*suffixes, *tensor_class.UNUSED))
        return tensor_class(module, {suffix: self.files.get_slice(f"{module}{suffix}") for suffix in suffixes}, scheme)

    def find_linear(self, module: str) -> QuantizedTensor | None:
        """Return the quantized weight of a linear layer. `module` is the layer's name in the model. `find` describes
        the errors."""
        tensor = self.find(f"{self.files.name_in_file(module)}{_WEIGHT}")
        assert not isinstance(tensor, MXFP4Tensor | StackedTensor)
        return tensor

    def is_known(self, name: str) -> bool:
        """Return whether a tensor in the files is expected.

        It is expected if it belongs to a tensor that `find` returned, or if the engine ignores tensors of this name.
        """
        return name in self._found or (
            self._scheme is not None and (name.endswith(_UNUSED_SUFFIXES) or self._is_zero_bias(name))
        )

    def describe_missing_config(self) -> str:
        """Return a hint for an error message, or "".

        The hint is returned if the checkpoint has quantized tensors, but config.json does not describe them.
        """
        if self._scheme is None and any(name.endswith(_MARKERS) for name in self.files.file_by_tensor):
            return "; the checkpoint is quantized, but config.json has no quantization_config"
        return ""

    def _find_mxfp4(self, name: str) -> MXFP4Tensor:
        assert self._scheme is not None
        scheme = self._scheme.scheme_of(name)
        if scheme.layout != "mxfp4":
            raise ConfigError(
                f"config.json: quantization_config: describes {name} as {scheme.layout}, but the checkpoint contains "
                f"{name}{MXFP4Tensor.MARKER}; set quant_method to mxfp4"
            )
        names = {s: f"{name}{s}" for s in (MXFP4Tensor.MARKER, MXFP4Tensor.SCALES) if f"{name}{s}" in self.files}
        self._found.update(names.values())
        return MXFP4Tensor(name, {suffix: self.files.get_slice(full) for suffix, full in names.items()}, scheme)

    def _find_stacked(self, name: str) -> ScaledTensor | StackedTensor | None:
        """Return the projection of one expert or of all experts, if the files contain it as codes of all experts."""
        assert self._scheme is not None
        match = None if name in self.files else EXPERT.fullmatch(name)
        stacked = name if match is None else stacked_name(match)
        if stacked not in self.files or stacked.endswith(_WEIGHT):
            return None
        if self.files.get_slice(stacked).get_dtype() not in _CODE_DTYPES:
            return None
        scheme = self._scheme.scheme_of(name.removesuffix(_WEIGHT))
        tensor_class = _CLASS_BY_LAYOUT.get(scheme.layout)
        if tensor_class is None or not issubclass(tensor_class, ScaledTensor):
            raise ConfigError(
                f"config.json: quantization_config: describes {stacked} as {scheme.layout}, but the checkpoint "
                "contains codes of all experts in one tensor; only fp8 and int8 are stored like this"
            )
        names = {s: f"{stacked}{s.removeprefix(_WEIGHT)}" for s in (tensor_class.MARKER, *tensor_class.SCALES)}
        names = {suffix: each for suffix, each in names.items() if each in self.files}
        self._found.update(names.values())
        slices = {suffix: self.files.get_slice(each) for suffix, each in names.items()}
        if match is None:
            return stacked_tensor(tensor_class, stacked, slices, scheme)
        return expert_matrix(tensor_class, stacked, slices, scheme, match)

    def _marker(self, module: str) -> str | None:
        """Return the name suffix of the tensor that contains a module's values, or None if the module is not
        quantized."""
        for marker in _PACKED_MARKERS:
            if f"{module}{marker}" in self.files:
                return marker
        name = f"{module}{_WEIGHT}"
        return _WEIGHT if name in self.files and self.files.get_slice(name).get_dtype() in _CODE_DTYPES else None

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias that contains only zeros.

        AutoGPTQ adds such a bias to each layer that does not have one.
        """
        module = name.removesuffix(".bias")
        return module in self._modules and module != name and not self.files.get_slice(name)[...].any()
