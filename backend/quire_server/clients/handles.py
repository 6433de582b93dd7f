# SPDX-License-Identifier: Apache-2.0
"""Handles of the running processes.

A handle calls the operations of its process, and records which adapters or models are loaded in it. It exists as long
as its process. When the process ends, the handle is dropped with all its state, and the adapter manager loads the
adapters into the new process. The module supervisor/process_manager.py creates and removes handles.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from quire_server.model_server.client import ModelServerClient
from quire_server.model_server.repository import remove_model, write_model
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_catalog import AdapterLimits, Canary
from quire_spec.errors import QuireError, Unavailable
from quire_spec.protocol.client import Client, ConnectionLost
from quire_spec.protocol.results import AdapterCheck, CoreStatus, TextStatus

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 300.0
"""Timeout of a load in seconds. It is long enough for an adapter of 4 GiB on a slow disk."""
_METRICS_TIMEOUT_S = 5.0


class CoreHandle:
    """Handle of the running core process."""

    def __init__(self, control: Client, status: CoreStatus, publishes_kv_events: bool = False) -> None:
        self.control = control
        self._publishes_kv_events = publishes_kv_events
        self.slot_pinned_by_digest: dict[AdapterDigest, bool] = {}
        """Maps the digest of each loaded adapter to True if the adapter is pinned, and to False otherwise."""
        self._timed_out_loads: set[AdapterDigest] = set()
        """Digests of adapters whose load timed out. The core can still complete such a load."""
        self.started_at = status.started_at
        self.memory = status.memory
        self._digest_by_name: dict[AdapterName, AdapterDigest] = {}
        """The names that were last sent to the core."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @classmethod
    async def open(cls, control: Client, timeout_s: float, publishes_kv_events: bool = False) -> Self:
        """Return the handle of the process to which `control` is connected."""
        return cls(control, await control.call("status", CoreStatus, timeout_s=timeout_s), publishes_kv_events)

    async def load_adapter(self, digest: AdapterDigest, folder: Path, slot_pinned: bool) -> None:
        """Load an adapter into the core, unless it is loaded already.

        Raises:
            InvalidArgument: the core rejects the adapter.
            Unavailable: the load timed out.
            ConnectionLost: the core ended.
        """
        async with self._locks[digest]:
            if self.slot_pinned_by_digest.get(digest) == slot_pinned:
                return
            args = {"digest": digest, "path": str(folder), "pinned": slot_pinned}
            try:
                await self.control.call("load_adapter", type(None), args, timeout_s=_LOAD_TIMEOUT_S)
            except Unavailable:
                self._timed_out_loads.add(digest)
                raise
            self._timed_out_loads.discard(digest)
            self.slot_pinned_by_digest[digest] = slot_pinned

    async def verify_adapter(self, digest: AdapterDigest, folder: Path, canary: Canary | None) -> AdapterCheck:
        """Check a loaded adapter.

        Raises:
            InvalidArgument: the adapter fails a check.
            Unavailable: a check did not end in time.
            ConnectionLost: the core ended.
        """
        args = {"digest": digest, "path": str(folder), "canary": canary}
        timeout_s = _LOAD_TIMEOUT_S + (canary.timeoutSeconds if canary is not None else 0)
        return await self.control.call("verify_adapter", AdapterCheck, args, timeout_s=timeout_s)

    async def set_adapter_names(self, digest_by_name: Mapping[AdapterName, AdapterDigest]) -> None:
        """Send the digest of each adapter name if they have changed. Only the KV events contain the names."""
        if not self._publishes_kv_events:
            return
        async with self._locks[""]:
            if (new := dict(digest_by_name)) != self._digest_by_name:
                await self.control.call("set_adapter_names", type(None), {"adapters": new}, timeout_s=_CALL_TIMEOUT_S)
                self._digest_by_name = new

    def possibly_loaded(self) -> set[AdapterDigest]:
        """Return the digests of adapters that are loaded, or whose load timed out."""
        return self.slot_pinned_by_digest.keys() | self._timed_out_loads

    async def unload_adapter(self, digest: AdapterDigest, required_digests: Callable[[], set[AdapterDigest]]) -> None:
        """Unload an adapter from the core.

        If the adapter is required again by the time the lock is acquired, do nothing.
        """
        async with self._locks[digest]:
            if digest in required_digests() or digest not in self.possibly_loaded():
                return
            slot_pinned = self.slot_pinned_by_digest.pop(digest, None)
            try:
                await self.control.call("unload_adapter", type(None), {"digest": digest}, timeout_s=_CALL_TIMEOUT_S)
            except QuireError:
                if slot_pinned is not None:
                    self.slot_pinned_by_digest[digest] = slot_pinned
                raise
            self._timed_out_loads.discard(digest)


class CoreHandles:
    """The handles of all running cores of a pod. An adapter is loaded into each of them."""

    def __init__(self, handles: Sequence[CoreHandle]) -> None:
        self._handles = handles
        self.started_at = handles[0].started_at
        self.memory = handles[0].memory

    def serve(self, digest: AdapterDigest) -> bool:
        """Return whether any core has loaded an adapter, so that requests for it are answered."""
        return any(digest in handle.slot_pinned_by_digest for handle in self._handles)

    def some_lack(self, digest: AdapterDigest) -> bool:
        """Return whether some cores have loaded an adapter, and others have not: those have restarted."""
        return self.serve(digest) and not all(digest in handle.slot_pinned_by_digest for handle in self._handles)

    def is_loaded(self, digest: AdapterDigest, slot_pinned: bool) -> bool:
        """Return whether every core has loaded an adapter in this way."""
        return all(handle.slot_pinned_by_digest.get(digest) == slot_pinned for handle in self._handles)

    async def load_adapter(self, digest: AdapterDigest, folder: Path, slot_pinned: bool) -> None:
        """Load an adapter into each core that has not loaded it; see CoreHandle. If this fails, the first error is
        raised after all cores have answered."""
        loads = (handle.load_adapter(digest, folder, slot_pinned) for handle in self._handles)
        _raise_first(await asyncio.gather(*loads, return_exceptions=True))

    async def verify_adapter(self, digest: AdapterDigest, folder: Path, canary: Canary | None) -> AdapterCheck:
        """Check an adapter on each core; see CoreHandle. Return the check with the smallest effect."""
        checks = (handle.verify_adapter(digest, folder, canary) for handle in self._handles)
        results = await asyncio.gather(*checks, return_exceptions=True)
        _raise_first([result for result in results if isinstance(result, BaseException)])
        passed = [result for result in results if not isinstance(result, BaseException)]
        return min(passed, key=lambda check: check.effect)

    def possibly_loaded(self) -> set[AdapterDigest]:
        """Return the digests of adapters that a core has loaded or may have loaded."""
        return set().union(*(handle.possibly_loaded() for handle in self._handles))

    async def set_adapter_names(self, digest_by_name: Mapping[AdapterName, AdapterDigest]) -> None:
        """Send the digest of each adapter name to each core; see CoreHandle."""
        calls = (handle.set_adapter_names(digest_by_name) for handle in self._handles)
        _raise_first(await asyncio.gather(*calls, return_exceptions=True))

    async def unload_adapter(self, digest: AdapterDigest, required_digests: Callable[[], set[AdapterDigest]]) -> None:
        """Unload an adapter from each core; see CoreHandle."""
        unloads = (handle.unload_adapter(digest, required_digests) for handle in self._handles)
        _raise_first(await asyncio.gather(*unloads, return_exceptions=True))


def _raise_first(results: Sequence[BaseException | None]) -> None:
    for result in results:
        if result is not None:
            raise result


class TextHandle:
    """Handle of the running text process."""

    def __init__(self, control: Client, status: TextStatus) -> None:
        self.control = control
        self.tool_call_parser = status.tool_call_parser
        self.reasoning_parser = status.reasoning_parser
        self.digest_by_name: dict[AdapterName, AdapterDigest] = {}
        """The mapping of names to digests that was last sent to the text process."""
        self.limits_by_name: dict[AdapterName, AdapterLimits] = {}
        """The mapping of adapter names to limits that was last sent to the text process. Adapters without limits are
        not included."""
        self.chat_template_by_name: dict[AdapterName, str] = {}
        """The mapping of adapter names to chat template files that was last sent. Adapters without a template are not
        included."""
        self._findable_names: tuple[str, ...] = ()
        self._sum_by_name: dict[AdapterName, str] = {}
        self._weights_by_name: Mapping[AdapterName, Mapping[str, int]] = {}
        """The patterns of names that were last sent."""
        self.published_digests: set[AdapterDigest] = set()
        """The digests in the mapping that was sent last. While a mapping is being sent, its digests are included."""
        self._was_published = False
        self._loading: Set[str] | None = None
        """The names that were last sent by `set_loading_adapters`."""
        self._lock = asyncio.Lock()

    @classmethod
    async def open(cls, control: Client, timeout_s: float) -> Self:
        """Return the handle of the process to which `control` is connected."""
        return cls(control, await control.call("status", TextStatus, timeout_s=timeout_s))

    async def set_adapters(
        self,
        digest_by_name: Mapping[AdapterName, AdapterDigest],
        limits_by_name: Mapping[AdapterName, AdapterLimits],
        chat_template_by_name: Mapping[AdapterName, str],
        findable_names: tuple[str, ...] = (),
        sum_by_name: Mapping[AdapterName, str] = MappingProxyType({}),
        weights_by_name: Mapping[AdapterName, Mapping[str, int]] = MappingProxyType({}),
    ) -> None:
        """Send the adapters, the patterns of names that the supervisor can look up, the names of weighted sums, and the
        weights of versions, if they have changed. If several adapters become ready at the same time, they are sent in
        one call."""
        async with self._lock:
            new = dict(digest_by_name), dict(limits_by_name), dict(chat_template_by_name)
            sent = self.digest_by_name, self.limits_by_name, self.chat_template_by_name
            sums, weights = dict(sum_by_name), dict(weights_by_name)
            further = findable_names, sums, weights
            sent_further = self._findable_names, self._sum_by_name, self._weights_by_name
            if not self._was_published or (*new, *further) != (*sent, *sent_further):
                new_digests, new_limits, new_templates = new
                args: dict[str, Any] = {
                    "adapters": new_digests,
                    "limits": new_limits,
                    "chat_templates": new_templates,
                    **({"findable_names": findable_names} if findable_names or self._findable_names else {}),
                    **({"sums": dict(sum_by_name)} if sum_by_name or self._sum_by_name else {}),
                    **({"version_weights": weights} if weights or self._weights_by_name else {}),
                }
                self.published_digests |= set(new_digests.values())
                await self.control.call("set_adapters", type(None), args, timeout_s=_CALL_TIMEOUT_S)
                self.digest_by_name, self.limits_by_name, self.chat_template_by_name = new
                self._findable_names, self._sum_by_name, self._weights_by_name = further
                self._was_published = True
                self.published_digests = set(new_digests.values())

    async def adapter_idle_times(self) -> dict[AdapterName, float]:
        """Return for each adapter that had a request the seconds since its last one; 0 if a request is open."""
        return await self.control.call("adapter_idle_times", dict[AdapterName, float], timeout_s=_CALL_TIMEOUT_S)

    async def set_loading_adapters(self, loading_names: Callable[[], Set[str]]) -> None:
        """Send the names of adapters that are loading and do not have an alias yet.

        If the last call sent the same names, nothing is sent. If a name gets an alias, it can stay in the list, because
        the alias takes precedence.
        """
        async with self._lock:
            names = loading_names()
            if self._loading is None or self._loading - self.digest_by_name.keys() != names:
                await self.control.call(
                    "set_loading_adapters", type(None), {"names": sorted(names)}, timeout_s=_CALL_TIMEOUT_S
                )
                self._loading = names

    async def status(self) -> TextStatus:
        """Return the status of the text process. It contains whether a core is connected."""
        return await self.control.call("status", TextStatus, timeout_s=_CALL_TIMEOUT_S)

    async def adapters(self) -> list[dict[str, Any]]:
        """Return where each adapter is: its name, digest, level (gpu, cpu or disk), pin and rank."""
        return await self.control.call("adapters", list[dict[str, Any]], timeout_s=_METRICS_TIMEOUT_S)

    async def metrics(self, page_format: str = "") -> str:
        """Return the metrics of the process in Prometheus's text format.

        If the page format is "vllm_backend", the metrics have the names that vllm_backend uses.
        """
        return await self.control.call("metrics", str, {"page_format": page_format}, timeout_s=_METRICS_TIMEOUT_S)

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests, and wait until all open requests have ended; raises Unavailable after `timeout_s`."""
        await self.control.call("drain", type(None), timeout_s=timeout_s)


class ServerHandle:
    """Handle of the running model server."""

    def __init__(
        self,
        client: ModelServerClient,
        base: str,
        repository: Path,
        text_socket: Path,
        scan_stubs: Callable[[], None],
        on_unload: Callable[[str], None],
    ) -> None:
        """`scan_stubs` is called after a model was loaded. `on_unload(name)` is called after a model was unloaded
        permanently."""
        self.base_ready = True
        self.models: set[str] = set()
        """Names of the loaded adapter models."""
        self._client = client
        self._base = base
        self._repository = repository
        self._text_socket = text_socket
        self._scan_stubs = scan_stubs
        self._on_unload = on_unload
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load_adapter_model(self, name: str) -> None:
        """Load an adapter's model; raises ConnectionLost, or Internal if the server rejects the model."""
        async with self._locks[name]:
            if name not in self.models:
                await self._load_model(name)
                self.models.add(name)

    async def unload_adapter_model(self, name: str) -> None:
        """Unload an adapter's model. Requests in flight are still completed."""
        async with self._locks[name]:
            if name in self.models:
                await self._unload_model(name)
                remove_model(self._repository, name)
                self.models.discard(name)
                self._on_unload(name)

    async def reload_model(self, name: str, was_replaced: Callable[[], bool]) -> None:
        """Load a model again after its stub has died.

        If the stub has been replaced in the meantime, do nothing. The server itself never restarts a dead stub.
        """
        async with self._locks[name]:
            if was_replaced() or (name != self._base and name not in self.models):
                return
            logger.warning("stub died without open requests, reloading its model model=%s", name)
            if name == self._base:
                await self._reload_base_model()
            else:
                await self._unload_model(name)
                await self._load_model(name)

    async def repository_index(self) -> list[dict[str, str]]:
        """Return the server's index of models; raises ConnectionLost, or Internal."""
        with _translate_unavailable():
            return await self._client.repository_index()

    async def load_other_model(self, name: str) -> None:
        """Load a model of the repository, or reload it if its files have changed.

        Raises:
            ConnectionLost: the server has ended.
            Internal: the server rejected the model.
        """
        async with self._locks[name]:
            with _translate_unavailable():
                await self._client.load_model(name)
            self._scan_stubs()

    async def unload_other_model(self, name: str) -> None:
        """Unload a model of the repository. The errors are the same as for `load_other_model`."""
        async with self._locks[name]:
            await self._unload_model(name)

    async def _reload_base_model(self) -> None:
        self.base_ready = False
        await self._unload_model(self._base)
        with _translate_unavailable():
            await self._client.load_model(self._base)
        self._scan_stubs()
        self.base_ready = True

    async def _load_model(self, name: str) -> None:
        write_model(self._repository, name, self._base, self._text_socket)
        with _translate_unavailable():
            await self._client.load_model(name)
        self._scan_stubs()

    async def _unload_model(self, name: str) -> None:
        with _translate_unavailable():
            await self._client.unload_model(name)


@dataclass(slots=True)
class ProcessHandles:
    """Handles of the running processes. If a process is not running, its handle is None."""

    cores: dict[str, CoreHandle] = field(default_factory=dict)
    """The handles of the running cores, by the names of their processes."""
    text: TextHandle | None = None
    server: ServerHandle | None = None

    @property
    def core(self) -> CoreHandles | None:
        """All running cores; None if there are none."""
        return CoreHandles([*self.cores.values()]) if self.cores else None

    def require_all(self) -> tuple[CoreHandles, TextHandle, ServerHandle]:
        """Return all three handles; raises ConnectionLost if a process is not running."""
        core = self.core
        if core is None or self.text is None or self.server is None:
            missing = [n for n in ("core", "text", "server") if getattr(self, n) is None]
            raise ConnectionLost(f"{', '.join(missing)}: not running")
        return core, self.text, self.server


@contextlib.contextmanager
def _translate_unavailable() -> Iterator[None]:
    """Convert Unavailable to ConnectionLost. A handle gets Unavailable only if the server does not respond."""
    try:
        yield
    except Unavailable as error:
        raise ConnectionLost(str(error)) from error
