# SPDX-License-Identifier: Apache-2.0
"""The HTTPRoute of a service, with the CRD of the Gateway API: created, repaired, shown in the status, and removed."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for

SERVICE = ("quire.dev/v1alpha1", "LLMService", "tales")
ROUTE = ("gateway.networking.k8s.io/v1", "HTTPRoute", "tales")
SPEC = {"parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["llm.example"]}


@pytest.fixture(scope="module", autouse=True)
def httproute(cluster):
    with cluster.optional_kind("HTTPRoute"):
        yield


def test_a_route_follows_the_spec(cluster, namespace, kubelet):
    def route():
        return cluster.get(*ROUTE, namespace)

    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(networking={"httpRoute": SPEC}), namespace)
        operator.wait_settled()
        (rule,) = route()["spec"]["rules"]
        assert [(b["name"], b["port"]) for b in rule["backendRefs"]] == [("tales", 8004)]
        assert operator.status()["address"]["external"] == "https://llm.example/v1"
        num_writes = len(operator.recorded_writes)
        operator.requeue()
        assert len(operator.recorded_writes) == num_writes, "an unchanged route is not written again"
        cluster.merge(*ROUTE, {"spec": {"hostnames": ["stolen.example"]}}, namespace)
        wait_for(lambda: route()["spec"]["hostnames"] == ["llm.example"], 120, "the manual change is undone")
        cluster.merge(*SERVICE, {"spec": {"networking": {"httpRoute": None}}}, namespace)
        wait_for(lambda: route() is None, 120, "the route is removed")
        operator.wait_settled()
        assert "external" not in operator.status()["address"]
