# SPDX-License-Identifier: Apache-2.0
"""The reconciler against a real API server, with real controllers and a node without a kubelet."""

import asyncio
import time

import pytest
from support.controller_harness import (
    CHILDREN,
    ControllerHarness,
    answer_model_readers,
    child_objects,
    llm_service,
    make_claim,
)
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer, FakeKubelet
from support.fault_proxy import FaultInjectingProxy

from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiServerUnavailable
from quire_operator.kube.reflector import WatchTimeouts

API, KIND = "quire.dev/v1alpha1", "LLMService"
ADAPTER = {"name": "pirate", "source": {"pvc": {"claimName": "models", "path": "pirate"}}}


@pytest.fixture(scope="module")
def kubelet(cluster):
    cluster.require_controllers()
    with FakeKubelet(cluster, "node-reconcile") as node:
        answer_model_readers(node)
        yield node


@pytest.fixture
def namespace(namespace, cluster):
    """With the claim that the model is on."""
    cluster.apply(make_claim(), namespace)
    return namespace


@pytest.fixture
def operating(cluster, namespace, kubelet):
    """An operator and a service that it has made."""
    with ControllerHarness(cluster, namespace) as operating:
        cluster.apply(llm_service(), namespace)
        operating.wait_settled()
        yield operating


def test_a_service_becomes_its_objects_and_its_status_says_so(operating, cluster, namespace):
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
    wait_for(lambda: operating.condition("Available").get("status") == "True", 20, "Available")
    # Nobody answers on the admin port of these pods, so nothing more is claimed.
    assert operating.condition("Ready")["status"] != "True"
    reasons = {
        e["reason"] for e in cluster.items("events.k8s.io/v1", "Event", namespace) if e["regarding"]["kind"] == KIND
    }
    assert "Fits" in reasons
    assert cluster.items("batch/v1", "Job", namespace) == [], "the Job that read the claim is not needed any more"


def test_a_volume_that_cannot_be_mounted_is_told_of(cluster, namespace, kubelet):
    """The kubelet reports it in an event of the pod only."""
    waits = FakeContainer(waiting=("ContainerCreating", ""))
    kubelet.set_behavior(lambda pod: pod["metadata"]["namespace"] == namespace, waits)
    with ControllerHarness(cluster, namespace) as operating:
        operating.controller.reconciler._deps.pod_warnings._poll_s = 0.5
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
            lambda: "FailedMount" in (words := operating.condition("Planned").get("message", "")) and words, 30, "told"
        )
        assert message.endswith(f"; its pod waits: FailedMount: {said}")
        assert operating.condition("ModelCached")["status"] == "Unknown"


def test_a_field_of_the_pod_that_there_is_not_is_named(operating, cluster, namespace):
    pod = {"spec": {"nodeSelektor": {"a": "b"}, "hostNetwork": False}}
    cluster.merge(API, KIND, "tales", {"spec": {"podTemplate": pod}}, namespace)
    operating.wait_settled()
    config = operating.condition("ConfigValid")
    assert (config["status"], config["reason"]) == ("True", "FieldsLeftOut")
    assert "knows no spec.podTemplate.spec.nodeSelektor, so" in config["message"]
    cluster.merge(API, KIND, "tales", {"spec": {"podTemplate": {"spec": {"nodeSelektor": None}}}}, namespace)
    operating.wait_settled()
    assert operating.condition("ConfigValid")["reason"] == "Accepted"


def test_what_is_as_it_should_be_is_not_written(operating, cluster, namespace):
    wait_for(lambda: operating.condition("Available").get("status") == "True", 20, "Available")
    operating.requeue()
    before = list(operating.recorded_writes)
    versions = [body["metadata"]["resourceVersion"] for body in everything(cluster, namespace)]
    for _ in range(3):
        operating.requeue()
    assert operating.recorded_writes == before
    # Neither does a new operator write, which has nothing to remember.
    operating.stop()
    with ControllerHarness(cluster, namespace) as second:
        second.wait_settled()
        assert second.recorded_writes == []
    assert [body["metadata"]["resourceVersion"] for body in everything(cluster, namespace)] == versions


def test_children_that_somebody_edits_or_deletes_come_back(operating, cluster, namespace):
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


def test_an_edit_in_the_middle_of_a_pass_is_not_missed(cluster, namespace, kubelet):
    path = cluster.path("v1", "Service", namespace, "tales")
    with ControllerHarness(cluster, namespace) as operating:
        parts = operating.controller.reconciler._deps
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
        wait_for(lambda: selected(operating.child("Service")) == "tales", 20, "as it was")


def selected(service):
    return service["spec"]["selector"]["app.kubernetes.io/instance"]


def test_the_admin_key_comes_back_as_it_was(cluster, namespace, kubelet):
    with ControllerHarness(cluster, namespace, {"secret_ttl_s": 0.1}) as operating:
        cluster.apply(llm_service(), namespace)
        operating.wait_settled()
        before = operating.child("Secret", "tales-admin")["data"]
        cluster.delete("v1", "Secret", "tales-admin", namespace)
        wait_for(lambda: operating.requeue() or operating.child("Secret", "tales-admin"), 15, "Secret back")
        assert operating.child("Secret", "tales-admin")["data"] == before
    with ControllerHarness(cluster, namespace) as second:
        second.wait_settled()
        assert second.child("Secret", "tales-admin")["data"] == before


class Early(ApiClient):
    """Looks for the admin key a moment before another operator makes it."""

    looked = False

    async def get_or_none(self, resource, namespace, name):
        current = await super().get_or_none(resource, namespace, name)
        if resource is resources.SECRET and not self.looked:
            self.looked, current = True, None
        return current


@pytest.mark.parametrize("remember_s", [300.0, 0.0])
def test_of_two_operators_that_make_an_admin_key_in_the_same_moment_both_have_the_first(
    operating, cluster, namespace, remember_s
):
    """Whether the second finds out when it makes its own, or by looking again before."""
    before = operating.child("Secret", "tales-admin")
    with ControllerHarness(cluster, namespace, {"secret_ttl_s": remember_s}, make_client=Early) as second:
        second.wait_settled()
        known = [o.controller.reconciler._deps.secrets._admin_keys[namespace, "tales"] for o in (operating, second)]
        assert second.controller.client.looked and known[0] == known[1]
    assert operating.child("Secret", "tales-admin") == before


class Second(ApiClient):
    """Another operator writes the first status a moment before."""

    before = "2026-01-01T00:00:00Z"
    wrote = False

    async def set_status(self, resource, manifest):
        if not self.wrote:
            self.wrote = True
            theirs = [{**c, "lastTransitionTime": self.before} for c in manifest["status"]["conditions"]]
            await super().set_status(resource, {**manifest, "status": {**manifest["status"], "conditions": theirs}})
        return await super().set_status(resource, manifest)


def test_a_status_that_another_has_written_meanwhile_is_judged_anew(cluster, namespace, kubelet):
    with ControllerHarness(cluster, namespace, make_client=Second) as operating:
        cluster.apply(llm_service(), namespace)
        operating.wait_settled()
        assert operating.condition("ConfigValid")["lastTransitionTime"] == Second.before, "no transition since then"


class Deaf(ApiClient):
    """The answer to the first status is lost."""

    lost = False

    async def _request(self, method, path, *arguments):
        body = await super()._request(method, path, *arguments)
        if method == "PATCH" and path.endswith("/status") and not self.lost:
            self.lost = True
            raise ApiServerUnavailable("no answer")
        return body


def test_a_status_whose_answer_is_lost_has_its_events(cluster, namespace, kubelet):
    with ControllerHarness(cluster, namespace, make_client=Deaf) as operating:
        cluster.apply(llm_service(paused=True), namespace)
        wait_for(lambda: told(cluster, namespace), 20, "an event")
        operating.requeue()
        assert operating.controller.client.lost and told(cluster, namespace) == ["Paused"]


def told(cluster, namespace):
    found = cluster.items("events.k8s.io/v1", "Event", namespace)
    return [event["reason"] for event in found if event["regarding"]["kind"] == KIND]


def test_an_operator_that_hears_nothing_of_an_edit_undoes_nothing_of_it(operating, cluster, namespace, tmp_path):
    """Its watch of services is dead, which is not noticed yet; its other watches work."""
    lost = f"/namespaces/{namespace}/llmservices?"
    settings = {"watch_timeouts": WatchTimeouts(inactivity_s=60.0)}
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(cluster, namespace, settings, kubeconfig=proxy.kubeconfig) as deaf,
    ):
        deaf.wait_settled()
        proxy.blackhole(lambda asked: lost in asked and "watch=true" in asked)
        known = deaf.controller.cache
        operating.wait_settled()
        before = len(operating.recorded_writes)
        adapter = {"name": "a", "source": {"pvc": {"claimName": "models", "path": "a"}}}
        cluster.merge(API, KIND, "tales", {"spec": {"adapters": [adapter], "replicas": 2}}, namespace)
        heard = lambda: known.get(resources.LLM_SERVICE, namespace, "tales").body()["spec"].get("adapters")  # noqa: E731
        wait_for(heard, 20, "news of the edit, by the objects that follow from it")
        operating.wait_settled()
        deaf.wait_settled()
        wait_for(lambda: quiet(operating, deaf), 20, "both quiet")
        written = [kind for kind, _ in operating.recorded_writes[before:]]
        assert (written.count("ConfigMap"), written.count("Deployment")) == (1, 1), "nothing was to be repaired"


def test_two_operators_agree(operating, cluster, namespace):
    with ControllerHarness(cluster, namespace) as other:
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2, "adapters": [ADAPTER]}}, namespace)
        operating.wait_settled()
        other.wait_settled()
        wait_for(lambda: operating.status().get("replicas") == 2, 20, "two pods")
        wait_for(lambda: quiet(operating, other), 20, "both quiet")


def test_edits_take_effect_and_only_those_of_pods_restart_them(operating, cluster, namespace):
    template = operating.child("Deployment")["spec"]["template"]
    cluster.merge(API, KIND, "tales", {"spec": {"adapters": [ADAPTER], "replicas": 3}}, namespace)
    operating.wait_settled()
    assert "pirate" in operating.child("ConfigMap", "tales-adapters")["data"]["adapters.json"]
    deployment = operating.child("Deployment")
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["template"] == template, "adapters on a claim that is mounted already restart nothing"
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxModelLen": 1024}}}, namespace)
    operating.wait_settled()
    assert operating.child("Deployment")["spec"]["template"] != template
    assert operating.status()["plan"]["maxModelLen"] == {"value": 1024, "from": "Spec", "why": "set in the spec"}


def test_what_is_not_wanted_any_more_goes(operating, cluster, namespace):
    first = engine_maps(cluster, namespace)
    off = {"networking": {"networkPolicy": {"enabled": False}}}
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxModelLen": 512}, **off}}, namespace)
    operating.wait_settled()
    wait_for(lambda: operating.child("NetworkPolicy") is None, 15, "NetworkPolicy gone")
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


def test_what_only_looks_like_a_child_is_not_pruned(operating, cluster, namespace):
    labels = {"app.kubernetes.io/managed-by": "quire-operator", "app.kubernetes.io/instance": "tales"}
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine", "labels": labels}, "data": {}}
    cluster.apply(foreign, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
    operating.wait_settled()
    operating.requeue()
    assert cluster.get("v1", "ConfigMap", "mine", namespace) is not None


@pytest.mark.parametrize("label", ["managed-by", "instance"])
def test_a_child_that_lost_the_label_it_is_found_by_has_it_again(operating, cluster, namespace, label):
    wanted = child_objects(cluster, namespace)
    for (version, kind), name in CHILDREN.items():
        stolen = {"metadata": {"labels": {f"app.kubernetes.io/{label}": None if kind == "Service" else "other"}}}
        cluster.merge(version, kind, name, stolen, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"rollout": {"drainSeconds": 61}}}, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"rollout": {"drainSeconds": 60}}}, namespace)
    operating.wait_settled()
    assert operating.condition("ConfigValid")["reason"] != "Conflict"
    wait_for(
        lambda: operating.requeue() or names_of(child_objects(cluster, namespace)) >= names_of(wanted),
        15,
        "labels back",
    )


def names_of(found):
    return {(body["kind"], body["metadata"]["name"]) for body in found if body["kind"] != "Secret"}


def test_an_object_of_somebody_else_is_left_alone(cluster, namespace, kubelet):
    spec = {"ports": [{"port": 80, "protocol": "TCP"}], "selector": {"app": "theirs"}}
    cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "tales"}, "spec": spec}, namespace)
    with ControllerHarness(cluster, namespace) as operating:
        cluster.apply(llm_service(), namespace)
        wait_for(lambda: operating.condition("ConfigValid").get("reason") == "Conflict", 20, "Conflict")
        said = operating.condition("ConfigValid")["message"]
        assert "Service 'tales'" in said and "has another owner" in said and "delete it" in said
        assert cluster.get("v1", "Service", "tales", namespace)["spec"]["selector"] == {"app": "theirs"}
        assert operating.child("Deployment") is None
        cluster.delete("v1", "Service", "tales", namespace)
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 1}, "metadata": {"annotations": {"a": "b"}}}, namespace)
        operating.wait_settled()
        assert operating.child("Deployment") is not None


def test_a_spec_that_cannot_be_used_leaves_the_last_good_children(operating, cluster, namespace):
    wanted = child_objects(cluster, namespace)
    wrong = {"spec": {"model": {"source": {"path": "/models/here"}}, "replicas": 5}}
    cluster.merge(API, KIND, "tales", wrong | {"spec": {"model": {"source": {"pvc": None, "path": "/m"}}}}, namespace)
    wait_for(lambda: operating.condition("ConfigValid").get("status") == "False", 15, "ConfigValid")
    assert "spec.model.source" in operating.condition("ConfigValid")["message"]
    assert operating.condition("Ready")["status"] == "False"
    operating.requeue()
    assert child_objects(cluster, namespace) == wanted
    status = operating.status()
    assert status["observedGeneration"] == 2 and status["plan"]["maxModelLen"]["value"] == 2048


def test_what_does_not_fit_leaves_the_last_good_children(operating, cluster, namespace):
    wanted = child_objects(cluster, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"runtime": {"memory": "64Mi"}}}, namespace)
    wait_for(lambda: operating.condition("Planned").get("reason") == "DoesNotFit", 15, "DoesNotFit")
    assert child_objects(cluster, namespace) == wanted
    cluster.merge(API, KIND, "tales", {"spec": {"runtime": {"memory": None}}}, namespace)
    wait_for(lambda: operating.condition("Planned").get("status") == "True", 15, "Planned again")


def test_paused_is_hands_off(operating, cluster, namespace):
    cluster.merge(API, KIND, "tales", {"spec": {"paused": True, "replicas": 4}}, namespace)
    wait_for(lambda: operating.status().get("observedGeneration") == 2, 15, "status written")
    cluster.merge("apps/v1", "Deployment", "tales", {"spec": {"replicas": 2}}, namespace)
    operating.requeue()
    assert operating.child("Deployment")["spec"]["replicas"] == 2
    cluster.merge(API, KIND, "tales", {"spec": {"paused": False}}, namespace)
    wait_for(lambda: operating.child("Deployment")["spec"]["replicas"] == 4, 15, "back at work")


def test_scale_is_followed_and_nobody_quarrels(operating, cluster, namespace):
    path = cluster.path(API, KIND, namespace, "tales") + "/scale"
    cluster.request("PATCH", path, {"spec": {"replicas": 3}}, "application/merge-patch+json")
    wait_for(lambda: operating.child("Deployment")["spec"]["replicas"] == 3, 15, "Deployment follows")
    wait_for(lambda: operating.status().get("replicas") == 3, 20, "three pods")
    seen = set()
    for _ in range(3):
        operating.requeue()
        seen.add(operating.child("Deployment")["spec"]["replicas"])
    assert seen == {3}
    scale = cluster.request("GET", path)
    assert scale["status"]["replicas"] == 3
    selector = scale["status"]["selector"]
    assert len(cluster.items("v1", "Pod", namespace, labelSelector=selector)) == 3


def test_a_service_that_is_made_again_gets_children_of_its_own(operating, cluster, namespace):
    before = operating.child("Deployment")["metadata"]["uid"]
    key = operating.child("Secret", "tales-admin")["data"]
    cluster.delete(API, KIND, "tales", namespace)
    cluster.apply(llm_service(replicas=2), namespace)

    def again():
        body = operating.child("Deployment")
        service = cluster.get(API, KIND, "tales", namespace)
        return (
            body is not None
            and body["metadata"]["uid"] != before
            and body["metadata"]["ownerReferences"][0]["uid"] == service["metadata"]["uid"]
        )

    wait_for(again, 60, "children of the new service")
    operating.wait_settled()
    assert operating.child("Secret", "tales-admin")["data"] != key


def test_a_service_deleted_while_no_operator_runs_is_collected(operating, cluster, namespace):
    operating.stop()
    cluster.delete(API, KIND, "tales", namespace)
    assert cluster.get(API, KIND, "tales", namespace) is None, "nothing holds it back"
    wait_for(lambda: child_objects(cluster, namespace) == [], 90, "garbage collected")
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


def quiet(*operators):
    """Whether no operator writes while each runs two passes."""
    before = [len(o.recorded_writes) for o in operators]
    for _ in range(2):
        for operating in operators:
            operating.requeue()
    return [len(o.recorded_writes) for o in operators] == before
