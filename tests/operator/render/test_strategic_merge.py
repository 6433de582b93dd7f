# SPDX-License-Identifier: Apache-2.0
"""spec.podTemplate: strategic merge into the pod template, and rejected overrides."""

import json
import re

import pytest
from support.planning import llm_service
from support.rendering import FULL_SPEC, GPU, POD_IP, only_of_kind, rendered_objects

from quire_operator.render import strategic_merge
from quire_spec.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("containers: {$patch: delete}", "containers: must be a list of objects with names"),
        ("containers: x", "containers: must be a list of objects with names"),
        ("containers: [x]", "containers: 'x' is not an object; each entry must have the key name"),
        ("containers: [x, {$patch: replace}]", "containers: 'x' is not an object; each entry must have the key name"),
        ("containers: [{image: x}]", "containers: must be a list of objects with names"),
        ("containers: [{name: server, env: [A]}]", "env: 'A' is not an object; each entry must have the key name"),
        ("containers: [{name: server, $patch: delete}]", "containers: the container 'server' must not be removed"),
        ("volumes: {$patch: delete}", "volumes: must be a list of objects with names"),
        ("$patch: replace", "containers: must be a list of objects with names"),
    ],
)
def test_rejects_overrides_that_remove_required_parts(override, message):
    with pytest.raises(ConfigError, match=f"^spec.podTemplate.spec.{re.escape(message)}"):
        rendered_objects(llm_service(f"{GPU}podTemplate: {{spec: {{{override}}}}}"))


@pytest.mark.parametrize("mode", ["PVC", "EmptyDir"])
def test_download_container_gets_files_and_environment_of_the_server(mode):
    """CA certificates and a proxy password reach the download; claims do not, because two nodes may not mount them."""
    pod_template = """
podTemplate:
  spec:
    containers:
    - name: server
      env: [{name: HTTPS_PROXY, valueFrom: {secretKeyRef: {name: proxy, key: url}}}, {name: HOME, $patch: delete}]
      envFrom: [{secretRef: {name: more}}]
      volumeMounts:
      - {name: authorities, mountPath: /etc/quire-ca, readOnly: true}
      - {name: plugins, mountPath: /plugins}
    volumes:
    - {name: authorities, configMap: {name: authorities}}
    - {name: plugins, persistentVolumeClaim: {claimName: plugins}}
"""
    objects = rendered_objects(llm_service(f"{GPU}cache: {{mode: {mode}}}{pod_template}"))
    pod = only_of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    job = only_of_kind(objects, "Job")["spec"]["template"]["spec"] if mode == "PVC" else pod
    (container,) = [c for c in job.get("initContainers", job["containers"]) if c["name"] == "download"]
    assert {"name": "authorities", "mountPath": "/etc/quire-ca", "readOnly": True} in container["volumeMounts"]
    assert {"name": "authorities", "configMap": {"name": "authorities"}} in job["volumes"]
    assert "HTTPS_PROXY" in [e["name"] for e in container["env"]] and "/plugins" not in str(container)
    assert container["envFrom"] == [{"secretRef": {"name": "more"}}]
    assert mode == "EmptyDir" or "plugins" not in [v["name"] for v in job["volumes"]]


def test_override_can_remove_optional_parts():
    objects = rendered_objects(
        llm_service(
            f"{GPU}podTemplate: {{spec: {{containers: [{{name: server, securityContext: {{$patch: delete}}}}]}}}}"
        )
    )
    assert "securityContext" not in only_of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert only_of_kind(objects, "Job")["spec"]["template"]["spec"]["containers"][0]["securityContext"] == {}


def test_pod_overrides_are_merged_last():
    template = only_of_kind(rendered_objects(llm_service(FULL_SPEC, "all")), "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == "all"
    container, side = template["spec"]["containers"]
    assert side == {"name": "side", "image": "side:1"}
    assert container["resources"]["limits"] == {"memory": "24Gi", "nvidia.com/gpu": "1", "cpu": "8"}
    assert container["env"] == [POD_IP, {"name": "NCCL_DEBUG", "value": "WARN"}]
    assert template["spec"]["priorityClassName"] == "high"


A, B = {"name": "a", "value": "1"}, {"name": "b"}


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": None, "d": 3}}, {"a": 1, "b": {"d": 3}}),
        ({"args": [1, 2]}, {"args": [3]}, {"args": [3]}),
        ({"env": [A]}, {"env": [B]}, {"env": [A, B]}),
        ({"env": [A]}, {"env": [{"name": "a", "value": "2"}]}, {"env": [{"name": "a", "value": "2"}]}),
        ({"env": [A, B]}, {"env": [{"name": "a", "$patch": "delete"}]}, {"env": [B]}),
        ({"env": [{"name": "a"}]}, {"env": [{"name": "b"}, {"$patch": "replace"}]}, {"env": [{"name": "b"}]}),
        ({"s": {"a": 1}}, {"s": {"$patch": "replace", "b": 2}}, {"s": {"b": 2}}),
        ({"s": {"a": {"b": 1}, "c": 2}}, {"s": {"a": {"$patch": "delete"}}}, {"s": {"c": 2}}),
        ({}, {"x": {"y": {"$patch": "delete"}, "z": 1}}, {"x": {"z": 1}}),
        ({}, {"x": {"y": None, "z": 1}}, {"x": {"z": 1}}),
        (
            {"volumes": [{"name": "cache", "emptyDir": {}}]},
            {"volumes": [{"name": "cache", "hostPath": {"path": "/x"}}]},
            {"volumes": [{"name": "cache", "hostPath": {"path": "/x"}}]},
        ),
        (
            {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]},
            {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]},
        ),
    ],
)  # fmt: skip
def test_strategic_merge(base, patch, merged):
    before = json.dumps([base, patch])
    assert strategic_merge.merge(base, patch) == merged
    assert json.dumps([base, patch]) == before
