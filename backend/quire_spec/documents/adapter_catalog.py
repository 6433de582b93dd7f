# SPDX-License-Identifier: Apache-2.0
"""Adapter catalog (adapters.json): the adapters that a pod should serve, and the source of each.

The operator and `quire serve` write the catalog; the supervisor applies it. The catalog is the complete desired state:
the supervisor removes an adapter that the catalog lacks. A name is an alias; a digest identifies adapter content.
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
"""Header of PUT /adapters that contains the digest of the catalog to replace. With this header the pod accepts a lower
generation.

The operator sets the header if the pod's catalog has a generation that the service never had. A service that was
restored from a backup or created again starts with a lower generation than its pods have.
"""


class Expose(StrEnum):
    """How clients select an adapter. The parameter `lora_name` of the base model selects any adapter."""

    MODEL = "Model"
    """The adapter is also a server model with the adapter's name."""
    PARAMETER = "Parameter"
    """Only the parameter `lora_name` of the base model selects the adapter."""


@dataclass(frozen=True, slots=True)
class SecretRef:
    """Name of a mounted Secret. The keys of the Secret are files in a folder of that name."""

    name: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A hub repository."""

    repo: str
    revision: str | None = None
    """Branch, tag or commit; None selects the hub's default."""
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
    """SHA-256 that adapter_model.safetensors must have."""
    headersSecretRef: SecretRef | None = None
    """Secret whose keys and values are sent as HTTP headers."""


@dataclass(frozen=True, slots=True)
class PvcSource:
    """A folder on a mounted PersistentVolumeClaim."""

    claimName: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Location of an adapter's or model's files; exactly one field is set."""

    huggingFace: HuggingFaceSource | None = None
    s3: S3Source | None = None
    http: HttpSource | None = None
    pvc: PvcSource | None = None
    path: str | None = None
    """A local folder; for `quire serve` only."""

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
        """The Secret with the credentials for this source, if any."""
        if self.huggingFace is not None:
            return self.huggingFace.tokenSecretRef
        if self.s3 is not None:
            return self.s3.credentialsSecretRef
        return self.http.headersSecretRef if self.http is not None else None


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of an adapter on each pod. A request that exceeds a limit is rejected with UNAVAILABLE."""

    maxConcurrentRequests: int | None = None
    """Maximum number of running and queued requests; None: no limit."""
    maxTokensPerSecond: int | None = None
    """Maximum average rate of prompt and output tokens together; None: no limit. A burst can use the tokens of ten
    seconds at once."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError for a limit that rejects every request."""
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{field_path}.{name}: must be at least 1, got {value}; omit it for no limit")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter of the catalog."""

    name: str
    source: Source
    pinned: bool = False
    """True keeps the adapter in an adapter slot on the device."""
    expose: Expose | None = None
    """None: `Model` until 64 adapters of the catalog have a server model; `Parameter` for all further adapters."""
    limits: AdapterLimits | None = None


@dataclass(frozen=True, slots=True)
class CatalogVersion:
    """Identity of a catalog: its generation and the digest of its adapters."""

    generation: int
    digest: str
    """sha256:... of the adapters in their order, without the generation."""


@dataclass(frozen=True, slots=True)
class AdapterCatalog:
    """The adapters that a pod should serve."""

    generation: int = 0
    """Number that increases with every change. The pod rejects a catalog with a lower generation as stale. The header
    REPLACES_HEADER overrides this check."""
    adapters: tuple[AdapterSpec, ...] = ()

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed adapters.json.

        Raises:
            ConfigError: unknown keys, wrong types, a duplicate name, or a source without exactly one field.
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
        """Generation and digest. The digest omits unset fields, so a new optional field does not change the digest."""
        text = json.dumps(drop_nulls(to_json(self.adapters)), sort_keys=True, separators=(",", ":"))
        return CatalogVersion(self.generation, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")

    def exposed_names(self) -> frozenset[str]:
        """Return the names of adapters with a server model: all adapters with `Model`, then adapters without a setting,
        in order, up to 64 in total."""
        explicit_names = [a.name for a in self.adapters if a.expose is Expose.MODEL]
        default_names = [a.name for a in self.adapters if a.expose is None]
        num_free = max(0, constants.MAX_EXPOSED_ADAPTERS - len(explicit_names))
        return frozenset(explicit_names + default_names[:num_free])
