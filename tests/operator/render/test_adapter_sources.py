# SPDX-License-Identifier: Apache-2.0
"""Places in which pods find adapters by name: what pods mount, request and read, and what a change of them restarts."""

import json

import pytest
from support.planning import llm_service
from support.rendering import rendered_objects

from quire_operator.controller.template_revision import pods_digest
from quire_operator.render.configmaps import secret_refs
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import ConfigError

PLACES = """
model: {source: {huggingFace: {repo: o/m, tokenSecretRef: {name: hf}}}}
gpu: {product: NVIDIA-L4}
adapterSources:
- {huggingFace: {organization: team}, allow: "team-*"}
- {s3: {uri: s3://bucket/a, endpoint: "http://s3:9000", credentialsSecretRef: {name: s3}}, limit: {adapters: 9}}
- {http: {url: "http://files:8080/a", headersSecretRef: {name: web}}, limit: {size: 512Mi}}
- {pvc: {claimName: loras, path: shared}}
"""


def test_pods_can_read_every_place():
    service = llm_service(PLACES)
    objects = rendered_objects(service)
    catalog = AdapterCatalog.from_json(json.loads(objects["ConfigMap", "s-adapters"]["data"]["adapters.json"]))
    hub, s3, http, pvc = catalog.sources
    assert hub.huggingFace.tokenSecretRef.name == "hf", "that of the model"
    assert (s3.maxAdapters, s3.maxBytes, http.maxBytes) == (9, 10 * 2**30, 2**29)
    assert hub.source_of("team-x").huggingFace.repo == "team/team-x"
    assert s3.source_of("x").s3.uri == "s3://bucket/a/x" and pvc.source_of("x").pvc.path == "shared/x"
    assert {ref.name for ref in secret_refs(service)} == {"hf", "s3", "web"}
    pod = objects["Deployment", "s"]["spec"]["template"]["spec"]
    assert {"name": "claim-0", "persistentVolumeClaim": {"claimName": "loras", "readOnly": True}} in pod["volumes"]
    requests = pod["containers"][0]["resources"]["requests"]
    assert requests["ephemeral-storage"] == f"{30 * 1024 + 512}Mi"
    egress = objects["NetworkPolicy", "s"]["spec"]["egress"]
    assert {9000, 8080, 443} <= {port["port"] for rule in egress for port in rule["ports"]}


def test_only_a_claim_restarts_pods():
    def digest(text):
        service = llm_service(text)
        spec = {"model": {"source": {"huggingFace": {"repo": "o/m"}}}}
        return pods_digest({"spec": spec}, service)

    assert digest(PLACES) == digest(PLACES.replace("512Mi", "99Gi").replace("team-*", "*").replace("shared", "x"))
    assert digest(PLACES) != digest(PLACES.replace("loras", "others"))


def test_a_catalog_without_places_is_that_of_earlier_releases():
    text = "adapters: [{name: a, source: {path: x}}]"
    with_place = llm_service(f"{text}\nadapterSources: [{{path: y}}]").build_catalog()
    without = llm_service(text).build_catalog()
    assert "sources" not in without.to_json() and "sources" in with_place.to_json()
    assert without.version.digest != with_place.version.digest
    changed = llm_service(f"{text}\nadapterSources: [{{path: y, allow: z}}]").build_catalog()
    assert changed.version.digest != with_place.version.digest, "pods get it"


def test_pods_have_no_local_folders():
    with pytest.raises(ConfigError, match=r"spec.adapterSources\[0\].path: 'loras' is a local folder"):
        rendered_objects(llm_service("adapterSources: [{path: loras}]"))
