# SPDX-License-Identifier: Apache-2.0
"""Adapter catalog (adapters.json).

It lists the adapters that a pod should serve, and the source of each adapter's files.

The operator and `quire serve` write the catalog; the supervisor applies it. The catalog is the complete desired state:
the supervisor removes an adapter that is not in the catalog. A name is an alias of an adapter; a digest identifies the
adapter's content.
"""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from quire_spec import constants
from quire_spec.dataclass_json import drop_nulls, from_json, read_json, to_json
from quire_spec.errors import ConfigError

MAX_ADAPTERS = 4096
REPLACES_HEADER = "Quire-Replaces"
"""Header of PUT /adapters.

It contains the digest of the catalog that the request replaces. If the pod has that catalog, it accepts the new one
even if the new generation is lower.

The operator sends the header if a pod has a catalog whose generation the service never had. This happens after a
service is restored from a backup or created again: its generation is then lower than that of its pods.
"""


class Expose(StrEnum):
    """How clients select an adapter. The parameter `lora_name` of the base model selects any adapter."""

    MODEL = "Model"
    """The adapter is also available as a server model that has the adapter's name."""
    PARAMETER = "Parameter"
    """The adapter has no server model. Clients select it only with the parameter `lora_name` of the base model."""


@dataclass(frozen=True, slots=True)
class SecretRef:
    """Reference to a mounted Secret. The Secret is mounted in a folder that has its name. Each key of the Secret is a
    file in that folder."""

    name: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A hub repository."""

    repo: str
    revision: str | None = None
    """Branch, tag or commit. None selects the default branch of the hub."""
    tokenSecretRef: SecretRef | None = None


@dataclass(frozen=True, slots=True)
class S3Source:
    """A prefix in an S3-compatible bucket."""

    uri: str
    """s3://bucket/prefix"""
    endpoint: str | None = None
    region: str | None = None
    credentialsSecretRef: SecretRef | None = None
    """Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""


@dataclass(frozen=True, slots=True)
class HttpSource:
    """A folder served over HTTP(S): adapter_config.json and adapter_model.safetensors under one URL."""

    url: str
    sha256: str | None = None
    """The SHA-256 hash that adapter_model.safetensors must have."""
    headersSecretRef: SecretRef | None = None
    """Secret for HTTP headers. Each key is sent as the name of a header, and its value as the header's value."""


@dataclass(frozen=True, slots=True)
class PvcSource:
    """A folder on a mounted PersistentVolumeClaim."""

    claimName: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the files of an adapter or a model come from. Exactly one field is set."""

    huggingFace: HuggingFaceSource | None = None
    s3: S3Source | None = None
    http: HttpSource | None = None
    pvc: PvcSource | None = None
    path: str | None = None
    """A local folder. Only `quire serve` accepts it."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError unless exactly one field is set."""
        present_kinds = [kind for kind in self.__slots__ if getattr(self, kind) is not None]
        if len(present_kinds) != 1:
            present_text = ", ".join(present_kinds) or "none"
            raise ConfigError(
                f"{field_path}: exactly one of {', '.join(self.__slots__)} is required, got {present_text}"
            )

    @property
    def secret_ref(self) -> SecretRef | None:
        """The Secret that contains the credentials for this source; None if the source has no Secret."""
        if self.huggingFace is not None:
            return self.huggingFace.tokenSecretRef
        if self.s3 is not None:
            return self.s3.credentialsSecretRef
        return self.http.headersSecretRef if self.http is not None else None


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of an adapter. They apply on each pod separately. A request that exceeds a limit is rejected with
    UNAVAILABLE."""

    maxConcurrentRequests: int | None = None
    """Maximum number of requests that run or wait at the same time; None: no limit."""
    maxTokensPerSecond: int | None = None
    """Maximum number of tokens per second on average. Prompt tokens and output tokens both count. None: no limit. In a
    burst, the adapter can use as many tokens at once as the limit allows in ten seconds."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError if a limit is so low that every request would be rejected."""
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{field_path}.{name}: must be at least 1, got {value}; omit it for no limit")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter of the catalog."""

    name: str
    source: Source
    pinned: bool = False
    """If true, the adapter always stays in an adapter slot on the device."""
    expose: Expose | None = None
    """None means `Model` until 64 adapters of the catalog have a server model. For all further adapters, None means
    `Parameter`."""
    limits: AdapterLimits | None = None


@dataclass(frozen=True, slots=True)
class CatalogVersion:
    """Identifies a catalog by its generation and the digest of its adapters."""

    generation: int
    digest: str
    """sha256:... of the list of adapters. The order of the adapters counts; the generation does not."""


@dataclass(frozen=True, slots=True)
class AdapterCatalog:
    """The adapters that a pod should serve."""

    generation: int = 0
    """A number that increases with every change of the catalog. A pod rejects a catalog as stale if its generation is
    lower than that of the pod's current catalog. The header REPLACES_HEADER overrides this check."""
    adapters: tuple[AdapterSpec, ...] = ()

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed adapters.json.

        Raises:
            ConfigError: a key is unknown, a value has the wrong type, a name occurs twice, or a source does not have
                exactly one field.
        """
        catalog = from_json(cls, data)
        if len(catalog.adapters) > MAX_ADAPTERS:
            raise ConfigError(f"adapters: at most {MAX_ADAPTERS} entries are allowed, got {len(catalog.adapters)}")
        seen: set[str] = set()
        for i, adapter in enumerate(catalog.adapters):
            constants.check_model_name(adapter.name, f"adapters[{i}].name")
            adapter.source.validate(f"adapters[{i}].source")
            if adapter.limits is not None:
                adapter.limits.validate(f"adapters[{i}].limits")
            if adapter.name in seen:
                raise ConfigError(f"adapters[{i}].name: {adapter.name!r} is a duplicate; adapter names must be unique")
            seen.add(adapter.name)
        return catalog

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read adapters.json from `path`. Raises ConfigError if the text is not JSON, or if `from_json` rejects the
        document."""
        return cls.from_json(read_json(path))

    def to_json(self) -> dict[str, Any]:
        """Return all fields in the form that `from_json` reads."""
        document: dict[str, Any] = to_json(self)
        return document

    @property
    def version(self) -> CatalogVersion:
        """Generation and digest. The digest ignores fields that are not set. Therefore, a new optional field does not
        change the digest."""
        text = json.dumps(drop_nulls(to_json(self.adapters)), sort_keys=True, separators=(",", ":"))
        return CatalogVersion(self.generation, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")

    def exposed_names(self) -> frozenset[str]:
        """Return the names of the adapters that get a server model.

        All adapters with `Model` get one. Adapters whose `expose` is None also get one, in the order of the catalog,
        until there are 64 in total.
        """
        explicit_names = [a.name for a in self.adapters if a.expose is Expose.MODEL]
        default_names = [a.name for a in self.adapters if a.expose is None]
        num_free = max(0, constants.MAX_EXPOSED_ADAPTERS - len(explicit_names))
        return frozenset(explicit_names + default_names[:num_free])
