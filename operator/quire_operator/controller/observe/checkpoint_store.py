# SPDX-License-Identifier: Apache-2.0
"""Checkpoint store, which reads the facts about models that plans need.

The facts are read from the hub, a bucket, a web server or a claim.

Each source is read once and then cached, because a new commit in a branch must not restart pods. A Job reads claims.
Called by the plan service.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire_operator.api.llmservice import DRAFT_SOURCE, MODEL_SOURCE, LLMService
from quire_operator.api.validation_errors import FieldPath
from quire_operator.controller.compressed_json import decompress
from quire_operator.controller.object_cache import CachedObject, ObjectCache, ServiceKey, controller_uid
from quire_operator.controller.observe.pod_warnings import EVENT_POLL_S, PodWarnings
from quire_operator.controller.status.model_cache import describe_suspension, job_condition
from quire_operator.controller.status.observed_state import parse_pod
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import Forbidden, InvalidObject, WriteConflict
from quire_operator.kube.resources import Resource
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.checkpoint_files import Parser, T, read_source_checkpoint
from quire_operator.plan.draft_info import DraftInfo
from quire_operator.render import model_reader_job, object_names
from quire_operator.render.manifests import owner_reference
from quire_sources.http.borders import Borders
from quire_spec.dataclass_json import drop_nulls, to_json
from quire_spec.documents.sources import SecretRef, Source
from quire_spec.errors import AccessDenied, ConfigError, Unavailable

SecretValues = Mapping[str, Mapping[str, str]]
"""The values of Secrets. The first key is the name of a Secret, and the second key is a key in this Secret."""

SourceKey = tuple[str, ...]
"""Key of the cache. It consists of the service's namespace and the source as JSON.

For a draft model, it also contains the settings that its facts depend on.
"""

_MAX_CHECKPOINTS = 4096
_MAX_CONCURRENT_READS = 4
"""Maximum number of sources that are read at the same time. Each of these reads takes a few round trips."""
_FAILED_JOB_RETRY_S = 120.0
"""If a Job did not find a model, the next Job starts after this many seconds. A user may still be copying files to the
claim.
"""
_MAX_RETRY_AFTER_S = 300.0
"""If a source sends Retry-After, the delay is limited to this many seconds. The limit also applies to the download of a
model.
"""
_JOB_POLL_S = 5.0
"""If a Job was started for another service but is not in the cache yet, a pass looks for it again after this many
seconds.
"""


@dataclass(frozen=True, slots=True)
class _Request:
    """One source of a service, together with the values that are needed to read it."""

    service: LLMService
    uid: str
    secrets: SecretValues
    image: str
    """If the source is a claim, a Job with this image reads it."""
    path: FieldPath
    """Path of the source's field in the LLMService."""

    @property
    def source(self) -> Source:
        return self.service.model_sources[self.path]


class NotReadYet(Exception):
    """The facts about the model are not known yet; the message contains the reason."""

    def __init__(self, message: str, needs_backoff: bool = False) -> None:
        """`needs_backoff` is True if no event reports when the facts can be read."""
        super().__init__(message)
        self.needs_backoff = needs_backoff


class CheckpointStore:
    """Checkpoint facts by source."""

    def __init__(
        self,
        client: ApiClient,
        cache: ObjectCache,
        pod_warnings: PodWarnings,
        requeue: Callable[[ServiceKey, float], None],
        record_write: Callable[[Resource, str], None],
        borders: Borders | None,
    ) -> None:
        """`requeue` adds a service to the queue again after a number of seconds. `record_write` is called for each
        write. Remote sources are read only inside `borders`, if there are any.
        """
        self._borders = borders
        self._client, self._cache, self._requeue, self._record_write = client, cache, requeue, record_write
        self._pod_warnings = pod_warnings
        self._checkpoints: OrderedDict[SourceKey, CheckpointInfo | DraftInfo] = OrderedDict()
        self._backoff: dict[SourceKey, tuple[float, ConfigError | Unavailable]] = {}
        """The sources that must wait before they are read again.

        The value is the time of the next read, and the error of the last read.
        """
        self._waiting_services: dict[SourceKey, set[ServiceKey]] = {}
        self._read_semaphore = asyncio.Semaphore(_MAX_CONCURRENT_READS)

    async def get(self, service: LLMService, uid: str, secrets: SecretValues, image: str) -> CheckpointInfo:
        """Return the facts about a service's model. If its source is a claim, a Job with the image `image` reads them.

        Raises:
            NotReadYet: a Job is still reading the claim. When the Job ends, the service is requeued.
            ConfigError: the model cannot be served.
            Unavailable, NotFound: the source does not respond, denies access, or does not exist.
            ApiError: the API server rejected a Job.
        """
        request = _Request(service, uid, secrets, image, MODEL_SOURCE)
        model_impl = service.spec.engine.modelImpl
        parse = partial(CheckpointInfo.from_files, model_impl=model_impl)
        checkpoint: CheckpointInfo = await self._get(request, (model_impl or "auto",), parse)
        return checkpoint

    async def get_draft(
        self, service: LLMService, uid: str, secrets: SecretValues, image: str, model: CheckpointInfo
    ) -> DraftInfo | None:
        """Return the facts about a service's draft model, or None if it has no draft model.

        The arguments and the errors are the same as for `get`.
        """
        speculative = service.spec.engine.speculativeConfig
        if speculative is None or speculative.model is None:
            return None
        request = _Request(service, uid, secrets, image, DRAFT_SOURCE)
        variant = (speculative.method, str(speculative.numSpeculativeTokens), model.config_digest)
        draft: DraftInfo = await self._get(request, variant, partial(DraftInfo.from_files, speculative, model.shape))
        return draft

    async def _get(self, request: _Request, variant: tuple[str, ...], parse: Parser[Any]) -> Any:
        """Return the result of `parse` for a source.

        If the result also depends on other values, `variant` contains them.
        """
        source, service = request.source, request.service
        namespace = service.namespace or ""
        source_key = (namespace, json.dumps(drop_nulls(to_json(source)), sort_keys=True), *variant)
        if source_key not in self._checkpoints:
            self._raise_if_backing_off(source_key, (namespace, service.name))
            if source.is_mounted:
                checkpoint = await self._read_from_volume(source_key, request, parse)
            else:
                checkpoint = await self._read_remote(source_key, request, parse)
            self._checkpoints[source_key] = checkpoint
            while len(self._checkpoints) > _MAX_CHECKPOINTS:
                self._checkpoints.popitem(last=False)
        self._checkpoints.move_to_end(source_key)
        return self._checkpoints[source_key]

    def _raise_if_backing_off(self, source_key: SourceKey, key: ServiceKey) -> None:
        """If it is too early to read a source again, raise its last error, and requeue the service for the time when
        the source can be read."""
        now = asyncio.get_running_loop().time()
        self._backoff = {other: backoff for other, backoff in self._backoff.items() if backoff[0] > now}
        if source_key in self._backoff:
            retry_at, error = self._backoff[source_key]
            self._requeue(key, retry_at - now)
            raise type(error)(str(error))

    def _back_off(self, source_key: SourceKey, seconds: float, error: ConfigError | Unavailable) -> None:
        # Store a copy of the error. The error itself would keep the frames of its traceback in memory.
        self._backoff[source_key] = asyncio.get_running_loop().time() + seconds, type(error)(str(error))

    async def _read_remote(self, source_key: SourceKey, request: _Request, parse: Parser[T]) -> T:
        async with self._read_semaphore:
            try:
                return await _read_from_source(request, parse, self._borders)
            except Unavailable as error:
                if error.retry_after_s:
                    self._back_off(source_key, min(error.retry_after_s, _MAX_RETRY_AFTER_S), error)
                raise

    async def _read_from_volume(self, source_key: SourceKey, request: _Request, parse: Parser[T]) -> T:
        service, source, field = request.service, request.source, ".".join(map(str, request.path))
        key = (service.namespace or "", service.name)
        manifest = model_reader_job.job(service, source, request.image)
        name, namespace = manifest["metadata"]["name"], key[0]
        self._waiting_services.setdefault(source_key, set()).add(key)
        entry = self._cache.get(resources.JOB, namespace, name)
        if entry is None:
            await self._start_reader_job(manifest, service, request.uid)
            raise NotReadYet(f"Job {name} was created to read config.json from {source.volume_name}")
        try:
            source_field = f"{field}.{source.kind_name}: {source.volume_name}, path {source.volume_path!r}"
            checkpoint = _read_result(entry.body(), await self._termination_messages(entry, name), source_field, parse)
        except (ConfigError, Unavailable) as error:
            if isinstance(error, ConfigError):
                self._back_off(source_key, _FAILED_JOB_RETRY_S, error)
            await self._client.delete(resources.JOB, namespace, name, entry.uid)
            self._requeue_waiting(source_key)
            raise
        if checkpoint is None:
            problem = await self._describe_pod_problem(key, entry)
            raise NotReadYet(f"Job {name} reads config.json from {source.volume_name}{problem}")
        # The Job is not deleted here, because its result would be lost if the operator restarted before the plan is
        # stored. prune() deletes the Job after the plan is stored.
        self._requeue_waiting(source_key)
        return checkpoint

    async def _start_reader_job(self, manifest: dict[str, Any], service: LLMService, uid: str) -> None:
        name = manifest["metadata"]["name"]
        manifest["metadata"]["ownerReferences"] = [owner_reference(service.name, uid)]
        job = await self._client.get_or_none(resources.JOB, service.namespace, name)
        if job is None:
            try:
                # The Job is created instead of applied, because several services may need it at the same time. The
                # first one becomes its owner.
                job = await self._client.create(resources.JOB, manifest)
            except (InvalidObject, Forbidden) as error:
                message = f"the API server rejects Job {name}, which reads config.json from a volume: {error}"
                raise NotReadYet(message, needs_backoff=True) from error
            except WriteConflict as error:
                self._requeue((service.namespace or "", service.name), _JOB_POLL_S)
                raise NotReadYet(f"Job {name} is being started for another service") from error
            self._record_write(resources.JOB, "create")
        elif job["metadata"].get("labels", {}).get(object_names.COMPONENT) != model_reader_job.READER_COMPONENT:
            raise ConfigError(f"Job {name} has another owner ({controller_uid(job)}); delete it")
        self._cache.upsert(resources.JOB, job)

    def _requeue_waiting(self, source_key: SourceKey) -> None:
        """Requeue all services that are waiting for a Job."""
        for key in self._waiting_services.pop(source_key, set()):
            self._requeue(key, 0.0)

    async def _termination_messages(self, entry: CachedObject, job_name: str) -> list[tuple[int, str]]:
        """Return the exit code and the termination message of each container in the Job's pods."""
        messages, job = _termination_messages(self._job_pods(entry.key, job_name)), entry.body()
        if not messages and (job_condition(job, "Complete") or job_condition(job, "Failed")):
            # The watch of pods may be behind the watch of Jobs.
            pods = await self._client.list(resources.POD, entry.key[0], label_selector=f"job-name={job_name}")
            messages = _termination_messages(pods.items)
        return messages

    async def _describe_pod_problem(self, waiting_service: ServiceKey, job: CachedObject) -> str:
        """Return the reason why the pod of a Job is not running. The Job can belong to another service, but the reason
        is reported in the status of `waiting_service`.
        """
        if suspension := describe_suspension(job.body()):
            return f"; {suspension}"
        pods = await self._pod_warnings.attach_warnings(
            job.namespace, map(parse_pod, self._job_pods(job.key, job.name))
        )
        if not pods or any(pod.creating for pod in pods):
            # A new Event about a pod does not requeue the service, so the service must be requeued here.
            self._requeue(waiting_service, EVENT_POLL_S)
        if not pods:
            warning = await self._pod_warnings.fetch_warning(job.namespace, job.name, job.uid)
            return f"; it has no pod: {warning}" if warning else ""
        for pod in pods:
            if pod.gated or pod.unschedulable:
                return f"; its pod has no node: {pod.gated or pod.unschedulable}"
        return next((f"; its pod waits: {pod.waiting}" for pod in pods if pod.waiting), "")

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


def _read_result(
    job: Mapping[str, Any], messages: list[tuple[int, str]], source_field: str, parse: Parser[T]
) -> T | None:
    """Return the result of a Job, or None if the Job is still running.

    Raises:
        ConfigError: the Job failed.
        Unavailable: the Job had no time to run, or its result is lost.
    """
    for code, message in messages:
        if code == 0 and message:
            return _parse_checkpoint(message, parse)
    for code, message in messages:
        if code == 2:
            raise ConfigError(f"{source_field}: {message}")
    if failed := job_condition(job, "Failed"):
        detail = next((message for _, message in messages if message), failed.get("message", ""))
        if failed.get("reason") == "DeadlineExceeded" and not messages:
            # No node had room for the pod, or the claim could not be mounted. The content of the claim is still
            # unknown.
            raise Unavailable(
                f"{source_field}: the Job that reads config.json reached its deadline before one of its pods finished "
                f"({detail})"
            )
        raise ConfigError(f"{source_field}: the Job that reads config.json failed: {detail or failed.get('reason')}")
    if job_condition(job, "Complete"):
        if not messages:
            job_text = "the Job read config.json, but its pod"
            raise Unavailable(f"{source_field}: {job_text} was deleted before the operator read the result")
        raise ConfigError(f"{source_field}: the Job that reads config.json ended without a result; check the image")
    return None


def _parse_checkpoint(message: str, parse: Parser[T]) -> T:
    try:
        document = decompress(message)
        config, index, header = document["config"], document["index"], document["header"]
    except (ValueError, KeyError, TypeError) as error:
        text = f"the Job that reads config.json returned {message[:80]!r}"
        raise ConfigError(f"{text}; check that the image is a Quire image") from error
    return parse(config, index, header)


async def _read_from_source(request: _Request, parse: Parser[T], borders: Borders | None) -> T:
    def secret_values(ref: SecretRef) -> Mapping[str, str]:
        if ref.name not in request.secrets:
            namespace = request.service.namespace
            raise AccessDenied(f"Secret {ref.name!r}: does not exist in namespace {namespace!r}; create it")
        return request.secrets[ref.name]

    return await read_source_checkpoint(request.source, secret_values, parse, borders)
