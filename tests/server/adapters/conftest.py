# SPDX-License-Identifier: Apache-2.0
"""An adapter manager with its real handles and fetcher, and three in-memory processes, which can die between two calls.

test_supervisor.py tests the same with real processes.
"""

import asyncio
import contextlib

import pytest
from support.source_fixtures import serve  # noqa: F401
from support.supervisor_harness import adapter_folder, catalog

from quire_server.adapters import manager
from quire_server.adapters.fetcher import AdapterFetcher, SourceOptions
from quire_server.adapters.manager import AdapterManager
from quire_server.clients.handles import CoreHandle, ProcessHandles, ServerHandle, TextHandle
from quire_server.downloads.adapter_cache import AdapterCache
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.protocol.client import ConnectionLost
from quire_spec.protocol.messages import SchedulerStats
from quire_spec.protocol.results import AdapterCheck, CoreStatus, TextStatus

MEMORY = MeasuredMemory(1, 1, 1, 1, 1, 1, "float32", "cpu")


class Process:
    """Stands in for a Client and a ModelServerClient."""

    def __init__(self):
        self.calls = []
        self.closed = False
        self.errors = {}
        """Error by method."""
        self.checks = {}
        """Result of verify_adapter by digest."""
        self.results = {}
        """Result by method; None without an entry."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, method, result_type, args=None, *, timeout_s):
        self.calls.append((method, args))
        await self.gate.wait()
        if self.closed:
            raise ConnectionLost("gone")
        if method in self.errors:
            raise self.errors[method]
        if method == "verify_adapter":
            return self.checks.get(args["digest"], AdapterCheck(1.0))
        return self.results.get(method)

    async def load_model(self, name):
        await self.call("load_model", type(None), name, timeout_s=1)

    async def unload_model(self, name):
        await self.call("unload_model", type(None), name, timeout_s=1)

    def names(self, method):
        return [args for m, args in self.calls if m == method]


class PodHarness:
    """An adapter manager with its three processes."""

    def __init__(self, folder, session_fetcher):
        self.folder = folder
        self.handles = ProcessHandles()
        self.manager = AdapterManager("tales", session_fetcher, self.handles)
        self.up("core", "text", "server")

    def up(self, *names):
        """Start or restart processes."""
        for name in names:
            process = Process()
            setattr(self, name, process)
            match name:
                case "core":
                    self.handles.cores = {name: CoreHandle(process, CoreStatus("", MEMORY, {}, SchedulerStats()))}
                case "text":
                    self.handles.text = TextHandle(process, TextStatus("", True, 0, 0))
                case "server":
                    folders = self.folder / "repository", self.folder / "text.sock"
                    self.handles.server = ServerHandle(process, "tales", *folders, lambda: None, print)
        self.manager.resync()

    def up_core(self, name):
        """Start one of several cores."""
        process = Process()
        self.handles.cores[name] = CoreHandle(process, CoreStatus("", MEMORY, {}, SchedulerStats()))
        self.manager.resync()
        return process

    def down(self, name):
        getattr(self, name).closed = True
        if name == "core":
            del self.handles.cores[name]
        else:
            setattr(self.handles, name, None)
        self.manager.resync()

    def set_catalog(self, generation, **folders):
        self.manager.set_catalog(AdapterCatalog.from_json(catalog(generation, **folders)))

    def states(self):
        return {s.name: s.state.value for s in self.manager.statuses()}

    def status(self, name):
        return next(s for s in self.manager.statuses() if s.name == name)

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_states(self, **states):
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: self.states() == states)
        assert self.states() == states, self.manager.statuses()


@pytest.fixture
def make_pod():
    """The class of the harness; a test that creates one must close its manager."""
    return PodHarness


@pytest.fixture
async def pod(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "UNLOAD_DELAY_S", 0.02)
    monkeypatch.setattr("quire_server.downloads.resumable_download._FIRST_RETRY_S", 0.001)
    async with AdapterFetcher(AdapterCache(tmp_path / "cache"), SourceOptions(allow_paths=True)) as fetcher:
        pod = PodHarness(tmp_path, fetcher)
        yield pod
        await pod.manager.close()


@pytest.fixture
def one(tmp_path):
    return adapter_folder(tmp_path / "one", weights=b"1")


@pytest.fixture
def two(tmp_path):
    return adapter_folder(tmp_path / "two", weights=b"2")
