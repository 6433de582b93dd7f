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
from cluster.ports import free_ports

from quire_server.supervisor import run_dir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PORTS = ("http", "grpc", "metrics", "health")


@dataclass
class Answer:
    """An HTTP answer, whatever its status."""

    status: int
    body: Any


@dataclass
class Stream:
    """What one streamed request gave, and how it ended."""

    pieces: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    """The server's error or the broken connection's; None for a proper end."""
    ended: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Service:
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
        self.family: set[psutil.Process] = set()

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

    def processes(self) -> list[psutil.Process]:
        """Everything that lives under it now."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.family |= {*found, psutil.Process(self.process.pid)}
        return found

    def pid(self, name: str) -> int:
        """Process id of core, text or server, from the status document."""
        return int(self.status()["processes"][name]["pid"])

    def processor_s(self) -> float:
        """Processor seconds that it and all that runs, or has run, under it have taken so far."""
        taken = 0.0
        for process in (psutil.Process(self.process.pid), *self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):  # gone since
                taken += sum(process.cpu_times()[:4])  # its own and, of those that are gone, what it has waited for
        return taken

    def stub(self, model: str) -> psutil.Process:
        """A model's stub."""
        for process in self.processes():
            line = command(process)
            if "triton_python_backend_stub" in "".join(line[:1]) and f"{model}_0_0" in line:
                return process
        raise AssertionError(f"no stub of {model!r} among {self.processes()}")

    def stop(self, timeout: float = 60.0) -> int:
        """SIGTERM, wait, and check that nothing is left behind; its exit code."""
        if self.process.poll() is None:
            self.processes()
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
        self.processes()
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def clear(self) -> None:
        """Remove what a killed one left outside of its processes, as the next one in its run folder does first."""
        if (self.folder / "run").is_dir():
            run_dir.clean(self.folder / "run")

    def copies(self) -> list[Path]:
        """Folders that its server keeps the models in that came by the repository API."""
        return copies_of(self.folder / "run/text.sock")

    def assert_nothing_left(self, seconds: float = 20.0) -> None:
        """Every process that was ever seen under it is gone."""
        deadline = time.monotonic() + seconds
        while left := [process for process in self.family if alive(process)]:
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {[str(process) for process in left]}")
            time.sleep(0.05)

    # Health and admin

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /health/ready; (0, {}) when nobody answers."""
        answer = self.request("health", "/health/ready", timeout=5)
        return answer.status, answer.body if isinstance(answer.body, dict) else {}

    def status(self) -> dict[str, Any]:
        """The status document."""
        answer = self.request("health", "/status")
        assert answer.status == 200, answer
        return answer.body

    def adapter(self, name: str) -> dict[str, Any]:
        """One adapter's entry of the status document; empty when it has none."""
        return next((a for a in self.status()["adapters"] if a["name"] == name), {})

    def put_adapters(self, document: dict[str, Any]) -> Answer:
        """Push a catalogue."""
        return self.request("health", "/adapters", document, method="PUT")

    def metrics(self) -> str:
        """The supervisor's metrics page."""
        return str(self.request("health", "/metrics").body)

    # Requests

    def request(
        self, port: str, path: str, body: Any = None, method: str | None = None, timeout: float = 60, key: str = ""
    ) -> Answer:
        """An HTTP request; never raises for a status, (0, reason) when the connection fails."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.ports[port]}{path}"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        wanted = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(wanted, timeout=timeout) as response:
                return Answer(response.status, _parsed(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _parsed(error.read()))
        except OSError as error:
            return Answer(0, str(error))

    def generate(self, model: str, prompt: str, **parameters: Any) -> Answer:
        """HTTP generate."""
        return self.request("http", f"/v2/models/{model}/generate", {"text_input": prompt, **parameters})

    def text(self, model: str, prompt: str, **parameters: Any) -> str:
        """Text of an HTTP generate that must succeed, without the prompt."""
        answer = self.generate(model, prompt, exclude_input_in_output=True, **parameters)
        assert answer.status == 200, answer
        return str(answer.body["text_output"])

    async def http_stream(self, model: str, prompt: str, into: Stream | None = None, **parameters: Any) -> Stream:
        """HTTP generate_stream to its end, or to the end of its connection."""
        out = into or Stream()
        url = f"http://127.0.0.1:{self.ports['http']}/v2/models/{model}/generate_stream"
        body = {"text_input": prompt, "stream": True, **parameters}
        try:
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        _take(out, json.loads(line[6:]))
                if response.status != 200:
                    out.error = out.error or f"HTTP {response.status}"
        except (aiohttp.ClientError, OSError) as error:
            out.error = f"{type(error).__name__}: {error}"
        out.ended = time.monotonic()
        return out

    async def grpc_stream(self, model: str, prompt: str, into: Stream | None = None, **parameters: Any) -> Stream:
        """ModelStreamInfer with the asyncio client, on a connection of its own."""
        out = into or Stream()

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
                        out.error = str(error)
                    elif (piece := result.as_numpy("text_output")) is not None:
                        out.pieces.append(piece[0].decode())
        except Exception as error:  # the client wraps a lost connection in several types
            out.error = f"{type(error).__name__}: {error}"
        out.ended = time.monotonic()
        return out


def copies_of(text_socket: Path) -> list[Path]:
    """Folders in which servers keep models of this socket."""
    found = []
    for config in Path("/tmp").glob("folder??????/config.pbtxt"):
        with contextlib.suppress(OSError):  # other servers' come and go
            if f'"{text_socket}"' in config.read_text():
                found.append(config.parent)
    return found


def command(process: psutil.Process) -> list[str]:
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


def example() -> dict[str, Any]:
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
def serving(document: dict[str, Any], folder: Path, *flags: str) -> Iterator[Service]:
    """A ready service, stopped afterwards with the check that nothing is left."""
    service = Service(document, folder, *flags)
    try:
        service.wait_ready()
        yield service
        service.stop()
    finally:
        if service.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                service.kill()
                service.assert_nothing_left()
        service.clear()


def run(*coroutines: Any, timeout: float = 60.0) -> list[Any]:
    """Results of coroutines run side by side in one loop."""

    async def gathered() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*coroutines), timeout)

    return asyncio.run(gathered())


def _take(out: Stream, event: dict[str, Any]) -> None:
    out.events.append(event)
    if "error" in event:
        out.error = str(event["error"])
    else:
        out.pieces.append(event.get("text_output", ""))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def alive(process: psutil.Process) -> bool:
    """Whether it runs: neither gone nor a zombie."""
    try:
        # Its number may be another one's by now.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
