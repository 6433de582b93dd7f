# SPDX-License-Identifier: Apache-2.0
"""`quire serve --vllm-repository`: serves a model repository of NVIDIA's vllm_backend without changes.

The module converts model.json and multi_lora.json to pod.json and adapters.json. Called by main.py.
"""

from collections.abc import Mapping
from pathlib import Path

from quire_operator.cli.serve import (
    LOCALHOST,
    LaunchPlan,
    ServeOptions,
    default_cache_dir,
    default_run_dir,
    with_options,
)
from quire_spec import constants
from quire_spec.documents.model_repository import find_vllm_model
from quire_spec.documents.pod_config import OpenAIConfig, PodConfig, SourcesConfig
from quire_spec.documents.vllm_repository import read_served_model_names, read_vllm_repository
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


def prepare(repository: Path, device: str, options: ServeOptions, environment: Mapping[str, str]) -> LaunchPlan:
    """Return a plan for launching the model of a repository on `device`, if model.json sets no other device.

    Raises:
        ConfigError: the repository is not valid, see `read_vllm_repository`, or an option is wrong.
    """
    name = served_name(repository)
    engine, catalog = read_vllm_repository(repository, device)
    run_dir = (options.run_dir or default_run_dir(name, environment)).absolute()
    openai = None
    if options.fields.get("openai.port") != 0:
        openai = OpenAIConfig(servedModelNames=read_served_model_names(repository))
    config = PodConfig(
        servedName=name,
        engine=engine,
        adapters=run_dir / constants.CATALOG_FILE,
        host=LOCALHOST,
        openai=openai,
        sources=SourcesConfig(
            secretsDir=None if options.secrets_dir is None else options.secrets_dir.absolute(),
            requireAdapters=True,
        ),
        vllmRepository=repository.absolute(),
    )
    return LaunchPlan(
        config=with_options(config, options),
        catalog=catalog,
        chat_template=None,
        run_dir=run_dir,
        cache_dir=(options.cache_dir or default_cache_dir(environment)).absolute(),
        environment=environment,
    )
