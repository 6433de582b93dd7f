# SPDX-License-Identifier: Apache-2.0
"""`quire validate`: reports every problem in every document, together with its line. Called by main.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_operator.api import crd, yaml_manifest
from quire_operator.api.validation_errors import ABSENT, Problem
from quire_operator.api.yaml_manifest import Manifest, ManifestError
from quire_spec import constants
from quire_spec.errors import ConfigError

_CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of checking one file."""

    file: str
    services: tuple[str, ...] = ()
    """Names of the LLMServices in the file."""
    num_skipped: int = 0
    """Number of documents that were skipped because they are of another kind."""
    findings: tuple[tuple[str, Problem], ...] = ()
    """The problems in the file. Each of them comes with its location (file:line)."""
    read_error: str = ""
    """Reason why the file could not be read. Empty if the file was read."""

    @property
    def ok(self) -> bool:
        """Whether the file is valid."""
        return not self.findings and not self.read_error

    def render_lines(self) -> Iterator[str]:
        """Yield the lines of the text report."""
        if self.read_error:
            yield self.read_error
        for location, problem in self.findings:
            yield f"{location}: {problem}"
        if self.ok:
            skipped = f"; {self.num_skipped} of other kinds not checked" if self.num_skipped else ""
            yield f"{self.file}: ok ({constants.KIND} {', '.join(self.services)}{skipped})"

    def to_json(self) -> dict[str, Any]:
        """Return the report in the form that `-o json` prints."""
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
    """Check all LLMServices in a file. Documents of other kinds are counted, but they are not checked."""
    try:
        documents = yaml_manifest.read_manifests(file)
    except ManifestError as error:
        return ValidationReport(file, read_error=str(error))
    llmservices = [document for document in documents if crd.is_service(document.body)]
    findings = [finding for document in llmservices for finding in _iter_findings(document)]
    if not llmservices:
        other_kinds = ", only documents of other kinds" if documents else ""
        rule = f"the file has no {constants.KIND}{other_kinds}"
        fix = f"add a document with apiVersion: {crd.GROUP_VERSION} and kind: {constants.KIND}"
        findings = [(f"{file}:1", Problem((), ABSENT, rule, fix))]
    services = tuple(_service_name(document.body) for document in llmservices)
    return ValidationReport(file, services, len(documents) - len(llmservices), tuple(findings))


def _iter_findings(document: Manifest) -> Iterator[tuple[str, Problem]]:
    result = crd.validate(document.body)
    problems = (*result.problems, *crd.null_problems(document.body))
    for problem in problems or _iter_model_problems(document.folder, result.body["spec"]):
        yield document.location(problem.path), problem


def _iter_model_problems(folder: Path, spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the reason why a model cannot be served, if it is in a local folder. Other sources are not read."""
    path = spec["model"]["source"].get("path")
    if path is None or not (folder / Path(path).expanduser() / _CONFIG_FILE).is_file():
        return
    # Imported here, because most files name no local folder, and the command must start fast.
    from quire_spec.model.model_config import ModelConfig

    try:
        ModelConfig.load(folder / Path(path).expanduser(), spec.get("engine", {}).get("modelImpl") or "auto")
    except ConfigError as error:
        yield Problem(("spec", "model", "source", "path"), path, str(error), "give a folder with another model")


def _service_name(body: Any) -> str:
    meta = body.get("metadata")
    return str(meta.get("name", "without a name")) if isinstance(meta, dict) else "without a name"
