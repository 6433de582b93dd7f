# SPDX-License-Identifier: Apache-2.0
"""`quire serve`: pod.json, catalog and command line made from a file, and rejected files."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import quire_server.__main__
from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.api.validation_errors import InvalidService
from quire_operator.api.yaml_manifest import read_manifests
from quire_operator.cli import main, serve, serve_vllm
from quire_operator.cli.pod_options import pod_fields
from quire_operator.cli.serve import ServeOptions, prepare, write_run_dir
from quire_operator.plan import candidates
from quire_spec import constants
from quire_spec.dataclass_json import non_default_json
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_config import OpenAIConfig, PodConfig
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities

HEAD = "apiVersion: quire.dev/v1alpha1\nkind: LLMService\nmetadata: {name: tales}\n"

TALES = """
  device: CPU
  model: {source: {path: models/tiny}, servedName: once-upon}
  adapters:
  - {name: pirate, source: {path: adapters/pirate}, pinned: true}
  lora: {maxLoaded: 4, maxRank: 32}
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a model and an adapter. Only the existence of their files is checked."""
    for name in ("models/tiny/config.json", "adapters/pirate/adapter_config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "adapters/pirate/adapter_model.safetensors").write_bytes(b"")
    return tmp_path


def engine_of(run_dir):
    return PodConfig.load(run_dir / "pod.json").engine


def options_of(*argv):
    """Parse options as `quire serve` does."""
    args = main._build_parser().parse_args(["serve", "--file=f.yaml", *map(str, argv)])
    return ServeOptions(pod_fields(args), args.volumes, args.run_dir, args.cache_dir, args.secrets_dir)


def launch(folder, spec, *argv, environment=None, dev=Path("/nowhere")):
    (folder / "f.yaml").write_text(f"{HEAD}spec: {spec}\n")
    (document,) = read_manifests(str(folder / "f.yaml"))
    service = LLMService.from_body(crd.require_valid(document))
    return prepare(document, service, options_of(*argv), environment or {}, dev)


def problems(folder, spec, *argv, dev=Path("/nowhere")):
    with pytest.raises(InvalidService) as error:
        launch(folder, spec, *argv, dev=dev)
    return str(error.value).replace(str(folder), "HERE").splitlines()


def test_run_folder_has_engine_config_and_catalog(folder):
    launched = launch(folder, TALES, f"--run-dir={folder / 'run'}")
    write_run_dir(launched)
    engine = engine_of(folder / "run")
    assert engine == launched.config.engine
    assert (folder / "run").stat().st_mode & 0o777 == 0o700
    assert (engine.model, engine.device, engine.dtype) == (str(folder / "models/tiny"), "cpu", "auto")
    assert (engine.enable_lora, engine.max_loras, engine.max_lora_rank, engine.max_cpu_loras) == (True, 4, 32, None)
    assert engine.max_num_batched_tokens == candidates.CPU_TOKEN_BUDGET
    (pirate,) = AdapterCatalog.load(folder / "run/adapters.json").adapters
    assert (pirate.name, pirate.source.path, pirate.pinned) == ("pirate", str(folder / "adapters/pirate"), True)


def test_supervisor_reads_the_run_folder(folder):
    secrets = folder / "secrets"
    secrets.mkdir()
    folders = [f"--run-dir={folder / 'run'}", f"--cache-dir={folder / 'cache'}", f"--secrets-dir={secrets}"]
    launched = launch(folder, TALES, *folders, f"--volume=loras={folder / 'adapters'}", "--verbose")
    write_run_dir(launched)
    assert launched.argv[:3] == (sys.executable, "-m", "quire_server")
    args = quire_server.__main__._build_parser().parse_args(launched.argv[3:])
    assert (args.run_dir, args.cache_dir) == (folder / "run", folder / "cache")
    config = PodConfig.load(args.config)
    assert config == launched.config
    assert (config.servedName, config.limits.drainSeconds) == ("once-upon", 60)
    assert (config.sources.claims, config.sources.secretsDir) == ({"loras": folder / "adapters"}, secrets)
    assert config.sources.allowPaths and config.server.verbose


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        ("", (), ("http", "grpc")),
        ("", ("--expose=none",), ()),
        ("  runtime: {expose: [grpc]}", (), ("grpc",)),
        ("  runtime: {expose: [grpc]}", ("--expose=http,grpc",), ("http", "grpc")),
        ("  runtime: {expose: []}", (), ()),
    ],
)
def test_the_option_overrides_the_protocols_of_the_spec(folder, spec, options, expected):
    assert launch(folder, f"{TALES}{spec}", *options).config.server.expose == expected


@pytest.mark.parametrize(
    ("spec", "options", "repository", "arguments"),
    [
        ("", (), None, ()),
        ("{models: {path: ROOT/models}, serverArgs: [log-info=true]}", (), "models", ("log-info=true",)),
        ("{models: {pvc: {claimName: c, path: tiny}}}", ("--volume=c=ROOT/models",), "models/tiny", ()),
        (
            "{models: {path: ROOT/models}, serverArgs: [log-info=true]}",
            ("--model-repository=ROOT/adapters", "--server-arg=rate-limit=off"),
            "adapters",
            ("rate-limit=off",),
        ),
    ],
)
def test_other_models_of_the_spec_and_the_options(folder, spec, options, repository, arguments):
    text = f"{TALES}  runtime: {spec}".replace("ROOT", str(folder)) if spec else TALES
    server = launch(folder, text, *(option.replace("ROOT", str(folder)) for option in options)).config.server
    assert server.modelRepository == (None if repository is None else folder / repository)
    assert server.serverArgs == arguments


def test_other_models_that_this_machine_lacks_are_problems(folder):
    for models, problem in (
        ("{pvc: {claimName: c}}", "claims are not available on this machine"),
        ("{path: /no/such}", "/no/such is not a folder"),
    ):
        with pytest.raises(InvalidService, match=problem):
            launch(folder, f"{TALES}  runtime: {{models: {models}}}")
    with pytest.raises(ConfigError, match="--server-arg: 'http-port=1': not allowed: it names a port"):
        launch(folder, TALES, "--server-arg=http-port=1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--http-port=9000", "--grpc-port=9000"], "--grpc-port: 9000 is also the value of --http-port; ports must"),
        (["--openai-ssl-keyfile=FILE"], "--openai-ssl-keyfile: requires --openai-ssl-certfile; add it"),
        (["--allow-runtime-lora-updating"], "--allow-runtime-lora-updating: requires --admin-key-file; add it"),
        (
            ["--allowed-local-lora-path=/tmp"],
            "--allowed-local-lora-path: requires --allow-runtime-lora-updating; add it",
        ),
        (["--openai-api-server-count=99"], "--openai-api-server-count: must be from 1 to 16, got 99"),
        (
            ["--expose=none", "--openai-port=0"],
            "--expose: empty, but openai is not set, so no client could send a request; expose",
        ),
    ],
)
def test_errors_of_the_configuration_name_the_options(folder, argv, message):
    (folder / "file").touch()
    with pytest.raises(ConfigError) as error:
        launch(folder, TALES, *(option.replace("FILE", f"{folder}/file") for option in argv))
    assert str(error.value).startswith(message)


def test_chat_options_reach_the_engine_config(folder):
    (folder / "chat.jinja").write_text("{{ messages }}")
    chat = {"chat_template": folder / "chat.jinja", "tool_call_parser": "mistral", "reasoning_parser": "none"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chat.items()]
    launched = launch(folder, TALES, f"--run-dir={folder / 'run'}", *options)
    write_run_dir(launched)
    engine = engine_of(folder / "run")
    assert {name: getattr(engine, name) for name in chat} == chat | {"chat_template": str(folder / "chat.jinja")}


def test_openai_fields_of_the_spec_and_options_that_override_them(folder):
    def openai(spec, *argv):
        config = launch(folder, f"{TALES}  openai: {spec}\n", *argv).config.openai
        # The live page is always served on a laptop.
        return config and non_default_json(replace(config, live=not config.live))

    for name in ("secrets/keys", "own"):
        (folder / name).mkdir(parents=True)
    for name in ("c.pem", "k.pem"):
        (folder / name).touch()
    secrets = f"--secrets-dir={folder}/secrets"
    spec = "{port: 9000, apiKeysSecretRef: {name: keys}, corsAllowedOrigins: [https://a], limits: {maxBodySize: 1Mi}}"
    common = {"maxBodyBytes": 2**20, "corsAllowedOrigins": ["https://a"]}
    assert openai(spec, secrets) == {"port": 9000, "apiKeysDir": f"{folder}/secrets/keys", **common}
    own = openai(spec, "--openai-port=9001", f"--openai-api-keys-dir={folder}/own")
    assert own == {"port": 9001, "apiKeysDir": f"{folder}/own", **common}
    assert openai("{}") == {}
    off = "--openai-port=0"
    assert openai("{enabled: false}") is openai("{}", off) is openai(spec, off, "--openai-api-server-count=2") is None
    assert openai("{enabled: false}", "--openai-port=9001") == {"port": 9001}
    tls = "{tlsSecretRef: {name: keys}, apiServerCount: 2}"
    certificate = {"sslCertfile": f"{folder}/secrets/keys/tls.crt", "sslKeyfile": f"{folder}/secrets/keys/tls.key"}
    assert openai(tls, secrets) == {**certificate, "apiServerCount": 2}
    own_certificate = f"--openai-ssl-certfile={folder}/c.pem"
    own_files = openai(tls, own_certificate, "--openai-api-server-count=3")
    assert own_files == {"sslCertfile": f"{folder}/c.pem", "apiServerCount": 3}
    expected = {"sslCertfile": f"{folder}/c.pem", "sslKeyfile": f"{folder}/k.pem", "enableLogRequests": True}
    expected["rejectUnknownFields"] = True
    key = f"--openai-ssl-keyfile={folder}/k.pem"
    assert openai("{}", own_certificate, key, "--openai-enable-log-requests", "--reject-unknown-fields") == expected
    (message,) = problems(folder, f"{TALES}  openai: {spec}\n")
    assert 'spec.openai.apiKeysSecretRef.name: "keys": Secrets are not available on this machine' in message


def test_chat_template_and_parsers_of_the_spec_reach_the_engine_config(folder):
    def chat_template(spec, *argv):
        write_run_dir(launch(folder, f"{TALES}  openai: {spec}\n", f"--run-dir={folder / 'run'}", *argv))
        engine = engine_of(folder / "run")
        text = None if engine.chat_template is None else Path(engine.chat_template).read_text()
        return text, engine.tool_call_parser, engine.reasoning_parser

    spec = "{chatTemplate: {text: 'a {{ b }}'}, toolCallParser: hermes, reasoningParser: none}"
    assert chat_template(spec) == ("a {{ b }}", "hermes", "none")
    (folder / "own.jinja").write_text("own")
    own = f"--chat-template={folder / 'own.jinja'}", "--tool-call-parser=mistral"
    assert chat_template(spec, *own) == ("own", "mistral", "none")
    assert chat_template("{}") == (None, "auto", "auto")
    reference = "{chatTemplate: {configMapKeyRef: {name: templates}}}"
    assert chat_template(reference, *own) == ("own", "mistral", "auto")
    (message,) = problems(folder, f"{TALES}  openai: {reference}\n")
    assert 'spec.openai.chatTemplate.configMapKeyRef.name: "templates": ConfigMaps are not available' in message


def test_engine_fields_of_the_spec_reach_the_engine_config(folder):
    (folder / "dev").mkdir()
    (folder / "dev/nvidiactl").touch()
    spec = """
  model: {source: {huggingFace: {repo: org/model, revision: v1}}}
  lora: {maxLoaded: 2, maxCached: 5}
  engine: {maxModelLen: 4096, gpuMemoryUtilization: "0.85", blockSize: 32, tensorParallelSize: 1, dtype: float16,
    maxNumSeqs: 12, maxNumBatchedTokens: 3000, maxNumQueuedReqs: 7, prefixCaching: false,
    schedulingPolicy: priority, swapSpace: 1536Mi, maxLogprobs: 5, skipTokenizerInit: true, seed: 7,
    modelImpl: transformers, convert: embed, poolingType: mean, mambaSsmCacheDtype: bfloat16,
    languageModelOnly: true, limitMmPerPrompt: {image: 3}, loadFormat: runai_streamer}
"""
    assert launch(folder, spec, dev=folder / "dev").config.engine == EngineConfig(
        model="org/model",
        revision="v1",
        device="cuda",
        dtype="float16",
        max_model_len=4096,
        gpu_memory_utilization=0.85,
        block_size=32,
        max_num_seqs=12,
        max_num_batched_tokens=3000,
        max_num_queued_reqs=7,
        scheduling_policy="priority",
        swap_space=1.5,
        max_logprobs=5,
        seed=7,
        model_impl="transformers",
        load_format="runai_streamer",
        convert="embed",
        pooling_type="mean",
        mamba_ssm_cache_dtype="bfloat16",
        language_model_only=True,
        limit_mm_per_prompt={"image": 3},
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=5,
    )


def test_the_source_of_a_draft_model_reaches_the_engine_config(folder):
    spec = """
  device: CPU
  model: {source: {path: models/tiny}}
  engine: {speculativeConfig: {method: draft_model, numSpeculativeTokens: 3, model: {source: SOURCE}}}
"""
    drafts = [
        launch(folder, spec.replace("SOURCE", source)).config.engine.speculative_config
        for source in ("{path: models/tiny}", "{huggingFace: {repo: o/small, revision: v2}}")
    ]
    assert [(d.model, d.revision) for d in drafts] == [(str(folder / "models/tiny"), None), ("o/small", "v2")]
    (problem,) = problems(folder, spec.replace("SOURCE", "{path: models/none}"))
    assert 'spec.engine.speculativeConfig.model.source.path: "models/none"' in problem
    launched = launch(folder, spec.replace("SOURCE", "{s3: {uri: s3://bucket/m}}"))
    (download,) = launched.downloads
    assert launched.config.engine.speculative_config.model == str(download.folder)


def test_volume_option_maps_claims_to_folders(folder):
    spec = """
  device: CPU
  model: {source: {pvc: {claimName: weights, path: tiny}}}
  adapters: [{name: pirate, source: {pvc: {claimName: loras, path: pirate}}}]
"""
    launched = launch(folder, spec, f"--volume=weights={folder}/models", f"--volume=loras={folder}/adapters")
    assert launched.config.engine.model == str(folder / "models/tiny")
    assert launched.catalog.adapters[0].source.pvc.path == "pirate"
    assert launched.config.sources.claims == {"weights": folder / "models", "loras": folder / "adapters"}


def test_kv_folder_is_in_the_cache_or_on_a_volume_or_given(folder):
    spec = """
  device: CPU
  model: {source: {path: models/tiny}}
  engine: {kvCacheOffloading: {memory: 1Gi, secondary: [{folder: {%s}, size: 40Gi}]}}
"""

    def tier(text, *args):
        engine = launch(folder, spec % text, *args).config.engine
        return engine.kv_offloading_folder, engine.kv_offloading_folder_size

    assert tier("emptyDir: {}", f"--cache-dir={folder}/c") == (f"{folder}/c/kv-blocks/tales", 40)
    claim = "pvc: {claimName: blocks, path: a/b}"
    assert tier(claim, f"--volume=blocks={folder}/models") == (f"{folder}/models/a/b", 40)
    options = ("--kv-offloading-folder=/kv", "--kv-offloading-folder-size=0.5")
    assert tier(claim, *options) == ("/kv", 0.5)
    (message,) = problems(folder, spec % claim)
    assert message.endswith(
        'spec.engine.kvCacheOffloading.secondary[0].folder.pvc.claimName: "blocks": claims are not available on this '
        "machine; give the folder of the claim: --volume blocks=FOLDER"
    )
    with pytest.raises(ConfigError, match=r"^--kv-offloading-folder-size: must be a size in GiB above 0, got 0.0"):
        tier("emptyDir: {}", "--kv-offloading-folder-size=0")


def test_kv_transfer_needs_a_key_file_on_one_machine(folder):
    spec = "{device: CPU, model: {source: {path: models/tiny}}, engine: {kvCacheOffloading: {memory: 1Gi}, kvTransfer: "
    spec += "{port: 9005, allowedPeers: ['other:8005']}}}"
    assert launch(folder, spec).config.engine.kv_transfer is None
    (folder / "key").write_text("k" * 32)
    option = f"--kv-transfer-key-file={folder}/key"
    transfer = launch(folder, spec, option).config.engine.kv_transfer
    assert (transfer.key_file, transfer.port, transfer.allowed_peers) == (f"{folder}/key", 9005, ("other:8005",))
    options = "--kv-transfer-port=9006", "--kv-transfer-peers=a:1,b:2"
    transfer = launch(folder, spec, option, *options).config.engine.kv_transfer
    assert (transfer.port, transfer.allowed_peers) == (9006, ("a:1", "b:2"))
    with pytest.raises(ConfigError, match="--kv-transfer-key-file"):
        launch(folder, spec, "--kv-transfer-port=9006")


def test_hub_token_is_passed_as_an_environment_variable(folder):
    spec = """
  device: CPU
  model: {source: {huggingFace: {repo: o/m, tokenSecretRef: {name: hub}}}}
  adapters: [{name: a, source: {huggingFace: {repo: o/a}}}]
"""
    without = launch(folder, spec, environment={"HF_TOKEN": "own"})
    assert without.environment["HF_TOKEN"] == "own"
    assert without.catalog.adapters[0].source.huggingFace.tokenSecretRef is None
    (folder / "secrets/hub").mkdir(parents=True)
    (folder / "secrets/hub/token").write_text("secret\n")
    with_secret = launch(folder, spec, f"--secrets-dir={folder}/secrets", environment={"HF_TOKEN": "own"})
    assert with_secret.environment["HF_TOKEN"] == "secret"
    assert with_secret.catalog.adapters[0].source.huggingFace.tokenSecretRef.name == "hub"
    assert with_secret.config.sources.secretsDir == folder / "secrets"
    documents = [with_secret.argv, with_secret.config.to_json(), with_secret.catalog.to_json()]
    assert "secret\n" not in json.dumps(documents)


def test_environment_variables_of_the_spec_are_added(folder):
    spec = "{device: CPU, model: {source: {path: models/tiny}}, runtime: {env: [{name: A, value: b}, {name: C}]}}"
    assert launch(folder, spec, environment={"PATH": "/bin", "A": "old"}).environment == {
        "PATH": "/bin",
        "A": "b",
        "C": "",
    }


REJECTED = [
    (
        "{model: {source: {path: models/tiny}}}",
        'HERE/f.yaml:4: spec.device: "GPU": this machine has no NVIDIA GPU (none of /dev/nvidia0, /dev/nvidiactl, '
        "/dev/dxg exists); use a machine with a GPU, or set spec.device to CPU and remove spec.gpu",
    ),
    (
        "{device: CPU, model: {source: {path: models/big}}}",
        'HERE/f.yaml:4: spec.model.source.path: "models/big": HERE/models/big is not a folder; '
        "correct the path; relative paths start at HERE",
    ),
    (
        "{device: CPU, model: {source: {path: adapters/pirate}}}",
        'HERE/f.yaml:4: spec.model.source.path: "adapters/pirate": HERE/adapters/pirate does not contain '
        "config.json; give the folder that contains the files",
    ),
    (
        "{device: CPU, model: {source: {pvc: {claimName: c}}}}",
        'HERE/f.yaml:4: spec.model.source.pvc.claimName: "c": claims are not available on this machine; '
        "give the folder of the claim: --volume c=FOLDER",
    ),
    (
        "{device: CPU, model: {source: {path: models/tiny}}, adapters: [{name: a, source: {path: models/tiny}}]}",
        'HERE/f.yaml:4: spec.adapters[0].source.path: "models/tiny": HERE/models/tiny does not contain '
        "adapter_config.json and adapter_model.safetensors; give the folder that contains the files",
    ),
    (
        "{device: CPU, model: {source: {path: models/tiny}}, adapters: [{name: a, source: {http: {url: http://h/a, "
        "headersSecretRef: {name: s}}}}]}",
        'HERE/f.yaml:4: spec.adapters[0].source.http.headersSecretRef.name: "s": Secrets are not available on this '
        "machine; give --secrets-dir DIR, where DIR/s contains one file for each key of the Secret",
    ),
]


@pytest.mark.parametrize(("spec", "message"), REJECTED, ids=[m.split(": ")[1] for _, m in REJECTED])
def test_problem_messages(folder, spec, message):
    assert problems(folder, spec) == [message]


def test_rejects_a_hub_repository_with_the_name_of_a_local_folder(folder, monkeypatch):
    spec = "{device: CPU, model: {source: {huggingFace: {repo: models/tiny}}}}"
    assert launch(folder, spec).config.engine.model == "models/tiny"
    monkeypatch.chdir(folder)
    (message,) = problems(folder, spec)
    assert message == (
        'HERE/f.yaml:4: spec.model.source.huggingFace.repo: "models/tiny": the folder HERE/models/tiny would be served '
        "instead of the hub's model; give that folder as path, or start in another folder"
    )


def test_reports_all_problems_at_once(folder):
    assert len(problems(folder, "{model: {source: {path: a}}, adapters: [{name: b, source: {path: b}}]}")) == 3


def test_rejects_a_link_that_leaves_the_volume(folder):
    (folder / "models/out").symlink_to(folder / "adapters/pirate")
    (message,) = problems(
        folder,
        "{device: CPU, model: {source: {pvc: {claimName: m, path: out}}}}",
        f"--volume=m={folder}/models",
    )
    assert 'spec.model.source.pvc.path: "out": HERE/adapters/pirate is outside the volume' in message


def test_engine_errors_name_the_field_of_the_spec(folder, monkeypatch):
    # The schema also allows values that only engines of other releases support.
    monkeypatch.setattr(capabilities, "TENSOR_PARALLEL_SIZES", (1, 4))
    (folder / "dev").mkdir()
    (folder / "dev/nvidia0").touch()
    spec = "{model: {source: {path: models/tiny}}, engine: {tensorParallelSize: 2}}"
    (message,) = problems(folder, spec, dev=folder / "dev")
    assert message == (
        "HERE/f.yaml:4: spec.engine.tensorParallelSize: the engine rejects the value: must be one of 1, 4, got 2; "
        "change the field or omit it"
    )


def test_rejects_a_run_folder_that_is_a_link(folder):
    (folder / "run").symlink_to(folder / "models")
    with pytest.raises(
        ConfigError, match=r"run: belongs to another user or is a link; give another folder with --run-dir"
    ):
        write_run_dir(launch(folder, TALES, f"--run-dir={folder / 'run'}"))


def test_does_not_overwrite_the_run_folder_of_a_running_supervisor(folder):
    run = folder / "run"
    write_run_dir(launch(folder, TALES, f"--run-dir={run}"))
    before = (run / "pod.json").read_text()
    lock = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print('locked'); input()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", lock, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout.readline() == "locked\n"
        with pytest.raises(
            ConfigError, match="another server runs in it; stop it, or give another folder with --run-dir"
        ):
            write_run_dir(launch(folder, TALES.replace("maxRank: 32", "maxRank: 64"), f"--run-dir={run}"))
        running.communicate("\n", timeout=10)
    assert (run / "pod.json").read_text() == before


EXEC_SCRIPT = """
import sys
from quire_operator.cli.serve import exec_supervisor
program = (sys.executable, "-c", "import os; print(os.getpid(), os.environ)")
exec_supervisor(program, {"WORD": "here"})
"""


def test_exec_supervisor_replaces_process_and_environment():
    with subprocess.Popen([sys.executable, "-c", EXEC_SCRIPT], stdout=subprocess.PIPE, text=True) as running:
        output = running.communicate(timeout=10)[0]
    assert output.startswith(f"{running.pid} environ({{'WORD': 'here'")


def test_missing_packages_are_reported_with_their_extra(monkeypatch):
    serve.require_packages()
    monkeypatch.setitem(serve.REQUIRED_PACKAGES, "no_such_package", "server")
    with pytest.raises(ConfigError, match=r"^no_such_package: not installed; pip install 'quire-llm\[server\]'$"):
        serve.require_packages()


def test_vllm_backend_repository_is_served_under_the_folder_name(tmp_path):
    model = tmp_path / "repository" / "vllm_model"
    (model / "1").mkdir(parents=True)
    arguments = {"model": "somewhere", "served_model_name": ["a", "org/b"], "enable_lora": True}
    (model / "1/model.json").write_text(json.dumps(arguments))
    (model / "1/multi_lora.json").write_text('{"sql": "/a"}')
    for repository in (model, model.parent):
        launched = serve_vllm.prepare(repository, "cpu", options_of("--http-port=18000", f"--cache-dir={tmp_path}"), {})
        config = launched.config
        assert (config.vllmRepository, config.engine.device, config.servedName) == (repository, "cpu", "vllm_model")
        assert config.openai == OpenAIConfig(live=True, servedModelNames=("a", "org/b"))
        assert (config.ports.http, config.ports.grpc, launched.cache_dir) == (18000, constants.GRPC_PORT, tmp_path)
        assert [adapter.name for adapter in launched.catalog.adapters] == ["sql"]
        assert config.sources.allowPaths and config.sources.requireAdapters
        assert launched.run_dir.name == f"quire-{os.getuid()}-vllm_model"
        off = serve_vllm.prepare(repository, "cpu", options_of("--openai-port=0"), {})
        assert off.config.openai is None
    (tmp_path / "repository/another/1").mkdir(parents=True)
    (tmp_path / "repository/another/1/model.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"VERSION/model.json is required, got 2"):
        serve_vllm.served_name(tmp_path / "repository")
