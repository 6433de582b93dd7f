# SPDX-License-Identifier: Apache-2.0
"""What must hold of every status of an LLMService, held against what remembering.py remembers."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

from support.cluster import Cluster
from support.downloads import Downloads
from support.observing import faults
from support.remembering import Claim, Started, Watching, content, is_ready, serves

from quire_operator.render import object_names
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_status import AdapterState, PodStatus

Manifest = dict[str, Any]
API = ("quire.dev/v1alpha1", "LLMService")
SLACK_S, DEAF_S = 3.0, 11.0
"""What an operator on a busy machine may not have heard of yet; and one whose watch was swallowed."""
WATCHED_S = 1.0
"""By which one of our own watches may be behind another."""


def wanted_digest(spec: Mapping[str, Any]) -> str:
    """Of the adapters of a stored spec."""
    return AdapterCatalog.from_json({"adapters": spec.get("adapters") or []}).version.digest


class Witness:
    """What was seen, and what was wrong with it. A context manager."""

    def __init__(self, cluster: Cluster, namespace: str, started: Mapping[str, Started], downloads: Downloads) -> None:
        """`started` has every pod that ever ran, by uid."""
        self.services = Watching(cluster, *API, namespace)
        self.pods = Watching(cluster, "v1", "Pod", namespace)
        self.started, self.downloads = started, downloads
        self.claims: list[Claim] = []
        self.deaf_at: list[float] = []
        """When operators began to hear late."""
        self._crowded: list[tuple[float, bool]] = []

    def num_operators(self, number: int) -> None:
        """So many there are from now on."""
        self._crowded.append((time.monotonic(), number > 1))

    def __enter__(self) -> Self:
        self.services.__enter__()
        self.pods.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.services.__exit__()
        self.pods.__exit__()

    def wrong(self) -> list[str]:
        """What does not hold of the versions of services that were seen, in words."""
        watches = (self.services, self.pods, self.downloads.jobs, self.downloads.claims)
        found = [f"the watch of {watch.path} ended: {watch.error!r}" for watch in watches if watch.error]
        found += self._of_started()
        before: dict[str, Manifest] = {}
        for version in list(self.services.seen):
            body = version.body
            meta, status = body["metadata"], body.get("status") or {}
            old = before.get(version.uid, {})
            before[version.uid] = status
            if version.gone or status == old:
                continue
            said = [*of_one(meta["generation"], status), *of_two(old, status), *self._of_pods(body, status)]
            found += [f"{meta['name']} at {version.at:.2f}, generation {meta['generation']}: {words}" for words in said]
        return found

    def _of_started(self) -> Iterator[str]:
        """Pods that ran before their model was there."""
        known: set[str] = set()
        for version in list(self.pods.seen):
            started = self.started.get(version.uid)
            if started is None or version.uid in known or version.body["status"].get("phase") != "Running":
                continue
            known.add(version.uid)
            labels, model = version.body["metadata"]["labels"], started.engine["model"]
            service = labels.get(object_names.INSTANCE, "")
            if service and not self.downloads.was_brought(service, model, version.at + WATCHED_S):
                yield f"pod {version.body['metadata']['name']} ran at {version.at:.2f}, before there was {model}"

    def _of_pods(self, body: Manifest, status: Manifest) -> Iterator[str]:
        """What a status says of pods, held against what they said to the pass that it is of.

        Where several operators ask, nobody knows what was said to whom.
        """
        made = [claim for claim in self.claims if claim.uid == body["metadata"]["uid"] and claim.status == status]
        if not made:
            yield f"nobody says that he wrote this: {status}"
            return
        yield from self.downloads.faults(body, self._heard(made[0]))
        # An operator may find the same more than once: it was written at one of these times.
        if any(self._is_crowded(claim) for claim in made):
            return
        tries = [list(self._of_claim(claim, body)) for claim in made]
        if tries and all(tries):
            yield from tries[-1]

    def _of_claim(self, claim: Claim, body: Manifest) -> Iterator[str]:
        meta, spec = body["metadata"], body["spec"]
        status, judged = claim.status, {c["type"]: c for c in claim.status["conditions"]}
        claims_ready = judged["Ready"]["status"] == "True"
        since = self._heard(claim)
        always, ever = self._ready(meta["name"], since, int(meta["resourceVersion"]))
        always -= {uid for uid in always if self.started[uid].script.hung_in(since, claim.at)}
        said = {uid: self._said(uid, claim) for uid in always}
        serving = [uid for uid, answer in said.items() if answer is None or answer.ready]
        if not len(serving) <= status["readyReplicas"] <= len(ever):
            yield f"readyReplicas {status['readyReplicas']}, with {len(serving)} to {len(ever)} pods"
        told = [answer for answer in said.values() if answer is not None and answer.ready]
        yield from (f"model {m}, which {a.models} lack" for m in status["models"] for a in told if m not in a.models)
        if judged["ConfigValid"]["reason"] == "Invalid":
            return
        wanted = wanted_digest(spec)
        held = [{a.name: a for a in answer.adapters} if answer.catalogue == wanted else {} for answer in told]
        for adapter, entry in zip(spec.get("adapters") or (), status["adapters"], strict=True):
            on = [h[entry["name"]] for h in held if entry["name"] in h]
            num_ready = sum(a.state is AdapterState.READY for a in on)
            if entry["name"] != adapter["name"] or entry["total"] != status["readyReplicas"]:
                yield f"{entry}, and it is {adapter['name']} of {status['readyReplicas']}"
            silent = judged["AdaptersReady"]["reason"] == "PodsUnreachable"
            if not (0 if silent else num_ready) <= entry["ready"] <= len(ever):
                yield f"{entry}, and it is on {num_ready} to {len(ever)} pods"
            if entry["ready"] and entry.get("digest") not in (None, content(adapter["source"])):
                yield f"{entry}, and its source is {adapter['source']}"
            if claims_ready and num_ready < len(always):
                yield f"Ready, and pods said of {entry['name']} {on}"
        if claims_ready:
            if len(told) < len(always):
                yield f"Ready, and of pods {list(always)} not all said that they are: {list(said.values())}"
            if not len(always) <= spec.get("replicas", 1) <= len(ever):
                yield f"Ready with {len(always)} to {len(ever)} of {spec.get('replicas', 1)} pods"
            yield from (f"Ready with pod {uid} of another spec" for uid in always if not self.started[uid].fits(spec))

    def _heard(self, claim: Claim) -> float:
        """From when on an operator may not have heard of something yet."""
        late = any(claim.begun - DEAF_S < at < claim.at for at in self.deaf_at)
        return claim.begun - (DEAF_S if late else SLACK_S)

    def _is_crowded(self, claim: Claim) -> bool:
        before = [crowded for at, crowded in self._crowded if at <= claim.begun][-1:]
        return any(before) or any(crowded for at, crowded in self._crowded if claim.begun < at < claim.at)

    def _said(self, uid: str, claim: Claim) -> PodStatus | None:
        """What a pod said last before a status was written, to the pass that it is of."""
        said = [answer for at, answer in self.started[uid].script.answers if claim.begun <= at <= claim.at]
        return said[-1] if said else None

    def _ready(self, service: str, since: float, until: int) -> tuple[set[str], set[str]]:
        """Pods of a service that were ready all of a time, and those that were so some of it. It ends with a version of
        the service: versions are counted over all objects, so that it is certain what was before and what after."""
        known: dict[str, list[tuple[float, bool]]] = {}
        for version in list(self.pods.seen):
            if serves(version.body, service) and int(version.body["metadata"]["resourceVersion"]) < until:
                known.setdefault(version.uid, []).append((version.at, not version.gone and is_ready(version.body)))
        always, ever = set(), set()
        for uid, states in known.items():
            during = [
                *[state for at, state in states if at <= since][-1:],
                *[s for at, s in states if since < at],
            ]
            if any(during):
                ever.add(uid)
                if all(during) and states[0][0] <= since:
                    always.add(uid)
        return always, ever


def of_one(generation: int, status: Manifest) -> Iterator[str]:
    """What is wrong with a status in itself; `generation` is the spec's that it was written to."""
    yield from faults(status)
    if status["observedGeneration"] != generation:
        yield f"observedGeneration {status['observedGeneration']}"
    conditions = {c["type"]: c for c in status["conditions"]}
    if len(conditions) != 7 or any(c["observedGeneration"] != generation for c in conditions.values()):
        yield f"conditions of {[(c['type'], c['observedGeneration']) for c in status['conditions']]}"
    if conditions["Ready"]["status"] == "True":
        kinds = ("ConfigValid", "Planned", "ModelCached", "Available", "AdaptersReady")
        yield from (f"Ready, and {conditions[kind]}" for kind in kinds if conditions[kind]["status"] != "True")
    entries = status.get("adapters") or ()
    everywhere = sum(0 < entry["total"] == entry["ready"] for entry in entries)
    if status.get("adaptersReady", "0/0") != f"{everywhere}/{len(entries)}":
        yield f"adaptersReady {status['adaptersReady']} of {entries}"


def of_two(before: Manifest, after: Manifest) -> Iterator[str]:
    """What is wrong with a status after the one before it."""
    if before.get("observedGeneration", 0) > after["observedGeneration"]:
        yield f"observedGeneration {after['observedGeneration']} after {before['observedGeneration']}"
    known = {c["type"]: c for c in before.get("conditions") or ()}
    for condition in after["conditions"]:
        old = known.get(condition["type"], {})
        same = old.get("status") == condition["status"]
        if same and old["lastTransitionTime"] != condition["lastTransitionTime"]:
            yield f"a transition that is none: {condition}"
        if old and not same and old["lastTransitionTime"] > condition["lastTransitionTime"]:
            yield f"a transition before the last one, {old['lastTransitionTime']}: {condition}"
