# SPDX-License-Identifier: Apache-2.0
"""A real supervisor and a real server with fake text and core processes (see fake_engine.py)."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from nodocker_cluster.ports import free_ports
from support import fake_engine
from support.pod_config import write_pod_config
from support.quire_serve import PORTS, QuireServeProcess, command_line

from quire_spec.protocol.client import Client
from quire_spec.protocol.messages import Hello


def adapter_folder(folder: Path, rank: int = 8, weights: bytes = b"w" * 1000) -> Path:
    """Write an adapter; the fake core accepts it unless its rank is 0."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def catalog(generation: int, **folders: Any) -> dict[str, Any]:
    """Return a catalog of path sources. A dict instead of a folder is the adapter's entry without its name."""
    adapters = [
        {"name": name, **(entry if isinstance(entry, dict) else {"source": {"path": str(entry)}})}
        for name, entry in folders.items()
    ]
    return {"generation": generation, "adapters": adapters}


class SupervisorHarness(QuireServeProcess):
    """One running `python -m quire_server`."""

    def __init__(
        self, folder: Path, adapters: dict[str, Any], *config: Mapping[str, Any], run_dir: Path | None, **behaviour: Any
    ) -> None:
        self.folder = folder
        self.ports = dict(zip(PORTS, free_ports(4), strict=True))
        self.run_dir = run_dir or folder / "run"
        self.log, self.stdout = folder / "log", folder / "out"
        (folder / "adapters.json").write_text(json.dumps(adapters))
        document = {"servedName": "tales", "ports": self.ports, "sources": {"allowPaths": True}}
        config_file = write_pod_config(folder / "pod.json", document, *config)
        command = [sys.executable, "-m", "quire_server", f"--config={config_file}"]
        command += [f"--run-dir={self.run_dir}", f"--cache-dir={folder / 'cache'}"]
        env = fake_engine.install(folder / "fake-engine", **behaviour)
        with self.log.open("wb") as log, self.stdout.open("wb") as stdout:
            self.process = subprocess.Popen(command, stdout=stdout, stderr=log, env=env, start_new_session=True)
        self.seen_processes: set[psutil.Process] = set()

    def set_behaviour(self, **behaviour: Any) -> None:
        """Change the behaviour of the fakes, effective at their next start."""
        fake_engine.set_behaviour(self.folder / "fake-engine", **behaviour)

    def core_adapter_digests(self) -> dict[str, str]:
        """Return the core's adapter digests, with host or slot."""
        return dict(asyncio.run(self._status_of("core"))["adapters"])

    def num_open_requests(self) -> int:
        """Return the number of open requests in the text process."""
        return int(asyncio.run(self._status_of("text"))["num_open"])

    async def _status_of(self, name: str) -> Any:
        client = Client(self.run_dir / f"{name}.sock", Hello("supervisor"), name)
        await client.connect()
        try:
            return await client.call("status", dict[str, Any], timeout_s=5)
        finally:
            await client.close()

    def shared_memory_regions(self) -> set[str]:
        """Return the shared memory regions of the server, by the prefix on its command line."""
        return {name for name in os.listdir("/dev/shm") if name.startswith(self.shm_prefix())}

    def shm_prefix(self) -> str:
        for process in self.child_processes():
            for word in command_line(process):
                if "shm-region-prefix-name=" in word:
                    return word.rpartition("=")[2]
        raise AssertionError("no server is running")


@contextlib.contextmanager
def running_supervisor(
    folder: Path, adapters: dict[str, Any], *config: Mapping[str, Any], run_dir: Path | None = None, **behaviour: Any
) -> Iterator[SupervisorHarness]:
    """Start a supervisor, wait until it is ready, stop it at the end, and check that nothing is left behind.

    The mappings of `config` are merged into its pod.json.
    """
    with started_supervisor(folder, adapters, *config, run_dir=run_dir, **behaviour) as harness:
        harness.wait_ready(30)
        yield harness
        assert harness.stop() == 0
        assert not harness.run_dir.exists()


@contextlib.contextmanager
def started_supervisor(
    folder: Path, adapters: dict[str, Any], *config: Mapping[str, Any], run_dir: Path | None = None, **behaviour: Any
) -> Iterator[SupervisorHarness]:
    """Start a supervisor; kill it at the end if it still runs."""
    folder.mkdir(exist_ok=True)
    harness = SupervisorHarness(folder, adapters, *config, run_dir=run_dir, **behaviour)
    try:
        yield harness
    finally:
        if harness.process.poll() is None:
            harness.kill()
            harness.assert_nothing_left()
        harness.clean_up()
