# SPDX-License-Identifier: Apache-2.0
"""The condition ModelCached and status.cache, which report whether the model's files are downloaded. Pure. Called by
status.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.api.quantity import to_bytes
from quire_operator.api.validation_errors import FieldPath
from quire_operator.controller.object_cache import CachedObject
from quire_operator.controller.status import download_progress
from quire_operator.controller.status.conditions import Condition, ConditionType, Reason
from quire_operator.controller.status.observed_state import (
    KUEUE_PREFIX,
    Body,
    ObservedState,
    PlanningResult,
    PodState,
)
from quire_operator.render import download_job, model_storage, object_names
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.download_result import PERMANENT_REASONS, DownloadReason, DownloadResult
from quire_spec.documents.sources import Source

_QUEUE_LABEL = f"{KUEUE_PREFIX}queue-name"
"""Label with the name of the queue that Kueue uses for an object."""


def evaluate_model_cache(
    service: LLMService, planning: PlanningResult, observed: ObservedState, previous: Mapping[str, Any], now: datetime
) -> tuple[Condition, dict[str, Any]]:
    """Return the condition ModelCached and the value of status.cache. `previous` is the status before this pass."""
    planned_bytes = planning.plan.modelBytes if planning.plan else None
    previous_cache = previous.get("cache") or {}
    if planning.read_error is not None:
        # Without a plan, no Job is created. The error that prevents the plan would also prevent the Job from
        # succeeding.
        reason, message = _explain_result(service, planning.read_error, planning.waiting_for)
        return _condition(False, reason, f"{message}; it is tried again"), {"state": "Failed"}
    if planning.spec_error:
        # While the spec is invalid, nothing is applied. The observed objects may belong to another source of the model.
        message = "unknown: the spec is invalid, see ConfigValid"
        return Condition(ConditionType.MODEL_CACHED, None, Reason.INVALID, message), dict(previous_cache) or {
            "state": "Pending"
        }
    is_planned = planning.plan is not None and not (planning.unplannable or planning.waiting_for)
    mode = model_storage.cache_mode(service)
    if mode == "PVC":
        if observed.job is None and not is_planned:
            message = "the download starts when there is a plan, see Planned"
            return _condition(False, Reason.DOWNLOAD_PENDING, message), _cache_fields("Pending", None)
        progress_fields = download_progress.to_fields(
            _current_progress(observed.job_pods), planned_bytes, previous_cache, now
        )
        condition, cache = _evaluate_job_download(service, observed, previous_cache, progress_fields)
        is_too_small = observed.claim_rejection or condition.reason == Reason.NO_SPACE
        if is_too_small and condition.is_true is not True and (note := _describe_claim_size(planning, observed)):
            condition = replace(condition, message=f"{condition.message}; {note}")
        if service.num_nodes * service.num_replicas > 1 and (note := describe_access(observed.claim)):
            condition = replace(condition, message=f"{condition.message}; {note}")
        return condition, cache
    if mode == "EmptyDir":
        # Pods with other download folders belong to an earlier spec.
        folders = tuple(model_storage.download_folders(service))
        pods = [pod for pod in observed.pods if pod.download_folders == folders]
        return _evaluate_pod_downloads(
            service, pods, download_progress.to_fields(_current_progress(pods), planned_bytes, previous_cache, now)
        )
    volumes = " and ".join(source.volume_name for source in service.model_sources.values() if source.is_mounted)
    if volumes and not is_planned:
        message = f"unknown for {volumes} until there is a plan, see Planned"
        return Condition(ConditionType.MODEL_CACHED, None, Reason.ON_CLAIM, message), {"state": "Pending"}
    location = f"the files are on {volumes}" if volumes else "nothing is downloaded"
    return _condition(True, Reason.ON_CLAIM, location), {"state": "Ready"}


def download_jobs(jobs: Iterable[CachedObject], service: LLMService) -> dict[str, Body]:
    """Return the Jobs that download the service's model, by name. Jobs that are being deleted are omitted."""
    label = (object_names.DOWNLOAD_TARGET_LABEL, download_job.download_target(service))
    bodies = {entry.name: entry.body() for entry in jobs if not entry.deleting}
    return {name: body for name, body in bodies.items() if label in body["metadata"].get("labels", {}).items()}


def job_succeeded(job: Body | None, claim: Body | None) -> bool:
    """Whether a download Job has completed.

    The Job must have written to the claim that exists now. If this claim is being deleted, the result is False.
    """
    return job_condition(job, "Complete") is not None and not predates_claim(job, claim) and not is_terminating(claim)


def predates_claim(job: Body | None, claim: Body | None) -> bool:
    """Whether a Job is older than the claim.

    Such a Job wrote to an earlier claim of the same name, which was deleted.
    """
    if job is None or claim is None:
        return False
    job_created, claim_created = (body["metadata"].get("creationTimestamp", "") for body in (job, claim))
    return bool(job_created < claim_created)


def describe_access(claim: Body | None) -> str:
    """Return a text if only one node, or only one pod, can mount the claim. Otherwise, the text is empty."""
    modes = set() if claim is None else {*claim.get("spec", {}).get("accessModes", ())}
    if claim is None or not modes or model_storage.allow_many_nodes(modes):
        return ""
    users = "all pods must run on one node" if "ReadWriteOnce" in modes else "only one pod can use it"
    return (
        f"claim {claim['metadata']['name']} is {' and '.join(sorted(modes))}, so {users}; to use several nodes, set "
        "spec.cache.accessModes to [ReadWriteMany], and delete the claim while spec.replicas is 0"
    )


def describe_suspension(job: Body | None) -> str:
    """Return a text if a Job is suspended, with the queue of Kueue for which it waits. Otherwise, the text is empty."""
    if job is None or not job["spec"].get("suspend"):
        return ""
    queue = job["metadata"].get("labels", {}).get(_QUEUE_LABEL)
    cause = f"it waits for queue {queue}" if queue else f"it has no label {_QUEUE_LABEL} with the name of a queue"
    return f"Job {job['metadata']['name']} is suspended; {cause}"


def is_terminating(claim: Body | None) -> bool:
    """Whether a claim is being deleted. The claim still exists until the last pod that uses it is deleted, but new pods
    cannot mount it.
    """
    return claim is not None and "deletionTimestamp" in claim["metadata"]


def _evaluate_job_download(
    service: LLMService, observed: ObservedState, previous_cache: Mapping[str, Any], progress_fields: dict[str, Any]
) -> tuple[Condition, dict[str, Any]]:
    """Evaluate the download if a Job downloads the model to a claim, which all pods then mount."""
    pods = sorted(observed.job_pods, key=lambda pod: (pod.created_at, pod.name))
    results = [outcome for pod in pods if (outcome := _download_result(pod))]
    last_result = results[-1] if results else None
    if job_succeeded(observed.job, observed.claim):
        # The commit of the model can be unknown: the Job's pod may have been deleted together with its result, and a
        # pod that downloaded nothing does not know the commit. The event of the Job may also arrive before the event of
        # its last pod. Therefore, results of earlier attempts are not used.
        succeeded = [outcome for outcome in results if outcome.result is DownloadReason.DOWNLOADED]
        cache = (dict(previous_cache) if previous_cache.get("state") == "Ready" else {}) | _cache_fields(
            "Ready", succeeded[-1] if succeeded else None
        )
        return _condition(True, Reason.DOWNLOADED, _describe_cache(cache)), cache
    if failed_condition := job_condition(observed.job, "Failed"):
        reason, message = _explain_failure(service, pods, last_result)
        description = f"{message}; the Job gave up ({failed_condition.get('reason') or 'Failed'})"
        return _condition(False, reason, description), _cache_fields("Failed", last_result)
    if last_result and last_result.result in PERMANENT_REASONS:
        reason, message = _explain_failure(service, pods, last_result)
        return _condition(False, reason, f"{message}; it is tried again"), _cache_fields("Failed", last_result)
    if running := [pod for pod in pods if pod.phase == "Running" and not pod.deleting]:
        last_error = f"; the previous try failed: {last_result.message}" if last_result and last_result.message else ""
        progress_text = f": {description}" if (description := download_progress.describe(progress_fields)) else ""
        message = f"pod {running[-1].name} downloads {_describe_sources(service)}{progress_text}{last_error}"
        return _condition(False, Reason.DOWNLOADING, message), _cache_fields(
            "Downloading", last_result
        ) | progress_fields
    return _condition(False, Reason.DOWNLOAD_PENDING, _explain_waiting(observed, pods, last_result)), _cache_fields(
        "Pending", last_result
    )


def _evaluate_pod_downloads(
    service: LLMService, pods: list[PodState], progress_fields: dict[str, Any]
) -> tuple[Condition, dict[str, Any]]:
    """Evaluate the downloads if each pod downloads the model before it starts."""
    failed_pods = [
        (pod, result)
        for pod in pods
        if pod.alive and not pod.ready and (result := _download_result(pod)) and result.result in PERMANENT_REASONS
    ]
    if failed_pods:
        pod, result = failed_pods[0]
        reason, message = _explain_failure(service, [pod], result)
        return _condition(False, reason, f"pod {pod.name}: {message}"), _cache_fields("Failed", result)
    succeeded = [o for pod in pods if (o := _download_result(pod)) and o.result is DownloadReason.DOWNLOADED]
    message = "each pod downloads the files for itself before it starts (spec.cache.mode EmptyDir)"
    downloading = [pod for pod in pods if pod.alive and pod.downloading]
    if downloading and not succeeded:
        progress_text = (
            f"; a pod does: {description}" if (description := download_progress.describe(progress_fields)) else ""
        )
        return _condition(True, Reason.IN_PODS, message + progress_text), _cache_fields(
            "Downloading", None
        ) | progress_fields
    return _condition(True, Reason.IN_PODS, message), _cache_fields(
        "Ready" if succeeded else "Pending", succeeded[0] if succeeded else None
    )


def _current_progress(pods: Iterable[PodState]) -> DownloadProgress | None:
    """Return the progress of the download. If several pods download, use the pod whose name comes first."""
    reporting_pods = [pod for pod in pods if pod.alive and pod.downloading and pod.progress is not None]
    return min(reporting_pods, key=lambda pod: pod.name).progress if reporting_pods else None


def _explain_failure(
    service: LLMService, pods: list[PodState], last_result: DownloadResult | None
) -> tuple[Reason, str]:
    """Return the reason and the message of a failed download.

    If access was denied, the message contains the name of the Secret.
    """
    if last_result is None:
        terminated = pods[-1].terminated if pods else None
        details = (
            f"{terminated.reason} (exit code {terminated.exit_code}) {terminated.message}"
            if terminated
            else "all pods of the download have been deleted"
        )
        return Reason.DOWNLOAD_FAILED, f"{_describe_sources(service)}: {details}"
    return _explain_result(service, last_result.result, last_result.message)


def _explain_result(service: LLMService, result: DownloadReason, message: str) -> tuple[Reason, str]:
    reason = Reason(result.value)
    if result is DownloadReason.AUTH_FAILED:
        hints = [_secret_hint(path, source) for path, source in service.model_sources.items() if not source.is_mounted]
        return reason, "; ".join([message, *hints])
    return reason, message


def _describe_claim_size(planning: PlanningResult, observed: ObservedState) -> str:
    """Return a text with the size of the claim and the size that downloads need, if the claim is smaller."""
    if planning.plan is None or observed.claim is None:
        return ""
    size, needed = observed.claim["spec"]["resources"]["requests"]["storage"], model_storage.claim_size(planning.plan)
    if to_bytes(size) >= to_bytes(needed):
        return ""
    cause = f" and cannot grow ({observed.claim_rejection})" if observed.claim_rejection else ""
    return (
        f"claim {observed.claim['metadata']['name']} has {size}{cause}, but the previous and the next revision of the "
        f"model need {needed}"
    )


def _explain_waiting(observed: ObservedState, pods: list[PodState], last_result: DownloadResult | None) -> str:
    """Return the reason why a download has not started yet."""
    if observed.claim and is_terminating(observed.claim):
        return (
            f"claim {observed.claim['metadata']['name']} is being deleted, but it exists until the last pod that "
            "uses it ends. Then the operator creates it again, and the download starts. Until then, no new pod can "
            "start. To delete the claim now, set spec.replicas to 0 until the download ends"
        )
    if observed.job is None:
        return "the download Job is being created"
    phase = ((observed.claim or {}).get("status") or {}).get("phase", "")
    claim_text = (
        f"claim {observed.claim['metadata']['name']} is {phase}; " if observed.claim and phase != "Bound" else ""
    )
    if suspension := describe_suspension(observed.job):
        return f"{claim_text}{suspension}"
    if not pods and observed.job_warning:
        return f"{claim_text}Job {observed.job['metadata']['name']} has no pod: {observed.job_warning}"
    if pods and (pod_message := pods[-1].gated or pods[-1].unschedulable or pods[-1].waiting):
        return f"{claim_text}pod {pods[-1].name}: {pod_message}"
    if last_result and last_result.message:
        return f"{claim_text}it is tried again after: {last_result.message}"
    return f"{claim_text}the download Job has no running pod yet"


def _download_result(pod: PodState) -> DownloadResult | None:
    return (
        DownloadResult.parse(pod.terminated.message)
        if pod.terminated and pod.terminated.container == model_storage.DOWNLOAD_CONTAINER
        else None
    )


def _cache_fields(state: str, result: DownloadResult | None) -> dict[str, Any]:
    """status.cache"""
    result_fields = {"bytes": str(result.bytes), "revision": result.revision} if result else {}
    return {"state": state, **{key: value for key, value in result_fields.items() if value}}


def _describe_cache(cache: Mapping[str, Any]) -> str:
    size = str(cache.get("bytes", ""))
    phrases = ["all files exist", *([f"{int(size) / 2**30:.2f} GiB"] if size.isdigit() else [])]
    return ", ".join([*phrases, *([f"revision {cache['revision']}"] if cache.get("revision") else [])])


def _describe_sources(service: LLMService) -> str:
    """Return a short description of what is downloaded."""
    return " and ".join(map(_describe_source, model_storage.downloaded_sources(service)))


def _describe_source(source: Source) -> str:
    """Return a short description of a source."""
    if source.huggingFace is not None:
        revision = f" at {source.huggingFace.revision}" if source.huggingFace.revision else ""
        return f"Hugging Face repository {source.huggingFace.repo}{revision}"
    if source.bucket is not None:
        return source.bucket.uri
    if source.oci is not None:
        return f"artifact {source.oci.reference}"
    return "the files under http.url" if source.http is not None else "the model"


def _secret_hint(path: FieldPath, source: Source) -> str:
    """Return a fix that contains the name of the Secret.

    If the source has no Secret, the fix contains the name of the field for it.
    """
    if not source.secret_field:
        return "check the claim's permissions"
    if (ref := source.secret_ref) is None:
        return f"no Secret is named; set {'.'.join(map(str, (*path, *source.secret_field)))}"
    return f"check Secret {ref.name!r}" + (f", key {ref.key!r}" if ref.key else "")


def job_condition(job: Body | None, condition_type: str) -> Mapping[str, Any] | None:
    """Return the Job's condition of the given type if the status of the condition is True. Otherwise, return None."""
    conditions = ((job or {}).get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == condition_type and c.get("status") == "True"), None)


def is_finished(job: Body) -> bool:
    """Whether a Job has completed or failed."""
    return bool(job_condition(job, "Complete") or job_condition(job, "Failed"))


def _condition(is_true: bool, reason: Reason, message: str) -> Condition:
    return Condition(ConditionType.MODEL_CACHED, is_true, reason, message)
