# SPDX-License-Identifier: Apache-2.0
"""Pod warnings: problems that are reported only in events. For example, a volume cannot be mounted, or a quota does not
allow the pod of a Job.

The operator does not watch events. If the containers of a pod have not started after some seconds, or a Job has no pod,
it lists the events of that object. Called by the state observer and the checkpoint store.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quire_operator.controller.status.observed_state import PodState
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiError

logger = logging.getLogger(__name__)

EVENT_POLL_S = 10.0
"""The events of a pod are listed for the first time after this many seconds, and then again at this interval. Most pods
start in less time.
"""
_MAX_PODS_PER_PASS = 4
"""In one pass, the events of at most this many pods of a service are listed. The pods of one service usually wait for
the same reason.
"""
_MAX_CACHED_PODS = 10_000
_SUMMARY_PREFIXES = ("Unable to attach or mount volumes",)
"""An event is skipped if its message starts with one of these texts, because another event already reports the cause.
The kubelet sends such an event after two minutes, and the order of the parts in its message changes.
"""


class PodWarnings:
    """The latest warning about each pod or Job. Warnings are cached for some seconds."""

    def __init__(self, client: ApiClient, poll_s: float = EVENT_POLL_S) -> None:
        self._client, self._poll_s = client, poll_s
        self._queue_messages: dict[str, tuple[float, dict[str, str]]] = {}
        """For each namespace: the time at which its Workloads are listed next, and their messages."""
        self._warnings: dict[str, tuple[float, str]] = {}
        """For each object, by its uid: the time at which its events are listed next, and its last warning."""

    async def attach_warnings(self, namespace: str, pods: Iterable[PodState]) -> tuple[PodState, ...]:
        """Return the same pods. If the containers of a pod do not start, its field `waiting` contains the warning of
        the kubelet. If Kueue holds a pod back, its field `gate_message` contains the reason.
        """
        pods = tuple(pods)
        creating = sorted((pod for pod in pods if pod.creating), key=lambda pod: pod.name)[:_MAX_PODS_PER_PASS]
        warnings = {pod.uid: await self.fetch_warning(namespace, pod.name, pod.uid) for pod in creating}
        if any(pod.is_gated_by_kueue for pod in pods):
            messages = await self._fetch_queue_messages(namespace)
            pods = tuple(
                replace(pod, gate_message=messages.get(pod.uid if pod.group is None else pod.group_set, ""))
                if pod.gates
                else pod
                for pod in pods
            )
        return tuple(replace(pod, waiting=warnings[pod.uid]) if warnings.get(pod.uid) else pod for pod in pods)

    async def _fetch_queue_messages(self, namespace: str) -> dict[str, str]:
        """Return the reasons why Kueue keeps objects waiting; see `queue_messages`."""
        now = asyncio.get_running_loop().time()
        poll_at, messages = self._queue_messages.get(namespace, (now, {}))
        if now >= poll_at:
            for workload in resources.KUEUE_WORKLOADS:
                try:
                    messages = queue_messages((await self._client.list(workload, namespace)).items)
                    break
                except ApiError as error:
                    # A release of Kueue does not serve all versions, and the permission is optional.
                    logger.debug("could not list workloads namespace=%s error=%s", namespace, error)
            self._queue_messages[namespace] = (now + self._poll_s, messages)
        return messages

    async def fetch_warning(self, namespace: str, name: str, uid: str) -> str:
        """Return the latest warning about a pod or a Job. The text is empty if there is none, or during the first
        seconds.
        """
        now = asyncio.get_running_loop().time()
        if len(self._warnings) >= _MAX_CACHED_PODS and uid not in self._warnings:
            # Entries of pods that have started are not used again.
            self._warnings.clear()
        poll_at, warning = self._warnings.setdefault(uid, (now + self._poll_s, ""))
        if now >= poll_at:
            try:
                events = await self._client.list(resources.EVENT, namespace, field_selector=f"regarding.uid={uid}")
                warning = latest_warning(events.items)
            except ApiError as error:
                logger.debug("could not list events object=%s/%s error=%s", namespace, name, error)
            self._warnings[uid] = (now + self._poll_s, warning)
        return warning


def queue_messages(workloads: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the message of each Workload of Kueue that has no quota yet, by the uids of its owners, and by the name if
    an owner is a LeaderWorkerSet. Pods of groups have only the name of their set in a label, and the sets of roles
    belong to a DisaggregatedSet.
    """
    messages: dict[str, str] = {}
    for workload in workloads:
        conditions = {c["type"]: c for c in workload.get("status", {}).get("conditions") or ()}
        waiting: dict[str, Any] = next(
            (c for c in map(conditions.get, ("QuotaReserved", "Admitted")) if c and c.get("status") != "True"), {}
        )
        for owner in workload["metadata"].get("ownerReferences") or ():
            # A LeaderWorkerSet owns a Workload for each group, and some of them can have quota.
            names = [owner["name"]] if owner.get("kind") == resources.LEADER_WORKER_SET.kind else []
            for key in (owner["uid"], *names):
                messages[key] = str(waiting.get("message", "")) or messages.get(key, "")
    return messages


def latest_warning(events: Iterable[dict[str, Any]]) -> str:
    """Return the reason and the note of the newest warning about an object.

    The text is empty if there is no warning, or if a normal event is newer than the warning.
    """
    relevant = sorted((event for event in events if event.get("reason") != "FailedScheduling"), key=_event_time)
    last_normal = max((_event_time(event) for event in relevant if event.get("type") != "Warning"), default="")
    # Both events can have a timestamp in the same second, for example Scheduled and FailedMount.
    warnings = [event for event in relevant if event.get("type") == "Warning" and _event_time(event) >= last_normal]
    if not warnings:
        return ""
    cause = next(
        (event for event in reversed(warnings) if not _note(event).startswith(_SUMMARY_PREFIXES)), warnings[-1]
    )
    return ": ".join(part for part in (cause.get("reason", ""), _note(cause)) if part)


def _note(event: dict[str, Any]) -> str:
    return str(event.get("note") or "")


def _event_time(event: dict[str, Any]) -> str:
    """Return the time at which an event last occurred, in the form of RFC 3339 with whole seconds. The old fields are
    read too, because kubelets still write them.
    """
    last_observed = (event.get("series") or {}).get("lastObservedTime") or event.get("deprecatedLastTimestamp")
    return str(last_observed or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")[:19]
