# SPDX-License-Identifier: Apache-2.0
"""Cluster: what rendering has to know beside the service and its plan. The reconciler finds it out, `quire render` is
told or assumes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OPTIONAL_KINDS = ("PodMonitor", "ScaledObject", "InferencePool")
"""Kinds that a cluster has only when someone installed them."""


@dataclass(frozen=True, slots=True)
class RenderContext:
    """The surroundings of a service."""

    admin_key: str
    """Of the pods' admin port; the same for ever once made."""
    available_kinds: frozenset[str] = frozenset()
    """Those of OPTIONAL that the API server has."""
    credentials: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Secrets that sources name, by name, with the keys that they use."""
    operator_peer: Mapping[str, Any] | None = None
    """NetworkPolicy peer that the operator is; None: nobody reaches administration through the network."""
    owner_uid: str | None = None
    """metadata.uid of the LLMService; None: objects belong to nobody."""
