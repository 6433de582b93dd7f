# SPDX-License-Identifier: Apache-2.0
"""The command-line settings of a supervisor, as a dataclass that cannot be changed."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire_spec import constants
from quire_spec.net.addresses import is_ipv6


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """Arguments of `python -m quire_server`."""

    engine: Path
    """engine.json."""
    adapters: Path
    """The file adapters.json, which contains the initial adapter catalog."""
    served_name: str
    """Name of the base model."""
    run_dir: Path
    """Folder that contains sockets and the server's model repository. Only one supervisor at a time can use it."""
    cache_dir: Path
    """Folder that contains fetched adapters. It is kept when the supervisor restarts."""
    host: str = "127.0.0.1"
    """Address on which the ports listen."""
    expose: tuple[str, ...] = constants.SERVER_PROTOCOLS
    """Protocols of the server that listen on `host`, so that clients can reach them. The other protocols listen only on
    loopback, for the supervisor."""
    http_port: int = constants.HTTP_PORT
    grpc_port: int = constants.GRPC_PORT
    metrics_port: int = constants.SERVER_METRICS_PORT
    health_port: int = constants.HEALTH_PORT
    openai_port: int | None = None
    """Port of the OpenAI front; None: the OpenAI API is turned off."""
    openai_api_server_count: int = 1
    """Number of processes that serve the OpenAI API."""
    openai_flags: tuple[str, ...] = ()
    """Additional arguments for the OpenAI front."""
    admin_key_file: Path | None = None
    """File that contains the key for /status and /adapters. None: only requests from this machine are allowed."""
    allow_runtime_lora_updating: bool = False
    """True if the OpenAI API can load and unload adapters. These calls need the admin key."""
    allowed_local_lora_paths: tuple[Path, ...] = ()
    """Folders from which the OpenAI API can load adapters."""
    secrets_dir: Path | None = None
    pvcs: Mapping[str, Path] = field(default_factory=dict)
    """Mount point of each PersistentVolumeClaim."""
    allow_path_sources: bool = False
    model_repository: Path | None = None
    """Folder of --model-repository. The server runs the models in this folder in addition to Quire's models. None:
    there are no such models."""
    own_model_folder: Path | None = None
    """Folder of the model of --vllm-repository, which Quire serves itself. It is set only if model_repository contains
    this folder."""
    model_env: frozenset[str] = frozenset()
    """Names of environment variables that the code of the models in model_repository can read. It can also read the
    variables of libraries, which are not listed here."""
    server_args: tuple[str, ...] = ()
    """Arguments for the server. parse_server_arguments has already checked them."""
    require_adapters: bool = False
    """True if the start must fail when an adapter of the initial catalog cannot be loaded, as in vllm_backend."""
    max_adapter_bytes: int = 4 * 2**30
    drain_timeout_s: float = 30.0
    """After SIGTERM, open requests have this many seconds to finish."""
    verbose: bool = False
    """True if all log lines of the server are shown."""

    @property
    def ports(self) -> dict[str, int]:
        """The number of each port, by the name of its option."""
        openai_port = {} if self.openai_port is None else {"--openai-port": self.openai_port}
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
            "--health-port": self.health_port,
            **openai_port,
        }

    @property
    def shows_server_log(self) -> bool:
        """True if informational lines of the server are shown. This is the case with --verbose, or if the user has set
        the server's log level."""
        return self.verbose or any(arg.startswith("log-verbose=") and arg[-1] != "0" for arg in self.server_args)

    @property
    def grpc_certificate(self) -> Path | None:
        """Certificate chain of the gRPC port; None: no TLS."""
        files = (
            argument.partition("=")[2] for argument in self.server_args if argument.startswith("grpc-server-cert=")
        )
        return next(map(Path, files), None)

    def server_host(self, protocol: str) -> str:
        """Address on which a protocol of the server listens."""
        if protocol in self.expose:
            return self.host
        return "::1" if is_ipv6(self.host) else "127.0.0.1"

    def listen_host(self, option: str) -> str:
        """Address on which the port of `option` listens; see `ports`."""
        protocol = option.removeprefix("--").removesuffix("-port")
        return self.server_host(protocol) if protocol in constants.SERVER_PROTOCOLS else self.host

    def client_host(self, protocol: str) -> str:
        """Address that the supervisor uses to reach a protocol of the server."""
        return self.loopback if protocol in self.expose else self.server_host(protocol)

    @property
    def loopback(self) -> str:
        """Address that the supervisor uses to reach the server."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
        return self.host
