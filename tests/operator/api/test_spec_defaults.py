# SPDX-License-Identifier: Apache-2.0
"""The operator's defaults: which fields they may have, how they are merged, and that they restart no pods."""

import json

import pytest
import yaml
from support.planning import llm_service
from support.rendering import FULL_SPEC, RENDER_CONTEXT, plan_of_service

from quire_operator.api import crd
from quire_operator.api.field_effects import PLANNED_ENGINE_FIELDS
from quire_operator.api.spec_defaults import ALLOWED_FIELDS, SpecDefaults
from quire_operator.controller.apply.child_objects import LiveObjects, build_child_objects
from quire_operator.controller.parsed_service import ParsedService
from quire_operator.render.objects import render_objects
from quire_spec.errors import ConfigError

DEFAULTS = """
annotations: {owner: platform}
labels: {team: all, cost: "1"}
disruption: {pdb: None}
gpu: {nodeSelector: {pool: gpu}, runtimeClassName: nvidia, tolerations: [{key: gpu, operator: Exists}]}
jobs: {nodeSelector: {disk: ssd}, resources: {limits: {memory: 2Gi}}}
networking: {networkPolicy: {ingressFrom: [{podSelector: {matchLabels: {role: gateway}}}]}}
observability: {metricsLabels: {release: monitoring}}
podTemplate:
  metadata: {labels: {mesh: "off"}}
  spec:
    priorityClassName: low
    containers: [{name: server, env: [{name: A, value: default}, {name: B, value: default}]}]
rollout: {drainSeconds: 30, maxSurge: 1}
runtime: {image: "registry.example/quire:1", imagePullSecrets: [{name: pull}], env: [{name: HTTPS_PROXY, value: "http://p:3128"}]}
security: {ids: Cluster, readOnlyRootFilesystem: false}
"""
HEAD = {
    "apiVersion": crd.GROUP_VERSION,
    "kind": "LLMService",
    "metadata": {"name": "s", "namespace": "team", "uid": "u"},
}


def parse(text):
    return SpecDefaults.parse(yaml.safe_load(text))


def body(text):
    model = {"source": {"huggingFace": {"repo": "o/m"}}}
    return crd.validate({**HEAD, "spec": {"model": model} | (yaml.safe_load(text) or {})}).body


def completed(defaults, text):
    return parse(defaults).service(body(text))


def test_every_allowed_field_reaches_the_objects():
    """Each default alone gives the same objects as the same field in the spec."""
    spec = yaml.safe_load(DEFAULTS)
    for path in ALLOWED_FIELDS:
        section, _, name = path.partition(".")
        default = {section: {name: spec[section][name]}} if name else {section: spec[section]}
        base = {"replicas": 2, "gpu": {"product": "NVIDIA-L4"}}
        own = base | {section: {**base.get(section, {}), **default[section]}}
        defaults, own, base = json.dumps(default), json.dumps(own), json.dumps(base)
        by_default, by_spec, plain = completed(defaults, base), completed("{}", own), completed("{}", base)
        assert by_default.defaulted_fields == (path,)
        left, right, without = (
            render_objects(service, plan_of_service(service), RENDER_CONTEXT).manifests
            for service in (by_default, by_spec, plain)
        )
        assert left == right != without, path


@pytest.mark.parametrize(
    ("defaults", "own", "path", "value"),
    [
        ("labels: {a: x, b: x}", "labels: {b: y, c: y}", "labels", {"a": "x", "b": "y", "c": "y"}),
        ("rollout: {drainSeconds: 30}", "rollout: {drainSeconds: 90}", "rollout.drainSeconds", 90),
        # A value that is equal to the CRD's default counts as not set, because the API server adds it.
        ("rollout: {drainSeconds: 30}", "rollout: {drainSeconds: 60}", "rollout.drainSeconds", 30),
        ("gpu: {tolerations: [{key: a}]}", "gpu: {tolerations: [{key: b}]}", "gpu.tolerations", ({"key": "b"},)),
        ("gpu: {tolerations: [{key: a}]}", "gpu: {product: NVIDIA-L4}", "gpu.tolerations", ({"key": "a"},)),
        ("gpu: {tolerations: [{key: a}]}", "device: CPU", "gpu", None),
    ],
)
def test_the_spec_takes_precedence(defaults, own, path, value):
    found = completed(defaults, own).spec
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_lists_with_keys_are_merged():
    defaults = "runtime: {env: [{name: A, value: '1'}, {name: B, value: '1'}]}"
    env = completed(defaults, "runtime: {env: [{name: B, value: '2'}, {name: C, value: '2'}]}").spec.runtime.env
    assert [(entry.name, entry.value) for entry in env] == [("A", "1"), ("B", "2"), ("C", "2")]


def test_pod_templates_are_merged_one_after_the_other():
    env = "[{name: B, value: own}, {name: A, $patch: delete}]"
    own = f"gpu: {{product: NVIDIA-L4}}\npodTemplate: {{spec: {{containers: [{{name: server, env: {env}}}]}}}}"
    service = completed(DEFAULTS, own)
    manifests = render_objects(service, plan_of_service(service), RENDER_CONTEXT).manifests
    (template,) = [m["spec"]["template"] for m in manifests if m["kind"] == "Deployment"]
    env = {entry["name"]: entry.get("value") for entry in template["spec"]["containers"][0]["env"]}
    assert env["B"] == "own" and "A" not in env and env["HTTPS_PROXY"] == "http://p:3128"
    assert template["metadata"]["labels"]["mesh"] == "off" and template["spec"]["priorityClassName"] == "low"


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("model: {source: {path: a}}", "defaults.model: must not be set; use only annotations, disruption"),
        ("replicas: 2", "defaults.replicas: must not be set"),
        ("gpu: {product: NVIDIA-L4}", "defaults.gpu.product: must not be set"),
        ("runtime: {ports: {http: 9000}}", "defaults.runtime.ports: must not be set"),
        ("networking: {inferencePool: {}}", "defaults.networking.inferencePool: must not be set"),
        ("rollout: {drainSeconds: -1}", "defaults.rollout.drainSeconds: -1: must be at least 0"),
        ("labels: {quire.dev/a: b}", "defaults.labels: the keys app.kubernetes.io/name"),
        ("gpu: x", "defaults.gpu: must not be set"),
        ("[]", "defaults: must be an object"),
    ],
)
def test_rejects_other_fields_and_invalid_values(defaults, message):
    with pytest.raises(ConfigError, match=message):
        parse(defaults)


def test_no_allowed_field_changes_a_plan_or_a_port():
    assert not {name.partition(".")[0] for name in ALLOWED_FIELDS} & {"engine", "lora", "model", "openai", "adapters"}
    assert PLANNED_ENGINE_FIELDS
    plain, full = (completed(text, "gpu: {product: NVIDIA-L4}") for text in ("{}", DEFAULTS))
    assert full.ports == plain.ports
    plans = [plan_of_service(service).to_json() for service in (plain, full)]
    for plan in plans:
        plan.pop("image")
        plan.pop("inputsHash")
    assert plans[0] == plans[1]


def test_a_change_of_the_defaults_keeps_the_pods_until_they_are_replaced_for_another_reason():
    stored = body(FULL_SPEC)
    stored["metadata"]["generation"] = 1
    old = ParsedService.from_body(stored, parse("labels: {a: b}"))
    new = ParsedService.from_body(stored, parse(DEFAULTS))
    assert old.pods_digest == new.pods_digest
    plan = plan_of_service(old.service)
    children = build_child_objects(old.service, old.pods_digest, plan, RENDER_CONTEXT, LiveObjects())
    (deployment,) = [m for m in children.manifests if m["kind"] == "Deployment"]

    def template(digest):
        found = build_child_objects(new.service, digest, plan, RENDER_CONTEXT, LiveObjects(workload=deployment))
        (manifest,) = [m for m in found.manifests if m["kind"] == "Deployment"]
        assert manifest["metadata"]["labels"]["team"] == "all", "other objects change at once"
        return manifest["spec"]["template"]

    assert template(new.pods_digest) == deployment["spec"]["template"]
    assert template("changed")["metadata"]["labels"]["mesh"] == "off"


def test_without_defaults_nothing_changes():
    assert SpecDefaults().service(body(FULL_SPEC)).spec == llm_service(FULL_SPEC).spec


def test_a_file_has_at_most_one_document(tmp_path):
    file = tmp_path / "defaults.yaml"
    file.write_text("---\n# nothing\n---\nlabels: {a: b}\n")
    assert SpecDefaults.read(file).spec == {"labels": {"a": "b"}}
    file.write_text("labels: {a: b}\n---\nannotations: {c: d}\n")
    with pytest.raises(ConfigError, match=r"defaults.yaml:3: defaults: a second YAML document; merge the documents"):
        SpecDefaults.read(file)
