# SPDX-License-Identifier: Apache-2.0
"""Kueue admits the pods of a service one after the other, as far as the quota of its queue reaches."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.controllers import running_kueue
from support.engine_processes import wait_for

pytestmark = [pytest.mark.usefixtures("fake_pods"), pytest.mark.timeout(600)]

API = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def cluster_queue(num_pods):
    """A queue with quota for so many pods."""
    resources = [{"name": "pods", "nominalQuota": num_pods}]
    resources += [{"name": name, "nominalQuota": "1000000Gi"} for name in ("cpu", "memory")]
    group = {"coveredResources": [r["name"] for r in resources], "flavors": [{"name": "any", "resources": resources}]}
    spec = {"namespaceSelector": {}, "resourceGroups": [group]}
    return {"apiVersion": API, "kind": "ClusterQueue", "metadata": {"name": "gpus"}, "spec": spec}


def gated(cluster, namespace):
    """Whether each pod of the service waits for Kueue."""
    pods = cluster.items("v1", "Pod", namespace, labelSelector="app.kubernetes.io/component=server")
    return sorted("schedulingGates" in pod["spec"] for pod in pods)


def test_pods_wait_for_quota(cluster, namespace, kubelet, tmp_path):
    cluster.merge("v1", "Namespace", namespace, {"metadata": {"labels": {"kueue": "true"}}})
    with running_kueue(cluster, tmp_path), ControllerHarness(cluster, namespace) as operator:
        cluster.apply({"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "any"}})
        cluster.apply(cluster_queue(1))
        spec = {"clusterQueue": "gpus"}
        cluster.apply({"apiVersion": API, "kind": "LocalQueue", "metadata": {"name": "llm"}, "spec": spec}, namespace)
        cluster.apply(llm_service(replicas=2, labels={QUEUE_LABEL: "llm"}), namespace)

        def waits():
            progressing = operator.condition("Progressing")
            reason, message = progressing.get("reason"), progressing.get("message", "")
            return reason == "WaitingForQuota" and "insufficient unused quota" in message

        wait_for(lambda: gated(cluster, namespace) == [False, True], 60, operator.status)
        wait_for(waits, 30, operator.status)
        wait_for(lambda: operator.status().get("readyReplicas") == 1, 30, operator.status)
        settled = len(operator.recorded_writes)
        wait_for(operator.is_idle, 20, "an operator that does not write against Kueue")
        assert len(operator.recorded_writes) - settled <= 4, operator.recorded_writes[settled:]
        cluster.apply(cluster_queue(2))
        wait_for(lambda: operator.status().get("readyReplicas") == 2, 60, operator.status)
        assert gated(cluster, namespace) == [False, False]
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 40, operator.status)
