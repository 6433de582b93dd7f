# SPDX-License-Identifier: Apache-2.0
"""Adapter catalog (adapters.json).

It lists the adapters that a pod should serve, and the source of each adapter's files.

The operator and `quire serve` write the catalog; the supervisor applies it. The catalog is the complete desired state:
the supervisor removes an adapter that is not in the catalog. A name is an alias of an adapter; a digest identifies the
adapter's content.
"""

import fnmatch
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

from quire_spec import constants
from quire_spec.dataclass_json import drop_nulls, from_json, read_json, to_json
from quire_spec.documents.adapter_sum import MAX_PARTS, parse_sum
from quire_spec.documents.field_schema import Rule, schema_field
from quire_spec.documents.sources import (
    PREFIX_KINDS,
    AzureSource,
    GcsSource,
    HttpSource,
    HuggingFaceSource,
    OciSource,
    PvcSource,
    S3Source,
    SecretRef,
    Source,
    exactly_one,
    name_list,
)
from quire_spec.errors import ConfigError

MAX_ADAPTERS = 4096
MAX_SUMS = 256
MAX_ADAPTER_SOURCES = 16
MAX_VERSIONS = 8
VERSION = "@"
"""Separates the name of an adapter from that of a version. No name of either contains it."""
HELD = "@@"
"""Separates the name of an adapter from the role of a held content. No name of an adapter contains it."""
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
class HuggingFaceOrganization:
    """The repositories of a user or an organization on the hub."""

    organization: str = schema_field(min_length=1, max_length=96, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """User or organization. The adapter NAME is the repository organization/NAME."""
    tokenSecretRef: SecretRef | None = schema_field(None)
    """Secret with the token for gated or private repositories. Default: the model's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPrefix:
    """A place in which every adapter has a folder or repository of its name. Exactly one kind is
    set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one(
            PREFIX_KINDS,
            f"adapterSources must have exactly one of {name_list(PREFIX_KINDS)} in each entry; write one entry for "
            "each place.",
        ),
    )

    huggingFace: HuggingFaceOrganization | None = schema_field(None)
    """A user or an organization on the Hugging Face hub."""
    s3: S3Source | None = schema_field(None)
    """A folder in a bucket of Amazon S3 or of an S3-compatible store. The adapter NAME is the folder uri/NAME."""
    gcs: GcsSource | None = schema_field(None)
    """A folder in a bucket of Google Cloud Storage. The adapter NAME is the folder uri/NAME."""
    azure: AzureSource | None = schema_field(None)
    """A folder in a container of Azure Blob Storage. The adapter NAME is the folder uri/NAME."""
    oci: OciSource | None = schema_field(None)
    """Repositories of an OCI registry. The adapter NAME is the artifact reference/NAME, with the tag of reference."""
    http: HttpSource | None = schema_field(None, without=("sha256",))
    """A folder on a web server. The adapter NAME is the folder url/NAME."""
    pvc: PvcSource | None = schema_field(None)
    """A folder on a PersistentVolumeClaim in the same namespace. The adapter NAME is its subfolder NAME. Links in it
    must not lead out of it."""
    path: str | None = schema_field(None, min_length=1, max_length=1024)
    """A folder on the machine that runs `quire serve`, relative to the LLMService file. The operator rejects it; use
    pvc in a cluster."""
    allow: str = schema_field("*", min_length=1, max_length=63, pattern=r"^[-A-Za-z0-9._*?\[\]!]+$")
    """Names that are looked up here: a name, or a pattern with *, ? and [abc]. Default *."""

    def allows(self, name: str) -> bool:
        """Return whether an adapter of this name is looked up here."""
        return allows_name(self.allow, name)

    def source_of(self, name: str) -> Source:
        """Return the source of the adapter `name`, which is a model name and therefore no path."""
        if self.huggingFace is not None:
            organization, token = self.huggingFace.organization, self.huggingFace.tokenSecretRef
            return Source(huggingFace=HuggingFaceSource(f"{organization}/{name}", tokenSecretRef=token))
        for kind in ("s3", "gcs", "azure"):
            if (bucket := getattr(self, kind)) is not None:
                return Source(**{kind: replace(bucket, uri=f"{bucket.uri.rstrip('/')}/{name}")})
        if self.oci is not None:
            return Source(oci=replace(self.oci, reference=_join_reference(self.oci.reference, name)))
        if self.http is not None:
            return Source(http=replace(self.http, url=_join_url(self.http.url, name)))
        if self.pvc is not None:
            return Source(pvc=replace(self.pvc, path=f"{self.pvc.path}/{name}".lstrip("/")))
        return Source(path=f"{self.path}/{name}")

    @property
    def source(self) -> Source:
        """The place itself, with its Secret."""
        if self.huggingFace is not None:
            hub = self.huggingFace
            return Source(huggingFace=HuggingFaceSource(hub.organization, tokenSecretRef=hub.tokenSecretRef))
        return Source(**{kind: getattr(self, kind) for kind in PREFIX_KINDS if kind != "huggingFace"})

    def validate(self, field_path: str) -> None:
        """Raise ConfigError unless exactly one place is given, and without a checksum."""
        if len(present := [kind for kind in PREFIX_KINDS if getattr(self, kind) is not None]) != 1:
            given = ", ".join(present) or "none"
            raise ConfigError(f"{field_path}: exactly one of {', '.join(PREFIX_KINDS)} is required, got {given}")
        if self.oci is not None and "@" in self.oci.reference:
            raise ConfigError(f"{field_path}.oci.reference: one digest cannot fit all adapters; remove it")
        if self.http is not None and self.http.sha256 is not None:
            raise ConfigError(f"{field_path}.http.sha256: one checksum cannot fit all adapters; remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource(AdapterPrefix):
    """A place in which a pod looks up the names of adapters that are not in the catalog."""

    maxAdapters: int = 256
    """Maximum number of adapters from this source at a time. The least recently used one leaves first."""
    maxBytes: int = 10 * 2**30
    """Maximum size of their files in the cache."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError if the place is not valid, or if no adapter could ever be found."""
        AdapterPrefix.validate(self, field_path)
        for name in ("maxAdapters", "maxBytes"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{field_path}.{name}: must be at least 1, got {value}")


def allows_name(pattern: str, name: str) -> bool:
    """Return whether an adapter source with this `allow` looks up a name. A name that is not a model name could be a
    path, and is never looked up."""
    is_model_name = len(name) <= constants.MAX_MODEL_NAME and constants.MODEL_NAME.fullmatch(name) is not None
    return is_model_name and fnmatch.fnmatchcase(name, pattern)


def _join_reference(reference: str, name: str) -> str:
    """Return the reference of a repository below that of `reference`. The tag stays at the end."""
    folder, slash, last = reference.rpartition("/")
    repository, colon, tag = last.partition(":")
    return f"{folder}{slash}{repository}/{name}{colon}{tag}"


def _join_url(url: str, name: str) -> str:
    """Return the URL of a folder below `url`. A query, which may contain a signature, stays at the end."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of an adapter. They apply on each pod separately. A request that exceeds a limit is rejected with
    UNAVAILABLE."""

    maxConcurrentRequests: int | None = schema_field(None, minimum=1, maximum=1048576)
    """Maximum number of open requests, running and waiting. Default: unlimited."""
    maxTokensPerSecond: int | None = schema_field(None, minimum=1, maximum=1000000000)
    """Average rate of prompt and output tokens together. A burst can use up to ten seconds of unused tokens. Default:
    unlimited."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError if a limit is so low that every request would be rejected."""
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{field_path}.{name}: must be at least 1, got {value}; omit it for no limit")


class OnNoEffect(StrEnum):
    """Policy for adapters that do not change the outputs of the effect probe."""

    REFUSE = "Refuse"
    WARN = "Warn"


@dataclass(frozen=True, slots=True)
class Canary:
    """A prompt whose answer shows that an adapter works. Every pod runs it before the adapter serves requests."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.expect) != has(self.completion)",
            "canary must have one of expect and completion; keep the one that fits the prompt.",
        ),
        Rule(
            "has(self.completion) == has(self.minLogprob)",
            "minLogprob must be set with completion, and only with it; add the lowest mean log probability that is "
            "acceptable.",
        ),
        Rule(
            "!has(self.maxTokens) || has(self.expect)",
            "maxTokens must be set only with expect; remove it.",
        ),
    )

    prompt: str = schema_field(min_length=1, max_length=8192)
    """Text of the prompt. It is not rendered with a chat template."""
    expect: str | None = schema_field(None, min_length=1, max_length=4096)
    """The greedy output must start with this text. White space before it is ignored. Default: completion is used."""
    maxTokens: int | None = schema_field(None, minimum=1, maximum=1024)
    """Number of tokens that are generated to compare them with expect. Default: four more than expect has."""
    completion: str | None = schema_field(None, min_length=1, max_length=8192)
    """A text that continues the prompt. Default: expect is used."""
    minLogprob: float | None = schema_field(None, minimum=-1000, maximum=0)
    """Lowest mean log probability of the tokens of completion that is accepted. Default: none, for expect."""
    timeoutSeconds: int = schema_field(60, minimum=1, maximum=600)
    """Maximum time in seconds. An adapter whose canary takes longer is not used; the canary is tried again later.
    Default 60."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError unless the canary has exactly one kind of expectation."""
        if (self.expect is None) == (self.completion is None):
            raise ConfigError(f"{field_path}: must have one of expect and completion")
        if (self.completion is None) != (self.minLogprob is None):
            raise ConfigError(f"{field_path}.minLogprob: must be set with completion, and only with it")


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """What an adapter can answer with: its files, and the canary that they must pass."""

    source: Source = schema_field()
    canary: Canary | None = schema_field(None)


_NOT_IN_AN_IMAGE = Rule(
    "!has(self.source) || !has(self.source.image)",
    "source must not be of kind image for an adapter, because adapters change without new pods; push the files to a "
    "registry with oras, and use oci.",
)


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One of several contents of an adapter that serve at the same time."""

    RULES: ClassVar[tuple[Rule, ...]] = (_NOT_IN_AN_IMAGE,)

    name: str = schema_field(min_length=1, max_length=32, pattern="^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$")
    """Name of the version. Requests for ADAPTER@VERSION get this version."""
    source: Source = schema_field()
    """Location of the files, as for an adapter."""
    weight: int = schema_field(1, minimum=0, maximum=10000)
    """Share of the adapter's requests, relative to the sum of all weights. Default 1. With 0, the version is loaded and
    gets only requests that name it."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter of the catalog."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        _NOT_IN_AN_IMAGE,
        Rule(
            "has(self.source) != has(self.versions)",
            "source must be set without versions, and only then; keep one of them.",
        ),
        Rule(
            "!has(self.versions) || self.versions.exists(version, version.weight > 0)",
            "versions must not all have the weight 0; raise the weight of one.",
        ),
    )

    name: str = schema_field(min_length=1, max_length=63, pattern="^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$")
    """Model name that clients use. It must be unique and different from servedName."""
    source: Source = schema_field(Source())
    """Location of the files: set exactly one field. Weights must be in safetensors format. Code in a model repository
    is never executed. Default: those of the first version."""
    versions: tuple[AdapterVersion, ...] | None = schema_field(
        None, min_items=1, max_items=MAX_VERSIONS, list_type="map", map_keys=("name",)
    )
    """Several contents instead of one source. Each request gets one of them, by their weights: all requests with the
    same header x-session-id, else with the same `user`, get the same version. Default: source is the only one."""
    pinned: bool = schema_field(False)
    """Keep the adapter in an adapter slot, so that its requests never wait for a load. Default false: slots contain the
    most recently used adapters."""
    expose: Expose | None = schema_field(None)
    """How clients select the adapter. The request parameter `lora_name` on the base model always works. With Model, the
    server also has a model with the adapter's name, which needs a process of about 22 MiB in each pod. With Parameter,
    there is no such model. Default: Model for the first 64 adapters, Parameter for all others."""
    limits: AdapterLimits | None = schema_field(None)
    """Limits of the adapter in each replica. A request above a limit gets the error UNAVAILABLE, whose message contains
    the delay before a retry."""
    canary: Canary | None = schema_field(None)
    """A prompt that each pod runs before it uses the adapter or a new content of it. An adapter that fails it is not
    used. Default: none."""
    candidate: AdapterContent | None = schema_field(None)
    """The content that replaces `source` when all pods have verified it. A pod loads and checks it, and does not use it
    for requests. Only the operator sets it."""
    previous: AdapterContent | None = schema_field(None)
    """The content that `source` has replaced. A pod keeps it loaded for a rollback. Only the operator sets it."""

    @property
    def content(self) -> AdapterContent:
        """The content that requests use."""
        return AdapterContent(self.source, self.canary)

    def with_source(self) -> Self:
        """Return the adapter with the source of its first version, if it has versions instead of a source."""
        return replace(self, source=self.versions[0].source) if self.versions else self

    def versioned(self) -> Iterator["AdapterSpec"]:
        """Yield the versions as adapters with names of their own."""
        for version in self.versions or ():
            name = f"{self.name}{VERSION}{version.name}"
            yield AdapterSpec(name, version.source, limits=self.limits, canary=self.canary)

    def held(self) -> Iterator["AdapterSpec"]:
        """Yield the contents that a pod holds beside the one that it uses, as adapters with names of their own."""
        for role, content in (("candidate", self.candidate), ("previous", self.previous)):
            if content is not None:
                yield AdapterSpec(f"{self.name}{HELD}{role}", content.source, canary=content.canary)


@dataclass(frozen=True, slots=True)
class SumPart:
    """An adapter of a weighted sum."""

    adapter: str = schema_field(min_length=1, max_length=63, pattern="^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$")
    """Name of an adapter of the service."""
    weight: float = schema_field(minimum=-100, maximum=100)
    """Factor by which the output of the adapter is multiplied."""


@dataclass(frozen=True, slots=True)
class AdapterSum:
    """A name for a weighted sum of adapters."""

    name: str = schema_field(min_length=1, max_length=63, pattern="^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$")
    """Model name that clients use. If an adapter has the same name, the name stands for the adapter."""
    parts: tuple[SumPart, ...] = schema_field(min_items=1, max_items=MAX_PARTS, list_type="map", map_keys=("adapter",))
    """The adapters and their weights."""

    @property
    def text(self) -> str:
        """The sum as in a request: `a:0.7,b:0.3`."""
        return ",".join(f"{part.adapter}:{part.weight!r}" for part in self.parts)


@dataclass(frozen=True, slots=True)
class CatalogVersion:
    """Identifies a catalog by its generation and the digest of its adapters."""

    generation: int
    digest: str
    """sha256:... of the lists of adapters and sources. Their order counts; the generation does not."""


@dataclass(frozen=True, slots=True)
class AdapterCatalog:
    """The adapters that a pod should serve."""

    generation: int = 0
    """A number that increases with every change of the catalog. A pod rejects a catalog as stale if its generation is
    lower than that of the pod's current catalog. The header REPLACES_HEADER overrides this check."""
    adapters: tuple[AdapterSpec, ...] = ()
    onNoEffect: OnNoEffect | None = None
    """What happens to adapters without an effect. None: as with Warn."""
    sources: tuple[AdapterSource, ...] = ()
    """Places in which names that are not in `adapters` are looked up, in this order."""
    sums: tuple[AdapterSum, ...] = ()
    """Names of weighted sums of adapters."""

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read a parsed adapters.json.

        Raises:
            ConfigError: a key is unknown, a value has the wrong type, a name occurs twice, or a source does not have
                exactly one field.
        """
        catalog = from_json(cls, data)
        catalog = replace(catalog, adapters=tuple(adapter.with_source() for adapter in catalog.adapters))
        if len(catalog.sources) > MAX_ADAPTER_SOURCES:
            raise ConfigError(f"sources: at most {MAX_ADAPTER_SOURCES} entries are allowed, got {len(catalog.sources)}")
        for i, source in enumerate(catalog.sources):
            source.validate(f"sources[{i}]")
        if len(catalog.adapters) > MAX_ADAPTERS:
            raise ConfigError(f"adapters: at most {MAX_ADAPTERS} entries are allowed, got {len(catalog.adapters)}")
        seen: set[str] = set()
        for i, adapter in enumerate(catalog.adapters):
            constants.check_model_name(adapter.name, f"adapters[{i}].name")
            for j, version in enumerate(adapter.versions or ()):
                constants.check_model_name(version.name, f"adapters[{i}].versions[{j}].name")
                version.source.validate(f"adapters[{i}].versions[{j}].source")
            if adapter.versions and len({version.name for version in adapter.versions}) < len(adapter.versions):
                raise ConfigError(f"adapters[{i}].versions: two have the same name; rename one")
            if adapter.versions and not any(version.weight > 0 for version in adapter.versions):
                raise ConfigError(f"adapters[{i}].versions: all have the weight 0; raise the weight of one")
            if adapter.source == Source():
                raise ConfigError(f"adapters[{i}].source: missing; add a source, or versions")
            adapter.source.validate(f"adapters[{i}].source")
            if adapter.limits is not None:
                adapter.limits.validate(f"adapters[{i}].limits")
            for held in adapter.held():
                held.source.validate(f"adapters[{i}].{held.name.rpartition(HELD)[2]}.source")
            if adapter.canary is not None:
                adapter.canary.validate(f"adapters[{i}].canary")
            if adapter.name in seen:
                raise ConfigError(f"adapters[{i}].name: {adapter.name!r} is a duplicate; adapter names must be unique")
            seen.add(adapter.name)
        if len(catalog.sums) > MAX_SUMS:
            raise ConfigError(f"sums: at most {MAX_SUMS} entries are allowed, got {len(catalog.sums)}")
        for i, adapter_sum in enumerate(catalog.sums):
            constants.check_model_name(adapter_sum.name, f"sums[{i}].name")
            if not parse_sum(adapter_sum.text):
                raise ConfigError(f"sums[{i}].parts: must not be empty; add an adapter")
        return catalog

    @property
    def sum_by_name(self) -> dict[constants.AdapterName, str]:
        """The sums that have a name of their own, as in a request."""
        taken = {adapter.name for adapter in self.adapters}
        return {constants.AdapterName(each.name): each.text for each in self.sums if each.name not in taken}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read adapters.json from `path`. Raises ConfigError if the text is not JSON, or if `from_json` rejects the
        document."""
        return cls.from_json(read_json(path))

    def to_json(self) -> dict[str, Any]:
        """Return all fields in the form that `from_json` reads. Without `sources` and `sums`, pods of earlier releases
        can read the document, too."""
        document: dict[str, Any] = to_json(self)
        for name in ("sources", "sums"):
            if not document[name]:
                del document[name]
        return document

    @property
    def version(self) -> CatalogVersion:
        """Generation and digest. The digest ignores fields that are not set. Therefore, a new optional field does not
        change the digest."""
        content = to_json(self.adapters) if not self.sources else to_json([self.adapters, self.sources])
        content = drop_nulls(content)
        if self.onNoEffect is not None:
            content = [*content, self.onNoEffect.value]
        if self.sums:
            content = [*content, to_json(self.sums)]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return CatalogVersion(self.generation, f"sha256:{hashlib.sha256(text.encode()).hexdigest()}")

    def finds(self, name: str, source: Source) -> bool:
        """Return whether `sources` lead from a name to this source of its files."""
        return any(prefix.allows(name) and prefix.source_of(name) == source for prefix in self.sources)

    @property
    def content_sources(self) -> list[Source]:
        """The sources of all contents of adapters, with candidates and previous ones."""
        return [adapter.source for entry in self.adapters for adapter in (entry, *entry.versioned(), *entry.held())]

    def exposed_names(self) -> frozenset[str]:
        """Return the names of the adapters that get a server model.

        All adapters with `Model` get one. Adapters whose `expose` is None also get one, in the order of the catalog,
        until there are 64 in total.
        """
        explicit_names = [a.name for a in self.adapters if a.expose is Expose.MODEL]
        default_names = [a.name for a in self.adapters if a.expose is None]
        num_free = max(0, constants.MAX_EXPOSED_ADAPTERS - len(explicit_names))
        return frozenset(explicit_names + default_names[:num_free])
