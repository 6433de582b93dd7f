# SPDX-License-Identifier: Apache-2.0
"""PodEvents: what the kubelet says in events alone, and in no pod's status: why the containers of a pod do not start,
such as a volume that cannot be mounted.

Events are in no watch of ours: they are asked for of pods that have waited for some seconds, now and then.
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
"""Until a pod that waits is asked about, and asked about again: most start before that, and nobody asks."""
_MAX_PODS_PER_PASS = 4
"""Pods of a service that are asked about in one pass; they mostly wait for the same."""
_MAX_CACHED_PODS = 10_000
_SUMMARY_PREFIXES = ("Unable to attach or mount volumes",)
"""Sums up, after two minutes, what another event has the cause of, in an order that changes."""


class PodWarnings:
    """Complaints about pods, remembered for a while."""

    def __init__(self, client: ApiClient, poll_s: float = EVENT_POLL_S) -> None:
        self._client, self._poll_s = client, poll_s
        self._warnings: dict[str, tuple[float, str]] = {}
        """By uid of a pod: when to ask next, and what was said last."""

    async def attach_warnings(self, namespace: str, pods: Iterable[PodState]) -> tuple[PodState, ...]:
        """The same pods, those whose containers do not start with what the kubelet says of it as `waiting`."""
        pods = tuple(pods)
        creating = sorted((pod for pod in pods if pod.creating), key=lambda pod: pod.name)[:_MAX_PODS_PER_PASS]
        warnings = {pod.uid: await self._fetch_warning(namespace, pod) for pod in creating}
        return tuple(replace(pod, waiting=warnings[pod.uid]) if warnings.get(pod.uid) else pod for pod in pods)

    async def _fetch_warning(self, namespace: str, pod: PodState) -> str:
        now = asyncio.get_running_loop().time()
        if len(self._warnings) >= _MAX_CACHED_PODS and pod.uid not in self._warnings:
            # Pods that have started are never asked about again.
            self._warnings.clear()
        poll_at, warning = self._warnings.setdefault(pod.uid, (now + self._poll_s, ""))
        if now >= poll_at:
            try:
                events = await self._client.list(resources.EVENT, namespace, field_selector=f"regarding.uid={pod.uid}")
                warning = latest_warning(events.items)
            except ApiError as error:
                logger.debug("events are not read pod=%s/%s error=%s", namespace, pod.name, error)
            self._warnings[pod.uid] = (now + self._poll_s, warning)
        return warning


def latest_warning(events: Iterable[dict[str, Any]]) -> str:
    """Reason and words of a pod's newest warning; empty: there is none, or something good came after it."""
    relevant = sorted((event for event in events if event.get("reason") != "FailedScheduling"), key=_event_time)
    last_normal = max((_event_time(event) for event in relevant if event.get("type") != "Warning"), default="")
    # Of one second both may be, such as Scheduled and FailedMount.
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
    """When it happened last, RFC 3339 to the second; kubelets' events come from before events.k8s.io."""
    last_observed = (event.get("series") or {}).get("lastObservedTime") or event.get("deprecatedLastTimestamp")
    return str(last_observed or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")[:19]
