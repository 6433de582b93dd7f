# SPDX-License-Identifier: Apache-2.0
"""Conversion of float32 numbers to narrower types. They are rounded to the nearest number, as by PyTorch."""

import numpy as np
import numpy.typing as npt


def convert(vector: bytes, dtype: str, byte_order: str) -> bytes:
    """Return float32 numbers in little-endian order as numbers of another type.

    Args:
        vector: the numbers.
        dtype: float32, float16, bfloat16, fp8_e4m3 or fp8_e5m2.
        byte_order: little or big.
    """
    order = ">" if byte_order == "big" else "<"
    numbers: npt.NDArray[np.float32] = np.frombuffer(vector, "<f4")
    if dtype == "float32":
        return numbers.astype(f"{order}f4").tobytes()
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype(f"{order}f2").tobytes()
    if dtype == "bfloat16":
        bits = numbers.view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(f"{order}u2").tobytes()
    return _to_fp8(numbers, dtype).tobytes()


def _to_fp8(numbers: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint8]:
    """Return the codes of the nearest numbers with 8 bits. What is too large becomes the largest number in e4m3, and
    infinity in e5m2, whose code follows that of the largest number."""
    mantissa_bits, bias, num_codes = (3, 7, 127) if dtype == "fp8_e4m3" else (2, 15, 125)
    codes = np.arange(num_codes)
    exponents, fractions = codes >> mantissa_bits, (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    values = np.where(exponents, 1 + fractions, fractions) * 2.0 ** (np.maximum(exponents, 1) - bias)
    middles = (values[1:] + values[:-1]) / 2
    sizes = np.abs(numbers).astype(np.float64)
    nearest = np.searchsorted(middles, sizes)
    # In the middle of two numbers, the even code is chosen.
    is_middle = middles[np.minimum(nearest, len(middles) - 1)] == sizes
    nearest += is_middle & (nearest % 2 == 1)
    encoded: npt.NDArray[np.uint8] = (nearest + (np.signbit(numbers) << 7)).astype(np.uint8)
    return encoded
