# SPDX-License-Identifier: Apache-2.0
"""Every object that the operator makes, taken by a real API server as a dry run of server-side apply.

Written for a current Kubernetes: what an older server does not have is skipped by name, and nothing is translated.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.cluster import ROOT, ApiError, UnknownKind

from quire_operator.api.quantity import to_bytes

GOLDEN = ROOT / "tests/operator/golden"
NEWER_FIELDS = {"Job": (1, 25, "podFailurePolicy")}
"""Fields that an older server refuses to apply, by kind."""


def golden() -> list:
    return [
        pytest.param(manifest, id=f"{file.stem}-{manifest['kind']}-{manifest['metadata']['name']}")
        for file in sorted(GOLDEN.glob("*.yaml"))
        for manifest in yaml.safe_load_all(file.read_text())
    ]


def rendered(*flags: str) -> list[dict]:
    argv = [str(Path(sys.executable).with_name("quire")), "render", "-o", "json", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def accepted(cluster, manifest, namespace) -> dict:
    """The object as the server would store it."""
    manifest = {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}
    kind = manifest["kind"]
    if kind in NEWER_FIELDS and NEWER_FIELDS[kind][2] in manifest["spec"]:
        cluster.require_version(*NEWER_FIELDS[kind])
    return cluster.apply(manifest, dry_run=True)


def agrees(wanted, found, path="") -> list[str]:
    """Return the paths of applied fields that the response lacks, because the API server dropped them."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [p for k, v in wanted.items() for p in agrees(v, found.get(k), f"{path}.{k}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [p for i, (w, f) in enumerate(zip(wanted, found, strict=True)) for p in agrees(w, f, f"{path}[{i}]")]
    empty = wanted in ({}, [], "", 0, False, None) and found in ({}, [], "", 0, False, None)
    return [] if wanted == found or empty or same_size(wanted, found) else [f"{path}: {wanted!r} became {found!r}"]


def same_size(wanted, found) -> bool:
    """The server writes quantities in its own way: 1024Mi is 1Gi."""
    sizes = [isinstance(text, str) and re.fullmatch(r"\d+(Ki|Mi|Gi|Ti)", text) for text in (wanted, found)]
    return all(sizes) and to_bytes(wanted) == to_bytes(found)


@pytest.mark.parametrize("manifest", golden())
def test_golden_objects_are_taken_whole(cluster, namespace, manifest):
    try:
        stored = accepted(cluster, manifest, namespace)
    except UnknownKind as absent:
        pytest.skip(str(absent))
    assert agrees(manifest.get("spec"), stored.get("spec")) == []


def test_a_field_that_does_not_exist_would_be_noticed(cluster, namespace):
    (manifest, *_) = [p.values[0] for p in golden() if p.values[0]["kind"] == "Deployment"]
    manifest = json.loads(json.dumps(manifest))
    manifest["spec"]["template"]["spec"]["activeDeadlineSecond"] = 3
    with pytest.raises(ApiError, match="activeDeadlineSecond"):
        accepted(cluster, manifest, namespace)


def test_what_the_command_renders_is_taken(cluster, namespace):
    """The command's own output, not a file of what it once was."""
    manifests = rendered(f"--file={ROOT}/examples/cpu-cluster.yaml", f"--model-config={ROOT}/examples/models/tiny")
    taken = []
    for manifest in manifests:
        try:
            accepted(cluster, manifest, namespace)
        except UnknownKind:
            continue  # those are skipped by name above
        taken.append(manifest["kind"])
    assert {"Deployment", "Service", "ConfigMap", "Secret", "ServiceAccount", "NetworkPolicy"} <= set(taken)
