# SPDX-License-Identifier: Apache-2.0
"""A model over two real pods: the operator's LeaderWorkerSet, run by LeaderWorkerSet's controller with its webhooks.
The pods find each other by the names that LeaderWorkerSet sets.

The tests depend on each other and run in order, on one service.
"""

import json

import pytest
from support.controllers import running_lws
from support.engine_processes import wait_for
from support.pod_cluster import (
    LLM_SERVICE_KIND,
    OPERATOR_NAMESPACE,
    create_examples_volume,
    current_condition,
    diagnostics,
    example_service,
    get_service,
    is_ready,
    server_container,
    service_endpoint,
)

STORY = "Once upon a time"
MODELS = ("tales", "pirate")
LWS = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
_KILL_RANK = """
import os, pathlib
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words = (process / "cmdline").read_bytes().split(b"\\0")
        if any(word.endswith(b"rank_node_process") for word in words):
            os.kill(int(process.name), 9)
            print("killed")
    except (FileNotFoundError, ProcessLookupError):
        pass  # The process has ended.
"""


@pytest.fixture(scope="module")
def lws(cluster, tmp_path_factory):
    """LeaderWorkerSet's controller, before the operator looks for its kind."""
    if not cluster.programs:
        pytest.skip("an existing cluster does not reach webhooks on this machine")
    with running_lws(cluster, tmp_path_factory.mktemp("lws")):
        yield


@pytest.fixture(scope="module")
def namespace(cluster, lws, operator):
    """A namespace with examples/kind/tales.yaml on one pod, Ready."""
    with cluster.namespace("groups") as name:
        create_examples_volume(cluster, name)
        cluster.kubectl("apply", "--filename=-", namespace=name, stdin=json.dumps(example_service()))
        wait_serving(cluster, name, 1)
        yield name
        cluster.kubectl("delete", "llm", "tales", "--wait=true", namespace=name)
        wait_for(lambda: not cluster.items(*LWS, name) and not pods(cluster, name), 120, "the end of the group")


def pods(cluster, namespace):
    """The pods of the service by name, also those that are being deleted."""
    found = cluster.items("v1", "Pod", namespace, labelSelector="app.kubernetes.io/instance=tales")
    return {pod["metadata"]["name"]: pod for pod in found}


def runs(cluster, namespace):
    """Each pod's id and how often its container was restarted."""
    return {
        name: (pod["metadata"]["uid"], server_container(pod)["restartCount"])
        for name, pod in pods(cluster, namespace).items()
    }


def texts(cluster, namespace):
    with service_endpoint(cluster, namespace) as clients:
        return [clients.text(model, STORY) for model in MODELS]


def wait_serving(cluster, namespace, num_pods):
    def is_serving():
        found = pods(cluster, namespace)
        ready = current_condition(cluster, namespace, "Ready").get("status") == "True"
        return ready and len(found) == num_pods and all(map(is_ready, found.values()))

    try:
        wait_for(is_serving, 300, "Ready")
    except AssertionError as error:
        status = json.dumps(get_service(cluster, namespace).get("status", {}), indent=1)
        raise AssertionError(
            f"{status}\n{diagnostics(cluster, namespace)}\n{diagnostics(cluster, OPERATOR_NAMESPACE)}"
        ) from error


def test_two_pods_replace_one_and_generate_its_texts(cluster, namespace):
    before = texts(cluster, namespace)
    cluster.merge(*LLM_SERVICE_KIND, "tales", {"spec": {"engine": {"pipelineParallelSize": 2}}}, namespace)
    wait_serving(cluster, namespace, 2)
    assert sorted(pods(cluster, namespace)) == ["tales-0", "tales-0-1"]
    assert cluster.items("apps/v1", "Deployment", namespace) == []
    assert get_service(cluster, namespace)["status"]["groups"] == {"size": 2, "wanted": 1, "ready": 1}
    assert texts(cluster, namespace) == before


def test_a_killed_rank_costs_a_reload_in_the_same_pods(cluster, namespace):
    before, answers = runs(cluster, namespace), texts(cluster, namespace)
    assert "killed" in cluster.kubectl("exec", "tales-0-1", "--", "python3", "-c", _KILL_RANK, namespace=namespace)
    wait_for(lambda: not is_ready(pods(cluster, namespace)["tales-0"]), 60, "the leader is not ready")
    wait_serving(cluster, namespace, 2)
    assert runs(cluster, namespace) == before
    assert texts(cluster, namespace) == answers


def test_an_adapter_of_a_running_group_is_found_by_both_stages(cluster, namespace):
    before = runs(cluster, namespace)
    sql = {"name": "sql", "source": {"pvc": {"claimName": "examples", "path": "adapters/sql"}}}
    patch = json.dumps([{"op": "add", "path": "/spec/adapters/-", "value": sql}])
    cluster.kubectl("patch", "llm", "tales", "--type=json", f"--patch={patch}", namespace=namespace)
    wait_for(lambda: "sql" in get_service(cluster, namespace)["status"]["models"], 30, "the adapter")
    wait_serving(cluster, namespace, 2)
    with service_endpoint(cluster, namespace) as clients:
        assert clients.text("sql", STORY) not in texts(cluster, namespace)
    assert runs(cluster, namespace) == before
