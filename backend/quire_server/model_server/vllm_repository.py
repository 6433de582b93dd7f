# SPDX-License-Identifier: Apache-2.0
"""Logs which parts of a vllm_backend model repository are not served. quire_spec/documents/vllm_repository.py reads the
repository."""

import logging
from pathlib import Path

from quire_spec.documents.model_repository import CONFIG_FILE, find_vllm_model
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

_USED_SETTINGS = frozenset(("name", "backend", "default_model_filename"))
"""Settings of config.pbtxt that the log does not report as ignored. `name` and `backend` agree with the served model,
and `default_model_filename` is only the name of a file."""


def log_ignored_parts(repository: Path) -> None:
    """Log the parts of the repository that are not served.

    Raises:
        ConfigError: the repository has no vllm_backend model, or its config.pbtxt is not valid.
    """
    model = find_vllm_model(repository)
    if model.other_versions:
        logger.warning(
            "model versions not served model=%s served=%d not_served=%s",
            model.name,
            model.version,
            ",".join(map(str, model.other_versions)),
        )
    if model.other_models:
        logger.warning("other models, served only with --model-repository: %s", ", ".join(model.other_models))
    path = model.path / CONFIG_FILE
    if path.is_file() and (settings := _config_settings(path)):
        logger.warning("%s: settings without effect: %s", path, ", ".join(settings))


def _config_settings(path: Path) -> list[str]:
    """Return the names of the settings and parameters in config.pbtxt that have no effect.

    Raises:
        ConfigError: the file is not a model configuration.
    """
    # These modules are imported only if they are needed. The import takes 0.2 s, and few repositories have this file.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"{path}: not a model configuration: {error}; correct or remove it") from error
    if config.backend not in ("", "vllm"):
        raise ConfigError(f"{path}: backend {config.backend!r} is not vllm; give a model of vllm_backend")
    parameters = [f"parameters[{name!r}]" for name in sorted(config.parameters)]
    names = (descriptor.name for descriptor, _ in config.ListFields())
    return [name for name in names if name not in _USED_SETTINGS and name != "parameters"] + parameters
