# SPDX-License-Identifier: Apache-2.0
"""When an object on the server is as it was wanted, and what pods are pinned by."""

import base64
import copy

import pytest
from support.planning import llm_service
from support.rendering import plan_of_service

from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.controller.apply.compare import is_up_to_date
from quire_operator.controller.compressed_json import compress
from quire_operator.controller.template_revision import PODS_ANNOTATION, TemplateRevision, pods_digest
from quire_operator.render import object_names
from quire_operator.render.context import RenderContext
from quire_operator.render.objects import render_objects

NO_LORA = "lora: {maxLoaded: 0}"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"a": 1}, {"a": 1, "defaulted": True}),
        ({"memory": "1024Mi"}, {"memory": "1Gi"}),
        ({"cpu": "1500m"}, {"cpu": "1.5"}),
        ({"cpu": "2"}, {"cpu": 2}),
        ({"egress": []}, {}),
        ({"maxSurge": 0}, {}),
        ({"containers": [{"name": "a", "image": "x"}]}, {"containers": [{"name": "b"}, {"name": "a", "image": "x"}]}),
        ({"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]},) * 2,
    ],
)  # fmt: skip
def test_what_a_server_does_by_itself_is_no_difference(wanted, found):
    assert is_up_to_date(wanted, found)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": {"b": 1}}, {}),
        ({"memory": "1Gi"}, {"memory": "1G"}),
        ({"args": ["a"]}, {"args": ["a", "b"]}),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}, {"key": "b"}]}),
        ({"containers": [{"name": "a", "image": "x"}]}, {"containers": [{"name": "a", "image": "y"}]}),
        ({"ingress": [{"ports": [{"port": 1}]}]}, {"ingress": [{"ports": [{"port": 1}, {"port": 2}]}]}),
        ({"egress": [{"ports": [{"port": 1}]}]}, {"egress": [{}]}),
    ],
)  # fmt: skip
def test_what_somebody_changed_is_one(wanted, found):
    assert not is_up_to_date(wanted, found)


def read(text, **status):
    body = crd.validate(text).body
    return body, LLMService.from_body(body)


def digest(**spec):
    document = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "s"},
        "spec": {"device": "CPU", "model": {"source": {"pvc": {"claimName": "m", "path": "x"}}}, **spec},
    }
    return pods_digest(*read(document))


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 3},
        {"adapters": [{"name": "a", "source": {"pvc": {"claimName": "m", "path": "a"}}}]},
        {"disruption": {"pdb": "None"}},
        {"networking": {"networkPolicy": {"enabled": False}}},
        {"rollout": {"maxSurge": 1, "updatePolicy": "Auto"}},
        {"cache": {"deletionPolicy": "Retain"}},
        {"paused": True},
        {"engine": {"prefixCaching": True}},  # its default
        {"lora": {"maxLoaded": 8, "maxRank": 16}},  # their defaults
    ],
)
def test_pods_are_not_pinned_by_what_they_do_not_follow_from(spec):
    assert digest(**spec) == digest()


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"maxModelLen": 512}},
        {"engine": {"prefixCaching": False}},
        {"lora": {"maxLoaded": 4}},
        {"runtime": {"image": "other"}},
        {"rollout": {"drainSeconds": 90}},
        {"security": {"runAsUser": 2000}},
        {"podTemplate": {"spec": {"priorityClassName": "high"}}},
        {"adapters": [{"name": "a", "source": {"pvc": {"claimName": "another", "path": "a"}}}]},
        {"model": {"source": {"pvc": {"claimName": "m", "path": "y"}}}},
        {"networking": {"kvEvents": {"subscribers": [{"podSelector": {}}]}}},
    ],
)
def test_pods_are_pinned_by_what_they_follow_from(spec):
    assert digest(**spec) != digest()


def test_pods_are_not_replaced_by_other_subscribers_of_kv_events():
    def of_events(**events):
        return digest(networking={"kvEvents": {"subscribers": [{"podSelector": {}}], **events}})

    assert of_events() == of_events(subscribers=[{"ipBlock": {"cidr": "10.0.0.0/8"}}]) == of_events(port=5557)
    assert len({of_events(), of_events(port=6000), of_events(topic="")}) == 3


BROKEN = base64.b64encode(b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 8).decode()
"""Begins as compressed data does."""


@pytest.mark.parametrize("text", ["by hand", compress({"spec": ""}), compress({"spec": ""})[:20], compress([]), BROKEN])
def test_what_somebody_changed_by_hand_is_not_pinned(text):
    assert TemplateRevision.from_workload({"metadata": {"annotations": {PODS_ANNOTATION: text}}}) is None


ROLES = f"""{NO_LORA}
engine: {{kvCacheOffloading: {{memory: 1Gi}}}}
disaggregation: {{prefill: {{engine: {{maxNumSeqs: 8}}}}, decode: {{}}}}
"""


@pytest.mark.parametrize(("spec", "kind"), [(NO_LORA, "Deployment"), (ROLES, "DisaggregatedSet")])
def test_what_is_pinned_comes_back_as_it_was(spec, kind):
    service = llm_service(spec)
    made = plan_of_service(service, "qwen")
    manifests = list(render_objects(service, made, RenderContext(admin_key="k", owner_uid="u-1")).manifests)
    pinned = TemplateRevision.from_manifests("digest", made, manifests)
    rendered = copy.deepcopy(manifests)
    applied = pinned.apply_to(manifests, service, made, 1)
    (workload,) = [m for m in applied if m["kind"] == kind]
    assert TemplateRevision.from_workload(workload) == pinned
    assert [m["spec"] for m in applied if m["kind"] == kind] == [m["spec"] for m in rendered if m["kind"] == kind]
    assert [m.get("data") for m in applied] == [m.get("data") for m in rendered]
    assert workload["metadata"]["annotations"][object_names.PLAN_ANNOTATION] == made.inputsHash
    assert manifests == rendered, "nothing given is changed"
    assert "u-1" not in str(pinned.pods), "an owner goes with its service"
