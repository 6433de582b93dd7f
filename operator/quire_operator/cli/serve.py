# SPDX-License-Identifier: Apache-2.0
"""`quire serve`: runs an LLMService on this machine, with the same supervisor as in a pod.

`prepare` builds the launch plan. `write_run_dir` writes pod.json and adapters.json. `exec_supervisor` replaces the
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
from quire_operator.render.engine_config import ModelLocation, UnsupportedByEngine, engine_arguments
from quire_operator.render.object_names import CHAT_TEMPLATE_FILE
from quire_operator.render.pod_config import PodFiles, pod_config
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog, SecretRef, Source
from quire_spec.documents.pod_config import OpenAIConfig, PodConfig, Ports
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

_PROTOCOLS = {"http": ("http",), "grpc": ("grpc",), "http,grpc": ("http", "grpc"), "none": ()}
"""Maps the values of --expose to protocols."""


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

    def apply_to(self, config: PodConfig) -> PodConfig:
        """Return the configuration with the values of these options. An option that is not set changes nothing.

        Raises:
            ConfigError: an option contradicts another one or the configuration.
        """
        parse_server_arguments(self.server_args, "--server-arg")
        if config.openai is not None and self.allow_runtime_lora_updating and self.admin_key_file is None:
            raise ConfigError("--allow-runtime-lora-updating requires --admin-key-file; add it")
        if config.openai is not None and self.allowed_local_lora_path and not self.allow_runtime_lora_updating:
            raise ConfigError("--allowed-local-lora-path requires --allow-runtime-lora-updating; add it")
        server, ports = config.server, config.ports.by_name
        updated = replace(
            config,
            ports=Ports(**{name: getattr(self, f"{name}_port") or port for name, port in ports.items()}),
            adminKeyFile=_absolute(self.admin_key_file),
            server=replace(
                server,
                expose=server.expose if self.expose is None else _PROTOCOLS[self.expose],
                serverArgs=tuple(self.server_args) or server.serverArgs,
                modelRepository=_absolute(self.model_repository) or server.modelRepository,
                verbose=self.verbose,
            ),
            openai=None if config.openai is None else self._apply_to_openai(config.openai),
        )
        updated.validate()
        return updated

    def _apply_to_openai(self, openai: OpenAIConfig) -> OpenAIConfig:
        certfile = _absolute(self.openai_ssl_certfile)
        return replace(
            openai,
            port=self.openai_port or openai.port,
            # The live page is always served on a laptop.
            live=True,
            apiServerCount=self.openai_api_server_count or openai.apiServerCount,
            apiKeysDir=_absolute(self.openai_api_keys_dir) or openai.apiKeysDir,
            sslCertfile=certfile or openai.sslCertfile,
            sslKeyfile=_absolute(self.openai_ssl_keyfile) or (None if certfile else openai.sslKeyfile),
            enableLogRequests=self.openai_enable_log_requests,
            allowRuntimeLoraUpdating=self.allow_runtime_lora_updating,
            allowedLocalLoraPaths=tuple(folder.absolute() for folder in self.allowed_local_lora_path),
        )


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that is needed to start the supervisor."""

    config: PodConfig
    catalog: AdapterCatalog
    chat_template: str | None
    """Text of spec.openai.chatTemplate, or None if the spec does not contain the text."""
    run_dir: Path
    cache_dir: Path
    environment: Mapping[str, str]

    @property
    def pod_options(self) -> tuple[str, ...]:
        """The options that the supervisor and a batch have in common."""
        config_file = self.run_dir / constants.CONFIG_FILE
        return f"--config={config_file}", f"--run-dir={self.run_dir}", f"--cache-dir={self.cache_dir}"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of the supervisor."""
        return (sys.executable, "-m", "quire_server", *self.pod_options)


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
        ConfigError: the token of the model's Secret cannot be read, or an option or an argument of the server is wrong.
    """
    local_sources = LocalSources(manifest.folder, dict(options.volumes), options.secrets_dir)
    service = _with_openai_port(service, options)
    if problems := list(_iter_problems(service, options, local_sources, dev_dir)):
        raise InvalidService(problems, manifest.location)
    run_dir = (options.run_dir or default_run_dir(service.name, environment)).absolute()
    catalog, template = service.build_catalog(), service.spec.openai.chatTemplate
    local_adapters = tuple(
        replace(adapter, source=local_sources.localize(adapter.source)) for adapter in catalog.adapters
    )
    engine = replace(
        _build_engine_config(manifest, service, local_sources), **_engine_overrides(service, options, run_dir)
    )
    config = pod_config(service, engine, _pod_files(service, options, local_sources, run_dir), options.host)
    # The server runs as the user of this command. Therefore, it can read only files that this user can read anyway.
    config = replace(config, sources=replace(config.sources, allowPaths=True))
    return LaunchPlan(
        config=options.apply_to(config),
        catalog=replace(catalog, adapters=local_adapters),
        chat_template=None if template is None else template.text,
        run_dir=run_dir,
        cache_dir=(options.cache_dir or default_cache_dir(environment)).absolute(),
        environment=dict(environment)
        | {e.name: e.value for e in service.spec.runtime.env}
        | _hub_token_env(local_sources, service),
    )


def _with_openai_port(service: LLMService, options: ServeOptions) -> LLMService:
    """Return the service with the port of the OpenAI API that the options select. 0 turns the API off."""
    if options.openai_port is None:
        return service
    openai = replace(service.spec.openai, enabled=options.openai_port > 0, port=options.openai_port or None)
    return replace(service, spec=replace(service.spec, openai=openai))


def _pod_files(service: LLMService, options: ServeOptions, local_sources: LocalSources, run_dir: Path) -> PodFiles:
    """Return where the files of pod.json are on this machine."""
    secrets, models = _openai_secrets(service, options), service.spec.runtime.models
    folder = options.model_repository or (None if models is None else local_sources.resolve(models.source))
    return PodFiles(
        adapters=run_dir / constants.CATALOG_FILE,
        secrets=_absolute(options.secrets_dir),
        claims={claim: folder.absolute() for claim, folder in options.volumes},
        api_keys=_secret_folder(secrets.get("apiKeysSecretRef"), options),
        tls=_secret_folder(secrets.get("tlsSecretRef"), options),
        models=_absolute(folder),
    )


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
            (folder / constants.CONFIG_FILE).write_text(json.dumps(launch_plan.config.to_json(), indent=2))
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
    if service.openai_port is not None:
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
        return EngineConfig.from_json(engine_arguments(service, model, draft=draft[0] if draft else None))
    except UnsupportedByEngine as error:
        raise InvalidService([error.problem], manifest.location) from error


def _locate(source: Source, local_sources: LocalSources) -> ModelLocation:
    hub = source.huggingFace
    return ModelLocation(hub.repo, hub.revision) if hub else ModelLocation(str(local_sources.resolve(source)))


def _engine_overrides(service: LLMService, options: ServeOptions, run_dir: Path) -> dict[str, Any]:
    """Return the fields of the engine whose values depend on this machine or on an option of the command."""
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


def _secret_folder(ref: SecretRef | None, options: ServeOptions) -> Path | None:
    return None if ref is None or options.secrets_dir is None else (options.secrets_dir / ref.name).absolute()


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


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
