# SPDX-License-Identifier: Apache-2.0
"""The folders from which an adapter is read: its own, or those of the adapters whose weighted sum it is."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WeightedFolder:
    """The folder of an adapter in a sum, and its weight."""

    path: Path
    weight: float


AdapterSource = Path | tuple[WeightedFolder, ...]


def weighted_folders(source: AdapterSource) -> tuple[WeightedFolder, ...]:
    """Return the folders of a source. A single adapter has the weight 1."""
    return (WeightedFolder(source, 1.0),) if isinstance(source, Path) else source
