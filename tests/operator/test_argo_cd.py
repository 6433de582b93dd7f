# SPDX-License-Identifier: Apache-2.0
"""The health check for Argo CD in docs/gpu-cluster.md, run by Lua on statuses of services."""

import lupa
import pytest
import yaml
from support.doc_snippets import ROOT, code_blocks

from quire_operator.api import crd


def health(status, generation=2):
    """Return what the script says about a service with this status."""
    blocks = [text for text in code_blocks(ROOT / "docs/gpu-cluster.md", "yaml") if "argocd-cm" in text]
    ((name, script),) = yaml.safe_load(blocks[0])["data"].items()
    assert name == f"resource.customizations.health.{crd.GROUP_VERSION.partition('/')[0]}_LLMService"
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    body = {"metadata": {"generation": generation}, **({} if status is None else {"status": status})}
    lua.globals().obj = lua.table_from(body, recursive=True)
    return dict(lua.execute(script))


def status(ready, reason, progressing="False", observed=2):
    conditions = [
        {"type": "ConfigValid", "status": "True", "reason": "Accepted"},
        {"type": "Progressing", "status": progressing, "reason": "Updating"},
        {"type": "Ready", "status": ready, "reason": reason, "message": "pod a"},
    ]
    return {"observedGeneration": observed, "conditions": conditions}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, "Progressing"),
        ({}, "Progressing"),
        (status("True", "Ready", observed=1), "Progressing"),
        (status("True", "Ready"), "Healthy"),
        (status("False", "Updating", progressing="True"), "Progressing"),
        (status("False", "ModelDownloading", progressing="True"), "Progressing"),
        (status("False", "PodsNotReady"), "Degraded"),
        (status("False", "Invalid"), "Degraded"),
        (status("False", "ScaledToZero"), "Suspended"),
        (status("Unknown", "Paused"), "Suspended"),
        (status("Unknown", "PodsUnreachable"), "Unknown"),
    ],
)
def test_health(found, expected):
    answer = health(found)
    assert answer["status"] == expected
    if found and found.get("observedGeneration") == 2:
        assert answer["message"].endswith(": pod a")
