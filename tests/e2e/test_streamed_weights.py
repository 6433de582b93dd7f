# SPDX-License-Identifier: Apache-2.0
"""`quire serve --load-format runai_streamer` with a model in a real S3 server."""

import pytest
from support import object_stores
from support.quire_serve import EXAMPLES, example_document, running_service

pytestmark = pytest.mark.server

BODY = {"model": "tales", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.0}


def test_a_model_in_a_bucket_is_served_without_a_copy_of_its_weights(service, tmp_path):
    files = {f"tiny/{path.name}": path.read_bytes() for path in (EXAMPLES / "models/tiny").iterdir() if path.is_file()}
    document = example_document()
    secret = tmp_path / "secrets/store"
    secret.mkdir(parents=True)
    (secret / "AWS_ACCESS_KEY_ID").write_text("AKIA1")
    (secret / "AWS_SECRET_ACCESS_KEY").write_text("s3cr3t")
    options = f"--secrets-dir={secret.parent}", "--load-format=runai_streamer"
    with object_stores.running_s3(tmp_path, "models", files, "AKIA1", "s3cr3t") as url:
        s3 = {"uri": "s3://models/tiny", "endpoint": url, "credentialsSecretRef": {"name": "store"}}
        document["spec"]["model"]["source"] = {"s3": s3}
        with running_service(document, tmp_path, *options) as streamed:
            answer = streamed.request("openai", "/v1/completions", BODY)
            assert answer.status == 200 and streamed.log.read_text().count("model downloaded folder=") == 1
            assert answer.body["choices"] == service.request("openai", "/v1/completions", BODY).body["choices"]
            (folder,) = (tmp_path / "cache/models").iterdir()
            assert (folder / "remote-weights.json").exists() and not list(folder.glob("*.safetensors"))
