# SPDX-License-Identifier: Apache-2.0
"""`quire serve MODEL`: the LLMService that the options mean, its file, and errors that name options."""

import contextlib
import http.server
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.quire_serve import EXAMPLES

from quire_operator.api import crd
from quire_operator.cli import main, serve, service_file
from quire_operator.cli.model import form as model_form
from quire_operator.cli.model import gguf_file
from quire_operator.cli.model.options import SPEC_OPTIONS
from quire_operator.cli.model.other_vllm_options import OTHER_VLLM_OPTIONS
from quire_operator.cli.pod_options import pod_fields
from quire_spec.errors import ConfigError

TINY = str(EXAMPLES / "models/tiny")


def parse(*argv):
    return main._build_parser().parse_args(["serve", *argv])


def document(*argv, has_gpu=False):
    args = parse(*argv)
    return model_form.build(args, pod_fields(args), has_gpu)


def plan(*argv, environment=None, has_gpu=False):
    args = parse(*argv)
    fields = pod_fields(args)
    options = serve.ServeOptions(fields, run_dir=args.run_dir)
    return model_form.prepare(model_form.build(args, fields, has_gpu), args, options, environment or {})


@pytest.mark.parametrize(
    ("model", "source"),
    [
        (TINY, {"path": TINY}),
        ("gpt2", {"huggingFace": {"repo": "gpt2"}}),
        ("org/Model.1-B", {"huggingFace": {"repo": "org/Model.1-B"}}),
        ("s3://bucket/models/a", {"s3": {"uri": "s3://bucket/models/a"}}),
        ("https://files.example/a", {"http": {"url": "https://files.example/a"}}),
    ],
)
def test_source_of_a_model(model, source):
    assert document(model)["spec"]["model"]["source"] == source


def test_gguf_file_is_converted_once(tmp_path, monkeypatch):
    file, commands = tmp_path / "my-model.gguf", []

    def run(command):
        commands.append(command)
        Path(command[-1]).mkdir(parents=True)
        return SimpleNamespace(returncode=0)

    file.write_bytes(b"GGUF")
    monkeypatch.setattr(subprocess, "run", run)
    folders = {gguf_file.served_folder(str(file), tmp_path / "cache") for _ in range(2)}
    (folder,) = folders
    assert commands == [[sys.executable, "-m", "quire_engine", "convert", str(file), "--into", folder]]
    assert document(folder)["spec"]["model"]["servedName"] == "my-model"
    file.write_bytes(b"GGUF2")
    monkeypatch.setattr(subprocess, "run", lambda _: SimpleNamespace(returncode=1))
    with pytest.raises(ConfigError, match=r"my-model.gguf: the GGUF file was not converted"):
        gguf_file.served_folder(str(file), tmp_path / "cache")
    assert gguf_file.served_folder("org/model", tmp_path) == "org/model"


def test_existing_folder_wins_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert document("org/model")["spec"]["model"]["source"] == {"path": str(tmp_path / "org/model")}


def test_device_is_that_of_the_machine_unless_given():
    assert document(TINY)["spec"]["device"] == document(TINY, "--device=cpu", has_gpu=True)["spec"]["device"] == "CPU"
    assert "device" not in document(TINY, has_gpu=True)["spec"]
    assert "device" not in document(TINY, "--device=cuda")["spec"]


@pytest.mark.parametrize("model", [".", "./", "../My Model", "{}", "{}/"])
def test_folder_is_served_under_its_name(tmp_path, monkeypatch, model):
    folder = tmp_path / "My Model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    spec = document(model.format(folder))["spec"]
    assert spec["model"] == {"source": {"path": str(folder)}, "servedName": "My-Model"} and "openai" not in spec


def test_names_ranks_and_ports():
    found = document(
        "org/Model-7B", "--revision=v1", "--port=8000", "--lora-modules", f"sql={EXAMPLES}/adapters/sql",
        '{"name": "b", "path": "org/b"}',
    )  # fmt: skip
    spec = found["spec"]
    assert found["metadata"]["name"] == "model-7b"
    assert spec["model"]["servedName"] == "Model-7B" and spec["openai"]["servedModelNames"] == ["org/Model-7B"]
    assert spec["model"]["source"]["huggingFace"]["revision"] == "v1"
    assert spec["openai"]["port"] == 8000 and spec["runtime"]["ports"] == {"http": 8004}
    assert [adapter["name"] for adapter in spec["adapters"]] == ["sql", "b"]
    assert "lora" not in spec  # rank 16 is the default
    assert document(TINY, "--enable-lora")["spec"]["lora"] == {}


@given(name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=80))
@example(name="7b")
@example(name="ü")
def test_every_folder_has_a_valid_service(name, tmp_path_factory):
    assume(name not in (".", "..") and len(name.encode()) < 200)
    parent = tmp_path_factory.getbasetemp() / "folders"
    (parent / name).mkdir(parents=True, exist_ok=True)
    assert crd.validate(document(f"{parent}/{name}")).problems == ()


def test_rank_follows_local_adapters(tmp_path):
    config = {"r": 8, "rank_pattern": {"q_proj": 40}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = document(TINY, f"--lora=a={tmp_path}")
    assert found["spec"]["lora"] == {"maxRank": 64}  # the next one that the field allows
    assert crd.validate(found).problems == ()
    assert document(TINY, f"--lora=a={tmp_path}", "--max-lora-rank=64")["spec"]["lora"] == {"maxRank": 64}


VALUES = {
    "--mamba-ssm-cache-dtype": "bfloat16",
    "--dtype": "float32",
    "--quantization": "int8",
    "--kv-cache-dtype": "fp8",
}


def test_short_names_of_vllm(tmp_path, capsys):
    files = tmp_path / "long.yaml", tmp_path / "short.yaml"
    for file, (quantization, cores) in zip(
        files, (("--quantization", "--data-parallel-size"), ("-q", "-dp")), strict=True
    ):
        assert main.main(["serve", TINY, quantization, "int8", cores, "2", f"--save={file}"]) == 0
    assert files[0].read_text() == files[1].read_text() and "quantization: int8" in files[0].read_text()
    assert "vLLM has" not in capsys.readouterr().err


def test_saved_file_serves_the_same(tmp_path, capsys):
    """With every option of the table that a CPU has, and others that are fields of the spec."""
    of_gpus = ("--gpu-memory-utilization", "--tensor-parallel-size")
    argv = [f"{option}={VALUES.get(option, '32')}" for option, _, _, _ in SPEC_OPTIONS if option not in of_gpus]
    argv += ["--lora", f"sql={EXAMPLES}/adapters/sql", "--served-model-name", "tiny", "--tool-call-parser=hermes"]
    argv += ['--speculative-config={"method": "ngram", "num_speculative_tokens": 3}', f"--run-dir={tmp_path / 'run'}"]
    file = tmp_path / "saved.yaml"
    assert main.main(["serve", TINY, *argv, f"--save={file}"]) == 0
    saved = service_file.read(str(file), serve.ServeOptions(run_dir=tmp_path / "run"), {}).launch_plan
    direct = plan(TINY, *argv)
    assert (direct.config, direct.catalog) == (saved.config, saved.catalog)
    assert direct.config.engine.speculative_config.num_speculative_tokens == 3
    assert str(file) in capsys.readouterr().err
    assert main.main(["serve", TINY, "--save=-"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == document(TINY)
    assert main.main(["serve", TINY, "--port=0", "--host=0.0.0.0", "--save=-"]) == 0
    captured = capsys.readouterr()
    assert yaml.safe_load(captured.out)["spec"]["openai"] == {"enabled": False}
    assert captured.err == "quire: not in the file, so give it again with -f: --host\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["./missing"], "MODEL: './missing' is neither a folder nor"),
        (["a/b/c"], "MODEL: 'a/b/c' is neither a folder nor"),
        ([TINY, "--gpu-memory-utilization=3"], '--gpu-memory-utilization: "3": must be a decimal'),
        ([TINY, "--dtype=float8"], '--dtype: "float8": must be one of'),
        ([TINY, "--lora=x"], "--lora: 'x' is not NAME=SOURCE"),
        ([TINY, "--lora=tiny=org/a"], "--lora: adapters must not contain a name that equals"),
        ([TINY, "--lora=a=/missing"], "--lora a: '/missing' is neither a folder nor"),
        ([TINY, "--speculative-config={"], "--speculative-config: '{' is not JSON"),
        ([TINY, '--speculative-config={"method": "guess"}'], '--speculative-config method: "guess": must be one of'),
        ([TINY, '--speculative-config={"method": "mtp"}'], "--speculative-config num_speculative_tokens: missing; add"),
        ([TINY, "--kv-transfer-port=8005"], "--kv-transfer-key-file: missing, but --kv-transfer-port requires it"),
        ([TINY, "--revision=a"], "--revision: "),
        ([TINY, "--otlp-traces-endpoint=collector:4317"], '--otlp-traces-endpoint: "collector:4317": must be a URL'),
        ([TINY, "--grpc-port=8000"], "--http-port, --grpc-port, --metrics-port, --health-port, --port: ports must be"),
        ([TINY, "--device=cuda"], '--device: "GPU": this machine has no NVIDIA GPU'),
    ],
)
def test_errors_name_the_option(argv, message):
    with pytest.raises(ConfigError) as error:
        plan(*argv)
    assert str(error.value).startswith(message) and "spec.model" not in str(error.value)


def test_a_file_that_cannot_be_served_is_not_saved(tmp_path, capsys):
    file = tmp_path / "saved.yaml"
    for option, message in (("--dtype=float8", '"float8": must be one of'), ("--seed=-1", "-1: must be at least 0")):
        assert main.main(["serve", TINY, option, f"--save={file}"]) == 1
        assert capsys.readouterr().err.startswith(f"{option.partition('=')[0]}: {message}") and not file.exists()


def test_dtypes_of_vllm():
    given = [document(TINY, f"--dtype={name}")["spec"].get("engine", {}) for name in ("auto", "half", "float")]
    assert given == [{}, {"dtype": "float16"}, {"dtype": "float32"}]


@pytest.mark.parametrize("option", sorted(OTHER_VLLM_OPTIONS))
def test_options_that_only_vllm_has(option, capsys):
    with pytest.raises(SystemExit):
        parse(TINY, option, "1")
    assert f"{option}: vLLM has this option, but Quire has not; {OTHER_VLLM_OPTIONS[option]}" in capsys.readouterr().err


def test_fields_that_the_fixes_of_options_name_exist():
    paths = {path for fix in OTHER_VLLM_OPTIONS.values() for path in re.findall(r"spec((?:\.\w+)+)", fix)}
    assert len(paths) > 5
    for path in paths:
        schema = crd.load_schema()["properties"]["spec"]
        for name in path.split(".")[1:]:
            schema = schema["properties"][name]


def test_options_of_the_model_form_need_a_model(capsys):
    with pytest.raises(SystemExit):
        main.main(["serve", "-f", str(EXAMPLES / "llmservice.yaml"), "--max-num-seqs=3"])
    assert "--max-num-seqs requires MODEL" in capsys.readouterr().err


def test_key_is_only_in_a_file_of_the_user(tmp_path):
    argv = [TINY, f"--run-dir={tmp_path / 'run'}"]
    for found in (plan(*argv, "--api-key=s3cret"), plan(*argv, environment={"QUIRE_API_KEY": "s3cret"})):
        serve.write_run_dir(found)
        file = tmp_path / "run/api-keys/api-key"
        assert file.read_text() == "s3cret" and file.stat().st_mode & 0o777 == 0o600
        assert found.config.openai.apiKeysDir == file.parent
        assert not any("s3cret" in text for text in (*found.argv, *found.environment.values(), repr(found)))
    serve.write_run_dir(plan(*argv))
    assert not file.exists()


def announced(*argv, has_gpu=False):
    args = parse(*argv)
    fields = pod_fields(args)
    built = model_form.build(args, fields, has_gpu)
    launch_plan = model_form.prepare(built, args, serve.ServeOptions(fields, cache_dir=args.cache_dir), {})
    with contextlib.redirect_stderr(io.StringIO()) as text:
        model_form.announce(built, args, launch_plan, has_gpu)
    return text.getvalue()


def config_of(folder, **changes):
    """Write the config.json of a model with 7 billion parameters, from which the size is estimated."""
    config = json.loads((EXAMPLES / "models/tiny/config.json").read_text())
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    (folder / "config.json").write_text(json.dumps(config | sizes | {"num_key_value_heads": 32} | changes))
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@pytest.fixture
def web():
    """URL of a web server with the example models."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=EXAMPLES / "models")
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_model_of_a_web_server_is_downloaded_once(web, tmp_path):
    argv = (f"{web}/tiny", f"--cache-dir={tmp_path}")
    assert "5.3 MiB of weights in bfloat16; they are downloaded to " in announced(*argv)
    args = parse(*argv)
    options = serve.ServeOptions(cache_dir=args.cache_dir)
    for num_downloads in (1, 0):
        launch_plan = model_form.prepare(model_form.build(args, {}, False), args, options, {})
        assert len(launch_plan.downloads) == num_downloads
        serve.download_models(launch_plan, None)
    folder = Path(launch_plan.config.engine.model)
    assert (folder / "model.safetensors").read_bytes() == Path(TINY, "model.safetensors").read_bytes()
    assert "downloaded to" not in announced(*argv)
    with pytest.raises(ConfigError, match="run the command again to resume"):
        serve.download_models(model_form.prepare(document(f"{web}/none"), args, options, {}), None)


def test_size_is_announced_and_a_model_that_does_not_fit_is_an_error(tmp_path, web, monkeypatch):
    summary = "quire_operator.cli.model.summary"
    assert "5.3 MiB of weights in bfloat16\nquire: the weights fit into" in announced(TINY)
    monkeypatch.setattr(f"{summary}.available_memory_bytes", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"MODEL: its weights need 9.1 GiB, but 1.0 GiB of memory are free"):
        announced(config_of(tmp_path))
    assert "quantization int8 needs less" in announced(str(tmp_path), "--quantization=int8")
    with pytest.raises(ConfigError, match="OddForCausalLM"):
        announced(config_of(tmp_path, architectures=["OddForCausalLM"]))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    with pytest.raises(ConfigError, match=r"--cache-dir: .* has 1.0 KiB of free space, but the model needs 5.3 MiB"):
        announced(f"{web}/tiny", f"--cache-dir={tmp_path}")
    assert "the size of the model is unknown: http://127.0.0.1:9/m" in announced("http://127.0.0.1:9/m")


def test_plan_of_the_gpus_that_the_driver_shows(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"  # a double: this machine has no NVIDIA GPU
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(serve, "has_gpu", lambda *_: True)
    assert "unknown, because nvidia-smi does not show" in announced(config_of(tmp_path), has_gpu=True)
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, 9.0'\n")
    program.chmod(0o755)
    assert "fits on 1 x NVIDIA-H100-80GB-HBM3 with " in announced(str(tmp_path), has_gpu=True)
    program.write_text("#!/bin/sh\necho 'Tesla T4, 15360, 7.5'\n")
    with pytest.raises(ConfigError, match="Tesla-T4"):
        announced(config_of(tmp_path, num_hidden_layers=64), "--dtype=float16", has_gpu=True)


def test_complete_models_in_the_cache_of_the_hub_are_not_downloaded(tmp_path):
    def downloads(*argv):
        return plan("org/m", f"--download-dir={tmp_path}", *argv).downloads

    repository = tmp_path / "models--org--m"
    snapshot = repository / "snapshots/abc"
    snapshot.mkdir(parents=True)
    config_of(snapshot)
    assert downloads() and not downloads("--revision=abc")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    assert not downloads()
    (repository / "blobs").mkdir()
    (repository / "blobs/1.incomplete").touch()
    assert downloads()
