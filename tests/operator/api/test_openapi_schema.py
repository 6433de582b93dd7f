# SPDX-License-Identifier: Apache-2.0
"""Validation problems of an LLMService: exact paths and messages."""

import time

import pytest
from support.cel_cases import ADAPTER, REMOVE, service_with, validation_problems

from quire_operator.api import crd
from quire_operator.api.validation_errors import format_path
from quire_operator.render.engine_config import _SPEC_FIELDS

NAME = (
    "must contain only letters, digits, '-', '_' and '.', and begin and end with a letter or digit; "
    "use a name such as Tales-1.5"
)
SOURCE = "missing; add it (Location of the files: set exactly one field)"
WHOLE = "must be an integer; give an integer"
TWIN = "equals the value in entry 0; use a different value"
HUB = "spec.model.source.huggingFace"

INVALID = [
    ({"spec": REMOVE}, "spec: missing; add it (Desired state of the service)"),
    ({"spec.model": {}}, f"spec.model.source: {SOURCE}"),
    ({"metadata": {}}, "metadata.name: missing; add it (Name of the service)"),
    ({"apiVersion": "v1"}, 'apiVersion: "v1": must be quire.dev/v1alpha1; write quire.dev/v1alpha1'),
    ({"kind": "LLMservice"}, 'kind: "LLMservice": must be LLMService; did you mean LLMService?'),
    (
        {"metadata.lables": {}},
        "metadata.lables: unknown field; did you mean labels? Known fields: annotations, labels, name, namespace",
    ),
    ({"metadata.labels": {"tier": 1}}, 'metadata.labels.tier: 1: must be a string; put it in quotes: "1"'),
    (
        {"spec.lora.maxRanks": 8},
        "spec.lora.maxRanks: unknown field; did you mean maxRank? Known fields: experts, maxCached, maxCachedMemory, "
        "maxLoaded, maxLoadedRanks, maxRank, modulesToSave, onNoEffect",
    ),
    (
        {"spec.lora.qqq": 8},
        "spec.lora.qqq: unknown field; known fields: experts, maxCached, maxCachedMemory, maxLoaded, maxLoadedRanks, "
        "maxRank, modulesToSave, onNoEffect",
    ),
    (
        {"spec.lora.maxRank": 12},
        "spec.lora.maxRank: 12: must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512; use one of these",
    ),
    ({"spec.lora.maxLoaded": -1}, "spec.lora.maxLoaded: -1: must be at least 0; raise it"),
    ({"spec.lora.maxLoaded": 257}, "spec.lora.maxLoaded: 257: must be at most 256; lower it"),
    (
        {"spec.lora.maxLoaded": "4"},
        'spec.lora.maxLoaded: "4": must be an integer; write an integer, without quotes',
    ),
    ({"spec.lora.maxLoaded": 4.0}, f"spec.lora.maxLoaded: 4.0: {WHOLE}"),
    ({"spec.lora.maxLoaded": True}, f"spec.lora.maxLoaded: true: {WHOLE}"),
    (
        {"spec.model.revision": "main"},
        "spec.model.revision: unknown field; did you mean spec.model.source.huggingFace.revision? "
        "Known fields: servedName, source",
    ),
    (
        {"spec.model": "org/model"},
        'spec.model: "org/model": must be an object; give an object with the fields servedName, source',
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
    (
        {"spec.engine.quantization": "FP8"},
        'spec.engine.quantization: "FP8": must be one of None, int8, int4, fp8, fbgemm_fp8, compressed-tensors, awq, '
        "gptq, mxfp4, modelopt, auto-round, bitsandbytes, gguf; did you mean fp8?",
    ),
    ({"spec.model.servedName": "Ta les"}, f'spec.model.servedName: "Ta les": {NAME}'),
    ({"spec.model.servedName": "tales\n"}, f'spec.model.servedName: "tales\\n": {NAME}'),
    (
        {"spec.model.servedName": "a" * 64},
        f'spec.model.servedName: "{"a" * 56}...: must have at most 63 characters; shorten it',
    ),
    (
        {"spec.model.source": {"path": ""}},
        'spec.model.source.path: "": must not be empty; fill it in, or omit the field',
    ),
    ({"spec.adapters": [ADAPTER, ADAPTER]}, f'spec.adapters[1].name: "sql": {TWIN}'),
    (
        {"spec.adapters": {"sql": {}}},
        'spec.adapters: {"sql": {}}: must be a list; give a list, each entry like - name: ...',
    ),
    (
        {"spec.cache.accessModes": "ReadWriteMany"},
        'spec.cache.accessModes: "ReadWriteMany": must be a list; give a list, each entry like - "ReadWriteMany"',
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
    assert validation_problems(changes) == [message]


@pytest.mark.parametrize("name", _SPEC_FIELDS)
def test_vllm_argument_names_get_a_suggestion(name):
    (*group, field), _ = _SPEC_FIELDS[name]
    suggestion = field if group == ["engine"] else f"spec.{group[0]}.{field}"
    camel = "".join(word if i == 0 else word.title() for i, word in enumerate(name.split("_")))
    for written in {name, camel} - {field}:
        (message,) = validation_problems({f"spec.engine.{written}": 1})
        assert f": unknown field; did you mean {suggestion}? Known fields: " in message


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_rejects_a_document_that_is_not_an_object(body):
    (problem,) = crd.validate(body).problems
    assert str(problem).endswith("must be an object; give an object with the fields apiVersion, kind, metadata, spec")
    assert problem.path == ()


def test_all_problems_are_reported_sorted_by_path():
    adapters = [{"name": f"a{i}", "source": {}} for i in range(11)]
    paths = [
        format_path(p.path)
        for p in crd.validate(
            service_with({"spec.lora.maxRank": 3, "spec.devise": "CPU", "spec.adapters": adapters})
        ).problems
    ]
    assert paths == [*(f"spec.adapters[{i}].source" for i in range(11)), "spec.devise", "spec.lora.maxRank"]


def test_rules_about_invalid_fields_are_skipped():
    assert validation_problems({"spec.lora": {"maxLoaded": 4, "maxCached": "3"}}) == [
        'spec.lora.maxCached: "3": must be an integer; write an integer, without quotes'
    ]


def test_defaults_and_nulls_as_in_an_api_server():
    body = crd.validate(
        service_with({"spec.lora": None, "spec.rollout": {"maxSurge": None}, "spec.cache.size": None})
    ).body
    assert body["spec"]["lora"] == {"maxLoaded": 8, "maxRank": 16}
    assert body["spec"]["rollout"]["maxSurge"] == 0
    assert body["spec"]["device"] == "GPU"
    assert body["spec"]["cache"] == {"deletionPolicy": "Retain"}
    assert "gpu" not in body["spec"]


def test_accepts_fields_that_an_api_server_adds():
    stored = service_with(
        {
            "metadata.uid": "x",
            "metadata.managedFields": [{"manager": "kubectl"}],
            "metadata.creationTimestamp": "2026-01-01T00:00:00Z",
            "status": {"anything": 1},
        }
    )
    assert not crd.validate(stored).problems


def test_too_long_lists_are_rejected_quickly():
    start = time.process_time()
    problems = crd.validate(service_with({"spec.adapters": [f"a{i}" for i in range(30_000)]})).problems
    assert time.process_time() - start < 30, "2 s; comparing all pairs of problems took minutes"
    assert len(problems) == 30_001


def test_reports_at_most_fifty_unknown_fields():
    start = time.process_time()
    problems = validation_problems({f"spec.zzz{i:05}": 1 for i in range(90_000)})
    assert time.process_time() - start < 5, "0.5 s; a suggestion for each field took 10 s"
    assert len(problems) == 51
    assert problems[0] == "spec: has 89950 more unknown fields; remove them"
    assert problems[1].startswith("spec.zzz00000: unknown field; known fields: adapterSources, adapterSums, adapters, ")
