# SPDX-License-Identifier: Apache-2.0
"""Real routers in front of two real servers that publish KV events."""

import contextlib
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nodocker_cluster.ports import free_ports
from support.kv_pods import ALWAYS_READ
from support.quire_serve import QuireServeProcess, running_service


@contextlib.contextmanager
def two_pods(document: dict[str, Any], folder: Path, shares_kv: bool = False) -> Iterator[list[QuireServeProcess]]:
    """Start two servers, which publish their KV events as vllm-router reads them. `shares_kv`: they read each
    other's KV blocks, also when other programs make reads slow."""
    transfer_ports = free_ports(2)
    peers = ",".join(f"127.0.0.1:{port}" for port in transfer_ports)
    key = folder / "key"
    key.touch(0o600)
    key.write_text("k" * 32)
    with contextlib.ExitStack() as stack:
        pods = []
        for name in ("pod-0", "pod-1"):
            (folder / name).mkdir()
            while (ports := free_ports(2))[1] != ports[0] + 1:
                pass
            flags = [f"--kv-events-port={ports[0]}", "--kv-events-topic="]
            if shares_kv:
                flags += [f"--kv-transfer-port={transfer_ports.pop()}", f"--kv-transfer-key-file={key}"]
                flags += [f"--kv-transfer-peers={peers}", ALWAYS_READ]
            pod = stack.enter_context(running_service(document, folder / name, *flags))
            pod.kv_events_port = ports[0]
            pods.append(pod)
        yield pods


class Router:
    """A running router."""

    def __init__(self, binaries: Path, kind: str, pods: list[QuireServeProcess], model: str, log: Path) -> None:
        """`kind` is the name of the program and the policy, such as vllm-router:kv_aware. With the policy `prefill`,
        vllm-router sends each request to the first pod for its prompt, and to the second pod for its output."""
        program, _, policy = kind.partition(":")
        port, self._metrics_port = free_ports(2)
        self.url, self._log = f"http://127.0.0.1:{port}", log
        urls = {f"http://127.0.0.1:{pod.ports['openai']}": pod.kv_events_port for pod in pods}
        command = [str(binaries / program), *({"vllm-router": []}.get(program, ["launch"]))]
        command += ["--host=127.0.0.1", f"--port={port}", f"--prometheus-port={self._metrics_port}"]
        if policy == "prefill":
            prefill, decode = urls
            command += ["--vllm-pd-disaggregation", "--prefill", prefill, "none", "--decode", decode]
        else:
            command += ["--worker-urls", *urls, "--policy", policy]
        if policy == "kv_aware":
            command += ["--kv-event-model", model]
            for url, events_port in urls.items():
                command += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{events_port}"]
                command += ["--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{events_port + 1}"]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Router":
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as response:
                if response.status == 200:
                    time.sleep(1.0)  # the subscriptions
                    return self
            time.sleep(0.2)
        self.__exit__()
        raise AssertionError(f"the router does not answer:\n{self._log.read_text(errors='replace')[-3000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def counter(self, pattern: str) -> float:
        """Return the sum of the series in the router's metrics whose names and labels match a pattern."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))
