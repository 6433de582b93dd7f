# SPDX-License-Identifier: Apache-2.0
"""A real server with real stubs and a fake text process (fake_text_process.py)."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from nodocker_cluster.ports import free_ports
from support.quire_serve import QuireServeProcess

from quire_server.model_server import launch, repository
from quire_server.model_server.client import ModelServerClient

BASE = "base"
SCRIPT = Path(__file__).with_name("fake_text_process.py")


class FrontendHarness(QuireServeProcess):
    """A server with the model `base` and adapter models that a test adds; requests are inherited.

    It does not call the constructor of QuireServeProcess, which starts `quire serve`.
    """

    def __init__(self, folder: Path, other_repository: Path | None = None) -> None:
        self.folder, self.other_repository = folder, other_repository
        self.log = folder / "server.log"
        self.journal = folder / "text.log"
        self.socket = folder / "text.sock"
        self.ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
        self.seen_processes: set[psutil.Process] = set()
        self.key, self.shm_prefix = launch.new_key(), launch.new_shm_prefix()
        repository.write_model(folder / "models", BASE, BASE, self.socket)
        self.text_process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        install, python = launch.find_server(), launch.current_interpreter()
        launch.preflight(install, python, num_models=2)
        options = launch.ServerOptions(
            repository=self.folder / "models",
            base=BASE,
            run_dir=self.folder,
            key=self.key,
            shm_prefix=self.shm_prefix,
            http_port=self.ports["http"],
            grpc_port=self.ports["grpc"],
            metrics_port=self.ports["metrics"],
            exit_timeout_s=5,
            other_repository=self.other_repository,
        )
        argv, env = launch.server_command(install, python, options)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        self.wait(lambda: self.request("http", f"/v2/models/{BASE}/ready").status == 200, 60, "ready")

    def start_text(self) -> None:
        """Start the fake text process and wait until it listens."""
        num_ready = len(self.journal_entries("ready"))
        self.text_process = subprocess.Popen([sys.executable, SCRIPT, self.socket, self.journal])
        wait_until(lambda: len(self.journal_entries("ready")) > num_ready, 60, "listening")

    def kill_text(self) -> None:
        assert self.text_process is not None
        self.text_process.kill()
        self.text_process.wait()

    def journal_entries(self, kind: str, **details: Any) -> list[dict[str, Any]]:
        """Return entries of the text process's journal."""
        if not self.journal.exists():
            return []
        lines = [json.loads(line) for line in self.journal.read_text().splitlines() if line.endswith("}")]
        return [entry for entry in lines if entry["kind"] == kind and details.items() <= entry.items()]

    def num_open_requests(self) -> int:
        """Return the number of open requests in the text process."""
        return next((entry["num"] for entry in reversed(self.journal_entries("open"))), 0)

    def client(self) -> ModelServerClient:
        return ModelServerClient(("127.0.0.1", self.ports["http"]), ("127.0.0.1", self.ports["grpc"]), self.key)

    def write_model(self, name: str, program: str = repository.MODEL_PY) -> str:
        """Write the folder of a model of ours, and return its name."""
        repository.write_model(self.folder / "models", name, BASE, self.socket, program)
        return name

    def add_model(self, name: str) -> None:
        """Load an adapter's model."""
        self.load_model(self.write_model(name))

    def load_model(self, name: str) -> None:
        """Load a model that has a folder."""

        async def load() -> None:
            async with self.client() as client:
                await client.load_model(name)

        asyncio.run(load())

    def remove_model(self, name: str) -> None:
        """Unload a model and wait until its stub has ended."""
        stub = self.stub(name)

        async def unload() -> None:
            async with self.client() as client:
                await client.unload_model(name)

        asyncio.run(unload())
        wait_until(lambda: not stub.is_running(), 10, "without the stub")

    def health(self) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def stop(self, timeout: float = 30.0) -> int:
        if hasattr(self, "process") and self.process.poll() is None:
            self.child_processes()
            self.process.terminate()
        code = self.process.wait(timeout)
        self.assert_nothing_left()
        return code

    def terminate(self) -> None:
        """Kill remaining processes and remove leftovers after a failure."""
        if self.text_process is not None and self.text_process.poll() is None:
            self.kill_text()
        if hasattr(self, "process") and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        launch.clear_shared_memory(self.shm_prefix)


@contextlib.contextmanager
def running_frontend(folder: Path, other_repository: Path | None = None) -> Iterator[FrontendHarness]:
    """Start a server with a fake text process; stop it at the end and check that nothing is left behind."""
    harness = FrontendHarness(folder, other_repository)
    try:
        harness.start_text()
        harness.start()
        yield harness
        harness.stop()
    finally:
        harness.terminate()


def scripted_text(end: int, start: int = 0) -> str:
    """Return the output of the fake text process for tokens `start` to `end`."""
    return "".join(f"t{i} " for i in range(start, end))


def wait_until(condition, timeout: float, what: str) -> float:
    """Poll `condition`; return the seconds until it was true."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout:
            raise AssertionError(f"not {what} after {timeout} s")
        time.sleep(0.01)
    return time.monotonic() - started
