# SPDX-License-Identifier: Apache-2.0
"""The documentation agrees with the code: links, fields, values, commands, YAML, metrics, reasons and test names."""

import re
from dataclasses import fields
from itertools import chain, pairwise

import generated
import kubernetes_validate
import pytest
import yaml
from support.chart import CHART, ROOT
from support.doc_snippets import DOCS, code_blocks, shell_commands
from support.openapi import OPENAPI, walk
from support.planning import MODELS

from quire_operator.api import crd
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.cli import main
from quire_operator.controller.metrics import ControllerMetrics
from quire_operator.controller.status.conditions import ConditionType, Reason
from quire_operator.controller.status.events import EventReason
from quire_operator.plan.errors import UnplannableReason
from quire_operator.plan.gpu import resolve_gpu
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import FitReason
from quire_operator.plan.planner import make_plan
from quire_operator.render.context import RenderContext
from quire_operator.render.engine_config import ModelLocation, engine_arguments
from quire_operator.render.objects import render_objects
from quire_server.downloads import model_download
from quire_spec.documents.download_result import DownloadReason
from quire_spec.engine import vllm_arguments
from quire_spec.engine.config import EngineConfig

GPU_CLUSTER = ROOT / "docs/gpu-cluster.md"
MIGRATION = ROOT / "docs/migrate-from-vllm-backend.md"
REFERENCE = (ROOT / "docs/llmservice-reference.md").read_text()
GUARANTEES = (ROOT / "docs/operator-guarantees.md").read_text()
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()
FIELDS = {".".join(part for part in path if part not in ("[]", "*")): node for path, node in walk(OPENAPI) if path}
CHART_VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
REASONS = {str(reason) for reason in chain(Reason, FitReason, UnplannableReason, EventReason)}
REASON_SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^##|\Z)", TROUBLESHOOTING, re.MULTILINE | re.DOTALL))
ROUTERS = sorted((ROOT / "examples/routers").glob("*.yaml"))
FILES_OF_OTHER_PROGRAMS = (
    {"rules"}, {"retry_policy"}, {"circuit_breakers", "load_balancing_policy"}, {"servingEngineSpec", "routerSpec"},
)  # fmt: skip
"""Fields of configuration files of a metrics adapter and of Envoy, and values of vLLM's chart."""
REASON_ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


def blocks_of(language):
    return [
        pytest.param(text, id=f"{document.name}-{i}")
        for document in DOCS
        for i, text in enumerate(code_blocks(document, language), 1)
    ]


# Links, fields, YAML and commands, in every document.


def test_links_have_targets():
    dead = []
    for document in DOCS:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:")):
                continue
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or (anchor and anchor not in heading_anchors(file)):
                dead.append(f"{document.name}: {target}")
    assert dead == []


def heading_anchors(file):
    headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("text", blocks_of("yaml") + [pytest.param(f.read_text(), id=f.stem) for f in ROUTERS])
def test_yaml_is_accepted_by_an_api_server(text):
    for body in yaml.safe_load_all(text):
        if body.get("kind") == "LLMService":
            assert [str(problem) for problem in crd.validate(body).problems] == []
            assert rendered(body)
        elif body.get("kind") == "EndpointPickerConfig":
            declared = {plugin["type"] for plugin in body["plugins"]}
            assert {*re.findall(r"'(?:pluginRef|prefixMatchInfoProducerName)': '(.*?)'", str(body))} <= declared
        elif "kind" in body:
            kubernetes_validate.validate(body, "1.37", strict=True)
        else:
            assert set(body) in FILES_OF_OTHER_PROGRAMS


def rendered(body):
    """Render an example's manifests. A source with `path` is skipped: only `quire serve` accepts it."""
    service = LLMService.from_body(crd.validate(body).body)
    if service.spec.model.source.path is not None:
        return True
    gpu_spec = service.spec.gpu
    mig = gpu_spec is not None and "mig" in gpu_spec.resourceName
    nodes = [{"nvidia.com/mig-3g.40gb.product": "H100", "nvidia.com/mig-3g.40gb.memory": "40320"}] if mig else []
    gpu = None if service.spec.device is Device.CPU else resolve_gpu(gpu_spec, nodes)
    speculative = service.spec.engine.speculativeConfig
    name = "qwen3.5" if speculative and speculative.method == "mtp" else "tiny" if gpu is None else "8b"
    plan = make_plan(PlannerInputs.from_service(service, MODELS[name], gpu))
    return render_objects(service, plan, RenderContext(admin_key="k")).manifests


def test_named_fields_exist():
    unknown = []
    for document in DOCS:
        for name in re.findall(r"`((?:spec|status)\.[\w.]+\w)(?:\[\])?[`: =]", document.read_text()):
            if name not in FIELDS and not any(
                FIELDS.get(parent, {}).get("x-kubernetes-preserve-unknown-fields") for parent in parents(name)
            ):
                unknown.append(f"{document.name}: {name}")
    assert unknown == []


def parents(name):
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


OTHER_COMMANDS = ("curl", "kubectl", "kind", "docker", "export", "git", "jq", "kill", "openssl", "pip", "model_signing")


@pytest.mark.parametrize("text", blocks_of("sh"))
def test_commands_exist(text, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in shell_commands(text):
        if words[0] == "quire" and "-" not in words[-1:]:
            main._build_parser().parse_args([word for word in words[1:] if word not in ("|", "&")])
        elif words[0] == "helm":
            check_helm_command(words)
        elif words[:2] == ["docker", "build"]:
            file = ROOT / words[words.index("-f") + 1]
            stage = words[words.index("--target") + 1] if "--target" in words else "operator"
            assert f" AS {stage}\n" in file.read_text()
            for word in words:
                assert not word.startswith("PIP_") or f"ARG {word}" in file.read_text()
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        else:
            assert words[0] in OTHER_COMMANDS, words
        for word in words:
            if word.startswith(("examples/", "charts/", "crds/")):
                assert (ROOT / word).exists(), word


def check_helm_command(words):
    assert words[1] in ("install", "upgrade", "uninstall", "rollback", "template")
    assignments = [argument for option, argument in pairwise(words) if option in ("--set", "--set-json")]
    for assignment in assignments:
        value = CHART_VALUES
        for part in assignment.partition("=")[0].split("."):
            assert isinstance(value, dict) and (part in value or value == {}), f"no chart value {assignment}"
            value = value.get(part, {})


# docs/llmservice-reference.md. test_no_dead_fields.py checks its column about restarts.


def test_reference_is_current():
    assert [path for path, text in generated.texts().items() if path.read_text() != text] == [], "run `make generated`"


def test_reference_contains_every_field_and_rule():
    rows = set(re.findall(r"^\| `([^`]+)` \|", REFERENCE, re.MULTILINE))
    names = {row.split(".")[-1] for row in rows} | set(re.findall(r"## spec\.(\w+)", REFERENCE))
    for path, node in walk(OPENAPI["properties"]["spec"]):
        if path and path[-1] not in ("[]", "*"):
            assert path[-1] in names, path
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"] in REFERENCE, path
    assert set(OPENAPI["properties"]["status"]["properties"]) <= rows


# docs/operator-guarantees.md, docs/metrics.md.


def test_guarantees_name_existing_tests():
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", GUARANTEES, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 29))
    for number, tests in rows:
        assert re.fullmatch(r"`tests/\S+`(, `tests/\S+`)*|\*open\*", tests), number
    for file, name in re.findall(r"`(tests/\S+\.py)::(\w+)`", GUARANTEES):
        source = (ROOT / file).read_text()
        assert re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE), f"{file}::{name}"


def test_operator_metrics_are_documented():
    expected = set()
    for collector in ControllerMetrics().registry._collector_to_names:
        name = collector._name + ("_total" if collector._type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        expected.add(f"| `{name}` | {collector._type} | {labels} | {collector._documentation} |")
    rows = re.findall(r"^\| `quire_operator_.*$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert set(rows) == expected


# docs/troubleshooting.md.


def test_every_reason_is_explained_exactly_once():
    assert [name for name in REASON_SECTIONS if name in set(ConditionType)] == [str(name) for name in ConditionType]
    explained = [row[0] for kind in (*ConditionType, "Events") for row in REASON_ROW.findall(REASON_SECTIONS[kind])]
    assert sorted(explained) == sorted(REASONS)
    assert {str(result) for result in DownloadReason} <= {str(reason) for reason in Reason}


def test_every_reason_has_a_meaning_a_fix_and_a_command():
    for kind in ConditionType:
        for name, rest in REASON_ROW.findall(REASON_SECTIONS[kind]):
            meaning, fix, command = re.split(r" \| | \|$", rest + " |")[:3]
            assert meaning.endswith("."), name
            assert fix.strip(), name
            assert fix == "Nothing." or command.strip(), name


# docs/gpu-cluster.md and docs/migrate-from-vllm-backend.md.


def test_download_job_fills_the_claim_that_the_services_read():
    bodies = [body for text in code_blocks(GPU_CLUSTER, "yaml") for body in yaml.safe_load_all(text)]
    (job,) = [body["spec"]["template"]["spec"] for body in bodies if body.get("kind") == "Job"]
    (container,) = job["containers"]
    assert container["command"][1:] == ["-m", "quire_server.download"]
    args = model_download._parser().parse_args(container["args"])
    [source], [folder] = args.source, args.into
    ref = model_download._parse_source(source).huggingFace.tokenSecretRef
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in job["volumes"] if "secret" not in v}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert f"{args.secrets_dir}/{ref.name}" in mounts
    sources = [body["spec"]["model"]["source"].get("pvc") for body in bodies if body.get("kind") == "LLMService"]
    assert sources.count({"claimName": claims[mounts[str(folder.parent)]], "path": folder.name}) == 2


def test_migrated_repository_has_the_same_engine_config():
    model, loras = (yaml.safe_load(text) for text in code_blocks(MIGRATION, "json"))
    (text,) = code_blocks(MIGRATION, "yaml")
    service = LLMService.from_body(crd.validate(yaml.safe_load(text)).body)
    vllm_config = EngineConfig.from_json({"device": "cuda", **vllm_arguments.from_vllm_arguments(model)})
    plan = make_plan(PlannerInputs.from_service(service, MODELS["8b"], resolve_gpu(service.spec.gpu)))
    arguments = engine_arguments(service, ModelLocation("/weights/backbone/llama-3.1-8b"), plan)
    migrated_config = EngineConfig.from_json(arguments)
    names = set(vllm_arguments.from_vllm_arguments(model))
    assert len(names) >= 10
    for name in names:
        assert getattr(migrated_config, name) == getattr(vllm_config, name), name
    assert service.served_name == "vllm_model"
    assert {a.name: a.source.pvc.path for a in service.spec.adapters} == {
        name: path.removeprefix("/weights/") for name, path in loras.items()
    }


def test_migration_guide_contains_every_vllm_argument():
    text = MIGRATION.read_text()
    known = {field.name for field in fields(EngineConfig)}
    for name in (*known, *vllm_arguments._IGNORED_ARGUMENTS, *vllm_arguments._SUPPORTED_VALUES):
        assert f"`{name}`" in text, name
    table = re.findall(r"^\| (`.*?) \| .*?`(spec\.[\w.]+)`", text, re.MULTILINE)
    assert len(table) >= 18
    assert all(path in FIELDS for _, path in table)
