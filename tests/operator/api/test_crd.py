# SPDX-License-Identifier: Apache-2.0
"""The CRD: bounded and described fields, consistency with the code, and valid and invalid values for each rule."""

import dataclasses
import json
import math
import re

import kubernetes_validate
import pytest
from crd_schema import object_schema
from support.cel_cases import CEL_RULE_CASES, CEL_UPDATE_CASES, service_with, validation_problems
from support.openapi import CRD, OPENAPI, VERSION, walk

from quire_operator.api import crd, openapi_schema, schema_messages
from quire_operator.api.cel_rules import CelRule
from quire_operator.api.cel_rules import iter_problems as evaluate
from quire_operator.api.validation_errors import format_path
from quire_spec import constants
from quire_spec.documents import adapter_catalog


def rules():
    """Return path, schema and rule of every CEL rule."""
    return [
        (path, node, CelRule.from_crd(entry))
        for path, node in walk(OPENAPI)
        for entry in node.get("x-kubernetes-validations", ())
    ]


# The CRD as data.


def test_printer_columns_and_scale_show_fields_that_exist():
    paths = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    paths += VERSION["subresources"]["scale"].values()
    fields = {".".join(["", *path]).replace(".[]", "[]") for path, _ in walk(OPENAPI)}
    for path in paths:
        if not path.startswith(".metadata"):
            assert re.sub(r"\[\?.*?\]", "[]", path) in fields


def test_all_fields_are_bounded():
    unbounded = [
        (format_path(path), node)
        for path, node in walk(OPENAPI)
        if not {
            "string": "maxLength" in node or "enum" in node,
            "array": "maxItems" in node,
            "integer": "minimum" in node or "enum" in node,
            "number": "minimum" in node,
            "object": "properties" in node or "maxProperties" in node or path == ("metadata",),
            "boolean": True,
            "int or string": {"minimum", "maximum", "maxLength"} <= set(node),
        }[node.get("type", "int or string")]
    ]
    assert not unbounded
    endless = [
        format_path(path)
        for path, node in walk(OPENAPI["properties"]["spec"])
        if node.get("type") in ("integer", "number") and "maximum" not in node and "enum" not in node
    ]
    assert not endless


def test_every_field_has_a_description():
    poor = [
        format_path(path)
        for path, node in walk(OPENAPI)
        if path != ("metadata",)
        and path[-1:] not in (("[]",), ("*",))
        and not re.fullmatch(r".{5,}[.:]", node.get("description", ""))
    ]
    assert not poor


def test_descriptions_contain_the_default():
    for path, node in walk(OPENAPI["properties"]["spec"]):
        default = node.get("default", "")
        if default != "" and not isinstance(default, dict):
            text = json.dumps(default) if isinstance(default, bool) else str(default)
            assert f"Default {text}" in node["description"], format_path(path)


def test_descriptions_of_optional_fields_state_the_default():
    silent = [
        format_path((*path, name))
        for path, node in walk(OPENAPI["properties"]["spec"])
        for name, field in node.get("properties", {}).items()
        if not ({"default", "properties"} & set(field) or name in node.get("required", ()))
        if "efault" not in field["description"]
    ]
    # The kinds of a source or template exclude each other, and lists, maps and values that are empty when omitted.
    assert {path.rpartition(".")[2] for path in silent} == {
        "path", "text", "publicKey", "adapters", "value", "matchLabels", "labels", "annotations", "spec"
    }  # fmt: skip


def test_schema_is_structural():
    allowed = {
        "type", "description", "properties", "required", "items", "additionalProperties", "enum", "default", "format",
        "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "maxProperties",
        "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
        "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string",
    }  # fmt: skip
    for path, node in walk(OPENAPI):
        assert set(node) <= allowed, format_path(path)
        assert not {"properties", "additionalProperties"} <= set(node), format_path(path)
        if node.get("x-kubernetes-list-type") == "map":
            assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), format_path(path)
        for name in node.get("required", ()):
            assert name in node["properties"], format_path(path)


def test_defaults_are_valid():
    for path, node in walk(OPENAPI):
        if "default" in node:
            assert not list(openapi_schema.iter_problems(node, openapi_schema.with_defaults(node, node["default"]))), (
                format_path(path)
            )


def test_rules_accept_defaults():
    """An API server evaluates rules on defaults when the CRD is created, before it fills in nested defaults."""
    for path, node in walk(OPENAPI):
        if "default" in node:
            assert not list(evaluate(node, node["default"], node["default"])), format_path(path)


def test_crd_is_a_valid_custom_resource_definition():
    for version in ("1.37", "1.33"):
        kubernetes_validate.validate(CRD, version, strict=True)


def test_small_enough_for_the_annotation_of_kubectl_apply():
    assert len(json.dumps(CRD)) < 200_000


def test_every_pattern_has_a_message():
    used = {node["pattern"] for _, node in walk(crd.load_schema()) if "pattern" in node}
    assert used == set(schema_messages.PATTERN_MESSAGES)


def test_names_of_adapters_and_models_are_bounded_as_in_the_engine():
    spec = OPENAPI["properties"]["spec"]["properties"]
    assert spec["adapters"]["maxItems"] <= adapter_catalog.MAX_ADAPTERS
    for name in (spec["model"]["properties"]["servedName"], spec["adapters"]["items"]["properties"]["name"]):
        assert (name["pattern"], name["maxLength"]) == (f"^{constants.MODEL_NAME.pattern}$", constants.MAX_MODEL_NAME)


def test_a_type_without_schema_is_named():
    @dataclasses.dataclass
    class Wrong:
        rate: complex = 1.0

    with pytest.raises(TypeError, match=r"Wrong\.rate: .*complex.* has no OpenAPI schema"):
        object_schema(Wrong)


# The rules as data.


def test_rule_messages_have_field_requirement_and_fix():
    for path, node, rule in rules():
        must, fix = rule.requirement, rule.fix
        assert re.search(r"\bmust\b", must) and fix and fix[0].islower(), must
        assert "\n" not in must + fix + rule.expression, must
        if "additionalProperties" in node:
            assert must.startswith("the keys "), must
            continue
        first = must.split()[0]
        assert rule.subject or first in path or first == path[-1:], must
        assert "properties" in node, must


def test_rules_read_fields_that_exist():
    fields = {path for path, _ in walk(OPENAPI)} | {("metadata", "name")}
    for path, _, rule in rules():
        for field in rule.fields:
            assert (*path, *field) in fields, rule.expression


def test_rule_cost_is_below_the_limit_of_an_api_server():
    """Compute an upper bound of the API server's estimate. Limits: 10 million for a rule, 100 million in total.

    Documented factors: a step costs 1 (a list literal 10), a string comparison 0.1 for each byte of the shorter string,
    a match 0.1 for each byte times 0.25 for each byte of the pattern. A character can have 4 bytes. Rules in a list
    count once for each possible entry.
    """
    costs = {rule.expression: _cost(path, rule) for path, _, rule in rules()}
    assert max(costs.values()) < 10e6, max(costs, key=costs.get)
    assert sum(costs.values()) < 100e6


def _cost(path, rule):
    by_path = dict(walk(OPENAPI))
    longest = {p: node.get("maxLength", 3 * 2**20 / 4) * 4 for p, node in by_path.items()}
    runs = math.prod(by_path[path[:i]].get("maxItems", 1) for i in range(len(path)))
    # The source schema is shared by the model and every adapter.
    for list_path in re.findall(r"self\.([\w.]+)\.(?:all|filter|exists)\(", rule.expression):
        runs *= by_path[(*path, *list_path.split("."))]["maxItems"]
    steps = 10 * len(re.findall(r"\w+|[^\w\s]", rule.expression))
    comparisons = 0.1 * 4 * 253 * len(re.findall(r"[!=]=", rule.expression))
    matches = sum(
        0.1 * (longest.get((*path, *field.split(".")), 3 * 2**20) + 1) * math.ceil(0.25 * len(regex))
        for field, regex in re.findall(r"self\.([\w.]+)\.(?:matches|startsWith)\('([^']*)'", rule.expression)
    )
    return runs * (steps + comparisons + matches)


# A valid and an invalid value for each rule. The first words of the message identify the rule.


@pytest.mark.parametrize(
    ("message", "good", "bad", "path"), CEL_RULE_CASES, ids=[f"{r[0]}-{i}" for i, r in enumerate(CEL_RULE_CASES)]
)
def test_rule_accepts_valid_and_rejects_invalid_values(message, good, bad, path):
    assert validation_problems(good) == []
    (problem,) = crd.validate(service_with(bad)).problems
    assert format_path(problem.path) == path
    assert problem.rule.startswith(message)


@pytest.mark.parametrize(("message", "good", "bad"), CEL_UPDATE_CASES, ids=[u[0] for u in CEL_UPDATE_CASES])
def test_transition_rules_compare_with_the_stored_object(message, good, bad):
    for old, new in good:
        assert not crd.validate(service_with({"spec.cache": new}), service_with({"spec.cache": old})).problems
    for old, new in bad:
        (problem,) = crd.validate(service_with({"spec.cache": new}), service_with({"spec.cache": old})).problems
        assert problem.rule.startswith(message)
        assert validation_problems({"spec.cache": new}) == []


def test_every_rule_has_a_test_case():
    message = [case[0] for case in (*CEL_RULE_CASES, *CEL_UPDATE_CASES)]
    for _, _, rule in rules():
        assert any(rule.requirement.startswith(w) for w in message), rule.requirement
