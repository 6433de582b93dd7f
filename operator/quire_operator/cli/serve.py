# SPDX-License-Identifier: Apache-2.0
"""`quire serve`: runs an LLMService on this machine, with the same supervisor as in a pod.

`prepare` builds the launch plan. `write_run_dir` writes engine.json and adapters.json. `exec_supervisor` replaces the
process with `python -m quire_server`. This module checks that quire_server and torch are installed, but does not import
them.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from quire_operator.api.llmservice import Device, LLMService
from quire_operator.api.validation_errors import FieldPath, InvalidService, Problem
from quire_operator.api.yaml_manifest import Manifest
from quire_operator.cli.local_sources import ADAPTER_FILES, MODEL_FILES, LocalSources, unsupported_sources
from quire_operator.render.engine_config import ModelLocation, UnsupportedByEngine, engine_config
from quire_operator.render.object_names import CHAT_TEMPLATE_FILE
from quire_operator.render.openai_arguments import openai_arguments
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog, SecretRef, Source
from quire_spec.documents.server_arguments import parse_server_arguments
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

GPU_DEVICE_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Device nodes of NVIDIA's driver on Linux, and of the Windows driver in WSL. If one of them exists, the machine has a
GPU.
"""

REQUIRED_PACKAGES = {"torch": "engine", "tokenizers": "engine", "aiohttp": "server", "quire_server": "server"}
"""The packages that the supervisor or the engine imports. Each value is the extra of quire-llm that installs the
package.
"""
OPENAI_PACKAGES = {"uvicorn": "openai", "uvloop": "openai", "httptools": "openai"}
"""The packages that the OpenAI front imports. Each value is the extra of quire-llm that installs the package."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the `quire serve` command."""

    host: str = "127.0.0.1"
    http_port: int | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None
    health_port: int | None = None
    """Port of the health endpoints. If it is None, the port in spec.runtime.ports is used."""
    expose: str | None = None
    """Protocols on which clients can reach the server. The value is a comma-separated list, or `none`. None:
    spec.runtime.expose.
    """
    model_repository: Path | None = None
    """Folder with other Triton models. If it is None, spec.runtime.models is used."""
    server_args: Sequence[str] = ()
    """Arguments of the server. If there are none, spec.runtime.serverArgs is used."""
    openai_port: int | None = None
    """Port of the OpenAI API. 0 turns the API off. If it is None, spec.openai.port is used."""
    openai_api_keys_dir: Path | None = None
    """Folder that contains API keys. If it is None, the Secret of spec.openai.apiKeysSecretRef is used, if there is
    one.
    """
    openai_ssl_certfile: Path | None = None
    """Certificate chain of the OpenAI API. If it is None, the Secret of spec.openai.tlsSecretRef is used, if there is
    one.
    """
    openai_ssl_keyfile: Path | None = None
    openai_api_server_count: int | None = None
    """Number of processes that serve the OpenAI API. If it is None, spec.openai.apiServerCount is used."""
    openai_enable_log_requests: bool = False
    admin_key_file: Path | None = None
    """File that contains the admin key.

    Clients need this key to read the status, and to change adapters through the health port or the OpenAI API.
    """
    allow_runtime_lora_updating: bool = False
    """Whether clients can load and unload adapters through the OpenAI API."""
    allowed_local_lora_path: Sequence[Path] = ()
    """Local folders from which the OpenAI API can load adapters."""
    chat_template: Path | None = None
    """File that contains a chat template. If it is None, the chat template of the LLMService or of the checkpoint is
    used.
    """
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    """Format of the reasoning in outputs. If it is None, the value in the LLMService is used."""
    volumes: Sequence[tuple[str, Path]] = ()
    run_dir: Path | None = None
    cache_dir: Path | None = None
    secrets_dir: Path | None = None
    verbose: bool = False
    """Whether the log of Triton Inference Server is printed too."""

    def supervisor_flags(self, serves_openai: bool) -> Iterator[tuple[str, object]]:
        """Yield the supervisor options that LLMServices and vllm_backend repositories have in common.

        An option consists of a name and a value. If the value is None, the option takes no value.
        """
        if self.model_repository is not None:
            yield "--model-repository", self.model_repository.absolute()
        for argument in self.server_args:
            yield "--server-arg", argument
        if self.admin_key_file is not None:
            yield "--admin-key-file", self.admin_key_file.absolute()
        for name in ("ssl_certfile", "ssl_keyfile") if serves_openai else ():
            path: Path | None = getattr(self, f"openai_{name}")
            if path is not None:
                yield f"--openai-{name.replace('_', '-')}", path.absolute()
        if serves_openai:
            yield "--openai-live", None
        if serves_openai and self.openai_api_server_count is not None:
            yield "--openai-api-server-count", self.openai_api_server_count
        if serves_openai and self.openai_enable_log_requests:
            yield "--openai-enable-log-requests", None
        if serves_openai and self.allow_runtime_lora_updating:
            yield "--allow-runtime-lora-updating", None
        for folder in self.allowed_local_lora_path if serves_openai else ():
            yield "--allowed-local-lora-path", folder.absolute()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that is needed to start the supervisor."""

    engine: EngineConfig
    catalog: AdapterCatalog
    chat_template: str | None
    """Text of spec.openai.chatTemplate, or None if the spec does not contain the text."""
    run_dir: Path
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def prepare(
    manifest: Manifest,
    service: LLMService,
    options: ServeOptions,
    environment: Mapping[str, str],
    dev_dir: Path = Path("/dev"),
) -> LaunchPlan:
    """Return a plan for launching the service on this machine.

    The plan's environment contains `environment` and further variables.

    Raises:
        InvalidService: the service cannot run on this machine; the message has each reason with the field's line.
        ConfigError: the token of the model's Secret cannot be read, or an argument of the server is not allowed.
    """
    local_sources = LocalSources(manifest.folder, dict(options.volumes), options.secrets_dir)
    if problems := list(_iter_problems(service, options, local_sources, dev_dir)):
        raise InvalidService(problems, manifest.location)
    options = _with_spec_models(service, options, local_sources)
    run_dir = options.run_dir or default_run_dir(service.name, environment)
    catalog, template = service.build_catalog(), service.spec.openai.chatTemplate
    local_adapters = tuple(
        replace(adapter, source=local_sources.localize(adapter.source)) for adapter in catalog.adapters
    )
    return LaunchPlan(
        engine=replace(
            _build_engine_config(manifest, service, local_sources),
            **_engine_overrides(service, options, run_dir),
        ),
        catalog=replace(catalog, adapters=local_adapters),
        chat_template=None if template is None else template.text,
        run_dir=run_dir,
        argv=tuple(_supervisor_argv(service, options, run_dir, options.cache_dir or default_cache_dir(environment))),
        environment=dict(environment)
        | {e.name: e.value for e in service.spec.runtime.env}
        | _hub_token_env(local_sources, service),
    )


def _with_spec_models(service: LLMService, options: ServeOptions, local_sources: LocalSources) -> ServeOptions:
    """Add spec.runtime.models and spec.runtime.serverArgs to the options, unless the options already set them.

    Raises ConfigError if an argument is not allowed.
    """
    runtime = service.spec.runtime
    if options.model_repository is None and runtime.models is not None:
        options = replace(options, model_repository=local_sources.resolve(runtime.models.source))
    parse_server_arguments(options.server_args, "--server-arg")
    parse_server_arguments(runtime.serverArgs, "spec.runtime.serverArgs")
    return replace(options, server_args=options.server_args or runtime.serverArgs)


def write_run_dir(launch_plan: LaunchPlan) -> None:
    """Create the run folder, and write the documents of the launch plan to it.

    Raises:
        ConfigError: the folder belongs to another user, or another server runs in it.
    """
    folder = launch_plan.run_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(
                f"run folder {folder}: belongs to another user or is a link; give another folder with --run-dir"
            )
        with _locked_run_dir(folder):
            (folder / constants.ENGINE_FILE).write_text(json.dumps(launch_plan.engine.to_json(), indent=2))
            (folder / constants.CATALOG_FILE).write_text(json.dumps(launch_plan.catalog.to_json(), indent=2))
            if launch_plan.chat_template is not None:
                (folder / CHAT_TEMPLATE_FILE).write_text(launch_plan.chat_template)
    except OSError as error:
        raise ConfigError(f"run folder {folder}: {error.strerror}; give another folder with --run-dir") from error


def exec_supervisor(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with the supervisor."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], list(argv), dict(environment))


def openai_port(service: LLMService, options: ServeOptions) -> int | None:
    """Return the port of the OpenAI API, or None if the API is turned off."""
    return service.openai_port if options.openai_port is None else options.openai_port or None


def require_packages(serves_openai: bool = False) -> None:
    """Check that the packages that the supervisor needs are installed.

    If `serves_openai` is true, also check the packages that the OpenAI front needs.

    Raises:
        ConfigError: packages are missing; the message contains the command that installs them.
    """
    required = REQUIRED_PACKAGES | (OPENAI_PACKAGES if serves_openai else {})
    missing = [package for package in required if importlib.util.find_spec(package) is None]
    if missing:
        extras = ",".join(sorted({required[package] for package in missing}))
        raise ConfigError(f"{', '.join(missing)}: not installed; pip install 'quire-llm[{extras}]'")


def default_run_dir(name: str, environment: Mapping[str, str]) -> Path:
    """Return the run folder of this user and service. After a restart, the service uses the same folder.

    The folder is in $XDG_RUNTIME_DIR, or in /tmp if that is not available.
    """
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / f"quire-{name}"
    # The folder is directly below /tmp. There, the sticky bit prevents other users from moving it.
    return Path(tempfile.gettempdir()) / f"quire-{os.getuid()}-{name}"


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Return $XDG_CACHE_HOME/quire, or ~/.cache/quire if the variable is not set."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "quire"


def _iter_problems(
    service: LLMService, options: ServeOptions, local_sources: LocalSources, dev_dir: Path
) -> Iterator[Problem]:
    if service.spec.device is Device.GPU and not any(
        (dev_dir / node.removeprefix("/dev/")).exists() for node in GPU_DEVICE_NODES
    ):
        yield Problem(
            ("spec", "device"),
            "GPU",
            f"this machine has no NVIDIA GPU (none of {', '.join(GPU_DEVICE_NODES)} exists)",
            "use a machine with a GPU, or set spec.device to CPU and remove spec.gpu",
        )
    for path, source in service.model_sources.items():
        hub = source.huggingFace
        if hub is not None and Path(hub.repo).is_dir():
            # A local folder takes precedence over a hub repository of the same name, as in vLLM and transformers.
            yield Problem(
                (*path, "huggingFace", "repo"),
                hub.repo,
                f"the folder {Path(hub.repo).absolute()} would be served instead of the hub's model",
                "give that folder as path, or start in another folder",
            )
        yield from unsupported_sources(source, path)
        yield from local_sources.iter_problems(source, path, MODEL_FILES)
    refs = _hub_token_refs(service)
    if options.secrets_dir is not None and len({*refs.values()}) > 1:
        path, ref = list(refs.items())[-1]
        yield Problem(
            (*path, "huggingFace", "tokenSecretRef", "name"),
            ref.name,
            "quire serve uses the same token to download the model and the draft model",
            "set this field to the Secret of the model, and use a token that can read both",
        )
    for i, adapter in enumerate(service.spec.adapters):
        yield from local_sources.iter_problems(adapter.source, ("spec", "adapters", i, "source"), ADAPTER_FILES)
    if service.spec.runtime.models is not None and options.model_repository is None:
        yield from local_sources.iter_problems(service.spec.runtime.models.source, ("spec", "runtime", "models"), ())
    if openai_port(service, options) is not None:
        for field, ref in _openai_secrets(service, options).items():
            yield from local_sources.secret_problems(ref, ("spec", "openai", field))
    template = service.spec.openai.chatTemplate
    if template is not None and template.configMapKeyRef is not None and options.chat_template is None:
        yield Problem(
            ("spec", "openai", "chatTemplate", "configMapKeyRef", "name"),
            template.configMapKeyRef.name,
            "ConfigMaps are not available on this machine",
            "give the file with the template: --chat-template FILE",
        )


def _build_engine_config(manifest: Manifest, service: LLMService, local_sources: LocalSources) -> EngineConfig:
    model, *draft = [_locate(source, local_sources) for source in service.model_sources.values()]
    try:
        return engine_config(service, model, draft=draft[0] if draft else None)
    except UnsupportedByEngine as error:
        raise InvalidService([error.problem], manifest.location) from error


def _locate(source: Source, local_sources: LocalSources) -> ModelLocation:
    hub = source.huggingFace
    return ModelLocation(hub.repo, hub.revision) if hub else ModelLocation(str(local_sources.resolve(source)))


def _engine_overrides(service: LLMService, options: ServeOptions, run_dir: Path) -> dict[str, Any]:
    """Return the fields of engine.json whose values depend on this machine or on an option of the command."""
    template = options.chat_template
    if template is not None and not template.is_file():
        raise ConfigError(f"--chat-template {template}: no such file; give a file with a chat template")
    if template is None and service.spec.openai.chatTemplate is not None:
        template = run_dir / CHAT_TEMPLATE_FILE
    values = {
        "chat_template": None if template is None else str(template.absolute()),
        "tool_call_parser": options.tool_call_parser,
        "reasoning_parser": options.reasoning_parser,
    }
    return {name: value for name, value in values.items() if value is not None}


def _supervisor_argv(service: LLMService, options: ServeOptions, run_dir: Path, cache_dir: Path) -> Iterator[str]:
    ports, port = service.spec.runtime.ports, openai_port(service, options)
    flags: list[tuple[str, object | None]] = [
        ("--engine", run_dir / constants.ENGINE_FILE),
        ("--adapters", run_dir / constants.CATALOG_FILE),
        ("--served-name", service.served_name),
        ("--run-dir", run_dir),
        ("--cache-dir", cache_dir),
        ("--host", options.host),
        ("--http-port", options.http_port or ports.http),
        ("--grpc-port", options.grpc_port or ports.grpc),
        ("--metrics-port", options.metrics_port or ports.metrics),
        ("--health-port", options.health_port or ports.health),
        *(("--expose", value) for value in (options.expose or service.expose_option,) if value),
        ("--drain-timeout", service.spec.rollout.drainSeconds),
        *(("--model-env", variable.name) for variable in service.spec.runtime.env if options.model_repository),
        *((("--secrets-dir", options.secrets_dir),) if options.secrets_dir else ()),
        *(("--pvc", f"{claim}={folder.absolute()}") for claim, folder in options.volumes),
    ]
    yield from (sys.executable, "-m", "quire_server")
    for flag, value in flags:
        yield from (flag,) if value is None else (flag, str(value))
    # If an option is repeated, the server uses its last value. Therefore, the options of the command come last.
    secrets = _openai_secrets(service, options)
    keys_dir, tls_dir = (_secret_folder(secrets.get(field), options) for field in ("apiKeysSecretRef", "tlsSecretRef"))
    if options.openai_api_keys_dir is not None:
        keys_dir = str(options.openai_api_keys_dir.absolute())
    yield from openai_arguments(service, port, keys_dir, tls_dir)
    for flag, value in options.supervisor_flags(serves_openai=port is not None):
        yield from (flag,) if value is None else (flag, str(value))
    # The server runs as the user of this command. Therefore, it can read only files that this user can read anyway.
    yield "--allow-path-sources"
    if options.verbose:
        yield "--verbose"


def _openai_secrets(service: LLMService, options: ServeOptions) -> dict[str, SecretRef]:
    """Return the Secrets to which spec.openai refers, by field name.

    A Secret is omitted if an option of the command replaces it.
    """
    openai = service.spec.openai
    refs = {
        "apiKeysSecretRef": openai.apiKeysSecretRef if options.openai_api_keys_dir is None else None,
        "tlsSecretRef": openai.tlsSecretRef if options.openai_ssl_certfile is None else None,
    }
    return {field: ref for field, ref in refs.items() if ref is not None}


def _secret_folder(ref: SecretRef | None, options: ServeOptions) -> str | None:
    return None if ref is None or options.secrets_dir is None else str((options.secrets_dir / ref.name).absolute())


def _hub_token_refs(service: LLMService) -> dict[FieldPath, SecretRef]:
    """Return the Secrets that contain the hub tokens of the model and of the draft model.

    The keys are the field paths of the sources.
    """
    hubs = {path: source.huggingFace for path, source in service.model_sources.items()}
    return {path: hub.tokenSecretRef for path, hub in hubs.items() if hub is not None and hub.tokenSecretRef}


def _hub_token_env(local_sources: LocalSources, service: LLMService) -> dict[str, str]:
    """Return the environment variable HF_TOKEN, which contains the hub token from the model's Secret.

    Because an environment variable is used, no argument and no file contains the token.
    """
    ref = next(iter(_hub_token_refs(service).values()), None)
    if ref is None or local_sources.secrets_dir is None:
        return {}
    path = local_sources.secrets_dir / ref.name / (ref.key or "token")
    try:
        return {"HF_TOKEN": path.read_text().strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read; write the token of Secret {ref.name!r} to it") from error


@contextlib.contextmanager
def _locked_run_dir(folder: Path) -> Iterator[None]:
    """Lock the run folder. A supervisor holds the same lock while it runs. Therefore, another start cannot overwrite
    the files in its folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            f"run folder {folder}: another server runs in it; stop it, or give another folder with --run-dir"
        ) from error
    finally:
        os.close(descriptor)
