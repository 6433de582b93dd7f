# SPDX-License-Identifier: Apache-2.0
"""Command-line settings of the front, as one frozen value."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_MAX_BODY_BYTES = 8 * 2**20
"""Default maximum size of a body, enough for a prompt of a million token ids. Parsing such a body blocks the event loop
for about 20 ms."""


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
    """Names of the base model in the OpenAI API; empty: served_name."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    api_keys_dir: Path | None = None
    """Folder of API keys, one file each; None: no key is needed."""
    admin_key_file: Path | None = None
    """File with the key for loading and unloading adapters; None: adapters cannot be changed."""
    shared_prefix_cache: bool = False
    """Whether requests with different keys can use the same cached prompts."""
    live: bool = False
    """Whether the live page is served."""
    uses_generation_config: bool = True
    """Whether generation_config.json of the checkpoint sets the defaults of sampling parameters."""
    ssl_certfile: Path | None = None
    """File with the certificate chain for HTTPS; None: HTTP without TLS."""
    ssl_keyfile: Path | None = None
    """File with the key of the certificate; None: ssl_certfile contains the key."""
    probe_socket: Path | None = None
    """Additional Unix socket of this process, for probes; None: the process listens only on the port."""
    reuse_port: bool = False
    """Whether several fronts listen on the same port."""
    log_requests: bool = False
    """Whether each request is logged, with its id and traceparent."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages can read responses; * for all."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the base model in the OpenAI API. If a request names no model, its response contains the first
        name."""
        return self.served_model_names or (self.served_name,)

    def engine_model(self, name: str) -> str:
        """Return the name by which the text process knows a model."""
        return self.served_name if name in self.served_model_names else name
