# SPDX-License-Identifier: Apache-2.0
"""Three who remember what was, and do not know of each other: watches of the API server, every version of an object;
pods, what they answered; and the operators' client, when a pass began and what it came to say. witness.py holds them
against each other.
"""

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, cast

import httpx
import orjson
from support.admin_port import ScriptedPod
from support.cluster import Cluster
from support.fleet import Fleet
from support.kubelet import Kubelet, NotMounted

from quire_operator.kube.api_client import ApiClient
from quire_operator.render import object_names
from quire_spec.dataclass_json import drop_nulls, to_json
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, PodStatus

Manifest = dict[str, Any]
_WATCH_S = 2


@dataclass(frozen=True)
class Version:
    """One version of an object."""

    at: float
    gone: bool
    body: Manifest

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])


class Watching:
    """Every version of the objects of a kind in a namespace. A context manager."""

    def __init__(self, cluster: Cluster, version: str, kind: str, namespace: str) -> None:
        self.seen: list[Version] = []
        self._cluster, self.path = cluster, cluster.path(version, kind, namespace)
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self.error = error

    def _newest(self) -> str:
        return str(self._cluster.request("GET", self.path)["metadata"]["resourceVersion"])

    def _watch(self) -> None:
        access = self._cluster.access
        version = self._newest()
        options: dict[str, Any] = {"verify": access.ssl_context(), "headers": access.headers(), "trust_env": False}
        with httpx.Client(base_url=access.server, timeout=30, **options) as http:
            while not self._stop.is_set():
                asked = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(_WATCH_S)}
                with http.stream("GET", self.path, params=asked) as answer:
                    for line in answer.iter_lines():
                        event = orjson.loads(line)
                        if event["object"].get("code") == 410 and not self.seen:
                            # The API server's memory of a kind that has just come begins later than the list.
                            version = self._newest()
                            break
                        assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event
                        version = event["object"]["metadata"]["resourceVersion"]
                        self.seen.append(Version(time.monotonic(), event["type"] == "DELETED", event["object"]))


@dataclass
class RememberingPod(ScriptedPod):
    """A pod that remembers what it answered."""

    answers: list[tuple[float, PodStatus]] = field(default_factory=list)
    hung: list[float] = field(default_factory=list)
    """When it began to hang and ended, in turn."""

    def hang(self, hangs: bool) -> None:
        """Hang from now on, or no longer."""
        if hangs != self.hangs:
            self.hung.append(time.monotonic())
            self.hangs = hangs

    def hung_in(self, since: float, until: float) -> bool:
        """Whether it hung at some moment of a time: whoever asked then may not have waited for the answer."""
        return sum(at <= since for at in self.hung) % 2 == 1 or any(since < at < until for at in self.hung)

    def status(self) -> PodStatus:
        found = super().status()
        self.answers.append((time.monotonic(), found))
        return found

    def says(self) -> PodStatus | None:
        """What it would answer now; None: nothing."""
        return None if self.hangs or self.breaks else super().status()

    def _adapter(self, name: str) -> AdapterStatus:
        found = super()._adapter(name)
        if found.state is not AdapterState.READY:
            return found
        (adapter,) = [a for a in self.catalogue.adapters if a.name == name]
        return AdapterStatus(name, found.state, found.since, content(drop_nulls(to_json(adapter.source))), name)


def content(source: Mapping[str, Any]) -> str:
    """Digest of what an adapter is, wherever it comes from: another one for each source."""
    return f"sha256:{hashlib.sha256(orjson.dumps(source, option=orjson.OPT_SORT_KEYS)).hexdigest()}"


@dataclass(frozen=True)
class Claim:
    """A status that an operator was about to write."""

    begun: float
    """When the pass began."""
    at: float
    uid: str
    status: Manifest


class Killed(BaseException):
    """The operator's process is gone."""


def witnessed(claims: list[Claim], running: Mapping[str, Any]) -> type[ApiClient]:
    """A Client that remembers what it says, and dies when it is told so. `running["queue"]` is its operator's queue."""

    class Witnessed(ApiClient):
        writes_left: int | None = None
        """It dies at the last of them; None: it lives."""
        last_is_sent = False

        async def set_status(self, resource: Any, manifest: Mapping[str, Any]) -> Manifest:
            meta, now = manifest["metadata"], time.monotonic()
            begun = running["queue"]._running.get((meta["namespace"], meta["name"]), now)
            claims.append(Claim(begun, now, meta["uid"], orjson.loads(orjson.dumps(manifest["status"]))))
            return await super().set_status(resource, manifest)

        async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Manifest:
            if method == "GET" or self.writes_left is None:
                return await super().request(method, path, body, **options)
            self.writes_left -= 1
            if self.writes_left > 0:
                return await super().request(method, path, body, **options)
            if self.writes_left == 0 and self.last_is_sent:
                await super().request(method, path, body, **options)
            raise Killed

    return Witnessed


@dataclass(frozen=True)
class Started:
    """A pod as it was started."""

    script: RememberingPod
    engine: Manifest
    """engine.json that it mounts."""
    claims: frozenset[str]
    """Those that it mounts."""

    def fits(self, spec: Mapping[str, Any]) -> bool:
        """Whether it is what a spec asks for."""
        length = spec.get("engine", {}).get("maxModelLen")
        sources = [spec["model"]["source"], *(adapter["source"] for adapter in spec.get("adapters") or ())]
        claims = {source["pvc"]["claimName"] for source in sources if "pvc" in source}
        fits = claims <= self.claims and length in (None, self.engine["max_model_len"])
        return fits and self.engine["model"] == _folder(spec["model"]["source"])


def _folder(source: Mapping[str, Any]) -> str:
    """Where pods have a model."""
    if "pvc" in source:
        return f"/mnt/claims/{source['pvc']['claimName']}/{source['pvc']['path']}"
    return f"/mnt/model/{hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:7]}"


def is_ready(pod: Manifest) -> bool:
    """By the kubelet, and neither ended nor on its way out."""
    status = pod.get("status", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
    here = "deletionTimestamp" not in pod["metadata"] and status.get("phase") == "Running"
    return here and conditions.get("Ready") == "True"


def serves(pod: Manifest, service: str) -> bool:
    """Whether a pod is one of a service's that serve."""
    labels = pod["metadata"].get("labels", {})
    return (labels.get(object_names.INSTANCE), labels.get(object_names.COMPONENT)) == (service, object_names.SERVER)


class RememberingFleet(Fleet):
    """Pods that remember."""

    def __init__(self, kubelet: Kubelet) -> None:
        super().__init__(kubelet, make=RememberingPod)
        self.kubelet = kubelet
        self.started: dict[str, Started] = {}
        """All that ever ran, by uid."""
        self.unready: set[str] = set()
        """By uid: their readiness probe fails, whatever they say."""

    def mount(self) -> None:
        """Secrets that have changed reach the pods that run, where there are any."""
        with self._lock:
            members = list(self._members.values())
        for member in members:
            with suppress(NotMounted):
                self._key_file(member.pod)

    def _start(self, pod: Manifest, address: str) -> None:
        if pod["metadata"].get("labels", {}).get(object_names.COMPONENT) != object_names.SERVER:
            return
        volumes = pod["spec"]["volumes"]
        (engine,) = [v["configMap"]["name"] for v in volumes if "-engine-" in v.get("configMap", {}).get("name", "")]
        config = orjson.loads(self._object(pod, "ConfigMap", engine)["data"]["engine.json"])
        claims = frozenset(v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
        super()._start(pod, address)
        uid = pod["metadata"]["uid"]
        with self._lock:
            self.started[uid] = Started(cast(RememberingPod, self._members[uid].script), config, claims)

    def _probe(self, pod: Manifest) -> bool:
        return super()._probe(pod) and pod["metadata"]["uid"] not in self.unready
