# SPDX-License-Identifier: Apache-2.0
"""`quire serve`: runs an LLMService on this machine, with the same supervisor as in a pod.

`prepare` decides, `write_run_dir` writes engine.json and adapters.json, and `exec_supervisor` replaces the process by
`python -m quire_server`. Does not import quire_server or torch; it only checks that they are installed.
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
from typing import NoReturn

from quire_operator.api.llmservice import Device, LLMService
from quire_operator.api.validation_errors import InvalidService, Problem
from quire_operator.api.yaml_manifest import Manifest
from quire_operator.cli.local_sources import ADAPTER_FILES, MODEL_FILES, LocalSources, unsupported_sources
from quire_operator.render.engine_config import UnsupportedByEngine, engine_config
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog, Source
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

GPU_DEVICE_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
"""Device nodes of NVIDIA's driver, and of the Windows driver under WSL. They are checked without a library."""

REQUIRED_PACKAGES = {"torch": "engine", "tokenizers": "engine", "aiohttp": "server", "quire_server": "server"}
"""Packages that the started processes need, and the extra that installs each."""
OPENAI_PACKAGES = {"uvicorn": "openai", "uvloop": "openai", "httptools": "openai", "msgspec": "openai"}
"""The same for the OpenAI front."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the command line."""

    host: str = "127.0.0.1"
    http_port: int | None = None
    grpc_port: int | None = None
    metrics_port: int | None = None
    health_port: int | None = None
    """None: the port of spec.runtime.ports."""
    openai_port: int = constants.OPENAI_PORT
    """0: the OpenAI API is not served."""
    openai_api_keys_dir: Path | None = None
    volumes: Sequence[tuple[str, Path]] = ()
    run_dir: Path | None = None
    cache_dir: Path | None = None
    secrets_dir: Path | None = None
    verbose: bool = False
    """Also print the log of Triton Inference Server."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that is needed to start the supervisor."""

    engine: EngineConfig
    catalog: AdapterCatalog
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
    """Decide how the service runs on this machine. The launch plan's environment extends `environment`.

    Raises:
        InvalidService: the service cannot run here; every reason is listed, with the line of its field.
        ConfigError: the token of the model's Secret cannot be read.
    """
    local_sources = LocalSources(manifest.folder, dict(options.volumes), options.secrets_dir)
    if problems := list(_iter_problems(service, local_sources, dev_dir)):
        raise InvalidService(problems, manifest.location)
    model = local_sources.localize(service.spec.model.source)
    run_dir = options.run_dir or default_run_dir(service.name, environment)
    catalog = service.build_catalog()
    local_adapters = tuple(
        replace(adapter, source=local_sources.localize(adapter.source)) for adapter in catalog.adapters
    )
    return LaunchPlan(
        engine=_build_engine_config(manifest, service, local_sources, model),
        catalog=replace(catalog, adapters=local_adapters),
        run_dir=run_dir,
        argv=tuple(_supervisor_argv(service, options, run_dir, options.cache_dir or default_cache_dir(environment))),
        environment=dict(environment)
        | {e.name: e.value for e in service.spec.runtime.env}
        | _hub_token_env(local_sources, model),
    )


def write_run_dir(launch_plan: LaunchPlan) -> None:
    """Create the run folder and write both documents.

    Raises:
        ConfigError: the folder belongs to another user, or another server runs in it.
    """
    folder = launch_plan.run_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(f"run folder {folder}: belongs to another user or is a link; give another with --run-dir")
        with _locked_run_dir(folder):
            (folder / constants.ENGINE_FILE).write_text(json.dumps(launch_plan.engine.to_json(), indent=2))
            (folder / constants.CATALOG_FILE).write_text(json.dumps(launch_plan.catalog.to_json(), indent=2))
    except OSError as error:
        raise ConfigError(f"run folder {folder}: {error.strerror}; give another with --run-dir") from error


def exec_supervisor(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by the supervisor."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], list(argv), dict(environment))


def require_packages(serves_openai: bool = False) -> None:
    """Check that the packages of the supervisor and, if it is served, of the OpenAI front are installed.

    Raises:
        ConfigError: packages are missing; the message contains the command that installs them.
    """
    required = REQUIRED_PACKAGES | (OPENAI_PACKAGES if serves_openai else {})
    missing = [package for package in required if importlib.util.find_spec(package) is None]
    if missing:
        extras = ",".join(sorted({required[package] for package in missing}))
        raise ConfigError(f"{', '.join(missing)}: not installed; pip install 'quire-llm[{extras}]'")


def default_run_dir(name: str, environment: Mapping[str, str]) -> Path:
    """Return the run folder of this user and service, in $XDG_RUNTIME_DIR or else in /tmp. Restarts reuse it."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / f"quire-{name}"
    # Directly in /tmp, where the sticky bit prevents other users from moving it.
    return Path(tempfile.gettempdir()) / f"quire-{os.getuid()}-{name}"


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Return $XDG_CACHE_HOME/quire, or else ~/.cache/quire."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "quire"


def _iter_problems(service: LLMService, local_sources: LocalSources, dev_dir: Path) -> Iterator[Problem]:
    if service.spec.device is Device.GPU and not any(
        (dev_dir / node.removeprefix("/dev/")).exists() for node in GPU_DEVICE_NODES
    ):
        yield Problem(
            ("spec", "device"),
            "GPU",
            f"this machine has no NVIDIA GPU (none of {', '.join(GPU_DEVICE_NODES)} exists)",
            "use a machine with a GPU, or set spec.device to CPU and remove spec.gpu",
        )
    model_path = ("spec", "model", "source")
    hub = service.spec.model.source.huggingFace
    if hub is not None and Path(hub.repo).is_dir():
        # A local folder takes precedence over a hub repository of the same name, as in vLLM and transformers.
        yield Problem(
            (*model_path, "huggingFace", "repo"),
            hub.repo,
            f"the folder {Path(hub.repo).absolute()} would be served instead of the hub's model",
            "give that folder as path, or start in another folder",
        )
    yield from unsupported_sources(service.spec.model.source, model_path)
    yield from local_sources.iter_problems(service.spec.model.source, model_path, MODEL_FILES)
    for i, adapter in enumerate(service.spec.adapters):
        yield from local_sources.iter_problems(adapter.source, ("spec", "adapters", i, "source"), ADAPTER_FILES)


def _build_engine_config(
    manifest: Manifest, service: LLMService, local_sources: LocalSources, model: Source
) -> EngineConfig:
    hub = model.huggingFace
    try:
        return engine_config(
            service, hub.repo if hub else str(local_sources.resolve(model)), hub.revision if hub else None
        )
    except UnsupportedByEngine as error:
        raise InvalidService([error.problem], manifest.location) from error


def _supervisor_argv(service: LLMService, options: ServeOptions, run_dir: Path, cache_dir: Path) -> Iterator[str]:
    ports = service.spec.runtime.ports
    flags: list[tuple[str, object]] = [
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
        *_openai_flags(options),
        ("--drain-timeout", service.spec.rollout.drainSeconds),
        *((("--secrets-dir", options.secrets_dir),) if options.secrets_dir else ()),
        *(("--pvc", f"{claim}={folder.absolute()}") for claim, folder in options.volumes),
    ]
    yield from (sys.executable, "-m", "quire_server")
    for flag, value in flags:
        yield from (flag, str(value))
    # The user who runs this command can read the files that the user's own LLMService names.
    yield "--allow-path-sources"
    if options.verbose:
        yield "--verbose"


def _openai_flags(options: ServeOptions) -> Iterator[tuple[str, object]]:
    if options.openai_port:
        yield "--openai-port", options.openai_port
        if options.openai_api_keys_dir is not None:
            yield "--openai-api-keys-dir", options.openai_api_keys_dir.absolute()


def _hub_token_env(local_sources: LocalSources, model: Source) -> dict[str, str]:
    """Return the hub token of the model's Secret as HF_TOKEN, so that it is never in an argument or a file."""
    if model.huggingFace is None or model.huggingFace.tokenSecretRef is None or local_sources.secrets_dir is None:
        return {}
    ref = model.huggingFace.tokenSecretRef
    path = local_sources.secrets_dir / ref.name / (ref.key or "token")
    try:
        return {"HF_TOKEN": path.read_text().strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read; write the token of Secret {ref.name!r} to it") from error


@contextlib.contextmanager
def _locked_run_dir(folder: Path) -> Iterator[None]:
    """Lock the run folder. A running supervisor keeps this lock, so its folder is never overwritten."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"run folder {folder}: another server runs in it; stop it, or give --run-dir") from error
    finally:
        os.close(descriptor)
