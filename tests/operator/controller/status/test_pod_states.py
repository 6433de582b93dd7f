# SPDX-License-Identifier: Apache-2.0
"""States of pods that only some fields of the API show: gates, rejections, sidecars; and those of autoscalers."""

import dataclasses

import pytest
from support.observed_factories import (
    GENERATION,
    NOW,
    PLANNING_RESULT,
    checked_status,
    condition,
    conditions_by_type,
    deployment,
    desired_service,
    healthy_state,
    schema_problems,
    serving_pod,
    starting_pod,
    state_with_pods,
)

from quire_operator.controller.object_cache import to_cached_object
from quire_operator.controller.observe.pod_warnings import queue_messages
from quire_operator.controller.status.observed_state import parse_pod
from quire_operator.controller.status.status import build_status
from quire_operator.kube.resources import POD

UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
REJECTED = {
    "phase": "Failed",
    "failure": "UnexpectedAdmissionError: Allocate failed due to no healthy devices present",
    "created_at": "2026-01-01T00:00:10Z",
    "failed_at": "2026-01-01T00:00:10Z",
}


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (
            {"gates": ("example.com/wait",)},
            "SchedulingGated",
            "the scheduler waits until gate example.com/wait is removed",
        ),
        (
            {"gates": ("kueue.x-k8s.io/admission",), "gate_message": "insufficient unused quota for nvidia.com/gpu"},
            "WaitingForQuota",
            "gate kueue.x-k8s.io/admission is removed: insufficient unused quota for nvidia.com/gpu",
        ),
    ],
)
def test_gates_are_named_and_have_no_deadline(changes, reason, words):
    late = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    for more in ({}, {"conditions": late}):
        pods = (serving_pod(), starting_pod("s-1", **changes))
        found = checked_status(state_with_pods(*pods, workload=deployment(2, ready=1, **more)))
        assert conditions_by_type(found)["Progressing"] == ("True", reason)
        assert (
            f"pod s-1: {words}" in condition(found, "Ready")["message"] or words in condition(found, "Ready")["message"]
        )


@pytest.mark.parametrize(
    ("alive", "is_told"),
    [
        ([starting_pod("s-2", created_at="2026-01-01T00:00:11Z")], True),
        ([], True),
        # A pod that failed long before the pods that start now is not their problem.
        ([starting_pod("s-2", created_at="2026-01-01T00:02:00Z")], False),
    ],
)
def test_pods_that_were_rejected_are_named(alive, is_told):
    pods = (serving_pod(), starting_pod("s-1", **REJECTED), *alive)
    found = checked_status(state_with_pods(*pods, workload=deployment(2, ready=1)))
    words = "pod s-1: the pod has failed: UnexpectedAdmissionError: Allocate failed due to no healthy devices present"
    assert (words in condition(found, "Ready")["message"]) == is_told
    assert conditions_by_type(found)["Ready"][1] == ("PodsNotReady" if is_told else "PodsStarting")


def test_a_problem_of_a_living_pod_is_more_important_than_one_that_was_evicted():
    waiting = starting_pod("s-2", created_at="2026-01-01T00:00:11Z", unschedulable=UNSCHEDULABLE)
    pods = (serving_pod(), starting_pod("s-1", **REJECTED), waiting)
    found = checked_status(state_with_pods(*pods, workload=deployment(2, ready=1)))
    assert conditions_by_type(found)["Ready"] == ("False", "InsufficientGPU")


LORA = "lora: {maxLoaded: 4, maxRank: 16}\n"
HPA = f"{LORA}autoscaling: {{minReplicas: 1, maxReplicas: 3, kind: HorizontalPodAutoscaler}}\nreplicas: 2\n"
KEDA = (
    f"{LORA}autoscaling: {{minReplicas: 1, maxReplicas: 3, kind: ScaledObject, prometheusAddress: 'http://p:9090'}}\n"
    "replicas: 2\n"
)
ABLE, OFF = ("AbleToScale", "True", "x", "a"), ("Active", "False", "x", "")


@pytest.mark.parametrize(
    ("spec", "conditions", "expected", "words"),
    [
        (HPA, None, ("Unknown", "AutoscalerPending"), "has not reported"),
        (HPA, [ABLE, ("ScalingActive", "True", "x", "b")], ("True", "AutoscalerActive"), "a; b"),
        (HPA, [ABLE, ("ScalingActive", "False", "FailedGetPodsMetric", "none")], ("False", "AutoscalerFailed"),
         "HorizontalPodAutoscaler s: ScalingActive is False: FailedGetPodsMetric: none"),
        (HPA, [ABLE, ("ScalingActive", "False", "ScalingDisabled", "0")], ("True", "AutoscalerActive"), "a; 0"),
        (KEDA, [("Ready", "False", "TriggerError", "no such host"), OFF], ("False", "AutoscalerFailed"),
         "ScaledObject s: Ready is False: TriggerError: no such host"),
        (KEDA, [("Ready", "True", "x", ""), OFF], ("True", "AutoscalerActive"), "works"),
    ],
)  # fmt: skip
def test_the_autoscaler_is_repeated(spec, conditions, expected, words):
    service = desired_service(spec)
    listed = [dict(zip(("type", "status", "reason", "message"), entry, strict=True)) for entry in conditions or ()]
    autoscaler = None if conditions is None else {"metadata": {"name": "s"}, "status": {"conditions": listed}}
    observed = healthy_state(service, autoscaler=autoscaler)
    found = build_status(service, GENERATION, PLANNING_RESULT, observed, {}, NOW)
    assert schema_problems(found) == []
    assert conditions_by_type(found)["Autoscaling"] == expected
    assert words in condition(found, "Autoscaling")["message"]
    assert conditions_by_type(found)["Ready"] == ("True", "Ready"), "the pods serve"


POOL = "networking: {inferencePool: {endpointPicker: {name: picker}}, httpRoute: {parentRefs: [{name: public}]}}\n"
ACCEPTED, RESOLVED = ("Accepted", "True", "Accepted", "ok"), ("ResolvedRefs", "True", "ResolvedRefs", "found")
PICKER = ("ResolvedRefs", "False", "InvalidExtensionRef", "Service picker does not exist")
PENDING = ("Accepted", "Unknown", "Pending", "Waiting for controller")


@pytest.mark.parametrize(
    ("parents", "expected", "message"),
    [
        ([], ("Unknown", "ParentPending"), "no gateway has reported its state yet"),
        ([[PENDING]], ("Unknown", "ParentPending"), "Gateway infra/g-0: Accepted is Unknown: Pending: Waiting"),
        ([[ACCEPTED, RESOLVED]], ("True", "ParentActive"),
         "Gateway infra/g-0: Accepted is True: Accepted: ok; Gateway infra/g-0: ResolvedRefs is True: ResolvedRefs: f"),
        ([[ACCEPTED, PICKER]], ("False", "ParentFailed"),
         "Gateway infra/g-0: ResolvedRefs is False: InvalidExtensionRef: Service picker does not exist"),
        ([[ACCEPTED, RESOLVED], [ACCEPTED, PICKER]], ("False", "ParentFailed"), "Gateway infra/g-1: ResolvedRefs"),
        ([[("Programmed", "False", "x", "y"), ACCEPTED]], ("True", "ParentActive"), "Gateway infra/g-0: Accepted is"),
        ([[PENDING], [PICKER]], ("False", "ParentFailed"), "Gateway infra/g-1: ResolvedRefs is False"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["InferencePool", "HTTPRoute"])
def test_the_parents_of_a_route_are_repeated(kind, parents, expected, message):
    service = desired_service(LORA + POOL + "replicas: 2\n")
    status = {
        "parents": [
            {
                "parentRef": {"kind": "Gateway", "namespace": "infra", "name": f"g-{i}"},
                "conditions": [
                    dict(zip(("type", "status", "reason", "message"), entry, strict=True)) for entry in conditions
                ],
            }
            for i, conditions in enumerate(parents)
        ]
    }
    field = {"InferencePool": "inference_pool", "HTTPRoute": "http_route"}[kind]
    observed = healthy_state(service, **{field: {"metadata": {"name": "s"}, "status": status}})
    found = build_status(service, GENERATION, PLANNING_RESULT, observed, {}, NOW)
    assert schema_problems(found) == []
    assert conditions_by_type(found)[kind] == expected
    assert condition(found, kind)["message"].startswith(message)
    assert conditions_by_type(found)["Ready"] == ("True", "Ready"), "the pods serve"
    assert not {"InferencePool", "HTTPRoute"} & set(conditions_by_type(checked_status(healthy_state())))


SIDECAR = {"name": "istio-proxy", "restartCount": 0, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
METADATA = {"name": "s-0", "uid": "u", "namespace": "team", "resourceVersion": "1"}


@pytest.mark.parametrize("main", ["server", "download"])
def test_the_main_container_is_found_by_name(main):
    """The proxy of a mesh can be the first container."""
    own = {"name": main, "restartCount": 7, "state": {"running": {"startedAt": "2026-01-02T00:00:00Z"}}}
    containers = [{"name": "istio-proxy", "image": "proxy"}, {"name": main, "image": "quire:gpu"}]
    status = {"phase": "Running", "containerStatuses": [SIDECAR, own]}
    pod = parse_pod({"metadata": METADATA, "spec": {"containers": containers}, "status": status})
    assert (pod.restarts, pod.started_at, pod.image) == (7, "2026-01-02T00:00:00Z", "quire:gpu")


def test_the_cache_keeps_what_the_status_reads_of_a_pod():
    download = {"name": "download", "args": ["--source={}", "--into=/mnt/model/abc"], "resources": {"requests": {}}}
    server = {"name": "server", "image": "i", "ports": [{"name": "health", "containerPort": 8003}]}
    gates = [{"name": "kueue.x-k8s.io/admission"}]
    spec = {"containers": [server], "initContainers": [download], "schedulingGates": gates}
    body = {"metadata": METADATA, "spec": spec, "status": {"phase": "Pending"}}
    pod = parse_pod(to_cached_object(POD, body).body())
    assert pod == parse_pod(body)
    assert pod.download_folders == ("/mnt/model/abc",) and pod.is_gated_by_kueue and pod.image == "i"


def test_messages_of_kueue():
    def workload(uid, *conditions, **owner):
        return {"metadata": {"ownerReferences": [{"uid": uid, **owner}]}, "status": {"conditions": list(conditions)}}

    pending = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "1 more needed"}
    reserved = {"type": "QuotaReserved", "status": "True", "message": "reserved"}
    checked = {"type": "Admitted", "status": "False", "message": "an admission check is pending"}
    found = queue_messages([workload("a", pending), workload("b", reserved, checked), workload("c")])
    assert found == {"a": "1 more needed", "b": "an admission check is pending", "c": ""}
    groups = {"kind": "LeaderWorkerSet", "name": "s-0-1a2b-prefill"}
    found = queue_messages([workload("d", pending, **groups), workload("d", reserved, **groups)])
    assert found == {"d": "1 more needed", "s-0-1a2b-prefill": "1 more needed"}, "one group has quota"


def test_a_pod_without_one_of_its_cores_serves_and_says_so():
    whole = serving_pod("s-0")
    report = dataclasses.replace(whole.report, degraded="cores 3 of 4")
    pods = (whole, dataclasses.replace(whole, name="s-1", report=report))
    found = checked_status(state_with_pods(*pods, workload=deployment(2, ready=2)))
    assert condition(found, "Available")["status"] == "True"
    assert condition(found, "Available")["message"] == "2 of 2 pods serve; s-1: cores 3 of 4"
