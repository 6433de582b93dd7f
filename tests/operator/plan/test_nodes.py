# SPDX-License-Identifier: Apache-2.0
"""Nodes on which the pods of a service can start: taints, cordons and readiness count."""

import pytest
from support.planning import L4, MODELS, T4, llm_service

from quire_operator.plan.errors import Unplannable
from quire_operator.plan.gpu import resolve_gpu
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.nodes import Node, node_capacity, parse_nodes, usable_node_labels
from quire_operator.plan.planner import make_plan

TAINT = {"key": "team", "value": "ml", "effect": "NoSchedule"}


def node(product=T4, taints=(), unschedulable=False, ready="True", **labels):
    labels = {"nvidia.com/gpu.product": product, **labels}
    return {
        "metadata": {"labels": labels},
        "spec": {"taints": list(taints), "unschedulable": unschedulable},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


def products(nodes, spec=""):
    labels = usable_node_labels(llm_service(spec), [Node.from_body(body) for body in nodes])
    return [entry["nvidia.com/gpu.product"] for entry in labels]


@pytest.mark.parametrize(
    "other",
    [
        node(taints=[TAINT]),
        node(taints=[TAINT | {"effect": "NoExecute"}]),
        node(unschedulable=True),
        node(ready="False"),
        node(ready="Unknown"),
    ],
)
def test_nodes_on_which_no_pod_can_start_do_not_count(other):
    assert products([node(L4), other]) == [L4]
    assert products([other]) == [T4], "it is the best guess if there is no other"


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "team", "operator": "Exists"},
        {"key": "team", "value": "ml"},
        {"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"},
    ],
)
@pytest.mark.parametrize("place", ["gpu: {tolerations: [%s]}", "podTemplate: {spec: {tolerations: [%s]}}"])
def test_a_toleration_of_either_field_counts(toleration, place):
    text = ", ".join(f"{key}: {value}" for key, value in toleration.items())
    assert products([node(L4), node(taints=[TAINT])], place % f"{{{text}}}") == [L4, T4]


@pytest.mark.parametrize("toleration", ["{key: team, value: web}", "{key: other, operator: Exists}",
                                        "{key: team, value: ml, effect: NoExecute}"])  # fmt: skip
def test_a_toleration_of_another_taint_does_not_count(toleration):
    assert products([node(L4), node(taints=[TAINT])], f"gpu: {{tolerations: [{toleration}]}}") == [L4]


def test_taints_that_do_not_keep_the_pods_off():
    harmless = [{"key": "a", "effect": "PreferNoSchedule"}, {"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    assert products([node(L4), node(taints=harmless)]) == [L4, T4]


def test_the_node_selector_of_the_pod_template_counts():
    nodes = [node(L4, zone="a"), node(T4, zone="b")]
    assert products(nodes, "podTemplate: {spec: {nodeSelector: {zone: b}}}") == [T4]
    assert products(nodes, "podTemplate: {spec: {nodeSelector: {$patch: replace, zone: a}}}") == [L4]


def test_output_of_kubectl():
    listing = {"kind": "List", "items": [{"metadata": {"labels": {"a": "b"}}}, {"metadata": {}}]}
    assert parse_nodes(listing) == [Node({"a": "b"}), Node({})]
    assert parse_nodes({"kind": "Node", "metadata": {"labels": {"a": "b"}}}) == [Node({"a": "b"})]
    assert parse_nodes([]) == []


TIERS = "kvCacheOffloading: {memory: 64Gi, secondary: [{folder: %s, size: 400Gi}]}"


def planned_on(bodies, spec):
    service, nodes = llm_service(spec), [Node.from_body(body) for body in bodies]
    gpu = resolve_gpu(service.spec.gpu, usable_node_labels(service, nodes))
    return make_plan(PlannerInputs.from_service(service, MODELS["8b"], gpu, node=node_capacity(service, nodes, gpu)))


def with_capacity(body, memory, storage):
    allocatable = {"memory": memory, "ephemeral-storage": storage, "nvidia.com/gpu": "1"}
    return body | {"status": body["status"] | {"allocatable": allocatable}}


def test_tiers_that_no_node_has_room_for_are_refused_by_name():
    spec = f"gpu: {{product: NVIDIA-L4}}\nlora: {{maxLoaded: 0}}\nengine: {{{TIERS % '{emptyDir: {}}'}}}"
    large = with_capacity(node(L4), "131072Mi", str(600 * 2**30))
    small = with_capacity(node(L4), "62Gi", "100Gi")
    plan = planned_on([small, large], spec)
    assert planned_on([node(L4)], spec) == plan, "the capacity is unknown"
    with pytest.raises(Unplannable) as error:
        planned_on([small, with_capacity(node(T4), "512Gi", "9Ti")], spec)
    assert str(error.value) == (
        f"spec.engine.kvCacheOffloading.memory: 64Gi: the pod requests {plan.hostBytes.total >> 20}Mi of host memory, "
        f"but the largest node with NVIDIA-L4 has {62 * 1024}Mi; lower it, or set spec.gpu.memory if larger nodes will "
        "come"
    )
    with pytest.raises(Unplannable) as error:
        planned_on([with_capacity(node(L4), "128Gi", "499Gi")], spec)
    assert str(error.value) == (
        f"spec.engine.kvCacheOffloading.secondary[0].size: 400Gi: the pod requests {500 * 1024}Mi of ephemeral "
        f"storage, but the largest node with NVIDIA-L4 has {499 * 1024}Mi; lower it, or use a claim"
    )
    on_claim = spec.replace("{emptyDir: {}}", "{pvc: {claimName: c}}")
    assert planned_on([with_capacity(node(L4), "128Gi", "9Gi")], on_claim).hostBytes == plan.hostBytes
    by_hand = spec.replace("NVIDIA-L4", "NVIDIA-L4, memory: 23034Mi")
    assert planned_on([small], by_hand).hostBytes == plan.hostBytes
    assert planned_on([small], "gpu: {product: NVIDIA-L4}").hostBytes.kvOffloading == 0


def test_adapters_that_are_found_by_name_need_room_on_a_node():
    limits = "[{path: a, limit: {size: 60Gi}}, {http: {url: 'http://h/a'}, limit: {size: 50Gi}}]"
    spec = f"gpu: {{product: NVIDIA-L4}}\nadapterSources: {limits}"
    plan = planned_on([node(L4)], spec)
    assert planned_on([with_capacity(node(L4), "128Gi", "110Gi")], spec) == plan
    with pytest.raises(Unplannable) as error:
        planned_on([with_capacity(node(L4), "128Gi", "109Gi")], spec)
    assert str(error.value) == (
        f"spec.adapterSources: the limits are {110 * 1024}Mi in total, and the pod requests {110 * 1024}Mi of "
        f"ephemeral storage, but the largest node has {109 * 1024}Mi; lower limit.size"
    )
    other = planned_on([node(L4)], spec.replace("60Gi", "61Gi"))
    assert other.inputsHash == plan.inputsHash, "running pods stay"
