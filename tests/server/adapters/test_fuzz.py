# SPDX-License-Identifier: Apache-2.0
"""Random catalogs, sources and process deaths: in the end, the actual state matches the last catalog.

Virtual time makes the test fast and deterministic for a seed. Defects that it found have tests of their own in this
folder.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.virtual_time import run_in_virtual_time

from quire_server.adapters.fetcher import CachedAdapter
from quire_server.adapters.manager import AdapterManager, StaleCatalog
from quire_server.clients.handles import CoreHandle, ProcessHandles, ServerHandle, TextHandle
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_status import AdapterState, MeasuredMemory
from quire_spec.documents.sources import Source
from quire_spec.errors import AccessDenied, InvalidArgument, Unavailable
from quire_spec.protocol.client import ConnectionLost
from quire_spec.protocol.messages import SchedulerStats
from quire_spec.protocol.results import AdapterCheck, CoreStatus, TextStatus

NAMES = ["a", "b", "c"]
PATHS = [f"/{i}" for i in range(4)]
PROCESSES = ["core", "text", "server"]
CONTENTS = [f"good{i}" for i in range(5)] * 2 + ["bad0", "bad1", "away", "denied", "hostile"]
CORE_STATUS = CoreStatus("", MeasuredMemory(1, 1, 1, 1, 1, 1, "float32", "cpu"), {}, SchedulerStats())


class Process:
    """A process whose calls take random times; it may die during a call."""

    def __init__(self, pod: "PodHarness") -> None:
        self.pod = pod
        self.closed = asyncio.Event()
        self.slot_pinned_by_digest: dict[str, bool] = {}
        self.names: dict[str, str] = {}
        self.models: set[str] = set()

    async def pause(self) -> None:
        try:
            async with asyncio.timeout(self.pod.draw.choice([0.0, 0.01, 1.0, 8.0]) * self.pod.draw.random()):
                await self.closed.wait()
        except TimeoutError:
            return
        raise ConnectionLost("gone")

    async def call(self, method: str, result_type: type[Any], args: dict[str, Any], *, timeout_s: float) -> Any:
        if method == "set_adapters":
            self.names = args["adapters"]
        await self.pause()
        if method == "load_adapter":
            if args["digest"].startswith("bad"):
                raise InvalidArgument("bad")
            self.slot_pinned_by_digest[args["digest"]] = args["pinned"]
        elif method == "unload_adapter":
            text = self.pod.text
            assert text.closed.is_set() or args["digest"] not in text.names.values(), "a name still uses this digest"
            del self.slot_pinned_by_digest[args["digest"]]
        await self.pause()
        return AdapterCheck(1.0) if method == "verify_adapter" else None

    async def load_model(self, name: str) -> None:
        await self.pause()
        self.models.add(name)

    async def unload_model(self, name: str) -> None:
        await self.pause()
        self.models.discard(name)


class PodHarness:
    """An adapter manager with its processes and sources. It is also the fetcher."""

    core: Process
    text: Process
    server: Process

    def __init__(self, draw: random.Random, repository: Path) -> None:
        self.draw, self.repository = draw, repository
        self.contents = {place: draw.choice(CONTENTS) for place in PATHS}
        self.handles = ProcessHandles()
        self.manager = AdapterManager("tales", self, self.handles)  # type: ignore[arg-type]
        for name in PROCESSES:
            self.toggle_process(name)

    def toggle_process(self, name: str) -> None:
        """Start a process, or kill it."""
        if getattr(self.handles, name) is not None:
            getattr(self, name).closed.set()
            self.set_handle(name, None)
        else:
            process: Any = Process(self)
            setattr(self, name, process)
            factories = {
                "core": lambda: CoreHandle(process, CORE_STATUS),
                "text": lambda: TextHandle(process, TextStatus("", True, 0, 0)),
                "server": lambda: ServerHandle(
                    *(process, "tales", self.repository, Path("text.sock")), lambda: None, lambda name: None
                ),
            }
            self.set_handle(name, factories[name]())
        self.manager.resync()

    def set_handle(self, name: str, handle: Any) -> None:
        """Set or remove the handle of a process."""
        if name == "core":
            self.handles.cores = {} if handle is None else {"core": handle}
        else:
            setattr(self.handles, name, handle)

    async def fetch(self, source: Source) -> CachedAdapter:
        assert source.path is not None
        try:
            await asyncio.sleep(self.draw.choice([0.0, 0.1, 5.0]) * self.draw.random())
        except asyncio.CancelledError:
            # Connections are closed.
            await asyncio.sleep(self.draw.choice([0.0, 0.1]))
            raise
        content = self.contents[source.path]
        if content == "away":
            raise Unavailable("away")
        if content == "denied":
            raise AccessDenied("denied")
        if content == "hostile":
            raise InvalidArgument("hostile")
        return CachedAdapter(content, Path(content))

    def secret_version(self, source: Source) -> int:
        return int(self.contents[str(source.path)] == "denied")

    def document(self, generation: int) -> dict[str, Any]:
        adapters = [
            {
                "name": name,
                "source": {"path": self.draw.choice(PATHS)},
                "pinned": self.draw.random() < 0.3,
                "expose": self.draw.choice([None, "Model", "Parameter"]),
                "limits": self.draw.choice([None, None, {"maxConcurrentRequests": 2}]),
                "candidate": self.draw.choice([None, None, {"source": {"path": self.draw.choice(PATHS)}}]),
                "previous": self.draw.choice([None, None, {"source": {"path": self.draw.choice(PATHS)}}]),
            }
            for name in self.draw.sample(NAMES, self.draw.randint(0, 3))
        ]
        return {"generation": generation, "adapters": adapters}

    async def run_random_events(self) -> AdapterCatalog:
        """Cause random events at random times; returns the last catalog."""
        given, generation = [self.document(0)], 0
        for _ in range(self.draw.randint(3, 25)):
            match self.draw.choice(["new", "new", "back", "content", "process"]):
                case "content":
                    self.contents[self.draw.choice(PATHS)] = self.draw.choice(CONTENTS)
                case "process":
                    self.toggle_process(self.draw.choice(PROCESSES))
                case what:
                    generation += self.draw.choice([0, 1])
                    given.append(self.document(0) if what == "new" else self.draw.choice(given))
                    self.manager.set_catalog(AdapterCatalog.from_json(given[-1] | {"generation": generation}))
            if self.draw.random() < 0.6:
                await asyncio.sleep(self.draw.choice([0.0, 0.1, 5.0]) * self.draw.random())
        for name in PROCESSES:
            if getattr(self.handles, name) is None:
                self.toggle_process(name)
        last = AdapterCatalog.from_json(given[-1] | {"generation": generation + 1})
        self.manager.set_catalog(last)
        with pytest.raises(StaleCatalog):
            self.manager.set_catalog(AdapterCatalog(generation))
        return last

    def check(self, last: AdapterCatalog) -> None:
        statuses = {status.name: status for status in self.manager.statuses()}
        assert statuses.keys() == {adapter.name for adapter in last.adapters}
        for adapter in last.adapters:
            content, status = self.contents[str(adapter.source.path)], statuses[adapter.name]
            if content.startswith("good"):
                assert (status.state, status.digest) == (AdapterState.READY, content)
                assert self.text.names[adapter.name] == content
                assert self.handles.text and self.handles.text.limits_by_name.get(adapter.name) == adapter.limits
                assert (adapter.name in self.server.models) == (adapter.name in last.exposed_names())
            else:
                # Ready if an earlier version of the source was fetched.
                assert status.state is AdapterState.FAILED or content in ("away", "denied", "hostile")
                assert status.error or status.state is AdapterState.READY
            for held, role in ((adapter.candidate, status.candidate), (adapter.previous, status.previous)):
                assert (held is None) == (role is None)
                if held is not None and role is not None:
                    assert role.state in (AdapterState.VERIFIED, AdapterState.FAILED)
        for name in self.text.names:
            assert name in statuses
        for digest, pinned in self.core.slot_pinned_by_digest.items():
            assert digest in self.manager.digests_in_use() and pinned == self.manager._is_slot_pinned(digest)
        assert set(self.text.names.values()) <= self.core.slot_pinned_by_digest.keys()
        assert self.server.models <= self.text.names.keys() & last.exposed_names()


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_actual_state_matches_the_last_catalog(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 100):
        try:
            run_in_virtual_time(_run(random.Random(seed), tmp_path))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def _run(draw: random.Random, repository: Path) -> None:
    pod = PodHarness(draw, repository)
    last = await pod.run_random_events()
    # Longer than every retry delay.
    await asyncio.sleep(2000)
    pod.check(last)
    await pod.manager.close()
