# SPDX-License-Identifier: Apache-2.0
"""Random operations on two LLMServices: edits by users, faults of pods, of the cluster and of the API server.

The operations follow from a seed; their timing, and the pods that they hit, do not. invariants.py checks every status.
"""

import base64
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.chaos.downloads import NUM_SOURCES, finished_download
from support.chaos.environment import ChaosEnvironment
from support.chaos.invariants import LLM_SERVICE_KIND
from support.chaos.recorders import RecordingPod
from support.cluster import ApiError
from support.controller_harness import CHILDREN, CLAIM
from support.engine_processes import wait_for
from support.fake_kubelet import RUNNING, FakeContainer
from support.fault_proxy import Fault

from quire_operator.render import object_names
from quire_spec.documents.download_result import DownloadReason

Manifest = dict[str, Any]
SERVICES = ("tales", "tales-two")
"""One name is the beginning of the other."""
CREDENTIALS_SECRET = "keys"
"""The Secret that some adapters need."""
FOREIGN_FINALIZER = "example.com/held"
"""A finalizer of another controller."""
_MERGE = "application/merge-patch+json"
_CHILD_KINDS = [(version, kind, name.removeprefix("tales")) for (version, kind), name in CHILDREN.items()]
_CHILD_EDITS: dict[str, list[Manifest]] = {
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
_EDITS_OF_ANY_CHILD = [
    {"metadata": {"ownerReferences": None}},
    {"metadata": {"labels": {object_names.MANAGED_BY: "somebody"}}},
    {"metadata": {"labels": {object_names.INSTANCE: None}}},
    {"metadata": {"labels": {"theirs": "yes"}, "annotations": {"theirs": "yes"}}},
    {"metadata": {"finalizers": [FOREIGN_FINALIZER]}},
]
INVALID_SPECS: list[Manifest] = [
    {"model": {"source": {"pvc": None, "path": "/m"}}},
    {"lora": {"maxLoaded": 0}},
    {"model": {"servedName": "a"}},
]
"""Specs that API servers without rules take, some of them only with adapters."""
VALID_SPEC: Manifest = {
    "model": {"source": {"path": None, "http": None, **CLAIM}, "servedName": None},
    "lora": {"maxLoaded": None},
    "runtime": {"memory": None},
    "paused": None,
}
_POD_FAULTS = ["unready", "down", "failing", "loading", "breaks", "refuses", "hangs", "lies", "tokens"]
_POD_FAULTS += ["well", "restart", "crash loop"]
_API_FAULTS = [Fault(429, {"Retry-After": "1"}), Fault(500), Fault(503), Fault(504, forwarded=True)]


@dataclass
class RandomOperations:
    """Random operations on a chaos environment."""

    environment: ChaosEnvironment
    seed: int
    num_steps: int = 0
    steps_until_recovery: int = 0
    """Events until the API server is well again."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._weighted_operations: list[tuple[int, Callable[[str], str]]] = [
            (5, self._edit_adapters),
            (2, self._apply_adapters),
            (2, self._edit_engine),
            (2, self._scale_service),
            (3, self._change_source),
            (4, self._disturb_download),
            (1, self._delete_claim),
            (2, self._make_spec_invalid),
            (1, self._make_spec_valid),
            (1, self._set_paused),
            (6, self._disturb_pod),
            (2, self._remove_pod),
            (3, self._edit_child),
            (3, self._delete_child),
            (1, self._change_source_secret),
            (2, self._recreate_service),
            (2, self._restart_operator),
            (3, self._disturb_api_server),
        ]

    def start(self) -> None:
        """Two services and an operator."""
        self._change_source_secret("")
        for name in SERVICES:
            self.environment.create_service(name, self._random_spec())
        self.environment.start_operator()

    def step(self) -> None:
        """Run one operation; the API server may reject it."""
        self.num_steps += 1
        # A generator for each step: earlier choices do not change later ones.
        self.rng = random.Random(f"{self.seed} {self.num_steps}")
        self.steps_until_recovery -= 1
        if self.steps_until_recovery == 0:
            self.restore_api_server()
        weights, operations = zip(*self._weighted_operations, strict=True)
        (operation,) = self.rng.choices(operations, weights)
        name = self.rng.choice(SERVICES)
        pause_s = self.rng.choice([0.0, 0.1, 0.3, 0.3, 1.0])
        try:
            self.environment.log_step(f"{name}: {operation(name)}")
        except ApiError as error:
            self.environment.log_step(f"{name}: {operation.__name__}: {error}")
        time.sleep(pause_s)
        self.environment.fake_pods.refresh_secrets()

    # Specs

    def _random_spec(self) -> Manifest:
        adapters = [self._random_adapter(name) for name in self.rng.sample("abc", self.rng.randint(0, 2))]
        index = self.rng.randrange(2 * NUM_SOURCES)
        source = CLAIM if index >= NUM_SOURCES else self.environment.downloads.source(index)
        return {"replicas": self.rng.choice([1, 1, 2]), "adapters": adapters, "model": {"source": source}}

    def _random_adapter(self, name: str) -> Manifest:
        path = f"{name}-v{self.rng.randint(1, 9)}"
        secret = {"credentialsSecretRef": {"name": CREDENTIALS_SECRET}}
        sources = [{"pvc": {"claimName": "models", "path": path}}] * 6
        sources += [{"pvc": {"claimName": "more", "path": path}}, {"s3": {"uri": f"s3://bucket/{path}", **secret}}]
        return {"name": name, "source": self.rng.choice(sources)}

    def _edit_adapters(self, name: str) -> str:
        adapters: list[Manifest] = self.environment.get_service(name).get("spec", {}).get("adapters", [])
        change = self.rng.choice(["add", "add", "replace", "remove", "rename", "turn", "pin", "limit", "many"])
        index = self.rng.randrange(100)
        unused_name = self.rng.choice([n for n in "abcdef" if n not in {a["name"] for a in adapters}] or ["g"])
        new_adapter = self._random_adapter(unused_name)
        if change == "many":
            adapters = [self._random_adapter(f"m{i}") for i in range(self.rng.randint(3, 8))]
        elif change == "add" or not adapters:
            adapters = [*adapters, new_adapter]
        elif change == "turn":
            adapters = adapters[::-1]
        else:
            selected = adapters[index % len(adapters)]
            updates = {
                "replace": {"source": self._random_adapter(selected["name"])["source"]},
                "rename": {"name": unused_name},
                "pin": {"pinned": not selected.get("pinned", False)},
                "limit": {"limits": {"maxConcurrentRequests": index + 1}},
            }
            adapters = [a for a in adapters if a is not selected or change != "remove"]
            adapters = [{**a, **updates.get(change, {})} if a is selected else a for a in adapters]
        self.environment.patch_service(name, {"adapters": adapters})
        return f"adapters: {change}, so {[(a['name'], a['source']) for a in adapters]}"

    def _apply_adapters(self, name: str) -> str:
        """Entries of one of two managers; those that it had before and names no longer go."""
        manager = self.rng.choice(["team-a", "team-b"])
        spec: Manifest = {
            "adapters": [self._random_adapter(n) for n in self.rng.sample("abcdef", self.rng.randint(0, 2))]
        }
        if self.rng.random() < 0.3:
            spec = {**spec, "replicas": self.rng.choice([1, 2])}
        self.environment.apply_service(name, spec, manager)
        return f"applied by {manager}: {spec}"

    def _edit_engine(self, name: str) -> str:
        spec = self.rng.choice(
            [
                {"engine": {"maxModelLen": self.rng.choice([256, 512, 1024, None])}},
                {"engine": {"maxNumSeqs": self.rng.choice([2, 4, None])}},
                {"runtime": {"env": [{"name": "X", "value": str(self.rng.randrange(9))}]}},
                {"rollout": {"maxSurge": self.rng.choice([0, 1]), "maxUnavailable": 1}},
                {"networking": {"networkPolicy": {"enabled": self.rng.random() < 0.5}}},
            ]
        )
        self.environment.patch_service(name, spec)
        return f"edit: {spec}"

    def _scale_service(self, name: str) -> str:
        count = self.rng.choice([0, 1, 2, 3])
        if self.rng.random() < 0.5:
            path = self.environment.cluster.path(*LLM_SERVICE_KIND, self.environment.namespace, name) + "/scale"
            self.environment.cluster.request("PATCH", path, {"spec": {"replicas": count}}, _MERGE)
        else:
            self.environment.patch_service(name, {"replicas": count})
        return f"replicas: {count}"

    def _make_spec_invalid(self, name: str) -> str:
        spec = self.rng.choice([*INVALID_SPECS, {"runtime": {"memory": "64Mi"}}])
        self.environment.patch_service(name, spec)
        return f"edit that cannot be: {spec}"

    def _make_spec_valid(self, name: str) -> str:
        self.environment.patch_service(name, VALID_SPEC)
        return "edit that takes all such back"

    def _set_paused(self, name: str) -> str:
        paused = self.rng.random() < 0.6
        self.environment.patch_service(name, {"paused": paused})
        return f"paused: {paused}"

    def _recreate_service(self, name: str) -> str:
        propagation_policy = self.rng.choice(["Background", "Background", "Foreground", "Orphan"])
        spec, edit_while_deleting = self._random_spec(), self.rng.random() < 0.3
        world = self.environment
        body = world.get_service(name)
        world.cluster.delete(*LLM_SERVICE_KIND, name, world.namespace, propagationPolicy=propagation_policy)
        if edit_while_deleting and propagation_policy == "Foreground":
            world.patch_service(name, {"replicas": 1})
        uid = body.get("metadata", {}).get("uid")
        wait_for(lambda: world.get_service(name).get("metadata", {}).get("uid") != uid, 30, f"{name} gone")
        if propagation_policy == "Orphan":
            self._relabel_orphans(name)
        world.create_service(name, spec)
        return f"deleted ({propagation_policy}) and made again: {spec}"

    def _relabel_orphans(self, name: str) -> None:
        """Restore the labels of objects without owner, by which alone the operator finds them: it does not repair them
        while the spec is invalid."""
        label_patch = {
            "metadata": {"labels": {object_names.MANAGED_BY: object_names.MANAGER, object_names.INSTANCE: name}}
        }
        for version, kind, suffix in _CHILD_KINDS:
            body = self.environment.cluster.get(version, kind, name + suffix, self.environment.namespace)
            if body and not body["metadata"].get("ownerReferences"):
                with contextlib.suppress(ApiError):
                    self.environment.cluster.merge(
                        version, kind, name + suffix, label_patch, self.environment.namespace
                    )

    # Downloads

    def _change_source(self, name: str) -> str:
        """Another model, on a claim or somewhere else."""
        index = self.rng.randrange(NUM_SOURCES + 1)
        source = (
            CLAIM | {"http": None} if index == NUM_SOURCES else self.environment.downloads.source(index) | {"pvc": None}
        )
        self.environment.patch_service(name, {"model": {"source": {"path": None, **source}}})
        return f"source: {source}"

    def _disturb_download(self, name: str) -> str:
        fault = self.rng.choice(["slow", "slow", "well", "away", "fails", "evicted", "pod deleted", "job deleted"])
        result, propagation_policy = (
            self.rng.choice(list(DownloadReason)[1:]),
            self.rng.choice(["Background", "Foreground", "Orphan"]),
        )
        world, downloads = self.environment, self.environment.downloads
        pods = world.download_pods(name)
        match fault:
            case "slow":
                downloads.slow_services.add(name)
            case "well":
                downloads.slow_services.discard(name)
            case "away":
                downloads.model_server.is_down = not downloads.model_server.is_down
                fault = f"place is down: {downloads.model_server.is_down}"
            case "job deleted":
                labels = f"{object_names.INSTANCE}={name}"
                for job in world.cluster.items("batch/v1", "Job", world.namespace, labelSelector=labels):
                    world.cluster.delete(
                        "batch/v1",
                        "Job",
                        job["metadata"]["name"],
                        world.namespace,
                        propagationPolicy=propagation_policy,
                    )
                fault += f" ({propagation_policy})"
            case _ if not pods:
                return f"no download {fault}"
            case "fails":
                downloads.end_pod(pods[0], finished_download(result, message=f"{name} has failed"))
                fault += f" ({result})"
            case "evicted":
                downloads.end_pod(pods[0], FakeContainer(exit_code=137, reason="Evicted"))
            case "pod deleted":
                world.cluster.delete("v1", "Pod", pods[0]["metadata"]["name"], world.namespace)
        return f"download {fault}"

    def _delete_claim(self, name: str) -> str:
        claim = object_names.model_claim(name)
        self.environment.cluster.delete("v1", "PersistentVolumeClaim", claim, self.environment.namespace)
        if self.rng.random() < 0.5:
            return "claim of downloads deleted"
        self.environment.delete_pods_of(name)
        return "claim of downloads deleted, and all pods"

    # Pods

    def _disturb_pod(self, name: str) -> str:
        fault = self.rng.choice([*_POD_FAULTS, "failing", "well", "restart"])
        index, adapter = self.rng.randrange(100), self.rng.choice("abcdef")
        pods = self.environment.running_pods(name)
        if not pods:
            return f"no pod is {fault}"
        pod, fake_pod = pods[index % len(pods)]
        uid = pod["metadata"]["uid"]
        match fault:
            case "unready":
                self.environment.fake_pods.unready_uids.add(uid)
            case "down":
                fake_pod.unready_reason = "core is restarting"
            case "failing":
                fake_pod.failing_adapters[adapter] = f"rank {index} of {adapter} is too much"
            case "loading":
                fake_pod.loading_adapters.add(adapter)
            case "hangs":
                fake_pod.set_hanging(True)
            case "tokens":
                fake_pod.kv_tokens = 16 * index
            case "restart":
                self.environment.kubelet.restart(pod, "out of patience")
            case "crash loop":
                crash_looping = FakeContainer(
                    waiting=("CrashLoopBackOff", "back-off 10s"), restarts=3, last_termination=(1, "Error", "no")
                )
                self.environment.kubelet.set_behavior(lambda body: body["metadata"]["uid"] == uid, crash_looping)
            case "well":
                self.restore_pod(pod, fake_pod)
            case _:
                setattr(fake_pod, fault, True)
        return f"pod {pod['metadata']['name']} {fault} ({adapter}, {index})"

    def restore_pod(self, pod: Manifest, fake_pod: RecordingPod) -> None:
        """It does all that it should."""
        uid = pod["metadata"]["uid"]
        fake_pod.set_hanging(False)
        fake_pod.unready_reason, fake_pod.status_fails, fake_pod.put_fails, fake_pod.drops_catalog = (
            "",
            False,
            False,
            False,
        )
        fake_pod.failing_adapters, fake_pod.loading_adapters = {}, set()
        self.environment.fake_pods.unready_uids.discard(uid)
        self.environment.kubelet.set_behavior(lambda body: body["metadata"]["uid"] == uid, RUNNING)

    def _remove_pod(self, name: str) -> str:
        removal, index = self.rng.choice(["deleted", "deleted at once", "evicted"]), self.rng.randrange(100)
        pods = self.environment.running_pods(name)
        if not pods:
            return f"no pod is {removal}"
        meta = pods[index % len(pods)][0]["metadata"]
        if removal == "evicted":
            evicted = FakeContainer(exit_code=137, reason="Evicted")
            self.environment.ended_pod_uids.add(meta["uid"])
            self.environment.kubelet.set_behavior(lambda body: body["metadata"]["uid"] == meta["uid"], evicted)
        else:
            options = {"gracePeriodSeconds": 0} if removal == "deleted at once" else {}
            self.environment.cluster.delete("v1", "Pod", meta["name"], self.environment.namespace, **options)
        return f"pod {meta['name']} {removal}"

    # Children

    def _edit_child(self, name: str) -> str:
        version, kind, suffix = self.rng.choice(_CHILD_KINDS)
        edit = self.rng.choice([*_CHILD_EDITS[kind] * 2, *_EDITS_OF_ANY_CHILD])
        self.environment.cluster.merge(version, kind, name + suffix, edit, self.environment.namespace)
        return f"{kind} edited: {edit}"

    def _delete_child(self, name: str) -> str:
        extra_kinds = [("apps/v1", "ReplicaSet", ""), ("v1", "ConfigMap", "-engine")]
        version, kind, suffix = self.rng.choice([*_CHILD_KINDS, *extra_kinds])
        propagation_policy, index = self.rng.choice(["Background", "Foreground", "Orphan"]), self.rng.randrange(100)
        world, labels = self.environment, f"{object_names.INSTANCE}={name}"
        object_name = name + suffix
        if kind == "ReplicaSet" or suffix == "-engine":
            bodies = world.cluster.items(version, kind, world.namespace, labelSelector=labels)
            all_names = sorted(n for body in bodies if (n := body["metadata"]["name"]).startswith(object_name))
            if not all_names:
                return f"no {kind} to delete"
            object_name = all_names[index % len(all_names)]
        world.cluster.delete(version, kind, object_name, world.namespace, propagationPolicy=propagation_policy)
        return f"{kind} {object_name} deleted ({propagation_policy})"

    def _change_source_secret(self, name: str) -> str:
        value = self.rng.randrange(100)
        data = {"AWS_ACCESS_KEY_ID": f"id{value}", "AWS_SECRET_ACCESS_KEY": f"key{value}"}
        if self.rng.random() < 0.3:
            self.environment.cluster.delete("v1", "Secret", CREDENTIALS_SECRET, self.environment.namespace)
            return f"Secret {CREDENTIALS_SECRET} deleted"
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": CREDENTIALS_SECRET}, "stringData": data}
        self.environment.cluster.apply(body, self.environment.namespace)
        return f"Secret {CREDENTIALS_SECRET} made: {value}"

    # The operator and its API server

    def _restart_operator(self, name: str) -> str:
        remaining_writes, send_last_write, kopf = (
            self.rng.choice([0, 0, 1, 2, 3]),
            self.rng.random() < 0.5,
            self.rng.random() < 0.2,
        )
        wait_s = self.rng.choice([0.0, 0.0, 0.5])
        harness = self.environment.operator
        assert harness is not None
        if remaining_writes:
            harness.controller.client.send_last_write = send_last_write
            harness.controller.client.remaining_writes = remaining_writes
            deadline = time.monotonic() + 1.0
            while harness.failure is None and time.monotonic() < deadline:
                time.sleep(0.02)
        self.environment.stop_operator()
        time.sleep(wait_s)
        self.environment.start_operator(kopf)
        return (
            f"operator killed at write {remaining_writes} (sent: {send_last_write}), and started again (kopf: {kopf})"
        )

    def _disturb_api_server(self, name: str) -> str:
        fault_kind = self.rng.choice(["storm", "storm", "slow", "deaf", "cut"])
        fault_rng, probability = random.Random(self.rng.random()), self.rng.choice([0.1, 0.3, 0.6])
        self.restore_api_server()
        self.steps_until_recovery = self.rng.randint(1, 4)
        match fault_kind:
            case "storm":

                def fault(method: str, path: str) -> Fault | None:
                    faults = _API_FAULTS if method == "GET" else [*_API_FAULTS, Fault(409)]
                    return fault_rng.choice(faults) if fault_rng.random() < probability else None

                self.environment.proxy.fault = fault
            case "slow":
                self.environment.proxy.delay_s = lambda method, path: fault_rng.choice([0.0, 0.05, 0.3, 1.0])
            case "deaf":
                kind = fault_rng.choice(["llmservices", "pods", "deployments", "configmaps"])
                self.environment.invariants.watch_stalled_at.append(time.monotonic())
                self.environment.proxy.blackhole(lambda path: f"/{kind}?watch=true" in path)
                fault_kind = f"deaf of {kind}"
            case "cut":
                # An API server itself says 410 in the watch, and kopf ends when it is the answer.
                self.environment.proxy.fault = lambda method, path: (
                    Fault(503 if "/llmservices?" in path else 410) if "watch=true" in path else None
                )
        return f"API server: {fault_kind} ({probability})"

    def restore_api_server(self) -> None:
        """The API server is well."""
        self.steps_until_recovery = 0
        self.environment.proxy.fault = lambda method, path: None
        self.environment.proxy.delay_s = lambda method, path: 0.0
        self.environment.proxy.stop_blackhole()

    # Its end

    def unblock(self) -> None:
        """Remove all faults of the API server and of downloads, and all foreign finalizers."""
        self.restore_api_server()
        world = self.environment
        world.downloads.model_server.is_down = False
        world.downloads.slow_services.clear()
        for name in SERVICES:
            self._relabel_orphans(name)
        for claim in world.cluster.items("v1", "PersistentVolumeClaim", world.namespace):
            for name in SERVICES:
                if (
                    claim["metadata"]["name"] == object_names.model_claim(name)
                    and "deletionTimestamp" in claim["metadata"]
                ):
                    world.delete_pods_of(name)
        for job in world.cluster.items("batch/v1", "Job", world.namespace):
            if job["status"].get("failed"):
                # A Job tries again later and later.
                world.cluster.delete("batch/v1", "Job", job["metadata"]["name"], world.namespace)
        for version, kind, _ in _CHILD_KINDS:
            for body in world.cluster.items(version, kind, world.namespace):
                finalizers = body["metadata"].get("finalizers", [])
                if FOREIGN_FINALIZER in finalizers:
                    patch = {
                        "metadata": {
                            "finalizers": [finalizer for finalizer in finalizers if finalizer != FOREIGN_FINALIZER]
                        }
                    }
                    world.cluster.merge(version, kind, body["metadata"]["name"], patch, world.namespace)

    def restore_all(self) -> None:
        """Restore all pods and give each service a valid spec."""
        world = self.environment
        for name in SERVICES:
            for pod, fake_pod in world.running_pods(name):
                self.restore_pod(pod, fake_pod)
            spec = world.get_service(name)["spec"]
            # Of two managers that apply an adapter, each may have given it another kind of source.
            adapters = [
                a if len(a["source"]) == 1 else self._random_adapter(a["name"]) for a in spec.get("adapters") or ()
            ]
            source = spec["model"]["source"]
            model = VALID_SPEC["model"]
            if "http" in source:
                model = {**model, "source": {**source, "path": None, "pvc": None}}
            world.patch_service(
                name, {**VALID_SPEC, "model": model, "adapters": adapters, "replicas": spec.get("replicas", 1) or 1}
            )
        world.log_step("all is well again")
