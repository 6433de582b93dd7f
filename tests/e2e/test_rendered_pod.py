# SPDX-License-Identifier: Apache-2.0
"""The rendered pod runs: its container's arguments, files and folders are laid out as a kubelet does, without one."""

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from nodocker_cluster.ports import free_ports
from support.planning import llm_service
from support.quire_serve import EXAMPLES, PORTS, QuireServeProcess

from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.checkpoint_files import read_local_checkpoint
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.planner import make_plan
from quire_operator.render.context import RenderContext
from quire_operator.render.objects import render_objects

KEY = "rendered-key"
SPEC = """
device: CPU
model: {source: {pvc: {claimName: shared, path: models/tiny}}, servedName: tales}
adapters:
- {name: pirate, source: {pvc: {claimName: shared, path: adapters/pirate}}, pinned: true}
- {name: sql, source: {pvc: {claimName: shared, path: adapters/sql}}}
lora: {maxLoaded: 2, maxRank: 16}
rollout: {drainSeconds: 7}
runtime: {ports: {http: %d, grpc: %d, metrics: %d, health: %d}}
"""


class RenderedPod(QuireServeProcess):
    """The container `server` of a Deployment as a local process, with its volumes as folders below `folder`."""

    def __init__(self, manifests, folder: Path, ports: dict[str, int]) -> None:
        self.folder, self.ports, self.seen_processes = folder, ports, set()
        self.log = folder / "pod.log"
        data = {m["metadata"]["name"]: _content(m) for m in manifests if m["kind"] in ("ConfigMap", "Secret")}
        (template,) = [m["spec"]["template"]["spec"] for m in manifests if m["kind"] == "Deployment"]
        (self.container,) = template["containers"]
        volumes = {volume["name"]: volume for volume in template["volumes"]}
        self.mounts = {}
        for mount in self.container["volumeMounts"]:
            self.mounts[mount["mountPath"]] = self._volume(volumes[mount["name"]], data)
        for name in ("engine", "catalogue"):
            for file in (folder / name).iterdir():
                file.write_text(self.local(file.read_text()))
        command = [sys.executable, "-m", "quire_server", *map(self.local, self.container["args"])]
        home = str(self.mounts["/var/lib/quire"])
        environment = {"PATH": os.environ["PATH"], "HOME": home, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=home, start_new_session=True
            )

    def local(self, text: str) -> str:
        """Return the text with the pod's mount paths replaced by local folders."""
        for path in sorted(self.mounts, key=len, reverse=True):
            if path != "/tmp":
                text = text.replace(path, str(self.mounts[path]))
        return text

    def _volume(self, volume, data) -> Path:
        if "persistentVolumeClaim" in volume:
            return EXAMPLES
        if volume["name"] == "shm":
            return Path("/dev/shm")
        path = self.folder / volume["name"]
        path.mkdir()
        source = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        for name, text in data.get(source, {}).items():
            (path / name).write_text(text)
        return path


def _content(manifest) -> dict[str, str]:
    if manifest["kind"] == "Secret":
        return {name: base64.b64decode(value).decode() for name, value in manifest["data"].items()}
    return manifest["data"]


@pytest.mark.server
def test_rendered_pod_runs(tmp_path):
    ports = free_ports(4)
    service = llm_service(SPEC % tuple(ports), "rendered")
    checkpoint = asyncio.run(read_local_checkpoint(EXAMPLES / "models/tiny", CheckpointInfo.from_files))
    plan = make_plan(PlannerInputs.from_service(service, checkpoint, None))
    manifests = render_objects(service, plan, RenderContext(admin_key=KEY)).manifests
    pod = RenderedPod(manifests, tmp_path, dict(zip(PORTS, ports, strict=True)))
    try:
        startup = pod.container["startupProbe"]
        pod.wait_ready(startup["periodSeconds"] * startup["failureThreshold"])
        assert pod.request("health", "/status").status == 401
        status = pod.request("health", "/status", key=KEY).body
        assert sorted(status["models"]) == ["pirate", "sql", "tales"]
        # The KV cache has the planned size, to the block.
        memory = status["memory"]
        assert 0 <= plan.bytes.kv - memory["kv_bytes"] < memory["kv_bytes"] / memory["num_blocks"]
        assert memory["max_model_len"] == plan.maxModelLen.value
        # The plan assumes float32; the engine uses bfloat16 if the CPU supports it.
        for name, planned in (("weights_bytes", plan.bytes.weights), ("lora_bytes", plan.bytes.lora)):
            assert memory[name] <= planned, (name, memory[name], planned)
        response = pod.request("http", "/v2/models/pirate/generate", {"text_input": "Hello", "max_tokens": 4})
        assert response.status == 200, response
        used = sum(p.memory_full_info().pss for p in (psutil.Process(pod.process.pid), *pod.child_processes()))
        assert used < plan.hostBytes.total
    finally:
        assert pod.stop(service.spec.rollout.drainSeconds + 35) == 0
