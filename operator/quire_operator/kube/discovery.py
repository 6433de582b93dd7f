# SPDX-License-Identifier: Apache-2.0
"""Discovery: which of the kinds that an API server may lack this one has; asked again from time to time."""

import asyncio

from quire_operator.kube.client import Client
from quire_operator.kube.errors import Missing
from quire_operator.kube.kinds import DISCOVERED, Kind

EVERY_S = 300.0
"""A kind that somebody installs is seen after five minutes at most."""


class Discovery:
    """The optional kinds of an API server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._found: frozenset[Kind] = frozenset()
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def offered(self, anew: bool = False) -> frozenset[Kind]:
        """Those that are there; `anew` asks the API server now.

        Raises:
            ApiError: it does not answer.
        """
        now = asyncio.get_running_loop().time()
        async with self._lock:
            if anew or now - self._asked_at > EVERY_S:
                by_root = {kind.root: await _plurals(self._client, kind.root) for kind in DISCOVERED}
                self._found = frozenset(kind for kind in DISCOVERED if kind.plural in by_root[kind.root])
                self._asked_at = now
        return self._found


async def serves(client: Client, kind: Kind) -> bool:
    """Whether the API server has a kind of a group now, and names it in both places where clients look for kinds.

    Raises:
        ApiError: it does not answer.
    """
    groups = (await client.request("GET", "/apis")).get("groups", ())
    versions = {f"{group['name']}/{version['version']}" for group in groups for version in group["versions"]}
    return kind.api_version in versions and kind.plural in await _plurals(client, kind.root)


async def _plurals(client: Client, root: str) -> frozenset[str]:
    try:
        body = await client.request("GET", root)
    except Missing:
        return frozenset()
    return frozenset(resource["name"] for resource in body.get("resources", ()))
