# SPDX-License-Identifier: Apache-2.0
"""The CRD as data: bounded, described, consistent with the code; and what it refuses, with exact paths and words."""

import copy
import dataclasses
import json
import math
import re
import time

import kubernetes_validate
import pytest
from support.openapi import CRD, OPENAPI, ROOT, VERSION, walk
from support.rules import ADAPTER, REMOVE, RULES, UPDATES, patched

from quire_operator import crd, patterns, schema
from quire_operator.engine_config import _FIELDS as FIELDS_OF_ARGUMENTS
from quire_operator.errors import dotted
from quire_operator.manifest import read
from quire_operator.rules import Rule
from quire_operator.rules import problems as evaluate
from quire_spec import capability, catalogue, names


def found(changes):
    return [str(problem) for problem in crd.check(patched(changes)).problems]


def rules():
    """Every CEL rule: its path, schema and rule."""
    return [
        (path, node, Rule.from_crd(entry))
        for path, node in walk(OPENAPI)
        for entry in node.get("x-kubernetes-validations", ())
    ]


# The CRD as data.


def test_names_and_subresources():
    spec = CRD["spec"]
    assert CRD["metadata"]["name"] == "llmservices.quire.dev"
    assert (spec["group"], VERSION["name"], spec["names"]["kind"]) == (names.API_GROUP, names.API_VERSION, names.KIND)
    assert spec["names"]["shortNames"] == ["llm"]
    assert spec["names"]["categories"] == ["all"]
    assert VERSION["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    columns = [column["name"] for column in VERSION["additionalPrinterColumns"]]
    assert columns == ["Ready", "Reason", "Model", "GPU", "TP", "Replicas", "Adapters", "Age", "Download"]


def test_printer_columns_and_scale_show_fields_that_exist():
    paths = [column["jsonPath"] for column in VERSION["additionalPrinterColumns"]]
    paths += VERSION["subresources"]["scale"].values()
    fields = {".".join(["", *path]).replace(".[]", "[]") for path, _ in walk(OPENAPI)}
    for path in paths:
        if not path.startswith(".metadata"):
            assert re.sub(r"\[\?.*?\]", "[]", path) in fields


def test_every_string_list_map_and_number_is_bounded():
    unbounded = [
        (dotted(path), node["type"])
        for path, node in walk(OPENAPI)
        if not {
            "string": "maxLength" in node or "enum" in node,
            "array": "maxItems" in node,
            "integer": "minimum" in node or "enum" in node,
            "object": "properties" in node or "maxProperties" in node or path == ("metadata",),
            "boolean": True,
        }[node["type"]]
    ]
    assert not unbounded
    endless = [
        dotted(path)
        for path, node in walk(OPENAPI["properties"]["spec"])
        if node["type"] == "integer" and "maximum" not in node and "enum" not in node
    ]
    assert not endless


def test_every_field_is_described_with_a_sentence():
    poor = [
        dotted(path)
        for path, node in walk(OPENAPI)
        if path != ("metadata",)
        and path[-1:] not in (("[]",), ("*",))
        and not re.fullmatch(r".{5,}[.:]", node.get("description", ""))
    ]
    assert not poor


def test_every_default_is_said_and_every_said_default_is_true():
    for path, node in walk(OPENAPI["properties"]["spec"]):
        default = node.get("default", "")
        if default != "" and not isinstance(default, dict):
            said = json.dumps(default) if isinstance(default, bool) else str(default)
            assert f"Default {said}" in node["description"], dotted(path)


def test_optional_fields_without_a_default_say_what_omitting_them_means():
    silent = [
        dotted((*path, name))
        for path, node in walk(OPENAPI["properties"]["spec"])
        for name, field in node.get("properties", {}).items()
        if not ({"default", "properties"} & set(field) or name in node.get("required", ()))
        if "efault" not in field["description"]
    ]
    # A source's kinds exclude each other, and lists, maps and values that are empty when omitted.
    assert {path.rpartition(".")[2] for path in silent} == {
        "path", "adapters", "value", "matchLabels", "labels", "annotations", "spec"
    }  # fmt: skip


def test_only_keywords_that_a_structural_schema_may_have():
    allowed = {
        "type", "description", "properties", "required", "items", "additionalProperties", "enum", "default", "format",
        "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "maxProperties",
        "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
        "x-kubernetes-preserve-unknown-fields",
    }  # fmt: skip
    for path, node in walk(OPENAPI):
        assert set(node) <= allowed, dotted(path)
        assert not {"properties", "additionalProperties"} <= set(node), dotted(path)
        if node.get("x-kubernetes-list-type") == "map":
            assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"]), dotted(path)
        for name in node.get("required", ()):
            assert name in node["properties"], dotted(path)


def test_every_default_is_valid_itself():
    for path, node in walk(OPENAPI):
        if "default" in node:
            assert not list(schema.problems(node, schema.complete(node, node["default"]))), dotted(path)


def test_rules_hold_on_defaults_as_they_stand():
    """An API server tries them when the CRD is made, before it fills in the defaults of fields inside."""
    for path, node in walk(OPENAPI):
        if "default" in node:
            assert not list(evaluate(node, node["default"], node["default"])), dotted(path)


def test_metadata_is_left_to_the_api_server():
    """One that finds anything but a type there refuses the CRD."""
    assert OPENAPI["properties"]["metadata"] == {"type": "object"}


def test_the_api_servers_schema_of_a_crd_holds():
    for version in ("1.37", "1.33"):
        kubernetes_validate.validate(CRD, version, strict=True)


def test_small_enough_for_the_annotation_of_kubectl_apply():
    assert len(json.dumps(CRD)) < 200_000


def test_patterns_have_words():
    used = {node["pattern"] for _, node in walk(crd.load()) if "pattern" in node}
    assert used == set(patterns.WORDS)


def test_sources_are_those_of_the_catalogue():
    spec = OPENAPI["properties"]["spec"]["properties"]
    assert set(spec["adapters"]["items"]["properties"]) == {f.name for f in dataclasses.fields(catalogue.Adapter)}
    for parent in (spec["model"], spec["adapters"]["items"]):
        source = parent["properties"]["source"]["properties"]
        assert set(source) == {field.name for field in dataclasses.fields(catalogue.Source)}
        for kind, cls in (
            ("huggingFace", catalogue.HuggingFaceSource),
            ("s3", catalogue.S3Source),
            ("http", catalogue.HttpSource),
            ("pvc", catalogue.PvcSource),
        ):
            assert set(source[kind]["properties"]) == {field.name for field in dataclasses.fields(cls)}


def test_choices_are_those_of_the_engine():
    spec = OPENAPI["properties"]["spec"]["properties"]
    engine = spec["engine"]["properties"]
    assert tuple(engine["blockSize"]["enum"]) == capability.BLOCK_SIZES
    assert tuple(engine["dtype"]["enum"]) == tuple(dtype for dtype in capability.DTYPES if dtype != "auto")
    assert tuple(spec["lora"]["properties"]["maxRank"]["enum"]) == capability.LORA_RANKS
    assert tuple(q for q in engine["quantization"]["enum"] if q != "None") == capability.QUANTIZATIONS
    assert spec["adapters"]["items"]["properties"]["expose"]["enum"] == [e.value for e in catalogue.Expose]
    assert spec["adapters"]["maxItems"] <= catalogue.MAX_ADAPTERS
    model_name = spec["model"]["properties"]["servedName"]
    assert (model_name["pattern"], model_name["maxLength"]) == (f"^{names.MODEL_NAME.pattern}$", names.MAX_MODEL_NAME)


# The rules as data.


def test_messages_name_the_field_say_must_and_end_with_what_to_do():
    for path, node, rule in rules():
        must, fix = rule.must, rule.fix
        assert re.search(r"\bmust\b", must) and fix and fix[0].islower(), must
        assert "\n" not in must + fix + rule.expression, must
        first = must.split()[0]
        assert rule.subject or first in path or first == path[-1:], must
        assert "properties" in node, must


def test_rules_read_fields_that_exist():
    fields = {path for path, _ in walk(OPENAPI)} | {("metadata", "name")}
    for path, _, rule in rules():
        for field in rule.fields:
            assert (*path, *field) in fields, rule.expression


def test_rules_cost_less_than_an_api_server_allows():
    """An upper bound of the API server's own estimate, by its documented factors: 10 million a rule, 100 in all.

    A step costs 1 (a list literal 10), a comparison of texts 0.1 a byte of the shorter, a match 0.1 a byte times 0.25 a
    byte of the pattern; a character may be 4 bytes; what is in a list counts once for each possible entry.
    """
    costs = {rule.expression: _cost(path, rule) for path, _, rule in rules()}
    assert max(costs.values()) < 10e6, max(costs, key=costs.get)
    assert sum(costs.values()) < 100e6


def _cost(path, rule):
    by_path = dict(walk(OPENAPI))
    longest = {p: node.get("maxLength", 3 * 2**20 / 4) * 4 for p, node in by_path.items()}
    runs = math.prod(by_path[path[:i]].get("maxItems", 1) for i in range(len(path)))
    # The shared source schema stands in the model and in every adapter.
    for list_path in re.findall(r"self\.([\w.]+)\.(?:all|filter|exists)\(", rule.expression):
        runs *= by_path[(*path, *list_path.split("."))]["maxItems"]
    steps = 10 * len(re.findall(r"\w+|[^\w\s]", rule.expression))
    comparisons = 0.1 * 4 * 253 * len(re.findall(r"[!=]=", rule.expression))
    matches = sum(
        0.1 * (longest.get((*path, *field.split(".")), 3 * 2**20) + 1) * math.ceil(0.25 * len(regex))
        for field, regex in re.findall(r"self\.([\w.]+)\.(?:matches|startsWith)\('([^']*)'", rule.expression)
    )
    return runs * (steps + comparisons + matches)


# Each rule, kept and broken. The first words of the message tell which rule is meant.


@pytest.mark.parametrize(("words", "good", "bad", "path"), RULES, ids=[f"{r[0]}-{i}" for i, r in enumerate(RULES)])
def test_a_rule_keeps_to_what_is_right_and_refuses_what_is_wrong(words, good, bad, path):
    assert found(good) == []
    (problem,) = crd.check(patched(bad)).problems
    assert dotted(problem.path) == path
    assert problem.rule.startswith(words)


@pytest.mark.parametrize(("words", "good", "bad"), UPDATES, ids=[u[0] for u in UPDATES])
def test_rules_about_changes_are_judged_against_the_stored_object(words, good, bad):
    for old, new in good:
        assert not crd.check(patched({"spec.cache": new}), patched({"spec.cache": old})).problems
    for old, new in bad:
        (problem,) = crd.check(patched({"spec.cache": new}), patched({"spec.cache": old})).problems
        assert problem.rule.startswith(words)
        assert found({"spec.cache": new}) == []


def test_every_rule_of_the_crd_has_a_case():
    words = [case[0] for case in (*RULES, *UPDATES)]
    for _, _, rule in rules():
        assert any(rule.must.startswith(w) for w in words), rule.must


# Structure.


NAME = (
    "must be letters, digits, '-', '_' and '.', beginning and ending with a letter or digit; "
    "use a name such as Tales-1.5"
)
SOURCE = "missing; add it (Where the files come from: exactly one place)"
WHOLE = "must be a whole number; give a whole number"
TWIN = "is in entry 0 already; give each entry its own"
HUB = "spec.model.source.huggingFace"

INVALID = [
    ({"spec": REMOVE}, "spec: missing; add it (What is wanted)"),
    ({"spec.model": {}}, f"spec.model.source: {SOURCE}"),
    ({"metadata": {}}, "metadata.name: missing; add it (Name of the service)"),
    ({"apiVersion": "v1"}, 'apiVersion: "v1": must be quire.dev/v1alpha1; write quire.dev/v1alpha1'),
    ({"kind": "LLMservice"}, 'kind: "LLMservice": must be LLMService; did you mean LLMService?'),
    (
        {"metadata.lables": {}},
        "metadata.lables: unknown field; did you mean labels? There are annotations, labels, name, namespace",
    ),
    ({"metadata.labels": {"tier": 1}}, 'metadata.labels.tier: 1: must be a string; put it in quotes: "1"'),
    (
        {"spec.lora.maxRanks": 8},
        "spec.lora.maxRanks: unknown field; did you mean maxRank? There are maxCached, maxCachedMemory, maxLoaded, "
        "maxRank",
    ),
    ({"spec.lora.qqq": 8}, "spec.lora.qqq: unknown field; there are maxCached, maxCachedMemory, maxLoaded, maxRank"),
    ({"spec.lora.maxRank": 12}, "spec.lora.maxRank: 12: must be one of 8, 16, 32, 64, 128, 256; take one of these"),
    ({"spec.lora.maxLoaded": -1}, "spec.lora.maxLoaded: -1: must be at least 0; raise it"),
    ({"spec.lora.maxLoaded": 257}, "spec.lora.maxLoaded: 257: must be at most 256; lower it"),
    (
        {"spec.lora.maxLoaded": "4"},
        'spec.lora.maxLoaded: "4": must be a whole number; write a whole number, without quotes',
    ),
    ({"spec.lora.maxLoaded": 4.0}, f"spec.lora.maxLoaded: 4.0: {WHOLE}"),
    ({"spec.lora.maxLoaded": True}, f"spec.lora.maxLoaded: true: {WHOLE}"),
    (
        {"spec.engine.maxLoaded": 8},
        "spec.engine.maxLoaded: unknown field; did you mean spec.lora.maxLoaded? There are "
        f"{', '.join(sorted(OPENAPI['properties']['spec']['properties']['engine']['properties']))}",
    ),
    (
        {"spec.model.revision": "main"},
        "spec.model.revision: unknown field; did you mean spec.model.source.huggingFace.revision? "
        "There are servedName, source",
    ),
    (
        {"spec.lora": [1]},
        "spec.lora: [1]: must be an object; give an object; there are maxCached, maxCachedMemory, maxLoaded, maxRank",
    ),
    (
        {"spec.model": "org/model"},
        'spec.model: "org/model": must be an object; give an object; there are servedName, source',
    ),
    ({"spec.gpu.nodeSelector": "l4"}, 'spec.gpu.nodeSelector: "l4": must be an object; give an object'),
    ({"spec.paused": "yes"}, 'spec.paused: "yes": must be true or false; write true or false, without quotes'),
    ({"spec.device": "cpu"}, 'spec.device: "cpu": must be one of GPU, CPU; did you mean CPU?'),
    (
        {"spec.engine.gpuMemoryUtilization": 0.9},
        'spec.engine.gpuMemoryUtilization: 0.9: must be a string; put it in quotes: "0.9"',
    ),
    (
        {"spec.engine.gpuMemoryUtilization": "90%"},
        'spec.engine.gpuMemoryUtilization: "90%": must be a decimal from 0.1 to 0.999; '
        'write it like "0.90", with the quotes',
    ),
    (
        {"spec.engine.kvCacheMemory": "4GB"},
        'spec.engine.kvCacheMemory: "4GB": must be a number with a unit; write it like 4Gi or 512Mi',
    ),
    (
        {"spec.engine.gpuMemoryUtilization": 1},
        'spec.engine.gpuMemoryUtilization: 1: must be a string; write it like "0.90", with the quotes',
    ),
    ({"spec.runtime.memory": 16}, "spec.runtime.memory: 16: must be a string; write it like 4Gi or 512Mi"),
    ({"spec.runtime.cpu": 4}, 'spec.runtime.cpu: 4: must be a string; put it in quotes: "4"'),
    (
        {"spec.engine.quantization": "FP8"},
        'spec.engine.quantization: "FP8": must be None; write None',
    ),
    ({"spec.model.trustRemoteCode": True}, "spec.model.trustRemoteCode: unknown field; there are servedName, source"),
    ({"spec.model.servedName": "Ta les"}, f'spec.model.servedName: "Ta les": {NAME}'),
    ({"spec.model.servedName": "tales\n"}, f'spec.model.servedName: "tales\\n": {NAME}'),
    (
        {"spec.model.servedName": "a" * 64},
        f'spec.model.servedName: "{"a" * 56}...: must have at most 63 characters; shorten it',
    ),
    (
        {"spec.model.source": {"hugginFace": {"repo": "a/b"}}},
        "spec.model.source.hugginFace: unknown field; did you mean huggingFace? "
        "There are http, huggingFace, path, pvc, s3",
    ),
    (
        {HUB: {"repo": "a/b/c"}},
        f'{HUB}.repo: "a/b/c": must be a hub repository\'s id; '
        "write it like organisation/name, without the hub's address",
    ),
    ({f"{HUB}.revision": 123}, f'{HUB}.revision: 123: must be a string; put it in quotes: "123"'),
    (
        {"spec.model.source": {"path": ""}},
        'spec.model.source.path: "": must not be empty; fill it in, or omit the field',
    ),
    ({"spec.adapters": [ADAPTER, ADAPTER]}, f'spec.adapters[1].name: "sql": {TWIN}'),
    ({"spec.adapters": [{"name": "sql"}]}, f"spec.adapters[0].source: {SOURCE}"),
    (
        {"spec.adapters": {"sql": {}}},
        'spec.adapters: {"sql": {}}: must be a list; give a list, each entry like - name: ...',
    ),
    (
        {"spec.lora.maxRank": "16"},
        'spec.lora.maxRank: "16": must be a whole number; write a whole number, without quotes',
    ),
    (
        {"spec.adapters": [{**ADAPTER, "url": "https://h/a"}]},
        "spec.adapters[0].url: unknown field; did you mean spec.adapters[0].source.http.url? There are expose, limits, "
        "name, pinned, source",
    ),
    (
        {"spec.gpu.tolerations": {"key": "a"}},
        'spec.gpu.tolerations: {"key": "a"}: must be a list; give a list, each entry like - key: ...',
    ),
    (
        {"spec.model.source": {"s3": {"uri": "s3://My_Bucket/a"}}},
        "spec.model.source.s3.uri: \"s3://My_Bucket/a\": must be s3://, a bucket (two or more of a-z, 0-9, '-' and "
        "'.') and a folder; write it like s3://bucket/folder",
    ),
    (
        {"spec.cache.accessModes": "ReadWriteMany"},
        'spec.cache.accessModes: "ReadWriteMany": must be a list; give a list, each entry like - "ReadWriteMany"',
    ),
    *(
        (
            {"spec.model.source": {"http": {"url": "https://h/a", "sha256": text}}},
            f'spec.model.source.http.sha256: "{text}": must be 64 hexadecimal digits; take the first column of '
            "sha256sum's output",
        )
        for text in ("ABCD", "")
    ),
    ({f"{HUB}.repo": ""}, f'{HUB}.repo: "": must not be empty; fill it in, or omit the field'),
    (
        {"spec.cache.accessModes": ["ReadWriteOnce", "ReadWriteOnce"]},
        f'spec.cache.accessModes[1]: "ReadWriteOnce": {TWIN}',
    ),
    (
        {"spec.cache.accessModes": []},
        "spec.cache.accessModes: []: must not be empty; fill it in, or omit the field",
    ),
    (
        {"spec.gpu.nodeSelector": {f"label-{i}": "" for i in range(33)}},
        'spec.gpu.nodeSelector: {"label-0": "", "label-1": "", "label-2": "", "label-3": ...: '
        "must have at most 32 fields; remove some",
    ),
    (
        {"spec.gpu.nodeSelector": {"a.b/c": 1}},
        'spec.gpu.nodeSelector["a.b/c"]: 1: must be a string; put it in quotes: "1"',
    ),
]


@pytest.mark.parametrize(("changes", "message"), INVALID, ids=[m.partition(":")[0] for _, m in INVALID])
def test_exact_path_and_message(changes, message):
    assert found(changes) == [message]


@pytest.mark.parametrize("name", sorted(set(FIELDS_OF_ARGUMENTS) - {"model", "device"}))
def test_an_engine_argument_of_vllm_leads_to_its_field(name):
    *group, field = FIELDS_OF_ARGUMENTS[name]
    meant = field if group == ["engine"] else f"spec.{group[0]}.{field}"
    camel = "".join(word if i == 0 else word.title() for i, word in enumerate(name.split("_")))
    for written in {name, camel} - {field}:
        (message,) = found({f"spec.engine.{written}": 1})
        assert f": unknown field; did you mean {meant}? There are " in message


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_document_that_is_no_object(body):
    (problem,) = crd.check(body).problems
    assert str(problem).endswith("must be an object; give an object; there are apiVersion, kind, metadata, spec")
    assert problem.path == ()


def test_all_problems_are_told_at_once_sorted_by_path_with_entries_by_number():
    adapters = [{"name": f"a{i}", "source": {}} for i in range(11)]
    paths = [
        dotted(p.path)
        for p in crd.check(patched({"spec.lora.maxRank": 3, "spec.devise": "CPU", "spec.adapters": adapters})).problems
    ]
    assert paths == [*(f"spec.adapters[{i}].source" for i in range(11)), "spec.devise", "spec.lora.maxRank"]


def test_a_rule_about_a_field_that_is_wrong_already_is_not_judged_too():
    assert found({"spec.lora": {"maxLoaded": 4, "maxCached": "3"}}) == [
        'spec.lora.maxCached: "3": must be a whole number; write a whole number, without quotes'
    ]


def test_defaults_are_filled_in_and_nulls_dropped_as_by_an_api_server():
    body = crd.check(patched({"spec.lora": None, "spec.rollout": {"maxSurge": None}, "spec.cache.size": None})).body
    assert body["spec"]["lora"] == {"maxLoaded": 8, "maxRank": 16}
    assert body["spec"]["rollout"]["maxSurge"] == 0
    assert body["spec"]["device"] == "GPU"
    assert body["spec"]["cache"] == {"deletionPolicy": "Retain"}
    assert "gpu" not in body["spec"]


def test_checking_changes_nothing_in_the_document():
    body = patched({"spec.lora": None})
    before = copy.deepcopy(body)
    crd.check(body)
    assert body == before


def test_what_an_api_server_added_is_no_problem():
    stored = patched(
        {
            "metadata.uid": "x",
            "metadata.managedFields": [{"manager": "kubectl"}],
            "metadata.creationTimestamp": "2026-01-01T00:00:00Z",
            "status": {"anything": 1},
        }
    )
    assert not crd.check(stored).problems


def test_a_pod_template_is_left_to_the_api_server():
    assert found({"spec.podTemplate.spec": {"affinity": {"nodeAffinity": None}, "anything": [1]}}) == []


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(example):
    documents = read(str(example))
    assert documents
    for document in documents:
        assert crd.check(document.body).problems == ()


def test_the_widest_service_allowed_is_checked_in_reasonable_time():
    adapters = [{"name": f"a{i}", "source": {"pvc": {"claimName": "c", "path": f"p/{i}"}}} for i in range(1024)]
    assert found({"spec.adapters": adapters}) == []
    assert found({"spec.adapters": [*adapters, {"name": "one-more", "source": {"path": "p"}}]})


def test_lists_that_are_far_too_long_are_refused_in_reasonable_time():
    begun = time.process_time()
    broken = crd.check(patched({"spec.adapters": [f"a{i}" for i in range(30_000)]})).problems
    assert time.process_time() - begun < 30, "2 s; each problem against each other took minutes"
    assert len(broken) == 30_001


def test_of_very_many_unknown_fields_fifty_are_told_and_the_others_counted():
    begun = time.process_time()
    broken = found({f"spec.zzz{i:05}": 1 for i in range(90_000)})
    assert time.process_time() - begun < 5, "0.5 s; to look for what each of them meant took 10"
    assert len(broken) == 51
    assert broken[0] == "spec: has 89950 more unknown fields; remove them"
    assert broken[1].startswith("spec.zzz00000: unknown field; there are adapters, ")
