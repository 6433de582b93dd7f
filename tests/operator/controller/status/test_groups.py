# SPDX-License-Identifier: Apache-2.0
"""The status of groups of pods: which are ready, and what is wrong with the others."""

from dataclasses import replace
from datetime import timedelta

import pytest
from support.observed_factories import (
    NOW,
    POD_SPEC,
    checked_status,
    condition,
    desired_service,
    healthy_state,
    pod_report,
    ready_pod,
    terminated_container,
)

from quire_spec.documents.pod_status import ProcessState, ProcessStatus

SPEC = "replicas: 2\nengine: {pipelineParallelSize: 2}\n"
GROUPS = desired_service(SPEC)
LABELS = {"quire.dev/template": "new"}
SET = {
    "kind": "LeaderWorkerSet",
    "metadata": {"name": "s"},
    "spec": {
        "replicas": 2,
        "leaderWorkerTemplate": {"size": 2, "leaderTemplate": {"metadata": {"labels": LABELS}, "spec": POD_SPEC}},
    },
}


def seconds_ago(seconds):
    return (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def member(group, rank, /, **changes):
    name = f"s-{group}" if rank == 0 else f"s-{group}-{rank}"
    report = changes.pop("report", pod_report(GROUPS) if rank == 0 else None)
    return ready_pod(
        name, report, **{"group": group, "rank": rank, "node": "n", "created_at": seconds_ago(600)} | changes
    )


def status_of(*changed, previous=None, **changes):
    """The status with two groups of two pods, of which some differ."""
    by_name = {pod.name: pod for pod in (*(member(g, r) for g in (0, 1) for r in (0, 1)), *changed)}
    servers, workers = ([p for p in by_name.values() if bool(p.rank) == is_worker] for is_worker in (False, True))
    seen = healthy_state(GROUPS, workload=SET, pods=tuple(servers), worker_pods=tuple(workers), **changes)
    return checked_status(seen, service=GROUPS, previous=previous)


def problem(status):
    found = condition(status, "Progressing")
    assert (condition(status, "Ready")["reason"], condition(status, "Ready")["status"]) == (found["reason"], "False")
    return found["reason"], found["message"]


NOT_READY = {"ready": False, "started_at": ""}
UNBOUND = NOT_READY | {"node": "", "unschedulable": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}


def test_all_groups_are_ready():
    found = status_of()
    assert condition(found, "Ready")["status"] == "True"
    assert found["groups"] == {"size": 2, "wanted": 2, "ready": 2}
    assert (found["replicas"], found["readyReplicas"], found["updatedReplicas"]) == (2, 2, 2)


def test_a_group_needs_all_its_pods_of_one_template():
    for pod in (member(1, 1, **NOT_READY), member(1, 1, template_hash="old"), member(1, 1, deleting=True)):
        found = status_of(pod)
        assert found["groups"]["ready"] == 1 and condition(found, "Ready")["status"] == "False"
        assert condition(found, "Available")["status"] == "True"


@pytest.mark.parametrize(("age_s", "reason"), [(50, "InsufficientGPU"), (70, "GangIncomplete")])
def test_a_group_that_is_partly_bound_for_a_minute_is_incomplete(age_s, reason):
    found, message = problem(
        status_of(member(1, 1, **UNBOUND, created_at=seconds_ago(age_s)), member(1, 0, **NOT_READY))
    )
    assert found == reason and "2 Insufficient nvidia.com/gpu" in message
    if reason == "GangIncomplete":
        assert "only 1 of 2 pods of group 1 have a node, and wait for the others; pod s-1-1: " in message


def test_a_group_without_any_node_is_not_incomplete():
    """It holds nothing idle."""
    assert problem(status_of(member(1, 1, **UNBOUND), member(1, 0, **UNBOUND)))[0] == "InsufficientGPU"


def test_a_group_in_a_queue_waits_for_quota():
    gated = NOT_READY | {"node": "", "gates": ("kueue.x-k8s.io/admission",), "gate_message": "no quota"}
    reason, message = problem(status_of(member(1, 1, **gated), member(1, 0, **NOT_READY)))
    assert (reason, message.endswith("kueue.x-k8s.io/admission is removed: no quota")) == ("WaitingForQuota", True)


def test_a_lost_node_is_named_with_its_fix():
    gone = {"deleting": True, "ends_at": seconds_ago(31), **NOT_READY}
    # The leader waits for its worker, and is on a node that is well.
    pods = member(1, 0, **gone), member(1, 1, **gone | {"node": "lost"})
    reason, message = problem(status_of(*pods))
    assert reason == "GroupNodeLost"
    assert "node lost does not answer, so that pod s-1-1 does not end" in message and "out-of-service" in message
    assert problem(status_of(*(replace(pod, ends_at=seconds_ago(29)) for pod in pods)))[0] != "GroupNodeLost"


def test_a_crash_loop_is_counted_in_the_status():
    """A restart of the operator loses nothing, and pods of another template begin anew."""
    status = None
    killed = terminated_container("server", 137, "OOMKilled", "")
    for i in range(5):
        leader = member(1, 0, uid=f"u{i}", **NOT_READY)
        status = status_of(leader, member(1, 1, terminated=killed, **NOT_READY), previous=status)
        (entry,) = status["groups"]["history"]
        assert (entry["group"], entry["recreated"], entry["rank"]) == (1, i, 1)
        assert (problem(status)[0] == "GroupCrashLooping") == (i >= 3)
    message = problem(status)[1]
    assert message.endswith(
        "created anew 4 times, because a pod of it restarted; rank 1 ended with OOMKilled (exit code 137)"
    )
    ready = [member(1, rank, uid="u4", ready_at=seconds_ago(601)) for rank in (0, 1)]
    assert "history" not in status_of(*ready, previous=status)["groups"]
    ready = [member(1, rank, uid="u4", ready_at=seconds_ago(9)) for rank in (0, 1)]
    soon = status_of(*ready, previous=status)
    assert condition(soon, "Ready")["status"] == "True" and soon["groups"]["history"][0]["recreated"] == 4
    other = [member(1, rank, uid="u9", template_hash="newer", **NOT_READY) for rank in (0, 1)]
    assert status_of(*other, previous=status)["groups"]["history"][0]["recreated"] == 0


def test_groups_with_roles_are_those_of_the_newest_revision():
    """Each revision of a role has a LeaderWorkerSet, whose groups have the same indexes."""
    service = desired_service(
        "engine: {pipelineParallelSize: 2, kvCacheOffloading: {memory: 1Gi}}\n"
        "disaggregation: {prefill: {replicas: 1}, decode: {replicas: 1}}\n"
    )
    group = SET["spec"]["leaderWorkerTemplate"] | {"workerTemplate": {}}
    roles = [{"name": name, "spec": {"replicas": 1, "leaderWorkerTemplate": group}} for name in ("prefill", "decode")]
    workload = {"kind": "DisaggregatedSet", "metadata": {"name": "s"}, "spec": {"roles": roles}}

    def pod(role, revision, rank, **changes):
        own = {"role": role, "group_set": f"s-0-{revision}-{role}", "template_hash": revision, "name": ""}
        report = pod_report(service) if rank == 0 else None
        return member(0, rank, report=report, **own | {"name": f"s-0-{revision}-{role}-0-{rank}"} | changes)

    def status(*pods, previous=None):
        servers, workers = ([p for p in pods if bool(p.rank) == is_worker] for is_worker in (False, True))
        seen = healthy_state(service, workload=workload, pods=tuple(servers), worker_pods=tuple(workers))
        return checked_status(seen, service=service, previous=previous)

    new = [pod(role, "new", rank) for role in ("prefill", "decode") for rank in (0, 1)]
    found = status(*new)
    assert condition(found, "Ready")["status"] == "True", found["conditions"]
    assert found["groups"] == {"size": 2, "wanted": 2, "ready": 2}
    assert condition(found, "Available")["message"] == "1 of 1 prefill groups and 1 of 1 decode groups serve"
    counts = {"desiredReplicas": 1, "replicas": 1, "readyReplicas": 1, "updatedReplicas": 1}
    assert found["roles"] == [{"name": name, **counts} for name in ("prefill", "decode")]

    old = [pod("decode", "old", rank) for rank in (0, 1)]
    found = status(*new, *old)
    assert condition(found, "Ready")["reason"] == "Updating" and found["groups"]["ready"] == 2
    assert found["roles"][1] == {"name": "decode", **counts, "replicas": 2, "readyReplicas": 2}
    assert problem(status(*new[:3], replace(new[3], ready=False), *old))[1].startswith("prefill: 1 of 1 groups have")
    found = status(*new[:3], *old)
    assert found["groups"]["ready"] == 1, "a worker of the old revision does not complete a group of the new one"

    found = None
    for i in range(4):
        prefill = [pod("prefill", "new", rank, uid=f"u{i}{rank}", **NOT_READY) for rank in (0, 1)]
        found = status(*prefill, *new[2:], previous=found)
        (entry,) = found["groups"]["history"]
        assert (entry["role"], entry["group"], entry["recreated"]) == ("prefill", 0, i)
    reason, message = problem(found)
    assert reason == "GroupCrashLooping" and "group 0 was created anew 3 times" in message
    assert "decode: 1 of 1 groups have this generation and are ready" in message


def test_a_rank_that_fails_in_its_pod_is_named():
    loses = member(1, 1, **NOT_READY, rank_error="weights of layer 3 are missing")
    reason, message = problem(status_of(loses))
    assert reason == "GroupCrashLooping"
    assert message.endswith("rank 1 of group 1 fails again and again: weights of layer 3 are missing")
    core = {"core": ProcessStatus(ProcessState.STARTING, None, None, restarts=3)}
    report = pod_report(GROUPS, ready=False, reason="core: no memory", processes=core)
    reason, message = problem(status_of(member(0, 0, **NOT_READY, report=report)))
    assert (reason, message.endswith("rank 0 of group 0 fails again and again: core: no memory")) == (
        "GroupCrashLooping",
        True,
    )


def test_a_deployment_that_is_being_replaced_delays_the_completion():
    old = {"kind": "Deployment", "metadata": {}, "spec": {"replicas": 1}, "status": {"replicas": 1}}
    reason, message = problem(status_of(replaced_workload=old))
    assert reason == "Updating" and message.endswith("; the Deployment that is being replaced has 1")
