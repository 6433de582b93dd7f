# SPDX-License-Identifier: Apache-2.0
"""Wanted: what the spec of a stored LLMService says, as far as it can be read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_operator.api import crd
from quire_operator.api.llmservice import LLMService
from quire_operator.controller.template_revision import spec_digest
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParsedService:
    """What a spec says, as far as it can be read."""

    uid: str
    generation: int
    service: LLMService | None
    spec_digest: str
    """pinned.spec_digest."""
    spec_error: str
    """Why it cannot be read; empty: it can."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """What a stored LLMService says; an old API server knows no rules and stores what breaks them."""
        uid, generation = uid_and_generation(body)
        validation = crd.validate(body)
        if validation.problems:
            return cls(uid, generation, None, "", "\n".join(map(str, validation.problems)))
        try:
            service = LLMService.from_body(validation.body)
        except ConfigError as error:
            return cls(uid, generation, None, "", str(error))
        return cls(uid, generation, service, spec_digest(validation.body, service), "")

    @property
    def adapter_catalog(self) -> AdapterCatalog | None:
        """What pods are told: the spec's adapters, and of a spec that cannot be used or is paused nothing new."""
        if self.service is None or self.service.spec.paused:
            return None
        return self.service.build_catalog()


def uid_and_generation(body: Mapping[str, Any]) -> tuple[str, int]:
    """uid and generation of a stored LLMService."""
    return body["metadata"]["uid"], body["metadata"].get("generation", 0)
