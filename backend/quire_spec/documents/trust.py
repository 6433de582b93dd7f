# SPDX-License-Identifier: Apache-2.0
"""Whose signatures of models and adapters a pod accepts: spec.trust of an LLMService, and of pod.json."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from quire_spec.documents.field_schema import Rule, schema_field
from quire_spec.errors import ConfigError


class TrustPolicy(StrEnum):
    """What happens to files without a valid signature of a signer."""

    REQUIRE = "Require"
    WARN = "Warn"
    IGNORE = "Ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignerIdentity:
    """An identity to which Sigstore issued the certificate of a signature."""

    subject: str = schema_field(min_length=1, max_length=1024)
    """E-mail address or URI in the certificate, such as that of a workflow on GitHub."""
    issuer: str = schema_field(min_length=8, max_length=1024, pattern="^https?://[^ ]+$")
    """URL of the OpenID Connect provider that confirmed the identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """A signer whose signatures are accepted."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.publicKey) != has(self.identity)",
            "signers must have exactly one of publicKey and identity in each entry; write one entry for each.",
        ),
    )

    name: str = schema_field(min_length=1, max_length=63, pattern="^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$")
    """Name of the signer in the status and in messages."""
    publicKey: str | None = schema_field(None, min_length=1, max_length=4096, pattern="^-----BEGIN PUBLIC KEY-----")
    """Public key in PEM format, of a key on the curve P-256, P-384 or P-521."""
    identity: SignerIdentity | None = schema_field(None)
    """Identity of a keyless signature. The pod reads the root of trust of Sigstore from the internet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustConfig:
    """Signatures that are verified before a model or an adapter is used. A signature is the file model.sig of the
    folder, as the command `model_signing` of the OpenSSF writes it."""

    signers: tuple[Signer, ...] = schema_field(minItems=1, max_items=16, list_type="map", map_keys=("name",))
    """Signers that are accepted. One valid signature is enough."""
    model: TrustPolicy = schema_field(TrustPolicy.REQUIRE)
    """What happens to a base model or a draft model without a valid signature. Require: the pod does not start. Warn:
    the log and the status report it. Ignore: signatures are not read. Default Require."""
    adapters: TrustPolicy = schema_field(TrustPolicy.REQUIRE)
    """What happens to an adapter without a valid signature. Require: the adapter is refused. Warn and Ignore: as for
    model. Default Require."""

    def validate(self, field_path: str) -> None:
        """Raise ConfigError if no signature could be accepted, or if two signers have the same name."""
        if not self.signers:
            raise ConfigError(f"{field_path}.signers: must not be empty; add a signer")
        for i, signer in enumerate(self.signers):
            if (signer.publicKey is None) == (signer.identity is None):
                raise ConfigError(f"{field_path}.signers[{i}]: must have exactly one of publicKey and identity")
        name, count = Counter(signer.name for signer in self.signers).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"{field_path}.signers: {count} entries have the name {name!r}; rename them")
