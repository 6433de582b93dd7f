# SPDX-License-Identifier: Apache-2.0
"""Random histories of two LLMServices (world.py): what people, pods, the cluster and its API server do to them.

What happens is drawn from a seed; when, and to which pods, is the cluster's affair. What holds of every status
meanwhile is in witness.py.
"""

import base64
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.api_proxy import Fault
from support.cluster import ApiError
from support.downloads import NUM_SOURCES, ended
from support.kubelet import SERVES, Container
from support.operating import CHILDREN, CLAIM
from support.pod import eventually
from support.remembering import RememberingPod
from support.witness import API
from support.world import World

from quire_operator.render import object_names
from quire_spec.documents.download_result import DownloadReason

Manifest = dict[str, Any]
SERVICES = ("tales", "tales-two")
"""One name is the beginning of the other."""
KEYS = "keys"
"""The Secret that some adapters need."""
HELD = "example.com/held"
"""A finalizer of somebody's."""
_MERGE = "application/merge-patch+json"
_CHILDREN = [(version, kind, name.removeprefix("tales")) for (version, kind), name in CHILDREN.items()]
_EDITS: dict[str, list[Manifest]] = {
    "ServiceAccount": [{"automountServiceAccountToken": True}],
    "Secret": [{"data": {"key": base64.b64encode(b"another").decode()}}, {"data": {"key": None}}],
    "ConfigMap": [{"data": {"adapters.json": "{}"}}, {"data": {"adapters.json": '{"generation": 99}'}}],
    "NetworkPolicy": [{"spec": {"ingress": [{}]}}],
    "Service": [{"spec": {"selector": {object_names.INSTANCE: "another"}}}],
    "Deployment": [
        {"spec": {"replicas": 2}},
        {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}},
        {"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}},
        {"metadata": {"annotations": None}},
    ],
}
_OF_ANY = [
    {"metadata": {"ownerReferences": None}},
    {"metadata": {"labels": {object_names.MANAGED_BY: "somebody"}}},
    {"metadata": {"labels": {object_names.INSTANCE: None}}},
    {"metadata": {"labels": {"theirs": "yes"}, "annotations": {"theirs": "yes"}}},
    {"metadata": {"finalizers": [HELD]}},
]
UNUSABLE: list[Manifest] = [
    {"model": {"source": {"pvc": None, "path": "/m"}}},
    {"lora": {"maxLoaded": 0}},
    {"model": {"servedName": "a"}},
]
"""Specs that API servers without rules take, some of them only with adapters."""
USABLE: Manifest = {
    "model": {"source": {"path": None, "http": None, **CLAIM}, "servedName": None},
    "lora": {"maxLoaded": None},
    "runtime": {"memory": None},
    "paused": None,
}
_PODS = ["unready", "down", "failing", "loading", "breaks", "refuses", "hangs", "lies", "tokens"]
_PODS += ["well", "restart", "crash loop"]
_FAULTS = [Fault(429, {"Retry-After": "1"}), Fault(500), Fault(503), Fault(504, sent=True)]


@dataclass
class History:
    """What happens in a world, drawn."""

    world: World
    seed: int
    num_events: int = 0
    storm: int = 0
    """Events until the API server is well again."""
    unlocked: bool = False
    """The Secret of an admin key was changed by hand."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self._ways: list[tuple[int, Callable[[str], str]]] = [
            (5, self._adapters),
            (2, self._adapters_applied),
            (2, self._engine),
            (2, self._scale),
            (3, self._source),
            (4, self._download),
            (1, self._claim_deleted),
            (2, self._unusable),
            (1, self._usable),
            (1, self._paused),
            (6, self._pod),
            (2, self._pod_goes),
            (3, self._child_edited),
            (3, self._child_deleted),
            (1, self._source_secret),
            (2, self._made_again),
            (2, self._killed),
            (1, self._another_operator),
            (3, self._api),
        ]

    def begin(self) -> None:
        """Two services and an operator."""
        self._source_secret("")
        for name in SERVICES:
            self.world.make(name, self._spec())
        self.world.start()

    def step(self) -> None:
        """One thing happens; those that the API server refuses are part of it."""
        self.num_events += 1
        # Each for itself: what was there to draw from before does not change what is drawn now.
        self.draw = random.Random(f"{self.seed} {self.num_events}")
        self.storm -= 1
        if self.storm == 0:
            self.calm()
        weights, ways = zip(*self._ways, strict=True)
        (way,) = self.draw.choices(ways, weights)
        name = self.draw.choice(SERVICES)
        pause_s = self.draw.choice([0.0, 0.1, 0.3, 0.3, 1.0])
        try:
            self.world.say(f"{name}: {way(name)}")
        except ApiError as error:
            self.world.say(f"{name}: {way.__name__}: {error}")
        time.sleep(pause_s)
        self.world.fleet.mount()

    # Specs

    def _spec(self) -> Manifest:
        adapters = [self._adapter(name) for name in self.draw.sample("abc", self.draw.randint(0, 2))]
        which = self.draw.randrange(2 * NUM_SOURCES)
        source = CLAIM if which >= NUM_SOURCES else self.world.downloads.source(which)
        return {"replicas": self.draw.choice([1, 1, 2]), "adapters": adapters, "model": {"source": source}}

    def _adapter(self, name: str) -> Manifest:
        path = f"{name}-v{self.draw.randint(1, 9)}"
        secret = {"credentialsSecretRef": {"name": KEYS}}
        kinds = [{"pvc": {"claimName": "models", "path": path}}] * 6
        kinds += [{"pvc": {"claimName": "more", "path": path}}, {"s3": {"uri": f"s3://bucket/{path}", **secret}}]
        return {"name": name, "source": self.draw.choice(kinds)}

    def _adapters(self, name: str) -> str:
        found: list[Manifest] = self.world.stored(name).get("spec", {}).get("adapters", [])
        what = self.draw.choice(["add", "add", "replace", "remove", "rename", "turn", "pin", "limit", "many"])
        which = self.draw.randrange(100)
        free = self.draw.choice([n for n in "abcdef" if n not in {a["name"] for a in found}] or ["g"])
        new = self._adapter(free)
        if what == "many":
            found = [self._adapter(f"m{i}") for i in range(self.draw.randint(3, 8))]
        elif what == "add" or not found:
            found = [*found, new]
        elif what == "turn":
            found = found[::-1]
        else:
            one = found[which % len(found)]
            changed = {
                "replace": {"source": self._adapter(one["name"])["source"]},
                "rename": {"name": free},
                "pin": {"pinned": not one.get("pinned", False)},
                "limit": {"limits": {"maxConcurrentRequests": which + 1}},
            }
            found = [a for a in found if a is not one or what != "remove"]
            found = [{**a, **changed.get(what, {})} if a is one else a for a in found]
        self.world.edit(name, {"adapters": found})
        return f"adapters: {what}, so {[(a['name'], a['source']) for a in found]}"

    def _adapters_applied(self, name: str) -> str:
        """Entries of one of two managers; those that it had before and names no longer go."""
        manager = self.draw.choice(["team-a", "team-b"])
        spec: Manifest = {"adapters": [self._adapter(n) for n in self.draw.sample("abcdef", self.draw.randint(0, 2))]}
        if self.draw.random() < 0.3:
            spec = {**spec, "replicas": self.draw.choice([1, 2])}
        self.world.apply(name, spec, manager)
        return f"applied by {manager}: {spec}"

    def _engine(self, name: str) -> str:
        spec = self.draw.choice(
            [
                {"engine": {"maxModelLen": self.draw.choice([256, 512, 1024, None])}},
                {"engine": {"maxNumSeqs": self.draw.choice([2, 4, None])}},
                {"runtime": {"env": [{"name": "X", "value": str(self.draw.randrange(9))}]}},
                {"rollout": {"maxSurge": self.draw.choice([0, 1]), "maxUnavailable": 1}},
                {"networking": {"networkPolicy": {"enabled": self.draw.random() < 0.5}}},
            ]
        )
        self.world.edit(name, spec)
        return f"edit: {spec}"

    def _scale(self, name: str) -> str:
        count = self.draw.choice([0, 1, 2, 3])
        if self.draw.random() < 0.5:
            path = self.world.cluster.path(*API, self.world.namespace, name) + "/scale"
            self.world.cluster.request("PATCH", path, {"spec": {"replicas": count}}, _MERGE)
        else:
            self.world.edit(name, {"replicas": count})
        return f"replicas: {count}"

    def _unusable(self, name: str) -> str:
        spec = self.draw.choice([*UNUSABLE, {"runtime": {"memory": "64Mi"}}])
        self.world.edit(name, spec)
        return f"edit that cannot be: {spec}"

    def _usable(self, name: str) -> str:
        self.world.edit(name, USABLE)
        return "edit that takes all such back"

    def _paused(self, name: str) -> str:
        paused = self.draw.random() < 0.6
        self.world.edit(name, {"paused": paused})
        return f"paused: {paused}"

    def _made_again(self, name: str) -> str:
        how = self.draw.choice(["Background", "Background", "Foreground", "Orphan"])
        spec, edit = self._spec(), self.draw.random() < 0.3
        world = self.world
        body = world.stored(name)
        world.cluster.delete(*API, name, world.namespace, propagationPolicy=how)
        if edit and how == "Foreground":
            world.edit(name, {"replicas": 1})
        uid = body.get("metadata", {}).get("uid")
        eventually(lambda: world.stored(name).get("metadata", {}).get("uid") != uid, 30, f"{name} gone")
        if how == "Orphan":
            self._own_orphans(name)
        world.make(name, spec)
        return f"deleted ({how}) and made again: {spec}"

    def _own_orphans(self, name: str) -> None:
        """An object without owner is known by its labels alone. Where somebody has changed these too, which no operator
        repairs while the spec cannot be used, it would be a stranger's."""
        ours = {"metadata": {"labels": {object_names.MANAGED_BY: object_names.MANAGER, object_names.INSTANCE: name}}}
        for version, kind, suffix in _CHILDREN:
            body = self.world.cluster.get(version, kind, name + suffix, self.world.namespace)
            if body and not body["metadata"].get("ownerReferences"):
                with contextlib.suppress(ApiError):
                    self.world.cluster.merge(version, kind, name + suffix, ours, self.world.namespace)

    # Downloads

    def _source(self, name: str) -> str:
        """Another model, on a claim or somewhere else."""
        which = self.draw.randrange(NUM_SOURCES + 1)
        source = CLAIM | {"http": None} if which == NUM_SOURCES else self.world.downloads.source(which) | {"pvc": None}
        self.world.edit(name, {"model": {"source": {"path": None, **source}}})
        return f"source: {source}"

    def _download(self, name: str) -> str:
        what = self.draw.choice(["slow", "slow", "well", "away", "fails", "evicted", "pod deleted", "job deleted"])
        result, how = (
            self.draw.choice(list(DownloadReason)[1:]),
            self.draw.choice(["Background", "Foreground", "Orphan"]),
        )
        world, downloads = self.world, self.world.downloads
        pods = world.downloading(name)
        match what:
            case "slow":
                downloads.slow.add(name)
            case "well":
                downloads.slow.discard(name)
            case "away":
                downloads.place.down = not downloads.place.down
                what = f"place is down: {downloads.place.down}"
            case "job deleted":
                labels = f"{object_names.INSTANCE}={name}"
                for job in world.cluster.items("batch/v1", "Job", world.namespace, labelSelector=labels):
                    world.cluster.delete(
                        "batch/v1", "Job", job["metadata"]["name"], world.namespace, propagationPolicy=how
                    )
                what += f" ({how})"
            case _ if not pods:
                return f"no download {what}"
            case "fails":
                downloads.end(pods[0], ended(result, message=f"{name} has failed"))
                what += f" ({result})"
            case "evicted":
                downloads.end(pods[0], Container(exit_code=137, reason="Evicted"))
            case "pod deleted":
                world.cluster.delete("v1", "Pod", pods[0]["metadata"]["name"], world.namespace)
        return f"download {what}"

    def _claim_deleted(self, name: str) -> str:
        claim = object_names.model_claim(name)
        self.world.cluster.delete("v1", "PersistentVolumeClaim", claim, self.world.namespace)
        if self.draw.random() < 0.5:
            return "claim of downloads deleted"
        self.world.let_claim_go(name)
        return "claim of downloads deleted, and all pods"

    # Pods

    def _pod(self, name: str) -> str:
        what = self.draw.choice([*_PODS, "failing", "well", "restart"])
        which, adapter = self.draw.randrange(100), self.draw.choice("abcdef")
        pods = self.world.pods(name)
        if not pods:
            return f"no pod is {what}"
        pod, script = pods[which % len(pods)]
        uid = pod["metadata"]["uid"]
        match what:
            case "unready":
                self.world.fleet.unready.add(uid)
            case "down":
                script.reason_ = "core is restarting"
            case "failing":
                script.failing[adapter] = f"rank {which} of {adapter} is too much"
            case "loading":
                script.loading.add(adapter)
            case "hangs":
                script.hang(True)
            case "tokens":
                script.tokens = 16 * which
            case "restart":
                self.world.kubelet.restart(pod, "out of patience")
            case "crash loop":
                waits = Container(waiting=("CrashLoopBackOff", "back-off 10s"), restarts=3, last=(1, "Error", "no"))
                self.world.kubelet.behave(lambda body: body["metadata"]["uid"] == uid, waits)
            case "well":
                self.heal_pod(pod, script)
            case _:
                setattr(script, what, True)
        return f"pod {pod['metadata']['name']} {what} ({adapter}, {which})"

    def heal_pod(self, pod: Manifest, script: RememberingPod) -> None:
        """It does all that it should."""
        uid = pod["metadata"]["uid"]
        script.hang(False)
        script.reason_, script.breaks, script.refuses, script.lies = "", False, False, False
        script.failing, script.loading = {}, set()
        self.world.fleet.unready.discard(uid)
        self.world.kubelet.behave(lambda body: body["metadata"]["uid"] == uid, SERVES)

    def _pod_goes(self, name: str) -> str:
        how, which = self.draw.choice(["deleted", "deleted at once", "evicted"]), self.draw.randrange(100)
        pods = self.world.pods(name)
        if not pods:
            return f"no pod is {how}"
        meta = pods[which % len(pods)][0]["metadata"]
        if how == "evicted":
            ended = Container(exit_code=137, reason="Evicted")
            self.world.ended.add(meta["uid"])
            self.world.kubelet.behave(lambda body: body["metadata"]["uid"] == meta["uid"], ended)
        else:
            grace = {"gracePeriodSeconds": 0} if how == "deleted at once" else {}
            self.world.cluster.delete("v1", "Pod", meta["name"], self.world.namespace, **grace)
        return f"pod {meta['name']} {how}"

    # Children

    def _child_edited(self, name: str) -> str:
        version, kind, suffix = self.draw.choice(_CHILDREN)
        edit = self.draw.choice([*_EDITS[kind] * 2, *_OF_ANY])
        if not self._may_touch(kind):
            return f"no {kind} edited"
        self.world.cluster.merge(version, kind, name + suffix, edit, self.world.namespace)
        return f"{kind} edited: {edit}"

    def _child_deleted(self, name: str) -> str:
        others = [("apps/v1", "ReplicaSet", ""), ("v1", "ConfigMap", "-engine")]
        version, kind, suffix = self.draw.choice([*_CHILDREN, *others])
        how, which = self.draw.choice(["Background", "Foreground", "Orphan"]), self.draw.randrange(100)
        world, labels = self.world, f"{object_names.INSTANCE}={name}"
        place = name + suffix
        if not self._may_touch(kind):
            return f"no {kind} deleted"
        if kind == "ReplicaSet" or suffix == "-engine":
            found = world.cluster.items(version, kind, world.namespace, labelSelector=labels)
            all_names = sorted(n for b in found if (n := b["metadata"]["name"]).startswith(place))
            if not all_names:
                return f"no {kind} to delete"
            place = all_names[which % len(all_names)]
        world.cluster.delete(version, kind, place, world.namespace, propagationPolicy=how)
        return f"{kind} {place} deleted ({how})"

    def _may_touch(self, kind: str) -> bool:
        """Two operators that know different keys, while the spec lets neither put its own there, disagree for good."""
        if kind == "Secret":
            self.unlocked = self.unlocked or len(self.world.operators) < 2
            return self.unlocked
        return True

    def _source_secret(self, name: str) -> str:
        value = self.draw.randrange(100)
        data = {"AWS_ACCESS_KEY_ID": f"id{value}", "AWS_SECRET_ACCESS_KEY": f"key{value}"}
        if self.draw.random() < 0.3:
            self.world.cluster.delete("v1", "Secret", KEYS, self.world.namespace)
            return f"Secret {KEYS} deleted"
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEYS}, "stringData": data}
        self.world.cluster.apply(body, self.world.namespace)
        return f"Secret {KEYS} made: {value}"

    # Operators and their API server

    def _killed(self, name: str) -> str:
        left, sent, kopf = self.draw.choice([0, 0, 1, 2, 3]), self.draw.random() < 0.5, self.draw.random() < 0.2
        wait_s = self.draw.choice([0.0, 0.0, 0.5])
        operating = self.world.operators[0]
        if left:
            operating.controller.client.last_is_sent = sent
            operating.controller.client.writes_left = left
            end = time.monotonic() + 1.0
            while operating.failure is None and time.monotonic() < end:
                time.sleep(0.02)
        self.world.stop(operating)
        time.sleep(wait_s)
        self.world.start(kopf)
        return f"operator killed at write {left} (sent: {sent}), and started again (kopf: {kopf})"

    def _another_operator(self, name: str) -> str:
        if len(self.world.operators) > 1:
            self.world.stop(self.world.operators[0])
            return "one of two operators killed"
        if self.unlocked:
            return "no operator beside the first"
        self.world.start()
        return "another operator started beside the first"

    def _api(self, name: str) -> str:
        what = self.draw.choice(["storm", "storm", "slow", "deaf", "cut"])
        chance, share = random.Random(self.draw.random()), self.draw.choice([0.1, 0.3, 0.6])
        self.calm()
        self.storm = self.draw.randint(1, 4)
        match what:
            case "storm":

                def fault(method: str, path: str) -> Fault | None:
                    ways = _FAULTS if method == "GET" else [*_FAULTS, Fault(409)]
                    return chance.choice(ways) if chance.random() < share else None

                self.world.proxy.fault = fault
            case "slow":
                self.world.proxy.delay_s = lambda method, path: chance.choice([0.0, 0.05, 0.3, 1.0])
            case "deaf":
                kind = chance.choice(["llmservices", "pods", "deployments", "configmaps"])
                self.world.witness.deaf_at.append(time.monotonic())
                self.world.proxy.swallow(lambda path: f"/{kind}?watch=true" in path)
                what = f"deaf of {kind}"
            case "cut":
                # An API server itself says 410 in the watch, and kopf ends when it is the answer.
                self.world.proxy.fault = lambda method, path: (
                    Fault(503 if "/llmservices?" in path else 410) if "watch=true" in path else None
                )
        return f"API server: {what} ({share})"

    def calm(self) -> None:
        """The API server is well."""
        self.storm = 0
        self.world.proxy.fault = lambda method, path: None
        self.world.proxy.delay_s = lambda method, path: 0.0
        self.world.proxy.let_through()

    # Its end

    def let_go(self) -> None:
        """The API server is well, as is what models are downloaded from, and nothing is held back from going."""
        self.calm()
        world = self.world
        world.downloads.place.down = False
        world.downloads.slow.clear()
        for name in SERVICES:
            self._own_orphans(name)
        for claim in world.cluster.items("v1", "PersistentVolumeClaim", world.namespace):
            for name in SERVICES:
                if (
                    claim["metadata"]["name"] == object_names.model_claim(name)
                    and "deletionTimestamp" in claim["metadata"]
                ):
                    world.let_claim_go(name)
        for job in world.cluster.items("batch/v1", "Job", world.namespace):
            if job["status"].get("failed"):
                # A Job tries again later and later.
                world.cluster.delete("batch/v1", "Job", job["metadata"]["name"], world.namespace)
        for version, kind, _ in _CHILDREN:
            for body in world.cluster.items(version, kind, world.namespace):
                finalizers = body["metadata"].get("finalizers", [])
                if HELD in finalizers:
                    others = {"metadata": {"finalizers": [each for each in finalizers if each != HELD]}}
                    world.cluster.merge(version, kind, body["metadata"]["name"], others, world.namespace)

    def heal(self) -> None:
        """One operator, pods that do what they should, specs that can be used."""
        world = self.world
        for operating in world.operators[1:]:
            world.stop(operating)
        for name in SERVICES:
            for pod, script in world.pods(name):
                self.heal_pod(pod, script)
            spec = world.stored(name)["spec"]
            # Of two managers that apply an adapter, each may have given it another kind of source.
            adapters = [a if len(a["source"]) == 1 else self._adapter(a["name"]) for a in spec.get("adapters") or ()]
            source = spec["model"]["source"]
            model = USABLE["model"]
            if "http" in source:
                model = {**model, "source": {**source, "path": None, "pvc": None}}
            world.edit(name, {**USABLE, "model": model, "adapters": adapters, "replicas": spec.get("replicas", 1) or 1})
        world.say("all is well again")
