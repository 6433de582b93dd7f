# SPDX-License-Identifier: Apache-2.0
"""Random specs from the CRD's schema through validation, planner and renderer.

Results must be deterministic, errors must be ConfigErrors, and objects must have the labels that the operator selects
by. Values that the CRD does not restrict are chosen from the lists below: invalid URLs that match the patterns, pod
overrides that are not lists, labels of other programs. `FUZZ_SPECS=20000` runs more.
"""

import functools
import json
import os
import random
import re

import pytest
from support.planning import MODELS, schema_problems

from quire_operator.api import crd, schema_messages
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.plan.errors import Unplannable
from quire_operator.plan.gpu import GpuInfo
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import Plan
from quire_operator.plan.planner import make_plan
from quire_operator.render import object_names
from quire_operator.render.context import OPTIONAL_KINDS, RenderContext
from quire_operator.render.engine_config import UnsupportedByEngine
from quire_operator.render.objects import render_objects
from quire_spec.errors import ConfigError

NUM_SPECS = int(os.environ.get("FUZZ_SPECS", "400"))
CLUSTER = RenderContext(
    admin_key="k", available_kinds=frozenset(OPTIONAL_KINDS), operator_peer={"podSelector": {}}, owner_uid="u"
)
TEXTS = ["a", "tales-1.5", "A.b_c", "o/m", "x y", "", "token", "main", "eu-central-1", "0" * 64, "NVIDIA-L4"]
TEXTS += ["4Gi", "512Mi", "1", "1.5G", "9999999999999Ti", "2.5", "1500m", "0.9", "0.999", "s3://bb/a", "10.0.0.0/8"]
TEXTS += ["http://h:9000", "https://h/a", "http://h:99999/x", "http://[x", "https://h:port/", "nvidia.com/gpu", "A_B"]
KEYS = [
    object_names.MANAGED_BY,
    object_names.INSTANCE,
    object_names.COMPONENT,
    "app.kubernetes.io/name",
    "team",
    "",
    "é",
]
ENTRIES = [None, "x", [], ["x"], [None], [{}], [{"name": ["x"]}], [{"$patch": "replace"}, {"name": "c"}]]
ENTRIES += [[{"name": "server", "$patch": "delete"}], [{"name": "server", "securityContext": None, "env": None}]]
OVERRIDES = [{"$patch": "replace"}, {"securityContext": None}, {"nodeSelector": {"a": None}}, {"x": 10**30}]
OVERRIDES += [{field: entries} for field in ("containers", "volumes") for entries in ENTRIES]


def random_value(rng, schema, path=()):
    """Return a random value for a schema, usually a valid one."""
    if path == ("podTemplate", "spec"):
        return rng.choice(OVERRIDES)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if schema["type"] == "boolean":
        return rng.random() < 0.5
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        return min(high, max(low, rng.choice([low, high, 2, 16, 512, 4096])))
    if schema["type"] == "string":
        return rng.choice(texts(schema.get("pattern"), schema.get("minLength", 0), schema["maxLength"]))
    if schema["type"] == "array":
        return [random_value(rng, schema["items"], (*path, 0)) for _ in range(rng.randrange(4))]
    if "properties" not in schema:
        return {key: random_value(rng, schema["additionalProperties"]) for key in rng.sample(KEYS, rng.randrange(3))}
    fields = schema["properties"]
    if {"huggingFace", "s3"} <= set(fields):
        kind = rng.choice([*fields])
        return {kind: random_value(rng, fields[kind], (*path, kind))}
    full = rng.choice([0.1, 0.3, 0.6])
    names = [name for name in fields if name in schema.get("required", ()) or rng.random() < full]
    return {name: random_value(rng, fields[name], (*path, name)) for name in names}


@functools.cache
def texts(pattern, min_length, max_length):
    """Return the sample texts that a schema accepts."""
    return [
        t for t in TEXTS if min_length <= len(t) <= max_length and re.search((pattern or "").replace("$", r"\Z"), t)
    ]


def valid(body):
    """Return the body without the fields that rules reject, or None if that is not possible."""
    for _ in range(40):
        problems = crd.validate(body).problems
        if not problems:
            return body
        *parents, last = problems[0].path
        node = body
        for key in parents:
            node = node[key]
        if last not in (range(len(node)) if isinstance(node, list) else node):
            return None
        del node[last]
    return None


def test_every_pattern_has_sample_texts():
    for pattern in schema_messages.PATTERN_MESSAGES:
        assert texts(pattern, 1, 64), pattern


@pytest.mark.parametrize("block", range(4))
def test_random_specs_are_rendered_or_rejected_with_a_message(block):
    rng = random.Random(block)
    num_rendered = 0
    for _ in range(NUM_SPECS // 4):
        spec = random_value(rng, crd.load_schema()["properties"]["spec"])
        body = {"apiVersion": crd.GROUP_VERSION, "kind": "LLMService", "metadata": {"name": "tales"}, "spec": spec}
        if (accepted := valid(body)) is None:
            continue
        try:
            num_rendered += rendered(rng, accepted)
        except Exception as error:
            raise AssertionError(json.dumps(accepted)) from error
    assert num_rendered > NUM_SPECS // 16


def rendered(rng, body):
    """Plan and render a valid body, check the results, and return whether it could be rendered."""
    service, again = (LLMService.from_body(crd.validate(json.loads(json.dumps(body))).body) for _ in range(2))
    gpu = (
        None
        if service.spec.device is Device.CPU
        else GpuInfo.from_product(rng.choice(["NVIDIA-L4", "NVIDIA-H100-PCIe"]))
    )
    try:
        plan = make_plan(PlannerInputs.from_service(service, MODELS[rng.choice([*MODELS])], gpu))
    except Unplannable:
        plan = make_plan(PlannerInputs.from_service(LIGHT, MODELS["tiny"], None))
    assert Plan.from_json(plan.to_json()) == plan
    assert schema_problems(plan.to_json()) == []
    assert plan.kvTokens < 2**63
    for name in ("maxModelLen", "maxNumSeqs", "maxNumBatchedTokens", "blockSize", "tensorParallelSize", "dtype"):
        pinned = getattr(service.spec.engine, name)
        assert pinned in (None, getattr(plan, name).value) or plan.inputsHash == LIGHT_HASH, name
    try:
        objects = render_objects(service, plan, CLUSTER)
    except (ConfigError, UnsupportedByEngine):
        return False
    assert objects == render_objects(again, plan, CLUSTER)
    for manifest in json.loads(json.dumps(objects.manifests, allow_nan=False)):
        check_selectable(manifest["metadata"])
        if manifest["kind"] == "Deployment":
            check_selectable(manifest["spec"]["template"]["metadata"] | {"name": "pod"})
    return True


def check_selectable(meta):
    """Check that an object has the labels that the operator selects by."""
    assert len(meta["name"]) <= 63
    assert (meta["labels"][object_names.MANAGED_BY], meta["labels"][object_names.INSTANCE]) == (
        object_names.MANAGER,
        "tales",
    ), meta["name"]


_LIGHT = {"device": "CPU", "model": {"source": {"pvc": {"claimName": "c"}}}}
LIGHT = LLMService.from_body(
    crd.validate(
        {"apiVersion": crd.GROUP_VERSION, "kind": "LLMService", "metadata": {"name": "tales"}, "spec": _LIGHT}
    ).body
)
"""A service that can always be planned. Its plan is used for specs that cannot be planned."""
LIGHT_HASH = PlannerInputs.from_service(LIGHT, MODELS["tiny"], None).digest
