# SPDX-License-Identifier: Apache-2.0
"""Faults between operator and API server: kills at every write, lost responses, error storms, dead connections.

The resulting objects are the same as without faults.
"""

import contextlib
import os
import random
import time

import pytest
from support.controller_harness import ControllerHarness, child_objects, llm_service, make_claim
from support.engine_processes import wait_for
from support.fault_proxy import Fault, FaultInjectingProxy, error_storm

from quire_operator.kube import discovery
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.reflector import WatchTimeouts
from quire_operator.kube.resources import LLM_SERVICE

pytestmark = pytest.mark.timeout(600)

API, KIND = "quire.dev/v1alpha1", "LLMService"
MONITOR = ("monitoring.coreos.com/v1", "PodMonitor")
SERVER_PODS = "app.kubernetes.io/component=server"
SHORT_TIMEOUTS = WatchTimeouts(inactivity_s=1.0, max_backoff_s=0.5)
CALM_TIMEOUTS = WatchTimeouts(inactivity_s=2.5, max_backoff_s=0.5)
"""For tests in which no watch may become stale, on a busy machine either."""
OUTAGE_S = float(os.environ.get("QUIRE_TEST_OUTAGE_S", "10"))
"""More than CALM_TIMEOUTS.stale_after_s."""
SPEC = {"replicas": 2, "adapters": [{"name": "a", "source": {"pvc": {"claimName": "models", "path": "a"}}}]}


class Killed(BaseException):
    """The operator's process is gone."""


class DyingClient(ApiClient):
    """A client whose process ends after its first write, before the response."""

    killed = False

    async def request(self, method, path, body=None, **options):
        if method == "GET":
            return await super().request(method, path, body, **options)
        if not self.killed:
            self.killed = True
            await super().request(method, path, body, **options)
        raise Killed


@contextlib.contextmanager
def proxied_operator(cluster, namespace, folder, fault=lambda method, asked: None, with_kopf=False, **settings):
    """Start an operator behind a proxy that injects faults; yield both."""
    settings = {"watch_timeouts": SHORT_TIMEOUTS, **settings}
    with (
        FaultInjectingProxy(cluster, folder, fault) as proxy,
        ControllerHarness(cluster, namespace, settings, proxy.kubeconfig, with_kopf=with_kopf) as operator,
    ):
        yield proxy, operator


@pytest.fixture(scope="module")
def reference(cluster, kubelet):
    """The objects without faults."""
    with cluster.namespace() as namespace, ControllerHarness(cluster, namespace) as operator:
        cluster.apply(make_claim(), namespace)
        cluster.apply(llm_service(**SPEC), namespace)
        operator.wait_settled()
        wait_for(lambda: operator.condition("Available").get("status") == "True", 20, "Available")
        return child_objects(cluster, namespace)


def test_killed_after_every_write_and_started_again(cluster, namespace, kubelet, reference):
    """Each process makes one write and ends before the response; the next one continues."""
    cluster.apply(llm_service(**SPEC), namespace)
    lives = 0
    while child_objects(cluster, namespace) != reference:
        lives += 1
        assert lives < 60, "it makes no way"
        with ControllerHarness(cluster, namespace, make_client=DyingClient) as operator:
            wait_for(
                lambda: operator.failure or child_objects(cluster, namespace) == reference, 120, "end of this life"
            )
            assert operator.failure is None or isinstance(operator.failure, Killed)
    assert lives > len(reference), "each of the objects took a life at least"
    with ControllerHarness(cluster, namespace) as operator:
        operator.wait_settled()
    assert child_objects(cluster, namespace) == reference


def test_random_errors_delay_but_do_not_change_the_result(cluster, namespace, kubelet, reference, tmp_path):
    """A third of all requests fails, each in one of five ways, while a service is made."""
    with proxied_operator(cluster, namespace, tmp_path) as (proxy, operator):
        wait_for(operator.controller.started.is_set, 20, "started")
        proxy.fault = error_storm(random.Random(7), 1 / 3)
        cluster.apply(llm_service(**SPEC), namespace)
        wait_for(lambda: child_objects(cluster, namespace) == reference, 120, "all children")
        assert proxy.num_faults > len(reference)
        proxy.fault = lambda method, path: None
        operator.wait_settled(timeout=90)
    assert child_objects(cluster, namespace) == reference


def test_a_dead_connection_fails_liveness_and_recovers(cluster, namespace, kubelet, tmp_path):
    """Packets vanish, nothing is closed: watches are cut for their silence, and what was missed is seen."""
    with proxied_operator(cluster, namespace, tmp_path) as (proxy, operator):
        cluster.apply(llm_service(), namespace)
        operator.wait_settled()
        assert operator.controller.unhealthy_reason() == ""
        proxy.blackhole()
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 3}}, namespace)
        cluster.delete("networking.k8s.io/v1", "NetworkPolicy", "tales", namespace)
        wait_for(lambda: "is stale" in operator.controller.unhealthy_reason(), 20, "failed liveness")
        assert operator.child("Deployment")["spec"]["replicas"] == 1
        proxy.stop_blackhole()
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 3, 120, "the edit seen")
        wait_for(lambda: operator.child("NetworkPolicy"), 120, "the policy back")
        wait_for(lambda: operator.controller.unhealthy_reason() == "", 20, "well again")


def more_than(found, number):
    """A check that a list has got longer."""
    return lambda: len(found) > number


def test_a_stale_watch_of_kopf_fails_liveness_and_recovers(cluster, namespace, kubelet, tmp_path):
    """Only its watch and new connections are blackholed. An idle watch before that is not stale."""
    path = f"/namespaces/{namespace}/llmservices"
    begun = []
    cluster.apply(llm_service(paused=True), namespace)
    with proxied_operator(cluster, namespace, tmp_path, with_kopf=True) as (proxy, operator):
        proxy.fault = lambda method, asked: begun.append(asked) if path in asked and "watch=true" in asked else None
        known = lambda: operator.controller.cache.get(LLM_SERVICE, namespace, "tales")  # noqa: E731
        wait_for(known, 20, "the service, by kopf")
        while len(begun) < 5:  # longer than SHORT_TIMEOUTS.stale_after_s
            assert operator.controller.unhealthy_reason() == ""
            wait_for(more_than(begun, len(begun)), 10, "the watch begun anew")
        proxy.blackhole(lambda asked: path in asked)
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 3}}, namespace)
        wait_for(
            lambda: "the watch of llmservices is stale" in operator.controller.unhealthy_reason(),
            20,
            "failed liveness",
        )
        others = [heard for heard in operator.controller.heartbeats if heard.resource is not LLM_SERVICE]
        assert others
        # A busy machine delays a response by seconds.
        wait_for(
            lambda: all(heard.age_s < SHORT_TIMEOUTS.stale_after_s for heard in others), 20, "the other watches heard"
        )
        assert "the watch of llmservices is stale" in operator.controller.unhealthy_reason()
        assert known().body()["spec"].get("replicas", 1) == 1
        proxy.stop_blackhole()
        wait_for(lambda: known().body()["spec"].get("replicas") == 3, 20, "the edit seen")
        wait_for(lambda: operator.controller.unhealthy_reason() == "", 20, "well again")


def test_an_expired_watch_lists_again(cluster, namespace, kubelet, tmp_path):
    with proxied_operator(cluster, namespace, tmp_path) as (proxy, operator):
        cluster.apply(llm_service(), namespace)
        operator.wait_settled()
        chance = random.Random(3)
        proxy.fault = lambda method, path: Fault(410) if "watch=true" in path and chance.random() < 0.5 else None
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
        cluster.delete("v1", "ConfigMap", "tales-adapters", namespace)
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 2, 120, "the edit seen")
        wait_for(lambda: operator.child("ConfigMap", "tales-adapters"), 120, "the map back")


def expired_watch(path):
    """A proxy's fault: each watch of `path` ends with the ERROR event of a version that was compacted."""
    return lambda method, asked: Fault(200, error_event=410) if path in asked and "watch=true" in asked else None


def test_a_pod_deleted_behind_a_compacted_watch_leaves_the_status(cluster, namespace, kubelet, tmp_path):
    cluster.apply(llm_service(replicas=2), namespace)
    with proxied_operator(cluster, namespace, tmp_path, resync_s=2.0) as (proxy, operator):
        wait_for(lambda: operator.status().get("readyReplicas") == 2, 120, "two pods")
        cluster.merge(API, KIND, "tales", {"spec": {"paused": True}}, namespace)
        wait_for(lambda: operator.status()["observedGeneration"] == 2, 120, "paused")
        pods_path = f"/namespaces/{namespace}/pods"
        proxy.blackhole(lambda asked: pods_path in asked)
        cluster.merge("apps/v1", "Deployment", "tales", {"spec": {"replicas": 1}}, namespace)
        wait_for(lambda: len(cluster.items("v1", "Pod", namespace, labelSelector=SERVER_PODS)) == 1, 120, "one pod")
        assert operator.status()["readyReplicas"] == 2
        proxy.fault = expired_watch(pods_path)
        proxy.stop_blackhole()
        wait_for(lambda: operator.status()["readyReplicas"] == 1, 120, "the pod gone from the status")


def test_a_service_deleted_behind_a_compacted_watch_is_forgotten_by_the_comparison(
    cluster, namespace, kubelet, tmp_path
):
    """kopf lists again after a compaction, and reports nothing of what was deleted meanwhile."""
    path = f"/namespaces/{namespace}/llmservices"
    settings = {"verify_interval_s": 1.0, "verify_grace_s": 0.5}
    with proxied_operator(cluster, namespace, tmp_path, with_kopf=True, **settings) as (proxy, operator):
        for name in ("gone", "stays"):
            cluster.apply(llm_service(name, paused=True), namespace)
        known = lambda: {entry.name for entry in operator.controller.cache.objects_of_kind(LLM_SERVICE)}  # noqa: E731
        wait_for(lambda: known() == {"gone", "stays"}, 120, "both services")
        proxy.blackhole(lambda asked: path in asked and "watch=true" in asked)
        proxy.fault = expired_watch(path)
        cluster.delete(API, KIND, "gone", namespace)
        proxy.stop_blackhole()
        wait_for(lambda: known() == {"stays"}, 120, "the comparison")
        assert operator.failure is None


@pytest.mark.parametrize("how", ["answers 403", "is uninstalled", "sends an ERROR"])
def test_an_optional_kind_that_fails_delays_no_other(cluster, namespace, kubelet, tmp_path, how):
    is_watch = lambda asked: "podmonitors" in asked and "watch=true" in asked  # noqa: E731
    initial_fault = lambda method, asked: Fault(403) if how == "answers 403" and "podmonitors" in asked else None  # noqa: E731
    settings = {"watch_timeouts": CALM_TIMEOUTS, "fault": initial_fault, "with_kopf": True}
    with (
        cluster.optional_kind("PodMonitor") as crd,
        proxied_operator(cluster, namespace, tmp_path, **settings) as (proxy, operator),
    ):
        wait_for(operator.controller.started.is_set, 120, "workers")
        cluster.apply(llm_service(observability={"podMonitor": "Auto"}), namespace)
        wait_for(lambda: operator.child("Deployment"), 120, "the Deployment")
        if how == "is uninstalled":
            wait_for(lambda: cluster.get(*MONITOR, "tales", namespace), 120, "the PodMonitor")
            cluster.delete_crd(crd)
        if how == "sends an ERROR":
            proxy.fault = lambda method, asked: Fault(200, error_event=500) if is_watch(asked) else None
        until = time.monotonic() + 1.5 * CALM_TIMEOUTS.stale_after_s
        while time.monotonic() < until:
            assert operator.controller.unhealthy_reason() == ""
            time.sleep(0.2)
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 2, 120, "the edit")
        assert operator.controller.ready and operator.failure is None


def test_an_optional_kind_that_is_installed_later_is_served(cluster, namespace, kubelet, monkeypatch):
    assert discovery.REFRESH_INTERVAL_S < 300
    monkeypatch.setattr(discovery, "REFRESH_INTERVAL_S", 1.0)
    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(observability={"podMonitor": "Auto"}), namespace)
        operator.wait_settled()
        with cluster.optional_kind("PodMonitor"):
            pod_monitor = lambda: cluster.get(*MONITOR, "tales", namespace)  # noqa: E731
            wait_for(pod_monitor, 120, "the PodMonitor")
            cluster.delete(*MONITOR, "tales", namespace)
            wait_for(pod_monitor, 120, "the PodMonitor again, by its watch")


def test_an_api_server_that_answers_503_for_long_needs_no_restart(cluster, namespace, kubelet, tmp_path):
    cluster.apply(llm_service(), namespace)
    with proxied_operator(cluster, namespace, tmp_path, with_kopf=True, watch_timeouts=CALM_TIMEOUTS) as (
        proxy,
        operator,
    ):
        operator.wait_settled()
        proxy.fault = lambda method, asked: Fault(503)
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 3}}, namespace)
        until = time.monotonic() + OUTAGE_S
        while time.monotonic() < until:
            assert operator.controller.unhealthy_reason() == "" and operator.failure is None
            time.sleep(0.2)
        proxy.fault = lambda method, asked: None
        wait_for(lambda: operator.child("Deployment")["spec"]["replicas"] == 3, 120, "the edit")
        assert operator.controller.unhealthy_reason() == ""
