# SPDX-License-Identifier: Apache-2.0
"""The settings of the front: the parts of pod.json that concern it, and the names of the base model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from quire_spec import constants
from quire_spec.documents.pod_config import OpenAIConfig, PodConfig
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import advertised_address, listen_address


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Everything that a front is started with."""

    run_dir: Path
    """Folder that contains the pod's Unix sockets."""
    served_name: str
    """Name of the base model."""
    host: str
    """Address on which the front listens."""
    openai: OpenAIConfig
    admin_key_file: Path | None = None
    """File that contains the admin key, which is needed to load and unload adapters. None: adapters cannot be
    changed."""

    engine: EngineConfig = field(default_factory=lambda: EngineConfig(""))
    """Configuration of the engine, which GET /server_info shows."""
    cache_salt_secret_file: Path | None = None
    """File that contains the secret of the cache salts. None: the front makes a random secret."""

    advertised_host: str = ""
    """Address at which other pods reach this pod; empty if it is not known."""

    @classmethod
    def load(cls, config_file: Path, run_dir: Path, environment: Mapping[str, str]) -> Self:
        """Read pod.json. Raises ConfigError if the document is invalid, or does not configure the OpenAI API."""
        config = PodConfig.load(config_file)
        if config.openai is None:
            raise ConfigError(f"{config_file}: openai: missing; add it, or do not start the front")
        admin_key_file = config.adminKeyFile if config.openai.allowRuntimeLoraUpdating else None
        transfer = config.engine.kv_transfer
        key_file = None if transfer is None else Path(transfer.key_file)
        return cls(
            run_dir,
            config.servedName,
            listen_address(config.host, environment),
            config.openai,
            admin_key_file,
            config.engine,
            # Pods that read each other's KV blocks have the same transfer key, and the pods of a service have the same
            # admin key. Therefore, they have the same salts, and can share blocks.
            key_file or config.adminKeyFile or run_dir / constants.CACHE_SALT_SECRET_FILE,
            advertised_address(config.host, environment),
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the base model in the OpenAI API. If a request does not name a model, the response contains the
        first of these names."""
        return self.openai.servedModelNames or (self.served_name,)

    def engine_model(self, name: str) -> str:
        """Return the name that the text process uses for a model."""
        return self.served_name if name in self.openai.servedModelNames else name
