# SPDX-License-Identifier: Apache-2.0
"""The adapter of a request: none, one, or a weighted sum of several."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_sum import sum_digest
from quire_spec.errors import InvalidArgument, truncated_repr


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One adapter of a weighted sum."""

    name: AdapterName
    digest: AdapterDigest | None
    """None until the supervisor has found the adapter."""
    weight: float


@dataclass(frozen=True, slots=True)
class RequestAdapter:
    """The name is None for the base model."""

    name: AdapterName | None = None
    """As in the request."""
    digest: AdapterDigest | None = None
    """None for the base model, and until the supervisor has found all adapters."""
    parts: tuple[AdapterPart, ...] = ()
    """The adapters of a sum; empty for a single adapter."""

    @classmethod
    def of_sum(cls, name: AdapterName, parts: tuple[AdapterPart, ...]) -> Self:
        """Return a sum of adapters. Raises InvalidArgument if two of them have the same content."""
        digests = [(part.digest, part.weight) for part in parts if part.digest is not None]
        if len(dict(digests)) < len(digests):
            raise InvalidArgument(
                f"adapters {truncated_repr(name)}: two names stand for the same adapter; add their weights"
            )
        return cls(name, sum_digest(digests) if len(digests) == len(parts) else None, parts)

    @property
    def names(self) -> tuple[AdapterName, ...]:
        """The adapters whose limits apply to the request."""
        if self.parts:
            return tuple(part.name for part in self.parts)
        return () if self.name is None else (self.name,)

    @property
    def missing_names(self) -> tuple[AdapterName, ...]:
        """The adapters that the supervisor must find first."""
        if self.parts:
            return tuple(part.name for part in self.parts if part.digest is None)
        return self.names if self.digest is None else ()

    def found(self, digest_by_name: Mapping[AdapterName, AdapterDigest]) -> "RequestAdapter":
        """Return the adapter with the digests of the missing names. Raises the error of `of_sum`."""
        if self.name is None or not self.parts:
            return replace(self, digest=digest_by_name[self.name] if self.name is not None else None)
        parts = (replace(part, digest=part.digest or digest_by_name[part.name]) for part in self.parts)
        return RequestAdapter.of_sum(self.name, tuple(parts))
