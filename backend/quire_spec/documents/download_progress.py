# SPDX-License-Identifier: Apache-2.0
"""How far a model's download is: what its program answers on GET /progress and the operator reads."""

import json
from dataclasses import dataclass

from quire_spec.dataclass_json import from_json
from quire_spec.errors import ConfigError

PROGRESS_PATH = "/progress"
PROGRESS_PORT_VARIABLE = "QUIRE_PROGRESS_PORT"
"""Environment variable that says on which port the program answers. Not an argument: a plan keeps its image when the
operator is upgraded, and the program of an older image would refuse an argument that it does not know."""
_MAX_BYTES = 2**63
"""Bytes that nobody has."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Where a download is."""

    bytes: int
    """That are on the volume, of whole and partial files, also from earlier runs."""
    total: int | None = None
    """Of all files; None while that is not known."""
    bytes_per_s: int | None = None
    """That came lately; None before there is a measurement."""

    @property
    def percent(self) -> int | None:
        """Of the total, rounded down; None where the total is not known."""
        return None if not self.total else min(self.bytes * 100 // self.total, 100)

    @property
    def eta_s(self) -> int | None:
        """Seconds that the rest takes at this rate; None where that cannot be said."""
        if self.total is None or not self.bytes_per_s:
            return None
        return max(self.total - self.bytes, 0) // self.bytes_per_s

    @classmethod
    def parse(cls, text: str) -> "DownloadProgress | None":
        """Read what a program answered, of this release or a later one; None for anything else."""
        try:
            progress = from_json(cls, json.loads(text), ignore_unknown=True)
        except (ValueError, RecursionError, ConfigError):
            return None
        numbers = (progress.bytes, progress.total, progress.bytes_per_s)
        return progress if all(number is None or 0 <= number < _MAX_BYTES for number in numbers) else None


def format_bytes(size: int) -> str:
    """Bytes for people, such as 3.2 GiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >= 2**shift:
            return f"{size / 2**shift:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"
