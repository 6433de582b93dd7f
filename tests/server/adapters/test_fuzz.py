# SPDX-License-Identifier: Apache-2.0
"""Random catalogues, sources and deaths of processes: what is in place in the end is what the last catalogue says.

In a time that does not pass, so that it is quick, and the same for the same seed. What it has found before is told
step by step in the files beside it.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.virtual_time import run_in_virtual_time

from quire_server.adapters.fetcher import CachedAdapter
from quire_server.adapters.manager import AdapterManager, StaleCatalog
from quire_server.clients.control_client import ConnectionLost
from quire_server.clients.handles import CoreHandle, ProcessHandles, ServerHandle, TextHandle
from quire_spec.documents.adapter_catalog import AdapterCatalog, Source
from quire_spec.documents.pod_status import AdapterState
from quire_spec.errors import AccessDenied, InvalidArgument, Unavailable

NAMES = ["a", "b", "c"]
PLACES = [f"/{i}" for i in range(4)]
PROCESSES = ["core", "text", "server"]
CONTENTS = [f"good{i}" for i in range(5)] * 2 + ["bad0", "bad1", "away", "denied", "hostile"]


class Process:
    """A process that takes its time for each call, and may die in it."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.gone = asyncio.Event()
        self.adapters: dict[str, bool] = {}
        self.names: dict[str, str] = {}
        self.models: set[str] = set()

    async def pause(self) -> None:
        try:
            async with asyncio.timeout(self.world.draw.choice([0.0, 0.01, 1.0, 8.0]) * self.world.draw.random()):
                await self.gone.wait()
        except TimeoutError:
            return
        raise ConnectionLost("gone")

    async def call(self, method: str, args: dict[str, Any], *, timeout_s: float) -> None:
        if method == "set_adapters":
            self.names = args["adapters"]
        await self.pause()
        if method == "load_adapter":
            if args["digest"].startswith("bad"):
                raise InvalidArgument("bad")
            self.adapters[args["digest"]] = args["pinned"]
        elif method == "unload_adapter":
            text = self.world.text
            assert text.gone.is_set() or args["digest"] not in text.names.values(), "a name stands for it"
            del self.adapters[args["digest"]]
        await self.pause()

    async def load_model(self, name: str, config: object, files: object) -> None:
        await self.pause()
        self.models.add(name)

    async def unload_model(self, name: str) -> None:
        await self.pause()
        self.models.discard(name)


class World:
    """A board with its processes and sources. It is the fetcher, too."""

    core: Process
    text: Process
    server: Process

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.contents = {place: draw.choice(CONTENTS) for place in PLACES}
        self.links = ProcessHandles()
        self.board = AdapterManager("tales", self, self.links)  # type: ignore[arg-type]
        for name in PROCESSES:
            self.turn(name)

    def turn(self, name: str) -> None:
        """Start a process, or kill it."""
        if getattr(self.links, name) is not None:
            getattr(self, name).gone.set()
            setattr(self.links, name, None)
        else:
            process: Any = Process(self)
            setattr(self, name, process)
            made = {
                "core": lambda: CoreHandle(process, {}),
                "text": lambda: TextHandle(process),
                "server": lambda: ServerHandle(process, "tales", Path("text.sock"), lambda: None, lambda name: None),
            }
            setattr(self.links, name, made[name]())
        self.board.resync()

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
                "source": {"path": self.draw.choice(PLACES)},
                "pinned": self.draw.random() < 0.3,
                "expose": self.draw.choice([None, "Model", "Parameter"]),
                "limits": self.draw.choice([None, None, {"maxConcurrentRequests": 2}]),
            }
            for name in self.draw.sample(NAMES, self.draw.randint(0, 3))
        ]
        return {"generation": generation, "adapters": adapters}

    async def happen(self) -> AdapterCatalog:
        """Random things at random times; returns the last catalogue."""
        given, generation = [self.document(0)], 0
        for _ in range(self.draw.randint(3, 25)):
            match self.draw.choice(["new", "new", "back", "content", "process"]):
                case "content":
                    self.contents[self.draw.choice(PLACES)] = self.draw.choice(CONTENTS)
                case "process":
                    self.turn(self.draw.choice(PROCESSES))
                case what:
                    generation += self.draw.choice([0, 1])
                    given.append(self.document(0) if what == "new" else self.draw.choice(given))
                    self.board.set_catalog(AdapterCatalog.from_json(given[-1] | {"generation": generation}))
            if self.draw.random() < 0.6:
                await asyncio.sleep(self.draw.choice([0.0, 0.1, 5.0]) * self.draw.random())
        for name in PROCESSES:
            if getattr(self.links, name) is None:
                self.turn(name)
        last = AdapterCatalog.from_json(given[-1] | {"generation": generation + 1})
        self.board.set_catalog(last)
        with pytest.raises(StaleCatalog):
            self.board.set_catalog(AdapterCatalog(generation))
        return last

    def check(self, last: AdapterCatalog) -> None:
        statuses = {status.name: status for status in self.board.statuses()}
        assert statuses.keys() == {adapter.name for adapter in last.adapters}
        for adapter in last.adapters:
            content, status = self.contents[str(adapter.source.path)], statuses[adapter.name]
            if content.startswith("good"):
                assert (status.state, status.digest) == (AdapterState.READY, content)
                assert self.text.names[adapter.name] == content
                assert self.links.text and self.links.text.limits.get(adapter.name) == adapter.limits
                assert (adapter.name in self.server.models) == (adapter.name in last.exposed_names())
            else:
                # Or it has been there before.
                assert status.state is AdapterState.FAILED or content in ("away", "denied", "hostile")
                assert status.error or status.state is AdapterState.READY
        for name in self.text.names:
            assert name in statuses
        for digest, pinned in self.core.adapters.items():
            assert digest in self.board.digests_in_use() and pinned == self.board._is_pinned(digest)
        assert set(self.text.names.values()) <= self.core.adapters.keys()
        assert self.server.models <= self.text.names.keys() & last.exposed_names()


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_the_last_catalogue_is_what_is_in_place(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            run_in_virtual_time(_run(random.Random(seed)))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


async def _run(draw: random.Random) -> None:
    world = World(draw)
    last = await world.happen()
    # Longer than any pause before another try.
    await asyncio.sleep(2000)
    world.check(last)
    await world.board.close()
