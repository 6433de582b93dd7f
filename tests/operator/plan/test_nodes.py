# SPDX-License-Identifier: Apache-2.0
"""Nodes on which the pods of a service can start: taints, cordons and readiness count."""

import pytest
from support.planning import L4, T4, llm_service

from quire_operator.plan.nodes import Node, parse_nodes, usable_node_labels

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
