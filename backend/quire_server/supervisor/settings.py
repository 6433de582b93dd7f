# SPDX-License-Identifier: Apache-2.0
"""Command-line settings of a supervisor, as one frozen value."""

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
    """adapters.json: the initial adapter catalog."""
    served_name: str
    """Name of the base model."""
    run_dir: Path
    """Sockets and the server's model repository; used by one supervisor at a time."""
    cache_dir: Path
    """Fetched adapters; kept across restarts."""
    host: str = "127.0.0.1"
    """Address that the ports listen on."""
    expose: tuple[str, ...] = constants.SERVER_PROTOCOLS
    """Protocols of the server that listen on `host`; the others listen on loopback, where the supervisor uses them."""
    http_port: int = constants.HTTP_PORT
    grpc_port: int = constants.GRPC_PORT
    metrics_port: int = constants.SERVER_METRICS_PORT
    health_port: int = constants.HEALTH_PORT
    openai_port: int | None = None
    """Port of the OpenAI front; None: not served."""
    openai_api_server_count: int = 1
    """Number of processes that serve it."""
    openai_flags: tuple[str, ...] = ()
    """Further arguments of the OpenAI front."""
    admin_key_file: Path | None = None
    """Key for /status and /adapters; None: only requests from this machine are allowed."""
    allow_runtime_lora_updating: bool = False
    """Whether the OpenAI API can load and unload adapters, with the admin key."""
    allowed_local_lora_paths: tuple[Path, ...] = ()
    """Folders that may contain the adapters that it loads."""
    secrets_dir: Path | None = None
    pvcs: Mapping[str, Path] = field(default_factory=dict)
    """Mount point of each PersistentVolumeClaim."""
    allow_path_sources: bool = False
    model_repository: Path | None = None
    """Folder of further models that the server runs; None: there are none."""
    own_model_folder: Path | None = None
    """A model in it that Quire serves itself: that of --vllm-repository."""
    model_env: frozenset[str] = frozenset()
    """Environment variables that the code of those models gets in addition to those of libraries."""
    server_args: tuple[str, ...] = ()
    """Arguments of the server; parse_server_arguments has accepted them."""
    require_adapters: bool = False
    """An adapter of the initial catalog that cannot be loaded fails the start, as in vllm_backend."""
    max_adapter_bytes: int = 4 * 2**30
    drain_timeout_s: float = 30.0
    """Time for open requests to finish after SIGTERM."""
    verbose: bool = False
    """Show all log lines of the server."""

    @property
    def ports(self) -> dict[str, int]:
        """Port by option name, for all ports."""
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
        """Whether informational lines of the server are shown: with --verbose, or if the user set its log level."""
        return self.verbose or any(arg.startswith("log-verbose=") and arg[-1] != "0" for arg in self.server_args)

    @property
    def grpc_certificate(self) -> Path | None:
        """Certificate chain of the gRPC port; None: no TLS."""
        files = (
            argument.partition("=")[2] for argument in self.server_args if argument.startswith("grpc-server-cert=")
        )
        return next(map(Path, files), None)

    def server_host(self, protocol: str) -> str:
        """Address that a protocol of the server listens on."""
        if protocol in self.expose:
            return self.host
        return "::1" if is_ipv6(self.host) else "127.0.0.1"

    def listen_host(self, option: str) -> str:
        """Address of a port by its option in `ports`."""
        protocol = option.removeprefix("--").removesuffix("-port")
        return self.server_host(protocol) if protocol in constants.SERVER_PROTOCOLS else self.host

    def client_host(self, protocol: str) -> str:
        """Address at which the supervisor reaches a protocol of the server."""
        return self.loopback if protocol in self.expose else self.server_host(protocol)

    @property
    def loopback(self) -> str:
        """Address at which the supervisor reaches the server."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
        return self.host
