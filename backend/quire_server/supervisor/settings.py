# SPDX-License-Identifier: Apache-2.0
"""The settings of a supervisor: pod.json, the folders of the command line, and the addresses that follow from them."""

import argparse
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire_spec import constants
from quire_spec.documents.pod_config import PodConfig
from quire_spec.net.addresses import is_ipv6, listen_address


def new_parser(module: str, description: str, exit_codes: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every supervisor has; `module` is the one that starts it."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=exit_codes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, metavar, text in (
        ("config", "FILE", "pod.json: the configuration of the pod"),
        ("run-dir", "DIR", "folder for sockets; only one supervisor can use it at a time"),
        ("cache-dir", "DIR", "folder for files of adapters; kept across restarts"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, type=_absolute_path, required=True, help=text)
    return parser


def _absolute_path(text: str) -> Path:
    # Child processes get these paths and may run in another working directory.
    return Path(text).absolute()


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """Everything that a supervisor is started with."""

    config: PodConfig
    config_file: Path
    """The file pod.json, which the other processes of the pod read too."""
    run_dir: Path
    """Folder that contains sockets and the server's model repository. Only one supervisor at a time can use it."""
    cache_dir: Path
    """Folder that contains fetched adapters. It is kept when the supervisor restarts."""
    host: str
    """Address on which the ports listen."""

    @classmethod
    def load(cls, config_file: Path, run_dir: Path, cache_dir: Path, environment: Mapping[str, str]) -> Self:
        """Read pod.json. Raises ConfigError if the document is invalid."""
        config = PodConfig.load(config_file)
        return cls(config, config_file, run_dir, cache_dir, listen_address(config.host, environment))

    def server_host(self, protocol: str) -> str:
        """Address on which a protocol of the server listens."""
        if protocol in self.config.server.expose:
            return self.host
        return "::1" if is_ipv6(self.host) else "127.0.0.1"

    def listen_host(self, port: str) -> str:
        """Address on which a port listens; see `PodConfig.named_ports`."""
        protocol = port.removeprefix("ports.")
        return self.server_host(protocol) if protocol in constants.SERVER_PROTOCOLS else self.host

    def client_host(self, protocol: str) -> str:
        """Address that the supervisor uses to reach a protocol of the server."""
        return self.loopback if protocol in self.config.server.expose else self.server_host(protocol)

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
