# SPDX-License-Identifier: Apache-2.0
"""ModelCached and status.cache: whether the model's files are there, and what keeps them from it. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from quire_operator.reconcile import progress
from quire_operator.reconcile.cache import Entry
from quire_operator.reconcile.conditions import Condition, Reason, Type
from quire_operator.reconcile.observed import Body, Observed, Pod, Verdict
from quire_operator.render import download, model, names
from quire_operator.service import LLMService
from quire_spec.documents.adapter_catalog import Source
from quire_spec.documents.download_progress import DownloadProgress
from quire_spec.documents.download_result import PERMANENT_REASONS, DownloadReason, DownloadResult


def judge(
    service: LLMService, verdict: Verdict, observed: Observed, previous: Mapping[str, Any], now: datetime
) -> tuple[Condition, dict[str, Any]]:
    """The condition ModelCached, and status.cache; `previous` is the status before."""
    planned = verdict.plan.modelBytes if verdict.plan else None
    before = previous.get("cache") or {}
    if verdict.unread is not None:
        # No Job is made before there is a plan; what kept the plan from being made would keep it, too.
        reason, message = _explained(service, verdict.unread, verdict.pending)
        return _condition(False, reason, f"{message}; it is tried again"), {"state": "Failed"}
    if verdict.invalid:
        # Nothing of it is done, and what was seen may be of another source.
        message = "not judged: the spec cannot be used, see ConfigValid"
        return Condition(Type.MODEL_CACHED, None, Reason.INVALID, message), dict(before) or {"state": "Pending"}
    planned_now = verdict.plan is not None and not (verdict.unplannable or verdict.pending)
    mode = model.mode(service)
    if mode == "PVC":
        if observed.job is None and not planned_now:
            message = "the model is downloaded once there is a plan, see Planned"
            return _condition(False, Reason.DOWNLOAD_PENDING, message), _cache("Pending", None)
        under_way = progress.fields(_progress(observed.job_pods), planned, before, now)
        return _of_job(service, observed, before, under_way)
    if mode == "EmptyDir":
        # Others have, or bring, what the spec said before.
        pods = [pod for pod in observed.pods if pod.downloads_to == model.folder(service)]
        return _in_pods(service, pods, progress.fields(_progress(pods), planned, before, now))
    claim = service.spec.model.source.pvc
    if claim and not planned_now:
        message = f"not known of claim {claim.claimName!r} while there is no plan, see Planned"
        return Condition(Type.MODEL_CACHED, None, Reason.ON_CLAIM, message), {"state": "Pending"}
    where = f"the files are on claim {claim.claimName!r}" if claim else "nothing is downloaded"
    return _condition(True, Reason.ON_CLAIM, where), {"state": "Ready"}


def downloads(jobs: Iterable[Entry], service: LLMService) -> list[Entry]:
    """Those of a service's Jobs that bring its model, less what is on its way out."""
    brings = download.brings(service)
    labels = ((entry, entry.body()["metadata"].get("labels", {})) for entry in jobs if not entry.deleting)
    return [entry for entry, found in labels if found.get(names.BRINGS) == brings]


def job_succeeded(job: Body | None, claim: Body | None) -> bool:
    """Whether a download Job has brought everything to the claim that is there, and stays."""
    return job_condition(job, "Complete") is not None and not is_of_another_claim(job, claim) and not is_going(claim)


def is_of_another_claim(job: Body | None, claim: Body | None) -> bool:
    """Whether a Job was made before the claim, and so for one of the same name that is gone."""
    if job is None or claim is None:
        return False
    made, since = (body["metadata"].get("creationTimestamp", "") for body in (job, claim))
    return bool(made < since)


def is_going(claim: Body | None) -> bool:
    """Whether a claim is being deleted: it stays while pods have it, also those that ended, and no other gets it."""
    return claim is not None and "deletionTimestamp" in claim["metadata"]


def _of_job(
    service: LLMService, observed: Observed, before: Mapping[str, Any], under_way: dict[str, Any]
) -> tuple[Condition, dict[str, Any]]:
    """One Job downloads to a claim that all pods read; `under_way` says how far it is."""
    pods = sorted(observed.job_pods, key=lambda pod: (pod.created_at, pod.name))
    outcomes = [outcome for pod in pods if (outcome := _outcome(pod))]
    last = outcomes[-1] if outcomes else None
    if job_succeeded(observed.job, observed.claim):
        # A Job's pod goes, and what it said with it; one that found all there does not know the commit. And news of the
        # Job may be here before those of its last pod: what a try before it said is not what there is.
        done = [outcome for outcome in outcomes if outcome.result is DownloadReason.DOWNLOADED]
        cache = (dict(before) if before.get("state") == "Ready" else {}) | _cache("Ready", done[-1] if done else None)
        return _condition(True, Reason.DOWNLOADED, _there(cache)), cache
    if failed := job_condition(observed.job, "Failed"):
        reason, message = _failure(service, pods, last)
        words = f"{message}; the Job gave up ({failed.get('reason') or 'Failed'})"
        return _condition(False, reason, words), _cache("Failed", last)
    if last and last.result in PERMANENT_REASONS:
        reason, message = _failure(service, pods, last)
        return _condition(False, reason, f"{message}; it is tried again"), _cache("Failed", last)
    if running := [pod for pod in pods if pod.phase == "Running" and not pod.deleting]:
        again = f"; the try before: {last.message}" if last and last.message else ""
        far = f": {words}" if (words := progress.words(under_way)) else ""
        message = f"pod {running[-1].name} downloads {_what(service.spec.model.source)}{far}{again}"
        return _condition(False, Reason.DOWNLOADING, message), _cache("Downloading", last) | under_way
    return _condition(False, Reason.DOWNLOAD_PENDING, _waits(observed, pods, last)), _cache("Pending", last)


def _in_pods(service: LLMService, pods: list[Pod], under_way: dict[str, Any]) -> tuple[Condition, dict[str, Any]]:
    """Each of these pods downloads for itself, before it starts; `under_way` says how far one of them is."""
    stuck = [
        (pod, outcome)
        for pod in pods
        if pod.alive and not pod.ready and (outcome := _outcome(pod)) and outcome.result in PERMANENT_REASONS
    ]
    if stuck:
        pod, outcome = stuck[0]
        reason, message = _failure(service, [pod], outcome)
        return _condition(False, reason, f"pod {pod.name}: {message}"), _cache("Failed", outcome)
    done = [o for pod in pods if (o := _outcome(pod)) and o.result is DownloadReason.DOWNLOADED]
    message = "each pod downloads the files for itself before it starts (spec.cache.mode EmptyDir)"
    loading = [pod for pod in pods if pod.alive and pod.downloading]
    if loading and not done:
        far = f"; a pod does: {words}" if (words := progress.words(under_way)) else ""
        return _condition(True, Reason.IN_PODS, message + far), _cache("Downloading", None) | under_way
    return _condition(True, Reason.IN_PODS, message), _cache("Ready" if done else "Pending", done[0] if done else None)


def _progress(pods: Iterable[Pod]) -> DownloadProgress | None:
    """How far the download is, or of several that of the first pod by name."""
    said = [pod for pod in pods if pod.alive and pod.downloading and pod.progress is not None]
    return min(said, key=lambda pod: pod.name).progress if said else None


def _failure(service: LLMService, pods: list[Pod], last: DownloadResult | None) -> tuple[Reason, str]:
    """Why a download failed, with the Secret where access is what it lacks."""
    if last is None:
        ended = pods[-1].ended if pods else None
        words = f"{ended.reason} (exit code {ended.exit_code}) {ended.message}" if ended else "no pod of it is left"
        return Reason.DOWNLOAD_FAILED, f"{_what(service.spec.model.source)}: {words}"
    return _explained(service, last.result, last.message)


def _explained(service: LLMService, result: DownloadReason, message: str) -> tuple[Reason, str]:
    reason = Reason(result.value)
    if result is DownloadReason.AUTH_FAILED:
        return reason, f"{message}; {_secret(service.spec.model.source)}"
    return reason, message


def _waits(observed: Observed, pods: list[Pod], last: DownloadResult | None) -> str:
    """What a download that does not run waits for."""
    if observed.claim and is_going(observed.claim):
        return (
            f"claim {observed.claim['metadata']['name']} is being deleted, which waits for the last pod that has it; "
            "then it is made again, and filled. Pods go on with it, but no new one can start: to have it now, set "
            "spec.replicas to 0 until it is filled"
        )
    if observed.job is None:
        return "the download Job is being made"
    phase = ((observed.claim or {}).get("status") or {}).get("phase", "")
    claim = f"claim {observed.claim['metadata']['name']} is {phase}; " if observed.claim and phase != "Bound" else ""
    if pods and (words := pods[-1].unschedulable or pods[-1].waiting):
        return f"{claim}pod {pods[-1].name}: {words}"
    if last and last.message:
        return f"{claim}it is tried again after: {last.message}"
    return f"{claim}the download Job has no running pod yet"


def _outcome(pod: Pod) -> DownloadResult | None:
    return DownloadResult.parse(pod.ended.message) if pod.ended and pod.ended.container == model.DOWNLOAD else None


def _cache(state: str, outcome: DownloadResult | None) -> dict[str, Any]:
    """status.cache"""
    known = {"bytes": str(outcome.bytes), "revision": outcome.revision} if outcome else {}
    return {"state": state, **{key: value for key, value in known.items() if value}}


def _there(cache: Mapping[str, Any]) -> str:
    size = str(cache.get("bytes", ""))
    parts = ["all files are there", *([f"{int(size) / 2**30:.2f} GiB"] if size.isdigit() else [])]
    return ", ".join([*parts, *([f"revision {cache['revision']}"] if cache.get("revision") else [])])


def _what(source: Source) -> str:
    """A source in a few words."""
    if source.huggingFace is not None:
        revision = f" at {source.huggingFace.revision}" if source.huggingFace.revision else ""
        return f"Hugging Face repository {source.huggingFace.repo}{revision}"
    if source.s3 is not None:
        return source.s3.uri
    return "the files under spec.model.source.http.url" if source.http is not None else "the model"


def _secret(source: Source) -> str:
    """Which Secret to look at, or where to name one."""
    for kind, field in (
        ("huggingFace", "tokenSecretRef"), ("s3", "credentialsSecretRef"), ("http", "headersSecretRef"),
    ):  # fmt: skip
        place = getattr(source, kind)
        if place is not None:
            ref = getattr(place, field)
            if ref is None:
                return f"no Secret is named; set spec.model.source.{kind}.{field}"
            return f"check Secret {ref.name!r}" + (f", key {ref.key!r}" if ref.key else "")
    return "check the claim's permissions"


def job_condition(job: Body | None, kind: str) -> Mapping[str, Any] | None:
    """The condition of a Job, where it holds."""
    conditions = ((job or {}).get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == kind and c.get("status") == "True"), None)


def _condition(holds: bool, reason: Reason, message: str) -> Condition:
    return Condition(Type.MODEL_CACHED, holds, reason, message)
