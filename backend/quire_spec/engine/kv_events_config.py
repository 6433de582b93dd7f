# SPDX-License-Identifier: Apache-2.0
"""Configuration of KV events. It is the field `kv_events_config` of EngineConfig, and its fields have vLLM's names."""

import re
from dataclasses import dataclass, replace
from typing import Self

from quire_spec.errors import ConfigError
from quire_spec.net.addresses import ANY_ADDRESS, format_for_url

DEFAULT_PORT = 5557
"""vLLM's default."""
_ENDPOINT = re.compile(r"tcp://(?P<host>\*|[^:/\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Where the engine publishes which KV blocks its prefix cache gained and lost. The events contain the token ids of
    prompts and outputs, so they are off by default."""

    enable_kv_cache_events: bool = False
    """Whether events are published."""

    publisher: str | None = None
    """zmq or null. None: zmq if enable_kv_cache_events is true, otherwise null."""

    endpoint: str = f"tcp://*:{DEFAULT_PORT}"
    """Address on which the engine publishes events, as tcp://HOST:PORT. The host * stands for all interfaces. With
    data_parallel_size above 1, core i uses the port PORT + i. The same applies to replay_endpoint."""

    replay_endpoint: str | None = None
    """Address on which subscribers can request events that they missed, as tcp://HOST:PORT. None: they cannot."""

    buffer_steps: int = 10_000
    """Number of batches that can be requested again. A step of the engine makes at most one batch."""

    hwm: int = 10_000
    """Number of batches that are kept for a slow subscriber. It does not receive further ones until it reads."""

    max_queue_size: int = 100_000
    """Number of batches that can wait for the thread that publishes them. Further ones are dropped."""

    topic: str | None = None
    """Topic of all batches. None: kv@POD@MODEL, where POD is the address of the pod, or the name of the machine outside
    of a cluster. Some routers accept only the empty topic."""

    @classmethod
    def listening_on(cls, host: str, port: int, replay_port: int, topic: str | None = None) -> Self:
        """Return a configuration that publishes events on two ports of an address."""
        url = f"tcp://{'*' if host == ANY_ADDRESS else format_for_url(host)}"
        return cls(True, endpoint=f"{url}:{port}", replay_endpoint=f"{url}:{replay_port}", topic=topic)

    @property
    def is_enabled(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def ports(self, num_cores: int) -> dict[str, range]:
        """Return the ports that `num_cores` cores use, by the name of the field."""
        endpoints = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        first_ports = {n: endpoint_port(e, n) for n, e in endpoints.items() if e is not None and self.is_enabled}
        return {name: range(first, first + num_cores) for name, first in first_ports.items()}

    def for_core(self, index: int) -> Self:
        """Return the configuration with the ports of a core."""
        replay = self.replay_endpoint and _offset_port(self.replay_endpoint, index)
        return replace(self, endpoint=_offset_port(self.endpoint, index), replay_endpoint=replay)

    def validate(self) -> None:
        """Raise ConfigError for the first field that cannot be used."""
        if self.publisher not in (None, "zmq", "null"):
            raise ConfigError(f"kv_events_config.publisher: must be zmq or null, got {self.publisher!r}")
        for name in ("endpoint", "replay_endpoint"):
            if getattr(self, name) is not None:
                endpoint_port(getattr(self, name), name)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"kv_events_config.{name}: must be at least 1, got {getattr(self, name)}")


def endpoint_port(endpoint: str, name: str) -> int:
    """Return the port of an endpoint. `name` is the name of its field.

    Raises:
        ConfigError: the endpoint is not a TCP address with a port.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ConfigError(
            f"kv_events_config.{name}: must be tcp://HOST:PORT with a port from 1 to 65535, got {endpoint!r}; for "
            f"example tcp://*:{DEFAULT_PORT}"
        )
    return int(match["port"])


def _offset_port(endpoint: str, offset: int) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + offset}"
