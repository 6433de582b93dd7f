# SPDX-License-Identifier: Apache-2.0
"""Facts about the cluster. The renderer needs them in addition to the service and its plan.

The controller reads these facts from the cluster; `quire render` reads them from its options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_spec.documents.adapter_catalog import AdapterCatalog

OPTIONAL_KINDS = ("PodMonitor", "ScaledObject", "InferencePool", "HTTPRoute")
"""Kinds of objects that a cluster supports only if their CRDs are installed."""


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Facts about the cluster that a service's objects depend on."""

    admin_key: str
    """Key for the admin port of the pods. The operator creates it once and never changes it."""
    available_kinds: frozenset[str] = frozenset()
    """The kinds in OPTIONAL_KINDS that the API server supports."""
    credentials: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Credentials from the Secrets that sources refer to. For each Secret, the mapping contains the keys that are used,
    and their values."""
    operator_peer: Mapping[str, Any] | None = None
    """The peer that stands for the operator in a NetworkPolicy. If it is None, the policy does not let the operator
    connect to the admin port."""
    claim_access_modes: tuple[str, ...] = ()
    """Access modes of the existing claim for downloaded models. Empty if there is none."""
    catalog: AdapterCatalog | None = None
    """The adapters of the pods. None: those of the spec. They differ while new contents are being verified."""
    owner_uid: str | None = None
    """metadata.uid of the LLMService. If it is None, the objects do not have an owner."""
