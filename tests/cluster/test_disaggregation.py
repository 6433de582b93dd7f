# SPDX-License-Identifier: Apache-2.0
"""Pods with roles: a DisaggregatedSet whose LeaderWorkerSets run under LeaderWorkerSet's real controller, on a node
without a kubelet."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.controllers import running_lws
from support.disaggregated_set import API as SET_API
from support.disaggregated_set import KIND as SET_KIND
from support.disaggregated_set import running_double
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer

from quire_operator.kube import discovery

API, KIND = "quire.dev/v1alpha1", "LLMService"
SET = SET_API, SET_KIND
DEPLOYMENT = "apps/v1", "Deployment"
LONG_NAME = "a-name-with-thirty-one-letters0"
ADAPTER = {"name": "pirate", "source": {"pvc": {"claimName": "models", "path": "pirate"}}}
pytestmark = pytest.mark.usefixtures("fake_pods")


@pytest.fixture(scope="module")
def lws(cluster, kubelet, tmp_path_factory):
    """The controller of LeaderWorkerSet."""
    with running_lws(cluster, tmp_path_factory.mktemp("lws")):
        yield


@pytest.fixture
def operator(cluster, namespace, lws):
    with running_double(cluster), ControllerHarness(cluster, namespace) as operator:
        yield operator


def with_roles(prefill=1, decode=2, name="tales", **spec):
    roles = {"prefill": {"replicas": prefill}, "decode": {"replicas": decode, "engine": {"maxNumSeqs": 8}}}
    engine = {"kvCacheOffloading": {"memory": "64Mi"}}
    return llm_service(name, **{"disaggregation": roles, "engine": engine, "rollout": {"minReadySeconds": 0}, **spec})


def pods(cluster, namespace):
    """Return the names of the server pods that are not being deleted, by role."""
    found = {}
    for pod in cluster.items("v1", "Pod", namespace):
        labels = pod["metadata"].get("labels", {})
        if labels.get("app.kubernetes.io/component") == "server" and "deletionTimestamp" not in pod["metadata"]:
            found.setdefault(labels.get("llm-d.ai/role"), {})[pod["metadata"]["name"]] = pod
    return found


def numbers(cluster, namespace):
    return {role: len(found) for role, found in pods(cluster, namespace).items()}


def objects_of_groups(cluster, namespace):
    """Names of the NetworkPolicies and Services that only groups of several nodes need."""
    kinds = {("networking.k8s.io/v1", "NetworkPolicy"): "-group", ("v1", "Service"): "-nodes"}
    return {
        body["metadata"]["name"]
        for kind, suffix in kinds.items()
        for body in cluster.items(*kind, namespace)
        if body["metadata"]["name"].endswith(suffix)
    }


def uids(cluster, namespace):
    return {pod["metadata"]["uid"] for found in pods(cluster, namespace).values() for pod in found.values()}


def wait_condition(operator, status, reason, kind="Ready", name="tales", timeout=90):
    def is_so():
        body = operator.cluster.get(API, KIND, name, operator.namespace)
        found = operator.condition(kind, name)
        is_current = found.get("observedGeneration") == body["metadata"]["generation"]
        return is_current and (found["status"], found["reason"]) == (status, reason)

    try:
        wait_for(is_so, timeout, f"{kind} {status}/{reason}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {operator.status(name)}") from error


def wait_ready(operator, name="tales"):
    wait_condition(operator, "True", "Ready", name=name)


def test_without_the_kind_the_plan_says_so_and_a_later_installation_is_seen(cluster, namespace, lws, monkeypatch):
    monkeypatch.setattr(discovery, "REFRESH_INTERVAL_S", 1.0)
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(rollout={"minReadySeconds": 0}), namespace)
        wait_ready(operator)
        cluster.apply(with_roles(), namespace)
        wait_condition(operator, "False", "NoDisaggregatedSet", "Planned")
        assert operator.condition("Available")["status"] == "True", "the pods of the Deployment serve on"
        assert numbers(cluster, namespace) == {None: 1}
        with running_double(cluster):
            wait_ready(operator)
            wait_for(lambda: numbers(cluster, namespace) == {"prefill": 1, "decode": 2}, 20, "only pods with roles")
            assert cluster.items(*DEPLOYMENT, namespace) == []


def test_roles_are_made_scaled_and_replaced_together(operator, cluster, namespace, fake_pods):
    cluster.apply(with_roles(adapters=[ADAPTER]), namespace)
    wait_ready(operator)
    assert numbers(cluster, namespace) == {"prefill": 1, "decode": 2}
    status = operator.status()
    assert status["roles"] == [
        {"name": name, "desiredReplicas": n, "replicas": n, "readyReplicas": n, "updatedReplicas": n}
        for name, n in (("prefill", 1), ("decode", 2))
    ]
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (3, 3, 3)
    assert operator.condition("Available")["message"] == "1 of 1 prefill pods and 2 of 2 decode pods serve"
    assert status["plan"]["maxNumSeqs"]["value"] == 8 != status["plan"]["prefill"]["maxNumSeqs"]["value"]
    assert status["adapters"][0]["total"] == status["adapters"][0]["ready"] == 3, "adapters are pushed to both roles"

    # At rest, the operator writes nothing, even if it has just started.
    operator.requeue()
    writes = list(operator.recorded_writes)
    operator.requeue()
    assert operator.recorded_writes == writes
    operator.stop()
    with ControllerHarness(cluster, namespace) as second:
        second.wait_settled()
        assert second.recorded_writes == []
        before = uids(cluster, namespace)
        roles = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}}
        cluster.merge(API, KIND, "tales", {"spec": {"disaggregation": roles}}, namespace)
        wait_ready(second)
        assert numbers(cluster, namespace) == {"prefill": 2, "decode": 3} and before < uids(cluster, namespace)
        before = uids(cluster, namespace)
        changed = {"decode": {"engine": {"maxNumSeqs": 16}}}
        cluster.merge(API, KIND, "tales", {"spec": {"disaggregation": changed}}, namespace)
        wait_ready(second)
        assert numbers(cluster, namespace) == {"prefill": 2, "decode": 3} and not before & uids(cluster, namespace)
        revisions = {
            pod["metadata"]["labels"]["disaggregatedset.x-k8s.io/revision"]
            for found in pods(cluster, namespace).values()
            for pod in found.values()
        }
        assert len(revisions) == 1, "both roles are replaced by pods of one revision"
        zero = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}
        cluster.merge(API, KIND, "tales", {"spec": {"disaggregation": zero}}, namespace)
        wait_condition(second, "False", "ScaledToZero")
        assert numbers(cluster, namespace) == {}


def test_roles_of_several_nodes_are_made_scaled_and_replaced_together(operator, cluster, namespace):
    name = "a-name-with-28-characters-00"
    engine = {"kvCacheOffloading": {"memory": "64Mi"}, "pipelineParallelSize": 2}
    cluster.apply(with_roles(1, 2, name, engine=engine), namespace)
    wait_ready(operator, name)
    assert numbers(cluster, namespace) == {"prefill": 1, "decode": 2}

    def workers():
        found = cluster.items("v1", "Pod", namespace)
        labels = [pod["metadata"]["labels"] for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(
            label["llm-d.ai/role"] for label in labels if label.get("app.kubernetes.io/component") == "worker"
        )

    assert workers() == ["decode", "decode", "prefill"]
    status = operator.status(name)
    assert status["groups"] == {"size": 2, "wanted": 3, "ready": 3}
    assert [role["updatedReplicas"] for role in status["roles"]] == [1, 2]
    (leader,) = pods(cluster, namespace)["prefill"].values()
    environment = {e["name"]: e.get("value") for e in leader["spec"]["containers"][0]["env"]}
    host, meta = environment["LWS_LEADER_ADDRESS"], leader["metadata"]
    assert host == f"{meta['name']}.{leader['spec']['subdomain']}.{namespace}"
    assert cluster.get("v1", "Service", leader["spec"]["subdomain"], namespace)["spec"]["clusterIP"] == "None"

    operator.requeue()
    writes = list(operator.recorded_writes)
    operator.requeue()
    assert operator.recorded_writes == writes
    before = uids(cluster, namespace)
    changed = {"prefill": {"replicas": 2}, "decode": {"engine": {"maxNumSeqs": 16}}}
    cluster.merge(API, KIND, name, {"spec": {"disaggregation": changed}}, namespace)
    wait_ready(operator, name)
    assert numbers(cluster, namespace) == {"prefill": 2, "decode": 2} and not before & uids(cluster, namespace)
    wait_for(lambda: workers() == ["decode", "decode", "prefill", "prefill"], 20, "only workers of the new revision")
    missing = []

    def is_replaced():
        """Also the workers that are ending reach their leader and the groups of the other role."""
        found = objects_of_groups(cluster, namespace)
        pods_now = [pod["metadata"]["labels"] for pod in cluster.items("v1", "Pod", namespace)]
        ending = {label["llm-d.ai/role"] for label in pods_now if label.get("app.kubernetes.io/component") == "worker"}
        missing.extend({f"{name}-{role}-{what}" for role in ending for what in ("group", "nodes")} - found)
        return not ending

    assert len(objects_of_groups(cluster, namespace)) == 4
    cluster.merge(API, KIND, name, {"spec": {"engine": {"pipelineParallelSize": 1}}}, namespace)
    wait_for(is_replaced, 90, operator.status)
    wait_ready(operator, name)
    assert not missing
    wait_for(lambda: not objects_of_groups(cluster, namespace), 30, "no objects of groups")
    assert "groups" not in operator.status(name)


def test_a_role_that_cannot_start_is_named(operator, cluster, namespace, kubelet):
    waits = FakeContainer(waiting=("ImagePullBackOff", "no such image"))

    def is_prefill(pod):
        return pod["metadata"]["namespace"] == namespace and pod["metadata"]["labels"].get("llm-d.ai/role") == "prefill"

    kubelet.set_behavior(is_prefill, waits)
    cluster.apply(with_roles(), namespace)
    wait_condition(operator, "True", "PodsNotReady", "Progressing")

    def is_named():
        message = operator.condition("Progressing")["message"]
        return "prefill: 1 of 1 pods have this generation, 0 are ready; pod " in message and "no such image" in message

    wait_for(is_named, 20, operator.status)
    text = "0 of 1 prefill pods and 2 of 2 decode pods serve"
    wait_for(lambda: operator.condition("Available")["message"] == text, 20, "decode pods serve alone")
    assert operator.condition("Ready")["status"] == "False"
    kubelet.set_behavior(is_prefill, FakeContainer())
    wait_ready(operator)


def test_the_longest_name_gets_pods(operator, cluster, namespace):
    cluster.apply(with_roles(1, 1, LONG_NAME), namespace)
    wait_ready(operator, LONG_NAME)
    names = {name for found in pods(cluster, namespace).values() for name in found}
    assert len(names) == 2 and all(name.startswith(f"{LONG_NAME}-0-") for name in names)
