# SPDX-License-Identifier: Apache-2.0
"""What a supervisor is told on its command line, as one frozen value."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire_spec import constants


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """Arguments of `python -m quire_server`."""

    engine: Path
    """engine.json."""
    adapters: Path
    """adapters.json: the catalogue to begin with."""
    served_name: str
    """Name of the base model."""
    run_dir: Path
    """Sockets and the server's model repository; owned by one supervisor at a time."""
    cache_dir: Path
    """Fetched adapters; kept over restarts."""
    host: str = "127.0.0.1"
    """Address that all four ports listen on."""
    http_port: int = constants.HTTP_PORT
    grpc_port: int = constants.GRPC_PORT
    metrics_port: int = constants.SERVER_METRICS_PORT
    health_port: int = constants.HEALTH_PORT
    admin_key_file: Path | None = None
    """Key for /status and /adapters; None: they answer to this machine only."""
    secrets_dir: Path | None = None
    pvcs: Mapping[str, Path] = field(default_factory=dict)
    """Claims and the folders that they are mounted at."""
    allow_path_sources: bool = False
    max_adapter_bytes: int = 4 * 2**30
    drain_timeout_s: float = 30.0
    """How long open requests may take to end after SIGTERM."""
    verbose: bool = False
    """Show the server's own chatter."""

    @property
    def ports(self) -> dict[str, int]:
        """Flag to port, of all that must be free."""
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
            "--health-port": self.health_port,
        }

    @property
    def loopback(self) -> str:
        """Address that the supervisor itself reaches the server at."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return self.host
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
        return self.host
