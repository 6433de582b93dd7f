# SPDX-License-Identifier: Apache-2.0
"""Every field of the resource has an effect: changing it changes the plan or an object, or is rejected with a message.

Driven by the CRD's schema, so that a new field without an effect is detected immediately.
"""

import copy
import json
from itertools import islice

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.openapi import OPENAPI, walk
from support.planning import MODELS
from support.rendering import planner_inputs_of

from quire_operator.api import crd
from quire_operator.api.field_effects import restarts
from quire_operator.api.llmservice import LLMService
from quire_operator.plan.planner import make_plan, reuse_or_make_plan
from quire_operator.render import object_names
from quire_operator.render.context import OPTIONAL_KINDS, RenderContext
from quire_operator.render.engine_config import UnsupportedByEngine
from quire_operator.render.objects import render_objects
from quire_spec.documents.field_schema import Restarts
from quire_spec.errors import ConfigError

CLUSTER = RenderContext(
    admin_key="k", available_kinds=frozenset(OPTIONAL_KINDS), owner_uid="u",
    credentials={"hf": {"token": "x", "other": "y"}, "s3": {"AWS_ACCESS_KEY_ID": "a"}, "web": {"h": "v"},
    "gcs": {"key.json": "{}"}, "azure": {"AZURE_STORAGE_SAS_TOKEN": "t"}, "oci": {".dockerconfigjson": "{}"}},
)  # fmt: skip

SOURCES = """
- {huggingFace: {repo: o/a, revision: v1, tokenSecretRef: {name: hf, key: token}}}
- {s3: {uri: s3://bucket/a, endpoint: http://s3:9000, region: eu-central-1, credentialsSecretRef: {name: s3}}}
- {gcs: {uri: gs://bucket/a, endpoint: http://s3:9000, credentialsSecretRef: {name: gcs}}}
- {azure: {uri: az://bucket/a, account: acc, endpoint: http://s3:9000, credentialsSecretRef: {name: azure}}}
- {oci: {reference: "registry:5000/a:1", insecure: true, pullSecretRef: {name: oci}}}
- {http: {url: http://h:8080/a, sha256: "HEX", headersSecretRef: {name: web}}}
- {pvc: {claimName: c, path: a}}
- {image: {reference: "registry:5000/models:1", pullPolicy: IfNotPresent, path: a}}
""".replace("HEX", "0" * 64)

COMMON = """
lora: {maxLoaded: 4, maxRank: 16, experts: false, modulesToSave: false, maxCached: 8,
  maxCachedMemory: 768Mi}
engine:
  prefixCaching: true
  minConcurrency: 2
  maxNumQueuedReqs: 9
  speculativeConfig:
    method: suffix
    numSpeculativeTokens: 3
    promptLookupMin: 2
    promptLookupMax: 4
    suffixDecodingMaxTreeDepth: 12
    suffixDecodingMaxCachedRequests: 100
    suffixDecodingMaxSpecFactor: "2.5"
    suffixDecodingMinTokenProb: "0.2"
openai:
  enabled: true
  port: 8004
  apiKeysSecretRef: {name: keys}
  tlsSecretRef: {name: certificate}
  apiServerCount: 1
  servedModelNames: [organization/model, other-name]
  sharedPrefixCache: false
  rejectUnknownFields: true
  live: false
  generationConfig: auto
  corsAllowedOrigins: ["https://chat.example"]
  allowedMediaDomains: [images.example]
  limits: {maxBodySize: 16Mi}
  toolCallParser: auto
  reasoningParser: auto
  chatTemplate: {configMapKeyRef: {name: templates, key: chat}}
replicas: 2
cache: {mode: PVC, size: 40Gi, storageClassName: fast, accessModes: [ReadWriteMany], deletionPolicy: Delete}
runtime:
  image: i:1
  imagePullSecrets: [{name: pull}]
  env: [{name: A, value: b}]
  ports: {http: 8000, grpc: 8001, metrics: 8002, health: 8003}
  expose: [http]
  models: {pvc: {claimName: m, path: a}}
  serverArgs: [http-thread-count=4]
  cpu: "4"
  memory: 64Gi
  sharedMemory: 2Gi
rollout: {maxSurge: 1, maxUnavailable: 1, minReadySeconds: 10, drainSeconds: 60, progressDeadlineSeconds: 900}
disruption: {pdb: Auto}
observability: {podMonitor: Auto, metricsLabels: {a: b}, tracing: {endpoint: "http://collector:4317"}}
networking:
  networkPolicy:
    enabled: true
    ingressFrom:
    - {namespaceSelector: {matchLabels: {a: b}}, podSelector: {matchLabels: {c: d}}}
    - {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}
  inferencePool: {endpointPicker: {name: epp, port: 9002, failureMode: FailClose}, targetPort: http}
  kvEvents:
    port: 5557
    replayPort: 5558
    topic: kv
    subscribers:
    - {namespaceSelector: {matchLabels: {a: b}}, podSelector: {matchLabels: {c: d}}}
    - {ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}
  httpRoute:
    parentRefs: [{name: gateway, namespace: gateways, sectionName: https}]
    hostnames: [llm.example]
    scheme: https
    port: openai
    requestTimeout: 10m
security: {ids: Fixed, runAsUser: 1000, fsGroup: 1000, readOnlyRootFilesystem: true}
jobs:
  labels: {queue: a}
  annotations: {note: b}
  resources: {requests: {cpu: "1"}, limits: {memory: 1Gi}}
  nodeSelector: {disk: ssd}
  tolerations:
  - {key: k, operator: Equal, value: v, effect: NoExecute, tolerationSeconds: 5}
  - {key: l, operator: Exists}
  affinity: {nodeAffinity: {}}
labels: {team: a}
annotations: {owner: b}
podTemplate: {metadata: {labels: {x: y}, annotations: {n: m}}, spec: {priorityClassName: low}}
"""
GPU = "gpu: {product: NVIDIA-H200, memory: 143771Mi, count: 2, resourceName: nvidia.com/gpu, nodeSelector: {p: q}, "
GPU += "tolerations: [{key: k, operator: Equal, value: v, effect: NoExecute, tolerationSeconds: 5}, "
GPU += "{key: l, operator: Exists}], "
GPU += "runtimeClassName: nvidia}\n"


def body(text, source, **more):
    spec = yaml.safe_load(text) | {"model": {"source": source, "servedName": "base"}} | more
    return {"apiVersion": crd.GROUP_VERSION, "kind": "LLMService", "metadata": {"name": "s"}, "spec": spec}


def bases():
    """Yield services that together set every field."""
    sources = yaml.safe_load(SOURCES)
    adapters = [
        {"name": f"a{i}", "source": source, "pinned": False, "expose": "Model"}
        for i, source in enumerate(sources)
        if "image" not in source
    ]
    adapters[0]["limits"] = {"maxConcurrentRequests": 8, "maxTokensPerSecond": 500}
    adapters[0]["canary"] = {"prompt": "a", "expect": "b", "maxTokens": 8}
    adapters[1]["canary"] = {"prompt": "a", "completion": "b", "minLogprob": -1.5}
    versions = [
        {"name": f"v{i}", "source": source, "weight": 2} for i, source in enumerate(sources) if "image" not in source
    ]
    adapters.append({"name": "versioned", "versions": versions, "expose": "Model"})
    for source in sources:
        document = body(COMMON + GPU, source, adapters=adapters)
        if source.keys() & {"pvc", "image"}:
            del document["spec"]["cache"]
        yield document
    pins = {"maxModelLen": 8192, "blockSize": 16, "tensorParallelSize": 1, "dtype": "bfloat16", "maxNumSeqs": 32}
    pins |= {"maxNumBatchedTokens": 4096, "quantization": "None", "swapSpace": "4Gi", "maxLogprobs": 5, "seed": 7}
    yield body(GPU, sources[0], engine={"pipelineParallelSize": 4})
    folder = {"emptyDir": {}}
    pins |= {"kvCacheOffloading": {"memory": "16Gi", "secondary": [{"folder": folder, "size": "40Gi"}]}}
    peers = ["other:8005", "10.0.0.0/8:8005"]
    pins |= {"kvTransfer": {"enabled": True, "port": 8005, "bytesPerSecond": "500M", "allowedPeers": peers}}
    pins |= {"schedulingPolicy": "fcfs", "skipTokenizerInit": True, "convert": "embed", "poolingType": "mean"}
    pins |= {"mambaSsmCacheDtype": "bfloat16"}
    pins |= {"languageModelOnly": True, "limitMmPerPrompt": {"image": 3}}
    pins |= {"modelImpl": "transformers", "loadFormat": "runai_streamer"}
    for kv in ({"gpuMemoryUtilization": "0.90"}, {"kvCacheMemory": "8Gi"}):
        yield body(COMMON + GPU, sources[0], engine=pins | kv)
    claim = {"folder": {"pvc": {"claimName": "blocks", "path": "a"}}, "size": "40Gi"}
    claim_tier = {"memory": "16Gi", "secondary": [claim]}
    yield body(GPU, sources[0], engine={"kvCacheOffloading": claim_tier})
    keda = {"kind": "ScaledObject", "prometheusAddress": "http://p:9090", "pollingInterval": 15}
    keda |= {"authenticationRef": {"name": "thanos", "kind": "TriggerAuthentication"}}
    keda |= {"prometheusMetadata": {"authModes": "bearer"}, "fallback": {"failureThreshold": 3, "replicas": 2}}
    trigger = {"type": "cron", "name": "day", "metricType": "AverageValue", "metadata": {"desiredReplicas": "2"}}
    keda |= {"triggers": [trigger | {"authenticationRef": {"name": "t", "kind": "TriggerAuthentication"}}]}
    external = {"metric": "queue", "matchLabels": {"pool": "s"}, "value": 5}
    for scaling in ({"external": external}, keda):
        autoscaling = {"minReplicas": 2, "maxReplicas": 3, "requestsPerReplica": 8, "scaleDownSeconds": 60} | scaling
        yield body(COMMON + GPU, sources[0], autoscaling=autoscaling)
    yield body(COMMON, sources[0], device="CPU", openai={"chatTemplate": {"text": "{{ messages }}"}})
    yield body(GPU, sources[0], cache={"mode": "PVC"}, rollout={"maxUnavailable": 1, "updatePolicy": "OnSpecChange"})
    for source in sources:
        drafts = {"method": "eagle3", "numSpeculativeTokens": 3, "model": {"source": source}}
        yield body(GPU, sources[0], engine={"speculativeConfig": drafts})
    token, secret = {"name": "hf", "key": "token"}, {"name": "web"}
    s3 = {"uri": "s3://bucket/a", "endpoint": "http://s3:9000", "region": "eu-central-1"}
    places = [
        {"huggingFace": {"organization": "o", "tokenSecretRef": token}, "allow": "a*"},
        {"s3": s3 | {"credentialsSecretRef": {"name": "s3"}}, "limit": {"adapters": 9, "size": "4Gi"}},
        *(source for source in sources if source.keys() & {"gcs", "azure", "oci"}),
        {"http": {"url": "http://h:8080/a", "headersSecretRef": secret}},
        {"pvc": {"claimName": "c", "path": "a"}},
    ]
    pem = "-----BEGIN PUBLIC KEY-----\na"
    signers = [{"name": "release", "publicKey": pem}]
    signers += [{"name": "ci", "identity": {"subject": "ci@example.com", "issuer": "https://issuer.example"}}]
    trust = {"signers": signers, "model": "Require", "adapters": "Warn"}
    parts = [{"adapter": "a", "weight": 0.5}]
    sums = [{"name": "sum", "parts": parts}]
    yield body(GPU, sources[0], adapterSources=places, adapterSums=sums, trust=trust)
    # Without an endpoint picker, which needs HTTP here, and with a route to the Service.
    route = {"parentRefs": [{"name": "gateway"}], "port": "openai"}
    models = {"expose": ["http"], "models": {"path": "/opt/models"}}
    rule = {"name": "web", "adapters": ["a*"], "requestsPerMinute": 60, "tokensPerMinute": 9}
    keys = {"apiKeysSecretRef": {"name": "keys"}, "keys": [rule]}
    yield body(GPU, sources[0], runtime={"expose": []}, openai=keys)
    yield body(GPU, sources[0], runtime=models, networking={"httpRoute": route})
    own = {"dataParallelSize": 1, "maxNumSeqs": 32, "maxNumBatchedTokens": 4096, "maxNumQueuedReqs": 64}
    own |= {"schedulingPolicy": "fcfs", "swapSpace": "4Gi"}
    of_role = {"replicas": 2, "resources": {"cpu": "3", "memory": "64Gi", "sharedMemory": "2Gi", **yaml.safe_load(GPU)}}
    of_role |= {"engine": own | {"kvCacheOffloading": claim_tier}}
    limits = {"localTokens": 99, "recomputeThreshold": 9, "loadFailurePolicy": "recompute"}
    yield body(GPU, sources[0], disaggregation={"prefill": of_role, "decode": of_role} | limits)


def outputs(document):
    """Return plan and objects of a service as text without the inputs' digest, or the error message, or None."""
    checked = crd.validate(document)
    if checked.problems:
        return None
    service = LLMService.from_body(checked.body)
    try:
        inputs = planner_inputs_of(service, MODELS["8b"])
        plan = make_plan(inputs)
        objects = render_objects(service, plan, CLUSTER)
        upgraded = reuse_or_make_plan(
            plan, inputs, service.spec.rollout.updatePolicy == "Auto", {"GPU": "n", "CPU": "n"}
        )
    except UnsupportedByEngine as error:
        return str(error.problem)
    except ConfigError as error:
        return str(error)
    text = json.dumps([plan.to_json(), list(objects.manifests), upgraded is plan], sort_keys=True)
    return text.replace(inputs.inputs_hash, "")


TEXTS = {
    "cpu": ["2", "1500m"], "memory": ["100Gi"], "sharedMemory": ["3Gi"], "size": ["50Gi"], "kvCacheMemory": ["9Gi"],
    "swapSpace": ["1Gi"], "maxCachedMemory": ["9Gi"],
    "gpuMemoryUtilization": ["0.85"], "repo": ["o/other"], 
    "uri": ["s3://bucket/other", "gs://bucket/other", "az://bucket/other"], "endpoint": ["https://other"],
    "reference": ["registry/other:2"],
    "url": ["http://other/a"], "prometheusAddress": ["http://other"], "sha256": ["1" * 64], "cidr": ["10.2.0.0/16"],
    "except": ["10.2.0.0/16"], "resourceName": ["nvidia.com/mig-1g.5gb"], "product": ["NVIDIA-L4"],
    "path": ["other", "/other"],
    "bytesPerSecond": ["1G"], "allowedPeers": ["a:1"],
    "region": ["other"], "maxBodySize": ["4Mi"], "corsAllowedOrigins": ["*"], "value": ["other"],
    "suffixDecodingMaxSpecFactor": ["4.0"], "suffixDecodingMinTokenProb": ["0.3"],
    "requests": ["7"], "limits": ["7"],
    "hostnames": ["other.example"], "requestTimeout": ["1h30m"],
    "serverArgs": ["http-thread-count=5"], "issuer": ["https://other.example"],
    "publicKey": ["-----BEGIN PUBLIC KEY-----\nb"],
}  # fmt: skip


def candidates(path, node):
    """Return other values for a field."""
    if "enum" in node:
        return node["enum"]
    if node.get("x-kubernetes-int-or-string"):
        return [0, 1, 3, 1000, "0%", "30%", "100%"]
    if node["type"] == "boolean":
        return [True, False]
    if node["type"] in ("integer", "number"):
        low, high = node["minimum"], node["maximum"]
        return [v for v in (low, low + 1, 3, 7, 100, 3000, 9999, high) if low <= v <= high]
    if node["type"] == "object":
        return [{"priorityClassName": "other"}]
    key = next(part for part in reversed(path) if part not in ("[]", "*"))
    return [*TEXTS.get(key, []), "other"]


def locations(value, path):
    """Yield every (container, key) in `value` at a path of the schema."""
    key, *rest = path
    if key == "[]":
        keys = range(len(value)) if isinstance(value, list) else ()
    elif key == "*":
        keys = list(value) if isinstance(value, dict) else ()
    else:
        keys = [key] if isinstance(value, dict) and (key in value or not rest) else ()
    for key_found in keys:
        if not rest:
            yield value, key_found
        elif not isinstance(value, dict) or key_found in value:
            yield from locations(value[key_found], rest)


def leaves():
    for path, node in walk(OPENAPI["properties"]["spec"]):
        inner = {"properties", "items", "additionalProperties"} & set(node)
        if path and not inner and len(node.get("enum", "ab")) > 1:
            yield path, node


# Fields that must be removed when another field changes.
KEDA_FIELDS = [
    "prometheusAddress",
    "authenticationRef",
    "prometheusMetadata",
    "triggers",
    "pollingInterval",
    "fallback",
]
WITHOUT = {("autoscaling", "kind"): [*KEDA_FIELDS, "external"]}

# Fields that only the controller reads: it does not change the objects of a paused service, and the scheme of a route
# is in its status only.
ELSEWHERE = {("paused",), ("networking", "httpRoute", "scheme")}
LEAVES = [
    (path, node)
    for path, node in leaves()
    # A rule refuses adapters in images. Both roles have the same types.
    if path not in ELSEWHERE
    and not (path[0] == "adapters" and "image" in path)
    and path[:2] != ("disaggregation", "prefill")
]
SELECTOR = {object_names.MANAGED_BY: object_names.MANAGER, object_names.INSTANCE: "s"}
BASES = json.loads(json.dumps(list(bases())))  # copied, so that a change affects only one place


@pytest.fixture(scope="module")
def before():
    texts = [outputs(document) for document in BASES]
    for document, text in zip(BASES, texts, strict=True):
        assert text is not None and text.startswith("["), (text, list(map(str, crd.validate(document).problems)))
    return texts


def test_rendered_objects_are_valid(before):
    kinds = set()
    for text in before:
        for manifest in json.loads(text)[1]:
            kinds.add(manifest["kind"])
            if manifest["kind"] not in (*OPTIONAL_KINDS, "LeaderWorkerSet", "DisaggregatedSet"):
                kubernetes_validate.validate(manifest, "1.37", strict=True)
    assert len(kinds) == 16, kinds


@pytest.mark.parametrize(("path", "node"), LEAVES, ids=[".".join(path) for path, _ in LEAVES])
def test_every_field_has_an_effect(path, node, before):
    attempts = []
    for document, text in zip(BASES, before, strict=True):
        for changed, value in variants(document, path, node):
            output = outputs(changed)
            if output is not None and output != text:
                return
            attempts.append((value, output is not None))
    pytest.fail(f"{'.'.join(path)}: changes nothing and is not refused; tried (value, whether valid): {attempts}")


DEPENDS_ON_OTHER_FIELDS = ("spec.adapters[].source.pvc.claimName", "spec.engine.tensorParallelSize")
"""Fields that replace pods only with some values of other fields: a claim is mounted when a pod starts."""


def test_types_state_which_fields_restart_pods(before):
    wrong = {}
    for path, node in LEAVES:
        full_path = "spec." + ".".join(path).replace(".[]", "[]").removesuffix(".*")
        declared = restarts(full_path)
        if full_path in DEPENDS_ON_OTHER_FIELDS or declared not in (Restarts.YES, Restarts.NO):
            continue
        rendered = (
            pod_template(output) != pod_template(text)
            for document, text in zip(BASES, before, strict=True)
            for changed, _ in islice(variants(document, path, node), 1 + (declared is Restarts.YES))
            if (output := outputs(changed)) not in (None, text) and output.startswith("[")
        )
        # Four services that differ in their sources show enough of a field that restarts nothing.
        rendered = islice(rendered, None if declared is Restarts.YES else 4)
        # A value that is rejected in all services restarts nothing.
        first = next(rendered, None)
        if first is not None and (first or any(rendered)) != (declared is Restarts.YES):
            wrong[full_path] = first
    assert wrong == {}, f"the types say otherwise of these: {wrong}"


def pod_template(text):
    kinds = ("Deployment", "LeaderWorkerSet", "DisaggregatedSet")
    (workload,) = [m["spec"] for m in json.loads(text)[1] if m["kind"] in kinds]
    if "roles" in workload:
        return [role["spec"]["leaderWorkerTemplate"] for role in workload["roles"]]
    return workload.get("template") or workload["leaderWorkerTemplate"]


def variants(document, path, node):
    """Yield copies of the service with another value at one place of the path, for each place and value."""
    for i in range(len(list(locations(document["spec"], path)))):
        for value in candidates(path, node):
            changed = copy.deepcopy(document)
            container, key = list(locations(changed["spec"], path))[i]
            if isinstance(container, dict) and container.get(key) == value:
                continue
            is_local = path[-2:] in (("source", "path"), ("[]", "path"))
            for sibling in list(container) if is_local else WITHOUT.get(path, ()):
                container.pop(sibling, None)
            container[key] = value
            yield changed, value


# Random changes of several fields, also to values that the schema accepts and a later step must reject.

ODD_VALUES = [
    "",
    "x y",
    "A.b_c",
    "0" * 64,
    "9999999999999Ti",
    "http://h:99999/x",
    "http://[x",
    "https://h:port/",
    None,
    [],
]
ODD_ENTRIES = [None, "x", [], ["x"], [None], [{}], [{"name": ["x"]}], [{"$patch": "replace"}, {"name": "c"}]]
ODD_ENTRIES += [[{"name": "server", "$patch": "delete"}], [{"name": "server", "securityContext": None, "env": None}]]
ODD_OVERRIDES = [{"$patch": "replace"}, {"securityContext": None}, {"nodeSelector": {"a": None}}, {"x": 10**30}]
ODD_OVERRIDES += [{field: entries} for field in ("containers", "volumes") for entries in ODD_ENTRIES]


@settings(max_examples=150)
@given(st.data())
def test_random_specs_are_rendered_or_rejected_with_a_message(data):
    """`outputs` raises anything but ConfigErrors and Unplannable; rendering twice gives the same objects."""
    document = copy.deepcopy(data.draw(st.sampled_from(BASES)))
    for path, node in data.draw(st.lists(st.sampled_from(LEAVES), max_size=6)):
        odd_values = ODD_OVERRIDES if node.get("type") == "object" else ODD_VALUES
        for container, key in list(locations(document["spec"], path)):
            container[key] = data.draw(st.sampled_from([*candidates(path, node), *odd_values]))
    text = outputs(document)
    assert text == outputs(document)
    if text is None or not text.startswith("["):
        return
    plan, manifests, _ = json.loads(text)
    assert plan["kvTokens"] < 2**63
    for manifest in manifests:
        assert len(manifest["metadata"]["name"]) <= 63
        assert manifest["metadata"]["labels"].items() >= SELECTOR.items()
        if manifest["kind"] == "Deployment":
            assert manifest["spec"]["template"]["metadata"]["labels"].items() >= SELECTOR.items()
