# SPDX-License-Identifier: Apache-2.0
"""Sources: where the files of a model or of an adapter come from.

`spec.model.source`, the adapters of an LLMService and the adapter catalog contain them; quire_sources reads them.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from quire_spec.documents.field_schema import OBJECT_NAME, Restarts, Rule, schema_field
from quire_spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SecretRef:
    """Reference to a mounted Secret. The Secret is mounted in a folder that has its name. Each key of the Secret is a
    file in that folder."""

    name: str = schema_field(**OBJECT_NAME)
    """Name of a Secret in the same namespace."""
    key: str | None = schema_field(None, crd_default="token", min_length=1, max_length=253, pattern="^[-._a-zA-Z0-9]+$")
    """Key in the Secret that contains the token. Default token."""


class ImagePullPolicy(StrEnum):
    """When a node pulls an image, as in Kubernetes."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class SourceKind(Protocol):
    """What a source can be. Each kind names the field of its Secret."""

    SECRET_FIELD: ClassVar[str]
    """Field that refers to the Secret; "" if the kind has no Secret."""
    SECRET_KEYS: ClassVar[tuple[str, ...]]
    """Keys of the Secret that the kind reads. Empty: the key that the field names, or all keys."""


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A hub repository."""

    SECRET_FIELD: ClassVar = "tokenSecretRef"
    SECRET_KEYS: ClassVar[tuple[str, ...]] = ()

    repo: str = schema_field(
        min_length=1, max_length=192, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$"
    )
    """Repository ID, organization/name."""
    revision: str | None = schema_field(None, min_length=1, max_length=255, pattern="^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    """Branch, tag or commit. Default: the hub's default branch. Set a commit in production, because a branch can change
    before a pod restarts."""
    tokenSecretRef: SecretRef | None = schema_field(None)
    """Secret with the token for a gated or private repository. Default: no token for the model, and the model's token
    for an adapter or a draft model."""


@dataclass(frozen=True, slots=True)
class S3Source:
    """A prefix in an S3-compatible bucket."""

    SECRET_FIELD: ClassVar = "credentialsSecretRef"
    SECRET_KEYS: ClassVar[tuple[str, ...]] = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

    uri: str = schema_field(min_length=6, max_length=1024, pattern="^s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/.*)?$")
    """s3://bucket/folder. All files in it belong to the model or adapter."""
    endpoint: str | None = schema_field(None, min_length=8, max_length=1024, pattern="^https?://[^ ]+$")
    """URL of the store. Default: Amazon's endpoint for the region."""
    region: str | None = schema_field(None, min_length=1, max_length=63, pattern="^[a-z0-9-]+$")
    """Region of the bucket. Default us-east-1. Most S3-compatible stores ignore it."""
    credentialsSecretRef: SecretRef | None = schema_field(None, without=("key",))
    """Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and optionally AWS_SESSION_TOKEN. Default:
    none; the pod first uses its own identity, then anonymous access."""


@dataclass(frozen=True, slots=True)
class GcsSource:
    """A prefix in a bucket of Google Cloud Storage."""

    SECRET_FIELD: ClassVar = "credentialsSecretRef"
    SECRET_KEYS: ClassVar[tuple[str, ...]] = ("key.json",)

    uri: str = schema_field(min_length=8, max_length=1024, pattern="^gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/.*)?$")
    """gs://bucket/folder. All files in it belong to the model or adapter."""
    endpoint: str | None = schema_field(None, min_length=8, max_length=1024, pattern="^https?://[^ ]+$")
    """URL of the store. Default: https://storage.googleapis.com."""
    credentialsSecretRef: SecretRef | None = schema_field(None, without=("key",))
    """Secret with the key key.json, which holds the JSON key of a service account. Default: none; the pod first uses
    its own identity (workload identity federation), then anonymous access."""


@dataclass(frozen=True, slots=True)
class AzureSource:
    """A prefix in a container of Azure Blob Storage."""

    SECRET_FIELD: ClassVar = "credentialsSecretRef"
    SECRET_KEYS: ClassVar[tuple[str, ...]] = (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_CLIENT_ID",
        "AZURE_CLIENT_SECRET",
        "AZURE_TENANT_ID",
    )

    uri: str = schema_field(min_length=7, max_length=1024, pattern="^az://[a-z0-9$][a-z0-9-]{1,61}[a-z0-9](/.*)?$")
    """az://container/folder. All files in it belong to the model or adapter."""
    account: str = schema_field(min_length=3, max_length=24, pattern="^[a-z0-9]+$")
    """Name of the storage account."""
    endpoint: str | None = schema_field(None, min_length=8, max_length=1024, pattern="^https?://[^ ]+$")
    """URL of the account. Default: https://ACCOUNT.blob.core.windows.net."""
    credentialsSecretRef: SecretRef | None = schema_field(None, without=("key",))
    """Secret with the key AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN, or with the keys AZURE_CLIENT_ID,
    AZURE_CLIENT_SECRET and AZURE_TENANT_ID. Default: none; the pod first uses its own identity (workload identity),
    then anonymous access."""


@dataclass(frozen=True, slots=True)
class OciSource:
    """An artifact in an OCI registry. Each file is a layer with its name, as `oras push` and the ModelPack tools write
    it."""

    SECRET_FIELD: ClassVar = "pullSecretRef"
    SECRET_KEYS: ClassVar[tuple[str, ...]] = (".dockerconfigjson",)

    reference: str = schema_field(
        min_length=3,
        max_length=1024,
        pattern="^[a-zA-Z0-9][a-zA-Z0-9.-]*(:[0-9]{1,5})?/[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
        "(@sha256:[0-9a-f]{64})?$",
    )
    """registry/repository:tag, or registry/repository@sha256:digest. Default tag: latest. Give a digest in production,
    because a tag can change before a pod restarts."""
    insecure: bool = schema_field(False)
    """Use HTTP instead of HTTPS, for a registry inside the cluster. Default false."""
    pullSecretRef: SecretRef | None = schema_field(None, without=("key",))
    """Secret of type kubernetes.io/dockerconfigjson, as imagePullSecrets have. Default: anonymous access."""


@dataclass(frozen=True, slots=True)
class HttpSource:
    """A folder served over HTTP(S): adapter_config.json and adapter_model.safetensors under one URL."""

    SECRET_FIELD: ClassVar = "headersSecretRef"
    SECRET_KEYS: ClassVar[tuple[str, ...]] = ()

    url: str = schema_field(min_length=8, max_length=2048, pattern="^https?://[^ ]+$")
    """URL of the folder."""
    sha256: str | None = schema_field(None, min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the weights, in hexadecimal. The file is adapter_model.safetensors for an adapter and
    model.safetensors for a model. A file with another checksum is rejected. Default: not checked. Set it when you do
    not control the URL."""
    headersSecretRef: SecretRef | None = schema_field(None, without=("key",))
    """Secret whose entries are sent as HTTP headers, such as Authorization. Default: none."""


@dataclass(frozen=True, slots=True)
class PvcSource:
    """A folder on a mounted PersistentVolumeClaim."""

    SECRET_FIELD: ClassVar = ""
    SECRET_KEYS: ClassVar[tuple[str, ...]] = ()
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            # Cheaper for an API server than a regular expression.
            "!self.path.startsWith('/') && !self.path.startsWith('../') && !self.path.endsWith('/..') && "
            "!self.path.contains('/../') && self.path != '..'",
            "path must stay inside the volume, without a leading / and without ..; give the folder relative to the "
            "root of the volume.",
        ),
    )

    claimName: str = schema_field(**OBJECT_NAME, restarts=Restarts.YES)
    """Name of the claim."""
    path: str = schema_field("", max_length=1024)
    """Folder, relative to the root of the volume. Default: the root."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A folder in a container image that a node pulls and mounts as an image volume."""

    SECRET_FIELD: ClassVar = ""
    SECRET_KEYS: ClassVar[tuple[str, ...]] = ()

    reference: str = schema_field(min_length=1, max_length=1024, pattern="^[A-Za-z0-9][-A-Za-z0-9._/:@]*$")
    """The image, as in a container. spec.runtime.imagePullSecrets are used for it."""
    pullPolicy: ImagePullPolicy | None = schema_field(None)
    """When the node pulls the image. Default: Always for the tag latest, IfNotPresent for all others."""
    path: str = schema_field("", max_length=1024, pattern="^([^/.][^/]*(/[^/.][^/]*)*)?$")
    """Folder in the image. Default: the root."""


def exactly_one(kinds: tuple[str, ...], message: str) -> Rule:
    """Return the rule that exactly one of the kinds is set."""
    given = ", ".join(f"has(self.{kind})" for kind in kinds)
    return Rule(f"[{given}].exists_one(given, given)", message)


def name_list(kinds: tuple[str, ...]) -> str:
    """Return `a, b and c`."""
    return f"{', '.join(kinds[:-1])} and {kinds[-1]}"


PREFIX_KINDS = ("huggingFace", "s3", "gcs", "azure", "oci", "http", "pvc", "path")
"""The kinds of a place of many adapters."""
SOURCE_KINDS = ("huggingFace", "s3", "gcs", "azure", "oci", "http", "pvc", "image", "path")
"""The fields of a source, of which one is set."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the files of an adapter or a model come from. Exactly one field is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one(
            SOURCE_KINDS,
            f"source must have exactly one of {name_list(SOURCE_KINDS)}; keep the one that contains the files.",
        ),
    )

    huggingFace: HuggingFaceSource | None = schema_field(None)
    """A repository on the Hugging Face hub."""
    s3: S3Source | None = schema_field(None)
    """A folder in a bucket of Amazon S3 or of an S3-compatible store."""
    gcs: GcsSource | None = schema_field(None)
    """A folder in a bucket of Google Cloud Storage."""
    azure: AzureSource | None = schema_field(None)
    """A folder in a container of Azure Blob Storage."""
    oci: OciSource | None = schema_field(None)
    """An artifact in an OCI registry."""
    http: HttpSource | None = schema_field(None)
    """A folder on a web server. It has the same file names as a hub repository."""
    pvc: PvcSource | None = schema_field(None)
    """A folder on a PersistentVolumeClaim in the same namespace. Pods mount the claim read-only and read the files on
    it."""
    image: ImageSource | None = schema_field(None)
    """A folder in a container image, for the model and the draft model. The node pulls the image and mounts it, as
    volumes of the kind image in a pod. Needs a container runtime that has them (containerd 2.1, CRI-O 1.33)."""
    path: str | None = schema_field(None, min_length=1, max_length=1024)
    """A folder on the machine that runs `quire serve`, relative to the LLMService file. The operator rejects it,
    because nodes do not have that folder; use pvc in a cluster."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError unless exactly one field is set."""
        present_kinds = [kind for kind in SOURCE_KINDS if getattr(self, kind) is not None]
        if len(present_kinds) != 1:
            present_text = ", ".join(present_kinds) or "none"
            raise ConfigError(f"{field_path}: exactly one of {', '.join(SOURCE_KINDS)} is required, got {present_text}")

    @property
    def kind(self) -> SourceKind | None:
        """The kind that is set; None for a path, and if none is set."""
        return next((kind for name in SOURCE_KINDS if name != "path" and (kind := getattr(self, name))), None)

    @property
    def kind_name(self) -> str:
        """Name of the field that is set; "" if none is."""
        return next((name for name in SOURCE_KINDS if getattr(self, name) is not None), "")

    @property
    def is_mounted(self) -> bool:
        """Whether pods read the files in place, on a volume."""
        return self.pvc is not None or self.image is not None

    @property
    def volume_name(self) -> str:
        """The claim or the image whose files are read in place, for messages; "" if there is none."""
        if self.pvc is not None:
            return f"claim {self.pvc.claimName!r}"
        return "" if self.image is None else f"image {self.image.reference!r}"

    @property
    def volume_path(self) -> str:
        """The folder on the volume."""
        volume = self.pvc or self.image
        return "" if volume is None else volume.path

    @property
    def bucket(self) -> S3Source | GcsSource | AzureSource | None:
        """The prefix in an object store, if this is one."""
        return self.s3 or self.gcs or self.azure

    @property
    def secret_ref(self) -> SecretRef | None:
        """The Secret that contains the credentials for this source; None if the source has no Secret."""
        kind = self.kind
        return getattr(kind, kind.SECRET_FIELD) if kind is not None and kind.SECRET_FIELD else None

    @property
    def secret_field(self) -> tuple[str, ...]:
        """Path of the field that refers to the Secret; empty if the kind has no Secret."""
        kind = self.kind
        return (self.kind_name, kind.SECRET_FIELD) if kind is not None and kind.SECRET_FIELD else ()

    @property
    def secret_keys(self) -> list[SecretRef]:
        """The keys of the Secret that the source reads. The key of a SecretRef is None if it reads all of them."""
        kind, ref = self.kind, self.secret_ref
        if kind is None or ref is None:
            return []
        return [SecretRef(ref.name, key) for key in kind.SECRET_KEYS] or [ref]


STORE_SCHEMES = ("s3://", "gs://", "az://", "oci://")
"""URLs that name files, and never a server of models."""
_AZURE_URL = re.compile(r"https://([a-z0-9]{3,24})\.blob\.core\.windows\.net/([^?#]+)")
_LOCAL_REGISTRY = re.compile(r"(localhost|127(\.[0-9]+){3})[:/]")


def source_from_url(url: str) -> Source | None:
    """Return the source that a URL names: s3://, gs://, oci://, http:// or https://. The URL of a container of Azure
    Blob Storage is a source of the kind azure. Return None if the text is not such a URL.

    Raises:
        ConfigError: an az:// URL, which has no account.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return None
    match scheme:
        case "s3":
            return Source(s3=S3Source(url))
        case "gs":
            return Source(gcs=GcsSource(url))
        case "oci":
            # As for Docker and oras, a registry on this machine has no certificate.
            return Source(oci=OciSource(rest, insecure=_LOCAL_REGISTRY.match(rest) is not None))
        case "az":
            raise ConfigError(f"{url!r} does not name an account; write https://ACCOUNT.blob.core.windows.net/{rest}")
        case "http" | "https":
            if match := _AZURE_URL.fullmatch(url):
                return Source(azure=AzureSource(f"az://{match[2]}", match[1]))
            return Source(http=HttpSource(url))
    return None
