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

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.errors import ApiError
from quire_operator.reconcile.observed import Pod

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""Until a pod that waits is asked about, and asked about again: most start before that, and nobody asks."""
_AT_A_TIME = 4
"""Pods of a service that are asked about in one pass; they mostly wait for the same."""
_MOST = 10_000
_GENERAL = ("Unable to attach or mount volumes",)
"""Sums up, after two minutes, what another event has the cause of, in an order that changes."""


class PodEvents:
    """Complaints about pods, remembered for a while."""

    def __init__(self, client: Client, look_s: float = LOOK_S) -> None:
        self._client, self._look_s = client, look_s
        self._known: dict[str, tuple[float, str]] = {}
        """By uid of a pod: when to ask next, and what was said last."""

    async def told(self, namespace: str, pods: Iterable[Pod]) -> tuple[Pod, ...]:
        """The same pods, those whose containers do not start with what the kubelet says of it as `waiting`."""
        pods = tuple(pods)
        asked = sorted((pod for pod in pods if pod.creating), key=lambda pod: pod.name)[:_AT_A_TIME]
        words = {pod.uid: await self._words(namespace, pod) for pod in asked}
        return tuple(replace(pod, waiting=words[pod.uid]) if words.get(pod.uid) else pod for pod in pods)

    async def _words(self, namespace: str, pod: Pod) -> str:
        now = asyncio.get_running_loop().time()
        if len(self._known) >= _MOST and pod.uid not in self._known:
            # Pods that have started are never asked about again.
            self._known.clear()
        due, words = self._known.setdefault(pod.uid, (now + self._look_s, ""))
        if now >= due:
            try:
                found = await self._client.list(kinds.EVENT, namespace, fields=f"regarding.uid={pod.uid}")
                words = complaint(found.items)
            except ApiError as error:
                log.debug("events are not read pod=%s/%s error=%s", namespace, pod.name, error)
            self._known[pod.uid] = (now + self._look_s, words)
        return words


def complaint(events: Iterable[dict[str, Any]]) -> str:
    """Reason and words of a pod's newest warning; empty: there is none, or something good came after it."""
    known = sorted((event for event in events if event.get("reason") != "FailedScheduling"), key=_when)
    good = max((_when(event) for event in known if event.get("type") != "Warning"), default="")
    # Of one second both may be, such as Scheduled and FailedMount.
    bad = [event for event in known if event.get("type") == "Warning" and _when(event) >= good]
    if not bad:
        return ""
    cause = next((event for event in reversed(bad) if not _note(event).startswith(_GENERAL)), bad[-1])
    return ": ".join(part for part in (cause.get("reason", ""), _note(cause)) if part)


def _note(event: dict[str, Any]) -> str:
    return str(event.get("note") or "")


def _when(event: dict[str, Any]) -> str:
    """When it happened last, RFC 3339 to the second; kubelets' events come from before events.k8s.io."""
    found = (event.get("series") or {}).get("lastObservedTime") or event.get("deprecatedLastTimestamp")
    return str(found or event.get("eventTime") or event["metadata"].get("creationTimestamp") or "")[:19]
