# SPDX-License-Identifier: Apache-2.0
"""Progress of a model download.

The download program serves this document at GET /progress, and the operator reads it.
"""

import json
from dataclasses import dataclass

from quire_spec.dataclass_json import from_json
from quire_spec.errors import ConfigError

PROGRESS_PATH = "/progress"
PROGRESS_PORT_VARIABLE = "QUIRE_PROGRESS_PORT"
"""Environment variable that contains the port for GET /progress. The port is not passed as an argument. A newer
operator can run an older image, whose download program would reject an argument that it does not know."""
_MAX_BYTES = 2**63
"""Every number of bytes must be less than this limit. Otherwise, `parse` rejects the document."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """Progress of one download."""

    bytes: int
    """Number of bytes on the volume. Complete and partial files both count, also those that earlier runs downloaded."""
    total: int | None = None
    """Number of bytes of all files of the model; None while it is unknown."""
    bytes_per_s: int | None = None
    """Number of bytes downloaded per second, measured recently; None before the first measurement."""

    @property
    def percent(self) -> int | None:
        """Downloaded part of the total in percent, rounded down; None while the total is unknown."""
        return None if not self.total else min(self.bytes * 100 // self.total, 100)

    @property
    def eta_s(self) -> int | None:
        """Number of seconds until the download ends if its rate stays the same; None while the total or the rate is
        unknown."""
        if self.total is None or not self.bytes_per_s:
            return None
        return max(self.total - self.bytes, 0) // self.bytes_per_s

    @classmethod
    def parse(cls, text: str) -> "DownloadProgress | None":
        """Parse a response of this release or a later one; return None if `text` is not a valid response."""
        try:
            progress = from_json(cls, json.loads(text), ignore_unknown=True)
        except (ValueError, RecursionError, ConfigError):
            return None
        numbers = (progress.bytes, progress.total, progress.bytes_per_s)
        return progress if all(number is None or 0 <= number < _MAX_BYTES for number in numbers) else None


def format_bytes(size: int) -> str:
    """Format a number of bytes with a unit, such as 3.2 GiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if size >= 2**shift:
            return f"{size / 2**shift:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"
