# SPDX-License-Identifier: Apache-2.0
"""NetworkPolicies of a service: allowed peers and ports in both directions."""

import base64
import dataclasses
import re

import pytest
from support.planning import llm_service
from support.rendering import GPU, OPERATOR_PEER, RENDER_CONTEXT, pod_document, rendered_objects

from quire_spec.errors import ConfigError

DNS = [53, 53, 5353, 5353]
EKS = {
    "to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}, {"ipBlock": {"cidr": "fd00:ec2::23/128"}}],
    "ports": [{"port": 80, "protocol": "TCP"}],
}
GKE = {
    "to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}, {"ipBlock": {"cidr": "169.254.169.252/32"}}],
    "ports": [{"port": 80, "protocol": "TCP"}, {"port": 988, "protocol": "TCP"}],
}


def test_only_exposed_protocols_are_reachable():
    objects = rendered_objects(llm_service(f"{GPU}runtime: {{expose: [grpc]}}"))
    names = {"grpc", "metrics", "health", "openai"}
    assert {port["name"] for port in objects["Service", "s"]["spec"]["ports"]} == names
    ingress = objects["NetworkPolicy", "s"]["spec"]["ingress"]
    assert {port["port"] for rule in ingress for port in rule["ports"]} == {8001, 8002, 8003, 8004}
    container = objects["Deployment", "s"]["spec"]["template"]["spec"]["containers"][0]
    assert {port["name"] for port in container["ports"]} == names
    assert pod_document(objects.values())["server"] == {"expose": ["grpc"]}


def test_network_policies():
    service = llm_service(f"{GPU}adapters: [{{name: a, source: {{http: {{url: http://h:8080/a}}}}}}]")
    objects = rendered_objects(service)
    ingress = objects["NetworkPolicy", "s"]["spec"]["ingress"]
    by_port = {port["port"]: rule["from"] for rule in ingress for port in rule["ports"]}
    assert by_port[8000] == by_port[8001] == by_port[8004] == [{"podSelector": {}}]
    assert OPERATOR_PEER in by_port[8003] and {"podSelector": {}} not in by_port[8003]
    assert OPERATOR_PEER not in by_port[8000]

    def egress(policy):
        return [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]

    assert egress(objects["NetworkPolicy", "s"]) == [*DNS, 443, 8080]
    assert egress(objects["NetworkPolicy", "s-model-download"]) == [*DNS, 443]
    (ingress_rule,) = objects["NetworkPolicy", "s-model-download"]["spec"]["ingress"]
    assert ingress_rule == {"from": [OPERATOR_PEER], "ports": [{"port": 8003, "protocol": "TCP"}]}, (
        "the operator reads the progress"
    )
    unknown = rendered_objects(service, context=dataclasses.replace(RENDER_CONTEXT, operator_peer=None))
    assert unknown["NetworkPolicy", "s-model-download"]["spec"]["ingress"] == []
    closed = rendered_objects(llm_service(f"{GPU}lora: {{maxLoaded: 0}}"))
    assert egress(closed["NetworkPolicy", "s"]) == DNS
    mirror = rendered_objects(
        llm_service(f"{GPU}runtime: {{env: [{{name: HF_ENDPOINT, value: 'http://mirror:8090'}}]}}")
    )
    assert egress(mirror["NetworkPolicy", "s-model-download"]) == [*DNS, 443, 8090]
    for name in ("https_proxy", "ALL_PROXY"):
        proxy = rendered_objects(llm_service(f"{GPU}runtime: {{env: [{{name: {name}, value: 'proxy.example:3128'}}]}}"))
        assert egress(proxy["NetworkPolicy", "s-model-download"]) == [*DNS, 443, 3128]
    with_picker = rendered_objects(
        llm_service(f"{GPU}networking: {{inferencePool: {{endpointPicker: {{name: picker}}}}}}")
    )
    by_port = {
        p["port"]: rule["from"] for rule in with_picker["NetworkPolicy", "s"]["spec"]["ingress"] for p in rule["ports"]
    }
    assert {"podSelector": {}} in by_port[8003], "the endpoint picker reads metrics"
    assert {"podSelector": {}} not in by_port[8002]
    off = rendered_objects(llm_service(f"{GPU}networking: {{networkPolicy: {{enabled: false}}}}"))
    assert "NetworkPolicy" not in {kind for kind, _ in off}


@pytest.mark.parametrize("place", ["model", "draft", "adapter", "model in an EmptyDir"])
@pytest.mark.parametrize(("credentials", "reachable"), [("", True), (", credentialsSecretRef: {name: c}", False)])
@pytest.mark.parametrize(
    ("bucket", "identity"),
    [
        ("s3: {uri: s3://bucket/m", EKS),
        ("gcs: {uri: gs://bucket/m", GKE),
        ("azure: {account: acc, uri: az://con/m", None),
    ],
)
def test_a_bucket_without_credentials_opens_the_identity_agent_of_its_cloud(
    place, credentials, reachable, bucket, identity
):
    source = f"{{{bucket}{credentials}}}}}"
    spec = {
        "model": f"model: {{source: {source}}}",
        "model in an EmptyDir": f"model: {{source: {source}}}\ncache: {{mode: EmptyDir}}",
        "draft": "model: {source: {huggingFace: {repo: o/m}}}\n"
        "engine: {speculativeConfig: {method: eagle3, numSpeculativeTokens: 3, "
        f"model: {{source: {source}}}}}}}",
        "adapter": f"adapters: [{{name: a, source: {source}}}]",
    }[place]
    objects = rendered_objects(llm_service(GPU + spec))
    name = "s-model-download" if place in ("model", "draft") else "s"
    expected = [identity] if identity and reachable else []
    assert [rule for rule in objects["NetworkPolicy", name]["spec"]["egress"] if rule in (EKS, GKE)] == expected
    others = [m for (kind, other), m in objects.items() if kind == "NetworkPolicy" and other != name]
    assert not any(rule in policy["spec"]["egress"] for policy in others for rule in (EKS, GKE))


@pytest.mark.parametrize("url", ["http://h:99999/a", "http://[h", "https://h:port"])
def test_rejects_a_url_without_a_valid_port(url):
    for spec in (f"adapters: [{{name: a, source: {{http: {{url: '{url}'}}}}}}]",
                 f"runtime: {{env: [{{name: HF_ENDPOINT, value: '{url}'}}]}}"):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{re.escape(repr(url))} is not a URL"):
            rendered_objects(llm_service(f"{GPU}{spec}"))


@pytest.mark.parametrize(("num_cores", "replay"), [(1, [5558]), (2, [5559, 5560])])
def test_only_subscribers_reach_the_ports_of_kv_events(num_cores, replay):
    subscribers = "[{podSelector: {matchLabels: {app: router}}}]"
    gpus = GPU.replace("product", f"count: {num_cores}, product") if num_cores > 1 else GPU
    service = llm_service(
        f"{gpus}engine: {{dataParallelSize: {num_cores}}}\nnetworking: {{kvEvents: {{subscribers: {subscribers}}}}}"
    )
    objects = rendered_objects(service)
    ports = [*range(5557, 5557 + num_cores), *replay]
    rules = [
        (rule["from"], [p["port"] for p in rule["ports"]])
        for rule in objects["NetworkPolicy", "s"]["spec"]["ingress"]
        if {p["port"] for p in rule["ports"]} & set(ports)
    ]
    assert rules == [([{"podSelector": {"matchLabels": {"app": "router"}}}], ports)]
    (container,) = objects["Deployment", "s"]["spec"]["template"]["spec"]["containers"]
    assert [p["containerPort"] for p in container["ports"] if p["name"].startswith("kv-")] == ports
    assert {p["port"] for p in objects["Service", "s"]["spec"]["ports"]}.isdisjoint(ports)
    assert pod_document(objects.values())["engine"]["kv_events_config"] == {
        "enable_kv_cache_events": True,
        "replay_endpoint": f"tcp://*:{replay[0]}",
    }


def test_only_pods_of_the_service_read_kv_blocks():
    text = "{kvCacheOffloading: {memory: 1Gi}, kvTransfer: {port: 9005, bytesPerSecond: 2k, allowedPeers: [%s]%s}}"
    objects = rendered_objects(llm_service(f"{GPU}engine: {text % ('10.0.0.0/8:9100', '')}"))
    policy = objects["NetworkPolicy", "s"]["spec"]
    ports = [{"port": 9005, "protocol": "TCP"}]
    assert [rule for rule in policy["ingress"] if rule["ports"] == ports] == [
        {"from": [{"podSelector": policy["podSelector"]}], "ports": ports}
    ]
    assert policy["egress"][-2:] == [
        {"to": [{"podSelector": policy["podSelector"]}], "ports": ports},
        {"ports": [{"port": 9100, "protocol": "TCP"}]},
    ]
    template = objects["Deployment", "s"]["spec"]["template"]["spec"]
    assert {"name": "kv-transfer", "containerPort": 9005} in template["containers"][0]["ports"]
    assert 9005 not in {p["port"] for p in objects["Service", "s-pods"]["spec"]["ports"]}
    transfer = pod_document(objects.values())["engine"]["kv_transfer"]
    assert transfer == {
        "key_file": "/etc/quire/admin/kv-transfer-key",
        "port": 9005,
        "allowed_peers": ["s-pods:9005", "10.0.0.0/8:9100"],
        "bytes_per_second": 2000,
    }
    secret = objects["Secret", "s-admin"]["data"]
    (volume,) = [volume for volume in template["volumes"] if volume["name"] == "admin"]
    assert volume["secret"]["secretName"] == "s-admin" and volume["secret"]["defaultMode"] == 0o440
    key = base64.b64decode(secret["kv-transfer-key"])
    assert len(key) == 64 and key != base64.b64decode(secret["key"])
    off = rendered_objects(llm_service(f"{GPU}engine: {text % ('', ', enabled: false')}"))
    assert "kv_transfer" not in pod_document(off.values())["engine"]
    assert off["Secret", "s-admin"]["data"] == secret, "containers of old pods can start again"


def test_pods_send_traces_to_the_collector():
    spec = "lora: {maxLoaded: 0}\nobservability: {tracing: {endpoint: 'http://collector.monitoring:4317'}}"
    objects = rendered_objects(llm_service(f"{GPU}{spec}"))
    policy = objects["NetworkPolicy", "s"]["spec"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [*DNS, 4317]
    assert pod_document(objects.values())["engine"]["otlp_traces_endpoint"] == "http://collector.monitoring:4317"
