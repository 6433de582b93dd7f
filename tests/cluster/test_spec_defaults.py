# SPDX-License-Identifier: Apache-2.0
"""Defaults of an operator in a cluster: they reach new pods, are listed in the status, and restart no running pod."""

from support.controller_harness import ControllerHarness, llm_service
from support.fake_pods import FakePods

from quire_operator.api.spec_defaults import SpecDefaults

SERVICE = ("quire.dev/v1alpha1", "LLMService", "tales")


def defaults(proxy):
    env = [{"name": "HTTPS_PROXY", "value": f"http://{proxy}:3128"}]
    parsed = SpecDefaults.parse({"runtime": {"env": env}, "labels": {"proxy": proxy}})
    return {"defaults": parsed}


def test_a_change_of_the_defaults_restarts_no_pod(cluster, namespace, kubelet):
    def pods():
        return {pod["metadata"]["uid"]: proxy_of(pod["spec"]) for pod in cluster.items("v1", "Pod", namespace)}

    def proxy_of(pod_spec):
        return [e["value"] for e in pod_spec["containers"][0].get("env", []) if e["name"] == "HTTPS_PROXY"]

    with FakePods(kubelet):
        with ControllerHarness(cluster, namespace, defaults("a")) as operator:
            cluster.apply(llm_service(), namespace)
            operator.wait_settled()
            assert operator.status()["defaults"] == ["labels", "runtime.env"]
            assert "proxy" not in str(cluster.get(*SERVICE, namespace)["spec"]), "the spec itself stays"
            before = pods()
            assert list(before.values()) == [["http://a:3128"]]
        with ControllerHarness(cluster, namespace, defaults("b")) as operator:
            operator.wait_settled()
            assert operator.child("Deployment")["metadata"]["labels"]["proxy"] == "b"
            assert pods() == before
            cluster.merge(*SERVICE, {"spec": {"engine": {"maxModelLen": 128}}}, namespace)
            operator.wait_settled()
            template = operator.child("Deployment")["spec"]["template"]
            assert proxy_of(template["spec"]) == ["http://b:3128"]
            assert template["metadata"]["labels"]["proxy"] == "b"
