# SPDX-License-Identifier: Apache-2.0
"""Adapters over all pods: who has to be told the catalogue, and what status.adapters and AdaptersReady say. Pure.

A pod's own status document is believed and nothing else: it names the catalogue that it works on by generation and
digest, so nothing has to be remembered of what was sent to whom. A container that has started anew works on the
catalogue that it found at its start, and its document says so; a core that has started anew says that its adapters are
being loaded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire_operator.reconcile.conditions import Condition, Reason, Type, short
from quire_operator.reconcile.observed import Pod
from quire_spec.constants import MAX_MODEL_NAME, MODEL_NAME
from quire_spec.documents.adapter_catalog import AdapterCatalog, CatalogVersion
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, PodStatus

MAX_FAILURES = 10
"""Adapters whose errors are told; the counts are of all."""
_MAX_ERROR = 512
_MAX_MODELS = 1025
_MAX_DIGEST = 71
_BEHIND = ("Failed", "Pending", "Fetching", "Loading", "Ready")
"""States from farthest behind."""


def needs_push(report: PodStatus, wanted: CatalogVersion) -> bool:
    """Whether a pod has to be told this catalogue: it works on another one, and not on a newer."""
    return not works_on(report, wanted) and not is_ahead(report, wanted)


def is_ahead(report: PodStatus, wanted: CatalogVersion) -> bool:
    """Whether a pod works on a newer catalogue: what we hold is stale, and the next pass will know better."""
    return report.generation > wanted.generation and not works_on(report, wanted)


def works_on(report: PodStatus, wanted: CatalogVersion) -> bool:
    """Whether a pod works on just these adapters.

    Generations may differ: most edits of a service leave its adapters as they are, and telling the pods each of them
    would have them look at every source again. A pod that tells no digest is believed by its generation.
    """
    return report.catalogue == wanted.digest if report.catalogue else report.generation == wanted.generation


@dataclass(frozen=True, slots=True)
class Adapters:
    """What is to be said of the adapters."""

    entries: list[dict[str, Any]]
    """status.adapters"""
    ready: str
    """status.adaptersReady, such as 2/3."""
    condition: Condition


def judge(catalogue: AdapterCatalog, pods: Sequence[Pod], ready_pods: Sequence[Pod]) -> Adapters:
    """`ready_pods` are those of `pods` that clients are sent to."""
    wanted = catalogue.version
    by_name = {pod.uid: _by_name(pod, wanted) for pod in pods}
    shown = list(ready_pods) or [pod for pod in pods if pod.report]
    entries = []
    num_failures = 0
    for adapter in catalogue.adapters:
        worst, blamed, error = _farthest(adapter.name, shown, by_name)
        ready = sum(by_name[pod.uid][adapter.name].state is AdapterState.READY
                    for pod in ready_pods if adapter.name in by_name[pod.uid])  # fmt: skip
        message = ""
        if error and num_failures < MAX_FAILURES:
            num_failures += 1
            message = short(f"pod {blamed}: {error}", _MAX_ERROR)
        entry = {"name": adapter.name, "ready": ready, "total": len(ready_pods), "state": worst}
        entries.append(entry | _digest(adapter.name, shown, by_name) | ({"message": message} if message else {}))
    num_ready = sum(_everywhere(entry) for entry in entries)
    condition = _condition(entries, num_ready, wanted, ready_pods)
    return Adapters(entries, f"{num_ready}/{len(entries)}", condition)


def models(ready_pods: Sequence[Pod]) -> list[str]:
    """Names that every ready pod answers to; none while a ready pod does not tell."""
    if not ready_pods or any(pod.report is None for pod in ready_pods):
        return []
    first, *others = [pod.report.models for pod in ready_pods if pod.report]
    common = set(first).intersection(*others)
    # As many and as long as the schema takes: a pod with a broken tongue must not keep the status from being written.
    return [name for name in dict.fromkeys(first) if name in common and _is_name(name)][:_MAX_MODELS]


def _is_name(name: str) -> bool:
    return len(name) <= MAX_MODEL_NAME and MODEL_NAME.fullmatch(name) is not None


def _condition(
    entries: list[dict[str, Any]], num_ready: int, wanted: CatalogVersion, ready_pods: Sequence[Pod]
) -> Condition:
    def make(holds: bool | None, reason: Reason, message: str) -> Condition:
        return Condition(Type.ADAPTERS_READY, holds, reason, message)

    if not ready_pods:
        if not entries:
            return make(True, Reason.NO_ADAPTERS, "spec.adapters is empty")
        return make(None, Reason.NO_READY_PODS, "no pod is ready")
    if silent := [pod for pod in ready_pods if pod.report is None]:
        return make(None, Reason.PODS_UNREACHABLE, _unreachable(silent))
    where = f"all {len(ready_pods)} ready pods" if len(ready_pods) > 1 else "the one ready pod"
    counts = f"{num_ready} of {len(entries)} adapters are on {where}"
    failed = [entry for entry in entries if entry["state"] == "Failed"]
    if failed:
        causes = "; ".join(f"{entry['name']}: {entry['message']}" for entry in failed[:3] if "message" in entry)
        more = f" (and {len(failed) - 3} more)" if len(failed) > 3 else ""
        return make(False, Reason.LOAD_FAILED, f"{counts}; {causes}{more}")
    behind = [pod for pod in ready_pods if pod.report and not works_on(pod.report, wanted)]
    if behind:
        return make(False, Reason.LOADING, f"{counts}; {_why_behind(behind, wanted)}")
    if num_ready < len(entries):
        waiting = [entry["name"] for entry in entries if not _everywhere(entry)]
        more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
        return make(False, Reason.LOADING, f"{counts}; on their way: {', '.join(waiting[:5])}{more}")
    if not entries:
        return make(True, Reason.NO_ADAPTERS, "spec.adapters is empty")
    return make(True, Reason.ALL_LOADED, counts)


def _unreachable(silent: Sequence[Pod]) -> str:
    """Which ready pods do not tell the operator how they are."""
    more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
    words = silent[0].report_error or "its health port was not asked yet"
    return f"pod {silent[0].name} does not tell how it is: {words}{more}"


def _why_behind(behind: Sequence[Pod], wanted: CatalogVersion) -> str:
    first = behind[0]
    assert first.report is not None
    found = first.report.generation
    if is_ahead(first.report, wanted):
        return f"pod {first.name} works on generation {found}, which is newer than {wanted.generation}"
    words = f": {first.report_error}" if first.report_error else ""
    return (
        f"{len(behind)} pods have not taken generation {wanted.generation} yet, pod {first.name} is at {found}{words}"
    )


def _by_name(pod: Pod, wanted: CatalogVersion) -> dict[str, AdapterStatus]:
    """What a pod says of these adapters; nothing while it works on others: a name may mean another source there."""
    if pod.report is None or not works_on(pod.report, wanted):
        return {}
    return {status.name: status for status in pod.report.adapters}


def _farthest(name: str, pods: Sequence[Pod], by_name: dict[str, dict[str, AdapterStatus]]) -> tuple[str, str, str]:
    """State of the pod that is farthest behind with an adapter, its name, and its error."""
    found = [_state(name, pod, by_name) for pod in pods]
    return min(found, key=lambda item: (_BEHIND.index(item[0]), item[1]), default=("Pending", "", ""))


def _state(name: str, pod: Pod, by_name: dict[str, dict[str, AdapterStatus]]) -> tuple[str, str, str]:
    status = by_name[pod.uid].get(name)
    return ("Pending", pod.name, "") if status is None else (status.state.value, pod.name, status.error)


def _digest(name: str, pods: Sequence[Pod], by_name: dict[str, dict[str, AdapterStatus]]) -> dict[str, str]:
    """The digest, where all pods that know one know the same."""
    found = set(_digests(name, pods, by_name))
    return {"digest": found.pop()} if len(found) == 1 else {}


def _digests(name: str, pods: Sequence[Pod], by_name: dict[str, dict[str, AdapterStatus]]) -> Iterator[str]:
    for pod in pods:
        status = by_name[pod.uid].get(name)
        if status is not None and status.digest and len(status.digest) <= _MAX_DIGEST and status.digest.isascii():
            yield status.digest


def _everywhere(entry: dict[str, Any]) -> bool:
    return bool(entry["total"] and entry["ready"] == entry["total"])
