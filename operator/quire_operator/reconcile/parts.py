# SPDX-License-Identifier: Apache-2.0
"""Parts: what the passes over services work with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_operator.kube.client import Client
from quire_operator.kube.discovery import Discovery
from quire_operator.kube.kinds import Kind
from quire_operator.reconcile.apply import Applier
from quire_operator.reconcile.cache import Cache
from quire_operator.reconcile.models import Models
from quire_operator.reconcile.planning import Planning
from quire_operator.reconcile.pod_events import PodEvents
from quire_operator.reconcile.pods import AdapterPusher
from quire_operator.reconcile.secrets import SecretStore

RESYNC_S = 600.0
"""A service of which nothing is heard is looked at this often, a fifth more or less."""


@dataclass(slots=True)
class Parts:
    """What a reconciler works with."""

    client: Client
    cache: Cache
    secrets: SecretStore
    models: Models
    planning: Planning
    discovery: Discovery
    applier: Applier
    pods: AdapterPusher
    pod_events: PodEvents
    operator: Mapping[str, Any] | None = None
    """NetworkPolicy peer that the operator is."""
    resync_s: float = RESYNC_S
    wrote: Callable[[Kind, str], None] = field(default=lambda kind, verb: None)
