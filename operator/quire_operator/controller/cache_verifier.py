# SPDX-License-Identifier: Apache-2.0
"""Comparison of the object cache with the API server, which is repeated periodically.

It detects a watch that stopped without an error.

For the comparison, only the metadata of objects is listed. Started by the controller. If a difference does not go away,
the operator ends. This does not apply to an LLMService that was deleted but is still in the cache. The LLMService is
removed from the cache, and the operator continues.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from quire_operator.controller.metrics import ControllerMetrics
from quire_operator.controller.object_cache import LABEL_SELECTOR, ObjectCache
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiError
from quire_operator.kube.reflector import Reflector
from quire_operator.kube.resources import Resource
from quire_spec.errors import Internal

logger = logging.getLogger(__name__)

ObjectName = tuple[str, str]
"""Namespace and name."""


class _StaleObject(NamedTuple):
    """An object that has a different version in the cache than in the list of the API server."""

    name: ObjectName
    cached_version: str
    """resourceVersion of the cached object. Empty if the object is not in the cache."""
    is_listed: bool


class CacheDiverged(Internal):
    """The cache still differs from the API server after the grace period. The operator must be restarted."""


class CacheVerifier:
    """Compares one cache with the API server."""

    def __init__(
        self,
        client: ApiClient,
        cache: ObjectCache,
        reflectors: Sequence[Reflector],
        metrics: ControllerMetrics,
        namespaces: Sequence[str] = (),
    ) -> None:
        """`namespaces` are the namespaces that are watched. If there are none, all namespaces are watched."""
        self._client, self._cache, self._reflectors, self._metrics = client, cache, reflectors, metrics
        self._namespaces = namespaces

    async def run(self, interval_s: float, grace_s: float) -> None:
        """Repeat the comparison until the task is cancelled. Raises CacheDiverged."""
        while True:
            await asyncio.sleep(interval_s)
            await self.verify(grace_s)

    async def verify(self, grace_s: float) -> None:
        """Compare the objects of all kinds once.

        A kind that the API server cannot list at the moment is skipped. A difference is ignored if it lasts less than
        `grace_s` seconds.

        Raises:
            CacheDiverged: cached objects of a kind are still missing or outdated after `grace_s`.
        """
        synced = [reflector for reflector in self._reflectors if reflector.synced.is_set()]
        targets = [(resources.LLM_SERVICE, namespace, "") for namespace in self._namespaces or (None,)]
        targets += [(reflector.resource, reflector.namespace, LABEL_SELECTOR) for reflector in synced]
        for resource, namespace, labels in targets:
            try:
                await self._verify_kind(resource, namespace, labels, grace_s)
            except ApiError as error:
                self._metrics.verifications.labels("unknown").inc()
                logger.warning("cache was not verified kind=%s error=%s", resource.kind, error)

    async def _verify_kind(self, resource: Resource, namespace: str | None, labels: str, grace_s: float) -> None:
        stale = await self._stale_objects(resource, namespace, labels)
        if stale:
            await asyncio.sleep(grace_s)
            stale &= await self._stale_objects(resource, namespace, labels, {each.name for each in stale})
        if resource is resources.LLM_SERVICE:
            stale -= self._evict_deleted_services(stale)
        self._metrics.verifications.labels("diverged" if stale else "same").inc()
        if stale:
            examples = ", ".join("/".join(each.name) for each in sorted(stale)[:5])
            difference = f"{len(stale)} objects differ from the list: {examples}"
            raise CacheDiverged(f"the watch of {resource.plural} is stale: {difference}")

    def _evict_deleted_services(self, stale: set[_StaleObject]) -> set[_StaleObject]:
        """Remove from the cache the services that the API server no longer lists, and return them.

        If an object is deleted while kopf has no watch, kopf does not report a DELETED event for it.
        """
        deleted = {each for each in stale if not each.is_listed}
        for each in deleted:
            namespace, name = each.name
            if cached := self._cache.get(resources.LLM_SERVICE, namespace, name):
                meta = {"namespace": namespace, "name": name, "uid": cached.uid}
                self._cache.remove(resources.LLM_SERVICE, {"metadata": meta})
                logger.info("service was deleted without an event service=%s/%s", namespace, name)
        return deleted

    async def _stale_objects(
        self, resource: Resource, namespace: str | None, labels: str, only: set[ObjectName] | None = None
    ) -> set[_StaleObject]:
        """Return the objects that have a different version in the cache than in the list of the API server."""
        listing = await self._client.list(resource, namespace, labels, metadata_only=True)
        listed = {(m["metadata"].get("namespace", ""), m["metadata"]["name"]): m["metadata"] for m in listing.items}
        cached = {
            (e.namespace, e.name): e for e in self._cache.objects_of_kind(resource) if namespace in (None, e.namespace)
        }
        result = set()
        names = listed.keys() | cached.keys()
        for object_name in names if only is None else names & only:
            entry, meta = cached.get(object_name), listed.get(object_name)
            version = entry.resource_version if entry else ""
            is_same_object = entry is not None and meta is not None and entry.uid == meta["uid"]
            if not (is_same_object and meta and _is_at_least(version, meta["resourceVersion"])):
                result.add(_StaleObject(object_name, version, meta is not None))
        return result


def _is_at_least(cached: str, listed: str) -> bool:
    if cached.isdecimal() and listed.isdecimal():
        return int(cached) >= int(listed)
    return cached == listed
