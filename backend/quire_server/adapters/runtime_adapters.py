# SPDX-License-Identifier: Apache-2.0
"""Changes the adapter catalog at run time, one adapter at a time.

vLLM's routes /v1/load_lora_adapter and /v1/unload_lora_adapter use this module. This module checks the location that a
request contains. The adapter manager then loads or unloads the adapter. The changes are not stored in a file, so they
are lost when the supervisor ends. The OpenAI front calls the methods of this module over the supervisor's socket.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from quire_server.adapters.manager import AdapterManager
from quire_spec.constants import check_model_name
from quire_spec.dataclass_json import from_json
from quire_spec.documents.adapter_catalog import AdapterCatalog, AdapterSpec
from quire_spec.documents.pod_status import AdapterState
from quire_spec.documents.sources import HuggingFaceSource, Source, source_from_url
from quire_spec.errors import InvalidArgument, NotFound, Unavailable, truncated_repr

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 600.0
"""Maximum time of a load in seconds. OpenAI's client has the same default timeout."""
_POLL_S = 0.02
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that is running."""

    source: Source
    task: "asyncio.Task[None]"


class RuntimeAdapters:
    """Loads and unloads single adapters."""

    def __init__(self, manager: AdapterManager, allowed_paths: Sequence[Path]) -> None:
        """`allowed_paths` are the folders from which local adapters can be loaded."""
        self._manager = manager
        self._allowed_paths = [path.resolve() for path in allowed_paths]
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._loads: dict[str, _Load] = {}
        """The load that is running for each name."""

    async def load_lora_adapter(self, name: str, location: str | dict[str, Any], in_place: bool) -> None:
        """Add the adapter `name` with the content of `location`, and wait until it serves requests.

        If the adapter cannot be loaded, the catalog does not change. A call that repeats a running one waits for the
        same load. With `in_place`, a call with another source cancels a running one.

        Raises:
            InvalidArgument: name, location or adapter is invalid, or the adapter exists and `in_place` is false.
            NotFound: the source does not contain an adapter.
            Unavailable: the source does not respond, or another call has cancelled the load.
        """
        source = self._source(location)
        check_model_name(name, "lora_name")
        while (load := self._loads.get(name)) is not None and load.source != source:
            if not in_place:
                raise InvalidArgument(
                    f"lora_name: {name!r} is being loaded from another source; set load_inplace to true to replace it"
                )
            await self._cancel_load(load)
        if load is None:
            load = self._loads[name] = _Load(
                source, asyncio.create_task(self._load(name, source, in_place), name=f"load {name}")
            )
            load.task.add_done_callback(partial(self._on_load_ended, name))
        await asyncio.wait({load.task})
        if load.task.cancelled():
            raise Unavailable(f"lora_name: another call has changed {name!r} during the load; try again")
        load.task.result()

    def _on_load_ended(self, name: str, task: "asyncio.Task[None]") -> None:
        if (load := self._loads.get(name)) is not None and load.task is task:
            del self._loads[name]
        if not task.cancelled():
            task.exception()  # the callers may have left

    async def _cancel_load(self, load: "_Load") -> None:
        """Cancel a load, and wait until its adapter is removed from the catalog."""
        load.task.cancel()
        await asyncio.wait({load.task})

    async def _load(self, name: str, source: Source, in_place: bool) -> None:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            previous = self._find(name)
            if previous is not None and not in_place:
                raise InvalidArgument(
                    f"lora_name: the adapter {name!r} is already loaded; set load_inplace to true to replace it"
                )
            self._put(name, AdapterSpec(name, source) if previous is None else replace(previous, source=source))
            self._manager.refresh(name)
            try:
                async with asyncio.timeout(_LOAD_TIMEOUT_S):
                    await self._wait_settled(name)
            except BaseException as error:
                self._put(name, previous)
                if isinstance(error, TimeoutError):
                    raise Unavailable(f"lora_name: {name!r} was not loaded within {_LOAD_TIMEOUT_S:g} s") from None
                raise
        logger.info("adapter loaded at run time name=%s", name)

    async def unload_lora_adapter(self, name: str) -> None:
        """Remove the adapter `name`; raises NotFound if it does not exist."""
        while (load := self._loads.get(name)) is not None:
            await self._cancel_load(load)
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            if self._find(name) is None:
                raise NotFound(f"lora_name: the adapter {name[:100]!r} does not exist; GET /v1/models lists the names")
            self._put(name, None)
            while self._manager.is_known(name):
                await asyncio.sleep(_POLL_S)
        logger.info("adapter unloaded at run time name=%s", name)

    async def _wait_settled(self, name: str) -> None:
        while True:
            status, error = self._manager.result(name)
            if status is AdapterState.READY:
                return
            if error is not None:
                raise error
            await asyncio.sleep(_POLL_S)

    def _find(self, name: str) -> AdapterSpec | None:
        return next((adapter for adapter in self._manager.catalog.adapters if adapter.name == name), None)

    def _put(self, name: str, adapter: AdapterSpec | None) -> None:
        """Replace, add or remove an adapter of the current catalog."""
        catalog = self._manager.catalog
        adapters = [adapter if other.name == name else other for other in catalog.adapters]
        if adapter is not None and adapter not in adapters:
            adapters.append(adapter)
        changed = replace(catalog, adapters=tuple(other for other in adapters if other is not None))
        self._manager.set_catalog(AdapterCatalog.from_json(changed.to_json()))

    def _source(self, location: object) -> Source:
        """Convert a location to a source.

        A location is a folder, a URL, a hub id, or a source in the form that the catalog uses.
        """
        if isinstance(location, dict):
            source = from_json(Source, location, "lora_path")
            source.validate("lora_path")
            return source if source.path is None else Source(path=self._local_folder(source.path))
        if not isinstance(location, str) or not location:
            raise InvalidArgument(f"lora_path: must be a folder, URL, hub id or source, got {truncated_repr(location)}")
        if (named := source_from_url(location)) is not None:
            return named
        if _HUB_ID.fullmatch(location) and not any((root / location).is_dir() for root in self._allowed_paths):
            return Source(huggingFace=HuggingFaceSource(location))
        return Source(path=self._local_folder(location))

    def _local_folder(self, path: str) -> str:
        """Return the real path of a folder below an allowed folder.

        If the path is relative, it is looked up in each allowed folder.
        """
        try:
            for root in self._allowed_paths:
                folder = (root / path).resolve()
                if folder.is_relative_to(root) and folder.is_dir():
                    return str(folder)
        except (OSError, ValueError):  # the path is too long, or contains a NUL
            pass
        allowed = ", ".join(map(str, self._allowed_paths)) or "none"
        raise InvalidArgument(
            f"lora_path: {truncated_repr(path)} is not below an allowed folder ({allowed}); use another folder, or "
            "start the server with --allowed-local-lora-path"
        )
