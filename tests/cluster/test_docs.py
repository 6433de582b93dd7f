# SPDX-License-Identifier: Apache-2.0
"""Every Kubernetes object in the documents and examples, taken by a real API server as a dry run."""

import pytest
import yaml
from support.cluster import ROOT
from support.doc_snippets import DOCS, code_blocks

EXAMPLES = [path for folder in ("examples", "examples/kind") for path in sorted((ROOT / folder).glob("*.yaml"))]


def objects():
    texts = [(f"{doc.name}-{i}", text) for doc in DOCS for i, text in enumerate(code_blocks(doc, "yaml"), 1)]
    texts += [(path.name, path.read_text()) for path in EXAMPLES]
    for name, text in texts:
        for body in yaml.safe_load_all(text):
            if body and "kind" in body:
                yield pytest.param(body, id=f"{name}-{body['kind']}")


@pytest.mark.parametrize("body", list(objects()))
def test_it_is_taken(cluster, namespace, body):
    meta = dict(body["metadata"])
    # A volume belongs to no namespace; everything else goes into the test's own.
    meta.pop("namespace", None)
    stored = cluster.apply({**body, "metadata": meta}, namespace, dry_run=True)
    assert stored["metadata"]["name"] == meta["name"]
