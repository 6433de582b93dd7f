# SPDX-License-Identifier: Apache-2.0
"""What `kubectl describe` tells: changes that people should hear of, each once, and failures as warnings."""

from dataclasses import replace

import pytest
from support.observed_factories import (
    CREATED_LATER,
    GENERATION,
    NOW,
    PLAN,
    PLANNING_RESULT,
    deployment,
    desired_service,
    finished_job,
    healthy_state,
    job,
    pod_report,
    ready_pod,
    starting_pod,
    with_adapter,
)  # fmt: skip

from quire_operator.controller.status.events import build_events
from quire_operator.controller.status.observed_state import ObservedState
from quire_operator.controller.status.status import build_status
from quire_spec.documents.pod_status import AdapterState

SERVICE = desired_service()
GOOD = ready_pod("s-0", pod_report(SERVICE))


def after(before, observed, verdict=PLANNING_RESULT, service=SERVICE):
    return build_status(service, GENERATION, verdict, observed, before, CREATED_LATER)


def told(before, observed, verdict=PLANNING_RESULT):
    """Return type, reason and message of the events, as lines."""
    return [f"{e.type} {e.reason}: {e.message}" for e in build_events(before, after(before, observed, verdict))]


WELL = after({}, healthy_state())


def test_the_story_of_a_service_that_comes_up():
    nothing = {}
    downloading = after(nothing, ObservedState(job=job(), job_pods=(starting_pod("j", started_at="x"),)))
    assert [e.reason for e in build_events(nothing, downloading)] == ["Fits", "Downloading"]
    begun = after(
        downloading, healthy_state(pods=(starting_pod("s-0"), starting_pod("s-1")), workload=deployment(2, ready=0))
    )
    assert [e.reason for e in build_events(downloading, begun)] == ["Downloaded"]
    lines = told(begun, healthy_state())
    told_of = [line.partition(":")[0].removeprefix("Normal ") for line in lines]
    assert told_of == ["RolloutComplete", "MinimumReplicas", "Ready", "AdapterReady", "AdapterReady"]
    assert lines[3] == f"Normal AdapterReady: adapter sql is on all 2 ready pods, sha256:{'sql':0>64}"


CHANGES = {
    "no GPU": (
        healthy_state(
            pods=(GOOD, starting_pod("s-1", unschedulable="Insufficient nvidia.com/gpu")),
            workload=deployment(2, ready=1),
        ),
        ["Warning InsufficientGPU"],
    ),
    "all pods are lost": (
        healthy_state(pods=(starting_pod("s-0"), starting_pod("s-1")), workload=deployment(2, ready=0)),
        ["Warning NoReadyPods"],
    ),
    # The Deployment has counted the new pod, which reports that it is starting.
    "a pod that was deleted": (
        healthy_state(pods=(GOOD, starting_pod("s-2")), workload=deployment(2)),
        [],
    ),
    "a pod that was evicted": (
        healthy_state(
            pods=(
                GOOD,
                starting_pod("s-1", phase="Failed", failure="Evicted: low on memory", failed_at="2026-01-01T00:00:01Z"),
                starting_pod("s-2", created_at="2026-01-01T00:00:02Z"),
            ),
            workload=deployment(2, ready=1),
        ),
        ["Normal PodsNotReady"],
    ),
    "a queue without quota": (
        healthy_state(
            pods=(GOOD, starting_pod("s-1", gates=("kueue.x-k8s.io/admission",), gate_message="1 more needed")),
            workload=deployment(2, ready=1),
        ),
        ["Normal WaitingForQuota"],
    ),
    "a claim of another's": (healthy_state(conflict="Service s belongs to Helm"), ["Warning Conflict"]),
    "a field that is missing": (healthy_state(unknown_fields=("spec.podTemplate.x",)), ["Warning FieldsLeftOut"]),
    "an old image": (healthy_state(outdated_image="quire:old"), ["Warning ImageOutdated"]),
    "pods that do not answer": (healthy_state(pods=(GOOD, ready_pod("s-1", report_error="refused"))),
    ["Warning PodsUnreachable"]),
    "an adapter that failed": (
        healthy_state(pods=(GOOD, ready_pod("s-1", with_adapter(pod_report(SERVICE), "sql", AdapterState.FAILED,
        "HTTP 404")))),
        ["Warning AdapterFailed"],
    ),
    "a download that gave up": (healthy_state(job=finished_job("Failed")), ["Warning DownloadFailed"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_it_tells_of(case):
    observed, expected = CHANGES[case]
    assert [line.partition(":")[0] for line in told(WELL, observed)] == expected
    worse = after(WELL, observed)
    assert build_events(worse, after(worse, observed)) == []


def test_a_failure_that_lasts_is_not_told_again_when_its_words_change():
    def failed(words):
        said = with_adapter(pod_report(SERVICE), "sql", AdapterState.FAILED, words)
        return healthy_state(pods=(GOOD, ready_pod("s-1", said)))

    broken = after(WELL, failed("HTTP 500"))
    assert told(broken, failed("HTTP 502")) == []
    assert [line.partition(":")[0] for line in told(broken, healthy_state())] == ["Normal Ready", "Normal AdapterReady"]


def test_new_content_under_an_old_name_is_told():
    other = [replace(a, digest="sha256:" + "e" * 64) for a in pod_report(SERVICE).adapters]
    said = pod_report(SERVICE, adapters=[other[0], pod_report(SERVICE).adapters[1]])
    lines = told(WELL, healthy_state(pods=(ready_pod("s-0", said), ready_pod("s-1", said))))
    assert lines == [f"Normal AdapterReady: adapter sql is on all 2 ready pods, sha256:{'e' * 64}"]


def test_a_plan_that_was_wrong_is_told_once():
    few = replace(
        pod_report(SERVICE), memory=replace(pod_report(SERVICE).memory, num_blocks=PLAN.kvTokens * 8 // 10 // 16)
    )
    seen = healthy_state(pods=(ready_pod("s-0", few), ready_pod("s-1", pod_report(SERVICE))))
    (line,) = told(WELL, seen)
    assert line.startswith("Warning PlanDiffers: the engine has room for") and "20% fewer than the" in line
    wrong = after(WELL, seen)
    assert told(wrong, seen) == []
    less = replace(few, memory=replace(few.memory, num_blocks=few.memory.num_blocks // 2))
    assert told(wrong, healthy_state(pods=(ready_pod("s-0", less), GOOD))) == [], "known already"


@pytest.mark.parametrize(("tokens", "words"), [(131072, ""), (262144, ""), (65536, "50% fewer"), (524288, "100% more")])
def test_on_a_cpu_the_engine_may_take_a_smaller_type_than_was_counted(tokens, words):
    planned = {"inputsHash": "x", "kvTokens": 131072, "dtype": {"value": "auto"}}
    found = build_events({"plan": planned}, {"plan": planned | {"measured": {"kvTokens": tokens}}})
    assert [e.reason for e in found] == (["PlanDiffers"] if words else [])
    assert all(words in e.message and "GPU" not in e.message for e in found)


def test_many_adapters_make_few_events():
    names = [f"a{i}" for i in range(50)]
    lines = "".join(f"\n- {{name: {n}, source: {{huggingFace: {{repo: o/{n}}}}}}}" for n in names)
    service = desired_service(f"replicas: 1\nlora: {{maxLoaded: 4, maxRank: 16}}\nadapters:{lines}")
    said = pod_report(service)
    for name in names[:5]:
        said = with_adapter(said, name, AdapterState.FAILED, "no")
    found = build_status(
        service, GENERATION, PLANNING_RESULT, healthy_state(service, pods=(ready_pod("s-0", said),)), {}, NOW
    )
    made = [e for e in build_events({}, found) if "dapter" in e.reason]
    assert len(made) == 11
    assert made[-1].reason == "MoreAdapters" and made[-1].message == "40 more adapters changed, 0 of them failed"
