# SPDX-License-Identifier: Apache-2.0
"""Has the supervisor look up adapters that no request has named before.

Requests that name the same adapter share one lookup. A failed lookup is remembered for some seconds, so that a client
that repeats a wrong name costs no lookup. Admission has already checked that the API key may use the name.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from quire_engine.text.admission.admission_controller import AdmissionController
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.errors import NotFound, QuireError, Unavailable
from quire_spec.protocol.client import Client
from quire_spec.protocol.messages import Hello

LOOKUP_TIMEOUT_S = 300.0
"""Seconds for which a request waits for its adapter. The supervisor continues the download after that."""
_FAILURE_LIFETIME_S = 5.0
_UNAVAILABLE_LIFETIME_S = 1.0
_MAX_FAILURES = 4096
"""Failures that are remembered. When there are more, the oldest is forgotten."""
_MAX_ATTEMPTS = 3
"""An adapter can leave again before its first request gets its digest."""


class AdapterFinder:
    """The lookups that run, and those that have failed."""

    def __init__(
        self, admission: AdmissionController, socket: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`socket` is the socket of the supervisor."""
        self._admission = admission
        self._client = Client(socket, Hello("text", pid=os.getpid()), "the supervisor")
        self._clock = clock
        self._connecting = asyncio.Lock()
        self._lookups: dict[AdapterName, asyncio.Task[None]] = {}
        self._failures: dict[AdapterName, tuple[QuireError, float]] = {}
        """The error of each failed lookup, and the time at which it is forgotten."""

    async def find(self, name: AdapterName, client: str, api_key_name: str) -> AdapterDigest:
        """Wait until the adapter `name` is loaded, and return its digest. `client` pays for the lookup with its share
        of the adapters.

        Raises:
            NotFound: no source has the adapter. The message is that of an adapter that the API key may not use.
            InvalidArgument: the adapter is invalid.
            Unavailable: the source or the supervisor does not answer, or there is no room for the adapter.
        """
        for _ in range(_MAX_ATTEMPTS):
            if (digest := (self._admission.digest_by_name or {}).get(name)) is not None:
                return digest
            try:
                await self._lookup(name, client)
            except NotFound:
                raise self._admission.unknown_model(name, api_key_name) from None
        raise Unavailable(f"model {name!r}: the adapter was removed while it was loaded; try again")

    async def close(self) -> None:
        """Close the connection to the supervisor. Lookups that run fail."""
        await self._client.close()

    async def _lookup(self, name: AdapterName, client: str) -> None:
        if (failure := self._failures.get(name)) is not None:
            if self._clock() < failure[1]:
                raise failure[0].with_traceback(None)
            del self._failures[name]
        if (task := self._lookups.get(name)) is None:
            task = asyncio.create_task(self._call(name, client), name=f"find {name}")
            self._lookups[name] = task
            task.add_done_callback(lambda task: self._on_ended(name, task))
        # The lookup continues if this request is cancelled, because other requests may wait for it.
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error.with_traceback(None)

    async def _call(self, name: AdapterName, client: str) -> None:
        async with self._connecting:
            if not self._client.is_connected:
                with contextlib.suppress(OSError):
                    await self._client.connect()
        arguments = {"name": name, "client": client}
        await self._client.call("find_adapter", type(None), arguments, timeout_s=LOOKUP_TIMEOUT_S)

    def _on_ended(self, name: AdapterName, task: "asyncio.Task[None]") -> None:
        del self._lookups[name]
        if task.cancelled() or not isinstance(error := task.exception(), QuireError):
            return
        if len(self._failures) >= _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        lifetime_s = _UNAVAILABLE_LIFETIME_S if isinstance(error, Unavailable) else _FAILURE_LIFETIME_S
        self._failures[name] = error, self._clock() + lifetime_s
