# SPDX-License-Identifier: Apache-2.0
"""Random operations on two LLMServices: edits by users, faults of pods, of the cluster and of the API server.

The operations follow from a seed; their timing, and the pods that they hit, do not. invariants.py checks every status.
"""

import base64
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kubernetes.dynamic.exceptions import DynamicApiError
from support.chaos.downloads import NUM_SOURCES, finished_download
from support.chaos.environment import ChaosEnvironment
from support.chaos.invariants import LLM_SERVICE_KIND
from support.chaos.recorders import ChaosPod
from support.controller_harness import CHILDREN, CLAIM
from support.engine_processes import wait_for
from support.fake_kubelet import RUNNING, FakeContainer
from support.fault_proxy import Fault, error_storm

from quire_operator.render import object_names
from quire_spec.documents.download_result import DownloadReason

Manifest = dict[str, Any]
SERVICES = ("tales", "tales-two")
"""One name is the beginning of the other."""
CREDENTIALS_SECRET = "keys"
"""The Secret that some adapters need."""
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
    {"metadata": {"labels": {object_names.MANAGED_BY: "somebody"}}},
    {"metadata": {"labels": {object_names.INSTANCE: None}}},
    {"metadata": {"labels": {"theirs": "yes"}, "annotations": {"theirs": "yes"}}},
]
INVALID_SPECS: list[Manifest] = [
    {"model": {"source": {"pvc": None, "path": "/m"}}},
    {"lora": {"maxLoaded": 0}},
    {"model": {"servedName": "a"}},
]
"""Specs that API servers without CEL rules accept, some of them only with adapters."""
VALID_SPEC: Manifest = {
    "model": {"source": {"path": None, "http": None, **CLAIM}, "servedName": None},
    "lora": {"maxLoaded": None},
    "runtime": {"memory": None},
    "paused": None,
}
_POD_FAULTS = ["unready", "down", "failing", "loading", "breaks", "refuses", "hangs", "lies", "tokens"]
_POD_FAULTS += ["well", "restart", "crash loop"]


@dataclass
class RandomOperations:
    """Random operations on a chaos environment."""

    environment: ChaosEnvironment
    seed: int
    num_steps: int = 0
    steps_until_recovery: int = 0
    """Steps until the API server works again."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._weighted_operations: list[tuple[int, Callable[[str], str]]] = [
            (5, self._edit_adapters),
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
        """Create two services and start an operator."""
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
        except DynamicApiError as error:
            self.environment.log_step(f"{name}: {operation.__name__}: {error.summary()}")
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
        return f"invalid spec: {spec}"

    def _make_spec_valid(self, name: str) -> str:
        self.environment.patch_service(name, VALID_SPEC)
        return "valid spec"

    def _set_paused(self, name: str) -> str:
        paused = self.rng.random() < 0.6
        self.environment.patch_service(name, {"paused": paused})
        return f"paused: {paused}"

    def _recreate_service(self, name: str) -> str:
        propagation_policy = self.rng.choice(["Background", "Background", "Foreground"])
        spec, edit_while_deleting = self._random_spec(), self.rng.random() < 0.3
        environment = self.environment
        body = environment.get_service(name)
        environment.cluster.delete(*LLM_SERVICE_KIND, name, environment.namespace, propagationPolicy=propagation_policy)
        if edit_while_deleting and propagation_policy == "Foreground":
            environment.patch_service(name, {"replicas": 1})
        uid = body.get("metadata", {}).get("uid")
        wait_for(lambda: environment.get_service(name).get("metadata", {}).get("uid") != uid, 30, f"{name} gone")
        environment.create_service(name, spec)
        return f"deleted ({propagation_policy}) and created again: {spec}"

    # Downloads

    def _change_source(self, name: str) -> str:
        """Select another model, on a claim or at a source."""
        index = self.rng.randrange(NUM_SOURCES + 1)
        source = (
            CLAIM | {"http": None} if index == NUM_SOURCES else self.environment.downloads.source(index) | {"pvc": None}
        )
        self.environment.patch_service(name, {"model": {"source": {"path": None, **source}}})
        return f"source: {source}"

    def _disturb_download(self, name: str) -> str:
        fault = self.rng.choice(["slow", "slow", "well", "away", "fails", "evicted", "pod deleted", "job deleted"])
        result = self.rng.choice(list(DownloadReason)[1:])
        propagation_policy = self.rng.choice(["Background", "Foreground", "Orphan"])
        environment, downloads = self.environment, self.environment.downloads
        pods = environment.download_pods(name)
        match fault:
            case "slow":
                downloads.slow_services.add(name)
            case "well":
                downloads.slow_services.discard(name)
            case "away":
                downloads.model_server.is_down = not downloads.model_server.is_down
                fault = f"source is down: {downloads.model_server.is_down}"
            case "job deleted":
                labels = f"{object_names.INSTANCE}={name}"
                for job in environment.cluster.items("batch/v1", "Job", environment.namespace, labelSelector=labels):
                    job_name = job["metadata"]["name"]
                    environment.cluster.delete(
                        "batch/v1", "Job", job_name, environment.namespace, propagationPolicy=propagation_policy
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
                environment.cluster.delete("v1", "Pod", pods[0]["metadata"]["name"], environment.namespace)
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
                fake_pod.hangs = True
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

    def restore_pod(self, pod: Manifest, fake_pod: ChaosPod) -> None:
        """Remove all faults of a pod."""
        uid = pod["metadata"]["uid"]
        fake_pod.unready_reason = ""
        fake_pod.hangs = fake_pod.status_fails = fake_pod.put_fails = fake_pod.drops_catalog = False
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
        environment, labels = self.environment, f"{object_names.INSTANCE}={name}"
        object_name = name + suffix
        if kind == "ReplicaSet" or suffix == "-engine":
            bodies = environment.cluster.items(version, kind, environment.namespace, labelSelector=labels)
            all_names = sorted(n for body in bodies if (n := body["metadata"]["name"]).startswith(object_name))
            if not all_names:
                return f"no {kind} to delete"
            object_name = all_names[index % len(all_names)]
        environment.cluster.delete(
            version, kind, object_name, environment.namespace, propagationPolicy=propagation_policy
        )
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
        with_kopf = self.rng.random() < 0.2
        self.environment.stop_operator()
        self.environment.start_operator(with_kopf)
        return f"operator killed and started again (kopf: {with_kopf})"

    def _disturb_api_server(self, name: str) -> str:
        fault_kind = self.rng.choice(["storm", "storm", "slow", "deaf", "cut"])
        fault_rng, probability = random.Random(self.rng.random()), self.rng.choice([0.1, 0.3, 0.6])
        self.restore_api_server()
        self.steps_until_recovery = self.rng.randint(1, 4)
        match fault_kind:
            case "storm":
                self.environment.proxy.fault = error_storm(fault_rng, probability)
            case "slow":
                self.environment.proxy.delay_s = lambda method, path: fault_rng.choice([0.0, 0.05, 0.3, 1.0])
            case "deaf":
                kind = fault_rng.choice(["llmservices", "pods", "deployments", "configmaps"])
                self.environment.proxy.blackhole(lambda path: f"/{kind}?watch=true" in path)
                fault_kind = f"deaf of {kind}"
            case "cut":
                # An API server sends 410 in the watch; kopf ends if it is the response.
                self.environment.proxy.fault = lambda method, path: (
                    Fault(503 if "/llmservices?" in path else 410) if "watch=true" in path else None
                )
        return f"API server: {fault_kind} ({probability})"

    def restore_api_server(self) -> None:
        """Remove all faults of the API server."""
        self.steps_until_recovery = 0
        self.environment.proxy.fault = lambda method, path: None
        self.environment.proxy.delay_s = lambda method, path: 0.0
        self.environment.proxy.stop_blackhole()

    # The end of a history

    def unblock(self) -> None:
        """Remove all faults of the API server and of downloads."""
        self.restore_api_server()
        environment = self.environment
        environment.downloads.model_server.is_down = False
        environment.downloads.slow_services.clear()
        for claim in environment.cluster.items("v1", "PersistentVolumeClaim", environment.namespace):
            for name in SERVICES:
                is_claim_of_service = claim["metadata"]["name"] == object_names.model_claim(name)
                if is_claim_of_service and "deletionTimestamp" in claim["metadata"]:
                    environment.delete_pods_of(name)
        for job in environment.cluster.items("batch/v1", "Job", environment.namespace):
            if job["status"].get("failed"):
                # A Job waits longer after each failure.
                environment.cluster.delete("batch/v1", "Job", job["metadata"]["name"], environment.namespace)

    def restore_all(self) -> None:
        """Restore all pods and give each service a valid spec."""
        environment = self.environment
        for name in SERVICES:
            for pod, fake_pod in environment.running_pods(name):
                self.restore_pod(pod, fake_pod)
            spec = environment.get_service(name)["spec"]
            source = spec["model"]["source"]
            model = VALID_SPEC["model"]
            if "http" in source:
                model = {**model, "source": {**source, "path": None, "pvc": None}}
            environment.patch_service(name, {**VALID_SPEC, "model": model, "replicas": spec.get("replicas", 1) or 1})
        environment.log_step("all faults removed")
