# SPDX-License-Identifier: Apache-2.0
"""Real pods that LeaderWorkerSet's controller runs, with its webhooks: a model over two pods, which find each other by
the names that LeaderWorkerSet sets, and prefill apart from decode.

The tests of a service depend on each other and run in order.
"""

import contextlib
import json

import openai
import pytest
from support.controllers import running_lws
from support.disaggregated_set import running_double
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

from quire_spec.net.addresses import format_for_url

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
    """LeaderWorkerSet's controller, and the double of the one of DisaggregatedSets, before the operator looks for their
    kinds."""
    if not cluster.programs:
        pytest.skip("an existing cluster does not reach webhooks on this machine")
    with running_lws(cluster, tmp_path_factory.mktemp("lws")), running_double(cluster):
        yield


@contextlib.contextmanager
def serving(cluster, namespace, num_pods, **spec):
    """A namespace with examples/kind/tales.yaml, Ready, with some fields of the spec replaced.

    A node of two cores has room for the four pods of both services.
    """
    service = example_service(runtime={"cpu": "250m"}, **spec)
    with cluster.namespace(namespace) as name:
        create_examples_volume(cluster, name)
        cluster.kubectl("apply", "--filename=-", namespace=name, stdin=json.dumps(service))
        wait_serving(cluster, name, num_pods)
        yield name
        cluster.kubectl("delete", "llm", "tales", "--wait=true", namespace=name)
        wait_for(lambda: not cluster.items(*LWS, name) and not pods(cluster, name), 120, "the end of its pods")


@pytest.fixture(scope="module")
def namespace(cluster, lws, operator):
    """A namespace with the service on one pod."""
    with serving(cluster, "groups", 1) as name:
        yield name


@pytest.fixture(scope="module")
def roles(cluster, lws, operator):
    """A namespace with a service of one prefill pod and one decode pod."""
    spec = {
        "engine": {"kvCacheOffloading": {"memory": "64Mi"}},
        "disaggregation": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "localTokens": 64},
    }
    with serving(cluster, "roles", 2, **spec) as name:
        yield name


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


def test_the_decode_pod_reads_what_the_prefill_pod_computed(cluster, roles):
    """The client reaches decode pods through the Service. The header names the prefill pod, as llm-d's router does."""
    by_role = {pod["metadata"]["labels"]["llm-d.ai/role"]: pod for pod in pods(cluster, roles).values()}
    host = format_for_url(by_role["prefill"]["status"]["podIP"])
    prompt = " ".join(f"On day {day}, Anna and Ben went to the forest." for day in range(20))
    answers = []
    with service_endpoint(cluster, roles) as service:
        port = service.ports["openai"]
        decode = openai.OpenAI(base_url=f"http://{format_for_url(service.host)}:{port}/v1", api_key="-", max_retries=0)
        prefill = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="-", max_retries=0)
        with decode, prefill:
            for caller, headers in ((decode, {"x-prefiller-host-port": f"{host}:{port}"}), (prefill, {})):
                answers.append(
                    caller.completions.create(
                        model="pirate", prompt=prompt, max_tokens=16, temperature=0, extra_headers=headers
                    )
                )
    assert answers[0].choices[0].text == answers[1].choices[0].text
    # The first one came from the prefill pod's memory, and the second one from its own.
    assert all(answer.usage.prompt_tokens_details.cached_tokens > 200 for answer in answers)
