# SPDX-License-Identifier: Apache-2.0
"""State observer, which builds the observed state of a service from the cache and the pods.

This happens once in each pass. It reads only.

The observer works in two steps. Between them, the reconciler pushes the adapter catalog. This push also adds the
reports of the pods.
"""

import json
from collections.abc import Mapping

from quire_operator.controller.apply.applier import ApplyResult
from quire_operator.controller.apply.child_objects import ChildObjects
from quire_operator.controller.dependencies import ReconcilerDeps
from quire_operator.controller.parsed_service import ParsedService
from quire_operator.controller.status.model_cache import download_jobs, is_finished, job_succeeded
from quire_operator.controller.status.observed_state import Body, ObservedState, PodState, ServicePods, parse_pod
from quire_operator.kube import resources
from quire_operator.render import object_names
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import ConfigError


class StateObserver:
    """Builds the observed states of services. It does not write anything."""

    def __init__(self, deps: ReconcilerDeps) -> None:
        self._deps = deps

    def running_pods(self, desired: ParsedService, *components: str) -> list[PodState]:
        """Return the pods of some components that have not ended, without reports."""
        entries = self._deps.cache.children_of(desired.key, resources.POD)
        bodies = [entry.body() for entry in entries]
        pods = [parse_pod(body) for body in bodies if _labels(body).get(object_names.COMPONENT) in components]
        return [pod for pod in pods if pod.alive]

    def live_workloads(self, desired: ParsedService) -> tuple[Body | None, Body | None]:
        """Return the workload of the kind that the spec needs, and the one of the other kind, which it replaces.

        No pods of a DisaggregatedSet are replaced by pods without a role, or the reverse: an old workload is deleted
        when the new one is applied.
        """
        cache, service = self._deps.cache, desired.service
        deployment, group, roles = (cache.get_body(resource, *desired.key) for resource in resources.WORKLOADS)
        if (deployment is None and group is None) if service is None else service.roles:
            return roles, None
        is_group = deployment is None if service is None else service.num_nodes > 1
        return (group, deployment) if is_group else (deployment, group)

    def live_catalog(self, desired: ParsedService) -> AdapterCatalog | None:
        """Return the catalog in the ConfigMap of the adapters; None if there is none that this release can read."""
        name = object_names.adapter_configmap(desired.key[1])
        body = self._deps.cache.get_body(resources.CONFIG_MAP, desired.key[0], name) or {}
        try:
            return AdapterCatalog.from_json(json.loads((body.get("data") or {})[constants.CATALOG_FILE]))
        except (KeyError, ValueError, RecursionError, ConfigError):
            return None

    async def observe_pods(self, desired: ParsedService) -> ServicePods:
        """Return the pods of a service. They do not contain reports yet.

        Raises:
            ApiError: the API server does not respond.
        """
        cache, key = self._deps.cache, desired.key
        # The pods are sorted because a status names only the first of several pods. In another order, the status would
        # change.
        bodies = [entry.body() for entry in sorted(cache.children_of(key, resources.POD), key=lambda entry: entry.name)]
        server_bodies, worker_bodies = (
            [body for body in bodies if _labels(body).get(object_names.COMPONENT) == component]
            for component in (object_names.SERVER, object_names.WORKER)
        )
        claim = cache.get_body(resources.PERSISTENT_VOLUME_CLAIM, key[0], object_names.model_claim(key[1]))
        # The Job that was applied last is not used. It may have another source, or an earlier operator process may have
        # applied it.
        job = self._current_download_job(desired, claim)
        job_bodies = [body for body in bodies if job and _labels(body).get("job-name") == job["metadata"]["name"]]
        pods = tuple(map(parse_pod, (*server_bodies, *worker_bodies, *job_bodies)))
        pods = await self._deps.pod_warnings.attach_warnings(key[0], pods)
        warning = ""
        if job is not None and not job_bodies and not is_finished(job):
            meta = job["metadata"]
            warning = await self._deps.pod_warnings.fetch_warning(key[0], meta["name"], meta["uid"])
        num_server_pods, num_job_pods = len(server_bodies), len(job_bodies)
        workers = pods[num_server_pods : len(pods) - num_job_pods]
        return ServicePods(pods[:num_server_pods], job, pods[len(pods) - num_job_pods :], claim, warning, workers)

    def observe(
        self,
        desired: ParsedService,
        pods: ServicePods,
        children: ChildObjects | None,
        applied_generation: int,
        apply_result: ApplyResult,
        catalog: AdapterCatalog | None = None,
    ) -> ObservedState:
        """Return the observed state.

        `pods` and `apply_result` come from this pass. `children` and `applied_generation` come from the last apply that
        was complete.
        """
        workload, replaced_workload = self.live_workloads(desired)
        return ObservedState(
            workload=workload,
            replaced_workload=replaced_workload,
            pods=pods.server_pods,
            worker_pods=pods.worker_pods,
            catalog=catalog,
            job=pods.job,
            job_pods=pods.job_pods,
            job_warning=pods.job_warning,
            claim=pods.claim,
            autoscaler=self._autoscaler(desired),
            inference_pool=self._deps.cache.get_body(resources.INFERENCE_POOL, *desired.key),
            http_route=self._deps.cache.get_body(resources.HTTP_ROUTE, *desired.key),
            applied_generation=applied_generation,
            unavailable_kinds=children.unavailable_kinds if children else (),
            unknown_fields=children.unknown_fields if children else (),
            outdated_image=children.outdated_image if children else "",
            apply_error="; ".join(apply_result.rejections),
            conflict=apply_result.conflict,
            pending_deletions=tuple(apply_result.pending_deletions),
            stuck_deletions=tuple(apply_result.stuck_deletions),
            claim_rejection=apply_result.claim_rejection,
        )

    def _autoscaler(self, desired: ParsedService) -> Body | None:
        scaling = desired.service.spec.autoscaling if desired.service else None
        kinds = (resources.HORIZONTAL_POD_AUTOSCALER, resources.SCALED_OBJECT)
        kind = next((kind for kind in kinds if scaling and kind.kind == scaling.kind), None)
        return self._deps.cache.get_body(kind, *desired.key) if kind else None

    def _current_download_job(self, desired: ParsedService, claim: Body | None) -> Body | None:
        """Return the Job that downloads the model of the spec.

        If there are several, return one that has succeeded. If none has succeeded, return the newest one.
        """

        def sort_key(job: Body) -> tuple[bool, str, str]:
            return job_succeeded(job, claim), job["metadata"]["creationTimestamp"], job["metadata"]["name"]

        if desired.service is None:
            return None
        jobs = download_jobs(self._deps.cache.children_of(desired.key, resources.JOB), desired.service)
        return max(jobs.values(), key=sort_key, default=None)


def _labels(body: Body) -> Mapping[str, str]:
    labels: Mapping[str, str] = body["metadata"].get("labels", {})
    return labels
