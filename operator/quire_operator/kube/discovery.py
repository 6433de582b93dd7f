# SPDX-License-Identifier: Apache-2.0
"""Finds the optional kinds that the API server serves, and refreshes the result periodically. Used by the
controller."""

import asyncio
import logging

from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ApiError, ObjectNotFound
from quire_operator.kube.resources import DISCOVERED_RESOURCES, Resource

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 240.0
"""Seconds between refreshes. If a kind is installed later, the operator uses it after at most five minutes. This time
includes the first list and the first apply."""
_RETRY_S = 30.0
"""If some API groups did not respond, the refresh is repeated after this number of seconds."""


class Discovery:
    """Finds the optional kinds that an API server serves."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._available: frozenset[Resource] = frozenset()
        self._refreshed_at = float("-inf")
        self._lock = asyncio.Lock()

    async def available_kinds(self, force_refresh: bool = False) -> frozenset[Resource]:
        """Return the optional kinds that the API server serves; `force_refresh` ignores the cached result.

        Raises:
            ApiError: the API server does not respond.
        """
        now = asyncio.get_running_loop().time()
        async with self._lock:
            if force_refresh or now - self._refreshed_at > REFRESH_INTERVAL_S:
                await self._refresh(now)
        return self._available

    async def _refresh(self, now: float) -> None:
        available, errors = set(), []
        for resource in DISCOVERED_RESOURCES:
            try:
                if resource.plural in await _served_plurals(self._client, resource.root):
                    available.add(resource)
            except ApiError as error:
                # If one group fails, for example the group of an aggregated API, the other groups must not wait for it.
                # The kinds of the failed group keep their last state.
                errors.append(error)
                available |= {resource} & self._available
        if len(errors) == len(DISCOVERED_RESOURCES):
            raise errors[0]
        if errors:
            logger.warning("could not look for some optional kinds error=%s", "; ".join(map(str, errors)))
        self._available = frozenset(available)
        self._refreshed_at = now - REFRESH_INTERVAL_S + _RETRY_S if errors else now


async def is_served(client: ApiClient, resource: Resource) -> bool:
    """Return whether the API server serves a kind now. Clients use two discovery paths, and both must list the kind.

    Raises:
        ApiError: the API server does not respond.
    """
    groups = (await client.request("GET", "/apis")).get("groups", ())
    versions = {f"{group['name']}/{version['version']}" for group in groups for version in group["versions"]}
    return resource.api_version in versions and resource.plural in await _served_plurals(client, resource.root)


async def _served_plurals(client: ApiClient, root: str) -> frozenset[str]:
    try:
        body = await client.request("GET", root)
    except ObjectNotFound:
        return frozenset()
    return frozenset(entry["name"] for entry in body.get("resources", ()))
