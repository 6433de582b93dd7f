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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from quire_operator.api.llmservice import KV_FOLDER, Device, LLMService
from quire_operator.api.validation_errors import FieldPath, InvalidService, Problem
from quire_operator.api.yaml_manifest import Manifest
from quire_operator.cli.local_sources import ADAPTER_FILES, MODEL_FILES, LocalSources
from quire_operator.cli.model.place import Place, place_of
from quire_operator.cli.pod_options import (
    KV_EVENTS_FIELD,
    KV_EVENTS_TOPIC_FIELD,
    KV_TRANSFER_KEY_FIELD,
    LOAD_FORMAT_FIELD,
    name_options,
    option_of,
)
from quire_operator.render.engine_config import KVPeers, ModelLocation, UnsupportedByEngine, engine_arguments
from quire_operator.render.object_names import CHAT_TEMPLATE_FILE
from quire_operator.render.pod_config import PodFiles, pod_config
from quire_spec import constants
from quire_spec.dataclass_json import to_json
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_config import PodConfig
from quire_spec.documents.server_arguments import parse_server_arguments
from quire_spec.documents.sources import SecretRef, Source
from quire_spec.documents.trust import TrustPolicy
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.kv_events_config import KVEventsConfig
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
LOCALHOST = "127.0.0.1"
API_KEYS_FOLDER = "api-keys"
"""Folder in the run folder for the key of --api-key."""
MACHINE_FIELDS: Mapping[str, Any] = {"openai.live": True, "sources.allowPaths": True}
"""Fields of pod.json that have these values on a laptop: the live page is always served, and local folders are allowed
as sources. The server runs as the user of the command. Therefore, it can read only files that this user can read."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the `quire serve` command."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values of options by the path of their field in pod.json; see pod_options.py. They replace the values of the
    spec. If openai.port is 0, the OpenAI API is turned off."""
    volumes: Sequence[tuple[str, Path]] = ()
    """Local folders of claims."""
    run_dir: Path | None = None
    cache_dir: Path | None = None
    secrets_dir: Path | None = None
    node_rank: int = 0
    """Number of this machine with --nnodes. Only machine 0 needs the adapters."""
    api_key: str | None = None
    """The only key of the OpenAI API. It replaces the Secret of the spec."""


@dataclass(frozen=True, slots=True)
class Download:
    """A model that is downloaded before the server starts."""

    source: Source
    folder: Path
    """Folder of the model in a bucket or on a web server; the cache of huggingface_hub for a model of the hub."""
    streams_weights: bool = False
    """The weights stay in the bucket, if Model Streamer can read them there."""


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
    api_key: str | None = field(default=None, repr=False)
    downloads: Sequence[Download] = ()

    @property
    def pod_options(self) -> tuple[str, ...]:
        """The options that the supervisor and a batch have in common."""
        config_file = self.run_dir / constants.CONFIG_FILE
        return f"--config={config_file}", f"--run-dir={self.run_dir}", f"--cache-dir={self.cache_dir}"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of the supervisor."""
        return (sys.executable, "-m", "quire_server", *self.pod_options)

    def node_argv(self, node_rank: int) -> tuple[str, ...]:
        """Return the command line of the supervisor of another node than the first."""
        return (sys.executable, "-m", "quire_server.rank", *self.pod_options, f"--node-rank={node_rank}")


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
    service = _with_load_format(_with_openai_port(service, options), options)
    if problems := list(_iter_problems(service, options, local_sources, dev_dir)):
        raise InvalidService(problems, manifest.location)
    run_dir = (options.run_dir or default_run_dir(service.name, environment)).absolute()
    cache_dir = (options.cache_dir or default_cache_dir(environment)).absolute()
    catalog, template = service.build_catalog(), service.spec.openai.chatTemplate
    local_adapters = tuple(
        replace(
            adapter,
            source=local_sources.localize(adapter.source),
            versions=tuple(replace(v, source=local_sources.localize(v.source)) for v in adapter.versions or ()) or None,
        )
        for adapter in catalog.adapters
    )
    local_prefixes = tuple(map(local_sources.localize_prefix, catalog.sources))
    # On one machine, there is no Secret with the key.
    kv_key = options.fields.get("engine.kv_transfer.key_file")
    peers = None if kv_key is None else KVPeers(str(kv_key))
    find_place = partial(
        place_of,
        local_sources=local_sources,
        cache_dir=cache_dir,
        environment=environment,
        streams_weights=service.streams_weights,
    )
    engine = _build_engine_config(manifest, service, local_sources, run_dir, cache_dir, find_place, peers)
    config = pod_config(service, engine, _pod_files(service, options, local_sources, run_dir), LOCALHOST)
    return LaunchPlan(
        config=with_options(config, options),
        catalog=replace(catalog, adapters=local_adapters, sources=local_prefixes),
        chat_template=None if template is None else template.text,
        run_dir=run_dir,
        cache_dir=cache_dir,
        environment=dict(environment)
        | {e.name: e.value for e in service.spec.runtime.env}
        | _hub_token_env(local_sources, service),
        api_key=options.api_key,
        downloads=[
            Download(local_sources.localize(source), place.folder, service.streams_weights)
            for source in service.model_sources.values()
            if not (place := find_place(source)).is_complete
        ],
    )


def with_options(config: PodConfig, options: ServeOptions) -> PodConfig:
    """Return the configuration with the values that a laptop and the options set. Options of the OpenAI API have no
    effect if it is turned off.

    Raises:
        ConfigError: the values contradict each other or the configuration. The message names options, not fields.
    """
    parse_server_arguments(options.fields.get("server.serverArgs", ()), "--server-arg")
    transfer_fields = [field for field in options.fields if field.startswith("engine.kv_transfer.")]
    if transfer_fields and KV_TRANSFER_KEY_FIELD not in options.fields:
        raise ConfigError(
            f"{option_of(KV_TRANSFER_KEY_FIELD)}: missing, but {option_of(transfer_fields[0])} requires it; create a "
            "file: openssl rand -hex 32 > FILE && chmod 600 FILE"
        )
    fields = {**MACHINE_FIELDS, **options.fields, **_kv_events_fields(config, options)}
    fields.pop(KV_EVENTS_TOPIC_FIELD, None)
    if config.openai is None:
        fields = {path: value for path, value in fields.items() if not path.startswith("openai.")}
    try:
        return config.with_fields(fields)
    except ConfigError as error:
        raise ConfigError(name_options(str(error))) from error


def _kv_events_fields(config: PodConfig, options: ServeOptions) -> dict[str, Any]:
    """Return the field of the KV events, which are published on the address of the other ports."""
    spec, port = config.engine.kv_events_config, options.fields.get(KV_EVENTS_FIELD)
    num_cores = options.fields.get("engine.data_parallel_size", config.engine.data_parallel_size)
    if port is not None:
        replay_port = port + num_cores
    elif spec is not None and config.vllmRepository is None:
        port, replay_port = (core_ports[0] for core_ports in spec.ports(num_cores).values())
    elif KV_EVENTS_TOPIC_FIELD in options.fields:
        raise ConfigError(f"{option_of(KV_EVENTS_TOPIC_FIELD)}: requires {option_of(KV_EVENTS_FIELD)}; add it")
    else:
        return {}
    host, topic = (
        options.fields.get("host", config.host),
        options.fields.get(KV_EVENTS_TOPIC_FIELD, spec and spec.topic),
    )
    return {KV_EVENTS_FIELD: KVEventsConfig.listening_on(host, port, replay_port, topic)}


def _with_openai_port(service: LLMService, options: ServeOptions) -> LLMService:
    """Return the service with the port of the OpenAI API that the options select. 0 turns the API off."""
    port = options.fields.get("openai.port")
    if port is None:
        return service
    openai = replace(service.spec.openai, enabled=port > 0, port=port or None)
    return replace(service, spec=replace(service.spec, openai=openai))


def _with_load_format(service: LLMService, options: ServeOptions) -> LLMService:
    """Return the service with the reader of weights that the options select. It decides what is downloaded."""
    if (load_format := options.fields.get(LOAD_FORMAT_FIELD)) is None:
        return service
    engine = replace(service.spec.engine, loadFormat=load_format)
    return replace(service, spec=replace(service.spec, engine=engine))


def _pod_files(service: LLMService, options: ServeOptions, local_sources: LocalSources, run_dir: Path) -> PodFiles:
    """Return where the files of pod.json are on this machine."""
    secrets, models = _openai_secrets(service, options), service.spec.runtime.models
    folder = None if models is None else local_sources.resolve(models.source)
    return PodFiles(
        adapters=run_dir / constants.CATALOG_FILE,
        secrets=_absolute(options.secrets_dir),
        claims={claim: folder.absolute() for claim, folder in options.volumes},
        api_keys=run_dir / API_KEYS_FOLDER
        if options.api_key is not None
        else _secret_folder(secrets.get("apiKeysSecretRef"), options),
        tls=_secret_folder(secrets.get("tlsSecretRef"), options),
        models=_absolute(options.fields.get("server.modelRepository", folder)),
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
            _write_api_key(folder / API_KEYS_FOLDER, launch_plan.api_key)
    except OSError as error:
        raise ConfigError(f"run folder {folder}: {error.strerror}; give another folder with --run-dir") from error


def _write_api_key(folder: Path, api_key: str | None) -> None:
    """Write the key to the only file of the folder, which only this user can read; or remove the key of another run."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / "api-key"
    file.unlink(missing_ok=True)
    if api_key is not None:
        file.touch(mode=0o600, exist_ok=False)
        file.write_text(api_key)


def download_models(launch_plan: LaunchPlan, secrets_dir: Path | None) -> None:
    """Download the models that are not on this machine yet, and show the progress. An interrupted download is resumed.

    Raises:
        ConfigError: a model cannot be downloaded. The reason is on standard error.
    """
    for download in launch_plan.downloads:
        hub = download.source.huggingFace
        if hub is not None:
            command = ["quire_engine.weights.hub", hub.repo, *([] if hub.revision is None else [hub.revision])]
        else:
            command = ["quire_server.download", f"--source={json.dumps(to_json(download.source))}"]
            command += [f"--into={download.folder}"]
            command += ["--stream-weights"] * download.streams_weights
            command += [] if secrets_dir is None else [f"--secrets-dir={secrets_dir}"]
            parent = download.folder.parent
            try:
                parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--cache-dir: {parent}: {error.strerror}; give another folder") from error
        if subprocess.run([sys.executable, "-m", *command], env=dict(launch_plan.environment)).returncode:
            raise ConfigError("quire: the model was not downloaded; run the command again to resume")


def exec_supervisor(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with the supervisor."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], list(argv), dict(environment))


def has_gpu(dev_dir: Path = Path("/dev")) -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    return any((dev_dir / node.removeprefix("/dev/")).exists() for node in GPU_DEVICE_NODES)


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
    if service.spec.device is Device.GPU and not has_gpu(dev_dir):
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
        if hub is not None and service.spec.trust is not None and service.spec.trust.model is not TrustPolicy.IGNORE:
            yield Problem(
                (*path, "huggingFace", "repo"),
                hub.repo,
                "quire serve verifies the signature of a model only in a folder",
                "download the files (python -m quire_server.download --help) and give their folder as path",
            )
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
    for path, source in service.adapter_places.items() if options.node_rank == 0 else ():
        yield from local_sources.iter_problems(source, path, ADAPTER_FILES if path[1] == "adapters" else ())
    if service.spec.runtime.models is not None and "server.modelRepository" not in options.fields:
        yield from local_sources.iter_problems(service.spec.runtime.models.source, ("spec", "runtime", "models"), ())
    tier = service.kv_tier
    if tier is not None and tier.folder.pvc is not None and "engine.kv_offloading_folder" not in options.fields:
        # The engine creates the folder on the claim.
        yield from local_sources.iter_problems(Source(pvc=replace(tier.folder.pvc, path="")), KV_FOLDER, ())
    if service.openai_port is not None:
        for field, ref in _openai_secrets(service, options).items():
            yield from local_sources.secret_problems(ref, ("spec", "openai", field))
    template = service.spec.openai.chatTemplate
    if template is not None and template.configMapKeyRef is not None and "engine.chat_template" not in options.fields:
        yield Problem(
            ("spec", "openai", "chatTemplate", "configMapKeyRef", "name"),
            template.configMapKeyRef.name,
            "ConfigMaps are not available on this machine",
            "give the file with the template: --chat-template FILE",
        )


def _build_engine_config(
    manifest: Manifest,
    service: LLMService,
    local_sources: LocalSources,
    run_dir: Path,
    cache_dir: Path,
    find_place: Callable[[Source], Place],
    kv_peers: KVPeers | None,
) -> EngineConfig:
    model, *draft = [_locate(source, find_place) for source in service.model_sources.values()]
    template = None if service.spec.openai.chatTemplate is None else str(run_dir / CHAT_TEMPLATE_FILE)
    pvc = None if service.kv_tier is None else service.kv_tier.folder.pvc
    # An emptyDir is a folder of the cache here, so that the blocks survive a restart.
    folder = cache_dir / "kv-blocks" / service.name if pvc is None else local_sources.resolve(Source(pvc=pvc))
    try:
        arguments = engine_arguments(service, model, None, template, draft[0] if draft else None, str(folder), kv_peers)
        return EngineConfig.from_json(arguments)
    except UnsupportedByEngine as error:
        raise InvalidService([error.problem], manifest.location) from error


def _locate(source: Source, find_place: Callable[[Source], Place]) -> ModelLocation:
    if source.huggingFace is not None:
        return ModelLocation(source.huggingFace.repo, source.huggingFace.revision)
    return ModelLocation(str(find_place(source).folder))


def _openai_secrets(service: LLMService, options: ServeOptions) -> dict[str, SecretRef]:
    """Return the Secrets to which spec.openai refers, by field name.

    A Secret is omitted if an option of the command replaces it.
    """
    openai = service.spec.openai
    refs = {
        "apiKeysSecretRef": openai.apiKeysSecretRef
        if "openai.apiKeysDir" not in options.fields and options.api_key is None
        else None,
        "tlsSecretRef": openai.tlsSecretRef if "openai.sslCertfile" not in options.fields else None,
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
