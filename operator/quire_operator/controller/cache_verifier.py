# SPDX-License-Identifier: Apache-2.0
"""Verifier: compares what is cached with what the API server lists, from time to time: a watch that has silently gone
deaf is otherwise found out by users. Only metadata is listed.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from quire_operator.controller.metrics import ControllerMetrics
from quire_operator.controller.object_cache import LABEL_SELECTOR, ObjectCache
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiError
from quire_operator.kube.reflector import Reflector
from quire_operator.kube.resources import Resource
from quire_spec.errors import Internal

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
"""For events that are on their way."""

ObjectName = tuple[str, str]


class CacheDiverged(Internal):
    """The cache is not what the API server has, and does not become it: start again."""


class VerifierSettings(Protocol):
    """Which part of Settings is used here."""

    @property
    def verify_interval_s(self) -> float:
        """Between comparisons."""
        ...

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that are served; empty: all."""
        ...


class CacheVerifier:
    """Comparisons of one cache with the API server."""

    def __init__(
        self,
        client: ApiClient,
        cache: ObjectCache,
        reflectors: Sequence[Reflector],
        metrics: ControllerMetrics,
        settings: VerifierSettings,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._client, self._cache, self._reflectors, self._metrics = client, cache, reflectors, metrics
        self._settings, self._grace_s = settings, grace_s

    async def run(self) -> None:
        """Never returns; ends by cancellation, or with Diverged."""
        while True:
            await asyncio.sleep(self._settings.verify_interval_s)
            await self.verify()

    async def verify(self) -> None:
        """Compare all kinds once, less those that the API server does not list now.

        Raises:
            Diverged: objects of some kind are missing or too old for good.
        """
        namespaces: tuple[str | None, ...] = self._settings.namespaces or (None,)
        targets = [(resources.LLM_SERVICE, namespace, "") for namespace in namespaces]
        targets += [(watch.resource, watch.namespace, LABEL_SELECTOR) for watch in self._reflectors]
        for resource, namespace, labels in targets:
            try:
                await self._verify_kind(resource, namespace, labels)
            except ApiError as error:
                self._metrics.verifications.labels("unknown").inc()
                logger.warning("cache was not verified kind=%s error=%s", resource.kind, error)

    async def _verify_kind(self, resource: Resource, namespace: str | None, labels: str) -> None:
        stale = await self._stale_objects(resource, namespace, labels)
        if stale:
            await asyncio.sleep(self._grace_s)
            stale &= await self._stale_objects(resource, namespace, labels, {place for place, _ in stale})
        self._metrics.verifications.labels("diverged" if stale else "same").inc()
        if stale:
            examples = ", ".join("/".join(place) for place, _ in sorted(stale)[:5])
            raise CacheDiverged(f"the watch of {resource.plural} went deaf: {len(stale)} are not as listed: {examples}")

    async def _stale_objects(
        self, resource: Resource, namespace: str | None, labels: str, only: set[ObjectName] | None = None
    ) -> set[tuple[ObjectName, str]]:
        """Places that are cached otherwise than listed, with the version that is cached."""
        listing = await self._client.list(resource, namespace, labels, metadata_only=True)
        listed = {(m["metadata"].get("namespace", ""), m["metadata"]["name"]): m["metadata"] for m in listing.items}
        cached = {
            (e.namespace, e.name): e for e in self._cache.objects_of_kind(resource) if namespace in (None, e.namespace)
        }
        result = set()
        for object_name in (set(listed) | set(cached)) if only is None else only:
            entry, meta = cached.get(object_name), listed.get(object_name)
            if entry is None and meta is None:
                continue
            is_same_object = entry is not None and meta is not None and entry.uid == meta["uid"]
            if (
                is_same_object
                and entry is not None
                and meta is not None
                and _is_at_least(entry.resource_version, meta["resourceVersion"])
            ):
                continue
            result.add((object_name, entry.resource_version if entry else ""))
        return result


def _is_at_least(cached: str, listed: str) -> bool:
    if cached.isdecimal() and listed.isdecimal():
        return int(cached) >= int(listed)
    return cached == listed
