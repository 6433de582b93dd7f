# SPDX-License-Identifier: Apache-2.0
"""An operator that may not read from the address of a model: the condition names the chart's value, and a change of the
value ends the problem."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for
from support.fake_model_server import FakeModelServer
from support.own_address import own_address

from quire_sources.http.borders import Borders

OWN = own_address()


@pytest.fixture(scope="module")
def model_server():
    server = FakeModelServer(OWN)
    yield server
    server.close()


def test_the_condition_names_the_value_and_a_running_service_keeps_its_plan(cluster, namespace, model_server):
    service = llm_service(model={"source": {"http": {"url": model_server.url}}})
    closed, opened = ({"borders": Borders.parse(networks)} for networks in ("", f"{OWN}/32"))
    with ControllerHarness(cluster, namespace, closed) as operator:
        cluster.apply(service, namespace)
        wait_for(lambda: "sources.allowedCIDRs" in operator.condition("Planned").get("message", ""), 120, "the message")
        assert operator.status().get("plan") is None and model_server.num_requests == 0
        assert OWN not in operator.condition("Planned")["message"].replace(model_server.url, "")
    with ControllerHarness(cluster, namespace, opened) as operator:
        wait_for(lambda: operator.condition("Planned").get("status") == "True", 120, operator.status)
        plan = operator.status()["plan"]
    with ControllerHarness(cluster, namespace, closed) as operator:
        cluster.merge("quire.dev/v1alpha1", "LLMService", "tales", {"spec": {"rollout": {"maxSurge": 1}}}, namespace)
        wait_for(lambda: operator.status().get("observedGeneration") == 2, 120, "the change is observed")
        assert operator.condition("Planned")["status"] == "True" and operator.status()["plan"] == plan
