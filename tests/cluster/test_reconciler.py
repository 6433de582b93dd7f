# SPDX-License-Identifier: Apache-2.0
"""The reconciler against a real API server, with real controllers and a node without a kubelet."""

import asyncio
import time

import pytest
from support.controller_harness import (
    CHILDREN,
    ControllerHarness,
    child_objects,
    llm_service,
    without_generation,
)
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer

from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiServerUnavailable

API, KIND = "quire.dev/v1alpha1", "LLMService"
ADAPTER = {"name": "pirate", "source": {"pvc": {"claimName": "models", "path": "pirate"}}}


@pytest.fixture
def operator(cluster, namespace, kubelet):
    """An operator and a service that it has made."""
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(), namespace)
        operator.wait_settled()
        yield operator


def test_a_service_gets_its_objects_and_a_status(operator, cluster, namespace):
    for (version, kind), name in CHILDREN.items():
        body = cluster.get(version, kind, name, namespace)
        assert body is not None, kind
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == (KIND, "tales", True)
        assert body["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "quire-operator"
    service = cluster.get(API, KIND, "tales", namespace)
    assert "finalizers" not in service["metadata"] and "annotations" not in service["metadata"]
    status = service["status"]
    assert status["observedGeneration"] == service["metadata"]["generation"]
    assert status["plan"]["maxModelLen"]["value"] == 2048
    wait_for(lambda: operator.condition("Available").get("status") == "True", 20, "Available")
    # Nobody answers on the admin port of these pods, so nothing more is claimed.
    assert operator.condition("Ready")["status"] != "True"
    reasons = {
        e["reason"] for e in cluster.items("events.k8s.io/v1", "Event", namespace) if e["regarding"]["kind"] == KIND
    }
    assert "Fits" in reasons
    assert cluster.items("batch/v1", "Job", namespace) == [], "the Job that read the claim is not needed any more"


def test_a_failed_mount_is_reported(cluster, namespace, kubelet):
    """The kubelet reports it in an event of the pod only."""
    waits = FakeContainer(waiting=("ContainerCreating", ""))
    kubelet.set_behavior(lambda pod: pod["metadata"]["namespace"] == namespace, waits)
    with ControllerHarness(cluster, namespace) as operator:
        operator.controller.reconciler._deps.pod_warnings._poll_s = 0.5
        cluster.apply(llm_service(), namespace)
        (pod,) = wait_for(lambda: cluster.items("v1", "Pod", namespace), 20, "the pod that reads the claim")
        said = "MountVolume.SetUp failed: hostPath type check failed: /examples is not a directory"
        regarding = {
            "kind": "Pod",
            "namespace": namespace,
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        }
        # After the scheduler has had its word.
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 5))
        event = {
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": "mount", "namespace": namespace}, "count": 3,
            "involvedObject": regarding, "type": "Warning", "reason": "FailedMount", "message": said,
            "firstTimestamp": now, "lastTimestamp": now, "source": {"component": "kubelet"},
        }  # fmt: skip
        cluster.request("POST", f"/api/v1/namespaces/{namespace}/events", event)
        message = wait_for(
            lambda: "FailedMount" in (words := operator.condition("Planned").get("message", "")) and words, 30, "told"
        )
        assert message.endswith(f"; its pod waits: FailedMount: {said}")
        assert operator.condition("ModelCached")["status"] == "Unknown"


def test_unknown_fields_of_the_pod_template_are_reported(operator, cluster, namespace):
    containers = [{"name": "server", "livenesProbe": {}, "env": [{"name": 'A":]. b', "valeu": "b"}]}]
    volumes = [{"name": "extra", "emptyDir": {"sizeLimt": "1Gi"}}]
    pod = {"spec": {"nodeSelektor": {"a": "b"}, "hostNetwork": False, "containers": containers, "volumes": volumes}}
    cluster.merge(API, KIND, "tales", {"spec": {"podTemplate": pod}}, namespace)
    operator.wait_settled()
    config = operator.condition("ConfigValid")
    assert (config["status"], config["reason"]) == ("True", "FieldsLeftOut")
    names = ("containers.env.valeu", "containers.livenesProbe", "nodeSelektor", "volumes.emptyDir.sizeLimt")
    assert f"does not know {', '.join(f'spec.podTemplate.spec.{name}' for name in names)}, so" in config["message"]
    template = operator.child("Deployment")["spec"]["template"]["spec"]
    assert {"name": "extra", "emptyDir": {}} in template["volumes"]
    assert {"name": 'A":]. b'} in template["containers"][0]["env"]
    cluster.merge(API, KIND, "tales", {"spec": {"podTemplate": None}}, namespace)
    operator.wait_settled()
    assert operator.condition("ConfigValid")["reason"] == "Accepted"


def test_unchanged_objects_are_not_written(operator, cluster, namespace):
    wait_for(lambda: operator.condition("Available").get("status") == "True", 20, "Available")
    operator.requeue()
    before = list(operator.recorded_writes)
    versions = [body["metadata"]["resourceVersion"] for body in everything(cluster, namespace)]
    for _ in range(3):
        operator.requeue()
    assert operator.recorded_writes == before
    # Neither does a new operator write, which has nothing to remember.
    operator.stop()
    with ControllerHarness(cluster, namespace) as second:
        second.wait_settled()
        assert second.recorded_writes == []
    assert [body["metadata"]["resourceVersion"] for body in everything(cluster, namespace)] == versions


def test_edited_and_deleted_children_are_restored(operator, cluster, namespace):
    edits = {
        "ServiceAccount": {"automountServiceAccountToken": True},
        "ConfigMap": {"data": {"adapters.json": "{}"}},
        "NetworkPolicy": {"spec": {"ingress": [{}]}},
        "Service": {"spec": {"selector": {"app.kubernetes.io/instance": "another"}}},
        "Deployment": {"spec": {"replicas": 7, "template": {"spec": {"terminationGracePeriodSeconds": 1}}}},
    }
    wanted = child_objects(cluster, namespace)
    for (version, kind), name in CHILDREN.items():
        if kind in edits:
            cluster.merge(version, kind, name, edits[kind], namespace)
            wait_for(lambda: child_objects(cluster, namespace) == wanted, 15, f"{kind} edited")
    for (version, kind), name in CHILDREN.items():
        if kind != "Secret":
            uid = cluster.get(version, kind, name, namespace)["metadata"]["uid"]
            cluster.delete(version, kind, name, namespace)
            wait_for(lambda: uid_of(cluster, version, kind, name, namespace) not in (None, uid), 15, f"{kind} back")  # noqa: B023
    wait_for(lambda: child_objects(cluster, namespace) == wanted, 15, "all as before")


def test_an_edit_during_a_pass_is_not_missed(cluster, namespace, kubelet):
    path = cluster.path("v1", "Service", namespace, "tales")
    with ControllerHarness(cluster, namespace) as operator:
        parts = operator.controller.reconciler._deps
        apply = parts.applier.apply

        async def applied_and_edited(*arguments):
            outcome = await apply(*arguments)
            parts.applier.apply = apply
            edit = {"spec": {"selector": {"app.kubernetes.io/instance": "another"}}}
            await asyncio.to_thread(cluster.request, "PATCH", path, edit, "application/merge-patch+json")
            async with asyncio.timeout(20):
                while selected(parts.cache.get(resources.SERVICE, namespace, "tales").body()) != "another":
                    await asyncio.sleep(0.02)
            edited.append(True)
            return outcome

        parts.applier.apply, edited = applied_and_edited, []
        cluster.apply(llm_service(), namespace)
        wait_for(lambda: edited, 20, "the edit")
        wait_for(lambda: selected(operator.child("Service")) == "tales", 20, "as it was")


def selected(service):
    return service["spec"]["selector"]["app.kubernetes.io/instance"]


def test_kv_transfer_is_turned_on_and_off_in_a_running_service(operator, cluster, namespace):
    """The Secret keeps its keys, because containers of old pods can start again."""
    keys = operator.child("Secret", "tales-admin")["data"]
    assert keys.keys() == {"key", "kv-transfer-key", "rank-key"}

    def rules():
        spec = operator.child("NetworkPolicy")["spec"]
        return [r for r in (*spec["ingress"], *spec["egress"]) if {"port": 8005, "protocol": "TCP"} in r["ports"]]

    for _ in range(2):
        engine = {"kvCacheOffloading": {"memory": "64Mi"}, "kvTransfer": {"enabled": True}}
        cluster.merge(API, KIND, "tales", {"spec": {"engine": engine}}, namespace)
        operator.wait_settled()
        assert operator.condition("Planned")["status"] == "True", operator.condition("Planned")
        assert operator.child("Secret", "tales-admin")["data"] == keys
        assert len(rules()) == 2
        container = operator.child("Deployment")["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "kv-transfer", "containerPort": 8005, "protocol": "TCP"} in container["ports"]
        cluster.merge(API, KIND, "tales", {"spec": {"engine": {"kvTransfer": {"enabled": False}}}}, namespace)
        operator.wait_settled()
        assert operator.child("Secret", "tales-admin")["data"] == keys and rules() == []


def test_a_deleted_admin_key_is_restored(cluster, namespace, kubelet):
    with ControllerHarness(cluster, namespace, {"secret_ttl_s": 0.1}) as operator:
        cluster.apply(llm_service(), namespace)
        operator.wait_settled()
        before = operator.child("Secret", "tales-admin")["data"]
        cluster.delete("v1", "Secret", "tales-admin", namespace)
        wait_for(lambda: operator.requeue() or operator.child("Secret", "tales-admin"), 15, "Secret back")
        assert operator.child("Secret", "tales-admin")["data"] == before
    with ControllerHarness(cluster, namespace) as second:
        second.wait_settled()
        assert second.child("Secret", "tales-admin")["data"] == before


class Second(ApiClient):
    """Another operator writes the first status a moment before."""

    before = "2026-01-01T00:00:00Z"
    wrote = False

    async def set_status(self, resource, manifest):
        if not self.wrote and "conditions" in manifest["status"]:
            self.wrote = True
            theirs = [{**c, "lastTransitionTime": self.before} for c in manifest["status"]["conditions"]]
            await super().set_status(resource, {**manifest, "status": {**manifest["status"], "conditions": theirs}})
        return await super().set_status(resource, manifest)


def test_a_status_conflict_is_resolved_with_the_stored_status(cluster, namespace, kubelet):
    with ControllerHarness(cluster, namespace, make_client=Second) as operator:
        cluster.apply(llm_service(), namespace)
        operator.wait_settled()
        assert operator.condition("ConfigValid")["lastTransitionTime"] == Second.before, "no transition since then"


class Deaf(ApiClient):
    """The answer to the first status is lost."""

    lost = False

    async def _request(self, method, path, *arguments):
        body = await super()._request(method, path, *arguments)
        if method == "PATCH" and path.endswith("/status") and not self.lost:
            self.lost = True
            raise ApiServerUnavailable("no answer")
        return body


def test_a_lost_response_to_a_status_write_loses_no_event(cluster, namespace, kubelet):
    with ControllerHarness(cluster, namespace, make_client=Deaf) as operator:
        cluster.apply(llm_service(paused=True), namespace)
        wait_for(lambda: told(cluster, namespace), 20, "an event")
        operator.requeue()
        assert operator.controller.client.lost and told(cluster, namespace) == ["Paused"]


def told(cluster, namespace):
    found = cluster.items("events.k8s.io/v1", "Event", namespace)
    return [event["reason"] for event in found if event["regarding"]["kind"] == KIND]


def test_edits_take_effect_and_only_edits_of_pods_restart_them(operator, cluster, namespace):
    template = operator.child("Deployment")["spec"]["template"]
    cluster.merge(API, KIND, "tales", {"spec": {"adapters": [ADAPTER], "replicas": 3}}, namespace)
    operator.wait_settled()
    assert "pirate" in operator.child("ConfigMap", "tales-adapters")["data"]["adapters.json"]
    deployment = operator.child("Deployment")
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["template"] == template, "adapters on a claim that is mounted already restart nothing"
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxModelLen": 1024}}}, namespace)
    operator.wait_settled()
    assert operator.child("Deployment")["spec"]["template"] != template
    assert operator.status()["plan"]["maxModelLen"] == {"value": 1024, "from": "Spec", "why": "set in the spec"}


def test_unneeded_objects_are_deleted(operator, cluster, namespace):
    first = engine_maps(cluster, namespace)
    off = {"networking": {"networkPolicy": {"enabled": False}}}
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxModelLen": 512}, **off}}, namespace)
    operator.wait_settled()
    wait_for(lambda: operator.child("NetworkPolicy") is None, 15, "NetworkPolicy gone")
    # Pods of the first template may still start again, as long as there is a ReplicaSet of it.
    assert first < engine_maps(cluster, namespace)
    old = [rs for rs in cluster.items("apps/v1", "ReplicaSet", namespace) if not rs["spec"]["replicas"]]
    if not old:
        wait_for(
            lambda: any(not rs["spec"]["replicas"] for rs in cluster.items("apps/v1", "ReplicaSet", namespace)),
            20,
            "rolled",
        )
    for found in cluster.items("apps/v1", "ReplicaSet", namespace):
        if not found["spec"]["replicas"]:
            cluster.delete("apps/v1", "ReplicaSet", found["metadata"]["name"], namespace)
    wait_for(lambda: not first & engine_maps(cluster, namespace), 20, "the old engine map gone")
    assert len(engine_maps(cluster, namespace)) == 1


def test_an_unowned_object_with_the_labels_is_not_deleted(operator, cluster, namespace):
    labels = {"app.kubernetes.io/managed-by": "quire-operator", "app.kubernetes.io/instance": "tales"}
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine", "labels": labels}, "data": {}}
    cluster.apply(foreign, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
    operator.wait_settled()
    operator.requeue()
    assert cluster.get("v1", "ConfigMap", "mine", namespace) is not None


@pytest.mark.parametrize("label", ["managed-by", "instance"])
def test_removed_labels_of_a_child_are_restored(operator, cluster, namespace, label):
    wanted = child_objects(cluster, namespace)
    for (version, kind), name in CHILDREN.items():
        stolen = {"metadata": {"labels": {f"app.kubernetes.io/{label}": None if kind == "Service" else "other"}}}
        cluster.merge(version, kind, name, stolen, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"rollout": {"drainSeconds": 61}}}, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"rollout": {"drainSeconds": 60}}}, namespace)
    operator.wait_settled()
    assert operator.condition("ConfigValid")["reason"] != "Conflict"
    wait_for(
        lambda: operator.requeue() or names_of(child_objects(cluster, namespace)) >= names_of(wanted),
        15,
        "labels back",
    )


def names_of(found):
    return {(body["kind"], body["metadata"]["name"]) for body in found if body["kind"] != "Secret"}


def test_an_object_with_another_owner_is_not_changed(cluster, namespace, kubelet):
    spec = {"ports": [{"port": 80, "protocol": "TCP"}], "selector": {"app": "theirs"}}
    cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "tales"}, "spec": spec}, namespace)
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(), namespace)
        wait_for(lambda: operator.condition("ConfigValid").get("reason") == "Conflict", 20, "Conflict")
        said = operator.condition("ConfigValid")["message"]
        assert "Service 'tales'" in said and "has another owner" in said and "delete it" in said
        assert cluster.get("v1", "Service", "tales", namespace)["spec"]["selector"] == {"app": "theirs"}
        assert operator.child("Deployment") is None
        cluster.delete("v1", "Service", "tales", namespace)
        wait_for(lambda: operator.child("Deployment") is not None, 120, "the Deployment")


def test_an_invalid_spec_keeps_the_last_valid_children(operator, cluster, namespace):
    """The number of pods does not depend on what is invalid."""
    wanted = child_objects(cluster, namespace)
    wrong = {"model": {"source": {"pvc": None, "path": "/models/here"}}, "replicas": 5}
    cluster.merge(API, KIND, "tales", {"spec": wrong}, namespace)
    wait_for(lambda: operator.condition("ConfigValid").get("status") == "False", 15, "ConfigValid")
    assert "spec.model.source" in operator.condition("ConfigValid")["message"]
    assert operator.condition("Ready")["status"] == "False"
    operator.requeue()
    (deployment,) = [body for body in wanted if body["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 1
    deployment["spec"]["replicas"] = 5
    assert without_generation(child_objects(cluster, namespace)) == without_generation(wanted)
    status = operator.status()
    assert status["observedGeneration"] == 2 and status["plan"]["maxModelLen"]["value"] == 2048


def test_a_paused_service_is_not_changed(operator, cluster, namespace):
    cluster.merge(API, KIND, "tales", {"spec": {"paused": True, "replicas": 4}}, namespace)
    wait_for(lambda: operator.status().get("observedGeneration") == 2, 15, "status written")
    cluster.merge("apps/v1", "Deployment", "tales", {"spec": {"replicas": 2}}, namespace)
    operator.requeue()
    assert operator.child("Deployment")["spec"]["replicas"] == 2
    cluster.merge(API, KIND, "tales", {"spec": {"paused": False}}, namespace)
    wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 4, 15, "back at work")


def test_the_scale_subresource_scales_the_deployment_once(operator, cluster, namespace):
    path = cluster.path(API, KIND, namespace, "tales") + "/scale"
    cluster.request("PATCH", path, {"spec": {"replicas": 3}}, "application/merge-patch+json")
    wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 3, 15, "Deployment follows")
    wait_for(lambda: operator.status().get("replicas") == 3, 20, "three pods")
    seen = set()
    for _ in range(3):
        operator.requeue()
        seen.add(operator.child("Deployment")["spec"]["replicas"])
    assert seen == {3}
    scale = cluster.request("GET", path)
    assert scale["status"]["replicas"] == 3
    selector = scale["status"]["selector"]
    assert len(cluster.items("v1", "Pod", namespace, labelSelector=selector)) == 3


def test_a_service_deleted_while_no_operator_runs_is_collected(operator, cluster, namespace):
    operator.stop()
    cluster.delete(API, KIND, "tales", namespace)
    assert cluster.get(API, KIND, "tales", namespace) is None, "nothing holds it back"
    wait_for(lambda: child_objects(cluster, namespace) == [], 120, "garbage collected")
    with ControllerHarness(cluster, namespace) as second:
        second.requeue()
        assert second.recorded_writes == []


def everything(cluster, namespace):
    return [cluster.get(version, kind, name, namespace) for (version, kind), name in CHILDREN.items()] + [
        cluster.get(API, KIND, "tales", namespace)
    ]


def uid_of(cluster, version, kind, name, namespace):
    return (cluster.get(version, kind, name, namespace) or {"metadata": {"uid": None}})["metadata"]["uid"]


def engine_maps(cluster, namespace):
    found = cluster.items("v1", "ConfigMap", namespace, labelSelector="app.kubernetes.io/instance=tales")
    return {body["metadata"]["name"] for body in found if "-engine-" in body["metadata"]["name"]}
