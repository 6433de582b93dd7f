# SPDX-License-Identifier: Apache-2.0
"""Periodic comparison of the object cache with the API server, which finds watches that silently stopped.

Lists metadata only. Started by the controller. A difference that lasts ends the operator, except for one: a deleted
LLMService that is still cached is evicted.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
    """An object that is cached otherwise than listed."""

    name: ObjectName
    cached_version: str
    """Empty: it is not cached."""
    is_listed: bool


class CacheDiverged(Internal):
    """The cache differs from the API server, and stays so; restart the operator."""


class VerifierSettings(Protocol):
    """The part of ControllerSettings that is used here."""

    @property
    def verify_interval_s(self) -> float:
        """Time between comparisons."""
        ...

    @property
    def verify_grace_s(self) -> float:
        """How long a difference must last."""
        ...

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that are watched; empty: all."""
        ...


class CacheVerifier:
    """Compares one cache with the API server."""

    def __init__(
        self,
        client: ApiClient,
        cache: ObjectCache,
        reflectors: Sequence[Reflector],
        metrics: ControllerMetrics,
        settings: VerifierSettings,
    ) -> None:
        self._client, self._cache, self._reflectors, self._metrics = client, cache, reflectors, metrics
        self._settings = settings

    async def run(self) -> None:
        """Compare for ever; ends by cancellation or with CacheDiverged."""
        while True:
            await asyncio.sleep(self._settings.verify_interval_s)
            await self.verify()

    async def verify(self) -> None:
        """Compare all kinds once, except those that the API server cannot list now.

        Raises:
            CacheDiverged: objects of some kind stay missing or too old.
        """
        namespaces: tuple[str | None, ...] = self._settings.namespaces or (None,)
        targets = [(resources.LLM_SERVICE, namespace, "") for namespace in namespaces]
        targets += [
            (reflector.resource, reflector.namespace, LABEL_SELECTOR)
            for reflector in self._reflectors
            if reflector.synced.is_set()
        ]
        for resource, namespace, labels in targets:
            try:
                await self._verify_kind(resource, namespace, labels)
            except ApiError as error:
                self._metrics.verifications.labels("unknown").inc()
                logger.warning("cache was not verified kind=%s error=%s", resource.kind, error)

    async def _verify_kind(self, resource: Resource, namespace: str | None, labels: str) -> None:
        stale = await self._stale_objects(resource, namespace, labels)
        if stale:
            await asyncio.sleep(self._settings.verify_grace_s)
            stale &= await self._stale_objects(resource, namespace, labels, {each.name for each in stale})
        if resource is resources.LLM_SERVICE:
            stale -= self._evict_deleted_services(stale)
        self._metrics.verifications.labels("diverged" if stale else "same").inc()
        if stale:
            examples = ", ".join("/".join(each.name) for each in sorted(stale)[:5])
            raise CacheDiverged(
                f"the watch of {resource.plural} is stale: {len(stale)} objects differ from the list: {examples}"
            )

    def _evict_deleted_services(self, stale: set[_StaleObject]) -> set[_StaleObject]:
        """Remove services that are no longer listed from the cache, and return them.

        kopf reports no DELETED event for an object that was deleted before kopf listed again.
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
        """Return the objects whose cached version differs from the listed one."""
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
            result.add(_StaleObject(object_name, entry.resource_version if entry else "", meta is not None))
        return result


def _is_at_least(cached: str, listed: str) -> bool:
    if cached.isdecimal() and listed.isdecimal():
        return int(cached) >= int(listed)
    return cached == listed
