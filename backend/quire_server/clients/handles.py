# SPDX-License-Identifier: Apache-2.0
"""What the supervisor has to do with each running process, and what that process is known to hold.

A link lasts as long as its process: when the process dies, what it held is forgotten with the link, and the adapters
find out by looking at the new one (adapters.py). pod.py makes links and takes them away.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_server.clients.control_client import ConnectionLost, ControlClient
from quire_server.model_server.client import ModelServerClient
from quire_server.model_server.repository import model_config, model_files
from quire_spec.dataclass_json import from_json, to_json
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.errors import ConfigError, QuireError, Unavailable

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 300.0
"""An adapter of 4 GiB from a slow disk."""
_METRICS_TIMEOUT_S = 5.0


class CoreHandle:
    """The running core."""

    def __init__(self, control: ControlClient, status: Mapping[str, Any]) -> None:
        self.control = control
        self.adapters: dict[str, bool] = {}
        """Digests loaded, and whether pinned."""
        self._timed_out_loads: set[str] = set()
        """Digests whose load took too long for us: they may come to be there all the same."""
        self.started_at = str(status.get("started_at"))
        self.memory = _parse_memory(status.get("memory"))
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load_adapter(self, digest: str, folder: Path, pinned: bool) -> None:
        """Have the core hold an adapter; nothing is asked when it already does.

        Raises:
            InvalidArgument: the core refuses the adapter. Unavailable: it takes too long. LinkLost: the core is gone.
        """
        async with self._locks[digest]:
            if self.adapters.get(digest) == pinned:
                return
            args = {"digest": digest, "path": str(folder), "pinned": pinned}
            try:
                await self.control.call("load_adapter", args, timeout_s=_LOAD_TIMEOUT_S)
            except Unavailable:
                self._timed_out_loads.add(digest)
                raise
            self._timed_out_loads.discard(digest)
            self.adapters[digest] = pinned

    def possibly_loaded(self) -> set[str]:
        """Digests that it has, or may have."""
        return self.adapters.keys() | self._timed_out_loads

    async def unload_adapter(self, digest: str, required_digests: Callable[[], set[str]]) -> None:
        """Have the core drop an adapter, unless it is among the needed digests by the time it is our turn."""
        async with self._locks[digest]:
            if digest in required_digests() or digest not in self.possibly_loaded():
                return
            pinned = self.adapters.pop(digest, None)
            try:
                await self.control.call("unload_adapter", {"digest": digest}, timeout_s=_CALL_TIMEOUT_S)
            except QuireError:
                if pinned is not None:
                    self.adapters[digest] = pinned
                raise
            self._timed_out_loads.discard(digest)


class TextHandle:
    """The running text process."""

    def __init__(self, control: ControlClient) -> None:
        self.control = control
        self.aliases: dict[str, str] = {}
        """Adapter names and the digests they stand for, as last sent."""
        self.limits: dict[str, AdapterLimits] = {}
        """Limits of those that have any, as last sent."""
        self.published_digests: set[str] = set()
        """That names stand for there, as last sent or as is being sent."""
        self._was_published = False
        self._lock = asyncio.Lock()

    async def set_adapters(self, aliases: Mapping[str, str], limits: Mapping[str, AdapterLimits]) -> None:
        """Send names and limits, unless they were sent last: many adapters that become ready share one call."""
        async with self._lock:
            new_aliases, new_limits = dict(aliases), dict(limits)
            if not self._was_published or (new_aliases, new_limits) != (self.aliases, self.limits):
                args = {
                    "adapters": new_aliases,
                    "limits": {name: to_json(adapter_limits) for name, adapter_limits in new_limits.items()},
                }
                self.published_digests |= set(new_aliases.values())
                await self.control.call("set_adapters", args, timeout_s=_CALL_TIMEOUT_S)
                self.aliases, self.limits, self.published_digests, self._was_published = (
                    new_aliases,
                    new_limits,
                    set(new_aliases.values()),
                    True,
                )

    async def is_core_connected(self) -> bool:
        """True when text has its connection to the core."""
        status = await self.control.call("status", timeout_s=_CALL_TIMEOUT_S)
        return bool(status.get("core"))

    async def metrics(self) -> str:
        """Its registry in Prometheus's text format."""
        return str((await self.control.call("metrics", timeout_s=_METRICS_TIMEOUT_S))["text"])

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the open ones; raises Unavailable when they take longer."""
        await self.control.call("drain", timeout_s=timeout_s)


class ServerHandle:
    """The running server."""

    def __init__(
        self,
        client: ModelServerClient,
        base: str,
        text_socket: Path,
        scan_stubs: Callable[[], None],
        on_unload: Callable[[str], None],
    ) -> None:
        """`scan_stubs` is called when a model was loaded, `on_unload` with its name when one was unloaded for good."""
        self.base_ready = True
        self.models: set[str] = set()
        """Adapter models registered."""
        self._client = client
        self._base = base
        self._text_socket = text_socket
        self._scan_stubs = scan_stubs
        self._on_unload = on_unload
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load_adapter_model(self, name: str) -> None:
        """Have the server serve an adapter's model. Raises LinkLost, or Internal when the server refuses."""
        async with self._locks[name]:
            if name not in self.models:
                await self._load_model(name)
                self.models.add(name)

    async def unload_adapter_model(self, name: str) -> None:
        """Have the server drop an adapter's model; requests in flight end in their own time."""
        async with self._locks[name]:
            if name in self.models:
                await self._unload_model(name)
                self.models.discard(name)
                self._on_unload(name)

    async def reload_model(self, name: str, was_replaced: Callable[[], bool]) -> None:
        """Start a new stub for a model whose stub has died, unless it was `replaced`; the server itself never would."""
        async with self._locks[name]:
            if was_replaced() or (name != self._base and name not in self.models):
                return
            logger.warning("stub died without open requests, its model is loaded again model=%s", name)
            if name == self._base:
                await self._reload_base_model()
            else:
                await self._unload_model(name)
                await self._load_model(name)

    async def _reload_base_model(self) -> None:
        self.base_ready = False
        await self._unload_model(self._base)
        try:
            await self._client.load_from_disk(self._base)
        except Unavailable as error:
            raise ConnectionLost(str(error)) from error
        self._scan_stubs()
        self.base_ready = True

    async def _load_model(self, name: str) -> None:
        config = model_config(name, self._base, self._text_socket)
        try:
            await self._client.load_model(name, config, model_files())
        except Unavailable as error:
            raise ConnectionLost(str(error)) from error
        self._scan_stubs()

    async def _unload_model(self, name: str) -> None:
        try:
            await self._client.unload_model(name)
        except Unavailable as error:
            raise ConnectionLost(str(error)) from error


@dataclass(slots=True)
class ProcessHandles:
    """The processes that run now; None for one that does not."""

    core: CoreHandle | None = None
    text: TextHandle | None = None
    server: ServerHandle | None = None

    def require_all(self) -> tuple[CoreHandle, TextHandle, ServerHandle]:
        """All three, or LinkLost."""
        if self.core is None or self.text is None or self.server is None:
            missing = [n for n in ("core", "text", "server") if getattr(self, n) is None]
            raise ConnectionLost(f"{', '.join(missing)}: not up")
        return self.core, self.text, self.server


def _parse_memory(document: object) -> MeasuredMemory | None:
    """The core's memory plan; None when it is of another form than ours: then it is not shown."""
    try:
        return from_json(MeasuredMemory, document, "memory")
    except ConfigError:
        return None
