# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes objects and the Python code of the documents and examples, at a real API server."""

import os
import subprocess
import sys

import pytest
import yaml
from support.cluster import ROOT
from support.controller_harness import ControllerHarness
from support.doc_snippets import DOCS, code_blocks
from support.fake_pods import FakePods

EXAMPLES = [path for folder in ("examples", "examples/kind") for path in sorted((ROOT / folder).glob("*.yaml"))]


def objects():
    texts = [(f"{doc.name}-{i}", text) for doc in DOCS for i, text in enumerate(code_blocks(doc, "yaml"), 1)]
    texts += [(path.name, path.read_text()) for path in EXAMPLES]
    for name, text in texts:
        for body in yaml.safe_load_all(text):
            # A document without metadata is the configuration of a program.
            if body and {"kind", "metadata"} <= body.keys():
                yield pytest.param(body, id=f"{name}-{body['kind']}")


@pytest.mark.parametrize("body", list(objects()))
def test_objects_are_accepted(cluster, namespace, body):
    # A volume belongs to no namespace; every other object is applied in the namespace of the test.
    meta = {key: value for key, value in body["metadata"].items() if key != "namespace"}
    stored = cluster.apply({**body, "metadata": meta}, namespace, dry_run=True)
    assert stored["metadata"]["name"] == meta["name"]


def test_python_code_creates_watches_and_scales_a_service(cluster, namespace, kubelet):
    code = "\n".join(code_blocks(ROOT / "docs/kubernetes-python.md", "python"))
    with FakePods(kubelet), ControllerHarness(cluster, namespace):
        done = subprocess.run(
            [sys.executable, "-c", code.replace('"default"', f'"{namespace}"')],
            env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "['tales']" in lines and lines[-1] == "2", done.stdout
