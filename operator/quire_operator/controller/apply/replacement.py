# SPDX-License-Identifier: Apache-2.0
"""Replacement of a Deployment by a LeaderWorkerSet, or of a LeaderWorkerSet by a Deployment. Pure.

Kubernetes rolls out changes of one workload, but not from one kind to another. Both have the replicas that maxSurge and
maxUnavailable permit, computed anew in each pass from what exists, until the old one has no pods. Called by
child_objects.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quire_operator.api.workload_spec import RolloutSpec
from quire_operator.controller.status.groups import groups_of
from quire_operator.controller.status.observed_state import PodState
from quire_operator.render.leader_worker_set import scaled


@dataclass(frozen=True, slots=True)
class Replacement:
    """Replicas of the two workloads."""

    new: int
    old: int
    is_complete: bool
    """Whether the old workload has no pods and can be deleted."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of one workload that exist."""

    desired: int
    """Number in its spec."""
    available: Sequence[bool]
    """For each that is not being deleted, whether it is ready for minReadySeconds. Those of a LeaderWorkerSet are
    sorted by index."""
    existing: int
    """Number of those that are not being deleted."""
    can_choose: bool
    """Whether the workload deletes unready replicas first. A LeaderWorkerSet deletes those with the highest indexes."""

    def available_after(self, replicas: int) -> int:
        """Return how many available ones are left if the workload is scaled to `replicas`."""
        return min(replicas, sum(self.available)) if self.can_choose else sum(self.available[:replicas])


def replicas_of(workload: Mapping[str, Any] | None, pods: Iterable[PodState], seconds: int, now: datetime) -> Replicas:
    """Return the replicas of a Deployment or LeaderWorkerSet. `pods` are all pods of the service, `seconds` is
    minReadySeconds."""

    def is_available(ready: bool, since: str) -> bool:
        age_s = (now - datetime.fromisoformat(since)).total_seconds() if since else 0.0
        return ready and age_s >= seconds

    if workload is None:
        return Replicas(0, [], 0, can_choose=True)
    spec = workload["spec"]
    group = spec.get("leaderWorkerTemplate")
    if group is None:
        alive = [pod for pod in pods if pod.group is None and pod.alive]
        found = [is_available(pod.ready, pod.ready_at) for pod in alive]
        return Replicas(spec.get("replicas", 1), found, len(found), can_choose=True)
    groups = [group for group in groups_of(pods, group.get("size", 1)) if group.is_alive]
    available = [False] * (max((group.index for group in groups), default=-1) + 1)
    for group in groups:
        available[group.index] = is_available(group.is_ready, group.ready_since)
    return Replicas(spec.get("replicas", 1), available, len(groups), can_choose=False)


def replace_workload(rollout: RolloutSpec, desired: int, new: Replicas, old: Replicas) -> Replacement:
    """Return the replicas that both workloads get now, if the service wants `desired` of the new one.

    There are never more than `desired` + maxSurge in total, and never fewer available ones than `desired` -
    maxUnavailable, unless there are fewer already.
    """
    surge = scaled(rollout.maxSurge, desired, rounds_up=True)
    unavailable = scaled(rollout.maxUnavailable, desired, rounds_up=False)
    if not surge and not unavailable:
        unavailable = 1
    num_new = sum(new.available)
    needed = min(desired - unavailable, num_new + sum(old.available))
    fewest = (k for k in range(old.desired + 1) if old.available_after(k) + num_new >= needed)
    num_old = next(fewest, old.desired)
    # Those that are removed now make room in a later pass, when their pods are being deleted. An unready group that
    # cannot be removed before a ready one takes no room. Otherwise, nothing would ever be replaced.
    room = desired + surge - (max(old.desired, old.existing) if old.can_choose else sum(old.available))
    return Replacement(min(desired, max(room, new.desired)), num_old, is_complete=not num_old and not old.existing)
