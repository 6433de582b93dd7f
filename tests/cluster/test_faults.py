# SPDX-License-Identifier: Apache-2.0
"""Faults between operator and API server: kills at every write, lost responses, error storms, dead connections.

The resulting objects are the same as without faults.
"""

import os
import random
import time

import pytest
from support.cluster import crd_without_schema
from support.controller_harness import ControllerHarness, answer_model_readers, child_objects, llm_service, make_claim
from support.engine_processes import wait_for
from support.fake_kubelet import FakeKubelet
from support.fault_proxy import Fault, FaultInjectingProxy

from quire_operator.kube import discovery
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.reflector import WatchTimeouts
from quire_operator.kube.resources import LLM_SERVICE

pytestmark = pytest.mark.timeout(600)

API, KIND = "quire.dev/v1alpha1", "LLMService"
MONITOR = ("monitoring.coreos.com/v1", "PodMonitor")
SERVER_PODS = "app.kubernetes.io/component=server"
POD_MONITORS = ("podmonitors", "monitoring.coreos.com", "v1", "PodMonitor")
SHORT_TIMEOUTS = WatchTimeouts(inactivity_s=1.0, max_backoff_s=0.5)
OUTAGE_S = float(os.environ.get("QUIRE_TEST_OUTAGE_S", "10"))
"""More than SHORT_TIMEOUTS.stale_after_s."""
SPEC = {"replicas": 2, "adapters": [{"name": "a", "source": {"pvc": {"claimName": "models", "path": "a"}}}]}


class Killed(BaseException):
    """The operator's process is gone."""


def dies_at(write: int, sent: bool):
    """A Client whose process ends at its N-th write: before it is sent, or before the answer is there."""

    class Dying(ApiClient):
        num_writes = 0

        async def request(self, method, path, body=None, **options):
            if method == "GET":
                return await super().request(method, path, body, **options)
            self.num_writes += 1
            if self.num_writes >= write:
                if sent and self.num_writes == write:
                    await super().request(method, path, body, **options)
                raise Killed
            return await super().request(method, path, body, **options)

    return Dying


@pytest.fixture(scope="module")
def kubelet(cluster):
    cluster.require_controllers()
    with FakeKubelet(cluster, "node-faults") as node:
        answer_model_readers(node)
        yield node


@pytest.fixture(scope="module")
def reference(cluster, kubelet):
    """The objects without faults, and the number of writes except events."""
    with cluster.namespace() as namespace, ControllerHarness(cluster, namespace) as operating:
        cluster.apply(make_claim(), namespace)
        cluster.apply(llm_service(**SPEC), namespace)
        operating.wait_settled()
        wait_for(lambda: operating.condition("Available").get("status") == "True", 20, "Available")
        return child_objects(cluster, namespace), len(operating.recorded_writes)


def test_killed_at_every_write_and_started_again(cluster, namespace, kubelet, reference):
    """Each process makes one write and ends before the response; the next one continues."""
    wanted, _ = reference
    cluster.apply(make_claim(), namespace)
    cluster.apply(llm_service(**SPEC), namespace)
    lives = 0
    while child_objects(cluster, namespace) != wanted:
        lives += 1
        assert lives < 60, "it makes no way"
        with ControllerHarness(cluster, namespace, make_client=dies_at(1, sent=True)) as operating:
            wait_for(lambda: operating.failure or child_objects(cluster, namespace) == wanted, 30, "end of this life")
            assert operating.failure is None or isinstance(operating.failure, Killed)
    assert lives > len(wanted), "each of the objects took a life at least"
    with ControllerHarness(cluster, namespace) as operating:
        operating.wait_settled()
    assert child_objects(cluster, namespace) == wanted


def test_killed_at_the_nth_write_for_every_n(cluster, kubelet, reference):
    """One life that ends at its N-th write, and one that lives."""
    wanted, num_writes = reference
    died = 0
    for write in range(1, num_writes + 1):
        with cluster.namespace() as namespace:
            cluster.apply(make_claim(), namespace)
            cluster.apply(llm_service(**SPEC), namespace)
            with ControllerHarness(cluster, namespace, make_client=dies_at(write, sent=write % 2 == 0)) as first:
                wait_for(lambda: ended(first), 30, "its end")
                died += first.failure is not None
            with ControllerHarness(cluster, namespace) as second:
                second.wait_settled()
            assert child_objects(cluster, namespace) == wanted, f"killed at write {write}"
    assert died > len(wanted)


def ended(operating):
    """Whether it was killed, or came so far that nothing more is to be written."""
    return operating.failure or operating.condition("Available").get("status") == "True"


def test_storms_of_errors_pass(cluster, namespace, kubelet, reference, tmp_path):
    """A third of all requests fails, each in one of five ways, while a service is made."""
    wanted, _ = reference
    chance = random.Random(7)
    ways = [Fault(429, {"Retry-After": "1"}), Fault(500), Fault(503), Fault(504, forwarded=True)]

    def fault(method, path):
        if chance.random() > 1 / 3:
            return None
        return chance.choice(ways if method == "GET" else [*ways, Fault(409)])

    cluster.apply(make_claim(), namespace)
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(
            cluster, namespace, kubeconfig=proxy.kubeconfig, settings={"watch_timeouts": WatchTimeouts(max_backoff_s=1)}
        ) as operating,
    ):
        wait_for(operating.controller.started.is_set, 20, "started")
        proxy.fault = fault
        cluster.apply(llm_service(**SPEC), namespace)
        wait_for(lambda: child_objects(cluster, namespace) == wanted, 90, "all children")
        assert proxy.num_faults > len(wanted)
        proxy.fault = lambda method, path: None
        operating.wait_settled(timeout=90)
    assert child_objects(cluster, namespace) == wanted


def test_a_dead_connection_is_noticed(cluster, namespace, kubelet, tmp_path):
    """Packets vanish, nothing is closed: watches are cut for their silence, and what was missed is seen."""
    cluster.apply(make_claim(), namespace)
    patience = WatchTimeouts(inactivity_s=1.0, max_backoff_s=0.5)
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(
            cluster, namespace, kubeconfig=proxy.kubeconfig, settings={"watch_timeouts": patience}
        ) as operating,
    ):
        cluster.apply(llm_service(), namespace)
        operating.wait_settled()
        assert operating.controller.unhealthy_reason() == ""
        proxy.blackhole()
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 3}}, namespace)
        cluster.delete("networking.k8s.io/v1", "NetworkPolicy", "tales", namespace)
        wait_for(lambda: "is stale" in operating.controller.unhealthy_reason(), 20, "failed liveness")
        assert operating.child("Deployment")["spec"]["replicas"] == 1
        proxy.stop_blackhole()
        wait_for(lambda: operating.child("Deployment")["spec"]["replicas"] == 3, 60, "the edit seen")
        wait_for(lambda: operating.child("NetworkPolicy"), 60, "the policy back")
        wait_for(lambda: operating.controller.unhealthy_reason() == "", 20, "well again")


def more_than(found, number):
    """A check that a list has got longer."""
    return lambda: len(found) > number


def test_kopf_that_hears_nothing_more_is_noticed(cluster, namespace, kubelet, tmp_path):
    """Only its watch and new connections are blackholed. An idle watch before that is not stale."""
    path = f"/namespaces/{namespace}/llmservices"
    begun = []
    patience = WatchTimeouts(inactivity_s=1.0, max_backoff_s=0.5)
    settings = {"watch_timeouts": patience}
    cluster.apply(llm_service(paused=True), namespace)
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(
            cluster, namespace, kubeconfig=proxy.kubeconfig, settings=settings, with_kopf=True
        ) as operating,
    ):
        proxy.fault = lambda method, asked: begun.append(asked) if path in asked and "watch=true" in asked else None
        known = lambda: operating.controller.cache.get(LLM_SERVICE, namespace, "tales")  # noqa: E731
        wait_for(known, 20, "the service, by kopf")
        while len(begun) < 5:  # longer than patience lasts
            assert operating.controller.unhealthy_reason() == ""
            wait_for(more_than(begun, len(begun)), 10, "the watch begun anew")
        proxy.blackhole(lambda asked: path in asked)
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 3}}, namespace)
        wait_for(
            lambda: "the watch of llmservices is stale" in operating.controller.unhealthy_reason(),
            20,
            "failed liveness",
        )
        others = [heard for heard in operating.controller.heartbeats if heard.resource is not LLM_SERVICE]
        assert others and all(heard.age_s < patience.stale_after_s for heard in others)
        assert known().body()["spec"].get("replicas", 1) == 1
        proxy.stop_blackhole()
        wait_for(lambda: known().body()["spec"].get("replicas") == 3, 20, "the edit seen")
        wait_for(lambda: operating.controller.unhealthy_reason() == "", 20, "well again")


def test_a_watch_that_is_too_old_lists_again(cluster, namespace, kubelet, tmp_path):
    cluster.apply(make_claim(), namespace)
    patience = WatchTimeouts(inactivity_s=1.0, max_backoff_s=0.5)
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(
            cluster, namespace, kubeconfig=proxy.kubeconfig, settings={"watch_timeouts": patience}
        ) as operating,
    ):
        cluster.apply(llm_service(), namespace)
        operating.wait_settled()
        chance = random.Random(3)
        proxy.fault = lambda method, path: Fault(410) if "watch=true" in path and chance.random() < 0.5 else None
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
        cluster.delete("v1", "ConfigMap", "tales-adapters", namespace)
        wait_for(lambda: operating.child("Deployment")["spec"]["replicas"] == 2, 60, "the edit seen")
        wait_for(lambda: operating.child("ConfigMap", "tales-adapters"), 60, "the map back")


def expired_watch(path):
    """A proxy's fault: each watch of `path` ends with the ERROR event of a version that was compacted."""
    return lambda method, asked: Fault(200, error_event=410) if path in asked and "watch=true" in asked else None


def test_a_pod_deleted_behind_a_compacted_watch_leaves_the_status(cluster, namespace, kubelet, tmp_path):
    cluster.apply(make_claim(), namespace)
    cluster.apply(llm_service(replicas=2), namespace)
    settings = {"watch_timeouts": SHORT_TIMEOUTS, "resync_s": 2.0}
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(cluster, namespace, kubeconfig=proxy.kubeconfig, settings=settings) as operating,
    ):
        wait_for(lambda: operating.status().get("readyReplicas") == 2, 60, "two pods")
        cluster.merge(API, KIND, "tales", {"spec": {"paused": True}}, namespace)
        wait_for(lambda: operating.status()["observedGeneration"] == 2, 30, "paused")
        pods_path = f"/namespaces/{namespace}/pods"
        proxy.blackhole(lambda asked: pods_path in asked)
        cluster.merge("apps/v1", "Deployment", "tales", {"spec": {"replicas": 1}}, namespace)
        wait_for(lambda: len(cluster.items("v1", "Pod", namespace, labelSelector=SERVER_PODS)) == 1, 30, "one pod")
        assert operating.status()["readyReplicas"] == 2
        proxy.fault = expired_watch(pods_path)
        proxy.stop_blackhole()
        wait_for(lambda: operating.status()["readyReplicas"] == 1, 30, "the pod gone from the status")


def test_a_service_deleted_behind_a_compacted_watch_is_forgotten_by_the_comparison(
    cluster, namespace, kubelet, tmp_path
):
    """kopf lists again after a compaction, and reports nothing of what was deleted meanwhile."""
    path = f"/namespaces/{namespace}/llmservices"
    settings = {"watch_timeouts": SHORT_TIMEOUTS, "verify_interval_s": 1.0, "verify_grace_s": 0.5}
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(
            cluster, namespace, kubeconfig=proxy.kubeconfig, settings=settings, with_kopf=True
        ) as operating,
    ):
        for name in ("gone", "stays"):
            cluster.apply(llm_service(name, paused=True), namespace)
        known = lambda: {entry.name for entry in operating.controller.cache.objects_of_kind(LLM_SERVICE)}  # noqa: E731
        wait_for(lambda: known() == {"gone", "stays"}, 30, "both services")
        proxy.blackhole(lambda asked: path in asked and "watch=true" in asked)
        proxy.fault = expired_watch(path)
        cluster.delete(API, KIND, "gone", namespace)
        proxy.stop_blackhole()
        wait_for(lambda: known() == {"stays"}, 30, "the comparison")
        assert operating.failure is None


@pytest.mark.parametrize("how", ["answers 403", "is uninstalled", "sends an ERROR"])
def test_an_optional_kind_that_fails_delays_no_other(cluster, namespace, kubelet, tmp_path, how):
    crd = cluster.apply(crd_without_schema(*POD_MONITORS))
    cluster.apply(make_claim(), namespace)
    is_watch = lambda asked: "podmonitors" in asked and "watch=true" in asked  # noqa: E731
    try:
        wait_for(lambda: cluster.is_established(crd["metadata"]["name"]), 30, "the kind served")
        with FaultInjectingProxy(cluster, tmp_path) as proxy:
            if how == "answers 403":
                proxy.fault = lambda method, asked: Fault(403) if "podmonitors" in asked else None
            settings = {"watch_timeouts": SHORT_TIMEOUTS}
            with ControllerHarness(
                cluster, namespace, kubeconfig=proxy.kubeconfig, settings=settings, with_kopf=True
            ) as operating:
                wait_for(operating.controller.started.is_set, 30, "workers")
                cluster.apply(llm_service(observability={"podMonitor": "Auto"}), namespace)
                wait_for(lambda: operating.child("Deployment"), 30, "the Deployment")
                if how == "is uninstalled":
                    wait_for(lambda: cluster.get(*MONITOR, "tales", namespace), 30, "the PodMonitor")
                    cluster.delete(crd["apiVersion"], crd["kind"], crd["metadata"]["name"])
                if how == "sends an ERROR":
                    proxy.fault = lambda method, asked: Fault(200, error_event=500) if is_watch(asked) else None
                until = time.monotonic() + 3 * SHORT_TIMEOUTS.stale_after_s
                while time.monotonic() < until:
                    assert operating.controller.unhealthy_reason() == ""
                    time.sleep(0.2)
                cluster.merge(API, KIND, "tales", {"spec": {"replicas": 2}}, namespace)
                wait_for(lambda: operating.child("Deployment")["spec"]["replicas"] == 2, 30, "the edit")
                assert operating.controller.ready and operating.failure is None
    finally:
        cluster.delete(crd["apiVersion"], crd["kind"], crd["metadata"]["name"])


def test_an_optional_kind_that_is_installed_later_is_served(cluster, namespace, kubelet, monkeypatch):
    assert discovery.REFRESH_INTERVAL_S < 300
    monkeypatch.setattr(discovery, "REFRESH_INTERVAL_S", 1.0)
    cluster.apply(make_claim(), namespace)
    with ControllerHarness(cluster, namespace) as operating:
        cluster.apply(llm_service(observability={"podMonitor": "Auto"}), namespace)
        operating.wait_settled()
        crd = cluster.apply(crd_without_schema(*POD_MONITORS))
        try:
            wait_for(lambda: cluster.is_established(crd["metadata"]["name"]), 30, "the kind served")
            pod_monitor = lambda: cluster.get(*MONITOR, "tales", namespace)  # noqa: E731
            wait_for(pod_monitor, 30, "the PodMonitor")
            cluster.delete(*MONITOR, "tales", namespace)
            wait_for(pod_monitor, 30, "the PodMonitor again, by its watch")
        finally:
            cluster.delete(crd["apiVersion"], crd["kind"], crd["metadata"]["name"])


def test_an_api_server_that_answers_503_for_long_needs_no_restart(cluster, namespace, kubelet, tmp_path):
    cluster.apply(make_claim(), namespace)
    cluster.apply(llm_service(), namespace)
    settings = {"watch_timeouts": SHORT_TIMEOUTS}
    with (
        FaultInjectingProxy(cluster, tmp_path) as proxy,
        ControllerHarness(
            cluster, namespace, kubeconfig=proxy.kubeconfig, settings=settings, with_kopf=True
        ) as operating,
    ):
        operating.wait_settled()
        proxy.fault = lambda method, asked: Fault(503)
        cluster.merge(API, KIND, "tales", {"spec": {"replicas": 3}}, namespace)
        until = time.monotonic() + OUTAGE_S
        while time.monotonic() < until:
            assert operating.controller.unhealthy_reason() == "" and operating.failure is None
            time.sleep(0.2)
        proxy.fault = lambda method, asked: None
        wait_for(lambda: operating.child("Deployment")["spec"]["replicas"] == 3, 60, "the edit")
        assert operating.controller.unhealthy_reason() == ""
