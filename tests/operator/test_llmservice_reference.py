# SPDX-License-Identifier: Apache-2.0
"""docs/llmservice-reference.md is generated, current and complete. What it says of restarts is tested in
test_no_dead_fields.py."""

import re
import subprocess
import sys

import generated
from support.openapi import CRD, OPENAPI, ROOT, walk

REFERENCE = (ROOT / "docs/llmservice-reference.md").read_text()


def test_generated_files_are_current():
    done = subprocess.run(
        [sys.executable, "hack/generated.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_field_and_every_rule_is_in_the_reference():
    rows = set(re.findall(r"^\| `([^`]+)` \|", REFERENCE, re.MULTILINE))
    for path, node in walk(OPENAPI["properties"]["spec"]):
        if path and path[-1] not in ("[]", "*"):
            assert path[-1] in {row.split(".")[-1] for row in rows} | set(re.findall(r"## spec\.(\w+)", REFERENCE)), (
                path
            )
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"] in REFERENCE, path
    for name in OPENAPI["properties"]["status"]["properties"]:
        assert name in rows


def test_a_table_tells_bounds_defaults_and_restarts():
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (yes|no) \|", REFERENCE, re.M)}
    assert rows["maxLoaded"][0::2] == ("0 to 256", "yes")
    assert rows["maxLoaded"][1].startswith("8, whatever")
    assert rows["maxSurge"][2] == "no"
    assert rows["kvCacheMemory"][0] == "quantity"
    assert "| `huggingFace.repo` | text, 1 to 192 | required |" in REFERENCE


def test_a_changed_definition_is_noticed():
    changed = dict(CRD)
    changed["spec"] = {**CRD["spec"], "versions": [{**CRD["spec"]["versions"][0], "additionalPrinterColumns": []}]}
    assert generated.reference(changed) != REFERENCE
