# SPDX-License-Identifier: Apache-2.0
"""An operator of several namespaces that has no rights in one of them, because they were taken or it was deleted."""

import logging
import re
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml
from support.controller_harness import ControllerHarness, llm_service, make_claim
from support.engine_processes import wait_for

from quire_operator.controller import controller
from quire_operator.kube.rbac import RULES
from quire_operator.kube.reflector import WatchTimeouts

API, KIND = "quire.dev/v1alpha1", "LLMService"
RBAC = "rbac.authorization.k8s.io/v1"
TIMEOUTS = WatchTimeouts(inactivity_s=3.0, server_timeout_s=2.0, max_backoff_s=1.0)


@pytest.fixture
def other(cluster):
    """A second namespace."""
    with cluster.namespace() as name:
        cluster.apply(make_claim(), name)
        yield name


@pytest.fixture
def kubeconfig(cluster, namespace):
    """The kubeconfig of an operator that has no rights yet."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "operator"}}
    cluster.apply(account, namespace)
    config = yaml.safe_load(cluster.token_kubeconfig(namespace, "operator").read_text())
    file = cluster.folder / f"{namespace}.kubeconfig"
    file.write_text(yaml.safe_dump(config))
    rules = [rule.to_json() for rule in RULES]
    cluster.apply({"apiVersion": RBAC, "kind": "ClusterRole", "metadata": {"name": f"op-{namespace}"}, "rules": rules})
    yield file
    cluster.delete(RBAC, "ClusterRole", f"op-{namespace}")


def grant(cluster, namespace, target):
    """Give the operator of `namespace` its rights in `target`."""
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"op-{namespace}"}
    binding = {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": {"name": "operator"}}
    cluster.apply({**binding, "subjects": [subject], "roleRef": role}, target)


def deployment(cluster, namespace):
    return cluster.get("apps/v1", "Deployment", "tales", namespace)


def served(operator):
    """The gauge of each namespace, as Prometheus reads it."""
    text = operator.controller.metrics.generate_text(operator.controller.update_gauges).decode()
    return {name: value == "1.0" for name, value in re.findall(r'_namespace_served{namespace="(.*)"} (.*)', text)}


@pytest.mark.parametrize("how", ["without rights", "that does not exist"])
def test_the_other_namespace_is_served(cluster, namespace, other, kubelet, kubeconfig, how):
    grant(cluster, namespace, namespace)
    missing = other if how == "without rights" else f"{other}-gone"
    settings = {"namespaces": (namespace, missing), "watch_timeouts": TIMEOUTS}
    with ControllerHarness(cluster, namespace, settings, kubeconfig, with_kopf=True) as operator:
        cluster.apply(llm_service(), namespace)
        cluster.apply(llm_service(), other)
        wait_for(lambda: deployment(cluster, namespace), 120, "the Deployment in the namespace with rights")
        assert operator.controller.ready and operator.controller.unhealthy_reason() == ""
        assert served(operator) == {namespace: True, missing: False}
        assert f'namespace "{missing}"' in operator.controller.unserved_namespaces()[missing]
        if how == "without rights":
            assert deployment(cluster, other) is None
            grant(cluster, namespace, other)
            wait_for(lambda: deployment(cluster, other), 120, "the Deployment in the namespace that has rights now")
            assert served(operator) == {namespace: True, other: True}
        assert operator.failure is None


def test_rights_that_are_taken_and_given_back(cluster, namespace, other, kubelet, kubeconfig, monkeypatch, caplog):
    monkeypatch.setattr(controller, "_RIGHTS_POLL_S", 0.2)
    for target in (namespace, other):
        grant(cluster, namespace, target)
    settings = {"namespaces": (namespace, other), "watch_timeouts": TIMEOUTS}
    with ControllerHarness(cluster, namespace, settings, kubeconfig, with_kopf=True) as operator:
        for target in (namespace, other):
            cluster.apply(llm_service(), target)
            wait_for(lambda where=target: deployment(cluster, where), 120, f"the Deployment in {target}")
        cluster.delete(RBAC, "RoleBinding", "operator", other)
        wait_for(lambda: served(operator) == {namespace: True, other: False}, 120, "not served")
        for target in (namespace, other):
            cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, target)
        wait_for(lambda: deployment(cluster, namespace)["spec"]["replicas"] == 2, 120, "the edit where it has rights")
        assert deployment(cluster, other)["spec"]["replicas"] == 1
        assert operator.controller.ready and operator.controller.unhealthy_reason() == ""
        grant(cluster, namespace, other)
        wait_for(lambda: deployment(cluster, other)["spec"]["replicas"] == 2, 120, "the edit where the rights are back")
        assert served(operator) == {namespace: True, other: True}
        told = [record.getMessage() for record in caplog.records if f"namespace={other}" in record.getMessage()]
        assert any("namespace is not served" in text for text in told)


def test_readiness_names_the_namespace(cluster, namespace, other, kubelet, kubeconfig, caplog):
    """Without rights in any namespace, the operator is not ready."""
    caplog.set_level(logging.INFO)
    settings = {"namespaces": (namespace, other), "watch_timeouts": TIMEOUTS}
    with ControllerHarness(cluster, namespace, settings, kubeconfig, with_kopf=True) as operator:
        wait_for(operator.controller.started.is_set, 120, "the workers")
        port = re.search(r"serving health and metrics port=(\d+)", caplog.text)[1]
        with pytest.raises(HTTPError) as error:
            urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10)
        text = error.value.read().decode()
        assert error.value.code == 503
        for target in (namespace, other):
            assert f"namespace {target} is not served: " in text
        grant(cluster, namespace, namespace)

        def body():
            try:
                return urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=10).read().decode()
            except HTTPError:
                return ""

        text = wait_for(body, 120, "readiness")
        assert text.startswith("ready\n") and f"namespace {other} is not served: " in text
