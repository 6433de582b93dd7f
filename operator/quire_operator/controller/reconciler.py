# SPDX-License-Identifier: Apache-2.0
"""Reconciler, which runs passes over a service.

In a pass, it reads, plans, applies, prunes, pushes the catalog and writes the status.

The reconciler is level-based, which means that a pass starts from the current state and not from events. A pass can
stop at any point. The next pass then continues from the state that it finds. If there are no differences, a pass does
not write anything. The workers of the controller call the reconciler.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.controller.apply.applier import ApplyResult
from quire_operator.controller.apply.child_objects import (
    ChildObjects,
    LiveObjects,
    build_child_objects,
    build_running_objects,
    unknown_fields,
)
from quire_operator.controller.apply.replacement import replace_workload, replicas_of
from quire_operator.controller.dependencies import ReconcilerDeps
from quire_operator.controller.object_cache import CachedObject, ServiceKey
from quire_operator.controller.observe.pod_warnings import EVENT_POLL_S
from quire_operator.controller.parsed_service import ParsedService, version_of
from quire_operator.controller.plan_service import stored_plan
from quire_operator.controller.state_observer import StateObserver
from quire_operator.controller.status.groups import groups_of, seconds_until_incomplete
from quire_operator.controller.status.model_cache import (
    download_jobs,
    is_finished,
    is_terminating,
    job_condition,
    predates_claim,
)
from quire_operator.controller.status.observed_state import ObservedState, PlanningResult, PodState
from quire_operator.controller.status.ownership import FIELD, RENEW_S, Ownership, evaluate_ownership
from quire_operator.controller.status.rollout import group_size
from quire_operator.controller.status.staged_catalog import stage_catalog
from quire_operator.controller.status.status import build_status
from quire_operator.controller.status_writer import StaleService
from quire_operator.controller.used_folders import used_folders
from quire_operator.kube import resources
from quire_operator.kube.errors import ObjectNotFound
from quire_operator.render import model_storage, object_names
from quire_operator.render.context import RenderContext
from quire_operator.render.engine_config import UnsupportedByEngine
from quire_operator.render.manifests import Manifest
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_S, _MAX_POLL_S, _READY_POLL_S = 2.0, 10.0, 30.0
"""Seconds between two polls of the pods.

While a service is not ready, the interval starts at the first value and grows to the second value. While it is ready,
the interval is the third value.
"""
_DOWNLOAD_POLL_S = 10.0
"""Seconds between two reads of the download progress. download_progress.py does not update the status more often."""
_FAILED_DOWNLOAD_RETRY_S = 300.0
"""A failed download is retried after this many seconds. The cause may be gone by then, for example because a Secret was
corrected.
"""


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """The time at which the next pass over a service starts."""

    requeue_after_s: float
    backoff: bool = False
    """If this is true several times in a row, the delay before the next pass grows each time."""


@dataclass(slots=True)
class ServiceState:
    """What the reconciler remembers about a service between two passes. If the operator restarts, this state is lost,
    but no harm is done.
    """

    desired: ParsedService | None = None
    last_inputs: Any = None
    """What the last pass read, if it wrote nothing because all objects were as they were rendered."""
    applied_generation: int = 0
    """Generation of the service at the last apply that was complete."""
    children: ChildObjects | None = None
    not_ready_since: float | None = None
    """The value of the event loop's clock when the service stopped being ready. None while the service is ready."""


class Reconciler:
    """Runs passes over services."""

    def __init__(self, deps: ReconcilerDeps) -> None:
        self._deps = deps
        self._observer = StateObserver(deps)
        self._states: dict[ServiceKey, ServiceState] = {}
        self._owners: dict[ServiceKey, str] = {}
        """Owner of each service that another operator owns."""

    async def reconcile(self, key: ServiceKey) -> ReconcileResult | None:
        """Run one pass over a service.

        Return None if the service was deleted; the garbage collector then deletes its objects.

        Raises:
            ApiError: the API server rejected a request or did not respond.
        """
        entry = self._deps.cache.get(resources.LLM_SERVICE, *key)
        if entry is None or entry.deleting:
            self.forget_service(key)
            return None
        body = entry.body()
        state = self._states.setdefault(key, ServiceState())
        if state.desired is not None and state.desired.uid != entry.uid:
            # The service was deleted and created again, but the deletion was not reported.
            self.forget_service(key)
            state = self._states[key] = ServiceState()
        if state.desired is None or state.desired.version != version_of(body):
            state.desired = ParsedService.from_body(body, self._deps.defaults)
        desired = state.desired
        previous = self._deps.status_writer.begin_pass(desired, body.get("status") or {})
        ownership = evaluate_ownership(previous, self._deps.identity, datetime.now(UTC))
        self._note_owner(key, ownership)
        if not ownership.is_own:
            return ReconcileResult(ownership.expires_in_s * random.uniform(1.0, 1.2))
        try:
            if ownership.new_mark is not None:
                previous = {**previous, FIELD: ownership.new_mark}
                entry = await self._deps.status_writer.write_mark(desired, entry.resource_version, previous)
            servers = self._observer.running_pods(desired, object_names.SERVER)
            catalog = self._stage_catalog(desired, servers)
            planning, apply_result = await self._converge(desired, previous, state, catalog)
            generation, now = desired.generation, datetime.now(UTC).replace(microsecond=0)
            pods = await self._observer.observe_pods(desired)
            # This also reads the /status of the pods, even if no catalog is pushed.
            pods = await self._deps.catalog_pusher.push_catalog(desired, pods, catalog)
            switched = self._stage_catalog(desired, [pod for pod in pods.server_pods if pod.alive])
            if switched != catalog:
                # The reports show that all ready pods have verified a candidate.
                planning, apply_result = await self._converge(desired, previous, state, switched)
                if self._observer.live_catalog(desired) == switched:
                    catalog = switched
                    pods = await self._deps.catalog_pusher.push_catalog(desired, pods, catalog)
            observed = self._observer.observe(
                desired, pods, state.children, state.applied_generation, apply_result, catalog
            )
            new_status = build_status(desired.service, generation, planning, observed, previous, now)
            if new_status != previous:
                await self._deps.status_writer.write_status(desired, entry.resource_version, previous, new_status)
        except StaleService:
            logger.info("service has changed during the pass service=%s/%s generation=%d", *key, desired.generation)
            return ReconcileResult(0.0)
        return self._requeue_result(planning, apply_result, observed, new_status, state)

    def forget_service(self, key: ServiceKey) -> None:
        """Discard everything that is stored about a deleted service."""
        self._states.pop(key, None)
        self._owners.pop(key, None)
        self._deps.applier.forget_service(key)
        self._deps.secrets.forget_service(key)
        self._deps.status_writer.forget_service(key)

    def forget_applied(self, resource: resources.Resource) -> None:
        """Let the next pass over each service compare its object of a kind with the manifest again."""
        self._deps.applier.forget_kind(resource)
        for state in self._states.values():
            state.last_inputs = None

    def foreign_services(self) -> dict[ServiceKey, str]:
        """Return the services that another operator owns, with the identity of that operator."""
        return dict(self._owners)

    def num_applied(self, key: ServiceKey) -> int:
        """Return how many objects of a service are up to date. If this number has grown, the pass made progress."""
        return self._deps.applier.num_applied(key)

    def _note_owner(self, key: ServiceKey, ownership: Ownership) -> None:
        before = self._owners.pop(key, "")
        if not ownership.is_own:
            self._owners[key] = ownership.owner
        if not ownership.is_own and before != ownership.owner:
            logger.error(
                "another operator owns the service, so this one does not change it service=%s/%s owner=%s identity=%s",
                *key, ownership.owner, self._deps.identity,
            )  # fmt: skip
        elif ownership.is_own and before:
            logger.info("took the service over service=%s/%s from=%s", *key, before)

    def _stage_catalog(self, desired: ParsedService, pods: Sequence[PodState]) -> AdapterCatalog | None:
        """Return the catalog for the pods; None if they get none."""
        if desired.service is None or desired.adapter_catalog is None:
            return None
        live = self._observer.live_catalog(desired)
        return stage_catalog(desired.adapter_catalog, live, pods, _claims(desired.service, live))

    async def _converge(
        self,
        desired: ParsedService,
        previous: Mapping[str, Any],
        state: ServiceState,
        catalog: AdapterCatalog | None,
    ) -> tuple[PlanningResult, ApplyResult]:
        """Make a plan and apply it. If planning fails, the pods keep their plan, and only what does not depend on new
        pods is applied.
        """
        previous_plan = stored_plan(previous)
        service = desired.service
        if service is None:
            return PlanningResult(plan=previous_plan, spec_error=desired.spec_error), ApplyResult()
        if service.spec.paused:
            return PlanningResult(plan=previous_plan), ApplyResult()
        deps, key = self._deps, desired.key
        context = RenderContext(
            admin_key=await deps.secrets.admin_key(key, desired.uid),
            available_kinds=frozenset(resource.kind for resource in await deps.discovery.available_kinds()),
            credentials=await deps.secrets.credentials(service, catalog),
            operator_peer=deps.operator_peer,
            claim_access_modes=_access_modes(self._live_objects(desired, service).claim),
            catalog=catalog,
            owner_uid=desired.uid,
        )
        workload, replaced = self._observer.live_workloads(desired)
        planning = await deps.plan_service.plan_for(
            desired, previous_plan, workload or replaced, context.credentials, context.available_kinds
        )
        if planning.plan is None or planning.spec_error or planning.unplannable or planning.waiting_for:
            return await self._apply_to_running_pods(desired, planning, context, state)
        # This is necessary even if nothing has changed, because a failed Job does not change any more.
        await self._retry_downloads(key, self._live_objects(desired, service))
        live_objects, child_versions = (
            self._live_objects(desired, service), _object_versions(deps.cache.children_of(key)),
        )  # fmt: skip
        inputs = (
            desired.version, planning.plan, context, await self._secret_versions(key), live_objects.replacement,
        )  # fmt: skip
        if state.last_inputs is not None and state.last_inputs == (inputs, child_versions):
            return planning, ApplyResult()
        state.last_inputs = None
        live_objects = replace(live_objects, used_folders=used_folders(deps.cache, key))
        try:
            children = build_child_objects(service, desired.pods_digest, planning.plan, context, live_objects)
        except (ConfigError, UnsupportedByEngine) as error:
            planning = PlanningResult(plan=previous_plan, spec_error=str(error))
            return await self._apply_to_running_pods(desired, planning, context, state)
        apply_result = await self._apply(desired, children, state)
        if apply_result.complete and not apply_result.num_written:
            # Only what this pass read is stored. The response to a write also contains changes that others made after
            # the objects were read, such as the end of a Job, and these are not in the manifests yet.
            state.last_inputs = (inputs, child_versions)
        return planning, apply_result

    async def _apply_to_running_pods(
        self, desired: ParsedService, planning: PlanningResult, context: RenderContext, state: ServiceState
    ) -> tuple[PlanningResult, ApplyResult]:
        """Apply what does not depend on new pods: replicas, adapters, access to the pods. Nothing is deleted.

        Return `planning`, or a result with the error if the spec is also invalid for the running pods.
        """
        assert desired.service is not None, "the spec was parsed"
        state.last_inputs = None
        if planning.plan is None:
            return planning, ApplyResult()
        live_objects = self._live_objects(desired, desired.service)
        try:
            running = build_running_objects(desired.service, planning.plan, context, live_objects)
        except ConfigError as error:
            spec_error = planning.spec_error or str(error)
            return PlanningResult(planning.plan, spec_error, needs_backoff=planning.needs_backoff), ApplyResult()
        manifests = [await self._with_live_credentials(desired.key, manifest) for manifest in running]
        return planning, await self._apply_manifests(desired, manifests)

    async def _with_live_credentials(self, key: ServiceKey, manifest: Manifest) -> Manifest:
        """Return the Secret with the credentials of sources, with those that it has now. If a running pod restarts, it
        may need the credentials of the previous source.
        """
        name = manifest["metadata"]["name"]
        if manifest["kind"] != resources.SECRET.kind or name != object_names.credentials_secret(key[1]):
            return manifest
        live = (await self._deps.secrets.get(key[0], name)).body or {}
        return {**manifest, "data": {**(live.get("data") or {}), **manifest["data"]}}

    async def _apply_manifests(self, desired: ParsedService, manifests: Iterable[Manifest]) -> ApplyResult:
        try:
            return await self._deps.applier.apply(desired, manifests)
        except ObjectNotFound:
            # A kind was uninstalled. Refresh the list of available kinds, so that the next pass omits it.
            await self._deps.discovery.available_kinds(force_refresh=True)
            raise

    async def _apply(self, desired: ParsedService, children: ChildObjects, state: ServiceState) -> ApplyResult:
        deps = self._deps
        apply_result = await self._apply_manifests(desired, children.manifests)
        assert desired.service is not None, "manifests were rendered"
        workload = next(r for r in resources.WORKLOADS if any(m["kind"] == r.kind for m in children.manifests))
        unknown = deps.client.unknown_fields[workload]
        # Do not store the manifests: those of a thousand services would use 50 MB.
        unknown_names = unknown_fields(desired.service, workload.kind, unknown)
        state.children = replace(children, manifests=(), unknown_fields=unknown_names)
        if not apply_result.required_complete:
            return apply_result
        await deps.applier.prune(desired, children.retained)
        if not children.keeps_pods:
            state.applied_generation = desired.generation
        return apply_result

    async def _retry_downloads(self, key: ServiceKey, live_objects: LiveObjects) -> None:
        """Delete the download Jobs that a later pass must create again.

        These are Jobs that failed some time ago, and Jobs whose claim was deleted or is being deleted.
        """
        for name, job in (live_objects.download_jobs or {}).items():
            is_obsolete = job_condition(job, "Complete") and predates_claim(job, live_objects.claim)
            if is_obsolete or is_terminating(live_objects.claim) or _seconds_until_retry(job) == 0:
                await self._deps.client.delete(resources.JOB, key[0], name, job["metadata"]["uid"])
                self._deps.record_write(resources.JOB, "delete")

    def _live_objects(self, desired: ParsedService, service: LLMService) -> LiveObjects:
        cache, key = self._deps.cache, desired.key
        workload, replaced = self._observer.live_workloads(desired)
        replacement = None
        if replaced is not None:
            pods = self._observer.running_pods(desired, object_names.SERVER, object_names.WORKER)
            rollout, now = service.spec.rollout, datetime.now(UTC)
            new, old = (replicas_of(body, pods, rollout.minReadySeconds, now) for body in (workload, replaced))
            replacement = replace_workload(rollout, service.spec.replicas, new, old)
        return LiveObjects(
            workload,
            cache.get_body(resources.PERSISTENT_VOLUME_CLAIM, key[0], object_names.model_claim(service.name)),
            download_jobs(cache.children_of(key, resources.JOB), service),
            replaced_workload=replaced,
            replacement=replacement,
        )

    async def _secret_versions(self, key: ServiceKey) -> tuple[str, ...]:
        names = (object_names.admin_secret(key[1]), object_names.credentials_secret(key[1]))
        bodies = [(await self._deps.secrets.get(key[0], name)).body or {} for name in names]
        return tuple(str(body.get("metadata", {}).get("resourceVersion", "")) for body in bodies)

    def _requeue_result(
        self,
        planning: PlanningResult,
        apply_result: ApplyResult,
        observed: ObservedState,
        new_status: Mapping[str, Any],
        state: ServiceState,
    ) -> ReconcileResult:
        now = asyncio.get_running_loop().time()
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in new_status.get("conditions") or ())
        if ready:
            state.not_ready_since = None
        elif state.not_ready_since is None:
            state.not_ready_since = now
        if apply_result.forbidden or planning.needs_backoff:
            return ReconcileResult(0.0, backoff=True)
        not_ready_s = now - (state.not_ready_since or now)
        poll_s = min(max(_POLL_S, not_ready_s / 30), _MAX_POLL_S)
        delays_s = [min(self._deps.resync_s, RENEW_S) * random.uniform(0.8, 1.2)]
        if any(pod.ip and pod.started_at for pod in observed.pods):
            delays_s.append(_READY_POLL_S * random.uniform(0.8, 1.2) if ready else poll_s)
        if apply_result.pending_deletions:
            # Secrets are not watched.
            delays_s.append(poll_s)
        if apply_result.conflict:
            # Objects of others are not watched.
            delays_s.append(_MAX_POLL_S)
        if any(pod.alive and pod.downloading for pod in (*observed.pods, *observed.job_pods)):
            delays_s.append(_DOWNLOAD_POLL_S)
        if (retry_in_s := _seconds_until_retry(observed.job)) is not None:
            # No event is sent when the delay is over. The service is never requeued immediately, because a paused
            # service does not retry.
            delays_s.append(max(retry_in_s, poll_s))
        if (size := group_size(observed.workload)) is not None and not ready:
            groups, moment = groups_of((*observed.pods, *observed.worker_pods), size), datetime.now(UTC)
            delays_s += [s for group in groups if (s := seconds_until_incomplete(group, moment)) is not None]
        is_job_without_pod = observed.job is not None and not observed.job_pods and not is_finished(observed.job)
        if is_job_without_pod or any(p.creating or p.gates for p in (*observed.pods, *observed.job_pods)):
            delays_s.append(EVENT_POLL_S)
        return ReconcileResult(min(delays_s))


def _seconds_until_retry(job: Mapping[str, Any] | None) -> float | None:
    """Return the seconds until a failed download is retried, or None if the download has not failed."""
    failed_condition = job_condition(job, "Failed")
    if failed_condition is None:
        return None
    elapsed = datetime.now(UTC) - datetime.fromisoformat(failed_condition["lastTransitionTime"])
    return max(0.0, _FAILED_DOWNLOAD_RETRY_S - elapsed.total_seconds())


def _claims(service: LLMService, live: AdapterCatalog | None) -> set[str]:
    """Return the claims that pods of the spec mount, and that running pods mount, too."""
    claims = set(model_storage.claim_names(service))
    new = {source.pvc.claimName for source in service.adapter_places.values() if source.pvc is not None}
    mounted = {source.pvc.claimName for source in (live.content_sources if live else ()) if source.pvc is not None}
    model = {source.pvc.claimName for source in service.model_sources.values() if source.pvc is not None}
    return claims - (new - mounted - model)


def _access_modes(claim: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the access modes of a claim that pods can mount."""
    return () if claim is None or is_terminating(claim) else tuple(claim["spec"]["accessModes"])


def _object_versions(entries: Iterable[CachedObject]) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return a version of each child object.

    If an object changes in a way that cannot affect the manifests, its version stays the same. For a pod, the version
    is only the uid. For a Job, it includes the status.
    """
    versions: dict[tuple[str, str], tuple[Any, ...]] = {}
    for entry in entries:
        if entry.resource in (resources.POD, resources.REPLICA_SET):
            versions[entry.resource.kind, entry.name] = (entry.uid,)
        elif entry.resource is not resources.LLM_SERVICE:
            digest = entry.full_digest if entry.resource is resources.JOB else entry.spec_digest
            versions[entry.resource.kind, entry.name] = (entry.uid, digest, entry.deleting)
    return versions
