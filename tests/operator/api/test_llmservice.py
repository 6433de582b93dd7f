# SPDX-License-Identifier: Apache-2.0
"""LLMService dataclasses: they have all fields of the CRD, and build the adapter catalog of a pod."""

from pathlib import Path

import pytest

from quire_operator.api import crd, quantity
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.api.yaml_manifest import parse_manifests, read_manifests
from quire_spec.documents.adapter_catalog import AdapterCatalog, Expose

ROOT = Path(__file__).resolve().parents[3]

HEAD = "apiVersion: quire.dev/v1alpha1\nkind: LLMService\nmetadata: {name: tales, namespace: team, generation: 7}\n"


def service(spec):
    (document,) = parse_manifests(f"{HEAD}spec: {spec}\n", "f.yaml")
    return LLMService.from_body(crd.require_valid(document))


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_can_be_read(example):
    documents = read_manifests(str(example))
    assert documents
    for document in documents:
        service = LLMService.from_body(crd.require_valid(document))
        assert service.name == document.body["metadata"]["name"]
        assert AdapterCatalog.from_json(service.build_catalog().to_json()) == service.build_catalog()


def test_names_and_defaults():
    tales = service("{device: CPU, model: {source: {path: m}}}")
    assert (tales.name, tales.namespace, tales.generation, tales.served_name) == ("tales", "team", 7, "tales")
    assert tales.spec.device is Device.CPU
    assert (tales.spec.lora.maxLoaded, tales.spec.lora.maxRank, tales.spec.lora.maxCached) == (8, 16, None)
    assert tales.spec.engine.maxModelLen is None
    assert tales.spec.gpu is None
    assert tales.spec.adapters == ()


def test_openai_port_by_default_is_one_that_is_free():
    ports = "runtime: {ports: {http: 8004, grpc: 8005}}"
    assert service("{model: {source: {path: m}}}").openai_port == 8004
    assert service(f"{{model: {{source: {{path: m}}}}, {ports}}}").openai_port == 8006
    assert "openai" not in service("{model: {source: {path: m}}, openai: {enabled: false}}").ports


def test_served_name_overrides_the_resource_name():
    assert service("{model: {source: {path: m}, servedName: tales-1.5}}").served_name == "tales-1.5"


def test_hub_adapters_without_a_token_use_the_token_of_the_model():
    adapters = service(
        """
  model: {source: {huggingFace: {repo: o/m, tokenSecretRef: {name: hub}}}}
  adapters:
  - {name: a, source: {huggingFace: {repo: o/a}}}
  - {name: b, source: {huggingFace: {repo: o/b, tokenSecretRef: {name: other, key: k}}}, expose: Parameter}
  - {name: c, source: {s3: {uri: s3://bucket/c}}, pinned: true}
"""
    ).build_catalog()
    a, b, c = adapters.adapters
    assert adapters.generation == 7
    assert (a.source.huggingFace.tokenSecretRef.name, a.source.huggingFace.tokenSecretRef.key) == ("hub", "token")
    assert (b.source.huggingFace.tokenSecretRef.name, b.source.huggingFace.tokenSecretRef.key) == ("other", "k")
    assert (a.expose, b.expose) == (None, Expose.PARAMETER)
    assert c.source.s3.credentialsSecretRef is None
    assert (a.pinned, c.pinned) == (False, True)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 3 * 2**29), ("4G", 4 * 10**9), ("0.5", 1), ("1.0000001Ki", 1025)],
)
def test_quantities(text, num_bytes):
    assert quantity.to_bytes(text) == num_bytes
