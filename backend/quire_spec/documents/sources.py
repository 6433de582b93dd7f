# SPDX-License-Identifier: Apache-2.0
"""Sources: where the files of a model or of an adapter come from.

`spec.model.source`, the adapters of an LLMService and the adapter catalog contain them; quire_sources reads them.
"""

from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    """A hub repository."""

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
class HttpSource:
    """A folder served over HTTP(S): adapter_config.json and adapter_model.safetensors under one URL."""

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
class Source:
    """Where the files of an adapter or a model come from. Exactly one field is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "[has(self.huggingFace), has(self.s3), has(self.http), has(self.pvc), has(self.path)].exists_one(given, "
            "given)",
            "source must have exactly one of huggingFace, s3, http, pvc and path; keep the one that contains the "
            "files.",
        ),
    )

    huggingFace: HuggingFaceSource | None = schema_field(None)
    """A repository on the Hugging Face hub."""
    s3: S3Source | None = schema_field(None)
    """A folder in a bucket of Amazon S3 or of an S3-compatible store."""
    http: HttpSource | None = schema_field(None)
    """A folder on a web server. It has the same file names as a hub repository."""
    pvc: PvcSource | None = schema_field(None)
    """A folder on a PersistentVolumeClaim in the same namespace. Pods mount the claim read-only and read the files on
    it."""
    path: str | None = schema_field(None, min_length=1, max_length=1024)
    """A folder on the machine that runs `quire serve`, relative to the LLMService file. The operator rejects it,
    because nodes do not have that folder; use pvc in a cluster."""

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
