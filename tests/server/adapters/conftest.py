# SPDX-License-Identifier: Apache-2.0
"""A board of adapters with its links and fetcher, which are real. The three processes are in memory, because a real one
cannot be made to die between two given calls; with real ones the same is in test_supervisor.py.
"""

import asyncio
import contextlib

import pytest
from support.supervisor_harness import adapter_folder, catalog

from quire_server.adapters import manager
from quire_server.adapters.fetcher import AdapterFetcher, SourceOptions
from quire_server.adapters.manager import AdapterManager
from quire_server.clients.control_client import ConnectionLost
from quire_server.clients.handles import CoreHandle, ProcessHandles, ServerHandle, TextHandle
from quire_server.downloads.adapter_cache import AdapterCache
from quire_spec.documents.adapter_catalog import AdapterCatalog


class Process:
    """What answers a Control's calls."""

    def __init__(self):
        self.calls = []
        self.gone = False
        self.refuse = {}
        """Method to the error that it is answered with."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, method, args=None, *, timeout_s):
        self.calls.append((method, args))
        await self.gate.wait()
        if self.gone:
            raise ConnectionLost("gone")
        if method in self.refuse:
            raise self.refuse[method]
        return {}

    async def load_model(self, name, config, files):
        await self.call("load_model", name, timeout_s=1)

    async def unload_model(self, name):
        await self.call("unload_model", name, timeout_s=1)

    def names(self, method):
        return [args for m, args in self.calls if m == method]


class World:
    """A board with its three processes."""

    def __init__(self, folder, session_fetcher):
        self.folder = folder
        self.links = ProcessHandles()
        self.board = AdapterManager("tales", session_fetcher, self.links)
        self.up("core", "text", "server")

    def up(self, *names):
        """Start processes, anew if need be."""
        for name in names:
            process = Process()
            setattr(self, name, process)
            match name:
                case "core":
                    self.links.core = CoreHandle(process, {})
                case "text":
                    self.links.text = TextHandle(process)
                case "server":
                    self.links.server = ServerHandle(process, "tales", self.folder / "text.sock", lambda: None, print)
        self.board.resync()

    def down(self, name):
        getattr(self, name).gone = True
        setattr(self.links, name, None)
        self.board.resync()

    def want(self, generation, **folders):
        self.board.set_catalog(AdapterCatalog.from_json(catalog(generation, **folders)))

    def states(self):
        return {s.name: s.state.value for s in self.board.statuses()}

    def one(self, name):
        return next(s for s in self.board.statuses() if s.name == name)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_states(self, **states):
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: self.states() == states)
        assert self.states() == states, self.board.statuses()


@pytest.fixture
def world_of():
    """A world of a folder and a fetcher; whoever makes one closes its board."""
    return World


@pytest.fixture
async def world(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "UNLOAD_DELAY_S", 0.02)
    monkeypatch.setattr("quire_server.downloads.resumable_download._FIRST_RETRY_S", 0.001)
    async with AdapterFetcher(AdapterCache(tmp_path / "cache"), SourceOptions(allow_paths=True)) as fetcher:
        world = World(tmp_path, fetcher)
        yield world
        await world.board.close()


@pytest.fixture
def one(tmp_path):
    return adapter_folder(tmp_path / "one", weights=b"1")


@pytest.fixture
def two(tmp_path):
    return adapter_folder(tmp_path / "two", weights=b"2")
