# SPDX-License-Identifier: Apache-2.0
"""The command-line settings of the front, as a dataclass that cannot be changed."""

from dataclasses import dataclass
from pathlib import Path

DEFAULT_MAX_BODY_BYTES = 8 * 2**20
"""Default maximum size of a request body. It is enough for a prompt of a million token ids. While a body of this size
is parsed, the event loop is blocked for about 20 ms."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Arguments of `python -m quire_server.openai`."""

    run_dir: Path
    """Folder that contains the pod's Unix sockets."""
    served_name: str
    """Name of the base model."""
    host: str
    port: int
    served_model_names: tuple[str, ...] = ()
    """Names of the base model in the OpenAI API. If empty, served_name is used."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    api_keys_dir: Path | None = None
    """Folder that contains the API keys, with one key in each file. None: no key is needed."""
    admin_key_file: Path | None = None
    """File that contains the admin key, which is needed to load and unload adapters. None: adapters cannot be
    changed."""
    shared_prefix_cache: bool = False
    """True if requests with different API keys can use the same cached prompts."""
    live: bool = False
    """True if the front serves the live page."""
    uses_generation_config: bool = True
    """True if the defaults of sampling parameters come from the checkpoint's generation_config.json."""
    ssl_certfile: Path | None = None
    """File that contains the certificate chain for HTTPS. None: HTTP without TLS."""
    ssl_keyfile: Path | None = None
    """File that contains the key of the certificate. None: the key is in ssl_certfile."""
    probe_socket: Path | None = None
    """Additional Unix socket on which this process listens for probes. None: the process listens only on the port."""
    reuse_port: bool = False
    """True if several fronts listen on the same port."""
    log_requests: bool = False
    """True if each request is logged, together with its id and traceparent."""
    cors_origins: tuple[str, ...] = ()
    """The web pages of these origins can read responses. * stands for all origins."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the base model in the OpenAI API. If a request does not name a model, the response contains the
        first of these names."""
        return self.served_model_names or (self.served_name,)

    def engine_model(self, name: str) -> str:
        """Return the name that the text process uses for a model."""
        return self.served_name if name in self.served_model_names else name
