# SPDX-License-Identifier: Apache-2.0
"""The rendered pod runs, without a kubelet."""

import asyncio

import psutil
import pytest
from nodocker_cluster.ports import free_ports
from support.planning import llm_service
from support.quire_serve import EXAMPLES, PORTS
from support.rendered_pod import RenderedPod

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
openai: {port: %d}
"""


@pytest.mark.server
def test_rendered_pod_runs(tmp_path):
    ports = free_ports(5)
    service = llm_service(SPEC % tuple(ports), "rendered")
    checkpoint = asyncio.run(read_local_checkpoint(EXAMPLES / "models/tiny", CheckpointInfo.from_files))
    plan = make_plan(PlannerInputs.from_service(service, checkpoint, None))
    manifests = render_objects(service, plan, RenderContext(admin_key=KEY)).manifests
    pod = RenderedPod(manifests, tmp_path, dict(zip((*PORTS, "openai"), ports, strict=True)))
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
