# SPDX-License-Identifier: Apache-2.0
"""The result of parsing a stored LLMService, which is its desired state or an error. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService, queue_of
from quire_operator.api.spec_defaults import SpecDefaults
from quire_operator.controller.object_cache import ServiceKey
from quire_operator.controller.template_revision import pods_digest
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParsedService:
    """The spec of one generation, after it was parsed."""

    key: ServiceKey
    uid: str
    generation: int
    service: LLMService | None
    pods_digest: str
    """Result of template_revision.pods_digest."""
    spec_error: str
    """Reason why the spec is invalid. Empty if it is valid."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any], defaults: SpecDefaults) -> Self:
        """Parse and validate a stored LLMService, and add the operator's defaults. The digest does not cover them.

        Validation is necessary because the API server checks an object only when it is written. The CRD can have got
        new rules since.
        """
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        validation = crd.validate(body)
        if validation.problems:
            return cls(key, *uid_and_generation(body), None, "", "\n".join(map(str, validation.problems)))
        try:
            service = defaults.service(validation.body)
        except ConfigError as error:
            return cls(key, *uid_and_generation(body), None, "", str(error))
        return cls(key, *uid_and_generation(body), service, pods_digest(validation.body, service), "")

    @property
    def version(self) -> tuple[str, int, str]:
        """The result of `version_of`."""
        return self.uid, self.generation, "" if self.service is None else self.service.queue

    @property
    def adapter_catalog(self) -> AdapterCatalog | None:
        """Return the catalog of the spec. If the spec is invalid or paused, return None, and nothing is pushed."""
        if self.service is None or self.service.spec.paused:
            return None
        return self.service.build_catalog()


def version_of(body: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return what changes if a stored LLMService must be parsed again: a new queue does not change its generation."""
    return *uid_and_generation(body), queue_of(body)


def uid_and_generation(body: Mapping[str, Any]) -> tuple[str, int]:
    """Return the uid and the generation of a stored LLMService."""
    return body["metadata"]["uid"], body["metadata"].get("generation", 0)
