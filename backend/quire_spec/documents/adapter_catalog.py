# SPDX-License-Identifier: Apache-2.0
"""The catalogue (adapters.json): which adapters a pod should hold, and where each comes from.

Written by the operator and by `quire serve`; carried out by the supervisor. It is the whole truth, not a change: an
adapter that is not in it goes away. A name is an alias; what is loaded is identified by the digest of its content.
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
"""Header of PUT /adapters: the digest of the catalogue that is to be replaced, even where that has a higher generation.

For whoever has seen what the pod works on and knows that it is no later state of the same service but one that never
was, as far as the cluster remembers: the service was restored from a backup, or made again.
"""


class Expose(StrEnum):
    """How clients reach an adapter; `lora_name` on the base works for every adapter."""

    MODEL = "Model"
    """A server model of its own name."""
    PARAMETER = "Parameter"
    """Only as `lora_name` on the base model."""


@dataclass(frozen=True, slots=True)
class SecretRef:
    """A mounted Secret, by name; its keys are files in a folder of that name."""

    name: str
    key: str | None = None


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A hub repository."""

    repo: str
    revision: str | None = None
    """Branch, tag or commit; None is the hub's default."""
    tokenSecretRef: SecretRef | None = None


@dataclass(frozen=True, slots=True)
class S3Source:
    """A prefix in an S3-compatible bucket."""

    uri: str
    """s3://bucket/prefix"""
    endpoint: str | None = None
    region: str | None = None
    credentialsSecretRef: SecretRef | None = None
    """Keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""


@dataclass(frozen=True, slots=True)
class HttpSource:
    """A folder served over HTTP(S): adapter_config.json and adapter_model.safetensors under one URL."""

    url: str
    sha256: str | None = None
    """Digest that adapter_model.safetensors must have."""
    headersSecretRef: SecretRef | None = None
    """Each key of the Secret is a header."""


@dataclass(frozen=True, slots=True)
class PvcSource:
    """A folder on a mounted PersistentVolumeClaim."""

    claimName: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Exactly one place that files come from."""

    huggingFace: HuggingFaceSource | None = None
    s3: S3Source | None = None
    http: HttpSource | None = None
    pvc: PvcSource | None = None
    path: str | None = None
    """A folder of this machine; for `quire serve` only."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError unless exactly one place is given."""
        present_kinds = [kind for kind in self.__slots__ if getattr(self, kind) is not None]
        if len(present_kinds) != 1:
            present_text = ", ".join(present_kinds) or "none"
            raise ConfigError(
                f"{field_path}: exactly one of {', '.join(self.__slots__)} is needed, found {present_text}"
            )

    @property
    def secret_ref(self) -> SecretRef | None:
        """What its reader is let in by."""
        if self.huggingFace is not None:
            return self.huggingFace.tokenSecretRef
        if self.s3 is not None:
            return self.s3.credentialsSecretRef
        return self.http.headersSecretRef if self.http is not None else None


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an adapter may take of each pod; a request beyond it is refused with UNAVAILABLE."""

    maxConcurrentRequests: int | None = None
    """Requests that are open, queued ones included; None: any number."""
    maxTokensPerSecond: int | None = None
    """Tokens of prompts and outputs together, on average; None: any number. Ten seconds' worth can be saved up."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError for a limit that lets nothing through."""
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{field_path}.{name}: {value} is less than 1; leave it out for no limit")


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter of the catalogue."""

    name: str
    source: Source
    pinned: bool = False
    """Keep it in a device slot."""
    expose: Expose | None = None
    """None: a model of its own while there are fewer than 64."""
    limits: AdapterLimits | None = None


@dataclass(frozen=True, slots=True)
class CatalogVersion:
    """By what a catalogue is known without its adapters."""

    generation: int
    digest: str
    """sha256:... of the adapters, in their order; the generation is not in it."""


@dataclass(frozen=True, slots=True)
class AdapterCatalog:
    """The adapters a pod should hold."""

    generation: int = 0
    """Rises with every change; a document with a lower one is stale, unless it says what it replaces (REPLACES)."""
    adapters: tuple[AdapterSpec, ...] = ()

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed adapters.json.

        Raises:
            ConfigError: unknown keys, wrong types, a name twice, or a source that is not exactly one place.
        """
        catalogue = from_json(cls, data)
        if len(catalogue.adapters) > MAX_ADAPTERS:
            raise ConfigError(f"adapters: {len(catalogue.adapters)} entries; at most {MAX_ADAPTERS} are allowed")
        seen: set[str] = set()
        for i, adapter in enumerate(catalogue.adapters):
            constants.check_model_name(adapter.name, f"adapters[{i}].name")
            adapter.source.validate(f"adapters[{i}].source")
            if adapter.limits is not None:
                adapter.limits.validate(f"adapters[{i}].limits")
            if adapter.name in seen:
                raise ConfigError(f"adapters[{i}].name: {adapter.name!r} is there twice")
            seen.add(adapter.name)
        return catalogue

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read adapters.json from `path`; raises ConfigError as `from_json` does, also for text that is not JSON."""
        return cls.from_json(read_json(path))

    def to_json(self) -> dict[str, Any]:
        """Every field with its value, fit for `from_json`."""
        document: dict[str, Any] = to_json(self)
        return document

    @property
    def version(self) -> CatalogVersion:
        """Generation and digest. What is not set is not in the digest: a field that comes later changes none."""
        text = json.dumps(drop_nulls(to_json(self.adapters)), sort_keys=True, separators=(",", ":"))
        return CatalogVersion(self.generation, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")

    def exposed_names(self) -> frozenset[str]:
        """Names that get a server model: those that ask for it, and the first of the others up to the limit."""
        explicit_names = [a.name for a in self.adapters if a.expose is Expose.MODEL]
        default_names = [a.name for a in self.adapters if a.expose is None]
        num_free = max(0, constants.MAX_EXPOSED_ADAPTERS - len(explicit_names))
        return frozenset(explicit_names + default_names[:num_free])
