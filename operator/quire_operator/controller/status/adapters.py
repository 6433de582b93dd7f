# SPDX-License-Identifier: Apache-2.0
"""State of the adapters on all pods of a service.

The module decides which pods need a push of the catalog, and evaluates status.adapters and the condition AdaptersReady.
Pure.

The operator does not record its pushes, because the status of each pod contains the generation and the digest of the
pod's adapter catalog. A container that has restarted reports the catalog that it mounted. If the engine core has
restarted, its adapters are reported as loading.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire_operator.controller.status.conditions import Condition, ConditionType, Reason, to_single_line
from quire_operator.controller.status.observed_state import PodState
from quire_spec.constants import MAX_MODEL_NAME, MODEL_NAME
from quire_spec.documents.adapter_catalog import AdapterCatalog, CatalogVersion
from quire_spec.documents.pod_status import AdapterStatus, PodStatus

MAX_FAILURES = 10
"""The message of the condition contains the errors or warnings of at most this many adapters. Its numbers include all
adapters.
"""
_MAX_ERROR = 512
_MAX_MODELS = 1025
_MAX_DIGEST = 71
_STATES_LEAST_READY_FIRST = ("Failed", "Pending", "Fetching", "Loading", "Verified", "Ready")
"""The states of an adapter, in the order of their progress."""


def needs_push(report: PodStatus, version: CatalogVersion) -> bool:
    """Whether the catalog `version` must be pushed to a pod.

    This is the case if the pod has a different catalog that is not newer.
    """
    return not has_catalog(report, version) and not has_newer_catalog(report, version)


def has_newer_catalog(report: PodStatus, version: CatalogVersion) -> bool:
    """Whether the catalog of a pod is newer than `version`. If it is, the cached service is stale."""
    return report.generation > version.generation and not has_catalog(report, version)


def has_catalog(report: PodStatus, version: CatalogVersion) -> bool:
    """Whether a pod has exactly the adapters that are in the catalog `version`.

    The generations may differ, because most edits of a service do not change its adapters. A push would then be
    wasteful, because the pod would check every source again. If the pod does not report a digest, the generations are
    compared instead.
    """
    return report.catalogue == version.digest if report.catalogue else report.generation == version.generation


@dataclass(frozen=True, slots=True)
class AdaptersState:
    """The part of a service's status that describes its adapters."""

    entries: list[dict[str, Any]]
    """status.adapters"""
    ready_summary: str
    """status.adaptersReady, such as 2/3."""
    condition: Condition


def evaluate_adapters(
    catalog: AdapterCatalog, pods: Sequence[PodState], ready_pods: Sequence[PodState]
) -> AdaptersState:
    """Evaluate the adapters. `ready_pods` are those pods in `pods` that receive requests."""
    version = catalog.version
    adapters_by_pod = {pod.uid: _adapters_by_name(pod, version) for pod in pods}
    reporting_pods = list(ready_pods) or [pod for pod in pods if pod.report]
    entries = []
    num_failures = 0
    for adapter in catalog.adapters:
        state, pod_name, error = _least_ready_state(adapter.name, reporting_pods, adapters_by_pod)
        ready = sum(_adapter_state(adapter.name, pod, adapters_by_pod)[0] == "Ready" for pod in ready_pods)
        if not error:
            pod_name, error = _warning(adapter.name, reporting_pods, adapters_by_pod)
        message = ""
        if error and num_failures < MAX_FAILURES:
            num_failures += 1
            message = to_single_line(f"pod {pod_name}: {error}", _MAX_ERROR)
        entry = {"name": adapter.name, "ready": ready, "total": len(ready_pods), "state": state}
        entries.append(
            entry
            | _common_digest(adapter.name, reporting_pods, adapters_by_pod)
            | _common_signer(adapter.name, reporting_pods, adapters_by_pod)
            | ({"message": message} if message else {})
        )
    num_ready = sum(_is_ready_everywhere(entry) for entry in entries)
    condition = _condition(entries, num_ready, version, ready_pods)
    return AdaptersState(entries, f"{num_ready}/{len(entries)}", condition)


def common_model_names(ready_pods: Sequence[PodState]) -> list[str]:
    """Return the model names that all ready pods serve.

    If a ready pod does not report its status, the list is empty.
    """
    if not ready_pods or any(pod.report is None for pod in ready_pods):
        return []
    first, *remaining = [pod.report.models for pod in ready_pods if pod.report]
    common = set(first).intersection(*remaining)
    # The schema of the CRD has the same limits. A faulty pod must not prevent the operator from writing the status.
    return [name for name in dict.fromkeys(first) if name in common and _is_name(name)][:_MAX_MODELS]


def _is_name(name: str) -> bool:
    return len(name) <= MAX_MODEL_NAME and MODEL_NAME.fullmatch(name) is not None


def _condition(
    entries: list[dict[str, Any]], num_ready: int, version: CatalogVersion, ready_pods: Sequence[PodState]
) -> Condition:
    def make(is_true: bool | None, reason: Reason, message: str) -> Condition:
        return Condition(ConditionType.ADAPTERS_READY, is_true, reason, message)

    if not ready_pods:
        if not entries:
            return make(True, Reason.NO_ADAPTERS, "spec.adapters is empty")
        return make(None, Reason.NO_READY_PODS, "no pod is ready")
    if unreachable := [pod for pod in ready_pods if pod.report is None]:
        return make(None, Reason.PODS_UNREACHABLE, _describe_unreachable(unreachable))
    ready_pods_text = f"all {len(ready_pods)} ready pods" if len(ready_pods) > 1 else "the one ready pod"
    counts = f"{num_ready} of {len(entries)} adapters are on {ready_pods_text}"
    failed = [entry for entry in entries if entry["state"] == "Failed"]
    if failed:
        causes = "; ".join(f"{entry['name']}: {entry['message']}" for entry in failed[:3] if "message" in entry)
        more = f" (and {len(failed) - 3} more)" if len(failed) > 3 else ""
        return make(False, Reason.LOAD_FAILED, f"{counts}; {causes}{more}")
    stale = [pod for pod in ready_pods if pod.report and not has_catalog(pod.report, version)]
    if stale:
        return make(False, Reason.LOADING, f"{counts}; {_describe_stale_pods(stale, version)}")
    if num_ready < len(entries):
        waiting = [entry["name"] for entry in entries if not _is_ready_everywhere(entry)]
        more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
        return make(False, Reason.LOADING, f"{counts}; on their way: {', '.join(waiting[:5])}{more}")
    if not entries:
        return make(True, Reason.NO_ADAPTERS, "spec.adapters is empty")
    warned = [f"; {entry['name']}: {entry['message']}" for entry in entries if "message" in entry]
    more = f" (and {len(warned) - 3} more)" if len(warned) > 3 else ""
    return make(True, Reason.ALL_LOADED, f"{counts}{''.join(warned[:3])}{more}")


def _describe_unreachable(unreachable: Sequence[PodState]) -> str:
    """Return a message about the ready pods that do not report their status."""
    more = f" (and {len(unreachable) - 1} more)" if len(unreachable) > 1 else ""
    error = unreachable[0].report_error or "not read yet"
    return f"pod {unreachable[0].name} does not report its status: {error}{more}"


def _describe_stale_pods(stale: Sequence[PodState], version: CatalogVersion) -> str:
    first = stale[0]
    assert first.report is not None
    generation = first.report.generation
    if has_newer_catalog(first.report, version):
        return f"pod {first.name} works on generation {generation}, which is newer than {version.generation}"
    error = f": {first.report_error}" if first.report_error else ""
    return (
        f"{len(stale)} pods have not taken generation {version.generation} yet, pod {first.name} is at "
        f"{generation}{error}"
    )


def _adapters_by_name(pod: PodState, version: CatalogVersion) -> dict[str, AdapterStatus]:
    """Return the status of each adapter on a pod.

    If the pod has a different catalog, the result is empty, because a name can then mean another adapter.
    """
    if pod.report is None or not has_catalog(pod.report, version):
        return {}
    return {status.name: status for status in pod.report.adapters}


def _least_ready_state(
    name: str, pods: Sequence[PodState], adapters_by_pod: dict[str, dict[str, AdapterStatus]]
) -> tuple[str, str, str]:
    """Return the state of an adapter on the pod where it has made the least progress.

    If the adapter has a candidate, this is the state of the candidate. The result also contains the name of the pod and
    the error.
    """
    states = [_adapter_state(name, pod, adapters_by_pod) for pod in pods]
    return min(
        states, key=lambda item: (_STATES_LEAST_READY_FIRST.index(item[0]), item[1]), default=("Pending", "", "")
    )


def _adapter_state(
    name: str, pod: PodState, adapters_by_pod: dict[str, dict[str, AdapterStatus]]
) -> tuple[str, str, str]:
    status = adapters_by_pod[pod.uid].get(name)
    if status is None:
        return "Pending", pod.name, ""
    if (candidate := status.candidate) is None:
        states = [(status.state.value, pod.name, status.error)]
        for version, content in status.versions.items():
            error = f"version {version}: {content.error}" if content.error else ""
            states.append((content.state.value, pod.name, error))
        return min(states, key=lambda item: _STATES_LEAST_READY_FIRST.index(item[0]))
    serving = f" (still serving {status.digest})" if candidate.error and status.digest else ""
    return candidate.state.value, pod.name, f"{candidate.error}{serving}"


def _warning(
    name: str, pods: Sequence[PodState], adapters_by_pod: dict[str, dict[str, AdapterStatus]]
) -> tuple[str, str]:
    """Return the first warning about an adapter and the pod that reports it; empty if there is none."""
    statuses = ((pod.name, adapters_by_pod[pod.uid].get(name)) for pod in pods)
    return next(((pod, status.warning) for pod, status in statuses if status and status.warning), ("", ""))


def _common_digest(
    name: str, pods: Sequence[PodState], adapters_by_pod: dict[str, dict[str, AdapterStatus]]
) -> dict[str, str]:
    """Return the digest of the adapter, if all pods that report a digest report the same one."""
    digests = set(_known_digests(name, pods, adapters_by_pod))
    return {"digest": digests.pop()} if len(digests) == 1 else {}


def _common_signer(
    name: str, pods: Sequence[PodState], adapters_by_pod: dict[str, dict[str, AdapterStatus]]
) -> dict[str, str]:
    """Return the signer of the adapter, if all pods report the same one."""
    statuses = [adapters_by_pod[pod.uid].get(name) for pod in pods]
    signers = {status.signer if status is not None else None for status in statuses}
    signer = signers.pop() if len(signers) == 1 else None
    return {"signer": signer} if signer is not None and _is_name(signer) else {}


def _known_digests(
    name: str, pods: Sequence[PodState], adapters_by_pod: dict[str, dict[str, AdapterStatus]]
) -> Iterator[str]:
    for pod in pods:
        status = adapters_by_pod[pod.uid].get(name)
        if status is not None and status.digest and len(status.digest) <= _MAX_DIGEST and status.digest.isascii():
            yield status.digest


def _is_ready_everywhere(entry: dict[str, Any]) -> bool:
    return bool(entry["total"] and entry["ready"] == entry["total"])
