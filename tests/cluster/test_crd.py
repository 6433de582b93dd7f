# SPDX-License-Identifier: Apache-2.0
"""The CRD at a real API server: it installs, takes the examples, refuses what it should, and scales.

Where the cluster is an old one, a current Kubernetes' API server of definitions shows the same, and what an old one
does not have. It has no /api, without which kubectl does nothing.
"""

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


@pytest.fixture(params=["cluster", "current"])
def server(request):
    """Each of the two API servers."""
    return request.getfixturevalue(request.param)


def changed(**spec):
    body = copy.deepcopy(SERVICE)
    body["spec"].update(spec)
    return body


def test_crd_is_established_and_small(server):
    found = server.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", "llmservices.quire.dev")
    conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    assert (conditions["NamesAccepted"], conditions["Established"]) == ("True", "True")
    # NonStructuralSchema and KubernetesAPIApprovalPolicyConformant only appear when something is wrong.
    assert not {"NonStructuralSchema", "Terminating"} & set(conditions)
    found["metadata"].pop("managedFields")
    assert len(json.dumps(found)) < 200_000


def test_kubectl_apply_accepts_the_crd(cluster):
    """Client-side apply keeps the whole object in an annotation of 256 KB at most."""
    strict = [] if cluster.version >= (1, 25) else ["--validate=false"]
    cluster.kubectl("apply", "--dry-run=server", *strict, f"--filename={CRD_FILE}")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda p: p.name)
def test_the_examples_are_accepted(server, namespace, file: Path):
    example = yaml.safe_load(file.read_text())
    stored = server.apply(example, namespace)
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
        ({"model": {"source": {"path": "x" * 5000}}}, "spec.model.source.path"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_the_schema_rejects_invalid_values(server, namespace, spec, says):
    with pytest.raises(DynamicApiError) as refused:
        server.request("POST", server.path(*API, namespace), changed(**spec), dryRun="All")
    assert refused.value.status == 422
    assert says in refused.value.summary()


@pytest.mark.parametrize(
    ("words", "good", "bad"), [r[:3] for r in CEL_RULE_CASES], ids=[f"{i}" for i, _ in enumerate(CEL_RULE_CASES)]
)
def test_cel_rules_reject_invalid_objects(current, namespace, words, good, bad):
    current.request("POST", current.path(*API, namespace), service_with(good), dryRun="All")
    with pytest.raises(DynamicApiError) as refused:
        current.request("POST", current.path(*API, namespace), service_with(bad), dryRun="All")
    assert refused.value.status == 422
    assert words in refused.value.summary()


@pytest.mark.parametrize(("words", "good", "bad"), CEL_UPDATE_CASES, ids=[u[0] for u in CEL_UPDATE_CASES])
def test_cel_rules_reject_invalid_updates(current, namespace, words, good, bad):
    for i, (old, new) in enumerate([*good, *bad]):
        name = f"update-{i}"
        current.apply(service_with({"metadata.name": name, "spec.cache": old}), namespace)
        later = {"spec": {"cache": {**dict.fromkeys(old), **new}}}
        if i < len(good):
            current.merge(*API, name, later, namespace)
            continue
        with pytest.raises(DynamicApiError) as refused:
            current.merge(*API, name, later, namespace)
        assert words in refused.value.summary()


def test_an_unknown_field_is_rejected_by_name(current, namespace):
    with pytest.raises(DynamicApiError, match=r"spec\.replica\b"):
        current.apply(changed(replica=2), namespace)


def test_the_scale_subresource(server, namespace):
    """What a HorizontalPodAutoscaler uses: replicas, and the selector of the pods."""
    server.apply(SERVICE, namespace)
    selector = "app.kubernetes.io/instance=tales"
    server.merge(*API, "tales", {"status": {"replicas": 1, "selector": selector}}, namespace, "status")
    path = server.path(*API, namespace, "tales") + "/scale"
    scale = server.request("GET", path)
    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert (scale["spec"]["replicas"], scale["status"]) == (1, {"replicas": 1, "selector": selector})
    server.request("PATCH", path, {"spec": {"replicas": 3}}, "application/merge-patch+json")
    after = server.get(*API, "tales", namespace)
    assert (after["spec"]["replicas"], after["metadata"]["generation"]) == (3, 2)


def test_status_is_a_subresource(server, namespace):
    """A write to the spec does not change the status, nor the reverse; a status write keeps the generation."""
    server.apply(SERVICE, namespace)
    both = {"spec": {"replicas": 2}, "status": {"replicas": 5}}
    server.merge(*API, "tales", both, namespace)
    assert "status" not in server.get(*API, "tales", namespace)
    server.merge(*API, "tales", {"spec": {"replicas": 9}, "status": {"replicas": 5}}, namespace, "status")
    after = server.get(*API, "tales", namespace)
    assert (after["spec"]["replicas"], after["status"]["replicas"], after["metadata"]["generation"]) == (2, 5, 2)
