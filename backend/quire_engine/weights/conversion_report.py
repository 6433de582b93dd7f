# SPDX-License-Identifier: Apache-2.0
"""Summary of a conversion of weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Summary of the files that a conversion wrote."""

    num_files: int
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
