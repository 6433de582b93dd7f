# SPDX-License-Identifier: Apache-2.0
"""Objects of a service with roles: the DisaggregatedSet, and which pods the other objects select."""

import json

import pytest
import yaml
from support.planning import llm_service, schema_problems
from support.rendering import GPU, only_of_kind, plan_of_service, rendered_objects

from quire_operator.api import crd
from quire_operator.plan.errors import Unplannable
from quire_operator.plan.plan import Plan
from quire_operator.render import leader_worker_set, model_storage

ROLES = f"""{GPU}
engine: {{kvCacheOffloading: {{memory: 16Gi}}, maxNumSeqs: 64}}
disaggregation:
  prefill:
    replicas: 2
    resources: {{gpu: {{product: NVIDIA-H100-80GB-HBM3}}, cpu: "6"}}
    engine: {{maxNumBatchedTokens: 8192, kvCacheOffloading: {{memory: 32Gi}}}}
  decode: {{replicas: 3, engine: {{maxNumSeqs: 128}}}}
  localTokens: 256
  recomputeThreshold: 32
  loadFailurePolicy: fail
"""
LABELS = {
    "app.kubernetes.io/name": "quire",
    "app.kubernetes.io/instance": "s",
    "app.kubernetes.io/component": "server",
}


def roles_of(objects):
    return {role["name"]: role for role in only_of_kind(objects, "DisaggregatedSet")["spec"]["roles"]}


def template_of(role):
    return role["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def server(template):
    (container,) = template["spec"]["containers"]
    return container


def engine_of(objects, template):
    names = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    document = objects["ConfigMap", names["engine"]["configMap"]["name"]]["data"]["pod.json"]
    return json.loads(document)["engine"]


@pytest.fixture(scope="module")
def objects():
    return rendered_objects(llm_service(ROLES))


def test_each_role_is_the_pod_that_its_settings_would_have_alone(objects):
    """A role differs from a service with the same settings only by what concerns the other role."""
    assert not any(kind in ("Deployment", "LeaderWorkerSet") for kind, _ in objects)
    settings = {
        "prefill": "gpu: {product: NVIDIA-H100-80GB-HBM3}\nruntime: {cpu: '6'}\nengine: {maxNumSeqs: 64, "
        "maxNumBatchedTokens: 8192, kvCacheOffloading: {memory: 32Gi}, kvTransfer: {}, maxModelLen: LEN, blockSize: 8}",
        "decode": f"{GPU}engine: {{maxNumSeqs: 128, kvCacheOffloading: {{memory: 16Gi}}, kvTransfer: {{}}}}",
    }
    decode = engine_of(objects, template_of(roles_of(objects)["decode"]))
    for name, role in roles_of(objects).items():
        alone = rendered_objects(
            llm_service(f"replicas: 2\n{settings[name]}".replace("LEN", str(decode["max_model_len"])))
        )
        pod, expected = template_of(role), only_of_kind(alone, "Deployment")["spec"]["template"]
        engine, engine_alone = engine_of(objects, pod), engine_of(alone, expected)
        if name == "decode":
            assert engine.pop("prefill_local_tokens") == 256
            assert (engine.pop("kv_recompute_threshold"), engine.pop("kv_load_failure_policy")) == (32, "fail")
            assert engine["kv_transfer"]["allowed_peers"].pop(1) == "s-pods:8004", "it has prefill pods compute prompts"
        assert engine == engine_alone
        assert pod["metadata"]["labels"].items() >= (expected["metadata"]["labels"] | {"llm-d.ai/role": name}).items()
        (engine_alone,) = [name for kind, name in alone if kind == "ConfigMap" and "-engine-" in name]
        (engine,) = [each for kind, each in objects if kind == "ConfigMap" and f"s-{name}-engine-" in each]
        assert pod["spec"] == json.loads(json.dumps(expected["spec"]).replace(engine_alone, engine))


def test_the_set_lets_its_controller_replace_both_roles_together(objects):
    for name, role in roles_of(objects).items():
        assert role["metadata"]["labels"].items() >= {**LABELS, "llm-d.ai/role": name}.items()
        spec = {**role["spec"], "leaderWorkerTemplate": {**role["spec"]["leaderWorkerTemplate"], "workerTemplate": {}}}
        assert spec == {
            "replicas": {"prefill": 2, "decode": 3}[name],
            "groupIdentity": "Hash",
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "leaderWorkerTemplate": {"size": 1, "workerTemplate": {}, "restartPolicy": "None"},
        }


def selects(selector, template):
    """Whether the selector of a Service, or a LabelSelector, selects the pods of a template."""
    labels = template["metadata"]["labels"]
    expressions = selector.get("matchExpressions", ())
    equal = selector.get("matchLabels", selector)
    return equal.items() <= labels.items() and all(labels.get(e["key"]) in e["values"] for e in expressions)


def test_roles_of_several_nodes_are_groups():
    """A role has the templates that its groups would have alone, and each object selects the right pods of them."""
    objects = rendered_objects(
        llm_service(ROLES.replace("maxNumSeqs: 64}", "maxNumSeqs: 64, pipelineParallelSize: 2}"))
    )
    templates = {}
    for name, role in roles_of(objects).items():
        group = role["spec"]["leaderWorkerTemplate"]
        leader, worker = (dict(group.pop(f"{kind}Template")) for kind in ("leader", "worker"))
        assert group == {"size": 2, "restartPolicy": "RecreateGroupOnPodRestart"}
        assert role["spec"]["groupIdentity"] == "Ordinal"
        bare = json.loads(json.dumps(leader))
        del bare["metadata"]["labels"]["quire.dev/template"]
        assert (leader, worker) == leader_worker_set.group_templates(bare, 2)
        assert server(worker)["command"] == [*leader_worker_set.WORKER_COMMAND] != server(leader).get("command")
        engine = engine_of(objects, leader)
        assert (engine["nnodes"], engine["pipeline_parallel_size"]) == (2, 2) and engine["rank_key_file"]
        peers = {f"{host}:8005" for host in ("s-pods", "s-prefill-nodes", "s-decode-nodes")}
        assert peers <= set(engine["kv_transfer"]["allowed_peers"])
        templates |= {(name, "server"): leader, (name, "worker"): worker}

    def selected(kind, name):
        spec = objects[kind, name]["spec"]
        selector = spec["podSelector" if kind == "NetworkPolicy" else "selector"]
        return {key for key, template in templates.items() if selects(selector, template)}

    prefill, decode = ({(role, kind) for kind in ("server", "worker")} for role in ("prefill", "decode"))
    servers = {("prefill", "server"), ("decode", "server")}
    assert selected("Service", "s") == {("decode", "server")}
    assert selected("Service", "s-pods") == selected("NetworkPolicy", "s") == servers
    for role, own, other in (("prefill", prefill, decode), ("decode", decode, prefill)):
        assert selected("Service", f"s-{role}-nodes") == selected("NetworkPolicy", f"s-{role}-group") == own
        assert selected("PodDisruptionBudget", f"s-{role}") == own
        assert objects["PodDisruptionBudget", f"s-{role}"]["spec"]["maxUnavailable"] == 2
        policy = objects["NetworkPolicy", f"s-{role}-group"]["spec"]
        for rules, side in ((policy["ingress"], "from"), (policy["egress"], "to")):
            admitted = {}
            for rule in rules:
                for peer in (peer for peer in rule.get(side, ()) if "namespaceSelector" not in peer):
                    found = {key for key, template in templates.items() if selects(peer["podSelector"], template)}
                    (port,) = rule["ports"]
                    admitted |= dict.fromkeys(found, port.get("port", "all"))
            assert admitted == dict.fromkeys(own, "all") | dict.fromkeys(other, 8005), (role, side)


def test_kueue_gets_pods_with_an_order():
    objects = rendered_objects(llm_service(f"{ROLES}labels: {{kueue.x-k8s.io/queue-name: gpus}}"))
    for role in roles_of(objects).values():
        assert role["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        pod = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        assert "kueue.x-k8s.io/queue-name" not in pod["metadata"]["labels"], "Kueue would never start the pod"
        assert role["spec"]["groupIdentity"] == "Ordinal"


def test_clients_reach_decode_pods_and_routers_both_roles(objects):
    decode, prefill = ({**LABELS, "llm-d.ai/role": role} for role in ("decode", "prefill"))
    assert objects["Service", "s"]["spec"]["selector"] == decode
    assert objects["Service", "s-pods"]["spec"]["selector"] == LABELS, "the operator pushes adapters to both"
    pool = "networking: {inferencePool: {targetPort: openai, endpointPicker: {name: picker}}}"
    pooled = rendered_objects(llm_service(ROLES + pool))
    assert pooled["InferencePool", "s"]["spec"]["selector"]["matchLabels"] == LABELS
    policy = objects["NetworkPolicy", "s"]["spec"]
    assert policy["podSelector"]["matchLabels"] == LABELS

    def peers(rules, side, port):
        return [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule.get(side, ())
                if {"port": port, "protocol": "TCP"} in rule["ports"] and peer.get("podSelector")]  # fmt: skip

    assert peers(policy["ingress"], "from", 8004) == [decode], "besides the clients, which are any pod here"
    assert peers(policy["egress"], "to", 8004) == [prefill]
    assert peers(policy["ingress"], "from", 8005) == peers(policy["egress"], "to", 8005) == [LABELS]
    for role in ("decode", "prefill"):
        budget = objects["PodDisruptionBudget", f"s-{role}"]["spec"]
        assert (budget["selector"]["matchLabels"], budget["maxUnavailable"]) == ({**LABELS, "llm-d.ai/role": role}, 1)


def test_both_roles_share_everything_else(objects):
    names = {name for kind, name in objects if kind in ("Secret", "ServiceAccount", "PersistentVolumeClaim")}
    assert names == {"s", "s-admin", "s-credentials", "s-models"} & names and "s-admin" in names
    assert sum(kind == "Job" for kind, _ in objects) == 1
    shared = [
        (template["spec"]["serviceAccountName"], [v for v in template["spec"]["volumes"] if v["name"] != "engine"])
        for template in map(template_of, roles_of(objects).values())
    ]
    assert shared[0] == shared[1] and model_storage.cache_mode(llm_service(ROLES)) == "PVC"


def test_plans_of_both_roles_agree_on_what_they_exchange():
    plan = plan_of_service(llm_service(ROLES))
    assert plan.gpu.product == "NVIDIA-L4" and plan.prefill.gpu.product == "NVIDIA-H100-80GB-HBM3"
    for field in ("maxModelLen", "blockSize", "dtype"):
        assert getattr(plan, field).value == getattr(plan.prefill, field).value
    assert plan.prefill.maxModelLen.why == plan.prefill.blockSize.why == "the same in both roles"
    assert plan.inputsHash == plan.prefill.inputsHash
    assert Plan.from_json(plan.to_json()) == plan and schema_problems(plan.to_json()) == []
    other = plan_of_service(llm_service(ROLES.replace("maxNumBatchedTokens: 8192", "maxNumBatchedTokens: 4096")))
    assert other.inputsHash != plan.inputsHash, "a change of one role makes a new plan"


def test_both_roles_divide_blocks_between_the_same_number_of_gpus():
    several = ROLES.replace("NVIDIA-L4", "NVIDIA-L4, count: 2")
    for text, size in ((several, 1), (several.replace("80GB-HBM3", "80GB-HBM3, count: 4"), 2)):
        plan = plan_of_service(llm_service(text))
        sizes = plan.tensorParallelSize, plan.prefill.tensorParallelSize
        assert [planned.value for planned in sizes] == [size, size]
        assert {planned.why for planned in sizes} == {"the same in both roles"}
    several = ROLES.replace("NVIDIA-L4", "NVIDIA-A40, count: 4").replace("80GB-HBM3", "80GB-HBM3, count: 2")
    with pytest.raises(Unplannable, match=r"^spec.engine.tensorParallelSize: decode pods 4, and prefill pods 2, but"):
        plan_of_service(llm_service(several), "70b")


@pytest.mark.parametrize(
    ("role", "path", "problem"),
    [
        ("{engine: {maxNumBatchedTokens: 32}}", "spec.disaggregation.decode.engine.maxNumBatchedTokens", "at least"),
        ("{engine: {maxNumSeqs: 9000}}", "spec.disaggregation.decode.engine.maxNumSeqs", "at most 4096"),
        ("{engine: {kvCacheMemory: 1Gi}}", "spec.disaggregation.decode.engine.kvCacheMemory", "must not both be set"),
        ("{engine: {dtype: bfloat16}}", "spec.disaggregation.decode.engine.dtype", "unknown"),
        ("{resources: {gpu: {count: 1}}}", "spec.engine.dataParallelSize", "(in role decode)"),
    ],
)
def test_what_a_role_cannot_have_is_refused_where_it_is_set(role, path, problem):
    spec = yaml.safe_load(
        f"""
        model: {{source: {{huggingFace: {{repo: o/m}}}}}}
        engine: {{kvCacheOffloading: {{memory: 1Gi}}, maxNumSeqs: 64, gpuMemoryUtilization: "0.9", dataParallelSize: 2}}
        gpu: {{count: 2}}
        disaggregation: {{prefill: {{}}, decode: {role}}}
        """
    )
    head = {"apiVersion": crd.GROUP_VERSION, "kind": "LLMService", "metadata": {"name": "s"}}
    (found,) = map(str, crd.validate({**head, "spec": spec}).problems)
    assert found.startswith(f"{path}: ") and problem in found, found
