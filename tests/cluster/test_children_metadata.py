# SPDX-License-Identifier: Apache-2.0
"""Labels, annotations and resources of the objects of a service, in a cluster whose policies require them."""

import pytest
from support.chaos.downloads import is_download
from support.controller_harness import ControllerHarness, child_objects, llm_service, make_claim
from support.engine_processes import wait_for
from support.fake_kubelet import FakeContainer
from support.fake_model_server import FakeModelServer
from support.fake_pods import FakePods

SERVICE = ("quire.dev/v1alpha1", "LLMService")
REQUIRED_BY_POLICY = ["deployments", "services", "jobs", "pods", "networkpolicies", "persistentvolumeclaims"]
LIMITS = {"cpu": "1", "memory": "1Gi"}


@pytest.fixture(scope="module")
def model_server():
    server = FakeModelServer()
    yield server
    server.close()


@pytest.fixture
def policy(cluster, namespace):
    """A policy that rejects objects without the label `team`, and a quota that rejects pods without limits."""
    group, name = "admissionregistration.k8s.io/v1", f"team-{namespace}"
    groups = {"apiGroups": ["", "apps", "batch", "networking.k8s.io"], "apiVersions": ["*"]}
    rule = {**groups, "operations": ["CREATE"], "resources": REQUIRED_BY_POLICY}
    expression = "has(object.metadata.labels) && 'team' in object.metadata.labels"
    cluster.apply({
        "apiVersion": group, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": expression, "message": "the label team is missing"}],
        },
    })  # fmt: skip
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    cluster.apply({
        "apiVersion": group, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name},
        "spec": {
            "policyName": name,
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": selector},
        },
    })  # fmt: skip
    hard = {"limits.cpu": "100", "limits.memory": "1000Gi"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "limits"}, "spec": {"hard": hard}}
    cluster.apply(quota, namespace)
    wait_for(lambda: cluster.get("v1", "ResourceQuota", "limits", namespace).get("status"), 120, "the quota")
    rejected = make_claim("x")

    def is_enforced():
        try:
            cluster.apply(rejected, namespace, dry_run=True)
        except Exception as error:
            return "the label team is missing" in str(error)
        return False

    wait_for(is_enforced, 120, "the policy is enforced")
    yield
    for kind in ("ValidatingAdmissionPolicyBinding", "ValidatingAdmissionPolicy"):
        cluster.delete(group, kind, name)


@pytest.mark.parametrize("source", ["claim", "http"])
def test_a_service_is_ready_where_policies_require_labels_and_limits(
    cluster, namespace, kubelet, policy, model_server, source
):
    service = llm_service(
        labels={"team": "a"},
        annotations={"owner": "platform"},
        jobs={"resources": {"limits": LIMITS}},
        podTemplate={
            "metadata": {"labels": {"sidecar.istio.io/inject": "false"}},
            "spec": {"containers": [{"name": "server", "resources": {"limits": {"cpu": "8"}}}]},
        },
        **({"model": {"source": {"http": {"url": model_server.url}}}} if source == "http" else {}),
    )
    tracking = {"argocd.argoproj.io/instance": "app", "app.kubernetes.io/managed-by": "Helm", "example.com/own": "x"}
    service["metadata"] |= {"labels": tracking, "annotations": {"argocd.argoproj.io/tracking-id": "app"}}
    with FakePods(kubelet), ControllerHarness(cluster, namespace) as operator:
        cluster.apply(service, namespace)
        operator.wait_settled()

        def state():
            notes = [event.get("note") for event in cluster.items("events.k8s.io/v1", "Event", namespace)]
            return operator.status(), operator.child("Deployment"), notes

        wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, state)
        children = child_objects(cluster, namespace)
        pods = cluster.items("v1", "Pod", namespace)
        assert {"Deployment", "Service", "Job" if source == "http" else "ConfigMap"} <= {c["kind"] for c in children}
        for body in (*children, *pods):
            meta, name = body["metadata"], (body.get("kind"), body["metadata"]["name"])
            assert (meta["labels"]["team"], meta["annotations"]["owner"]) == ("a", "platform"), name
            assert "example.com/own" not in meta["labels"] and "argocd.argoproj.io/instance" not in meta["labels"]
            assert "argocd.argoproj.io/tracking-id" not in meta["annotations"]
        assert all(pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false" for pod in pods)
        # A change reaches the objects, and no pod is replaced.
        servers = lambda: cluster.items("v1", "Pod", namespace, labelSelector="app.kubernetes.io/component=server")  # noqa: E731
        uids = {pod["metadata"]["uid"] for pod in servers()}
        cluster.merge(*SERVICE, "tales", {"spec": {"labels": {"team": "b"}}}, namespace)
        operator.wait_settled()
        assert {child["metadata"]["labels"]["team"] for child in child_objects(cluster, namespace)} <= {"a", "b"}
        assert operator.child("Deployment")["metadata"]["labels"]["team"] == "b"
        assert {pod["metadata"]["uid"] for pod in servers()} == uids


def test_labels_can_change_while_a_job_runs(cluster, namespace, kubelet, model_server):
    """The template of a Job is immutable, and the download continues."""
    kubelet.set_behavior(lambda pod: pod["metadata"]["namespace"] == namespace and is_download(pod), FakeContainer())
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": {"http": {"url": model_server.url}}}), namespace)

        def jobs():
            return cluster.items("batch/v1", "Job", namespace)

        wait_for(lambda: jobs() and operator.condition("Ready").get("reason") == "Downloading", 120, "the download")
        (before,) = jobs()
        spec = {"labels": {"team": "b"}, "jobs": {"labels": {"queue": "q"}}}
        cluster.merge(*SERVICE, "tales", {"spec": spec}, namespace)
        wait_for(lambda: jobs()[0]["metadata"]["labels"].get("queue") == "q", 120, "the labels of the Job")
        (after,) = jobs()
        assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
        operator.wait_settled()
        assert operator.child("Deployment")["metadata"]["labels"]["team"] == "b"
        assert operator.condition("ConfigValid")["status"] == "True", operator.status()
