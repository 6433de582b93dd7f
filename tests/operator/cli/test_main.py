# SPDX-License-Identifier: Apache-2.0
"""The `quire` command as a process: its output on both streams and its exit status."""

import json
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "examples/llmservice.yaml"

INVALID = """\
apiVersion: quire.dev/v1alpha1
kind: LLMService
metadata: {name: tales}
spec:
  devise: CPU
  model:
    source: {path: m}
  lora:
    maxRank: 12
"""
VALID = INVALID.replace("devise", "device").replace("12", "8")
SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n"


def quire(*arguments, stdin=""):
    return subprocess.run(
        [Path(sys.executable).with_name("quire"), *arguments],
        input=stdin, capture_output=True, text=True, timeout=170, cwd=ROOT,
    )  # fmt: skip


def test_validate_prints_one_line_for_a_valid_file(tmp_path):
    (tmp_path / "two.yaml").write_text(f"{VALID}---\n{SECRET}---\n{VALID.replace('tales', 'other')}")
    done = quire("validate", "-f", EXAMPLE, tmp_path / "two.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{EXAMPLE}: ok (LLMService tales)",
        f"{tmp_path}/two.yaml: ok (LLMService tales, other; 1 of other kinds not checked)",
    ]


def test_validate_prints_one_line_for_each_problem_and_checks_all_files(tmp_path):
    (tmp_path / "wrong.yaml").write_text(f"{SECRET}---\n{INVALID}")
    done = quire("validate", "-f", tmp_path / "wrong.yaml", "-f", tmp_path / "none.yaml", EXAMPLE)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"{tmp_path}/wrong.yaml:9: spec.devise: unknown field; did you mean device? Known fields: "
        "adapterSources, adapterSums, adapters, "
        "annotations, autoscaling, cache, device, disaggregation, disruption, engine, gpu, jobs, labels, lora, model, "
        "networking, observability, openai, paused, podTemplate, replicas, rollout, runtime, security, trust",
        f"{tmp_path}/wrong.yaml:13: spec.lora.maxRank: 12: must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512; "
        "use one of these",
        f"{tmp_path}/none.yaml: No such file or directory; give the path of a YAML file, or - for standard input",
        f"{EXAMPLE}: ok (LLMService tales)",
    ]


def test_validate_reads_standard_input_and_prints_json():
    done = quire("validate", "-o", "json", "-f", "-", stdin=f"{VALID}---\n{INVALID}")
    assert done.returncode == 1
    (report,) = json.loads(done.stdout)
    assert {key: report[key] for key in ("file", "ok", "services", "skipped")} == {
        "file": "-", "ok": False, "services": ["tales", "tales"], "skipped": 0
    }  # fmt: skip
    assert [(p["line"], p["path"], p.get("value")) for p in report["problems"]] == [
        (15, "spec.devise", None),
        (19, "spec.lora.maxRank", 12),
    ]
    assert report["problems"][1]["rule"] == "must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512"
    assert report["problems"][1]["fix"] == "use one of these"


def test_yaml_errors_have_line_and_column():
    done = quire("validate", "-o", "json", "-f", "-", stdin="a: [1,\n  }")
    (report,) = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    fix = "close or quote each [ and {; render Helm templates first"
    assert report["error"] == f"-:2:3: not YAML: did not find expected node content; {fix}"


@pytest.mark.parametrize(
    ("text", "rest"),
    [("", ""), (SECRET, ", only documents of other kinds"), ("- 1\n", ", only documents of other kinds")],
)
def test_validate_rejects_a_file_without_an_llmservice(text, rest):
    done = quire("validate", "-f", "-", stdin=text)
    assert done.returncode == 1
    assert done.stdout == (
        f"-:1: document: the file has no LLMService{rest}; "
        "add a document with apiVersion: quire.dev/v1alpha1 and kind: LLMService\n"
    )


def test_version_and_help():
    assert quire("--version").stdout == f"quire {version('quire-llm')}\n"
    helps = {words: quire(*words, "--help") for words in ((), ("validate",), ("serve",))}
    for words, done in helps.items():
        assert (done.returncode, done.stderr) == (0, "")
        assert "examples:" in done.stdout, words
    for flag in ("--host", "--http-port", "--volume", "--run-dir", "--secrets-dir"):
        assert flag in helps[("serve",)].stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("validate",), "the following arguments are required: -f/--file"),
        (("serve", "-f", EXAMPLE, "--volume", "a=/none"), "'/none' is not a folder; create it, or correct the path"),
        (("serve", "-f", EXAMPLE, "--openai-api-keys-dir", "/none"), "'/none' is not a folder; create it"),
        (("serve", "-f", EXAMPLE, "--openai-ssl-certfile", "/none"), "'/none' is not a file; create it"),
        (("serve", "-f", EXAMPLE, "--chat-template", "/none"), "'/none' is not a file; create it"),
        (("serve", "-f", EXAMPLE, "--expose", "https"), "'https' names no protocols; give http, grpc, http,grpc or"),
        (("serve", "-f", EXAMPLE, "--device", "cpu"), "--device requires MODEL or --vllm-repository; for an"),
        (("serve", "--vllm-repository", "m", "--volume", "a=/"), "--volume cannot be used with --vllm-repository"),
        (
            ("serve", "--vllm-repository", "m", "--tool-call-parser", "none"),
            "--tool-call-parser cannot be used with --vllm-repository; set tool_call_parser in model.json",
        ),
        (("operate", "--workers", "0"), "'0' is not an integer of at least 1"),
        (("operate", "--resync", "0"), "'0' is not a number of seconds greater than 0"),
    ],
)
def test_wrong_usage_has_exit_status_2(arguments, message):
    done = quire(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_operate_reports_a_port_in_use(tmp_path):
    config = {"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]}
    config |= {"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}]}
    (tmp_path / "config").write_text(json.dumps({**config, "users": [{"name": "u", "user": {}}]}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = quire("operate", "--kubeconfig", tmp_path / "config", "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 1
    assert f"--port {port}: cannot listen on 127.0.0.1" in done.stderr and "give another port" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_prints_problems_and_does_not_start(tmp_path):
    done = quire("serve", "-f", "-", "--run-dir", tmp_path / "run", stdin=INVALID)
    assert done.returncode == 1
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["spec.devise", "spec.lora.maxRank"]
    done = quire("serve", "-f", "-", "--run-dir", tmp_path / "run", stdin=VALID)
    assert done.returncode == 1
    fix = f"correct the path; relative paths start at {ROOT}"
    assert done.stderr == f'-:7: spec.model.source.path: "m": {ROOT}/m is not a folder; {fix}\n'
    assert not (tmp_path / "run").exists()


_FORM = "`apiVersion: quire.dev/v1alpha1` and `kind: LLMService`"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SECRET, f"contains no LLMService; write a document with {_FORM}, or use `quire serve MODEL`"),
        ("metadata: {name: a}\nspec: {device: CPU}\n", f"contains no LLMService; add {_FORM}"),
        (f"{VALID}---\n{VALID}", "must contain exactly one LLMService, got 2; split the file"),
    ],
)
def test_serve_and_plan_require_exactly_one_service(text, problem):
    for command in ("serve", "plan"):
        done = quire(command, "-f", "-", stdin=text)
        assert (done.returncode, done.stderr) == (1, f"-: {problem}\n")


def test_a_closed_pipe_prints_no_traceback():
    script = f"{Path(sys.executable).with_name('quire')} validate -f {EXAMPLE} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "")


def test_validate_refuses_a_model_in_a_local_folder_that_cannot_be_served(tmp_path):
    config = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "service.yaml"
    head = "apiVersion: quire.dev/v1alpha1\nkind: LLMService\nmetadata: {name: tales}\n"
    file.write_text(f"{head}spec:\n  device: CPU\n  model:\n    source: {{path: .}}\n")
    done = quire("validate", "-f", file)
    assert done.returncode == 1
    assert (
        f"{file}:7: spec.model.source.path: \".\": config.json: architecture 'BloomForCausalLM' is not" in done.stdout
    )
    assert "no class of transformers can serve it: its attention does not call the attention" in done.stdout
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 320})
    )
    assert "config.json: n_embd is missing" in quire("validate", "-f", file).stdout


def test_validate_imports_few_modules():
    """It takes 0.25 s of CPU time, and torch alone would take 1.5 s. The CEL package would import its own command line
    (typer, rich)."""
    script = "import sys; from quire_operator.cli.main import main; main(sys.argv[1:]); print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script, "validate", "-f", EXAMPLE], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "jsonschema" in loaded
    assert not {"typer", "rich", "torch", "numpy", "aiohttp", "quire_server", "quire_engine"} & loaded
    assert len(loaded) < 450, "it imports 336 modules with Python 3.11"


NULLS = """\
apiVersion: quire.dev/v1alpha1
kind: LLMService
metadata: {name: tales}
spec:
  device: CPU
  model: {source: {huggingFace: {repo: org/model}}}
  gpu: null
  podTemplate:
    spec:
      securityContext: {runAsUser: null}
      containers:
      - name: server
        livenessProbe: null
"""


@pytest.mark.parametrize("command", ["validate", "render", "plan"])
def test_null_in_the_pod_template_of_a_file_is_refused(tmp_path, command):
    """kubectl drops it, so that the command would show other pods than the cluster gets."""
    file = tmp_path / "nulls.yaml"
    file.write_text(NULLS)
    done = quire(command, "-f", file)
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 1 and len(lines) == 2
    for line, (number, field) in zip(
        sorted(lines),
        [(10, "securityContext.runAsUser"), (13, "containers[0].livenessProbe")],
        strict=True,
    ):
        assert line.startswith(f"{file}:{number}: spec.podTemplate.spec.{field}: must not be null, because kubectl")
        assert "write $patch: delete in it" in line
