# SPDX-License-Identifier: Apache-2.0
"""Weights that are read from a real S3 server without a copy on the disk."""

import asyncio
import importlib.util
import json
import logging
import random
import shutil

import obstore
import pytest
import torch
from obstore.store import S3Store
from safetensors.torch import load_file, save
from support import object_stores
from support.tiny_checkpoints import make_checkpoint

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.weights.loader import load_weights
from quire_engine.weights.tensor_files import TensorFiles
from quire_server.downloads.model_download import download
from quire_server.downloads.remote_weights import can_stream
from quire_sources.factory import SourceOptions
from quire_spec.documents.checkpoint_digest import compute_digest, compute_fingerprint
from quire_spec.documents.remote_weights import REMOTE_WEIGHTS_FILE
from quire_spec.documents.sources import S3Source, SecretRef, Source
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig

KEY, SECRET = "AKIA1", "s3cr3t"
MIXED = {
    "matrix": torch.arange(60, dtype=torch.int32).view(12, 5),
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(4, 3, 2).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", max_shard_size="100KB")


@pytest.fixture(scope="module")
def url(tmp_path_factory, checkpoint):
    files = {f"models/llama 1/{path.name}": path.read_bytes() for path in checkpoint.iterdir()}
    files["mixed/config.json"] = b"{}"
    files["mixed/model.safetensors"] = save(MIXED)
    with object_stores.running_s3(tmp_path_factory.mktemp("s3"), "bucket", files, KEY, SECRET) as url:
        yield url


@pytest.fixture
def put(url):
    store = S3Store(
        "bucket",
        endpoint=url,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    return lambda name, content: obstore.put(store, name, content)


@pytest.fixture
def fetch(tmp_path, url):
    """A function that makes the folder of a model whose weights stay in the bucket."""
    secret = tmp_path / "secrets/store"
    secret.mkdir(parents=True)
    (secret / "AWS_ACCESS_KEY_ID").write_text(KEY)
    (secret / "AWS_SECRET_ACCESS_KEY").write_text(SECRET + "\n")

    def fetch(prefix, name="model"):
        source = Source(s3=S3Source(f"s3://bucket/{prefix}", url, credentialsSecretRef=SecretRef("store")))
        assert can_stream(source)
        asyncio.run(download(source, tmp_path / name, SourceOptions(secret.parent), streams=True))
        return tmp_path / name

    return fetch


def load(folder):
    shape = ModelConfig.load(folder)
    model = get_model_class(shape.architecture)(shape, ParamFactory(torch.float32, torch.device("cpu")))
    load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name)
    return dict(model.tensors())


def test_a_model_is_loaded_from_the_bucket(fetch, checkpoint):
    folder = fetch("models/llama 1")
    assert (
        not list(folder.glob("*.safetensors"))
        and (folder / "tokenizer.json").exists() == (checkpoint / "tokenizer.json").exists()
    )
    loaded = load(folder)
    expected = {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert len(list(checkpoint.glob("*.safetensors"))) > 2 and loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert TensorFiles(folder).num_bytes == sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def test_every_index_reads_what_it_selects(fetch):
    files, rng = TensorFiles(fetch("mixed")), random.Random(0)
    assert set(files.file_by_tensor) == set(MIXED)
    for name, tensor in MIXED.items():
        remote = files.get_slice(name)
        assert remote.get_shape() == list(tensor.shape) and torch.equal(remote[...], tensor)
        for _ in range(12 if tensor.ndim and len(tensor) else 0):
            bounds = [sorted(rng.sample(range(-1, size + 3), 2)) for size in tensor.shape]
            slices = tuple(slice(max(start, 0), stop) for start, stop in bounds)
            row = rng.randrange(-len(tensor), len(tensor))
            for index in (slices, slices[0], slices[:1], row, (row, *slices[1:]), slice(None)):
                assert torch.equal(remote[index], tensor[index]), (name, index)


def test_weights_that_change_are_refused(fetch, put, checkpoint):
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    folder = fetch("models/llama 1")
    digests = compute_digest(folder), compute_fingerprint(folder)
    tensors = load_file(path)
    put(f"models/llama 1/{path.name}", save({name: tensor + 1 for name, tensor in tensors.items()}))
    try:
        with pytest.raises(ConfigError, match=f"{path.name}: changed after the other files of the model"):
            load(folder)
        changed = fetch("models/llama 1", "changed")
        assert load(changed)[next(iter(tensors))].equal(next(iter(tensors.values())) + 1)
        assert not {compute_digest(changed), compute_fingerprint(changed)} & {*digests}
        put(f"models/llama 1/{path.name}", path.read_bytes()[:-100])
        with pytest.raises(ConfigError, match=r"^s3://bucket/models/llama 1/.*Model Streamer failed"):
            load(fetch("models/llama 1", "truncated"))
    finally:
        put(f"models/llama 1/{path.name}", path.read_bytes())
    assert compute_digest(fetch("models/llama 1", "again")) == digests[0]


def test_errors_name_the_cause(fetch, tmp_path, monkeypatch, caplog):
    folder = fetch("mixed")
    (tmp_path / "secrets/store/AWS_SECRET_ACCESS_KEY").write_text("wrong")
    with pytest.raises(
        ConfigError, match=r"^s3://bucket/mixed/model.safetensors: Model Streamer failed: .*credentials"
    ):
        TensorFiles(folder)
    (tmp_path / "secrets/store/AWS_SECRET_ACCESS_KEY").unlink()
    with pytest.raises(ConfigError, match=r"the Secret .*/secrets/store has no AWS_SECRET_ACCESS_KEY; add it"):
        TensorFiles(folder)
    # In a pod, a Secret is one file.
    shutil.rmtree(tmp_path / "secrets/store")
    bundle = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    (tmp_path / "secrets/store").write_text(json.dumps(bundle))
    assert set(TensorFiles(folder).file_by_tensor) == set(MIXED)
    with caplog.at_level(logging.WARNING):
        assert not can_stream(Source(path="/models/llama"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert not can_stream(Source(s3=S3Source("s3://bucket/mixed")))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "a source of the kind path is downloaded",
        "runai-model-streamer-s3 is not installed; pip install 'quire-llm[streamer]'",
    ]
    with pytest.raises(ConfigError, match="weights stay in the bucket, but runai-model-streamer-s3 is not installed"):
        TensorFiles(folder)
    (folder / REMOTE_WEIGHTS_FILE).write_text("[]")
    with pytest.raises(ConfigError, match=REMOTE_WEIGHTS_FILE):
        compute_digest(folder)
