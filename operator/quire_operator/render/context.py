# SPDX-License-Identifier: Apache-2.0
"""Facts about the cluster, which rendering needs in addition to the service and its plan.

The controller observes these facts; `quire render` takes them from its options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPTIONAL_KINDS = ("PodMonitor", "ScaledObject", "InferencePool")
"""Kinds of objects that a cluster supports only if their CRDs are installed."""


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Facts about the cluster that a service's objects depend on."""

    admin_key: str
    """Key of the pods' admin port; it does not change after its creation."""
    available_kinds: frozenset[str] = frozenset()
    """Kinds of OPTIONAL_KINDS that the API server supports."""
    credentials: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Values of the keys that sources use, by name of the referenced Secret."""
    operator_peer: Mapping[str, Any] | None = None
    """The operator as a NetworkPolicy peer; None: the policy allows no access to the admin port."""
    owner_uid: str | None = None
    """metadata.uid of the LLMService; None: the objects have no owner."""
