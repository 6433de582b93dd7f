# SPDX-License-Identifier: Apache-2.0
"""Invariants of every status of an LLMService, checked against the recorders (recorders.py)."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from support.chaos.downloads import DownloadTracker
from support.chaos.recorders import (
    RecordedStatus,
    StartedPod,
    WatchRecorder,
    is_ready,
    is_serving_pod_of,
    source_digest,
)
from support.cluster import Cluster
from support.observed_factories import schema_problems

from quire_operator.render import object_names
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_status import AdapterState, PodStatus

Manifest = dict[str, Any]
LLM_SERVICE_KIND = ("quire.dev/v1alpha1", "LLMService")
SLACK_S, STALE_WATCH_S = 3.0, 11.0
"""Age of events that the operator on a busy machine may not have seen; and with a blackholed watch."""
WATCH_LAG_S = 1.0
"""By how much one of the recorders' watches may lag behind another."""


def desired_catalog_digest(spec: Mapping[str, Any]) -> str:
    """Return the catalog digest of a stored spec."""
    return AdapterCatalog.from_json({"adapters": spec.get("adapters") or []}).version.digest


class StatusInvariants:
    """Records services and pods, and returns violations. A context manager."""

    def __init__(
        self, cluster: Cluster, namespace: str, started_pods: Mapping[str, StartedPod], downloads: DownloadTracker
    ) -> None:
        """`started_pods` contains every pod that ever ran, by uid."""
        self.services = WatchRecorder(cluster, *LLM_SERVICE_KIND, namespace)
        self.pods = WatchRecorder(cluster, "v1", "Pod", namespace)
        self.started_pods, self.downloads = started_pods, downloads
        self.recorded: list[RecordedStatus] = []
        self.watch_stalled_at: list[float] = []
        """When the operator's watches were blackholed or delayed."""

    def __enter__(self) -> Self:
        self.services.__enter__()
        self.pods.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.services.__exit__()
        self.pods.__exit__()

    def violations(self) -> list[str]:
        """Return the violations of all recorded versions of services."""
        watches = (self.services, self.pods, self.downloads.jobs, self.downloads.claims)
        violations = [f"the watch of {watch.path} ended: {watch.error!r}" for watch in watches if watch.error]
        violations += self._premature_pods()
        last_status: dict[str, Manifest] = {}
        for version in list(self.services.versions):
            body = version.body
            meta, status = body["metadata"], body.get("status") or {}
            previous = last_status.get(version.uid, {})
            last_status[version.uid] = status
            if version.deleted or status == previous:
                continue
            problems = [
                *status_violations(meta["generation"], status),
                *transition_violations(previous, status),
                *self._check_against_pods(body, status),
            ]
            violations += [
                f"{meta['name']} at {version.seen_at:.2f}, generation {meta['generation']}: {problem}"
                for problem in problems
            ]
        return violations

    def _premature_pods(self) -> Iterator[str]:
        """Yield pods that ran before their model was downloaded."""
        reported: set[str] = set()
        for version in list(self.pods.versions):
            started_pod = self.started_pods.get(version.uid)
            if started_pod is None or version.uid in reported or version.body["status"].get("phase") != "Running":
                continue
            reported.add(version.uid)
            labels, model = version.body["metadata"]["labels"], started_pod.engine_config["model"]
            service = labels.get(object_names.INSTANCE, "")
            if service and not self.downloads.was_downloaded(service, model, version.seen_at + WATCH_LAG_S):
                yield f"pod {version.body['metadata']['name']} ran at {version.seen_at:.2f}, before there was {model}"

    def _check_against_pods(self, body: Manifest, status: Manifest) -> Iterator[str]:
        """Compare a status with what the pods reported to the pass that wrote it."""
        matching = [
            record for record in self.recorded if record.uid == body["metadata"]["uid"] and record.status == status
        ]
        if not matching:
            yield f"the operator did not write this: {status}"
            return
        yield from self.downloads.violations(body, self._possibly_stale_since(matching[0]))
        # The operator may write the same status more than once: it was written at one of these times.
        attempts = [list(self._check_record(claim, body)) for claim in matching]
        if attempts and all(attempts):
            yield from attempts[-1]

    def _check_record(self, record: RecordedStatus, body: Manifest) -> Iterator[str]:
        meta, spec = body["metadata"], body["spec"]
        status, conditions = record.status, {c["type"]: c for c in record.status["conditions"]}
        reports_ready = conditions["Ready"]["status"] == "True"
        since = self._possibly_stale_since(record)
        always_ready, ever_ready = self._ready_pods(meta["name"], since, int(meta["resourceVersion"]))
        always_ready -= {
            uid for uid in always_ready if self.started_pods[uid].fake_pod.was_hanging(since, record.written_at)
        }
        responses = {uid: self._last_response(uid, record) for uid in always_ready}
        serving = [uid for uid, response in responses.items() if response is None or response.ready]
        if not len(serving) <= status["readyReplicas"] <= len(ever_ready):
            yield f"readyReplicas {status['readyReplicas']}, with {len(serving)} to {len(ever_ready)} pods"
        ready_responses = [answer for answer in responses.values() if answer is not None and answer.ready]
        yield from (
            f"model {m}, which {a.models} lack" for m in status["models"] for a in ready_responses if m not in a.models
        )
        if conditions["ConfigValid"]["reason"] == "Invalid":
            return
        desired_digest = desired_catalog_digest(spec)
        adapters_by_pod = [
            {a.name: a for a in answer.adapters} if answer.catalogue == desired_digest else {}
            for answer in ready_responses
        ]
        for adapter, entry in zip(spec.get("adapters") or (), status["adapters"], strict=True):
            adapter_states = [h[entry["name"]] for h in adapters_by_pod if entry["name"] in h]
            num_ready = sum(a.state is AdapterState.READY for a in adapter_states)
            if entry["name"] != adapter["name"] or entry["total"] != status["readyReplicas"]:
                yield f"{entry}, and it is {adapter['name']} of {status['readyReplicas']}"
            pods_unreachable = conditions["AdaptersReady"]["reason"] == "PodsUnreachable"
            if not (0 if pods_unreachable else num_ready) <= entry["ready"] <= len(ever_ready):
                yield f"{entry}, and it is on {num_ready} to {len(ever_ready)} pods"
            if entry["ready"] and entry.get("digest") not in (None, source_digest(adapter["source"])):
                yield f"{entry}, and its source is {adapter['source']}"
            if reports_ready and num_ready < len(always_ready):
                yield f"Ready, and pods said of {entry['name']} {adapter_states}"
        if reports_ready:
            if len(ready_responses) < len(always_ready):
                yield f"Ready, and of pods {list(always_ready)} not all said that they are: {list(responses.values())}"
            if not len(always_ready) <= spec.get("replicas", 1) <= len(ever_ready):
                yield f"Ready with {len(always_ready)} to {len(ever_ready)} of {spec.get('replicas', 1)} pods"
            yield from (
                f"Ready with pod {uid} of another spec"
                for uid in always_ready
                if not self.started_pods[uid].matches_spec(spec)
            )

    def _possibly_stale_since(self, record: RecordedStatus) -> float:
        """Return since when the operator may not have seen events."""
        watch_stalled = any(
            record.pass_started_at - STALE_WATCH_S < at < record.written_at for at in self.watch_stalled_at
        )
        return record.pass_started_at - (STALE_WATCH_S if watch_stalled else SLACK_S)

    def _last_response(self, uid: str, record: RecordedStatus) -> PodStatus | None:
        """Return a pod's last response to the pass that wrote a status."""
        responses = [
            response
            for at, response in self.started_pods[uid].fake_pod.responses
            if record.pass_started_at <= at <= record.written_at
        ]
        return responses[-1] if responses else None

    def _ready_pods(self, service: str, since: float, until: int) -> tuple[set[str], set[str]]:
        """Pods of a service that were ready all of a time, and those that were so some of it. It ends with a version of
        the service: versions are counted over all objects, so that it is certain what was before and what after."""
        states_by_uid: dict[str, list[tuple[float, bool]]] = {}
        for version in list(self.pods.versions):
            if is_serving_pod_of(version.body, service) and int(version.body["metadata"]["resourceVersion"]) < until:
                states_by_uid.setdefault(version.uid, []).append(
                    (version.seen_at, not version.deleted and is_ready(version.body))
                )
        always_ready, ever_ready = set(), set()
        for uid, states in states_by_uid.items():
            during = [
                *[state for at, state in states if at <= since][-1:],
                *[s for at, s in states if since < at],
            ]
            if any(during):
                ever_ready.add(uid)
                if all(during) and states[0][0] <= since:
                    always_ready.add(uid)
        return always_ready, ever_ready


def status_violations(generation: int, status: Manifest) -> Iterator[str]:
    """Yield contradictions within a status; `generation` is that of its spec."""
    yield from schema_problems(status)
    if status["observedGeneration"] != generation:
        yield f"observedGeneration {status['observedGeneration']}"
    conditions = {c["type"]: c for c in status["conditions"]}
    if len(conditions) != 7 or any(c["observedGeneration"] != generation for c in conditions.values()):
        yield f"conditions of {[(c['type'], c['observedGeneration']) for c in status['conditions']]}"
    if conditions["Ready"]["status"] == "True":
        kinds = ("ConfigValid", "Planned", "ModelCached", "Available", "AdaptersReady")
        yield from (f"Ready, and {conditions[kind]}" for kind in kinds if conditions[kind]["status"] != "True")
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
            yield f"a transition that is none: {condition}"
        if previous and not is_unchanged and previous["lastTransitionTime"] > condition["lastTransitionTime"]:
            yield f"a transition before the last one, {previous['lastTransitionTime']}: {condition}"
