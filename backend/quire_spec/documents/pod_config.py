# SPDX-License-Identifier: Apache-2.0
"""Pod configuration (pod.json): one document that configures all processes of a pod.

The operator and `quire serve` write pod.json, and `quire batch` does so for a batch. The supervisor, the text process,
the core process and the OpenAI front read it. A field has the name that it has in an LLMService; the fields of `engine`
have vLLM's names. A value that is equal to its default is not written. Therefore, a new field does not change the pods
of existing services.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from quire_spec import constants
from quire_spec.dataclass_json import from_json, non_default_json, read_json, to_json
from quire_spec.documents.api_key_rule import ApiKeyRule
from quire_spec.documents.field_schema import Rule, schema_field, schema_of
from quire_spec.documents.server_arguments import parse_server_arguments
from quire_spec.documents.trust import TrustConfig
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, InvalidArgument, truncated_repr

DEFAULT_MAX_BODY_BYTES = 8 * 2**20
"""Default maximum size of a request body. It is enough for a prompt of a million token ids. While a body of this size
is parsed, the event loop is blocked for about 20 ms."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a pod, except the port of the OpenAI API."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.http != self.grpc && self.http != self.metrics && self.http != self.health && self.grpc != "
            "self.metrics && self.grpc != self.health && self.metrics != self.health",
            "ports must be different, because one container listens on all of them; give each its own number.",
        ),
    )

    http: int = schema_field(constants.HTTP_PORT, minimum=1024, maximum=65535)
    """Requests over HTTP. Default 8000, the default of Triton Inference Server."""
    grpc: int = schema_field(constants.GRPC_PORT, minimum=1024, maximum=65535)
    """Requests over gRPC. Default 8001, the default of Triton Inference Server."""
    metrics: int = schema_field(constants.SERVER_METRICS_PORT, minimum=1024, maximum=65535)
    """Metrics of Triton Inference Server. Default 8002, the default of that server."""
    health: int = schema_field(constants.HEALTH_PORT, minimum=1024, maximum=65535)
    """Probes, all metrics, status and administration. Default 8003."""

    @property
    def by_name(self) -> dict[str, int]:
        """The number of each port, by the port's name."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of Triton Inference Server."""

    expose: tuple[str, ...] = constants.SERVER_PROTOCOLS
    """Protocols that listen on `host`, so that clients can reach them. The other protocols listen only on loopback, for
    the supervisor."""
    serverArgs: tuple[str, ...] = ()
    """Arguments of the server in the form NAME=VALUE; server_arguments.py lists those that are allowed."""
    modelRepository: Path | None = None
    """Folder of other Triton models. The server runs them in addition to Quire's models, and their code runs as this
    user. None: there are no such models."""
    modelEnv: tuple[str, ...] = ()
    """Names of environment variables that the code of the models in modelRepository can read. It can also read the
    variables of libraries, which are not listed here."""
    verbose: bool = False
    """True if all log lines of the server are shown."""

    @property
    def shows_log(self) -> bool:
        """True if informational lines of the server are shown. This is the case with `verbose`, or if serverArgs sets
        the server's log level."""
        return self.verbose or any(arg.startswith("log-verbose=") and arg[-1] != "0" for arg in self.serverArgs)

    @property
    def grpc_certificate(self) -> Path | None:
        """Certificate chain of the gRPC port; None: no TLS."""
        files = (argument.partition("=")[2] for argument in self.serverArgs if argument.startswith("grpc-server-cert="))
        return next(map(Path, files), None)


_ITEMS = {
    "allowedMediaDomains": "a host like images.example, without https:// and without a port",
    "corsAllowedOrigins": "an origin like https://chat.example, without a path, or *",
}
"""Lists whose entries have a pattern, with what it means. An LLMService is compared with the patterns of the CRD; the
options of `quire serve` are not."""


@dataclass(frozen=True, slots=True)
class OpenAIOptions:
    """Options of the OpenAI front that spec.openai of an LLMService and pod.json have in common. An option that is
    added here reaches the front from both."""

    apiServerCount: int = schema_field(1, minimum=1, maximum=constants.MAX_OPENAI_FRONTS)
    """Number of processes that serve the API on its port. More than one needs free CPU cores. Default 1."""
    servedModelNames: tuple[str, ...] = schema_field(
        (),
        items={
            "min_length": 1,
            "max_length": 255,
            "pattern": "^[A-Za-z0-9]([-A-Za-z0-9._/:@]*[A-Za-z0-9])?$",
        },
        max_items=16,
        list_type="set",
    )
    """Names of the base model in the OpenAI API, such as organization/model. Answers contain the name of the request.
    Default: servedName."""
    keys: tuple[ApiKeyRule, ...] = schema_field((), max_items=256, list_type="map", map_keys=("name",))
    """What each API key may use. If the list is not empty, a key that it does not name may use only the base model, and
    the API does not serve /metrics and /live, which name all adapters. Default: every key may use everything."""
    sharedPrefixCache: bool = schema_field(False)
    """Share cached prompts between requests of different API keys. Default false, because a client could find out by
    timing what prompts others have sent."""
    rejectUnknownFields: bool = schema_field(False)
    """Reject requests that have a field that the server does not know. Default false: such fields are ignored, and
    the header x-quire-ignored-fields of the response names them."""
    live: bool = schema_field(False)
    """Serve /live, a page that shows the running engine and can send requests. The HTML page needs no API key, but its
    data does. Default false; `quire serve` always serves the page."""
    generationConfig: str = schema_field("auto", enum=("auto", "vllm"))
    """Source of the defaults of sampling parameters. With auto, generation_config.json of the checkpoint sets them.
    With vllm, the defaults of vLLM apply. Default auto, as in vLLM."""
    allowedMediaDomains: tuple[str, ...] = schema_field(
        (),
        items={"min_length": 1, "max_length": 253, "pattern": "^[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?$"},
        max_items=64,
        list_type="set",
    )
    """Hosts, such as images.example, from which the server fetches images over HTTPS if a request names their URL. Only
    public addresses are used. Default: none, so that requests must contain images as data: URLs."""
    corsAllowedOrigins: tuple[str, ...] = schema_field(
        (),
        items={"min_length": 1, "max_length": 512, "pattern": "^([*]|https?://[^ /]+)$"},
        max_items=32,
        list_type="set",
    )
    """Origins, such as https://chat.example, whose web pages can call the API; * allows all. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIConfig(OpenAIOptions):
    """Settings of the OpenAI front."""

    port: int = constants.OPENAI_PORT
    apiKeysDir: Path | None = None
    """Folder that contains the API keys, with one key in each file. None: no key is needed."""
    sslCertfile: Path | None = None
    """File that contains the certificate chain for HTTPS. None: HTTP without TLS."""
    sslKeyfile: Path | None = None
    """File that contains the key of the certificate. None: the key is in sslCertfile."""
    maxBodyBytes: int = DEFAULT_MAX_BODY_BYTES
    enableLogRequests: bool = False
    """True if each request is logged, together with its id and traceparent."""
    allowRuntimeLoraUpdating: bool = False
    """True if the OpenAI API can load and unload adapters. These calls need the admin key."""
    allowedLocalLoraPaths: tuple[Path, ...] = ()
    """Folders from which the OpenAI API can load adapters."""


@dataclass(frozen=True, slots=True)
class SourcesConfig:
    """How the supervisor reads the sources of adapters."""

    secretsDir: Path | None = None
    """Folder of the Secrets, as files DIR/<secret>/<key>, or DIR/<secret> as JSON."""
    claims: Mapping[str, Path] = field(default_factory=dict)
    """Mount point of each PersistentVolumeClaim."""
    allowPaths: bool = False
    """True if local folders are allowed as sources. Pods do not set it."""
    requireAdapters: bool = False
    """True if the start must fail when an adapter of the initial catalog cannot be loaded, as in vllm_backend."""


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits of a pod that belong to no single API."""

    drainSeconds: float = 30.0
    """After SIGTERM, open requests have this many seconds to finish."""
    maxAdapterBytes: int = 4 * 2**30
    """Maximum size of an adapter."""


@dataclass(frozen=True, slots=True)
class PodConfig:
    """Everything that configures a pod. An instance that `from_json` returns is already validated.

    Each path is absolute, because the processes of a pod may run in different working directories.
    """

    servedName: str
    """Name of the base model."""
    engine: EngineConfig
    adapters: Path
    """The file adapters.json, which contains the initial adapter catalog."""
    host: str = "127.0.0.1"
    """Address on which the ports listen; see `net.addresses.listen_address`."""
    ports: Ports = field(default_factory=Ports)
    adminKeyFile: Path | None = None
    """File that contains the key for /status and /adapters. None: only requests from this machine are allowed."""
    server: ServerConfig = field(default_factory=ServerConfig)
    openai: OpenAIConfig | None = None
    """None: the OpenAI API is turned off."""
    sources: SourcesConfig = field(default_factory=SourcesConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    trust: TrustConfig | None = None
    """None: signatures of models and adapters are not read."""
    vllmRepository: Path | None = None
    """The vllm_backend repository from which this document was made. None: it was made from an LLMService."""

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed pod.json.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or is out of range. The message contains the
                path of the field.
        """
        config = from_json(cls, data)
        config.validate()
        return config

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read pod.json from `path`. Raises ConfigError if the text is not JSON, or if `from_json` rejects the
        document."""
        document = read_json(path)
        try:
            return cls.from_json(document)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_json(self, explicit: Set[str] = frozenset()) -> dict[str, Any]:
        """Return the document that `from_json` reads, without the fields that have their default value.

        `explicit` are fields of the engine that are written even then. The operator passes the fields that the plan or
        the spec sets, because their values must not depend on the defaults of the pods' image.
        """
        document = non_default_json(self)
        values = self.engine.to_json()
        document["engine"] |= {name: values[name] for name in sorted(explicit - document["engine"].keys())}
        return document

    def with_fields(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values of the fields at these paths, such as openai.port. If a section is not set,
        it is added.

        Raises:
            ConfigError: the result is not valid.
        """
        document = self.to_json()
        for path, value in values.items():
            *sections, name = path.split(".")
            section = document
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = to_json(value)
        return self.from_json(document)

    def validate(self) -> None:
        """Raise ConfigError for the first field whose value cannot be used."""
        try:
            constants.check_model_name(self.servedName, "servedName")
        except InvalidArgument as error:
            raise ConfigError(str(error)) from error
        try:
            self.engine.validate()
        except ConfigError as error:
            raise ConfigError(f"engine.{error}") from error
        self._check_ports()
        for name in self.server.expose:
            if name not in constants.SERVER_PROTOCOLS:
                raise ConfigError(f"server.expose: {name!r} is not a protocol; give http, grpc, both or an empty list")
        if not self.server.expose and self.openai is None:
            raise ConfigError(
                "server.expose: empty, but openai is not set, so no client could send a request; expose http or grpc, "
                "or set openai.port"
            )
        parse_server_arguments(self.server.serverArgs, "server.serverArgs")
        if not 0 <= self.limits.drainSeconds < math.inf:
            raise ConfigError(f"limits.drainSeconds: must be at least 0, got {self.limits.drainSeconds:g}")
        if self.limits.maxAdapterBytes < 1:
            raise ConfigError(f"limits.maxAdapterBytes: must be at least 1, got {self.limits.maxAdapterBytes}")
        if self.openai is not None:
            self._check_openai(self.openai)
        if self.trust is not None:
            self.trust.validate("trust")

    @property
    def named_ports(self) -> dict[str, int]:
        """The number of each port that the pod uses, by the path of its field."""
        openai = {} if self.openai is None else {"openai.port": self.openai.port}
        ports = {f"ports.{name}": port for name, port in self.ports.by_name.items()} | openai
        if (kv_events := self.engine.kv_events_config) is not None:
            for name, core_ports in kv_events.ports(self.engine.data_parallel_size).items():
                path = f"engine.kv_events_config.{name}"
                # Every core has its own ports. The first one has the name of the field.
                ports |= {path if i == 0 else f"{path} of core-{i}": port for i, port in enumerate(core_ports)}
        if self.engine.kv_transfer is not None:
            ports["engine.kv_transfer.port"] = self.engine.kv_transfer.port
        if self.engine.nnodes > 1:
            ports |= {"engine.rank_port": self.engine.rank_port, "engine.rank_port + 1": self.engine.rank_port + 1}
        return ports

    def _check_ports(self) -> None:
        """Without this check, the server would print its whole usage text if two of its ports were equal."""
        fields: dict[int, str] = {}
        for name, port in self.named_ports.items():
            if not 0 < port < 2**16:
                raise ConfigError(f"{name}: must be a port from 1 to 65535, got {port}")
            if (other := fields.setdefault(port, name)) != name:
                raise ConfigError(f"{name}: {port} is also the value of {other}; ports must differ")

    def _check_openai(self, openai: OpenAIConfig) -> None:
        for problem in self._openai_problems(openai):
            raise ConfigError(f"openai.{problem}")
        for index, rule in enumerate(openai.keys):
            rule.validate(f"openai.keys[{index}]")
        if openai.keys and self.server.expose:
            raise ConfigError(
                f"server.expose: must be empty with openai.keys, because the server's ports know no API keys, got "
                f"{', '.join(self.server.expose)}"
            )

    def _openai_problems(self, openai: OpenAIConfig) -> Iterator[str]:
        if not 0 < openai.apiServerCount <= constants.MAX_OPENAI_FRONTS:
            yield f"apiServerCount: must be from 1 to {constants.MAX_OPENAI_FRONTS}, got {openai.apiServerCount}"
        if openai.generationConfig not in ("auto", "vllm"):
            yield f"generationConfig: must be auto or vllm, got {openai.generationConfig!r}"
        for option in fields(OpenAIOptions):
            if option.name in _ITEMS:
                pattern = re.compile(schema_of(option).items["pattern"])
                for value in getattr(openai, option.name):
                    if pattern.fullmatch(value) is None:
                        yield f"{option.name}: must be {_ITEMS[option.name]}, got {truncated_repr(value)}"
        if openai.maxBodyBytes < 1:
            yield f"maxBodyBytes: must be at least 1, got {openai.maxBodyBytes}"
        if openai.keys and openai.apiKeysDir is None:
            yield "keys: requires openai.apiKeysDir; add it, or remove keys"
        for name, count in Counter(rule.name for rule in openai.keys).items():
            if count > 1:
                yield f"keys: {count} entries have the name {name!r}; merge them"
        if openai.sslKeyfile is not None and openai.sslCertfile is None:
            yield "sslKeyfile: requires openai.sslCertfile; add it"
        if openai.allowRuntimeLoraUpdating and self.adminKeyFile is None:
            yield "allowRuntimeLoraUpdating: requires adminKeyFile; add it"
        if openai.allowedLocalLoraPaths and not openai.allowRuntimeLoraUpdating:
            yield "allowedLocalLoraPaths: requires openai.allowRuntimeLoraUpdating; add it"
        if openai.allowedLocalLoraPaths and not self.sources.allowPaths:
            yield "allowedLocalLoraPaths: requires sources.allowPaths; add it"
