# SPDX-License-Identifier: Apache-2.0
"""The objects that the reconciler uses, as one dataclass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_operator.api.spec_defaults import SpecDefaults
from quire_operator.controller.apply.applier import Applier
from quire_operator.controller.apply.catalog_pusher import CatalogPusher
from quire_operator.controller.object_cache import ObjectCache
from quire_operator.controller.observe.checkpoint_store import CheckpointStore
from quire_operator.controller.observe.pod_warnings import PodWarnings
from quire_operator.controller.observe.secret_store import SecretStore
from quire_operator.controller.plan_service import PlanService
from quire_operator.controller.status_writer import StatusWriter
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.discovery import Discovery
from quire_operator.kube.resources import Resource

RESYNC_S = 600.0
"""Seconds between two passes over a service that does not change. The actual time differs at random by up to 20 %."""


@dataclass(slots=True)
class ReconcilerDeps:
    """The objects that a reconciler uses."""

    client: ApiClient
    cache: ObjectCache
    secrets: SecretStore
    checkpoints: CheckpointStore
    plan_service: PlanService
    discovery: Discovery
    applier: Applier
    catalog_pusher: CatalogPusher
    pod_warnings: PodWarnings
    status_writer: StatusWriter
    record_write: Callable[[Resource, str], None]
    identity: str
    """Identity of this operator, which ownership.py writes into the services that it owns."""
    operator_peer: Mapping[str, Any] | None = None
    """NetworkPolicy peer that selects the operator."""
    defaults: SpecDefaults = field(default_factory=SpecDefaults)
    resync_s: float = RESYNC_S
