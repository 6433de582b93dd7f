# SPDX-License-Identifier: Apache-2.0
"""A real OpenAI front before real text and core processes, without the server and the supervisor."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
from nodocker_cluster.ports import free_ports
from support.engine_processes import EngineProcesses, engine_config, wait_for
from support.pod_config import write_pod_config

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples/models/tiny"


@dataclass
class Answer:
    """A response of any status."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"])


class OpenAIFront:
    """One running `python -m quire_server.openai`."""

    def __init__(
        self, engine: EngineProcesses, config: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """`config` is merged into the pod.json of the front."""
        self.engine = engine
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        document = json.loads(engine.config_file.read_text())
        self._config_file = write_pod_config(
            engine.folder / "front.json", document, {"openai": {"port": self.port}}, config or {}
        )
        self._env = dict(env or {})
        self._clients: list[openai.OpenAI] = []
        self.log_file = engine.folder / "openai.log"
        self.start()

    def start(self) -> None:
        """Start the process and wait until it answers."""
        command = [sys.executable, "-m", "quire_server.openai", f"--config={self._config_file}"]
        command.append(f"--run-dir={self.engine.folder}")
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=os.environ | self._env)
        wait_for(self._is_serving, what=f"front:\n{self.log_file.read_text()}")

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def close_clients(self) -> None:
        """Close the connections of all clients."""
        for client in self._clients:
            client.close()

    def client(self, api_key: str = "none", **options: Any) -> openai.OpenAI:
        """Return a client without retries, which is closed together with the front."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60, **options)
        self._clients.append(client)
        return client

    def request(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
    ) -> Answer:
        """Send a request with any body; never raises for a status."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        http_request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(http_request, timeout=60) as response:
                return _answer(response.status, response.read(), response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error.read(), error.headers)

    def complete(self, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
        """POST /v1/completions."""
        return self.request("/v1/completions", {"model": "base", **fields}, headers)

    def engine_is_busy(self) -> None:
        """Wait until the engine runs a sequence."""
        wait_for(lambda: self.engine.core_stats()["num_running"], what="a running sequence")

    def text_workers(self, module: str) -> list[psutil.Process]:
        """Return the processes of a module that the text process started and that live."""
        found = []
        for child in psutil.Process(self.engine.processes["text"].pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since
                found += [child] if module in child.cmdline() else []
        return found

    def memory_bytes(self) -> int:
        """Return the resident memory of the front."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def _is_serving(self) -> bool:
        assert self.process.poll() is None, self.log_file.read_text()
        try:
            return self.request("/health").status == 200
        except OSError:
            return False


@contextlib.contextmanager
def running_front(
    folder: Path,
    openai: Mapping[str, Any] | None = None,
    model: Path = TINY,
    env: Mapping[str, str] | None = None,
    num_threads: int | None = 1,
    **config: Any,
) -> Iterator[OpenAIFront]:
    """Start text, core and front; check at the end that no request is left in the engine.

    `openai` are settings of the front. `num_threads` are those of the engine, None for the default.
    """
    with EngineProcesses(folder, num_threads, **engine_config(model, **config)) as engine:
        engine.start("core", "text")
        with engine.connect("text", "supervisor") as supervisor:
            supervisor.call("set_adapters", adapters={}, limits={})
        front = OpenAIFront(engine, {"openai": openai or {}}, env)
        try:
            yield front
            engine.wait_idle()
            assert front.stop() == 0
        finally:
            front.close_clients()
            front.kill()


@contextlib.asynccontextmanager
async def connect(address: tuple[str, int]) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection, and close it at the end."""
    reader, writer = await asyncio.open_connection(*address)
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _answer(status: int, body: bytes, headers: Any) -> Answer:
    try:
        document = body if headers.get("Content-Type") == "application/octet-stream" else json.loads(body)
    except ValueError:
        document = body.decode(errors="replace")
    return Answer(status, document, {name.lower(): value for name, value in headers.items()})
