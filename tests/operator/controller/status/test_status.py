# SPDX-License-Identifier: Apache-2.0
"""The status, case by case: what each condition says of what was seen, and that nothing is claimed that is not so."""

import re
from dataclasses import replace

import pytest
from support.observed_factories import (
    CREATED_LATER,
    GENERATION,
    PLAN,
    PLANNING_RESULT,
    SERVICE,
    checked_status,
    condition,
    conditions_by_type,
    deployment,
    desired_service,
    finished_job,
    healthy_state,
    pod_report,
    ready_condition,
    ready_pod,
    serving_pod,
    starting_pod,
    state_with_pods,
    terminated_container,
    with_adapter,
)  # fmt: skip
from support.planning import llm_service, plan_for

from quire_operator.controller.status.observed_state import ObservedState, PlanningResult
from quire_operator.controller.status.status import _addresses
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_spec.documents.pod_status import AdapterState


def test_all_is_well():
    found = checked_status(healthy_state())
    assert conditions_by_type(found) == {
        "Ready": ("True", "Ready"),
        "ConfigValid": ("True", "Accepted"),
        "Planned": ("True", "Fits"),
        "ModelCached": ("True", "Downloaded"),
        "Available": ("True", "MinimumReplicas"),
        "Progressing": ("False", "RolloutComplete"),
        "AdaptersReady": ("True", "AllLoaded"),
    }
    assert (found["replicas"], found["readyReplicas"], found["updatedReplicas"]) == (2, 2, 2)
    assert found["models"] == ["s", "sql", "support"]
    assert found["adaptersReady"] == "2/2"
    assert found["adapters"][0] == {
        "name": "sql", "ready": 2, "total": 2, "state": "Ready", "digest": f"sha256:{'sql':0>64}",
    }  # fmt: skip
    assert found["endpoints"] == {"http": "http://s.team.svc:8000", "grpc": "s.team.svc:8001"}
    urls = {"http": "http://s.team.svc:8000", "grpc": "grpc://s.team.svc:8001"}
    openai = "http://s.team.svc:8004/v1"
    assert found["address"] == {"url": openai, "openai": openai, **urls}
    assert (found["toolCallParser"], "reasoningParser" in found) == ("hermes", False)
    assert found["servedName"] == "s"
    assert found["selector"] == (
        "app.kubernetes.io/component=server,app.kubernetes.io/instance=s,app.kubernetes.io/name=quire"
    )
    assert found["plan"] == PLAN.to_json() | {
        "measured": {
            "kvBlocks": PLAN.kvTokens // 16,
            "kvTokens": PLAN.kvTokens // 16 * 16,
            "at": "2026-01-01T00:00:00Z",
        }
    }


@pytest.mark.parametrize(
    ("route", "pool_port", "url"),
    [
        ("hostnames: [llm.example, b.example]", None, "https://llm.example/v1"),
        ("hostnames: [llm.example], scheme: http", None, "http://llm.example/v1"),
        ("hostnames: [llm.example], port: http", None, "https://llm.example"),
        ("port: openai", None, None),
        # The pool chooses the port of the pods, not the route.
        ("hostnames: [llm.example]", "http", "https://llm.example"),
        ("hostnames: [llm.example], port: http", "openai", "https://llm.example/v1"),
    ],
)
def test_the_address_contains_the_url_of_the_route(route, pool_port, url):
    pool = f", inferencePool: {{targetPort: {pool_port}, endpointPicker: {{name: p}}}}" if pool_port else ""
    service = llm_service(f"networking: {{httpRoute: {{parentRefs: [{{name: g}}], {route}}}{pool}}}")
    found = _addresses(service, {"spec": {"template": {"spec": {"containers": []}}}})
    assert found["address"].get("external") == url


@pytest.mark.parametrize(("expose", "address"), [(("grpc",), {"grpc": "grpc://s.team.svc:8001"}), ((), {})])
def test_the_address_contains_exposed_protocols_only(expose, address):
    runtime = replace(SERVICE.spec.runtime, expose=expose)
    service = replace(SERVICE, spec=replace(SERVICE.spec, runtime=runtime))
    openai, container = "http://s.team.svc:8004/v1", {"ports": [{"name": "openai", "containerPort": 8004}]}
    found = _addresses(service, {"spec": {"template": {"spec": {"containers": [container]}}}})
    assert found["address"] == {"url": openai, "openai": openai, **address}
    assert found["endpoints"].keys() == address.keys()


NOT_READY = {
    "nothing was applied yet": (ObservedState(job=finished_job()), "Updating"),
    "the controller has not observed the Deployment": (
        healthy_state(workload=deployment(2, observedGeneration=3)),
        "Updating",
    ),
    "pods are not ready for long enough": (healthy_state(workload=deployment(2, availableReplicas=1)), "Updating"),
    "old pods make up the count": (healthy_state(workload=deployment(2, updated=1)), "Updating"),
    "pods of two templates": (
        state_with_pods(serving_pod(), replace(serving_pod("s-1"), template_hash="old")),
        "PodsStarting",
    ),
    "a pod is missing from the observed state": (state_with_pods(serving_pod()), "PodsStarting"),
    "an adapter is on one pod only": (
        state_with_pods(
            serving_pod(), ready_pod("s-1", with_adapter(pod_report(SERVICE), "sql", AdapterState.LOADING))
        ),
        "Loading",
    ),
    "an adapter has failed on one pod": (
        state_with_pods(
            serving_pod(), ready_pod("s-1", with_adapter(pod_report(SERVICE), "sql", AdapterState.FAILED, "HTTP 404"))
        ),
        "LoadFailed",
    ),
}


@pytest.mark.parametrize("case", NOT_READY)
def test_it_is_not_ready_when(case):
    observed, reason = NOT_READY[case]
    assert ready_condition(checked_status(observed)) == ("False", reason)


def test_scaled_to_zero_and_without_adapters():
    service = desired_service("replicas: 0\nlora: {maxLoaded: 0}")
    found = checked_status(healthy_state(service), service=service)
    assert conditions_by_type(found)["Ready"] == conditions_by_type(found)["Available"] == ("False", "ScaledToZero")
    assert conditions_by_type(found)["Progressing"] == ("False", "RolloutComplete")
    assert conditions_by_type(found)["AdaptersReady"] == ("True", "NoAdapters")
    assert (found["adaptersReady"], found["adapters"]) == ("0/0", [])


# What pods wait for


UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
PODS = {
    "no GPU is free": ({"unschedulable": UNSCHEDULABLE}, "InsufficientGPU", UNSCHEDULABLE),
    "the image does not exist": (
        {"waiting": 'ImagePullBackOff: Back-off pulling image "x"'},
        "PodsNotReady",
        'pod s-1: ImagePullBackOff: Back-off pulling image "x"',
    ),
    "it crashes": (
        {
            "waiting": "CrashLoopBackOff: back-off 5m0s restarting failed container",
            "terminated": terminated_container(
                "server", 1, message="Traceback\nquire: pod.json: blockSize: 3: must be 16\n"
            ),
            "restarts": 4,
        },
        "PodsNotReady",
        "CrashLoopBackOff; server ended with Error (exit code 1, 4 restarts): quire: pod.json: blockSize: 3: must",
    ),
    "its image is older than pod.json": (
        {
            "image": "quire:old",
            "waiting": "CrashLoopBackOff: back-off 5m0s restarting failed container",
            "terminated": terminated_container(
                "server",
                2,
                message="usage: x\npython -m quire_server: error: the following arguments are required: --served-name",
            ),
            "restarts": 1,
        },
        "PodsNotReady",
        "server ended with Error (exit code 2, 1 restarts): image quire:old is older than the operator and cannot read "
        "pod.json; set spec.runtime.image to an image of the operator's release, or remove it",
    ),
    "it ran out of memory": (
        {
            "started_at": "2026-01-01T00:00:00Z",
            "terminated": terminated_container("server", 137, "OOMKilled"),
            "restarts": 1,
        },
        "PodsNotReady",
        "starting again after server ended with OOMKilled (exit code 137, 1 restarts)",
    ),
    "it says why itself": (
        {"started_at": "2026-01-01T00:00:00Z", "report": pod_report(SERVICE, ready=False, reason="core is starting")},
        "PodsNotReady",
        "pod s-1: core is starting",
    ),
}


@pytest.mark.parametrize("case", PODS)
def test_a_pod_waits_because(case):
    changes, reason, words = PODS[case]
    found = checked_status(
        state_with_pods(serving_pod(), starting_pod("s-1", **changes), workload=deployment(2, ready=1))
    )
    assert conditions_by_type(found)["Ready"] == ("False", reason)
    assert conditions_by_type(found)["Progressing"] == ("True", reason)
    assert words in condition(found, "Ready")["message"]
    assert conditions_by_type(found)["Available"] == ("True", "MinimumReplicas"), "the other one serves"


def test_the_scheduler_is_blamed_before_pods_that_just_start():
    pods = (starting_pod("a", waiting="ImagePullBackOff: x"), starting_pod("b", unschedulable=UNSCHEDULABLE))
    found = checked_status(state_with_pods(*pods, workload=deployment(2, ready=0)))
    assert ready_condition(found) == ("False", "InsufficientGPU")
    assert "(and 1 more)" in condition(found, "Ready")["message"]
    assert conditions_by_type(found)["Available"] == ("False", "NoReadyPods")
    assert conditions_by_type(found)["AdaptersReady"] == ("Unknown", "NoReadyPods")


def test_the_deadline_names_its_cause():
    late = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
    pods = (serving_pod(), starting_pod("s-1", unschedulable=UNSCHEDULABLE))
    found = checked_status(state_with_pods(*pods, workload=deployment(2, ready=1, conditions=late)))
    assert (
        conditions_by_type(found)["Ready"] == conditions_by_type(found)["Progressing"] == ("False", "DeadlineExceeded")
    )
    message = condition(found, "Progressing")["message"]
    assert "600 s" in message and UNSCHEDULABLE in message
    # It reports nothing of an older Deployment.
    old = deployment(2, ready=1, conditions=late, observedGeneration=3)
    assert conditions_by_type(checked_status(state_with_pods(*pods, workload=old)))["Progressing"] == (
        "True",
        "InsufficientGPU",
    )


def test_a_quota_that_refuses_pods_is_named():
    refused = [
        {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: gpus"}
    ]
    found = checked_status(
        state_with_pods(serving_pod(), workload=deployment(2, updated=1, ready=1, replicas=1, conditions=refused))
    )
    assert ready_condition(found) == ("False", "PodsRefused")
    assert "FailedCreate: exceeded quota: gpus" in condition(found, "Ready")["message"]


# What keeps a generation from being rolled out: the last good one keeps serving


def test_a_spec_that_cannot_be_read():
    before = checked_status(healthy_state())
    invalid = PlanningResult(spec_error="spec.model.source: exactly one is needed\nspec.replicas: must be 0 or more")
    found = checked_status(healthy_state(applied_generation=GENERATION - 1), invalid, None, before, CREATED_LATER)
    assert conditions_by_type(found) == {
        "Ready": ("False", "Invalid"),
        "ConfigValid": ("False", "Invalid"),
        "Planned": ("Unknown", "Invalid"),
        "ModelCached": ("Unknown", "Invalid"),
        "Available": ("True", "MinimumReplicas"),
        "Progressing": ("False", "Invalid"),
        "AdaptersReady": ("Unknown", "Invalid"),
    }
    assert condition(found, "Ready")["message"] == (
        "spec.model.source: exactly one is needed; spec.replicas: must be 0 or more"
    )
    assert {k: found[k] for k in ("plan", "address", "endpoints", "models", "selector")} == {
        k: before[k] for k in ("plan", "address", "endpoints", "models", "selector")
    }
    assert found["readyReplicas"] == 2 and found["updatedReplicas"] == 0


VERDICTS = {
    "invalid": (PlanningResult(spec_error="spec.engine: no", plan=PLAN), {}, "Invalid", "ConfigValid"),
    "conflict": (PLANNING_RESULT, {"conflict": "Service s belongs to Helm"}, "Conflict", "ConfigValid"),
    "rejected": (PLANNING_RESULT, {"apply_error": "Deployment s: 422"}, "ApplyRejected", "ConfigValid"),
    "pending": (PlanningResult(waiting_for="reading config.json"), {}, "Planning", "Planned"),
    **{
        why.value: (PlanningResult(unplannable=Unplannable(why, "too large"), plan=PLAN), {}, why.value, "Planned")
        for why in UnplannableReason
    },
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_verdict_that_stops_the_rollout(case):
    verdict, changes, reason, kind = VERDICTS[case]
    before = checked_status(healthy_state())
    found = checked_status(healthy_state(applied_generation=GENERATION - 1, **changes), verdict, previous=before)
    assert ready_condition(found) == ("False", reason)
    assert condition(found, kind)["status"] in ("False", "Unknown")
    assert condition(found, kind)["reason"] == reason
    assert condition(found, "Progressing")["status"] == ("True" if case == "pending" else "False")
    assert conditions_by_type(found)["Available"] == ("True", "MinimumReplicas")
    assert found["plan"] == before["plan"], "the last good one stays"


def test_fields_that_the_cluster_lacks_are_named_and_stop_nothing():
    found = checked_status(
        healthy_state(unknown_fields=("spec.podTemplate.spec.nodeSelektor",), unavailable_kinds=("InferencePool",))
    )
    assert conditions_by_type(found)["ConfigValid"] == ("True", "FieldsLeftOut")
    message = condition(found, "ConfigValid")["message"]
    assert "know spec.podTemplate.spec.nodeSelektor, so" in message and "serve InferencePool, so" in message
    assert ready_condition(found) == ("True", "Ready")


def test_a_pinned_image_that_is_older_than_the_operator_is_named_and_stops_nothing():
    found = checked_status(healthy_state(outdated_image="quire:old", unavailable_kinds=("InferencePool",)))
    assert conditions_by_type(found)["ConfigValid"] == ("True", "ImageOutdated")
    message = condition(found, "ConfigValid")["message"]
    assert "spec.runtime.image: 'quire:old' is older than the operator" in message
    assert "serve InferencePool, so" in message, "no other problem is hidden"
    assert ready_condition(found) == ("True", "Ready")


def test_paused():
    service = desired_service("paused: true\nreplicas: 2\nlora: {maxLoaded: 0}")
    found = checked_status(healthy_state(service), service=service)
    assert ready_condition(found) == ("Unknown", "Paused")
    assert conditions_by_type(found)["Progressing"] == ("False", "Paused")
    assert conditions_by_type(found)["Available"] == ("True", "MinimumReplicas")


# Adapters


def test_the_pod_farthest_behind_counts():
    failed = with_adapter(pod_report(SERVICE), "support", AdapterState.FAILED, "rank 64 > maxRank 16")
    found = checked_status(state_with_pods(serving_pod(), ready_pod("s-1", failed)))
    assert found["adapters"][1] == {
        "name": "support", "ready": 1, "total": 2, "state": "Failed", "digest": f"sha256:{'support':0>64}",
        "message": "pod s-1: rank 64 > maxRank 16",
    }  # fmt: skip
    assert found["adaptersReady"] == "1/2"
    assert found["models"] == ["s", "sql"], "what only some pods have is not called a model"
    assert "support: pod s-1: rank 64" in condition(found, "Ready")["message"]


def test_errors_are_told_of_ten_adapters_and_counted_of_all():
    names = [f"a{i}" for i in range(100)]
    lines = "".join(f"\n- {{name: {n}, source: {{huggingFace: {{repo: o/{n}}}}}}}" for n in names)
    service = desired_service(f"replicas: 1\nlora: {{maxLoaded: 4, maxRank: 16}}\nadapters:{lines}")
    said = pod_report(service)
    for name in names:
        said = with_adapter(said, name, AdapterState.FAILED, "x" * 5000)
    found = checked_status(healthy_state(service, pods=(ready_pod("s-0", said),)), service=service)
    assert sum("message" in entry for entry in found["adapters"]) == 10
    assert found["adaptersReady"] == "0/100"
    assert len(condition(found, "AdaptersReady")["message"]) <= 1024


def test_a_pod_with_a_newer_catalogue_is_told_from_one_behind():
    ahead = ready_pod("s-1", pod_report(SERVICE, generation=9, catalogue="sha256:0"))
    assert (
        "works on generation 9, which is newer than 7"
        in condition(checked_status(state_with_pods(serving_pod(), ahead)), "Ready")["message"]
    )
    behind = ready_pod(
        "s-1", pod_report(SERVICE, generation=5, catalogue="sha256:0"), report_error="PUT /adapters: HTTP 500"
    )
    message = condition(checked_status(state_with_pods(serving_pod(), behind)), "Ready")["message"]
    assert "pod s-1 is at 5: PUT /adapters: HTTP 500" in message


# Plan and measurement


def measured(tokens):
    said = pod_report(SERVICE)
    return ready_pod("s-0", replace(said, memory=replace(said.memory, num_blocks=tokens // 16)))


def test_pods_of_an_older_plan_measure_nothing():
    before = checked_status(healthy_state())
    rolling = checked_status(
        healthy_state(workload=deployment(2, updated=1), pods=(measured(16), serving_pod("s-1"))), previous=before
    )
    assert rolling["plan"]["measured"] == before["plan"]["measured"], "kept, of the same plan"
    other = before | {"plan": before["plan"] | {"inputsHash": "sha256:0"}}
    assert "measured" not in checked_status(healthy_state(workload=deployment(2, updated=1)), previous=other)["plan"]


def test_a_table_stays_one_where_it_belongs_and_is_left_out_elsewhere():
    with pytest.raises(Unplannable) as why:
        plan_for("70b", "NVIDIA-L4", "gpu: {count: 4}\nlora: {maxLoaded: 0}")
    found = checked_status(healthy_state(applied_generation=0), PlanningResult(unplannable=why.value))
    assert condition(found, "Planned")["message"] == str(why.value)
    assert re.fullmatch(
        r"spec.gpu: NVIDIA-L4: the model does not fit [^;]*; use a larger GPU, or a smaller model; The model .*",
        condition(found, "Ready")["message"],
    )
