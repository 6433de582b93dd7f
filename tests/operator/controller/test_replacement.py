# SPDX-License-Identifier: Apache-2.0
"""Replacement of a workload by one of another kind, within maxSurge and maxUnavailable in any order of events."""

from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st
from support.observed_factories import NOW, ready_pod

from quire_operator.api.workload_spec import RolloutSpec
from quire_operator.controller.apply.replacement import Replicas, replace_workload, replicas_of
from quire_operator.render.leader_worker_set import scaled


def replicas(desired, ready, can_choose):
    return Replicas(desired, ready, len(ready), can_choose)


def scale(ready, count, can_choose):
    """What a controller leaves when it scales down, and adds, not ready, when it scales up."""
    kept = sorted(ready, reverse=True)[:count] if can_choose else ready[:count]
    return kept + [False] * (count - len(kept))


@settings(max_examples=200)
@given(
    desired=st.integers(0, 6),
    old=st.lists(st.booleans(), max_size=6),
    surge=st.sampled_from([0, 1, 2, "50%", "100%"]),
    unavailable=st.sampled_from([0, 1, 3, "25%"]),
    old_is_deployment=st.booleans(),
    data=st.data(),
)
def test_it_ends_and_never_exceeds_its_bounds(desired, old, surge, unavailable, old_is_deployment, data):
    rollout = RolloutSpec(maxSurge=surge, maxUnavailable=unavailable)
    most = max(desired + scaled(surge, desired, rounds_up=True), len(old))
    allowed = scaled(unavailable, desired, rounds_up=False)
    if not allowed and not scaled(surge, desired, rounds_up=True):
        allowed = 1
    new: list[bool] = []
    for _ in range(60):
        before = sum(new) + sum(old)
        both = replicas(len(new), new, not old_is_deployment), replicas(len(old), old, old_is_deployment)
        result = replace_workload(rollout, desired, *both)
        new, old = scale(new, result.new, not old_is_deployment), scale(old, result.old, old_is_deployment)
        assert len(new) + (len(old) if old_is_deployment else sum(old)) <= most
        assert sum(new) + sum(old) >= min(desired - allowed, before)
        if result.is_complete and len(new) == desired:
            return
        # Some pods become ready, the first of them at least, as in a cluster with room.
        new = [ready or i == 0 or data.draw(st.booleans()) for i, ready in enumerate(new)]
        new[: sum(new) + 1] = [True] * len(new[: sum(new) + 1])
    raise AssertionError((new, old))


def test_replicas_are_available_after_min_ready_seconds():
    since = datetime(2026, 1, 2, 3, 4, 0, tzinfo=UTC).isoformat().replace("+00:00", "Z")
    group = {"spec": {"replicas": 2, "leaderWorkerTemplate": {"size": 2}}}
    pods = [
        ready_pod("s-0", group=0, ready_at=since),
        ready_pod("s-0-1", group=0, rank=1, ready_at=since),
        ready_pod("s-1", group=1, ready_at=since),
        ready_pod("s-x-y", ready_at=since),
    ]
    assert replicas_of(group, pods, 5, NOW) == Replicas(2, [True, False], 2, can_choose=False)
    assert replicas_of(group, pods, 6, NOW).available == [False, False]
    assert replicas_of({"spec": {"replicas": 1}}, pods, 0, NOW) == Replicas(1, [True], 1, can_choose=True)
    assert replicas_of(None, pods, 0, NOW).existing == 0
