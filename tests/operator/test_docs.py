# SPDX-License-Identifier: Apache-2.0
"""The documents promise nothing that is not there: links, fields, values, commands and YAML in them are checked."""

import json
import re
from dataclasses import fields
from itertools import pairwise

import kubernetes_validate
import pytest
import yaml
from support.chart import CHART, ROOT
from support.doc_snippets import DOCS, code_blocks, shell_commands
from support.openapi import OPENAPI, walk
from support.planning import ANY_TP_SIZE, MODELS

from quire_operator.api import crd
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.cli import main
from quire_operator.controller.metrics import ControllerMetrics
from quire_operator.plan.gpu import resolve_gpu
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.planner import make_plan
from quire_operator.render.context import RenderContext
from quire_operator.render.engine_config import engine_config
from quire_operator.render.objects import render_objects
from quire_server.sources import model_download
from quire_spec.engine import vllm_arguments
from quire_spec.engine.config import EngineConfig

CLUSTER = ROOT / "docs/gpu-cluster.md"
MIGRATION = ROOT / "docs/migrate-from-vllm-backend.md"
FIELDS = {".".join(part for part in path if part not in ("[]", "*")): node for path, node in walk(OPENAPI) if path}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def each(language):
    return [
        pytest.param(text, id=f"{document.name}-{i}")
        for document in DOCS
        for i, text in enumerate(code_blocks(document, language), 1)
    ]


def test_links_lead_somewhere():
    dead = []
    for document in DOCS:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:")):
                continue
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in anchors(file)):
                dead.append(f"{document.name}: {target}")
    assert dead == []


def anchors(file):
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("text", each("yaml"))
def test_yaml_is_what_an_api_server_takes(text):
    for body in yaml.safe_load_all(text):
        if body.get("kind") == "LLMService":
            assert [str(problem) for problem in crd.validate(body).problems] == []
            assert planned(body)
        elif "kind" in body:
            kubernetes_validate.validate(body, "1.37", strict=True)
        else:
            assert set(body) == {"rules"}, "a file of another program"


def test_the_job_that_fills_a_claim_asks_for_a_download_of_the_files_that_services_read():
    bodies = [body for text in code_blocks(CLUSTER, "yaml") for body in yaml.safe_load_all(text)]
    (job,) = [body["spec"]["template"]["spec"] for body in bodies if body.get("kind") == "Job"]
    (container,) = job["containers"]
    assert container["command"][1:] == ["-m", "quire_server.download"]
    asked = model_download._parser().parse_args(container["args"])
    ref = model_download._parse_source(asked.source).huggingFace.tokenSecretRef
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in job["volumes"] if "secret" not in v}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert f"{asked.secrets_dir}/{ref.name}" in mounts
    sources = [body["spec"]["model"]["source"].get("pvc") for body in bodies if body.get("kind") == "LLMService"]
    wanted = {"claimName": claims[mounts[str(asked.into.parent)]], "path": asked.into.name}
    assert sources.count(wanted) == 2


def planned(body):
    """What it becomes: an example that cannot be served would be a poor one. Files of a machine are for quire serve."""
    service = LLMService.from_body(crd.validate(body).body)
    if service.spec.model.source.path is not None:
        return True
    wanted = service.spec.gpu
    mig = wanted is not None and "mig" in wanted.resourceName
    nodes = [{"nvidia.com/mig-3g.40gb.product": "H100", "nvidia.com/mig-3g.40gb.memory": "40320"}] if mig else []
    gpu = None if service.spec.device is Device.CPU else resolve_gpu(wanted, nodes)
    plan = make_plan(PlannerInputs.from_service(service, MODELS["tiny" if gpu is None else "8b"], gpu, ANY_TP_SIZE))
    return render_objects(service, plan, RenderContext(admin_key="k")).manifests


def test_fields_that_are_named_exist():
    unknown = []
    for document in DOCS:
        for name in re.findall(r"`((?:spec|status)\.[\w.]+\w)(?:\[\])?[`: =]", document.read_text()):
            if name not in FIELDS and not any(
                FIELDS.get(p, {}).get("x-kubernetes-preserve-unknown-fields") for p in parents(name)
            ):
                unknown.append(f"{document.name}: {name}")
    assert unknown == []


def parents(name):
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


@pytest.mark.parametrize("text", each("sh"))
def test_commands_exist(text, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in shell_commands(text):
        if words[0] == "quire" and "-" not in words[-1:]:
            monkeypatch.setattr(main, "_serve", lambda given: 0)
            main._build_parser().parse_args([word for word in words[1:] if word != "|"])
        elif words[0] == "helm":
            check_helm(words)
        elif words[:2] == ["docker", "build"]:
            file = ROOT / words[words.index("-f") + 1]
            stage = words[words.index("--target") + 1] if "--target" in words else "operator"
            assert f" AS {stage}\n" in file.read_text()
            for word in words:
                assert not word.startswith("PIP_") or f"ARG {word}" in file.read_text()
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        else:
            assert words[0] in ("curl", "kubectl", "kind", "docker", "export", "git", "jq"), words
        for word in words:
            if word.startswith(("examples/", "charts/", "crds/")):
                assert (ROOT / word).exists(), word


def check_helm(words):
    assert words[1] in ("install", "upgrade", "uninstall", "rollback", "template")
    given = [after for word, after in pairwise(words) if word in ("--set", "--set-json")]
    for assignment in given:
        value = VALUES
        for part in assignment.partition("=")[0].split("."):
            assert isinstance(value, dict) and (part in value or value == {}), f"no value {assignment}"
            value = value.get(part, {})


def test_the_operators_metrics_are_all_there():
    wanted = set()
    for collector in ControllerMetrics().registry._collector_to_names:
        name = collector._name + ("_total" if collector._type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        wanted.add(f"| `{name}` | {collector._type} | {labels} | {collector._documentation} |")
    found = re.findall(r"^\| `quire_operator_.*$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert set(found) == wanted


# The migration.


def test_a_migrated_repository_is_the_same_engine(tmp_path):
    model, loras = (json.loads(text) for text in code_blocks(MIGRATION, "json"))
    (text,) = code_blocks(MIGRATION, "yaml")
    service = LLMService.from_body(crd.validate(yaml.safe_load(text)).body)
    before = EngineConfig.from_json({"device": "cuda", **vllm_arguments.from_vllm_arguments(model)})
    plan = make_plan(PlannerInputs.from_service(service, MODELS["8b"], resolve_gpu(service.spec.gpu), ANY_TP_SIZE))
    after = engine_config(service, "/weights/backbone/llama-3.1-8b", plan=plan)
    chosen = set(vllm_arguments.from_vllm_arguments(model))
    assert len(chosen) >= 10
    for name in chosen:
        assert getattr(after, name) == getattr(before, name), name
    assert service.served_name == "vllm_model"
    assert {a.name: a.source.pvc.path for a in service.spec.adapters} == {
        name: path.removeprefix("/weights/") for name, path in loras.items()
    }


def test_every_argument_of_vllm_has_its_line():
    text = MIGRATION.read_text()
    known = {field.name for field in fields(EngineConfig)}
    for name in (*known, *vllm_arguments._IGNORED_ARGUMENTS, *vllm_arguments._SUPPORTED_VALUES):
        assert f"`{name}`" in text, name
    table = re.findall(r"^\| (`.*?) \| .*?`(spec\.[\w.]+)`", text, re.MULTILINE)
    assert len(table) >= 18
    assert all(path in FIELDS for _, path in table)
