# SPDX-License-Identifier: Apache-2.0
"""Discovery: which of the kinds that an API server may lack this one has; asked again from time to time."""

import asyncio

from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import ObjectNotFound
from quire_operator.kube.resources import OPTIONAL_RESOURCES, Resource

REFRESH_INTERVAL_S = 300.0
"""A kind that somebody installs is seen after five minutes at most."""


class Discovery:
    """The optional kinds of an API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._available: frozenset[Resource] = frozenset()
        self._refreshed_at = float("-inf")
        self._lock = asyncio.Lock()

    async def available_kinds(self, force_refresh: bool = False) -> frozenset[Resource]:
        """Those that are there; `anew` asks the API server now.

        Raises:
            ApiError: it does not answer.
        """
        now = asyncio.get_running_loop().time()
        async with self._lock:
            if force_refresh or now - self._refreshed_at > REFRESH_INTERVAL_S:
                by_root = {kind.root: await _served_plurals(self._client, kind.root) for kind in OPTIONAL_RESOURCES}
                self._available = frozenset(kind for kind in OPTIONAL_RESOURCES if kind.plural in by_root[kind.root])
                self._refreshed_at = now
        return self._available


async def is_served(client: ApiClient, resource: Resource) -> bool:
    """Whether the API server has a kind of a group now, and names it in both places where clients look for kinds.

    Raises:
        ApiError: it does not answer.
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
