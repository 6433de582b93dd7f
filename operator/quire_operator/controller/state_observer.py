# SPDX-License-Identifier: Apache-2.0
"""Builds the observed state of a service in one pass: its objects from the cache, and the status of its pods."""

import logging
from collections.abc import Mapping
from typing import Any

from quire_operator.controller.apply.applier import ApplyResult
from quire_operator.controller.apply.child_objects import ChildObjects
from quire_operator.controller.dependencies import ReconcilerDeps
from quire_operator.controller.desired_service import ParsedService
from quire_operator.controller.object_cache import CachedObject, ServiceKey
from quire_operator.controller.status.adapters import has_newer_catalog
from quire_operator.controller.status.model_cache import download_jobs, job_succeeded
from quire_operator.controller.status.observed_state import ObservedState, PodState, parse_pod
from quire_operator.controller.status_writer import StatusWriter
from quire_operator.kube import resources
from quire_operator.render import object_names

logger = logging.getLogger(__name__)


class StateObserver:
    """Observes services."""

    def __init__(self, deps: ReconcilerDeps, status_writer: StatusWriter) -> None:
        self._deps, self._status_writer = deps, status_writer

    async def observe(
        self,
        key: ServiceKey,
        desired: ParsedService,
        children: ChildObjects | None,
        applied_generation: int,
        apply_result: ApplyResult,
    ) -> ObservedState:
        """Return the observed state; polls the pods and pushes the adapter catalog to those that need it.

        `children` and `applied_generation` are from the last complete apply, `apply_result` from this pass.

        Raises:
            ApiError: the API server does not respond.
        """
        cache = self._deps.cache
        # Sorted: a status names the first of several pods, so another order would be another status.
        bodies = [entry.body() for entry in sorted(cache.children_of(key, resources.POD), key=lambda entry: entry.name)]
        server_bodies = [body for body in bodies if _component(body) == object_names.SERVER]
        claim = cache.get(resources.PERSISTENT_VOLUME_CLAIM, key[0], object_names.model_claim(key[1]))
        # Not the Job of the last apply, which may have another source or be from an earlier operator process.
        job_entry = self._current_download_job(key, desired, claim.body() if claim else None)
        job_name = job_entry.name if job_entry else None
        job_bodies = [
            body for body in bodies if job_name and body["metadata"].get("labels", {}).get("job-name") == job_name
        ]
        deployment = cache.get(resources.DEPLOYMENT, *key)
        pods = await self._deps.pod_warnings.attach_warnings(
            key[0], (parse_pod(body) for body in (*server_bodies, *job_bodies))
        )
        if any(pod.ip for pod in pods):
            admin_key = await self._deps.secrets.admin_key(key, desired.uid)
            pods = await self._poll_pods(key, pods, desired, admin_key)
        return ObservedState(
            deployment=deployment.body() if deployment else None,
            pods=pods[: len(server_bodies)],
            job=job_entry.body() if job_entry else None,
            job_pods=pods[len(server_bodies) :],
            claim=claim.body() if claim else None,
            applied_generation=applied_generation,
            unavailable_kinds=children.unavailable_kinds if children else (),
            unknown_fields=children.unknown_fields if children else (),
            apply_error="; ".join(apply_result.rejections),
            conflict=apply_result.conflict,
            pending_deletion=apply_result.pending_deletion,
        )

    def _current_download_job(
        self, key: ServiceKey, desired: ParsedService, claim: Mapping[str, Any] | None
    ) -> CachedObject | None:
        """Return the download Job of the spec's model: one that succeeded, or else the newest."""
        if desired.service is None:
            return None
        jobs = download_jobs(self._deps.cache.children_of(key, resources.JOB), desired.service)
        return max(jobs, key=lambda entry: _download_sort_key(entry, claim), default=None)

    async def _poll_pods(
        self, key: ServiceKey, pods: tuple[PodState, ...], desired: ParsedService, admin_key: str
    ) -> tuple[PodState, ...]:
        """Return the pods with their reports, after pushing the adapter catalog to those that need it."""
        catalog = desired.adapter_catalog
        polled_pods = await self._deps.pod_admin.refresh(pods, catalog, admin_key)
        if catalog is None or not any(
            pod.report and has_newer_catalog(pod.report, catalog.version) for pod in polled_pods
        ):
            return polled_pods
        # Either the cached service is stale, or it was restored from a backup and its pods have a later catalog.
        if not await self._status_writer.is_newest(key, desired):
            return polled_pods
        logger.info("pods have a catalog that no longer exists service=%s/%s generation=%d", *key, desired.generation)
        return await self._deps.pod_admin.refresh(pods, catalog, admin_key, replace_newer=True)


def _download_sort_key(entry: CachedObject, claim: Mapping[str, Any] | None) -> tuple[bool, str, str]:
    body = entry.body()
    return job_succeeded(body, claim), body["metadata"]["creationTimestamp"], entry.name


def _component(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("labels", {}).get(object_names.COMPONENT, ""))
