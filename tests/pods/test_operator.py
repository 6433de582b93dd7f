# SPDX-License-Identifier: Apache-2.0
"""End to end on a cluster: the chart, an LLMService, tokens; then adapters, replicas, a crash, and deletion.

The tests depend on each other and run in order, on one service.
"""

import json
import time

import pytest
from nodocker_cluster.network import NETWORK
from support.cluster import ROOT
from support.engine_processes import wait_for
from support.pod_cluster import (
    LLM_SERVICE_KIND,
    OPERATOR_NAMESPACE,
    ServiceEndpoint,
    create_examples_volume,
    current_condition,
    diagnostics,
    get_service,
    is_ready,
    kill_supervisor,
    server_container,
    service_endpoint,
    serving_pods,
)

from quire_spec.net.addresses import is_ipv6

SQL = {"name": "sql", "source": {"pvc": {"claimName": "examples", "path": "adapters/sql"}}}
STORY, QUESTION = "Once upon a time", "Question: list the names of customers in Paris\nSQL:"
CHILDREN = (
    ("apps/v1", "Deployment"), ("batch/v1", "Job"), ("v1", "ConfigMap"), ("v1", "Secret"), ("v1", "Service"),
    ("v1", "ServiceAccount"), ("v1", "PersistentVolumeClaim"), ("networking.k8s.io/v1", "NetworkPolicy"), ("v1", "Pod"),
)  # fmt: skip


@pytest.fixture(scope="module")
def namespace(cluster, operator):
    """A namespace with examples/kind/tales.yaml, applied by kubectl and Ready."""
    with cluster.namespace("tales") as name:
        create_examples_volume(cluster, name)
        cluster.kubectl("apply", f"--filename={ROOT}/examples/kind/tales.yaml", namespace=name)
        try:
            wait_for(lambda: current_condition(cluster, name, "Ready").get("status") == "True", 300, "Ready")
        except AssertionError as error:
            status = json.dumps(get_service(cluster, name).get("status", {}), indent=1)
            raise AssertionError(
                f"{status}\n{diagnostics(cluster, name)}\n{diagnostics(cluster, OPERATOR_NAMESPACE)}"
            ) from error
        yield name


def answers(cluster, namespace, model, prompt):
    """Return the answer of each pod; None for a pod that does not have the model."""
    return [answer(pod, model, prompt) for pod in serving_pods(cluster, namespace)]


def answer(pod, model, prompt):
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    try:
        return ServiceEndpoint(pod["status"]["podIP"], ports).text(model, prompt)
    except Exception as error:  # the client's errors have no common type
        if "unknown model" in str(error) or "not found" in str(error) or "UNAVAILABLE" in str(error):
            return None
        raise


def runs(cluster, namespace):
    """Return pod ids and restart counts, which a restart or a new pod changes."""
    return sorted((p["metadata"]["uid"], server_container(p)["restartCount"]) for p in serving_pods(cluster, namespace))


def test_base_and_adapter_answer_through_the_service(cluster, namespace):
    with service_endpoint(cluster, namespace) as clients:
        plain, pirate = clients.text("tales", STORY), clients.text("pirate", STORY)
    assert plain
    assert pirate
    assert plain != pirate
    status = get_service(cluster, namespace)["status"]
    assert sorted(status["models"]) == ["pirate", "tales"]
    assert status["replicas"] == 1
    assert status["plan"]


def test_pods_have_addresses_of_the_clusters_family(cluster, namespace):
    if not cluster.programs:
        pytest.skip("an existing cluster has its own address family")
    found = [
        pod["status"]["podIP"] for where in (namespace, OPERATOR_NAMESPACE) for pod in cluster.items("v1", "Pod", where)
    ]
    assert len(found) >= 2
    assert {is_ipv6(ip) for ip in found} == {is_ipv6(NETWORK.host)}


def test_edit_adds_an_adapter_within_5_s_without_restarts(cluster, namespace):
    before = runs(cluster, namespace)
    patch = json.dumps([{"op": "add", "path": "/spec/adapters/-", "value": SQL}])
    cluster.kubectl("patch", "llm", "tales", "--type=json", f"--patch={patch}", namespace=namespace)
    edited = time.monotonic()
    wait_for(lambda: all(answers(cluster, namespace, "sql", QUESTION)), 30, "every pod answers as sql")
    took = time.monotonic() - edited
    wait_for(
        lambda: current_condition(cluster, namespace, "AdaptersReady").get("status") == "True", 10, "AdaptersReady"
    )
    assert "sql" in get_service(cluster, namespace)["status"]["models"]
    assert runs(cluster, namespace) == before
    assert took < 5


def test_kubectl_scale_starts_a_second_pod_with_all_adapters(cluster, namespace):
    first = runs(cluster, namespace)
    cluster.kubectl("scale", "llm/tales", "--replicas=2", namespace=namespace)
    wait_for(lambda: sum(map(is_ready, serving_pods(cluster, namespace))) == 2, 240, "two ready pods")
    wait_for(lambda: current_condition(cluster, namespace, "Ready").get("status") == "True", 30, "Ready")
    assert first[0] in runs(cluster, namespace)
    assert len(set(answers(cluster, namespace, "sql", QUESTION))) == 1
    assert None not in answers(cluster, namespace, "pirate", STORY)
    scale = cluster.request("GET", cluster.path(*LLM_SERVICE_KIND, namespace, "tales") + "/scale")
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    assert cluster.items("v1", "Pod", namespace, labelSelector=scale["status"]["selector"])


def test_adapters_are_restored_after_a_container_restart(cluster, namespace):
    victim = serving_pods(cluster, namespace)[0]
    name, count = victim["metadata"]["name"], server_container(victim)["restartCount"]
    kill_supervisor(cluster, namespace, name)

    def again():
        pod = cluster.get("v1", "Pod", name, namespace)
        return server_container(pod)["restartCount"] == count + 1 and is_ready(pod) and pod

    pod = wait_for(again, 240, "the container runs again")
    wait_for(lambda: answer(pod, "sql", QUESTION) and answer(pod, "pirate", STORY), 10, "its adapters")
    wait_for(lambda: current_condition(cluster, namespace, "Ready").get("status") == "True", 40, "Ready")


def test_deletion_removes_all_objects_while_the_operator_is_down(cluster, namespace, operator):
    cluster.require_controllers()
    owner = "app.kubernetes.io/instance=tales"

    def left():
        found = {kind: cluster.items(version, kind, namespace, labelSelector=owner) for version, kind in CHILDREN}
        return [(kind, thing["metadata"]["name"]) for kind, things in found.items() for thing in things]

    assert {"Deployment", "Service", "ConfigMap", "Secret", "Pod"} <= {kind for kind, _ in left()}
    cluster.kubectl("scale", "deployment/quire", "--replicas=0", namespace=operator)
    # The grace period is 30 s; the kubelet takes additional time on two busy cores.
    wait_for(lambda: not cluster.items("v1", "Pod", operator), 120, "the operator's end")
    cluster.kubectl("delete", "llm", "tales", "--wait=true", namespace=namespace)
    # A pod drains for a minute at most; the garbage collector of Kubernetes 1.20 runs every 30 s.
    wait_for(lambda: left() == [], 200, f"the end of {left()}")
    claims = [c["metadata"]["name"] for c in cluster.items("v1", "PersistentVolumeClaim", namespace)]
    assert claims == ["examples"]
