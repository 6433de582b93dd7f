# SPDX-License-Identifier: Apache-2.0
"""Invariants of every status of an LLMService, checked against recorded versions (recorders.py)."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

from support.chaos.downloads import ChaosDownloads
from support.chaos.recorders import ObjectVersion, StartedPod, WatchRecorder, is_ready, is_serving_pod_of
from support.cluster import Cluster
from support.observed_factories import schema_problems

from quire_spec.documents.adapter_catalog import AdapterCatalog

Manifest = dict[str, Any]
LLM_SERVICE_KIND = ("quire.dev/v1alpha1", "LLMService")
STALE_S = 12.0
"""Age of the oldest state that a status may show: a watch without events is stale after 11 s, plus a pass."""
WATCH_LAG_S = 1.0
"""By how much one of the recorders' watches may lag behind another."""


def desired_catalog_digest(spec: Mapping[str, Any]) -> str:
    """Return the catalog digest of a stored spec."""
    return AdapterCatalog.from_json({"adapters": spec.get("adapters") or []}).version.digest


class StatusInvariants:
    """Records services and pods, and returns violations. A context manager."""

    def __init__(
        self, cluster: Cluster, namespace: str, started_pods: Mapping[str, StartedPod], downloads: ChaosDownloads
    ) -> None:
        """`started_pods` contains every pod that ever ran, by uid."""
        self.services = WatchRecorder(cluster, *LLM_SERVICE_KIND, namespace)
        self.pods = WatchRecorder(cluster, "v1", "Pod", namespace)
        self.started_pods, self.downloads = started_pods, downloads

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.services)
            stack.enter_context(self.pods)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def violations(self) -> list[str]:
        """Return the violations of all recorded versions of services."""
        watches = (self.services, self.pods)
        violations = [f"the watch of {watch.path} ended: {watch.error}" for watch in watches if watch.error]
        last_status: dict[str, Manifest] = {}
        for version in list(self.services.versions):
            body, meta = version.body, version.body["metadata"]
            # The mark of the operator is written on its own.
            status = {name: value for name, value in (body.get("status") or {}).items() if name != "operator"}
            previous = last_status.get(version.uid, {})
            last_status[version.uid] = status
            if version.deleted or status == previous:
                continue
            problems = [
                *status_violations(meta["generation"], status),
                *transition_violations(previous, status),
                *self.downloads.violations(body),
                *self._compare_with_pods(version),
            ]
            where = f"{meta['name']} at {version.seen_at:.2f}, generation {meta['generation']}"
            violations += [f"{where}: {problem}" for problem in problems]
        return violations

    def _compare_with_pods(self, version: ObjectVersion) -> Iterator[str]:
        """Compare a status with the pods that were ready at some time before it."""
        spec, status = version.body["spec"], version.body["status"]
        ready_uids = self._recently_ready_pods(version.body["metadata"]["name"], version.seen_at)
        if status["readyReplicas"] > len(ready_uids):
            yield f"readyReplicas is {status['readyReplicas']}, but {len(ready_uids)} pods were ready"
        started_pods = [self.started_pods[uid] for uid in ready_uids]
        num_matching = sum(pod.matches_spec(spec) for pod in started_pods)
        if is_reported_ready(status) and num_matching < spec.get("replicas", 1):
            yield f"Ready, but {num_matching} of {spec.get('replicas', 1)} pods of this spec were ready"

    def _recently_ready_pods(self, service: str, until: float) -> set[str]:
        """Return the uids of pods of a service that were ready at some time in the STALE_S before `until`."""
        ready_uids: set[str] = set()
        for version in list(self.pods.versions):
            if not is_serving_pod_of(version.body, service) or version.seen_at > until + WATCH_LAG_S:
                continue
            if not version.deleted and is_ready(version.body):
                ready_uids.add(version.uid)
            elif version.seen_at < until - STALE_S:
                ready_uids.discard(version.uid)
        return ready_uids


def is_reported_ready(status: Manifest) -> bool:
    """Whether the condition Ready is true."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])


def status_violations(generation: int, status: Manifest) -> Iterator[str]:
    """Yield contradictions within a status; `generation` is that of its spec."""
    yield from schema_problems(status)
    if status["observedGeneration"] != generation:
        yield f"observedGeneration {status['observedGeneration']}"
    conditions = {c["type"]: c for c in status["conditions"]}
    if len(conditions) != 7 or any(c["observedGeneration"] != generation for c in conditions.values()):
        yield f"conditions of {[(c['type'], c['observedGeneration']) for c in status['conditions']]}"
    if is_reported_ready(status):
        kinds = ("ConfigValid", "Planned", "ModelCached", "Available", "AdaptersReady")
        yield from (f"Ready, but {conditions[kind]}" for kind in kinds if conditions[kind]["status"] != "True")
    entries = status.get("adapters") or ()
    num_fully_ready = sum(0 < entry["total"] == entry["ready"] for entry in entries)
    if status.get("adaptersReady", "0/0") != f"{num_fully_ready}/{len(entries)}":
        yield f"adaptersReady {status['adaptersReady']} of {entries}"


def transition_violations(before: Manifest, after: Manifest) -> Iterator[str]:
    """Yield invalid transitions from the previous status."""
    if before.get("observedGeneration", 0) > after["observedGeneration"]:
        yield f"observedGeneration {after['observedGeneration']} after {before['observedGeneration']}"
    previous_conditions = {c["type"]: c for c in before.get("conditions") or ()}
    for condition in after["conditions"]:
        previous = previous_conditions.get(condition["type"], {})
        is_unchanged = previous.get("status") == condition["status"]
        if is_unchanged and previous["lastTransitionTime"] != condition["lastTransitionTime"]:
            yield f"another time without a transition: {condition}"
        if previous and not is_unchanged and previous["lastTransitionTime"] > condition["lastTransitionTime"]:
            yield f"a transition before the last one, {previous['lastTransitionTime']}: {condition}"
