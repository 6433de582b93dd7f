# SPDX-License-Identifier: Apache-2.0
"""A part of a service that cannot be applied stops only what depends on it, and the status names it."""

import contextlib

import pytest
from support.chaos.downloads import finished_download, is_download
from support.controller_harness import ControllerHarness, child_objects, llm_service, without_generation
from support.engine_processes import wait_for
from support.fake_model_server import FakeModelServer

from quire_operator.kube import resources
from quire_operator.render import configmaps
from quire_spec.documents.download_result import DownloadReason

API, KIND = "quire.dev/v1alpha1", "LLMService"
HPA = ("autoscaling/v2", "HorizontalPodAutoscaler", "tales")
ADAPTER = {"name": "pirate", "source": {"pvc": {"claimName": "models", "path": "pirate"}}}
AUTOSCALING = {"kind": "HorizontalPodAutoscaler", "minReplicas": 1, "maxReplicas": 5}
NOT_ON_CLAIM = {"pvc": {"claimName": "no-such-claim", "path": "tiny"}}
pytestmark = pytest.mark.usefixtures("fake_pods")


@pytest.fixture
def operator(cluster, namespace, kubelet):
    """An operator and a service that serves."""
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(), namespace)
        waits_for(operator, "Ready", "True", "Ready")
        yield operator


def waits_for(operator, kind, status, reason, seconds=40):
    def is_so():
        condition = operator.condition(kind)
        return (condition.get("status"), condition.get("reason")) == (status, reason)

    try:
        wait_for(is_so, seconds, f"{kind}={status}/{reason}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {operator.status().get('conditions')}") from error


def check_that_the_rest_goes_on(operator, cluster, namespace):
    """Scaling, adapters, repair and access follow the spec; the pods stay."""
    template = operator.child("Deployment")["spec"]["template"]
    (pod, *_) = cluster.items("v1", "Pod", namespace, labelSelector="app.kubernetes.io/component=server")
    cluster.request(
        "PATCH", f"{cluster.path(API, KIND, namespace, 'tales')}/scale", {"spec": {"replicas": 3}},
        "application/merge-patch+json",
    )  # fmt: skip
    wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 3, 20, "three replicas")
    peers = [{"podSelector": {"matchLabels": {"app": "chat"}}}]
    edit = {"adapters": [ADAPTER], "networking": {"networkPolicy": {"ingressFrom": peers}}}
    cluster.merge(API, KIND, "tales", {"spec": edit}, namespace)
    wait_for(lambda: "pirate" in operator.child("ConfigMap", "tales-adapters")["data"]["adapters.json"], 20, "adapter")
    wait_for(lambda: operator.status()["models"] == ["tales", "pirate"], 120, "the adapter pushed to all pods")
    wait_for(lambda: operator.child("NetworkPolicy")["spec"]["ingress"][0]["from"] == peers, 20, "the clients")
    cluster.delete("v1", "ConfigMap", "tales-adapters", namespace)
    wait_for(lambda: operator.child("ConfigMap", "tales-adapters"), 20, "the repair")
    assert operator.child("Deployment")["spec"]["template"] == template
    assert cluster.get("v1", "Pod", pod["metadata"]["name"], namespace)["metadata"]["uid"] == pod["metadata"]["uid"]


def unreachable_source():
    server = FakeModelServer()
    server.close()
    return {"http": {"url": server.url}}


@pytest.mark.parametrize(
    ("spec", "kind", "status", "reason"),
    [
        ({"model": {"source": {"pvc": None, **unreachable_source()}}}, "ModelCached", "False", "Unreachable"),
        ({"model": {"source": NOT_ON_CLAIM}}, "Planned", "Unknown", "Planning"),
        ({"runtime": {"memory": "64Mi"}}, "Planned", "False", "DoesNotFit"),
        ({"model": {"source": {"pvc": None, "path": "/models/here"}}}, "ConfigValid", "False", "Invalid"),
        ({"podTemplate": {"spec": {"containers": "none"}}}, "ConfigValid", "False", "Invalid"),
    ],
)
def test_a_revision_without_a_plan(operator, cluster, namespace, kubelet, spec, kind, status, reason):
    cluster.merge(API, KIND, "tales", {"spec": spec}, namespace)
    waits_for(operator, kind, status, reason)
    check_that_the_rest_goes_on(operator, cluster, namespace)
    assert operator.condition("Ready")["reason"] == reason
    assert operator.condition("Available")["status"] == "True"
    # The next correct spec replaces the pods.
    source = {"http": None, "path": None, **llm_service()["spec"]["model"]["source"]}
    undo = {"model": {"source": source}, "runtime": {"memory": None}, "podTemplate": None}
    cluster.merge(API, KIND, "tales", {"spec": undo}, namespace)
    waits_for(operator, "Ready", "True", "Ready")


def test_a_rejected_credential_keeps_the_credentials_of_running_pods(cluster, namespace, kubelet):
    """A running pod can restart, and then it downloads the previous model again."""
    place = FakeModelServer()
    place.required_key = "right"
    for name, value in (("good", "right"), ("bad", "wrong")):
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"X-Key": value}}
        cluster.apply(secret, namespace)
    source = {"http": {"url": place.url, "headersSecretRef": {"name": "good"}}}
    kubelet.set_behavior(
        lambda pod: is_download(pod) and pod["metadata"]["namespace"] == namespace,
        finished_download(DownloadReason.DOWNLOADED),
    )
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(model={"source": source}), namespace)
        waits_for(operator, "Ready", "True", "Ready")
        wrong = {"http": {"url": f"{place.url}/b", "headersSecretRef": {"name": "bad"}}}
        cluster.merge(API, KIND, "tales", {"spec": {"model": {"source": wrong}, "replicas": 2}}, namespace)
        waits_for(operator, "ModelCached", "False", "AuthFailed")
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 2, 20, "two replicas")
        assert {"good", "bad"} == set(operator.child("Secret", "tales-credentials")["data"])
    place.close()


def test_an_optional_object_that_waits_for_finalizers(operator, cluster, namespace):
    cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": AUTOSCALING}}, namespace)
    wait_for(lambda: cluster.get(*HPA, namespace), 20, "the autoscaler")
    cluster.merge(*HPA, {"metadata": {"finalizers": ["example.com/stuck"]}}, namespace)
    cluster.delete(*HPA, namespace)
    waits_for(operator, "ConfigValid", "True", "DeletionStuck")
    message = operator.condition("ConfigValid")["message"]
    assert f"HorizontalPodAutoscaler {namespace}/tales is being deleted and waits for its finalizers" in message
    assert "example.com/stuck" in message
    check_that_the_rest_goes_on(operator, cluster, namespace)
    # Also a change that replaces the pods.
    before = operator.child("Deployment")["spec"]["template"]
    cluster.merge(API, KIND, "tales", {"spec": {"engine": {"maxModelLen": 512}}}, namespace)
    wait_for(lambda: operator.child("Deployment")["spec"]["template"] != before, 20, "new pods")
    waits_for(operator, "Ready", "True", "Ready")
    cluster.merge(*HPA, {"metadata": {"finalizers": None}}, namespace)
    waits_for(operator, "ConfigValid", "True", "Accepted")
    assert "deletionTimestamp" not in cluster.get(*HPA, namespace)["metadata"]


def test_an_object_is_deleted_while_it_is_applied(operator, cluster, namespace, monkeypatch):
    """The API server accepts the manifest, because the object waits for its finalizers."""
    cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": AUTOSCALING}}, namespace)
    wait_for(lambda: cluster.get(*HPA, namespace), 20, "the autoscaler")
    cluster.merge(*HPA, {"metadata": {"finalizers": ["example.com/stuck"]}}, namespace)
    operator.wait_settled()
    client, deleted = operator.controller.client, []

    async def apply_late(resource, manifest, apply=client.apply):
        if manifest["kind"] == HPA[1] and not deleted:
            deleted.append(await client.delete(resource, namespace, "tales", manifest["metadata"]["uid"]))
        return await apply(resource, manifest)

    monkeypatch.setattr(client, "apply", apply_late)
    cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": {"maxReplicas": 9}}}, namespace)
    waits_for(operator, "ConfigValid", "True", "DeletionStuck")
    assert deleted
    cluster.merge(*HPA, {"metadata": {"finalizers": None}}, namespace)
    waits_for(operator, "ConfigValid", "True", "Accepted")


def test_a_recreated_service_beside_an_object_that_waits_for_finalizers(operator, cluster, namespace):
    cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": AUTOSCALING}}, namespace)
    wait_for(lambda: cluster.get(*HPA, namespace), 20, "the autoscaler")
    cluster.merge(*HPA, {"metadata": {"finalizers": ["example.com/stuck"]}}, namespace)
    cluster.delete(API, KIND, "tales", namespace)
    cluster.apply(llm_service(autoscaling=AUTOSCALING), namespace)
    waits_for(operator, "Ready", "True", "Ready")
    cluster.merge(*HPA, {"metadata": {"finalizers": None}}, namespace)


SCALED_OBJECT = ("keda.sh/v1alpha1", "ScaledObject", "tales")
KEDA = {"kind": "ScaledObject", "minReplicas": 1, "maxReplicas": 5, "prometheusAddress": "http://prometheus:9090"}


def test_keda_is_uninstalled_while_its_operator_does_not_run(cluster, namespace, kubelet):
    """Its objects keep their finalizers, and so does the kind."""
    with cluster.optional_kind("ScaledObject") as crd, ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(autoscaling=KEDA), namespace)
        wait_for(lambda: cluster.get(*SCALED_OBJECT, namespace), 120, "the ScaledObject")
        waits_for(operator, "Ready", "True", "Ready")
        cluster.merge(*SCALED_OBJECT, {"metadata": {"finalizers": ["finalizer.keda.sh"]}}, namespace)
        cluster.delete("apiextensions.k8s.io/v1", "CustomResourceDefinition", crd)
        try:
            # The API server cuts watches of the kind, which are repeated with delays that grow to 30 s.
            waits_for(operator, "ConfigValid", "True", "DeletionStuck", 90)
            assert "waits for its finalizers finalizer.keda.sh" in operator.condition("ConfigValid")["message"]
            check_that_the_rest_goes_on(operator, cluster, namespace)
            # Another autoscaler, and a new service of the same name.
            cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": None}}, namespace)
            cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": AUTOSCALING}}, namespace)
            wait_for(lambda: cluster.get(*HPA, namespace), 120, "the other autoscaler")
            cluster.delete(API, KIND, "tales", namespace)
            cluster.apply(llm_service(autoscaling=KEDA), namespace)
            waits_for(operator, "Ready", "True", "Ready")
        finally:
            cluster.merge(*SCALED_OBJECT, {"metadata": {"finalizers": None}}, namespace)
            wait_for(lambda: not cluster.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", crd), 120, "gone")
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 2, 120, "two replicas")


def test_a_kind_is_uninstalled_while_there_is_no_plan(operator, cluster, namespace):
    """The operator has not noticed yet that the kind is gone, and looks for it again."""
    discovery = operator.controller.reconciler._deps.discovery
    discovery._available |= {resources.SCALED_OBJECT}
    cluster.merge(API, KIND, "tales", {"spec": {"model": {"source": NOT_ON_CLAIM}, "autoscaling": KEDA}}, namespace)
    waits_for(operator, "Planned", "Unknown", "Planning")
    assert resources.SCALED_OBJECT not in discovery._available
    check_that_the_rest_goes_on(operator, cluster, namespace)


def test_too_many_adapters_are_reported_while_there_is_no_plan(operator, cluster, namespace, monkeypatch):
    monkeypatch.setattr(configmaps, "MAX_CONFIGMAP_BYTES", 50)
    cluster.merge(API, KIND, "tales", {"spec": {"model": {"source": NOT_ON_CLAIM}, "adapters": [ADAPTER]}}, namespace)
    waits_for(operator, "ConfigValid", "False", "Invalid")
    assert "spec.adapters: 1 adapters with their sources need" in operator.condition("ConfigValid")["message"]
    assert operator.condition("Ready")["reason"] == "Invalid"
    assert operator.condition("Available")["status"] == "True"
    monkeypatch.undo()
    operator.requeue()
    waits_for(operator, "ConfigValid", "True", "Accepted")
    check_that_the_rest_goes_on(operator, cluster, namespace)


@contextlib.contextmanager
def admission_policy(cluster, namespace, group, plural, expression):
    """A policy that refuses objects of a kind in a namespace."""
    name = f"refuse-{namespace}"
    rule = {"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": [plural]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    group_version = "admissionregistration.k8s.io/v1"
    cluster.apply({
        "apiVersion": group_version, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [rule], "namespaceSelector": selector},
            "validations": [{"expression": expression, "message": "needs the label team"}],
        },
    })  # fmt: skip
    binding = {"policyName": name, "validationActions": ["Deny"]}
    cluster.apply({
        "apiVersion": group_version, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name},
        "spec": binding,
    })  # fmt: skip

    def is_enforced():
        path = {"": "/api/v1"}.get(group, f"/apis/{group}/v1")
        labels, pod = {"a": "b"}, {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"}
        template = {"metadata": {"labels": labels}, "spec": pod}
        if plural == "deployments":
            pod["restartPolicy"] = "Always"
        selector = {"matchLabels": labels} if plural == "deployments" else None
        spec = {"ports": [{"port": 1}]} if plural == "services" else {"template": template, "selector": selector}
        probe = {"metadata": {"name": "probe"}, "spec": spec}
        try:
            cluster.request("POST", f"{path}/namespaces/{namespace}/{plural}", probe, dryRun="All")
        except Exception as error:
            return "needs the label team" in str(error)
        return False

    wait_for(is_enforced, 120, "the policy")
    try:
        yield
    finally:
        cluster.delete(group_version, "ValidatingAdmissionPolicyBinding", name)
        cluster.delete(group_version, "ValidatingAdmissionPolicy", name)


def test_a_refused_model_reader_job_is_named(cluster, namespace, kubelet):
    with (
        admission_policy(cluster, namespace, "batch", "jobs", "'team' in object.metadata.?labels.orValue({})"),
        ControllerHarness(cluster, namespace) as operator,
    ):
        cluster.apply(llm_service(), namespace)
        waits_for(operator, "Planned", "Unknown", "Planning")
        message = operator.condition("Planned")["message"]
        assert "the API server rejects Job quire-read-" in message and "needs the label team" in message
        assert operator.condition("Ready")["reason"] == "Planning"


@pytest.mark.parametrize(
    ("group", "plural", "kind"), [("apps", "deployments", "Deployment"), ("", "services", "Service")]
)
def test_a_refused_child_is_named(cluster, namespace, kubelet, group, plural, kind):
    condition = "'team' in object.metadata.?labels.orValue({})"
    with (
        admission_policy(cluster, namespace, group, plural, condition),
        ControllerHarness(cluster, namespace) as operator,
    ):
        cluster.apply(llm_service(), namespace)
        waits_for(operator, "ConfigValid", "False", "ApplyRejected")
        message = operator.condition("ConfigValid")["message"]
        assert f"/{plural}/tales" in message and "needs the label team" in message
        if kind == "Service":
            assert operator.child("Deployment"), "pods do not need it"


def test_a_webhook_that_does_not_answer_stops_only_its_kind(operator, cluster, namespace):
    rule = {"apiGroups": ["autoscaling"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*"]}
    name = f"broken-{namespace}"
    webhook = {
        "name": "broken.example.com", "rules": [rule], "sideEffects": "None", "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail", "timeoutSeconds": 1, "clientConfig": {"url": "https://127.0.0.1:1/"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }  # fmt: skip
    kind = ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration")
    cluster.apply({"apiVersion": kind[0], "kind": kind[1], "metadata": {"name": name}, "webhooks": [webhook]})
    try:
        wait_for(lambda: is_refused(cluster, namespace), 120, "the webhook")
        cluster.merge(API, KIND, "tales", {"spec": {"autoscaling": AUTOSCALING}}, namespace)
        waits_for(operator, "ConfigValid", "False", "ApplyRejected")
        assert 'failed calling webhook "broken.example.com"' in operator.condition("ConfigValid")["message"]
        check_that_the_rest_goes_on(operator, cluster, namespace)
    finally:
        cluster.delete(*kind, name)


def is_refused(cluster, namespace):
    metadata, reference = {"name": "probe"}, {"apiVersion": "apps/v1", "kind": "Deployment", "name": "x"}
    manifest = {"metadata": metadata, "spec": {"scaleTargetRef": reference, "maxReplicas": 1}}
    path = f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers"
    try:
        cluster.request("POST", path, manifest, dryRun="All")
    except Exception as error:
        return "failed calling webhook" in str(error)
    return False


def quota(**hard):
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "quota"}, "spec": {"hard": hard}}


def test_pods_that_a_quota_forbids_are_named(cluster, namespace, kubelet):
    """The cause is only in events of the Job, and in a condition of the Deployment."""
    cluster.apply(quota(**{"limits.cpu": "1"}), namespace)
    wait_for(lambda: cluster.get("v1", "ResourceQuota", "quota", namespace).get("status", {}).get("hard"), 20, "quota")
    with ControllerHarness(cluster, namespace) as operator:
        operator.controller.reconciler._deps.pod_warnings._poll_s = 0.5
        cluster.apply(llm_service(), namespace)
        message = lambda: operator.condition("Planned").get("message", "")  # noqa: E731
        wait_for(lambda: "failed quota: quota: must specify limits.cpu" in message(), 120, "the quota")
        assert "; it has no pod: FailedCreate: " in message()


def test_a_download_job_without_pods_is_named(cluster, namespace, kubelet, place):
    cluster.apply(quota(pods="0"), namespace)
    wait_for(lambda: cluster.get("v1", "ResourceQuota", "quota", namespace).get("status", {}).get("hard"), 20, "quota")
    with ControllerHarness(cluster, namespace) as operator:
        operator.controller.reconciler._deps.pod_warnings._poll_s = 0.5
        cluster.apply(llm_service(model={"source": {"http": {"url": place.url}}}), namespace)
        message = lambda: operator.condition("ModelCached").get("message", "")  # noqa: E731
        wait_for(lambda: "exceeded quota: quota" in message(), 120, "the quota")
        assert " has no pod: FailedCreate: " in message()


def test_a_suspended_job_is_named(cluster, namespace, kubelet, place):
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(quota(pods="0"), namespace)
        cluster.apply(llm_service(model={"source": {"http": {"url": place.url}}}), namespace)
        (job,) = wait_for(lambda: cluster.items("batch/v1", "Job", namespace), 120, "the download Job")
        suspended = {"spec": {"suspend": True}, "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}
        cluster.merge("batch/v1", "Job", job["metadata"]["name"], suspended, namespace)
        words = f"Job {job['metadata']['name']} is suspended; it waits for queue gpus"
        wait_for(lambda: words in operator.condition("ModelCached").get("message", ""), 120, "the queue named")
        unqueued = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}}
        cluster.merge("batch/v1", "Job", job["metadata"]["name"], unqueued, namespace)
        words = "it has no label kueue.x-k8s.io/queue-name"
        wait_for(lambda: words in operator.condition("ModelCached").get("message", ""), 120, "the label named")


def test_nothing_of_the_service_is_lost_after_an_outage(operator, cluster, namespace):
    """The partial apply writes nothing that the complete one would not."""
    wanted = child_objects(cluster, namespace)
    cluster.merge(API, KIND, "tales", {"spec": {"model": {"source": NOT_ON_CLAIM}}}, namespace)
    waits_for(operator, "Planned", "Unknown", "Planning")
    operator.requeue()
    after = [body for body in child_objects(cluster, namespace) if body["kind"] != "Job"]
    for one, other in zip(without_generation(after), without_generation(wanted), strict=True):
        assert one == other
