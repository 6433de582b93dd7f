# SPDX-License-Identifier: Apache-2.0
"""Groups of pods of a LeaderWorkerSet: which are complete and ready, and what is wrong with the others. Pure.

The status of a LeaderWorkerSet does not tell which generation it belongs to, so the pods are counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quire_operator.controller.status.observed_state import PodState

INCOMPLETE_AFTER_S = 60.0
"""A group of which only some pods have a node for this many seconds counts as incomplete: its GPUs are idle."""
OVERDUE_AFTER_S = 30.0
"""A pod that exists for this many seconds after it should have ended is on a node that does not answer."""
CRASH_LOOP_AFTER = 3
"""A group that was created anew this many times without serving for a while counts as crash-looping."""
_STABLE_S = 600.0
"""The count of a group that serves for this many seconds begins again."""
_MAX_ERROR = 256
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"


@dataclass(frozen=True, slots=True)
class Group:
    """The pods of one replica of a LeaderWorkerSet."""

    index: int
    pods: tuple[PodState, ...]
    """Its pods by their rank; some may not exist."""
    size: int
    """Number of pods that it should have."""

    @property
    def leader(self) -> PodState | None:
        """The pod that serves clients, if it exists."""
        return next((pod for pod in self.pods if pod.rank == 0), None)

    @property
    def is_alive(self) -> bool:
        """Whether the leader exists and is not being deleted."""
        return self.leader is not None and self.leader.alive

    @property
    def is_ready(self) -> bool:
        """Whether all pods are ready according to the kubelet, and were made from the same templates."""
        alive = [pod for pod in self.pods if pod.alive]
        return len(alive) == self.size and all(p.ready for p in alive) and len({p.template_hash for p in alive}) == 1

    @property
    def ready_since(self) -> str:
        """Time at which the last of its pods became ready, in the form of RFC 3339; "" if it is not known."""
        return max((pod.ready_at for pod in self.pods), default="")


def groups_of(pods: Iterable[PodState], size: int) -> list[Group]:
    """Return the groups to which pods belong, by set and index. Pods of a Deployment belong to none. With roles, each
    revision of a role has a set."""
    by_index: dict[tuple[str, int], list[PodState]] = {}
    for pod in pods:
        if pod.group is not None:
            by_index.setdefault((pod.group_set, pod.group), []).append(pod)
    return [
        Group(index, tuple(sorted(members, key=lambda pod: (pod.rank, pod.name))), size)
        for (_, index), members in sorted(by_index.items())
    ]


def lost_node(group: Group, now: datetime) -> str:
    """Return a message about a pod that does not end because its node does not answer; "" if there is none.

    The leader of such a group does not end before its workers, so it is never the cause if one of them is.
    """
    for pod in (*group.pods[1:], *group.pods[:1]):
        if pod.deleting and pod.node and _age_s(pod.ends_at, now) > OVERDUE_AFTER_S:
            return (
                f"node {pod.node} does not answer, so that pod {pod.name} does not end and group {group.index} cannot "
                f"be created anew; delete the node, or give it the taint {_OUT_OF_SERVICE}"
            )
    return ""


def incomplete(group: Group, now: datetime) -> str:
    """Return a message about a group of which only some pods have had a node for a minute; "" otherwise."""
    bound = [pod for pod in group.pods if pod.alive and pod.node]
    if not group.is_alive or not 0 < len(bound) < group.size:
        return ""
    if min(_age_s(pod.created_at, now) for pod in group.pods) <= INCOMPLETE_AFTER_S:
        return ""
    waiting = next((pod for pod in group.pods if pod.alive and not pod.node), None)
    cause = "" if waiting is None else f"; pod {waiting.name}: {waiting.unschedulable or 'is not scheduled'}"
    return f"only {len(bound)} of {group.size} pods of group {group.index} have a node, and wait for the others{cause}"


def seconds_until_incomplete(group: Group, now: datetime) -> float | None:
    """Return the seconds until `incomplete` can change without an event; None if it cannot."""
    bound = sum(bool(pod.node) for pod in group.pods if pod.alive)
    ends = [_age_s(pod.ends_at, now) for pod in group.pods if pod.deleting and pod.node]
    due = [OVERDUE_AFTER_S - age for age in ends]
    if group.is_alive and 0 < bound < group.size:
        due.append(INCOMPLETE_AFTER_S - min(_age_s(pod.created_at, now) for pod in group.pods))
    return min((seconds + 1 for seconds in due if seconds > -1), default=None)


def update_history(
    previous: Sequence[Mapping[str, Any]], groups: Sequence[Group], now: datetime
) -> list[dict[str, Any]]:
    """Return the entries of status.groups.history: how often the leader of each group was replaced by one of the same
    template.

    An entry exists while a group is not ready, and until it has been ready for a while after it was created anew. It is
    part of the status, so that a restart of the operator does not lose it.
    """
    before = {entry["group"]: entry for entry in previous}
    entries = [_entry(before.get(group.index), group, now) for group in groups]
    found = {group.index for group in groups}
    # Between two leaders there is no pod.
    return [*filter(None, entries), *(dict(entry) for index, entry in before.items() if index not in found)][:64]


def _entry(previous: Mapping[str, Any] | None, group: Group, now: datetime) -> dict[str, Any] | None:
    leader = group.leader
    if leader is None:
        return None if previous is None else dict(previous)
    count, error, rank = 0, "", 0
    if previous is not None and previous["template"] == leader.template_hash:
        count, error, rank = previous["recreated"], previous.get("error", ""), previous.get("rank", 0)
        count += previous["leader"] != leader.uid
    if group.is_ready and (not count or _age_s(group.ready_since, now) > _STABLE_S):
        return None
    for pod in group.pods:
        if ended := pod.terminated:
            lines = [line for line in ended.message.strip().splitlines() if line.strip()]
            text = f"{ended.reason or 'Error'} (exit code {ended.exit_code})"
            error, rank = f"{text}: {lines[-1].strip()}" if lines else text, pod.rank
    entry = {"group": group.index, "leader": leader.uid, "template": leader.template_hash, "recreated": count}
    return entry | ({"rank": rank, "error": error[:_MAX_ERROR]} if error else {})


def crash_loop(history: Iterable[Mapping[str, Any]]) -> str:
    """Return a message about the group that was created anew most often; "" if none was created anew often enough."""
    entry = max(history, key=lambda entry: entry["recreated"], default=None)
    if entry is None or entry["recreated"] < CRASH_LOOP_AFTER:
        return ""
    cause = f"; rank {entry['rank']} ended with {entry['error']}" if entry.get("error") else ""
    return f"group {entry['group']} was created anew {entry['recreated']} times, because a pod of it restarted{cause}"


def rank_loop(group: Group) -> str:
    """Return a message about a rank that leaves the group again and again, while its pod stays; "" if none does."""
    for pod in group.pods:
        core = pod.report.processes.get("core") if pod.report is not None and not pod.report.ready else None
        error = pod.report.reason if pod.report and core and core.restarts >= CRASH_LOOP_AFTER else pod.rank_error
        if pod.alive and error:
            return f"rank {pod.rank} of group {group.index} fails again and again: {error}"
    return ""


def _age_s(time: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(time)).total_seconds() if time else 0.0
