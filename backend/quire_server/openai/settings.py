# SPDX-License-Identifier: Apache-2.0
"""Command-line settings of the front, as one frozen value."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_MAX_BODY_BYTES = 8 * 2**20
"""A prompt of a million token ids; parsing it blocks the event loop for about 20 ms."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Arguments of `python -m quire_server.openai`."""

    run_dir: Path
    """Folder of the pod's Unix sockets."""
    served_name: str
    """Name of the base model."""
    host: str
    port: int
    served_model_names: tuple[str, ...] = ()
    """Names of the base model in this API; empty: served_name."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    api_keys_dir: Path | None = None
    """Folder of API keys, one file each; None: no key is needed."""
    admin_key_file: Path | None = None
    """Key for loading and unloading adapters; None: this is not possible."""
    shared_prefix_cache: bool = False
    """Whether requests of different keys use each other's cached prompts."""
    live: bool = False
    """Whether the live page is served."""
    uses_generation_config: bool = True
    """Whether generation_config.json of the checkpoint sets the defaults of sampling parameters."""
    ssl_certfile: Path | None = None
    """Certificate chain, and with it TLS; None: HTTP."""
    ssl_keyfile: Path | None = None
    """Its key; None: in the same file."""
    probe_socket: Path | None = None
    """Unix socket on which this process alone answers; None: only on the port."""
    reuse_port: bool = False
    """Whether several fronts listen on the port."""
    log_requests: bool = False
    """Whether each request is logged, with its id and traceparent."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages can read responses; * for all."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the base model in this API; responses contain the first if a request names none."""
        return self.served_model_names or (self.served_name,)

    def engine_model(self, name: str) -> str:
        """Return the name by which the text process knows a model."""
        return self.served_name if name in self.served_model_names else name
