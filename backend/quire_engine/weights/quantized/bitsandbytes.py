# SPDX-License-Identifier: Apache-2.0
"""Reads the formats of bitsandbytes: NF4 and FP4 with 4 bits, and LLM.int8().

A 4-bit weight is flattened and divided into blocks of adjacent numbers, which share a scale (`absmax`). A byte contains
two codes, and the higher bits come first. `quant_map` contains the numbers that the codes stand for. With double
quantization, the scales are codes of 8 bits themselves: `nested_quant_map` and `nested_absmax` contain their numbers
and scales, and an offset is added. `quant_state` is a JSON document with the shape of the weight and the size of a
block.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire_engine.weights.quantized.bit_packing import unpack_nibbles
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_engine.weights.quantized.scaled import Int8Tensor
from quire_engine.weights.quantized.weight_codes import WeightCodes
from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.quantization import WeightScheme

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
_MAP, _NESTED_MAP, _NESTED_SCALES = ".weight.quant_map", ".weight.nested_quant_map", ".weight.nested_absmax"


class BitsAndBytesTensor(QuantizedTensor):
    """A weight with 4 bits. See QuantizedTensor."""

    MARKER = ".weight"
    SCALES = (".weight.absmax",)
    REQUIRED = (_MAP,)
    OPTIONAL = (*_STATES, _NESTED_MAP, _NESTED_SCALES)

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        state_name = next((name for name in _STATES if name in slices), _STATES[0])
        self.require(state_name)
        state = self._read_state(state_name)
        shape, block = state.get_int_list("shape"), state.get_int("blocksize")
        if len(shape) != 2 or min(shape) < 1 or shape[1] % 2:
            raise state.error("shape", list(shape), "a positive and a positive even number")
        self.shape = rows, columns = shape[0], shape[1]
        self._block, self._size = block, math.gcd(columns, block)
        num_bytes = rows * columns // 2
        self._values = self.slice_of(self.MARKER, (num_bytes, 1), ("U8",))
        self._codebook: Tensor = self.slice_of(_MAP, (16,), ("F32",))[...]
        self._scales = self._read_scales(-(-rows * columns // block), state)
        self.column_multiple = self._size

    def compute_codes(self, rows: range, columns: range) -> WeightCodes:
        """See QuantizedTensor."""
        num_columns = self.shape[1]
        values = self._values[rows.start * num_columns // 2 : rows.stop * num_columns // 2, 0]
        pairs = unpack_nibbles(values).view(len(rows), -1, 2).flip(2).flatten(1)
        # A group is a part of a block that is in one row.
        first_columns = torch.arange(columns.start, columns.stop, self._size)
        starts = torch.arange(rows.start, rows.stop)[:, None] * num_columns + first_columns
        scales, codes = self._scales[starts // self._block], pairs[:, columns.start : columns.stop]
        return WeightCodes(codes, scales, None, (1, self._size), 4, codebook=self._codebook)

    def _read_state(self, name: str) -> HFConfigReader:
        """Return the JSON document with the shape and the size of a block."""
        data = self.slice_of(name, tuple(self._slices[name].get_shape()), ("U8",))[...]
        try:
            document = json.loads(data.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.module}{name} is not a JSON document; download the checkpoint again") from error
        return HFConfigReader(document, location=f"{self.module}{name}")

    def _read_scales(self, num_blocks: int, state: HFConfigReader) -> Tensor:
        """Return the scales of all blocks, as [num_blocks] float32."""
        scales: Tensor
        if _NESTED_SCALES not in self._slices:
            scales = self.scales_slice((num_blocks,), ("F32",))[...]
            return scales
        self.require(_NESTED_MAP)
        block, offset = state.get_int("nested_blocksize"), state.get_float("nested_offset")
        codes = self.scales_slice((num_blocks,), ("U8",))[...].int()
        table = self.slice_of(_NESTED_MAP, (256,), ("F32",))[...]
        nested = self.slice_of(_NESTED_SCALES, (-(-num_blocks // block),), ("F32",))[...]
        scales = table[codes] * nested.repeat_interleave(block)[:num_blocks] + offset
        return scales


class BitsAndBytesInt8Tensor(Int8Tensor):
    """A weight of LLM.int8(), with a scale for each output feature. Inputs are not quantized."""

    SCALES = (".SCB",)
    UNUSED = (".weight_format",)

    def __init__(self, module: str, slices: Mapping[str, Any], scheme: WeightScheme) -> None:
        super().__init__(module, slices, scheme)
        self._scales = self._scales / 127
