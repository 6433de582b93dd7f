# SPDX-License-Identifier: Apache-2.0
"""Rendered objects of services, as in a cluster."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from support.planning import MODELS

from quire_operator.api import crd
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.api.yaml_manifest import read_manifests
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.gpu import resolve_gpu
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import Plan
from quire_operator.plan.planner import make_plan
from quire_operator.render.context import OPTIONAL_KINDS, RenderContext
from quire_operator.render.objects import render_objects

Manifest = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
OPERATOR_PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "quire"}}}
RENDER_CONTEXT = RenderContext(
    admin_key="k", available_kinds=frozenset(OPTIONAL_KINDS), operator_peer=OPERATOR_PEER, owner_uid="u-1",
    credentials={"hf-token": {"token": "hf"}, "adapter-store": {"AWS_ACCESS_KEY_ID": "a"}, "unused": {"x": "y"}},
)  # fmt: skip

FULL_SPEC = """
model: {source: {s3: {uri: s3://models/llama, endpoint: http://minio:9000, credentialsSecretRef: {name: store}}}}
adapters:
- {name: a, source: {http: {url: https://h:8443/a, headersSecretRef: {name: web}}}}
- {name: b, source: {pvc: {claimName: loras, path: b}}}
engine: {maxModelLen: 8192, maxNumQueuedReqs: 64, prefixCaching: false}
openai:
  port: 9004
  apiKeysSecretRef: {name: api-keys}
  tlsSecretRef: {name: certificate}
  apiServerCount: 2
  sharedPrefixCache: true
  live: true
  generationConfig: vllm
  corsAllowedOrigins: [https://chat.example, "*"]
  limits: {maxBodySize: 16Mi}
  toolCallParser: hermes
  reasoningParser: none
  chatTemplate: {configMapKeyRef: {name: templates, key: chat}}
gpu: {product: NVIDIA-L4, count: 2, runtimeClassName: nvidia, nodeSelector: {pool: gpu}}
replicas: 3
autoscaling: {kind: ScaledObject, maxReplicas: 5, minReplicas: 2, prometheusAddress: http://prometheus:9090,
  pollingInterval: 15, authenticationRef: {name: thanos}, prometheusMetadata: {authModes: bearer},
  fallback: {replicas: 4}, triggers: [{type: cron, metadata: {timezone: UTC, start: 0 8 * * *, end: 0 18 * * *,
  desiredReplicas: "3"}}]}
cache: {mode: EmptyDir, size: 40Gi}
runtime:
  image: registry.example/quire:1
  imagePullSecrets: [{name: pull}]
  env: [{name: NCCL_DEBUG, value: INFO}]
  cpu: 1500m
  memory: 24Gi
  sharedMemory: 2Gi
  ports: {http: 9000}
rollout: {maxSurge: 1, maxUnavailable: 0, drainSeconds: 120}
observability: {metricsLabels: {release: monitoring}}
networking:
  networkPolicy: {ingressFrom: [{ipBlock: {cidr: 10.0.0.0/8}}]}
  inferencePool: {endpointPicker: {name: picker}, targetPort: openai}
  httpRoute: {parentRefs: [{name: gateway, namespace: gateways}], hostnames: [llm.example], requestTimeout: 0s}
security: {runAsUser: 2000, fsGroup: 3000, readOnlyRootFilesystem: false}
labels: {cost-center: research}
annotations: {example.com/owner: platform}
podTemplate:
  metadata: {labels: {team: a, app.kubernetes.io/instance: stolen}, annotations: {note: x}}
  spec:
    priorityClassName: high
    containers:
    - {name: server, resources: {limits: {cpu: "8"}}, env: [{name: NCCL_DEBUG, value: WARN}]}
    - {name: side, image: side:1}
"""


def plan_of_service(llm_service: LLMService, model: str = "8b") -> Plan:
    """Return the plan of a service; its GPUs are NVIDIA-L4 unless it names others."""
    return make_plan(planner_inputs_of(llm_service, MODELS[model], "NVIDIA-L4"))


def planner_inputs_of(llm_service: LLMService, model: CheckpointInfo, default_gpu: str | None = None) -> PlannerInputs:
    """Return the inputs of a service, with the GPUs that it names or the default."""

    def of_pods(pods: LLMService) -> PlannerInputs:
        if pods.spec.device is Device.CPU:
            return PlannerInputs.from_service(pods, model, None)
        return PlannerInputs.from_service(
            pods, model, resolve_gpu(pods.spec.gpu, [], None if pods.spec.gpu else default_gpu)
        )

    return PlannerInputs.of_all_pods(llm_service, of_pods)


def example_service(file: str) -> LLMService:
    """Return the service of a file of examples/."""
    (document,) = read_manifests(str(ROOT / "examples" / file))
    return LLMService.from_body(crd.require_valid(document))


def rendered_objects(
    llm_service: LLMService, model: str = "8b", context: RenderContext = RENDER_CONTEXT
) -> dict[tuple[str, str], Manifest]:
    """Return the objects by kind and name."""
    manifests = render_objects(llm_service, plan_of_service(llm_service, model), context).manifests
    by_name = {(m["kind"], m["metadata"]["name"]): m for m in manifests}
    assert len(by_name) == len(manifests)
    return by_name


def only_of_kind(manifests: Mapping[tuple[str, str], Manifest], kind: str) -> Manifest:
    """Return the only object of a kind."""
    (manifest,) = [m for (k, _), m in manifests.items() if k == kind]
    return manifest


def server_container(manifests: Iterable[Manifest]) -> tuple[Manifest, Manifest]:
    """Return the pod spec and its server container."""
    template = next(m for m in manifests if m["kind"] == "Deployment")["spec"]["template"]["spec"]
    return template, next(c for c in template["containers"] if c["name"] == "server")


def pod_document(manifests: Iterable[Manifest]) -> Any:
    """Return the pod.json that the pods mount."""
    (files,) = [m["data"] for m in manifests if m["kind"] == "ConfigMap" and m.get("immutable")]
    return json.loads(files["pod.json"])


GPU = "gpu: {product: NVIDIA-L4}\n"
