# SPDX-License-Identifier: Apache-2.0
"""Every object that the operator makes, taken by a real API server as a dry run of server-side apply."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import disaggregated_set
from support.cluster import ROOT

from quire_operator.controller.apply.compare import is_up_to_date
from quire_operator.render.context import OPTIONAL_KINDS

GOLDEN = ROOT / "tests/operator/golden"


@pytest.fixture(scope="module", autouse=True)
def optional_kinds(cluster):
    """The real CRDs of other projects."""
    with contextlib.ExitStack() as stack:
        for kind in (*OPTIONAL_KINDS, "LeaderWorkerSet"):
            stack.enter_context(cluster.optional_kind(kind))
        cluster.apply_crd(disaggregated_set.CRD)
        yield
        cluster.delete_crd(disaggregated_set.CRD["metadata"]["name"])


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
    return cluster.apply(manifest, dry_run=True)


@pytest.mark.parametrize("manifest", golden())
def test_golden_objects_are_accepted_without_changes(cluster, namespace, manifest):
    stored = accepted(cluster, manifest, namespace)
    assert is_up_to_date(manifest.get("spec"), stored.get("spec")), stored


OFFLOADING = {"kvCacheOffloading": {"memory": "1Gi"}}


@pytest.mark.parametrize(
    ("engine", "more", "workload"),
    [
        ({}, {}, "Deployment"),
        ({"pipelineParallelSize": 2}, {}, "LeaderWorkerSet"),
        (OFFLOADING, {"disaggregation": {"prefill": {}, "decode": {"replicas": 2}}}, "DisaggregatedSet"),
    ],
)
def test_rendered_objects_are_accepted(cluster, namespace, tmp_path, engine, more, workload):
    """The command's own output, not a file of what it once was."""
    service = yaml.safe_load((ROOT / "examples/cpu-cluster.yaml").read_text())
    service["spec"] |= more
    service["spec"]["engine"] |= engine
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(service))
    manifests = rendered(f"--file={file}", f"--model-config={ROOT}/examples/models/tiny")
    for manifest in manifests:
        stored = accepted(cluster, manifest, namespace)
        assert is_up_to_date(manifest.get("spec"), stored.get("spec")), stored
    kinds = {manifest["kind"] for manifest in manifests}
    assert {workload, "Service", "ConfigMap", "Secret", "ServiceAccount", "NetworkPolicy"} <= kinds
