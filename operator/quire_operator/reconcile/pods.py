# SPDX-License-Identifier: Apache-2.0
"""Talks to the pods' admin ports: asks each how it is, and tells it the catalogue when it works on another one."""

from collections.abc import Iterable

from quire_operator.reconcile.observed import Pod
from quire_spec.catalogue import Catalogue


class AdapterPusher:
    """The operator's side of the admin port, for all services; one session, bounded in how much it asks at once."""

    def __init__(self, max_requests: int = 64) -> None:
        """Make it inside a running event loop."""
        raise NotImplementedError

    async def refresh(self, pods: Iterable[Pod], catalogue: Catalogue, key: str) -> tuple[Pod, ...]:
        """The same pods in the same order, each with what its GET /status answered, or why it did not.

        Pods that run are asked, all at once. One that works on another catalogue than this one is told this one (PUT
        /adapters) and asked again. Takes 10 s at most, however many pods hang; raises nothing for a pod.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End the session."""
        raise NotImplementedError
