# SPDX-License-Identifier: Apache-2.0
"""Objects of a service whose replicas are groups of pods: the LeaderWorkerSet, and what selects its pods."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planning import llm_service, planner_inputs
from support.rendering import FULL_SPEC, GPU, OPERATOR_PEER, only_of_kind, pod_document, rendered_objects

from quire_operator.plan.errors import Unplannable
from quire_operator.plan.planner import make_plan
from quire_operator.render import leader_worker_set, workload

TWO_NODES = f"{GPU}engine: {{pipelineParallelSize: 2}}\nreplicas: 3\n"
H100 = "NVIDIA-H100-80GB-HBM3"


def group_of(objects):
    return only_of_kind(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]


def server(template):
    return next(c for c in template["spec"]["containers"] if c["name"] == "server")


def test_the_leader_is_the_pod_of_a_deployment_and_workers_run_ranks_of_it():
    spec = FULL_SPEC.replace("engine: {", "engine: {pipelineParallelSize: 2, ")
    objects, alone = (rendered_objects(llm_service(text, "all")) for text in (spec, FULL_SPEC))
    assert not any(kind == "Deployment" for kind, _ in objects)
    group, pod = group_of(objects), only_of_kind(alone, "Deployment")["spec"]["template"]
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    label = {"quire.dev/template": leader["metadata"]["labels"]["quire.dev/template"]}
    (engine,) = [name for kind, name in objects if kind == "ConfigMap" and "-engine-" in name]
    (engine_alone,) = [name for kind, name in alone if kind == "ConfigMap" and "-engine-" in name]
    text = str(pod).replace(engine_alone, engine)
    assert text == str({**leader, "metadata": {**leader["metadata"], "labels": pod["metadata"]["labels"]}})
    assert leader["metadata"]["labels"] == pod["metadata"]["labels"] | label
    assert worker["metadata"]["labels"] == leader["metadata"]["labels"] | {"app.kubernetes.io/component": "worker"}
    assert worker["spec"]["volumes"] == leader["spec"]["volumes"]
    command = {"command": [*leader_worker_set.WORKER_COMMAND], "ports": [{"name": "health", "containerPort": 8003}]}
    assert server(worker) == server(leader) | command
    assert worker["spec"]["containers"][1:] == leader["spec"]["containers"][1:]
    engine = pod_document(objects.values())["engine"]
    assert (engine["pipeline_parallel_size"], engine["nnodes"], group["size"]) == (2, 2, 2)
    folder, _, field = engine["rank_key_file"].rpartition("/")
    assert {"name": "admin", "mountPath": folder, "readOnly": True} in server(worker)["volumeMounts"]
    assert field in objects["Secret", "all-admin"]["data"] == alone["Secret", "all-admin"]["data"]


def test_each_pod_of_a_group_has_the_folder_of_its_own_kv_blocks():
    tiers = "{memory: 16Gi, secondary: [{folder: {emptyDir: {}}, size: 40Gi}]}"
    objects = rendered_objects(llm_service(TWO_NODES.replace("Size: 2", f"Size: 2, kvCacheOffloading: {tiers}")))
    path = pod_document(objects.values())["engine"]["kv_offloading_folder"]
    for template in (group_of(objects)["leaderTemplate"], group_of(objects)["workerTemplate"]):
        (mount,) = (mount for mount in server(template)["volumeMounts"] if mount["mountPath"] == path)
        (volume,) = (volume for volume in template["spec"]["volumes"] if volume["name"] == mount["name"])
        assert volume["emptyDir"]["sizeLimit"] == server(template)["resources"]["requests"]["ephemeral-storage"]


def test_the_set_has_the_fields_of_0_8_that_groups_need():
    spec = only_of_kind(rendered_objects(llm_service(TWO_NODES)), "LeaderWorkerSet")["spec"]
    templates = {name: spec["leaderWorkerTemplate"].pop(name) for name in ("leaderTemplate", "workerTemplate")}
    assert all(templates.values()) and spec == {
        "replicas": 3,
        "leaderWorkerTemplate": {"size": 2, "restartPolicy": "RecreateGroupOnPodRestart"},
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1, "partition": 0},
        },
    }
    rollout = "rollout: {maxSurge: 0%, maxUnavailable: 25%}"
    spec = only_of_kind(rendered_objects(llm_service(TWO_NODES + rollout)), "LeaderWorkerSet")["spec"]
    update = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert update == {"maxSurge": "0%", "maxUnavailable": 1, "partition": 0}, "25 % of 3 groups are none"


@given(
    replicas=st.integers(0, 1000),
    percent=st.integers(0, 100),
    rounds_up=st.booleans(),
)
def test_percentages_are_rounded_as_kubernetes_rounds_them(replicas, percent, rounds_up):
    exact, result = replicas * percent / 100, leader_worker_set.scaled(f"{percent}%", replicas, rounds_up)
    assert (0 <= result - exact < 1) if rounds_up else (0 <= exact - result < 1)


def test_only_what_evictions_and_kv_blocks_need_selects_workers():
    text = TWO_NODES.replace("engine: {", "engine: {kvCacheOffloading: {memory: 1Gi}, kvTransfer: {}, ")
    text += "networking: {inferencePool: {endpointPicker: {name: p}}}"
    objects = rendered_objects(llm_service(text))
    group = group_of(objects)
    leader, worker = (group[name]["metadata"]["labels"] for name in ("leaderTemplate", "workerTemplate"))

    def selects(selector, labels):
        labels = {**labels, "leaderworkerset.sigs.k8s.io/name": "s"}
        expressions = selector.get("matchExpressions", ())
        return selector["matchLabels"].items() <= labels.items() and all(
            labels[e["key"]] in e["values"] for e in expressions
        )

    selected = {}
    for (kind, name), manifest in objects.items():
        spec = manifest.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if kind == "Service":
            selector = {"matchLabels": selector}
        if selector and name != "s-model-download":
            assert selects(selector, leader)
            selected[kind, name] = selects(selector, worker)
    workers_too = {("PodDisruptionBudget", "s"), ("NetworkPolicy", "s-group"), ("Service", "s-nodes")}
    assert {key for key, has_workers in selected.items() if has_workers} == workers_too
    assert set(selected) - workers_too == {
        ("NetworkPolicy", "s"), ("Service", "s"), ("Service", "s-pods"), ("PodMonitor", "s"), ("InferencePool", "s"),
    }  # fmt: skip
    assert only_of_kind(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 2, "one group"
    [config] = [json.loads(o["data"]["pod.json"]) for o in objects.values() if "pod.json" in o.get("data", {})]
    assert config["engine"]["kv_transfer"]["allowed_peers"] == ["s-pods:8005", "s-nodes:8005"]
    assert config["engine"]["nnodes"] == 2


def test_ranks_are_reachable_only_from_the_pods_of_the_set():
    policy = rendered_objects(llm_service(TWO_NODES))["NetworkPolicy", "s-group"]["spec"]
    peers = [{"podSelector": policy["podSelector"]}]
    ranks, health = policy["ingress"]
    assert ranks == {"from": peers, "ports": [{"protocol": "TCP"}]}, "gloo and NCCL choose ports"
    assert OPERATOR_PEER in health["from"] and health["ports"] == [{"port": 8003, "protocol": "TCP"}]
    assert policy["egress"][1] == {"to": peers, "ports": [{"protocol": "TCP"}]}


def test_autoscalers_read_the_metrics_of_leaders():
    pattern = workload.pod_name_pattern(llm_service(TWO_NODES))
    names = ["s-0", "s-12", "s-0-1", "s-5d8c9f7b4d-x7k2q", "s-a-0"]
    assert [name for name in names if re.fullmatch(pattern, name)] == ["s-0", "s-12"]


def test_each_pod_has_the_gpus_of_its_stage():
    """The sizes of the plan are those of one pod, as if all stages were on one machine with more GPUs."""
    spec = "lora: {maxLoaded: 0}\nengine: {pipelineParallelSize: %d, tensorParallelSize: 2}\ngpu: {count: 2}"
    inputs = planner_inputs("70b", H100, spec % 4)
    plan = make_plan(inputs)
    assert (plan.gpu.count, plan.tensorParallelSize.value, inputs.num_nodes) == (2, 2, 4)
    # The largest stage has at most half a layer more than its part of the weights, in files of 131.4 GiB.
    assert plan.bytes.weights == pytest.approx(1.01 * 141_107_412_992 / 8, rel=0.025)
    assert inputs.inputs_hash != planner_inputs("70b", H100, spec % 2).inputs_hash
    with pytest.raises(Unplannable, match=r"^spec.engine.pipelineParallelSize: 2 .* with states.*; use 1"):
        make_plan(planner_inputs("qwen3.5", H100, "engine: {pipelineParallelSize: 2}"))
