# SPDX-License-Identifier: Apache-2.0
"""Cases that satisfy or violate each CEL rule of the CRD, as changes to a small LLMService. The first words of a
message identify its rule. Tests run them with a CEL library, and with the API server if it supports CEL rules."""

import copy
from collections.abc import Mapping
from typing import Any

from quire_operator.api import crd

BASE = {
    "apiVersion": "quire.dev/v1alpha1",
    "kind": "LLMService",
    "metadata": {"name": "tales"},
    "spec": {"model": {"source": {"huggingFace": {"repo": "org/model"}}}},
}
ADAPTER = {"name": "sql", "source": {"path": "a"}}
SIGNER = {"name": "release", "publicKey": "-----BEGIN PUBLIC KEY-----\nx"}
KEYS = [{"name": "acme", "adapters": ["acme-*"], "tokensPerMinute": 1000}]
REMOVE = object()


def service_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return BASE with dotted paths set, or removed."""
    body = copy.deepcopy(BASE)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = body
        for key in parents:
            node = node.setdefault(key, {})
        if value is REMOVE:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return body


def validation_problems(changes: Mapping[str, Any]) -> list[str]:
    """Return the violated rules of a service with these changes."""
    return [str(problem) for problem in crd.validate(service_with(changes)).problems]


ONE_ADAPTER = [ADAPTER]
PINNED_ADAPTERS = [{**ADAPTER, "name": name, "pinned": True} for name in ("a", "b")]
OPENAI_POOL = {"endpointPicker": {"name": "picker"}, "targetPort": "openai"}
NGRAM = {"method": "ngram", "numSpeculativeTokens": 3}
HUB_SOURCE = {"huggingFace": {"repo": "org/heads"}}
MEDUSA = NGRAM | {"method": "medusa", "model": {"source": HUB_SOURCE}}
HTTP_POOL = {**OPENAI_POOL, "targetPort": "http"}
COMPLETION = {"completion": "b", "minLogprob": -1.5}
VERSIONS = {"name": "sql", "versions": [{"name": "v1", "source": {"path": "a"}}]}
IMAGE_SOURCE = {"image": {"reference": "models:1"}}
PVC_SOURCE = {"pvc": {"claimName": "c"}}

ROLES = {
    "spec.disaggregation": {"prefill": {}, "decode": {}},
    "spec.engine": {"kvCacheOffloading": {"memory": "1Gi"}},
}
EVENTS = {"subscribers": [{"podSelector": {}}]}
KEDA = {"kind": "ScaledObject", "maxReplicas": 2, "prometheusAddress": "http://p:9090"}
KEDA_ALONE = {"kind": "ScaledObject", "maxReplicas": 2}
QUEUE_METRIC = {"metric": "queue", "value": 1}
CRON = {"type": "cron", "metadata": {"desiredReplicas": "2"}}
ROUTE = {"parentRefs": [{"name": "gateway"}]}


def _tiers(folder: Mapping[str, Any]) -> dict[str, Any]:
    return {"memory": "1Gi", "secondary": [{"folder": folder, "size": "9Gi"}]}


def _only_in(role: str) -> dict[str, Any]:
    """Return roles of which only one has host memory for KV blocks."""
    own = {role: {"engine": {"kvCacheOffloading": {"memory": "1Gi"}}}}
    return {"spec.disaggregation": {"prefill": {}, "decode": {}, **own}}


CEL_RULE_CASES = [
    (
        "metadata.name must be at most 31",
        {**ROLES, "metadata.name": "a" * 31},
        {**ROLES, "metadata.name": "a" * 32},
        "metadata.name",
    ),
    ("replicas must not be set beside", {**ROLES, "spec.replicas": 1}, {**ROLES, "spec.replicas": 2}, "spec.replicas"),
    (
        "autoscaling must not be set beside",
        ROLES,
        {**ROLES, "spec.autoscaling": {"maxReplicas": 2}},
        "spec.autoscaling",
    ),
    (
        "prefill.replicas must be 0 exactly if",
        {**ROLES, "spec.disaggregation": {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}},
        {**ROLES, "spec.disaggregation": {"prefill": {"replicas": 0}, "decode": {}}},
        "spec.disaggregation.prefill.replicas",
    ),
    (
        "engine.kvTransfer.enabled must not be false",
        {**ROLES, "spec.engine.kvTransfer": {"port": 9005}},
        {**ROLES, "spec.engine.kvTransfer": {"enabled": False}},
        "spec.engine.kvTransfer.enabled",
    ),
    (
        "disaggregation.prefill.engine.kvCacheOffloading must be set",
        ROLES,
        _only_in("decode"),
        "spec.disaggregation.prefill.engine.kvCacheOffloading",
    ),
    (
        "disaggregation.decode.engine.kvCacheOffloading must be set",
        ROLES,
        _only_in("prefill"),
        "spec.disaggregation.decode.engine.kvCacheOffloading",
    ),
    (
        "metadata.name must be at most 28",
        {**ROLES, "spec.engine.pipelineParallelSize": 2, "metadata.name": "a" * 28},
        {**ROLES, "spec.engine.pipelineParallelSize": 2, "metadata.name": "a" * 29},
        "metadata.name",
    ),
    (
        "disaggregation must not contain resources.gpu",
        {**ROLES, "spec.disaggregation.decode.resources.gpu": {}},
        {**ROLES, "spec.disaggregation.decode.resources.gpu": {}, "spec.device": "CPU"},
        "spec.disaggregation",
    ),
    (
        "engine.kvTransfer.port must differ",
        ROLES,
        {**ROLES, "spec.runtime.ports": {"http": 8005}},
        "spec.engine.kvTransfer.port",
    ),
    (
        "networking.httpRoute.port must be a port that the pods serve",
        {"spec.networking.httpRoute": {**ROUTE, "port": "http"}},
        {"spec.networking.httpRoute": {**ROUTE, "port": "http"}, "spec.runtime.expose": ["grpc"]},
        "spec.networking.httpRoute.port",
    ),
    (
        "networking.httpRoute.port must be a port that the pods serve",
        {"spec.networking": {"httpRoute": ROUTE, "inferencePool": HTTP_POOL}, "spec.openai.enabled": False},
        {"spec.networking.httpRoute": ROUTE, "spec.openai.enabled": False},
        "spec.networking.httpRoute.port",
    ),
    *(
        (
            "kind must be ScaledObject if authenticationRef",
            {"spec.autoscaling": {**KEDA, field: value}},
            {"spec.autoscaling": {"maxReplicas": 2, field: value}},
            "spec.autoscaling.kind",
        )
        for field, value in (("triggers", [CRON]), ("pollingInterval", 9), ("fallback", {"replicas": 2}))
    ),
    (
        "external must not be set if kind is ScaledObject",
        {"spec.autoscaling": {"maxReplicas": 2, "external": QUEUE_METRIC}},
        {"spec.autoscaling": {**KEDA, "external": QUEUE_METRIC}},
        "spec.autoscaling.external",
    ),
    (
        "minReplicas must be at least 1 unless external",
        {"spec.autoscaling": {"minReplicas": 0, "maxReplicas": 2, "external": QUEUE_METRIC}},
        {"spec.autoscaling": {"minReplicas": 0, "maxReplicas": 2}},
        "spec.autoscaling.minReplicas",
    ),
    (
        "minReplicas must be at least 1 unless external",
        {"spec.autoscaling": {**KEDA, "minReplicas": 0, "triggers": [CRON]}},
        {"spec.autoscaling": {**KEDA, "minReplicas": 0}},
        "spec.autoscaling.minReplicas",
    ),
    (
        "minReplicas must be at least 1 unless external",
        {"spec.autoscaling": {**KEDA, "minReplicas": 0, "triggers": [CRON]}},
        {"spec.autoscaling": {**KEDA_ALONE, "minReplicas": 0, "triggers": [CRON]}},
        "spec.autoscaling.minReplicas",
    ),
    (
        "kvTransfer must not be set without kvCacheOffloading",
        {"spec.engine": {"kvTransfer": {}, "kvCacheOffloading": {"memory": "1Gi"}}},
        {"spec.engine": {"kvTransfer": {}}},
        "spec.engine.kvTransfer",
    ),
    (
        "engine.kvTransfer.port must differ",
        {"spec.engine": {"kvTransfer": {"port": 9000}, "kvCacheOffloading": {"memory": "1Gi"}}},
        {"spec.engine": {"kvTransfer": {"port": 8004}, "kvCacheOffloading": {"memory": "1Gi"}}},
        "spec.engine.kvTransfer.port",
    ),
    *(
        (
            "networking.kvEvents must use ports that differ",
            {"spec.networking.kvEvents": {**EVENTS, **valid}, "spec.engine.dataParallelSize": 3},
            {"spec.networking.kvEvents": {**EVENTS, **invalid}, "spec.engine.dataParallelSize": 3},
            "spec.networking.kvEvents",
        )
        for valid, invalid in (
            ({"port": 5557}, {"port": 7998}),  # 8000, HTTP
            ({"port": 8005}, {"port": 8002}),  # 8003, health
            ({"port": 65530}, {"port": 65531}),  # the replay port of the last core is 65536
            ({"port": 5000, "replayPort": 5003}, {"port": 5000, "replayPort": 5002}),
            ({"port": 5003, "replayPort": 5000}, {"port": 5000, "replayPort": 8003}),
        )
    ),
    *(
        (
            "folder must have exactly one of emptyDir and pvc",
            {"spec.engine.kvCacheOffloading": _tiers({"emptyDir": {}})},
            {"spec.engine.kvCacheOffloading": _tiers(invalid)},
            "spec.engine.kvCacheOffloading.secondary[0].folder",
        )
        for invalid in ({}, {"emptyDir": {}, "pvc": {"claimName": "c"}})
    ),
    (
        "prometheusAddress must be set with authenticationRef",
        {"spec.autoscaling": {**KEDA, "triggers": [CRON], "authenticationRef": {"name": "a"}}},
        {"spec.autoscaling": {**KEDA_ALONE, "triggers": [CRON], "authenticationRef": {"name": "a"}}},
        "spec.autoscaling.prometheusAddress",
    ),
    (
        "prometheusAddress must be set if kind is ScaledObject",
        {"spec.autoscaling": {"kind": "ScaledObject", "maxReplicas": 2, "triggers": [CRON]}},
        {"spec.autoscaling": {"kind": "ScaledObject", "maxReplicas": 2}},
        "spec.autoscaling.prometheusAddress",
    ),
    (
        "the keys serverAddress, query and threshold",
        {"spec.autoscaling": {**KEDA, "prometheusMetadata": {"namespace": "a"}}},
        {"spec.autoscaling": {**KEDA, "prometheusMetadata": {"query": "a"}}},
        "spec.autoscaling.prometheusMetadata",
    ),
    (
        "adapters must not contain a name of openai.servedModelNames",
        {"spec.openai.servedModelNames": ["org/model", "other"], "spec.adapters": ONE_ADAPTER},
        {"spec.openai.servedModelNames": ["org/model", "sql"], "spec.adapters": ONE_ADAPTER},
        "spec.adapters",
    ),
    ("metadata.name must be at most 48", {"metadata.name": "a" * 48}, {"metadata.name": "a" * 49}, "metadata.name"),
    ("metadata.name must begin with a letter", {"metadata.name": "a-1"}, {"metadata.name": "1.5"}, "metadata.name"),
    (
        "spec.adapters must not contain an adapter with the name of the service",
        {"spec.adapters": [{**ADAPTER, "name": "tales"}], "spec.model.servedName": "base"},
        {"spec.adapters": [{**ADAPTER, "name": "tales"}]},
        "spec.adapters",
    ),
    ("gpu must not be set", {"spec.gpu": {}}, {"spec.gpu": {}, "spec.device": "CPU"}, "spec.gpu"),
    (
        "engine.gpuMemoryUtilization must not be set",
        {"spec.engine.gpuMemoryUtilization": "0.9"},
        {"spec.engine.gpuMemoryUtilization": "0.9", "spec.device": "CPU"},
        "spec.engine.gpuMemoryUtilization",
    ),
    (
        "engine.tensorParallelSize must not exceed gpu.count",
        {"spec.engine.tensorParallelSize": 2, "spec.gpu.count": 2},
        {"spec.engine.tensorParallelSize": 4, "spec.gpu.count": 2},
        "spec.engine.tensorParallelSize",
    ),
    (
        "engine.dataParallelSize must not exceed gpu.count",
        {"spec.engine.dataParallelSize": 2, "spec.gpu.count": 2},
        {"spec.engine.dataParallelSize": 3, "spec.gpu.count": 2},
        "spec.engine.dataParallelSize",
    ),
    (
        "engine.dataParallelSize must not exceed gpu.count",
        {"spec.engine.dataParallelSize": 2, "spec.engine.tensorParallelSize": 2, "spec.gpu.count": 4},
        {"spec.engine.dataParallelSize": 2, "spec.engine.tensorParallelSize": 4, "spec.gpu.count": 4},
        "spec.engine.dataParallelSize",
    ),
    *(
        (
            message,
            {"spec.engine": {**engine, "pipelineParallelSize": 1}},
            {"spec.engine": {**engine, "pipelineParallelSize": 2}},
            f"spec.engine.{path}",
        )
        for message, engine, path in (
            ("dataParallelSize must be 1 with", {"dataParallelSize": 2}, "dataParallelSize"),
            ("speculativeConfig.method must be ngram", {"speculativeConfig": MEDUSA}, "speculativeConfig.method"),
        )
    ),
    *(
        (
            "engine.pipelineParallelSize must be 1 if a port is 8007",
            {"spec.engine.pipelineParallelSize": 2, "spec.openai.port": 8009},
            {"spec.engine.pipelineParallelSize": 2, field: port},
            "spec.engine.pipelineParallelSize",
        )
        for field, port in (("spec.openai.port", 8008), ("spec.networking.kvEvents", {**EVENTS, "port": 8007}))
    ),
    (
        "adapters must be empty when lora.maxLoaded is 0",
        {"spec.adapters": [], "spec.lora.maxLoaded": 0},
        {"spec.adapters": ONE_ADAPTER, "spec.lora.maxLoaded": 0},
        "spec.adapters",
    ),
    (
        "adapterSources must be empty when lora.maxLoaded is 0",
        {"spec.adapterSources": [], "spec.lora.maxLoaded": 0},
        {"spec.adapterSources": [{"path": "a"}], "spec.lora.maxLoaded": 0},
        "spec.adapterSources",
    ),
    (
        "signers must have exactly one of publicKey and identity",
        {"spec.trust": {"signers": [SIGNER]}},
        {"spec.trust": {"signers": [{"name": "release"}]}},
        "spec.trust.signers[0]",
    ),
    (
        "adapterSources must have exactly one",
        {"spec.adapterSources": [{"path": "a"}, {"http": {"url": "http://h/a"}}]},
        {"spec.adapterSources": [{"path": "a", "http": {"url": "http://h/a"}}]},
        "spec.adapterSources[0]",
    ),
    (
        "adapters must not have more pinned entries",
        {"spec.adapters": PINNED_ADAPTERS, "spec.lora.maxLoaded": 2},
        {"spec.adapters": PINNED_ADAPTERS, "spec.lora.maxLoaded": 1},
        "spec.adapters",
    ),
    (
        "adapters must not contain a name that equals model.servedName",
        {"spec.adapters": ONE_ADAPTER, "spec.model.servedName": "base"},
        {"spec.adapters": ONE_ADAPTER, "spec.model.servedName": "sql"},
        "spec.adapters",
    ),
    (
        "cache.mode must be None if the sources of the model",
        {"spec.cache.mode": "None", "spec.model.source": PVC_SOURCE},
        {"spec.cache.mode": "PVC", "spec.model.source": PVC_SOURCE},
        "spec.cache.mode",
    ),
    (
        "cache.mode must be None if the sources of the model",
        {"spec.cache.mode": "EmptyDir"},
        {"spec.cache.mode": "None"},
        "spec.cache.mode",
    ),
    ("source must have exactly one", {}, {"spec.model.source": {}}, "spec.model.source"),
    *(
        (
            "source must be set without versions",
            {"spec.adapters": [VERSIONS]},
            {"spec.adapters": [invalid]},
            "spec.adapters[0].source",
        )
        for invalid in ({"name": "sql"}, {**ADAPTER, **VERSIONS})
    ),
    (
        "versions must not all have the weight 0",
        {"spec.adapters": [VERSIONS]},
        {"spec.adapters": [{"name": "sql", "versions": [{"name": "v1", "source": {"path": "a"}, "weight": 0}]}]},
        "spec.adapters[0].versions",
    ),
    *(
        (
            message,
            {"spec.adapters": [{**ADAPTER, "canary": {"prompt": "a", **valid}}]},
            {"spec.adapters": [{**ADAPTER, "canary": {"prompt": "a", **invalid}}]},
            f"spec.adapters[0].canary{field}",
        )
        for message, valid, invalid, field in (
            ("canary must have one of expect", {"expect": "b"}, {}, ""),
            ("canary must have one of expect", {"expect": "b"}, {"expect": "b", **COMPLETION}, ""),
            ("minLogprob must be set with completion", COMPLETION, {"completion": "b"}, ".minLogprob"),
            (
                "maxTokens must be set only with expect",
                {"expect": "b", "maxTokens": 3},
                COMPLETION | {"maxTokens": 3},
                ".maxTokens",
            ),
        )
    ),
    *(
        (
            "source must not be of kind image",
            {"spec.adapters": [good]},
            {"spec.adapters": [bad]},
            f"spec.adapters[0]{path}",
        )
        for good, bad, path in (
            (ADAPTER, ADAPTER | {"source": IMAGE_SOURCE}, ".source"),
            (VERSIONS, VERSIONS | {"versions": [{"name": "v1", "source": IMAGE_SOURCE}]}, ".versions[0].source"),
        )
    ),
    (
        "source must have exactly one",
        {"spec.adapters": ONE_ADAPTER},
        {"spec.adapters": [{"name": "sql", "source": {"path": "a", "pvc": {"claimName": "c"}}}]},
        "spec.adapters[0].source",
    ),
    (
        "path must stay inside the volume",
        {"spec.model.source": {"pvc": {"claimName": "c", "path": "a/..b/c..d"}}},
        {"spec.model.source": {"pvc": {"claimName": "c", "path": "a/../../b"}}},
        "spec.model.source.pvc.path",
    ),
    (
        "path must stay inside the volume",
        {"spec.model.source": PVC_SOURCE},
        {"spec.model.source": {"pvc": {"claimName": "c", "path": "/etc"}}},
        "spec.model.source.pvc.path",
    ),
    (
        "maxCached must be at least maxLoaded",
        {"spec.lora": {"maxLoaded": 4, "maxCached": 4}},
        {"spec.lora": {"maxLoaded": 4, "maxCached": 3}},
        "spec.lora.maxCached",
    ),
    (
        "maxNumBatchedTokens must be at least maxNumSeqs",
        {"spec.engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 64}},
        {"spec.engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 63}},
        "spec.engine.maxNumBatchedTokens",
    ),
    (
        "kvCacheMemory and gpuMemoryUtilization must not both be set",
        {"spec.engine": {"kvCacheMemory": "4Gi"}},
        {"spec.engine": {"kvCacheMemory": "4Gi", "gpuMemoryUtilization": "0.90"}},
        "spec.engine.kvCacheMemory",
    ),
    (
        "value must not be set when operator is Exists",
        {"spec.gpu.tolerations": [{"key": "k", "operator": "Equal", "value": "v"}]},
        {"spec.gpu.tolerations": [{"key": "k", "operator": "Exists", "value": "v"}]},
        "spec.gpu.tolerations[0].value",
    ),
    (
        "storageClassName and accessModes must not be set unless mode is PVC",
        {"spec.cache": {"mode": "PVC", "storageClassName": "fast"}},
        {"spec.cache": {"mode": "EmptyDir", "storageClassName": "fast"}},
        "spec.cache.storageClassName",
    ),
    (
        "minReplicas must not exceed maxReplicas",
        {"spec.autoscaling": {"minReplicas": 2, "maxReplicas": 2}},
        {"spec.autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
        "spec.autoscaling.minReplicas",
    ),
    (
        "prometheusAddress must be set if kind is ScaledObject",
        {"spec.autoscaling": {"maxReplicas": 2, "kind": "ScaledObject", "prometheusAddress": "http://p:9090"}},
        {"spec.autoscaling": {"maxReplicas": 2, "kind": "ScaledObject"}},
        "spec.autoscaling.prometheusAddress",
    ),
    (
        "prometheusAddress must be set if kind is ScaledObject",
        {"spec.autoscaling": {"maxReplicas": 2}},
        {"spec.autoscaling": {"maxReplicas": 2, "prometheusAddress": "http://p:9090"}},
        "spec.autoscaling.prometheusAddress",
    ),
    (
        "ports must be different",
        {"spec.runtime.ports.http": 9000},
        {"spec.runtime.ports.http": 8003},
        "spec.runtime.ports",
    ),
    (
        "openai.port must differ from every port of runtime.ports",
        {"spec.openai.port": 8000, "spec.runtime.ports.http": 8004},
        {"spec.openai.port": 9000, "spec.runtime.ports.health": 9000},
        "spec.openai.port",
    ),
    (
        "networking.inferencePool.targetPort must not be openai",
        {"spec.networking.inferencePool": OPENAI_POOL},
        {"spec.networking.inferencePool": OPENAI_POOL, "spec.openai.enabled": False},
        "spec.networking.inferencePool.targetPort",
    ),
    (
        "networking.inferencePool.targetPort must not be http",
        {"spec.networking.inferencePool": HTTP_POOL, "spec.runtime.expose": ["http"]},
        {"spec.networking.inferencePool": HTTP_POOL, "spec.runtime.expose": ["grpc"]},
        "spec.networking.inferencePool.targetPort",
    ),
    (
        "keys must be empty without apiKeysSecretRef",
        {"spec.openai": {"apiKeysSecretRef": {"name": "keys"}, "keys": KEYS}, "spec.runtime.expose": []},
        {"spec.openai": {"keys": KEYS}, "spec.runtime.expose": []},
        "spec.openai.keys",
    ),
    (
        "runtime.expose must be empty with openai.keys",
        {"spec.openai": {"apiKeysSecretRef": {"name": "keys"}, "keys": KEYS}, "spec.runtime.expose": []},
        {"spec.openai": {"apiKeysSecretRef": {"name": "keys"}, "keys": KEYS}, "spec.runtime.expose": ["grpc"]},
        "spec.runtime.expose",
    ),
    (
        "runtime.expose must not be empty when openai.enabled is false",
        {"spec.runtime.expose": []},
        {"spec.runtime.expose": [], "spec.openai.enabled": False},
        "spec.runtime.expose",
    ),
    (
        "model must be set with method draft_model, eagle3 and medusa",
        {"spec.engine.speculativeConfig": MEDUSA},
        {"spec.engine.speculativeConfig": NGRAM | {"model": {"source": HUB_SOURCE}}},
        "spec.engine.speculativeConfig.model",
    ),
    (
        "cache.mode must be None if the sources of the model",
        {"spec.cache.mode": "EmptyDir", "spec.engine.speculativeConfig": MEDUSA, "spec.model.source": PVC_SOURCE},
        {"spec.cache.mode": "None", "spec.engine.speculativeConfig": MEDUSA, "spec.model.source": PVC_SOURCE},
        "spec.cache.mode",
    ),
    (
        "promptLookupMax must be at least promptLookupMin",
        {"spec.engine.speculativeConfig": NGRAM | {"promptLookupMin": 2, "promptLookupMax": 2}},
        {"spec.engine.speculativeConfig": NGRAM | {"promptLookupMin": 3, "promptLookupMax": 2}},
        "spec.engine.speculativeConfig.promptLookupMax",
    ),
    (
        "models must have exactly one of pvc and path",
        {"spec.runtime.models": {"path": "/opt/models"}},
        {"spec.runtime.models": {"path": "/opt/models", **PVC_SOURCE}},
        "spec.runtime.models",
    ),
    (
        "chatTemplate must have exactly one of text and configMapKeyRef",
        {"spec.openai.chatTemplate": {"text": "a"}},
        {"spec.openai.chatTemplate": {"text": "a", "configMapKeyRef": {"name": "a"}}},
        "spec.openai.chatTemplate",
    ),
    (
        "maxSurge and maxUnavailable must not both be 0",
        {"spec.rollout": {"maxSurge": 1, "maxUnavailable": 0}},
        {"spec.rollout": {"maxUnavailable": 0}},
        "spec.rollout.maxSurge",
    ),
    (
        "maxSurge and maxUnavailable must not both be 0",
        {"spec.rollout": {"maxSurge": "25%", "maxUnavailable": "0%"}},
        {"spec.rollout": {"maxSurge": "0%", "maxUnavailable": 0}},
        "spec.rollout.maxSurge",
    ),
    (
        "ipBlock must not be set beside selectors",
        {"spec.networking.networkPolicy.ingressFrom": [{"podSelector": {}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]},
        {"spec.networking.networkPolicy.ingressFrom": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]},
        "spec.networking.networkPolicy.ingressFrom[0].ipBlock",
    ),
    *(
        (
            "the keys must be names of labels or annotations",
            {path: [entry({"team": "a", "a.example.com/b.c_d": ""})] if entry else {"team": "a", "a.b/c_d": ""}},
            {path: [entry({key: "x"})] if entry else {key: "x"}},
            path + where,
        )
        for path, entry, where in (
            ("spec.labels", None, ""),
            ("spec.annotations", None, ""),
            ("spec.podTemplate.metadata.labels", None, ""),
            ("spec.podTemplate.metadata.annotations", None, ""),
            ("spec.observability.metricsLabels", None, ""),
            ("spec.gpu.nodeSelector", None, ""),
            ("spec.jobs.nodeSelector", None, ""),
            ("spec.jobs.labels", None, ""),
            ("spec.jobs.annotations", None, ""),
            (
                "spec.networking.networkPolicy.ingressFrom",
                lambda labels: {"podSelector": {"matchLabels": labels}},
                "[0].podSelector.matchLabels",
            ),
        )
        for key in ("bad key!", "-a", "a/b/c", "A.example/b", "a..b/c", "a" * 64)
    ),
    *(
        (
            "the keys app.kubernetes.io/name",
            {f"spec.{field}": {"a": "x"}},
            {f"spec.{field}": {key: "x"}},
            f"spec.{field}",
        )
        for field in ("labels", "annotations")
        for key in ("app.kubernetes.io/instance", "quire.dev/applied")
    ),
]

CEL_UPDATE_CASES = [
    (
        "storageClassName must not change",
        [({"storageClassName": "a"}, {"storageClassName": "a"}), ({}, {})],
        [({"storageClassName": "a"}, {"storageClassName": "b"}), ({"storageClassName": "a"}, {})],
    ),
    (
        "size must not shrink",
        [({"size": "10Gi"}, {"size": "10240Mi"}), ({"size": "900Mi"}, {"size": "1Gi"}), ({"size": "1Gi"}, {})],
        [({"size": "1Gi"}, {"size": "1000Mi"}), ({"size": "2G"}, {"size": "1.5G"})],
    ),
]
