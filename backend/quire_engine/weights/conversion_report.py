# SPDX-License-Identifier: Apache-2.0
"""The command that converts weights, and the summary of a conversion."""

from dataclasses import dataclass

CONVERT_COMMAND = "python -m quire_engine convert"


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """Summary of the files that a conversion wrote."""

    num_files: int
    num_tensors: int
    num_bytes: int
    """Bytes of all tensors."""
