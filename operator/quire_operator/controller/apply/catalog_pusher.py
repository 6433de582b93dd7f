# SPDX-License-Identifier: Apache-2.0
"""Catalog pusher, which sends the adapter catalog to the pods of a service. This is one step of a pass.

It also decides whether a newer catalog in a pod is replaced. It sends its HTTP requests through the client of the pods'
admin port. In the same step, it reads the pod's status, because the status contains the digest of the pod's catalog.
The reconciler calls this module.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from quire_operator.controller.observe.pod_admin_client import PodAdminClient
from quire_operator.controller.observe.secret_store import SecretStore
from quire_operator.controller.parsed_service import ParsedService
from quire_operator.controller.status.adapters import has_newer_catalog
from quire_operator.controller.status.observed_state import PodState, ServicePods
from quire_spec.documents.adapter_catalog import AdapterCatalog

logger = logging.getLogger(__name__)


class CatalogPusher:
    """Pushes adapter catalogs to the pods of all services."""

    def __init__(
        self,
        pod_admin: PodAdminClient,
        secrets: SecretStore,
        is_newest: Callable[[ParsedService], Awaitable[bool]],
    ) -> None:
        """`is_newest` reads the service from the API server."""
        self._pod_admin, self._secrets, self._is_newest = pod_admin, secrets, is_newest

    async def push_catalog(
        self, desired: ParsedService, pods: ServicePods, catalog: AdapterCatalog | None
    ) -> ServicePods:
        """Push the adapter catalog to each server pod that has a different one. Return the pods with their reports.

        If `catalog` is None, because a service is paused or its spec is invalid, only the reports are read.

        Raises:
            ApiError: the API server does not respond.
        """
        all_pods = (*pods.server_pods, *pods.job_pods)
        if not any(pod.ip for pod in all_pods):
            return pods
        admin_key = await self._secrets.admin_key(desired.key, desired.uid)
        visited_pods, workers = await asyncio.gather(
            self._push(desired, all_pods, catalog, admin_key), self._pod_admin.read_ranks(pods.worker_pods, admin_key)
        )
        servers, job_pods = visited_pods[: len(pods.server_pods)], visited_pods[len(pods.server_pods) :]
        return replace(pods, server_pods=servers, job_pods=job_pods, worker_pods=workers)

    async def _push(
        self, desired: ParsedService, pods: tuple[PodState, ...], catalog: AdapterCatalog | None, admin_key: str
    ) -> tuple[PodState, ...]:
        visited_pods = await self._pod_admin.push_catalog(pods, catalog, admin_key)
        reports = [pod.report for pod in visited_pods if pod.report]
        if catalog is None or not any(has_newer_catalog(report, catalog.version) for report in reports):
            return visited_pods
        # There are two possible causes. The cached service can be stale. Or the service was restored from a backup, and
        # its pods still have a catalog that is newer than the backup.
        if not await self._is_newest(desired):
            return visited_pods
        logger.info("pods have a catalog that no longer exists service=%s/%s", *desired.key)
        return await self._pod_admin.push_catalog(pods, catalog, admin_key, replace_newer=True)
