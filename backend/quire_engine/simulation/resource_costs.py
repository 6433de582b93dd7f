# SPDX-License-Identifier: Apache-2.0
"""Seconds of what happens beside the computations of a step: loading adapters, and copying KV blocks."""

import argparse
import re
from dataclasses import asdict, dataclass
from typing import Self

from quire_spec.errors import InvalidArgument

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_seconds(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Parse NAME=NUMBER and a unit, separated by commas, such as ttft=500ms; raises argparse.ArgumentTypeError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([a-z-]+)=([0-9.]+)(us|ms|s)", part.strip())
        try:
            if match is None or match[1] not in names:
                raise ValueError
            values[match[1]] = float(match[2]) * _UNITS[match[3]]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not {' or '.join(f'{n}=NUMBERms' for n in names)}") from None
    return values


@dataclass(frozen=True, slots=True)
class ResourceCosts:
    """Seconds of one operation each. None: it was not recorded."""

    adapter_read: float | None = None
    """Read an adapter from its folder into host memory."""
    adapter_copy: float | None = None
    """Copy an adapter from host memory into a slot."""
    block_copy: float | None = None
    """Copy a KV block to host memory or back."""
    folder_block: float | None = None
    """Read a KV block from the folder of `kv_offloading_folder`, or write it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse adapter-read=80ms,block-copy=30us; raises argparse.ArgumentTypeError."""
        names = tuple(name.replace("_", "-") for name in asdict(cls()))
        return cls(**{name.replace("-", "_"): seconds for name, seconds in parse_seconds(text, names).items()})

    def or_else(self, other: Self) -> Self:
        """Return these costs, and the other's where these are None."""
        return type(self)(**asdict(other) | {name: s for name, s in asdict(self).items() if s is not None})

    def require(self, name: str) -> float:
        """Return a cost that the simulation needs.

        Raises:
            InvalidArgument: it was neither recorded nor given.
        """
        seconds: float | None = getattr(self, name)
        if seconds is None:
            option = name.replace("_", "-")
            raise InvalidArgument(
                f"{option}: the recording does not contain this time; record a service that does it, or give "
                f"--costs {option}=NUMBERms"
            )
        return seconds
