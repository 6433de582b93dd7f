# SPDX-License-Identifier: Apache-2.0
"""Inputs of rendering, except the service and its plan: facts about the cluster.

The controller observes them; `quire render` takes them from its options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPTIONAL_KINDS = ("PodMonitor", "ScaledObject", "InferencePool")
"""Kinds that a cluster has only if their CRDs are installed."""


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Facts about the cluster that a service's objects depend on."""

    admin_key: str
    """Key of the pods' admin port. It never changes after its creation."""
    available_kinds: frozenset[str] = frozenset()
    """Kinds in OPTIONAL_KINDS that the API server has."""
    credentials: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Values of the Secrets that sources reference, by Secret name, with only the keys that they use."""
    operator_peer: Mapping[str, Any] | None = None
    """The operator as a NetworkPolicy peer; None: the policy allows no access to the admin port."""
    owner_uid: str | None = None
    """metadata.uid of the LLMService; None: the objects have no owner."""
