# SPDX-License-Identifier: Apache-2.0
"""Lease: lets one of several operators work. Whoever holds it renews it; who cannot renew it ends before it runs out.

Optional: one replica with strategy Recreate needs none, and serving goes on while no operator runs.
Source: the rules of client-go's leader election, https://pkg.go.dev/k8s.io/client-go/tools/leaderelection.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.errors import ApiError, Stale
from quire_spec.errors import Unavailable

log = logging.getLogger(__name__)


class LeaseLost(Unavailable):
    """The lease could not be renewed in time: another operator may be working."""


class Lease:
    """A coordination.k8s.io Lease."""

    def __init__(self, client: Client, namespace: str, name: str, holder: str, seconds: float = 15.0) -> None:
        """`seconds` is how long it lasts without being renewed; it is renewed three times in that time."""
        self._client, self._namespace, self._name = client, namespace, name
        self._holder, self._seconds = holder, seconds
        self._seen: tuple[str, float] = ("", float("-inf"))
        self._renewed = float("-inf")
        """When the last request that renewed it was begun."""

    def is_held(self) -> bool:
        """Whether nobody else can have it yet: it was renewed less than two thirds of its time ago. Right also
        in a process that stood still until a moment ago, where `hold` has not looked yet."""
        return self._left_s > 0

    @property
    def _left_s(self) -> float:
        return self._renewed + self._seconds * 2 / 3 - asyncio.get_running_loop().time()

    async def acquire(self) -> None:
        """Return once it is ours."""
        told = False
        while True:
            try:
                if await self._try():
                    log.info("lease is held name=%s holder=%s", self._name, self._holder)
                    return
                if not told:
                    log.info("another operator works; waiting lease=%s", self._name)
                    told = True
            except ApiError as error:
                log.warning("lease was not read error=%s", error)
            await asyncio.sleep(self._seconds / 3)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Task[None]]:
        """Renew it as long as the context lasts, then give it back; the task ends with LeaseLost as `hold` does."""
        task = asyncio.create_task(self.hold())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._renewed = float("-inf")
            await self._release()

    async def hold(self) -> None:
        """Renew it for ever.

        Raises:
            LeaseLost: it is not ours any more, or may soon not be.
        """
        while True:
            await asyncio.sleep(min(self._seconds / 3, max(0.0, self._left_s)))
            try:
                # An API server that does not answer must not be waited for longer than others wait for us.
                async with asyncio.timeout(self._left_s):
                    if not await self._try():
                        self._renewed = float("-inf")
                        raise LeaseLost(f"lease {self._namespace}/{self._name}: somebody else holds it")
            except (ApiError, TimeoutError) as error:
                log.warning("lease was not renewed error=%s", str(error) or "no answer in time")
            if not self.is_held():
                raise LeaseLost(f"lease {self._namespace}/{self._name}: not renewed for {self._seconds * 2 / 3:.0f} s")

    async def _release(self) -> None:
        """Let the next one work at once; where this fails it runs out."""
        try:
            found = await self._client.find(kinds.LEASE, self._namespace, self._name)
            if found is not None and found["spec"].get("holderIdentity") == self._holder:
                turns, version = found["spec"].get("leaseTransitions", 0), found["metadata"]["resourceVersion"]
                await self._client.replace(kinds.LEASE, self._body(turns, version, holder=""))
        except ApiError as error:
            log.warning("lease was not given back error=%s", error)

    async def _try(self) -> bool:
        begun = asyncio.get_running_loop().time()
        found = await self._client.find(kinds.LEASE, self._namespace, self._name)
        clock = asyncio.get_running_loop().time()
        try:
            if found is None:
                await self._client.create(kinds.LEASE, self._body(0, None))
                self._renewed = begun
                return True
            spec = found["spec"]
            # By our own clock since its version changed last: other machines' clocks may be wrong.
            version = found["metadata"]["resourceVersion"]
            if self._seen[0] != version:
                self._seen = (version, clock)
            over = clock - self._seen[1] > self._seconds
            if spec.get("holderIdentity") not in (self._holder, "", None) and not over:
                return False
            turns = spec.get("leaseTransitions", 0) + (spec.get("holderIdentity") != self._holder)
            await self._client.replace(kinds.LEASE, self._body(turns, version))
            self._renewed = begun
            return True
        except Stale:
            return False

    def _body(self, turns: int, version: str | None, holder: str | None = None) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        return {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.name,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                **({"resourceVersion": version} if version else {}),
            },
            "spec": {
                "holderIdentity": self._holder if holder is None else holder,
                "leaseDurationSeconds": max(1, int(self._seconds)),
                "renewTime": now,
                "leaseTransitions": turns,
            },
        }
