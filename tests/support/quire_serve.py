# SPDX-License-Identifier: Apache-2.0
"""A real `quire serve`, started and watched for tests: its ports, its requests, its processes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import yaml
from nodocker_cluster.ports import free_ports

from quire_server.supervisor import run_dir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PORTS = ("http", "grpc", "metrics", "health")


@dataclass
class HttpResponse:
    """An HTTP answer, whatever its status."""

    status: int
    body: Any


@dataclass
class StreamedResponse:
    """What one streamed request gave, and how it ended."""

    pieces: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    """The server's error or the broken connection's; None for a proper end."""
    ended_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class QuireServeProcess:
    """One running `quire serve`."""

    def __init__(self, document: dict[str, Any], folder: Path, *flags: str) -> None:
        self.folder = folder
        self.ports = dict(zip(PORTS, free_ports(4), strict=True))
        self.file = folder / "llmservice.yaml"
        self.file.write_text(yaml.safe_dump(document))
        self.log = folder / "serve.log"
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        command = [str(Path(sys.executable).with_name("quire")), "serve", "-f", str(self.file)]
        command += [*ports, f"--run-dir={folder / 'run'}", f"--cache-dir={folder / 'cache'}", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.seen_processes: set[psutil.Process] = set()

    # Life

    def wait_ready(self, timeout: float = 90.0) -> None:
        """Until the health port says ready; fails with the log."""
        self.wait(lambda: self.health()[0] == 200, timeout, "ready")

    def wait(self, condition, timeout: float, what: str) -> float:
        """Poll `condition`; the seconds it took."""
        started = time.monotonic()
        while time.monotonic() - started < timeout:
            if condition():
                return time.monotonic() - started
            if self.process.poll() is not None:
                raise AssertionError(f"quire serve ended with {self.process.returncode}:\n{self.tail()}")
            time.sleep(0.02)
        raise AssertionError(f"not {what} after {timeout} s: {self.health()}\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def child_processes(self) -> list[psutil.Process]:
        """Everything that lives under it now."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.seen_processes |= {*children, psutil.Process(self.process.pid)}
        return children

    def pid(self, name: str) -> int:
        """Process id of core, text or server, from the status document."""
        return int(self.status()["processes"][name]["pid"])

    def cpu_seconds(self) -> float:
        """Processor seconds that it and all that runs, or has run, under it have taken so far."""
        total = 0.0
        for process in (psutil.Process(self.process.pid), *self.child_processes()):
            with contextlib.suppress(psutil.NoSuchProcess):  # gone since
                total += sum(process.cpu_times()[:4])  # its own and, of those that are gone, what it has waited for
        return total

    def stub(self, model: str) -> psutil.Process:
        """A model's stub."""
        for process in self.child_processes():
            line = command_line(process)
            if "triton_python_backend_stub" in "".join(line[:1]) and f"{model}_0_0" in line:
                return process
        raise AssertionError(f"no stub of {model!r} among {self.child_processes()}")

    def stop(self, timeout: float = 60.0) -> int:
        """SIGTERM, wait, and check that nothing is left behind; its exit code."""
        if self.process.poll() is None:
            self.child_processes()
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not stop in {timeout} s:\n{self.tail()}") from None
        self.assert_nothing_left()
        return code

    def kill(self) -> None:
        """SIGKILL to the supervisor itself, as the kernel's OOM killer would."""
        self.child_processes()
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def clean_up(self) -> None:
        """Remove what a killed one left outside of its processes, as the next one in its run folder does first."""
        if (self.folder / "run").is_dir():
            run_dir.clean(self.folder / "run")

    def model_copies(self) -> list[Path]:
        """Folders that its server keeps the models in that came by the repository API."""
        return model_copies_of(self.folder / "run/text.sock")

    def assert_nothing_left(self, seconds: float = 20.0) -> None:
        """Every process that was ever seen under it is gone."""
        deadline = time.monotonic() + seconds
        while alive_processes := [process for process in self.seen_processes if is_alive(process)]:
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {[str(process) for process in alive_processes]}")
            time.sleep(0.05)

    # Health and admin

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /health/ready; (0, {}) when nobody answers."""
        response = self.request("health", "/health/ready", timeout=5)
        return response.status, response.body if isinstance(response.body, dict) else {}

    def status(self) -> dict[str, Any]:
        """The status document."""
        response = self.request("health", "/status")
        assert response.status == 200, response
        return response.body

    def adapter(self, name: str) -> dict[str, Any]:
        """One adapter's entry of the status document; empty when it has none."""
        return next((a for a in self.status()["adapters"] if a["name"] == name), {})

    def put_adapters(self, document: dict[str, Any]) -> HttpResponse:
        """Push a catalogue."""
        return self.request("health", "/adapters", document, method="PUT")

    def metrics(self) -> str:
        """The supervisor's metrics page."""
        return str(self.request("health", "/metrics").body)

    # Requests

    def request(
        self, port: str, path: str, body: Any = None, method: str | None = None, timeout: float = 60, key: str = ""
    ) -> HttpResponse:
        """An HTTP request; never raises for a status, (0, reason) when the connection fails."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.ports[port]}{path}"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        http_request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(http_request, timeout=timeout) as response:
                return HttpResponse(response.status, _parse_body(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return HttpResponse(error.code, _parse_body(error.read()))
        except OSError as error:
            return HttpResponse(0, str(error))

    def generate(self, model: str, prompt: str, **parameters: Any) -> HttpResponse:
        """HTTP generate."""
        return self.request("http", f"/v2/models/{model}/generate", {"text_input": prompt, **parameters})

    def text(self, model: str, prompt: str, **parameters: Any) -> str:
        """Text of an HTTP generate that must succeed, without the prompt."""
        response = self.generate(model, prompt, exclude_input_in_output=True, **parameters)
        assert response.status == 200, response
        return str(response.body["text_output"])

    async def http_stream(
        self, model: str, prompt: str, streamed_response: StreamedResponse | None = None, **parameters: Any
    ) -> StreamedResponse:
        """HTTP generate_stream to its end, or to the end of its connection."""
        streamed = streamed_response or StreamedResponse()
        url = f"http://127.0.0.1:{self.ports['http']}/v2/models/{model}/generate_stream"
        body = {"text_input": prompt, "stream": True, **parameters}
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        _add_sse_event(streamed, json.loads(line[6:]))
                if response.status != 200:
                    streamed.error = streamed.error or f"HTTP {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            streamed.error = f"{type(error).__name__}: {error}"
        streamed.ended_at = time.monotonic()
        return streamed

    async def grpc_stream(
        self, model: str, prompt: str, streamed_response: StreamedResponse | None = None, **parameters: Any
    ) -> StreamedResponse:
        """ModelStreamInfer with the asyncio client, on a connection of its own."""
        streamed = streamed_response or StreamedResponse()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": model,
                "inputs": [grpc_text(prompt), grpc_flag("stream", True)],
                "parameters": parameters,
            }

        address = f"127.0.0.1:{self.ports['grpc']}"
        try:
            async with grpcaio.InferenceServerClient(address) as client:
                async for result, error in client.stream_infer(requests(), headers={"triton_grpc_error": "true"}):
                    # To its end, error or not: release 24.10 may leak a request whose stream is left on its last word.
                    if error is not None:
                        streamed.error = str(error)
                    elif (piece := result.as_numpy("text_output")) is not None:
                        streamed.pieces.append(piece[0].decode())
        except Exception as error:  # the client wraps a lost connection in several types
            streamed.error = f"{type(error).__name__}: {error}"
        streamed.ended_at = time.monotonic()
        return streamed


def model_copies_of(text_socket: Path) -> list[Path]:
    """Folders in which servers keep models of this socket."""
    folders = []
    for config in Path("/tmp").glob("folder??????/config.pbtxt"):
        with contextlib.suppress(OSError):  # other servers' come and go
            if f'"{text_socket}"' in config.read_text():
                folders.append(config.parent)
    return folders


def command_line(process: psutil.Process) -> list[str]:
    """Words that a process was started with; none where it is gone since, dead, or between two programs, at an exec."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def grpc_text(prompt: str | bytes) -> grpcclient.InferInput:
    """The text_input tensor."""
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt if isinstance(prompt, bytes) else prompt.encode()], dtype=np.object_))
    return tensor


def grpc_flag(name: str, value: bool) -> grpcclient.InferInput:
    """A BOOL tensor of one element."""
    tensor = grpcclient.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def example_document() -> dict[str, Any]:
    """examples/llmservice.yaml in float32, with absolute paths, so that it works from any folder."""
    document = yaml.safe_load((EXAMPLES / "llmservice.yaml").read_text())
    # Texts are compared between batches of different make-up: in bf16 the order of sums may turn a near tie round.
    document["spec"]["engine"] = {"dtype": "float32"}
    source = document["spec"]["model"]["source"]
    source["path"] = str(EXAMPLES / source["path"])
    for adapter in document["spec"]["adapters"]:
        adapter["source"]["path"] = str(EXAMPLES / adapter["source"]["path"])
    return document


@contextlib.contextmanager
def running_service(document: dict[str, Any], folder: Path, *flags: str) -> Iterator[QuireServeProcess]:
    """A ready service, stopped afterwards with the check that nothing is left."""
    service = QuireServeProcess(document, folder, *flags)
    try:
        service.wait_ready()
        yield service
        service.stop()
    finally:
        if service.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                service.kill()
                service.assert_nothing_left()
        service.clean_up()


def run_concurrently(*coroutines: Any, timeout: float = 60.0) -> list[Any]:
    """Results of coroutines run side by side in one loop."""

    async def gather() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*coroutines), timeout)

    return asyncio.run(gather())


def _add_sse_event(streamed: StreamedResponse, event: dict[str, Any]) -> None:
    streamed.events.append(event)
    if "error" in event:
        streamed.error = str(event["error"])
    else:
        streamed.pieces.append(event.get("text_output", ""))


def _parse_body(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: neither gone nor a zombie."""
    try:
        # Its number may be another one's by now.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
