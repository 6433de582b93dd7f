# SPDX-License-Identifier: Apache-2.0
"""`quire validate`: every problem of every document, each with its line. Called by cli.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire_operator import crd, manifest, pod_fields
from quire_operator.errors import ABSENT, Problem, in_order
from quire_operator.manifest import Manifest, ManifestError
from quire_spec import constants


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in one file."""

    file: str
    services: tuple[str, ...] = ()
    """Names of the LLMServices in it."""
    num_skipped: int = 0
    """Documents of other kinds."""
    findings: tuple[tuple[str, Problem], ...] = ()
    """file:line and what is wrong there."""
    unreadable: str = ""
    """Why the file could not be read."""

    @property
    def ok(self) -> bool:
        """Whether the file can be applied as it is."""
        return not self.findings and not self.unreadable

    def lines(self) -> Iterator[str]:
        """The report for people."""
        if self.unreadable:
            yield self.unreadable
        for place, problem in self.findings:
            yield f"{place}: {problem}"
        if self.ok:
            skipped = f"; {self.num_skipped} of other kinds not checked" if self.num_skipped else ""
            yield f"{self.file}: ok ({constants.KIND} {', '.join(self.services)}{skipped})"

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        problems = [{"line": int(place.rpartition(":")[2]), **p.to_json()} for place, p in self.findings]
        return {
            "file": self.file,
            "ok": self.ok,
            "services": list(self.services),
            "skipped": self.num_skipped,
            "problems": problems,
            **({"error": self.unreadable} if self.unreadable else {}),
        }


def report(file: str) -> Report:
    """Check all LLMServices of a file; documents of other kinds are counted and left to their own tools."""
    try:
        documents = manifest.read(file)
    except ManifestError as error:
        return Report(file, unreadable=str(error))
    ours = [document for document in documents if crd.is_service(document.body)]
    findings = [finding for document in ours for finding in _findings(document)]
    if not ours:
        what = f"{len(documents)} of other kinds" if documents else "nothing at all"
        fix = f"add a document with apiVersion: {crd.API} and kind: {constants.KIND}"
        findings = [(f"{file}:1", Problem((), ABSENT, f"no {constants.KIND} in this file, found {what}", fix))]
    services = tuple(_name(document.body) for document in ours)
    return Report(file, services, len(documents) - len(ours), tuple(findings))


def _findings(document: Manifest) -> Iterator[tuple[str, Problem]]:
    for problem in in_order([*crd.check(document.body).problems, *pod_fields.problems(document.body)]):
        yield document.place(problem.path), problem


def _name(body: Any) -> str:
    meta = body.get("metadata")
    return str(meta.get("name", "without a name")) if isinstance(meta, dict) else "without a name"
