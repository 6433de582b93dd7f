# SPDX-License-Identifier: Apache-2.0
"""Verifier: compares what is cached with what the API server lists, from time to time: a watch that has silently gone
deaf is otherwise found out by users. Only metadata is listed.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.errors import ApiError
from quire_operator.kube.kinds import Kind
from quire_operator.kube.watch import Watch
from quire_operator.reconcile.cache import SELECTOR, Cache
from quire_operator.reconcile.metrics import Metrics
from quire_spec.errors import Internal

log = logging.getLogger(__name__)

_GRACE_S = 30.0
"""For events that are on their way."""

Place = tuple[str, str]


class Diverged(Internal):
    """The cache is not what the API server has, and does not become it: start again."""


class Timing(Protocol):
    """Which part of Settings is used here."""

    @property
    def verify_s(self) -> float:
        """Between comparisons."""
        ...

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that are served; empty: all."""
        ...


class Verifier:
    """Comparisons of one cache with the API server."""

    def __init__(
        self,
        client: Client,
        cache: Cache,
        watches: Sequence[Watch],
        metrics: Metrics,
        timing: Timing,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._client, self._cache, self._watches, self._metrics = client, cache, watches, metrics
        self._timing, self._grace_s = timing, grace_s

    async def run(self) -> None:
        """Never returns; ends by cancellation, or with Diverged."""
        while True:
            await asyncio.sleep(self._timing.verify_s)
            await self.verify()

    async def verify(self) -> None:
        """Compare all kinds once, less those that the API server does not list now.

        Raises:
            Diverged: objects of some kind are missing or too old for good.
        """
        namespaces: tuple[str | None, ...] = self._timing.namespaces or (None,)
        wanted = [(kinds.LLM_SERVICE, namespace, "") for namespace in namespaces]
        wanted += [(watch.kind, watch.namespace, SELECTOR) for watch in self._watches]
        for kind, namespace, labels in wanted:
            try:
                await self._verify(kind, namespace, labels)
            except ApiError as error:
                self._metrics.verified.labels("unknown").inc()
                log.warning("cache was not verified kind=%s error=%s", kind.name, error)

    async def _verify(self, kind: Kind, namespace: str | None, labels: str) -> None:
        behind = await self._behind(kind, namespace, labels)
        if behind:
            await asyncio.sleep(self._grace_s)
            behind &= await self._behind(kind, namespace, labels, {place for place, _ in behind})
        self._metrics.verified.labels("diverged" if behind else "same").inc()
        if behind:
            names = ", ".join("/".join(place) for place, _ in sorted(behind)[:5])
            raise Diverged(f"the watch of {kind.plural} went deaf: {len(behind)} are not as listed: {names}")

    async def _behind(
        self, kind: Kind, namespace: str | None, labels: str, only: set[Place] | None = None
    ) -> set[tuple[Place, str]]:
        """Places that are cached otherwise than listed, with the version that is cached."""
        found = await self._client.list(kind, namespace, labels, metadata_only=True)
        listed = {(m["metadata"].get("namespace", ""), m["metadata"]["name"]): m["metadata"] for m in found.items}
        cached = {(e.namespace, e.name): e for e in self._cache.all(kind) if namespace in (None, e.namespace)}
        result = set()
        for place in (set(listed) | set(cached)) if only is None else only:
            entry, meta = cached.get(place), listed.get(place)
            if entry is None and meta is None:
                continue
            same = entry is not None and meta is not None and entry.uid == meta["uid"]
            if same and entry is not None and meta is not None and _at_least(entry.version, meta["resourceVersion"]):
                continue
            result.add((place, entry.version if entry else ""))
        return result


def _at_least(cached: str, listed: str) -> bool:
    if cached.isdecimal() and listed.isdecimal():
        return int(cached) >= int(listed)
    return cached == listed
