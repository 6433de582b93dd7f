# SPDX-License-Identifier: Apache-2.0
"""Progress of a model download: the document that the download program serves on GET /progress for the operator."""

import json
from dataclasses import dataclass

from quire_spec.dataclass_json import from_json
from quire_spec.errors import ConfigError

PROGRESS_PATH = "/progress"
PROGRESS_PORT_VARIABLE = "QUIRE_PROGRESS_PORT"
"""Environment variable with the port of GET /progress. The port is not an argument, because a newer operator can run an
older image whose download program rejects unknown arguments."""
_MAX_BYTES = 2**63
"""Upper bound of valid byte counts; `parse` rejects larger ones."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Progress of one download."""

    bytes: int
    """Bytes of complete and partial files on the volume, including files that earlier runs downloaded."""
    total: int | None = None
    """Bytes of all files; None while unknown."""
    bytes_per_s: int | None = None
    """Recent download rate in bytes per second; None before the first measurement."""

    @property
    def percent(self) -> int | None:
        """Percentage of the total, rounded down; None while the total is unknown."""
        return None if not self.total else min(self.bytes * 100 // self.total, 100)

    @property
    def eta_s(self) -> int | None:
        """Seconds until the download ends at its current rate; None while the total or the rate is unknown."""
        if self.total is None or not self.bytes_per_s:
            return None
        return max(self.total - self.bytes, 0) // self.bytes_per_s

    @classmethod
    def parse(cls, text: str) -> "DownloadProgress | None":
        """Parse a response from this or a later release; return None if `text` is not such a response."""
        try:
            progress = from_json(cls, json.loads(text), ignore_unknown=True)
        except (ValueError, RecursionError, ConfigError):
            return None
        numbers = (progress.bytes, progress.total, progress.bytes_per_s)
        return progress if all(number is None or 0 <= number < _MAX_BYTES for number in numbers) else None


def format_bytes(size: int) -> str:
    """Format bytes with a unit, such as 3.2 GiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >= 2**shift:
            return f"{size / 2**shift:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"
