# SPDX-License-Identifier: Apache-2.0
"""What gateways report about the InferencePool and the HTTPRoute of a service, with the CRDs of both."""

import pytest
from support.controller_harness import ControllerHarness, llm_service
from support.engine_processes import wait_for

SERVICE = ("quire.dev/v1alpha1", "LLMService", "tales")
KINDS = {
    "InferencePool": ("inference.networking.k8s.io/v1", "InferencePool", "tales"),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", "HTTPRoute", "tales"),
}
NETWORKING = {
    "inferencePool": {"targetPort": "openai", "endpointPicker": {"name": "picker"}},
    "httpRoute": {"parentRefs": [{"name": "public", "namespace": "gateways"}]},
}


@pytest.fixture(scope="module", autouse=True)
def gateway_api(cluster):
    with cluster.optional_kind("InferencePool"), cluster.optional_kind("HTTPRoute"):
        yield


@pytest.mark.usefixtures("fake_pods")
def test_conditions_of_gateways_are_repeated(cluster, namespace):
    def report(kind, status, reason, message):
        """Write the condition ResolvedRefs as the controller of a gateway does."""
        time = "2026-01-01T00:00:00Z"
        accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ""}
        resolved = {"type": "ResolvedRefs", "status": status, "reason": reason, "message": message}
        conditions = [condition | {"lastTransitionTime": time} for condition in (accepted, resolved)]
        parent = {"name": "public", "namespace": "gateways"}
        entry = {"parentRef": parent, "controllerName": "example.net/gateway", "conditions": conditions}
        cluster.merge(*KINDS[kind], {"status": {"parents": [entry]}}, namespace, subresource="status")

    def waits_for(kind, status, reason):
        def reached():
            condition = operator.condition(kind)
            return (condition.get("status"), condition.get("reason")) == (status, reason) and condition["message"]

        return wait_for(reached, 120, f"{kind}: {status}, {reason}")

    with ControllerHarness(cluster, namespace) as operator:
        cluster.apply(llm_service(networking=NETWORKING), namespace)
        wait_for(lambda: operator.condition("Ready").get("status") == "True", 120, "Ready")
        for kind in KINDS:
            assert waits_for(kind, "Unknown", "ParentPending") == "no gateway has reported its state yet"
            report(kind, "False", "InvalidExtensionRef", "Service picker does not exist")
            message = waits_for(kind, "False", "ParentFailed")
            assert message == (
                "Gateway gateways/public: ResolvedRefs is False: InvalidExtensionRef: Service picker does not exist"
            )
            report(kind, "True", "ResolvedRefs", "found")
            message = waits_for(kind, "True", "ParentActive")
            assert message.endswith("Gateway gateways/public: ResolvedRefs is True: ResolvedRefs: found")
        assert operator.condition("Ready")["status"] == "True"
        cluster.merge(*SERVICE, {"spec": {"networking": {"inferencePool": None, "httpRoute": None}}}, namespace)
        wait_for(lambda: not any(operator.condition(kind) for kind in KINDS), 120, "the end of both conditions")
