# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` and clients of its completions, the same that measure the OpenAI front. Run by our interpreter.

Settings: `python`, of vLLM's own environment, and the arguments of the server as vllm_offline.py gets them. The server
belongs to the group of this process, so it is stopped between commands and killed with it.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import child
from clients import Clients

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT / "hack")]

from nodocker_cluster.ports import free_ports  # noqa: E402

NAME = "bench"
START_TIMEOUT_S = 240.0


class VllmServer:
    """One running `vllm serve`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        python, model = settings.pop("python"), settings.pop("model")
        [port] = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        options += ["--host=127.0.0.1", f"--port={port}", f"--served-model-name={NAME}", "--uvicorn-log-level=warning"]
        # Its "auto" keeps one core free for its scheduler, of two as well.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        defaults = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
        # The module that `vllm serve` runs: the command itself needs a package called vllm, not vllm-cpu.
        command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *options]
        self._process = subprocess.Popen(command, stdout=2, env=defaults | os.environ)
        self._clients = Clients({"model": NAME, "openai": port})
        self._wait_healthy()

    def about(self) -> dict[str, Any]:
        """Its version."""
        with urllib.request.urlopen(f"{self._url}/version", timeout=10) as response:
            version: dict[str, Any] = json.load(response)
        return version

    def run(self, requests: list[tuple[list[int], int]], offsets: list[float] | None) -> dict[str, Any]:
        """See measure.py."""
        return self._clients.run(requests, offsets, "openai")

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vllm serve did not start, exit code {self._process.poll()}")
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)


if __name__ == "__main__":
    answers = child.reserve_stdout()
    server = VllmServer(json.loads(sys.argv[1]))
    child.serve_commands(answers, about=server.about, run=server.run)
