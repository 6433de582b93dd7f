# SPDX-License-Identifier: Apache-2.0
"""The HorizontalPodAutoscaler of Kubernetes scales a service to zero and back, by a metric that is not of its pods."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for
from support.metrics_api import MetricsApi

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
QUEUE = ("queue", "pool=tales")
SCALING = {
    "minReplicas": 0, "maxReplicas": 3, "scaleDownSeconds": 0,
    "external": {"metric": "queue", "matchLabels": {"pool": "tales"}, "value": 2},
}  # fmt: skip


@pytest.fixture
def metrics(cluster, namespace):
    if not cluster.programs:
        pytest.skip("the API server of an existing cluster does not reach this process")
    with MetricsApi(cluster, namespace) as metrics:
        metrics.external[QUEUE] = metrics.by_pod[RUNNING] = metrics.by_pod[WAITING] = 0
        yield metrics


@pytest.mark.usefixtures("fake_pods")
def test_a_service_scales_to_zero_and_back(cluster, namespace, metrics):
    def waits_for(status, reason, num_pods):
        def is_reached():
            ready = operator.condition("Ready")
            return (ready.get("status"), ready.get("reason")) == (status, reason) and (
                operator.status()["replicas"] == num_pods
            )

        try:
            wait_for(is_reached, 120, f"{reason} with {num_pods} pods")
        except AssertionError as error:
            raise AssertionError(f"{error}: {operator.status()}") from error

    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(replicas=1, autoscaling=SCALING), namespace)
        waits_for("False", "ScaledToZero", 0)
        assert operator.condition("Autoscaling")["status"] == "True"
        # Three requests wait before the service, which are too many for one pod.
        metrics.external[QUEUE] = 3
        waits_for("True", "Ready", 2)
        # The pods serve the requests now, so that none waits, but the pods have work.
        metrics.external[QUEUE], metrics.by_pod[RUNNING] = 0, 1
        waits_for("True", "Ready", 1)
        before = metrics.num_queries[RUNNING]
        wait_for(lambda: metrics.num_queries[RUNNING] > before + 2, 120, "further queries")
        assert operator.status()["replicas"] == 1
        metrics.by_pod[RUNNING] = 0
        waits_for("False", "ScaledToZero", 0)
