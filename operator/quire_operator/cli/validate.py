# SPDX-License-Identifier: Apache-2.0
"""`quire validate`: every problem of every document, each with its line. Called by cli.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire_operator.api import crd, yaml_manifest
from quire_operator.api.validation_errors import ABSENT, Problem
from quire_operator.api.yaml_manifest import Manifest, ManifestError
from quire_spec import constants


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What was found in one file."""

    file: str
    services: tuple[str, ...] = ()
    """Names of the LLMServices in it."""
    num_skipped: int = 0
    """Documents of other kinds."""
    findings: tuple[tuple[str, Problem], ...] = ()
    """file:line and what is wrong there."""
    read_error: str = ""
    """Why the file could not be read."""

    @property
    def ok(self) -> bool:
        """Whether the file can be applied as it is."""
        return not self.findings and not self.read_error

    def render_lines(self) -> Iterator[str]:
        """The report for people."""
        if self.read_error:
            yield self.read_error
        for location, problem in self.findings:
            yield f"{location}: {problem}"
        if self.ok:
            skipped = f"; {self.num_skipped} of other kinds not checked" if self.num_skipped else ""
            yield f"{self.file}: ok ({constants.KIND} {', '.join(self.services)}{skipped})"

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        problems = [{"line": int(location.rpartition(":")[2]), **p.to_json()} for location, p in self.findings]
        return {
            "file": self.file,
            "ok": self.ok,
            "services": list(self.services),
            "skipped": self.num_skipped,
            "problems": problems,
            **({"error": self.read_error} if self.read_error else {}),
        }


def validate_file(file: str) -> ValidationReport:
    """Check all LLMServices of a file; documents of other kinds are counted and left to their own tools."""
    try:
        documents = yaml_manifest.read_manifests(file)
    except ManifestError as error:
        return ValidationReport(file, read_error=str(error))
    llmservices = [document for document in documents if crd.is_service(document.body)]
    findings = [finding for document in llmservices for finding in _iter_findings(document)]
    if not llmservices:
        contents = f"{len(documents)} of other kinds" if documents else "nothing at all"
        fix = f"add a document with apiVersion: {crd.GROUP_VERSION} and kind: {constants.KIND}"
        findings = [(f"{file}:1", Problem((), ABSENT, f"no {constants.KIND} in this file, found {contents}", fix))]
    services = tuple(_service_name(document.body) for document in llmservices)
    return ValidationReport(file, services, len(documents) - len(llmservices), tuple(findings))


def _iter_findings(document: Manifest) -> Iterator[tuple[str, Problem]]:
    for problem in crd.validate(document.body).problems:
        yield document.location(problem.path), problem


def _service_name(body: Any) -> str:
    meta = body.get("metadata")
    return str(meta.get("name", "without a name")) if isinstance(meta, dict) else "without a name"
