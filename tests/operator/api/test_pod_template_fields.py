# SPDX-License-Identifier: Apache-2.0
"""What `quire validate` says of a misspelt field of spec.podTemplate.spec, and of what fields it says nothing."""

import json
from pathlib import Path

import kubernetes_validate
import pytest

from quire_operator.api import pod_template_fields
from quire_operator.cli.validate import validate_file

SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


def fields(minor, kind):
    schema = json.loads((SCHEMAS / f"v1.{minor}.0-local/_definitions.json").read_text())
    return set((schema.get("$defs") or schema["definitions"])[f"io.k8s.api.core.v1.{kind}"]["properties"])


@pytest.mark.parametrize(
    ("kind", "known"),
    [("PodSpec", pod_template_fields.POD_SPEC_FIELDS), ("Container", pod_template_fields.CONTAINER_FIELDS)],
)
def test_the_fields_are_those_of_kubernetes(kind, known):
    assert set(known) == fields(37, kind)


@pytest.mark.parametrize("kind", ["PodSpec", "Container"])
def test_a_field_of_a_later_release_is_no_misspelling(monkeypatch, kind):
    """Of any release and the next, as if this were of the first."""
    name = "POD_SPEC_FIELDS" if kind == "PodSpec" else "CONTAINER_FIELDS"
    for minor in (25, 29, 33):
        monkeypatch.setattr(pod_template_fields, name, tuple(fields(minor, kind)))
        spec = dict.fromkeys(fields(37, kind))
        template = spec if kind == "PodSpec" else {"containers": [spec]}
        assert list(pod_template_fields.iter_problems({"spec": {"podTemplate": {"spec": template}}})) == []


def test_a_misspelt_field_is_told_with_its_line(tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text("""apiVersion: quire.dev/v1alpha1
kind: LLMService
metadata: {name: tales}
spec:
  model: {source: {pvc: {claimName: models}}}
  podTemplate:
    spec:
      nodeSelektor: {disk: fast}
      $patch: merge
      somethingNew: 1
      containers:
      - name: server
        volumeMount: []
      - {name: side, ports: []}
""")
    found = validate_file(str(file))
    assert not found.ok
    assert list(found.render_lines()) == [
        f"{file}:13: spec.podTemplate.spec.containers[0].volumeMount: no field that pods are known to have; write "
        "volumeMounts",
        f"{file}:8: spec.podTemplate.spec.nodeSelektor: no field that pods are known to have; write nodeSelector",
    ]


@pytest.mark.parametrize(
    "spec",
    [None, [], {"podTemplate": []}, {"podTemplate": {"spec": "x"}}]
    + [{"podTemplate": {"spec": {"containers": c}}} for c in (None, "x", {}, [None], [[]], [{1: 2}])],
)
def test_what_is_no_pod_at_all_is_for_others_to_tell(spec):
    assert list(pod_template_fields.iter_problems({"spec": spec})) == []
    assert list(pod_template_fields.iter_problems(spec)) == []
