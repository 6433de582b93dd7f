# SPDX-License-Identifier: Apache-2.0
"""`quire serve --vllm-repository`: serves a model repository of NVIDIA's vllm_backend without changes.

The module builds the command line of the supervisor. The supervisor itself reads model.json and multi_lora.json. Called
by main.py.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from quire_operator.cli.serve import ServeOptions, default_cache_dir, default_run_dir
from quire_spec import constants
from quire_spec.documents.model_repository import find_vllm_model
from quire_spec.errors import ConfigError


def served_name(repository: Path) -> str:
    """Return the name by which clients of vllm_backend request the model. It is the name of the model's folder.

    Raises:
        ConfigError: `repository` does not contain exactly one model, or its name is not a valid model name.
    """
    try:
        name = find_vllm_model(repository).name
    except ConfigError as error:
        raise ConfigError(f"--vllm-repository {error}") from error
    constants.check_model_name(name, f"--vllm-repository {repository}: model")
    return name


def supervisor_argv(
    repository: Path, device: str, options: ServeOptions, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the arguments of the supervisor's command line. Raises the same errors as `served_name`."""
    name = served_name(repository)
    port = constants.OPENAI_PORT if options.openai_port is None else options.openai_port or None
    flags: list[tuple[str, object | None]] = [
        ("--vllm-repository", repository),
        ("--device", device),
        ("--served-name", name),
        ("--run-dir", options.run_dir or default_run_dir(name, environment)),
        ("--cache-dir", options.cache_dir or default_cache_dir(environment)),
        ("--host", options.host),
        ("--expose", options.expose),
        ("--http-port", options.http_port),
        ("--grpc-port", options.grpc_port),
        ("--metrics-port", options.metrics_port),
        ("--health-port", options.health_port),
        ("--openai-port", port),
        ("--openai-api-keys-dir", options.openai_api_keys_dir if port else None),
        ("--secrets-dir", options.secrets_dir),
    ]
    yield from (sys.executable, "-m", "quire_server")
    for flag, value in flags:
        if value is not None:
            yield from (flag, str(value))
    for flag, value in options.supervisor_flags(serves_openai=port is not None):
        yield from (flag,) if value is None else (flag, str(value))
    if options.allowed_local_lora_path:
        yield "--allow-path-sources"
    if options.verbose:
        yield "--verbose"
