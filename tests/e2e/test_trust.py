# SPDX-License-Identifier: Apache-2.0
"""spec.trust of a running `quire serve`: a signed model, and adapters that are signed, unsigned and tampered."""

import shutil

import pytest
from support.quire_serve import EXAMPLES, QuireServeProcess, example_document, running_service
from support.signing import Key

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A folder with signed files, its key, and a document that uses them."""
    folder = tmp_path_factory.mktemp("trust")
    key = Key(folder, "release")
    model = shutil.copytree(EXAMPLES / "models/tiny", folder / "model")
    key.sign(model)
    for name in ("signed", "tampered", "prefix/by-name", "prefix/unsigned"):
        shutil.copytree(EXAMPLES / "adapters/sql", folder / name)
        if "unsigned" not in name:
            key.sign(folder / name)
    with (folder / "tampered/adapter_config.json").open("a") as file:
        file.write("\n")
    document = example_document()
    spec = document["spec"]
    spec["model"]["source"]["path"] = str(model)
    spec["adapters"] = [{"name": name, "source": {"path": str(folder / name)}} for name in ("signed", "tampered")]
    spec["adapterSources"] = [{"path": str(folder / "prefix")}]
    spec["trust"] = {"signers": [{"name": "release", "publicKey": key.pem}]}
    return folder, document


def test_only_signed_files_are_used(signed, tmp_path):
    document = signed[1]
    with running_service(document, tmp_path) as service:
        service.wait(lambda: service.adapter("signed")["state"] == "Ready", 30, "ready")
        status = service.status()
        model = status["model_signatures"]["model"]
        assert model["signer"] == "release" and model["digest"].startswith("sha256:")
        assert service.adapter("signed")["signer"] == "release"
        tampered = service.adapter("tampered")
        assert tampered["state"] == "Failed"
        assert "adapter_config.json differs from the signature of 'release'" in tampered["error"]
        body = {"prompt": "x", "max_tokens": 1}
        assert service.request("openai", "/v1/completions", body | {"model": "by-name"}).status == 200
        refused = service.request("openai", "/v1/completions", body | {"model": "unsigned"})
        assert refused.status == 400 and "is not signed" in refused.body["error"]["message"]


def test_a_model_that_was_changed_is_not_served(signed, tmp_path):
    folder, document = signed
    changed = shutil.copytree(folder / "model", tmp_path / "model")
    (changed / "generation_config.json").write_text("{}")
    document["spec"]["model"]["source"]["path"] = str(changed)
    service = QuireServeProcess(document, tmp_path)
    try:
        assert service.process.wait(60) == 2
        assert "generation_config.json differs from the signature of 'release'" in service.log.read_text()
    finally:
        service.assert_nothing_left()
