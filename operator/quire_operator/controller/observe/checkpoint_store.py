# SPDX-License-Identifier: Apache-2.0
"""Models: what a plan needs to know of each service's model, from the hub, a bucket, a web server or a claim.

Read once for a source and then remembered: a plan is pinned anyway, and a branch that moves must restart nobody.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.controller.compressed_json import decompress
from quire_operator.controller.object_cache import CachedObject, ObjectCache, ServiceKey, controller_uid
from quire_operator.controller.observe.pod_warnings import EVENT_POLL_S, PodWarnings
from quire_operator.controller.status.observed_state import parse_pod
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import WriteConflict
from quire_operator.kube.resources import Resource
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.checkpoint_files import read_source_checkpoint
from quire_operator.render import model_reader_job, object_names
from quire_spec.dataclass_json import drop_nulls, to_json
from quire_spec.documents.adapter_catalog import PvcSource, SecretRef
from quire_spec.errors import AccessDenied, ConfigError, Unavailable

SecretValues = Mapping[str, Mapping[str, str]]
"""Values of Secrets by name and key."""

_MAX_CHECKPOINTS = 4096
_MAX_CONCURRENT_READS = 4
"""Concurrent reads; each takes a few round trips."""
_FAILED_JOB_RETRY_S = 120.0
"""After a Job that found no model, until another one looks: files may be on their way to the claim."""
_MAX_RETRY_AFTER_S = 300.0
"""What a place may have us wait for the next question (Retry-After), as in the download of a model."""
_JOB_POLL_S = 5.0
"""Until a Job that another service started is in the cache."""


class NotReadYet(Exception):
    """Not known yet; the message says what is waited for."""


class CheckpointStore:
    """Checkpoints by source."""

    def __init__(
        self,
        client: ApiClient,
        cache: ObjectCache,
        pod_warnings: PodWarnings,
        requeue: Callable[[ServiceKey, float], None],
        record_write: Callable[[Resource, str], None],
    ) -> None:
        """`wake` has a service looked at again after so many seconds; `wrote` is told of writes."""
        self._client, self._cache, self._requeue, self._record_write = client, cache, requeue, record_write
        self._pod_warnings = pod_warnings
        self._checkpoints: OrderedDict[tuple[str, str], CheckpointInfo] = OrderedDict()
        self._backoff: dict[tuple[str, str], tuple[float, ConfigError | Unavailable]] = {}
        """Places that are left alone: until when, and why."""
        self._waiting_services: dict[tuple[str, str], set[ServiceKey]] = {}
        self._read_semaphore = asyncio.Semaphore(_MAX_CONCURRENT_READS)

    async def get(self, service: LLMService, uid: str, secrets: SecretValues, image: str) -> CheckpointInfo:
        """The model of a service; `image` is what a Job that reads a claim would run.

        Raises:
            Waiting: a Job reads it; `wake` comes when it has.
            ConfigError: it is no model that can be served.
            Unavailable, NotFound: the place does not answer, or does not let us in.
            ApiError: the API server refuses a Job.
        """
        source = service.spec.model.source
        source_key = (service.namespace or "", json.dumps(drop_nulls(to_json(source)), sort_keys=True))
        if source_key not in self._checkpoints:
            self._raise_if_backing_off(source_key, (service.namespace or "", service.name))
            if source.pvc is not None:
                checkpoint = await self._read_from_claim(source_key, service, uid, source.pvc, image)
            else:
                checkpoint = await self._read_remote(source_key, service, secrets)
            self._checkpoints[source_key] = checkpoint
            while len(self._checkpoints) > _MAX_CHECKPOINTS:
                self._checkpoints.popitem(last=False)
        self._checkpoints.move_to_end(source_key)
        return self._checkpoints[source_key]

    def _raise_if_backing_off(self, source_key: tuple[str, str], key: ServiceKey) -> None:
        """Raises what was found there, where that is not to be asked again yet; wakes the service once it is."""
        now = asyncio.get_running_loop().time()
        self._backoff = {other: backoff for other, backoff in self._backoff.items() if backoff[0] > now}
        if source_key in self._backoff:
            retry_at, error = self._backoff[source_key]
            self._requeue(key, retry_at - now)
            raise type(error)(str(error))

    def _back_off(self, source_key: tuple[str, str], seconds: float, error: ConfigError | Unavailable) -> None:
        # Anew: the error itself holds on to the frames that it came through.
        self._backoff[source_key] = asyncio.get_running_loop().time() + seconds, type(error)(str(error))

    async def _read_remote(
        self, source_key: tuple[str, str], service: LLMService, secrets: SecretValues
    ) -> CheckpointInfo:
        async with self._read_semaphore:
            try:
                return await _read_from_source(service, secrets)
            except Unavailable as error:
                if error.retry_after_s:
                    self._back_off(source_key, min(error.retry_after_s, _MAX_RETRY_AFTER_S), error)
                raise

    async def _read_from_claim(
        self, source_key: tuple[str, str], service: LLMService, uid: str, source: PvcSource, image: str
    ) -> CheckpointInfo:
        key = (service.namespace or "", service.name)
        manifest = model_reader_job.job(service, source, image)
        name, namespace = manifest["metadata"]["name"], key[0]
        self._waiting_services.setdefault(source_key, set()).add(key)
        entry = self._cache.get(resources.JOB, namespace, name)
        if entry is None:
            await self._start_reader_job(manifest, service, uid)
            raise NotReadYet(f"Job {name} is to read config.json from claim {source.claimName}")
        try:
            checkpoint = _read_result(entry.body(), await self._termination_messages(entry, name), source)
        except (ConfigError, Unavailable) as error:
            if isinstance(error, ConfigError):
                self._back_off(source_key, _FAILED_JOB_RETRY_S, error)
            await self._client.delete(resources.JOB, namespace, name, entry.uid)
            self._requeue_waiting(source_key)
            raise
        if checkpoint is None:
            problem = await self._describe_pod_problem(key, entry.key, name)
            raise NotReadYet(f"Job {name} reads config.json from claim {source.claimName}{problem}")
        # The Job stays until the plan that comes of it is in the cluster (prune takes it away), lest a restart of the
        # operator in between has to start another one.
        self._requeue_waiting(source_key)
        return checkpoint

    async def _start_reader_job(self, manifest: dict[str, Any], service: LLMService, uid: str) -> None:
        owner = {
            "apiVersion": resources.LLM_SERVICE.api_version,
            "kind": resources.LLM_SERVICE.kind,
            "name": service.name,
        }
        owner_reference = {**owner, "uid": uid, "controller": True}
        manifest["metadata"]["ownerReferences"] = [owner_reference]
        job = await self._client.get_or_none(resources.JOB, service.namespace, manifest["metadata"]["name"])
        if job is None:
            try:
                # Not applied: several services may want it at once, and the first of them has it.
                job = await self._client.create(resources.JOB, manifest)
            except WriteConflict as error:
                self._requeue((service.namespace or "", service.name), _JOB_POLL_S)
                raise NotReadYet(f"Job {manifest['metadata']['name']} is being started for another service") from error
            self._record_write(resources.JOB, "create")
        elif job["metadata"].get("labels", {}).get(object_names.COMPONENT) != model_reader_job.READER_COMPONENT:
            raise ConfigError(f"Job {manifest['metadata']['name']} is not ours ({controller_uid(job)}); delete it")
        self._cache.upsert(resources.JOB, job)

    def _requeue_waiting(self, source_key: tuple[str, str]) -> None:
        """Look at all services that waited for a Job."""
        for key in self._waiting_services.pop(source_key, set()):
            self._requeue(key, 0.0)

    async def _termination_messages(self, entry: CachedObject, job_name: str) -> list[tuple[int, str]]:
        """Exit codes and termination messages of the Job's pods."""
        messages = _termination_messages(self._job_pods(entry.key, job_name))
        if not messages and any(_has_condition(entry.body(), how) for how in ("Complete", "Failed")):
            # News of pods come by another watch, and may be behind those of their Job.
            messages = _termination_messages(
                (await self._client.list(resources.POD, entry.key[0], label_selector=f"job-name={job_name}")).items
            )
        return messages

    async def _describe_pod_problem(self, waiting_service: ServiceKey, job_service: ServiceKey, job_name: str) -> str:
        """Why a pod of the Job of `key` does not run, for the message to `asks`."""
        bodies = self._job_pods(job_service, job_name)
        for body in bodies:
            for condition in body.get("status", {}).get("conditions") or ():
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    return f"; its pod has no node: {condition.get('message', '')}"
        pods = await self._pod_warnings.attach_warnings(job_service[0], map(parse_pod, bodies))
        if any(pod.creating for pod in pods):
            # An event of a pod wakes nobody.
            self._requeue(waiting_service, EVENT_POLL_S)
        for pod in pods:
            if pod.waiting:
                return f"; its pod waits: {pod.waiting}"
        return ""

    def _job_pods(self, key: ServiceKey, job_name: str) -> list[dict[str, Any]]:
        bodies = [entry.body() for entry in self._cache.children_of(key, resources.POD)]
        return [body for body in bodies if body["metadata"].get("labels", {}).get("job-name") == job_name]


def _termination_messages(pods: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    states = [
        state
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses") or ()
        if (state := container.get("state", {}).get("terminated"))
    ]
    return [(state.get("exitCode", 1), state.get("message", "")) for state in states]


def _has_condition(job: Mapping[str, Any], condition_type: str) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return any(c["type"] == condition_type and c["status"] == "True" for c in conditions)


def _read_result(job: Mapping[str, Any], messages: list[tuple[int, str]], source: PvcSource) -> CheckpointInfo | None:
    """What a Job found; None: nothing yet.

    Raises:
        ConfigError: it failed.
        Unavailable: it had no time to, or nobody heard of it.
    """
    for code, message in messages:
        if code == 0 and message:
            return _parse_checkpoint(message)
    source_field = f"spec.model.source.pvc: claim {source.claimName!r}, path {source.path!r}"
    for code, message in messages:
        if code == 2:
            raise ConfigError(f"{source_field}: {message}")
    conditions = job.get("status", {}).get("conditions") or ()
    for condition in conditions:
        if condition["type"] == "Failed" and condition["status"] == "True":
            detail = next((message for _, message in messages if message), condition.get("message", ""))
            if condition.get("reason") == "DeadlineExceeded" and not messages:
                # No node had room, or the claim was not to be had: nothing is known of what is on it.
                raise Unavailable(
                    f"{source_field}: no pod of the Job that reads config.json came to its end in time ({detail})"
                )
            raise ConfigError(
                f"{source_field}: the Job that reads config.json failed: {detail or condition.get('reason')}"
            )
    if _has_condition(job, "Complete"):
        if not messages:
            raise Unavailable(
                f"{source_field}: the pod of the Job that read config.json is gone, and what it said with it"
            )
        raise ConfigError(
            f"{source_field}: the Job that reads config.json ended without a word; is the image a Quire image?"
        )
    return None


def _parse_checkpoint(message: str) -> CheckpointInfo:
    try:
        document = decompress(message)
        config, index, header = document["config"], document["index"], document["header"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the Job that reads config.json told {message[:80]!r}; is the image a Quire image?"
        ) from error
    return CheckpointInfo.from_files(config, index, header)


async def _read_from_source(service: LLMService, secrets: SecretValues) -> CheckpointInfo:
    def secret_values(ref: SecretRef) -> Mapping[str, str]:
        if ref.name not in secrets:
            raise AccessDenied(f"Secret {ref.name!r}: there is none in namespace {service.namespace!r}; make it")
        return secrets[ref.name]

    return await read_source_checkpoint(service.spec.model.source, secret_values)
