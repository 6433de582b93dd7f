# SPDX-License-Identifier: Apache-2.0
"""spec.adapterSources of an LLMService."""

from dataclasses import dataclass

from quire_operator.api.quantity import QUANTITY, to_bytes
from quire_spec.documents.adapter_catalog import AdapterPrefix, AdapterSource
from quire_spec.documents.field_schema import Restarts, schema_field
from quire_spec.documents.sources import PREFIX_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSourceLimit:
    """spec.adapterSources[].limit"""

    adapters: int = schema_field(256, minimum=1, maximum=4096)
    """Maximum number of adapters of this source at a time. Default 256."""
    size: str = schema_field("10Gi", **QUANTITY, restarts=Restarts.LATER)
    """Maximum size of their files. The pod requests as much ephemeral storage. Default 10Gi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSourceSpec(AdapterPrefix):
    """An entry of spec.adapterSources"""

    limit: AdapterSourceLimit = schema_field(factory=AdapterSourceLimit)
    """What a pod keeps of this source. When a new adapter needs room, the adapter without a request for the longest
    time leaves. Each client has an equal share: a client that is above it pays with its own adapters. A client is an
    API key, otherwise an address."""

    @property
    def max_bytes(self) -> int:
        """The value of limit.size in bytes."""
        return to_bytes(self.limit.size)

    def to_source(self) -> AdapterSource:
        """Return the entry of the pods' catalog."""
        places = {name: getattr(self, name) for name in (*PREFIX_KINDS, "allow")}
        return AdapterSource(**places, maxAdapters=self.limit.adapters, maxBytes=self.max_bytes)
