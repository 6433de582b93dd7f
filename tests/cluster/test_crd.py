# SPDX-License-Identifier: Apache-2.0
"""The CRD at a real API server: it installs, takes the examples, refuses what it should, and scales."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from kubernetes.dynamic.exceptions import DynamicApiError
from support.cel_cases import CEL_RULE_CASES, CEL_UPDATE_CASES, service_with
from support.cluster import CRD_FILE, ROOT

API = ("quire.dev/v1alpha1", "LLMService")
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.yaml") if "kind: LLMService" in p.read_text())
SERVICE = {
    "apiVersion": "quire.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "tales"},
    "spec": {"model": {"source": {"huggingFace": {"repo": "org/model"}}}},
}


def changed(**spec):
    body = copy.deepcopy(SERVICE)
    body["spec"].update(spec)
    return body


def test_crd_is_established_and_small(cluster):
    found = cluster.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", "llmservices.quire.dev")
    conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    assert (conditions["NamesAccepted"], conditions["Established"]) == ("True", "True")
    # NonStructuralSchema and KubernetesAPIApprovalPolicyConformant only appear when something is wrong.
    assert not {"NonStructuralSchema", "Terminating"} & set(conditions)
    found["metadata"].pop("managedFields")
    assert len(json.dumps(found)) < 200_000


def test_kubectl_apply_accepts_the_crd(cluster):
    """Client-side apply keeps the whole object in an annotation of 256 KB at most."""
    cluster.kubectl("apply", "--dry-run=server", f"--filename={CRD_FILE}")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda p: p.name)
def test_the_examples_are_accepted(cluster, namespace, file: Path):
    example = yaml.safe_load(file.read_text())
    stored = cluster.apply(example, namespace)
    assert stored["metadata"]["generation"] == 1
    assert stored["spec"]["replicas"] == example["spec"].get("replicas", 1)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"device": "TPU"}, 'supported values: "GPU", "CPU"'),
        ({"model": {}}, "spec.model.source: Required value"),
        ({"adapters": [{"name": "Not A Name", "source": {"path": "a"}}]}, "Not A Name"),
        ({"adapters": [{"name": "a", "source": {"path": "a"}}] * 2}, "Duplicate value"),
        ({"engine": {"blockSize": 17}}, "spec.engine.blockSize"),
        ({"lora": {"maxRank": "16"}}, "spec.lora.maxRank"),
        ({"rollout": {"maxSurge": "101%"}}, "spec.rollout.maxSurge"),
        ({"rollout": {"maxSurge": "1"}}, "spec.rollout.maxSurge"),
        ({"rollout": {"maxUnavailable": 1001}}, "spec.rollout.maxUnavailable"),
        ({"rollout": {"maxUnavailable": -1}}, "spec.rollout.maxUnavailable"),
        ({"rollout": {"maxUnavailable": True}}, "spec.rollout.maxUnavailable"),
        ({"model": {"source": {"path": "x" * 5000}}}, "spec.model.source.path"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_the_schema_rejects_invalid_values(cluster, namespace, spec, says):
    with pytest.raises(DynamicApiError) as refused:
        cluster.request("POST", cluster.path(*API, namespace), changed(**spec), dryRun="All")
    assert refused.value.status == 422
    assert says in refused.value.summary()


@pytest.mark.parametrize(
    ("words", "good", "bad"), [r[:3] for r in CEL_RULE_CASES], ids=[f"{i}" for i, _ in enumerate(CEL_RULE_CASES)]
)
def test_cel_rules_reject_invalid_objects(cluster, namespace, words, good, bad):
    cluster.request("POST", cluster.path(*API, namespace), service_with(good), dryRun="All")
    with pytest.raises(DynamicApiError) as refused:
        cluster.request("POST", cluster.path(*API, namespace), service_with(bad), dryRun="All")
    assert refused.value.status == 422
    assert words in refused.value.summary()


@pytest.mark.parametrize(("words", "good", "bad"), CEL_UPDATE_CASES, ids=[u[0] for u in CEL_UPDATE_CASES])
def test_cel_rules_reject_invalid_updates(cluster, namespace, words, good, bad):
    for i, (old, new) in enumerate([*good, *bad]):
        name = f"update-{i}"
        cluster.apply(service_with({"metadata.name": name, "spec.cache": old}), namespace)
        later = {"spec": {"cache": {**dict.fromkeys(old), **new}}}
        if i < len(good):
            cluster.merge(*API, name, later, namespace)
            continue
        with pytest.raises(DynamicApiError) as refused:
            cluster.merge(*API, name, later, namespace)
        assert words in refused.value.summary()


def test_an_unknown_field_is_rejected_by_name(cluster, namespace):
    with pytest.raises(DynamicApiError, match=r"spec\.replica\b"):
        cluster.apply(changed(replica=2), namespace)


def test_the_scale_subresource(cluster, namespace):
    """What a HorizontalPodAutoscaler uses: replicas, and the selector of the pods."""
    cluster.apply(SERVICE, namespace)
    selector = "app.kubernetes.io/instance=tales"
    cluster.merge(*API, "tales", {"status": {"replicas": 1, "selector": selector}}, namespace, "status")
    path = cluster.path(*API, namespace, "tales") + "/scale"
    scale = cluster.request("GET", path)
    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert (scale["spec"]["replicas"], scale["status"]) == (1, {"replicas": 1, "selector": selector})
    cluster.request("PATCH", path, {"spec": {"replicas": 3}}, "application/merge-patch+json")
    after = cluster.get(*API, "tales", namespace)
    assert (after["spec"]["replicas"], after["metadata"]["generation"]) == (3, 2)


def test_status_is_a_subresource(cluster, namespace):
    """A write to the spec does not change the status, nor the reverse; a status write keeps the generation."""
    cluster.apply(SERVICE, namespace)
    both = {"spec": {"replicas": 2}, "status": {"replicas": 5}}
    cluster.merge(*API, "tales", both, namespace)
    assert "status" not in cluster.get(*API, "tales", namespace)
    cluster.merge(*API, "tales", {"spec": {"replicas": 9}, "status": {"replicas": 5}}, namespace, "status")
    after = cluster.get(*API, "tales", namespace)
    assert (after["spec"]["replicas"], after["status"]["replicas"], after["metadata"]["generation"]) == (2, 5, 2)
