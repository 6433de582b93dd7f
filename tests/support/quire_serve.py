# SPDX-License-Identifier: Apache-2.0
"""Harness of a real `quire serve` process: startup and shutdown, requests, child processes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
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
"""Ports of a supervisor; `quire serve` also has one for the OpenAI API."""


@dataclass
class HttpResponse:
    """An HTTP response of any status."""

    status: int
    body: Any


@dataclass
class StreamedResponse:
    """Output of one streamed request, and how it ended."""

    pieces: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    """Error of the server or the connection; None after a complete response."""
    ended_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class QuireServeProcess:
    """One running `quire serve`."""

    host = "127.0.0.1"

    def __init__(
        self,
        document: dict[str, Any] | Path | str,
        folder: Path,
        *flags: str,
        host: str = "127.0.0.1",
        ports: dict[str, int] | None = None,
        env: dict[str, str] | None = None,
        program: Path | None = None,
    ) -> None:
        """Start it in `folder`. `document` is an LLMService, the path of a vllm_backend repository, or as a str the
        argument MODEL. It listens on `host`, by default on free ports. `program`: `quire` of another environment."""
        self.folder, self.host = folder, host
        self.ports = ports or dict(zip((*PORTS, "openai"), free_ports(5), strict=True))
        self.file = folder / "llmservice.yaml"
        if isinstance(document, Path):
            what = [f"--vllm-repository={document}"]
        elif isinstance(document, str):
            what = [document]
        else:
            self.file.write_text(yaml.safe_dump(document))
            what = ["-f", str(self.file)]
        self.log = folder / "serve.log"
        ports = [f"--{name}-port={port}" for name, port in self.ports.items()]
        command = [str(program or Path(sys.executable).with_name("quire")), "serve", *what]
        command += [f"--host={host}", *ports, f"--run-dir={folder / 'run'}", f"--cache-dir={folder / 'cache'}", *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )
        self.seen_processes: set[psutil.Process] = set()

    # Lifecycle

    def wait_ready(self, timeout: float = 90.0) -> None:
        """Wait until the health port reports ready; fail with the log."""
        self.wait(lambda: self.health()[0] == 200, timeout, "ready")

    def wait(self, condition, timeout: float, what: str) -> float:
        """Poll `condition`; return the seconds until it was true."""
        started = time.monotonic()
        while time.monotonic() - started < timeout:
            if condition():
                return time.monotonic() - started
            if self.process.poll() is not None:
                raise AssertionError(f"quire serve ended with {self.process.returncode}:\n{self.tail()}")
            time.sleep(0.02)
        raise AssertionError(f"not {what} after {timeout} s: {self.health()}\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def child_processes(self) -> list[psutil.Process]:
        """Return all living descendants."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.seen_processes |= {*children, psutil.Process(self.process.pid)}
        return children

    def pid(self, name: str, key: str = "") -> int:
        """Return the process id of core, text or server from the status document."""
        return int(self.status(key)["processes"][name]["pid"])

    def is_restarted(self, name: str, old_pid: int) -> bool:
        """Return whether a process runs under a new id. Between two processes, it has none."""
        return self.status()["processes"][name]["pid"] not in (None, old_pid)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the process and all its descendants, including reaped ones."""
        total = 0.0
        for process in (psutil.Process(self.process.pid), *self.child_processes()):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since
                total += sum(process.cpu_times()[:4])  # its own and those of reaped children
        return total

    def stub(self, model: str) -> psutil.Process:
        """Return a model's stub process."""
        for process in self.child_processes():
            line = command_line(process)
            if "triton_python_backend_stub" in "".join(line[:1]) and f"{model}_0_0" in line:
                return process
        raise AssertionError(f"no stub of {model!r} among {self.child_processes()}")

    def stop(self, timeout: float = 60.0) -> int:
        """Send SIGTERM, wait, check that nothing is left behind, and return the exit code."""
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
        """Send SIGKILL to the supervisor, like the kernel's OOM killer."""
        self.child_processes()
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def clean_up(self) -> None:
        """Remove leftovers of a killed supervisor, like the next one in the same run folder does at its start."""
        if (self.folder / "run").is_dir():
            run_dir.clean(self.folder / "run")

    def assert_nothing_left(self, seconds: float = 20.0) -> None:
        """Check that all processes ever seen have ended."""
        deadline = time.monotonic() + seconds
        while alive_processes := [process for process in self.seen_processes if is_alive(process)]:
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {[str(process) for process in alive_processes]}")
            time.sleep(0.05)

    # Health and admin

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return status and body of /health/ready; (0, {}) if the connection fails."""
        response = self.request("health", "/health/ready", timeout=5)
        return response.status, response.body if isinstance(response.body, dict) else {}

    def status(self, key: str = "") -> dict[str, Any]:
        """Return the status document."""
        response = self.request("health", "/status", key=key)
        assert response.status == 200, response
        return response.body

    def adapter(self, name: str) -> dict[str, Any]:
        """Return an adapter's entry of the status document; empty if it has none."""
        return next((a for a in self.status()["adapters"] if a["name"] == name), {})

    def put_adapters(self, document: dict[str, Any]) -> HttpResponse:
        """Push an adapter catalog."""
        return self.request("health", "/adapters", document, method="PUT")

    def metrics(self) -> str:
        """Return the supervisor's metrics page."""
        return str(self.request("health", "/metrics").body)

    # Requests

    def request(
        self,
        port: str,
        path: str,
        body: Any = None,
        method: str | None = None,
        timeout: float = 60,
        key: str = "",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> HttpResponse:
        """Send an HTTP request. Never raises for a status; returns (0, reason) if the connection fails."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        url = f"http://{self.host}:{self.ports[port]}{path}"
        own = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        http_request = urllib.request.Request(url, data, own | dict(headers), method=method)
        try:
            with urllib.request.urlopen(http_request, timeout=timeout) as response:
                return HttpResponse(response.status, _parse_body(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return HttpResponse(error.code, _parse_body(error.read()))
        except OSError as error:
            return HttpResponse(0, str(error))

    def generate(self, model: str, prompt: str, **parameters: Any) -> HttpResponse:
        """Call HTTP generate."""
        return self.request("http", f"/v2/models/{model}/generate", {"text_input": prompt, **parameters})

    def text(self, model: str, prompt: str, **parameters: Any) -> str:
        """Return the text of a successful HTTP generate, without the prompt."""
        response = self.generate(model, prompt, exclude_input_in_output=True, **parameters)
        assert response.status == 200, response
        return str(response.body["text_output"])

    async def http_stream(
        self, model: str, prompt: str, streamed_response: StreamedResponse | None = None, **parameters: Any
    ) -> StreamedResponse:
        """Read an HTTP generate_stream until its end or the end of the connection."""
        streamed = streamed_response or StreamedResponse()
        url = f"http://{self.host}:{self.ports['http']}/v2/models/{model}/generate_stream"
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
        """Call ModelStreamInfer with the asyncio client on a new connection."""
        streamed = streamed_response or StreamedResponse()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": model,
                "inputs": [grpc_text(prompt), grpc_flag("stream", True)],
                "parameters": parameters,
            }

        address = f"{self.host}:{self.ports['grpc']}"
        try:
            async with grpcaio.InferenceServerClient(address) as client:
                async for result, error in client.stream_infer(requests()):
                    # Read to the end, even after an error: release 24.10 can leak a request whose stream is cancelled
                    # on its last response.
                    if error is not None:
                        streamed.error = str(error)
                    elif (piece := result.as_numpy("text_output")) is not None:
                        streamed.pieces.append(piece[0].decode())
        except Exception as error:  # the client raises several types for a lost connection
            streamed.error = f"{type(error).__name__}: {error}"
        streamed.ended_at = time.monotonic()
        return streamed

    async def open_streams(
        self, models: Sequence[str], prompt: str = "x", **parameters: Any
    ) -> tuple[list[StreamedResponse], list[asyncio.Task[StreamedResponse]]]:
        """Open a stream per entry of `models`, alternately over gRPC and HTTP; wait for the first output of each."""
        calls = (self.grpc_stream, self.http_stream)
        streams = [StreamedResponse() for _ in models]
        tasks = [
            asyncio.create_task(calls[i % 2](model, prompt, streams[i], **parameters)) for i, model in enumerate(models)
        ]
        async with asyncio.timeout(20):
            while not all(stream.pieces for stream in streams):
                assert not any(task.done() for task in tasks), [stream.error for stream in streams]
                await asyncio.sleep(0.01)
        return streams, tasks

    @contextlib.contextmanager
    def sampled_unreadiness(self) -> Iterator[list[str]]:
        """Collect the reasons of non-readiness in a thread."""
        reasons: list[str] = []
        stop = threading.Event()

        def sample() -> None:
            while not stop.wait(0.01):
                status, body = self.health()
                if status != 200:
                    reasons.append(str(body.get("reason")))

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield reasons
        finally:
            stop.set()
            thread.join()


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended or is in the middle of an exec."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def grpc_text(prompt: str | bytes) -> grpcclient.InferInput:
    """Return the text_input tensor."""
    tensor = grpcclient.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt if isinstance(prompt, bytes) else prompt.encode()], dtype=np.object_))
    return tensor


def grpc_flag(name: str, value: bool) -> grpcclient.InferInput:
    """Return a BOOL tensor of one element."""
    tensor = grpcclient.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def example_adapters() -> dict[str, Path]:
    """Return the folders of the adapters of examples/llmservice.yaml by name."""
    return {adapter["name"]: Path(adapter["source"]["path"]) for adapter in example_document()["spec"]["adapters"]}


def example_document() -> dict[str, Any]:
    """Return examples/llmservice.yaml in float32, with absolute paths, so that it works from any folder."""
    document = yaml.safe_load((EXAMPLES / "llmservice.yaml").read_text())
    # Tests compare texts between different batches. In bf16 the order of summation can flip a near tie.
    document["spec"]["engine"] = {"dtype": "float32"}
    source = document["spec"]["model"]["source"]
    source["path"] = str(EXAMPLES / source["path"])
    for adapter in document["spec"]["adapters"]:
        adapter["source"]["path"] = str(EXAMPLES / adapter["source"]["path"])
    return document


@contextlib.contextmanager
def running_service(
    document: dict[str, Any] | Path, folder: Path, *flags: str, ready_port: str = "health"
) -> Iterator[QuireServeProcess]:
    """Start a service, wait until it is ready, stop it at the end, and check that nothing is left behind.

    With `ready_port` http, the server's own readiness is polled, as clients of vllm_backend do.
    """
    service = QuireServeProcess(document, folder, *flags)
    try:
        if ready_port == "health":
            service.wait_ready()
        else:
            service.wait(lambda: service.request(ready_port, "/v2/health/ready").status == 200, 90, "ready")
        yield service
        service.stop()
    finally:
        if service.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                service.kill()
                service.assert_nothing_left()
        service.clean_up()


def run_concurrently(*coroutines: Any, timeout: float = 60.0) -> list[Any]:
    """Run coroutines concurrently in a new event loop; return their results."""

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
    """Return True if the process runs and is not a zombie."""
    try:
        # is_running also compares the start time, because the process id can be reused.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
