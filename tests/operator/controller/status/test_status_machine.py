# SPDX-License-Identifier: Apache-2.0
"""Invariants of every status, for random combinations of Deployments, pods and generations."""

import json
from dataclasses import replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from support.observed_factories import (
    GENERATION,
    NOW,
    PLAN,
    condition,
    conditions_by_type,
    deployment,
    desired_service,
    finished_job,
    healthy_state,
    job,
    pod_report,
    ready_pod,
    schema_problems,
    terminated_container,
    with_adapter,
)

from quire_operator.controller.status.conditions import Reason
from quire_operator.controller.status.events import build_events
from quire_operator.controller.status.observed_state import PlanningResult
from quire_operator.controller.status.status import build_status
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.plan import FitReason
from quire_spec.documents.pod_status import AdapterState, AdapterStatus, MeasuredMemory

SERVICE = desired_service()
WANTED = SERVICE.spec.replicas
DIGEST = SERVICE.build_catalog().version.digest
REASONS = {str(reason) for group in (Reason, FitReason, UnplannableReason) for reason in group}

LATE = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]


def said(**changes):
    """Change a pod's status document, if it has one."""
    return lambda p: replace(p, report=p.report and replace(p.report, **changes))


def adapter(state):
    return lambda p: replace(p, report=p.report and with_adapter(p.report, "sql", state, "why"))


def pending(**changes):
    return lambda p: replace(p, ready=False, started_at="", **changes)


def numbers(**changes):
    return lambda o: replace(o, workload=o.workload and {**o.workload, "status": {**o.workload["status"], **changes}})


POD_FAULTS = [
    lambda p: replace(p, ready=False),
    lambda p: replace(p, deleting=True),
    lambda p: replace(p, phase="Failed"),
    lambda p: replace(p, template_hash="old"),
    lambda p: replace(p, report=None, report_error="no answer within 10 s"),
    lambda p: replace(p, terminated=terminated_container("server", 137, "OOMKilled", "a\nb")),
    pending(phase="Pending"),
    pending(unschedulable="0/1 nodes: 1 Insufficient nvidia.com/gpu."),
    pending(unschedulable="x" * 3000),
    pending(waiting="CrashLoopBackOff: back-off"),
    said(ready=False, reason="core is restarting"),
    said(generation=GENERATION - 1),
    said(generation=GENERATION - 1, catalogue=""),
    said(catalogue=""),
    said(catalogue="sha256:0"),
    said(generation=GENERATION + 1, catalogue="sha256:0"),
    said(adapters=[]),
    said(models=["s"]),
    said(kv_differences=["model", "rows"]),
    said(memory=None, core_started_at=None),
    *map(adapter, AdapterState),
]


def on(index, fault):
    return lambda o: replace(o, pods=tuple(fault(p) if i == index else p for i, p in enumerate(o.pods)))


FAULTS = [
    *(on(index, fault) for index in range(WANTED) for fault in POD_FAULTS),
    *(
        numbers(**{name: value})
        for name in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        for value in (0, WANTED - 1, WANTED + 1)
    ),
    numbers(observedGeneration=3),
    numbers(observedGeneration=5),
    numbers(conditions=LATE),
    lambda o: replace(o, workload=None),
    lambda o: replace(
        o, workload=o.workload and {**o.workload, "spec": {**o.workload["spec"], "replicas": WANTED + 1}}
    ),
    lambda o: replace(o, workload=deployment(0)),
    lambda o: replace(o, workload=deployment(WANTED + 1)),
    lambda o: replace(o, pods=o.pods[1:]),
    lambda o: replace(o, pods=(*o.pods, ready_pod("s-9", pod_report(SERVICE)))),
    lambda o: replace(o, pods=(*o.pods, ready_pod("s-9", pod_report(SERVICE), deleting=True))),
    lambda o: replace(o, job=None),
    lambda o: replace(o, job=job()),
    lambda o: replace(o, job=finished_job("Failed")),
    lambda o: replace(o, applied_generation=GENERATION - 1),
    lambda o: replace(o, applied_generation=0),
    lambda o: replace(o, unavailable_kinds=("PodMonitor",)),
    lambda o: replace(o, apply_error="422"),
    lambda o: replace(o, conflict="Service s"),
]


@st.composite
def observations(draw):
    """A healthy service, and up to four things wrong with it."""
    seen = healthy_state(SERVICE)
    for fault in draw(st.lists(st.sampled_from(FAULTS), max_size=4)):
        seen = fault(seen)
    return seen


good = PlanningResult(plan=PLAN)
verdicts = st.sampled_from(
    [good] * 20
    + [
        PlanningResult(),
        PlanningResult(waiting_for="x"),
        PlanningResult(spec_error="x"),
        PlanningResult(plan=PLAN, spec_error="x"),
    ]
    + [
        PlanningResult(unplannable=Unplannable(UnplannableReason.DOES_NOT_FIT, "x")),
        PlanningResult(PLAN, "", Unplannable(UnplannableReason.GPU_UNKNOWN, "x")),
    ]
)


def truly_ready(verdict, seen):
    """By the words of the issue, said another way than the code says them."""
    if (
        verdict != good
        or seen.apply_error
        or seen.conflict
        or seen.job != finished_job()
        or seen.applied_generation != GENERATION
    ):
        return False
    d = seen.workload
    if d is None or d["status"]["observedGeneration"] < d["metadata"]["generation"] or d["spec"]["replicas"] != WANTED:
        return False
    if any(d["status"][n] != WANTED for n in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")):
        return False
    serving = [p for p in seen.pods if not p.deleting and p.phase in ("Pending", "Running")]
    if len(serving) != WANTED or len({p.template_hash for p in serving}) != 1:
        return False
    return all(p.ready and p.report and p.report.ready and holds(p, "sql") and holds(p, "support") for p in serving)


def holds(seen, name):
    """Whether a pod has an adapter of this very catalogue."""
    if seen.report is None:
        return False
    same = seen.report.catalogue == DIGEST if seen.report.catalogue else seen.report.generation == GENERATION
    return same and any(a.name == name and a.state is AdapterState.READY for a in seen.report.adapters)


def test_ready_is_claimed_when_it_is_so_and_never_else():
    """Every pair of things that can be wrong, since one often hides behind another."""
    once = [healthy_state(SERVICE), *(fault(healthy_state(SERVICE)) for fault in FAULTS)]
    truths = []
    for seen in [*once, *(fault(seen) for seen in once for fault in FAULTS)]:
        truths.append(truly_ready(good, seen))
        found = build_status(SERVICE, GENERATION, good, seen, {}, NOW)
        assert (condition(found, "Ready")["status"] == "True") == truths[-1], seen
        serving = [p for p in seen.pods if p.ready and p.alive and (p.report is None or p.report.ready)]
        for name in found["models"]:
            assert serving and all(p.report and name in p.report.models for p in serving), seen
        for entry in found["adapters"]:
            assert entry["ready"] == sum(holds(p, entry["name"]) for p in serving), seen
            assert entry["total"] == len(serving) == found["readyReplicas"], seen
    assert 100 < sum(truths) < len(truths) - 1000, "both sides were tried"


@given(verdicts, observations())
def test_ready_is_not_claimed_against_a_verdict(verdict, seen):
    found = build_status(SERVICE, GENERATION, verdict, seen, {}, NOW)
    assert (condition(found, "Ready")["status"] == "True") == truly_ready(verdict, seen)


@settings(max_examples=60)
@given(verdicts, observations(), verdicts, observations())
def test_every_status_is_whole_and_stable(verdict, seen, verdict_before, seen_before):
    before = build_status(SERVICE, GENERATION - 1, verdict_before, seen_before, {}, NOW - timedelta(hours=1))
    found = build_status(SERVICE, GENERATION, verdict, seen, before, NOW)
    assert schema_problems(found) == []
    assert len({c["type"] for c in found["conditions"]}) == len(found["conditions"]) == 7
    assert {c["observedGeneration"] for c in found["conditions"]} == {GENERATION}
    for c in found["conditions"]:
        assert c["reason"] in REASONS and c["message"], c
        kept = condition(before, c["type"])
        assert (c["lastTransitionTime"] == kept["lastTransitionTime"]) == (c["status"] == kept["status"])
    assert build_status(SERVICE, GENERATION, verdict, seen, found, NOW + timedelta(hours=1)) == found
    made = build_events(before, found)
    assert len(set(made)) == len(made) and build_events(found, found) == []
    for event in made:
        assert event.type in ("Normal", "Warning") and event.message
        assert len(event.reason) <= 128 and len(event.message) <= 1024
    # Ready sums up: what another condition denies it does not claim.
    told = conditions_by_type(found)
    if told["Ready"][0] == "True":
        assert all(told[kind][0] == "True" for kind in ("ConfigValid", "Planned", "ModelCached", "Available"))
        assert told["AdaptersReady"][0] == "True" and told["Progressing"] == ("False", "RolloutComplete")


odd_text = st.text(max_size=80) | st.sampled_from(["\ud800", "x" * 5000, "\x00", "a\n b"])
odd_number = st.integers(-(10**30), 10**30)


@settings(max_examples=60)
@given(st.data())
def test_a_pod_that_says_anything_at_all_does_not_break_the_status(data):
    adapters = [
        AdapterStatus(
            name, data.draw(st.sampled_from(AdapterState)), "", data.draw(odd_text), None, data.draw(odd_text)
        )
        for name in ("sql", "support", data.draw(odd_text))
    ]
    memory = MeasuredMemory(1, 1, 1, data.draw(odd_number), data.draw(odd_number), 1, "", "")
    said = pod_report(
        SERVICE,
        reason=data.draw(odd_text),
        ready=data.draw(st.booleans()),
        core_started_at=data.draw(odd_text),
        memory=memory,
        adapters=adapters,
        kv_differences=data.draw(st.lists(odd_text, max_size=3)),
        models=data.draw(st.lists(odd_text, max_size=5)) * data.draw(st.sampled_from([1, 500])),
    )
    pods = (
        ready_pod("s-0", said),
        ready_pod("s-1", said, report_error=data.draw(odd_text), ready=data.draw(st.booleans())),
    )
    found = build_status(SERVICE, GENERATION, good, healthy_state(SERVICE, pods=pods), {}, NOW)
    assert schema_problems(found) == []
    text = json.dumps(found, ensure_ascii=False)
    assert text.encode().decode() == text
    plan = found["plan"].get("measured", {})
    assert all(value < 2**63 for key, value in plan.items() if key != "at")
    assert build_status(SERVICE, GENERATION, good, healthy_state(SERVICE, pods=pods), found, NOW) == found


@settings(max_examples=30)
@given(observations())
def test_a_spec_that_cannot_be_read_claims_nothing(seen):
    found = build_status(None, GENERATION, PlanningResult(spec_error="spec.x: unknown"), seen, {}, NOW)
    assert schema_problems(found) == []
    assert conditions_by_type(found)["Ready"] == conditions_by_type(found)["ConfigValid"] == ("False", "Invalid")
