# SPDX-License-Identifier: Apache-2.0
"""Reading model facts for a plan: a few kilobytes of files with gigabytes, from a folder or any remote source.

The readers themselves are tested in tests/sources.
"""

import json
from functools import partial
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_sources import FakeHttpServer, FakeHub, start_server
from support.planning import LLAMA_8B

from quire_operator.api.engine_spec import SpeculativeConfigSpec
from quire_operator.plan.checkpoint import CheckpointInfo, SizeSource
from quire_operator.plan.checkpoint_files import (
    read_checkpoint,
    read_local_checkpoint,
    read_source_checkpoint,
    without_values,
)
from quire_operator.plan.draft_info import DraftInfo
from quire_sources.factory import SourceFactory, SourceOptions
from quire_spec.documents.sources import HttpSource, HuggingFaceSource, SecretRef, Source
from quire_spec.errors import AccessDenied, ConfigError, NotFound
from quire_spec.model import checkpoint_documents

PARSE = CheckpointInfo.from_files
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADER = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "data_offsets": [0, 5_000_000]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + b"\0" * 5_000_000
CONFIG = json.dumps(LLAMA_8B).encode()
INDEX = json.dumps({"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}).encode()
SHARDED = {"config.json": CONFIG, "model.safetensors.index.json": INDEX}
SINGLE = {"config.json": CONFIG, "model.safetensors": WEIGHTS}
HEADER_RANGES = ["bytes=0-7", f"bytes=8-{8 + len(HEADER) - 1}"]
SECRETS = {
    "hub": {"token": "hf_s3cr3t\n", "ca.crt": "a\nb\n"},
    "s3": {"AWS_ACCESS_KEY_ID": "AKIA1\n", "AWS_SECRET_ACCESS_KEY": "s3cr3t\n"},
    "web": {"X-Key": "s3cr3t\n"},
}


def at(prefix, content):
    return {f"{prefix}/{name}": data for name, data in content.items()}


async def load(source, **options):
    async with SourceFactory(SourceOptions(**options), lambda ref: SECRETS[ref.name]) as sources:
        return await read_checkpoint(sources.open_reader(source), PARSE)


async def test_reads_the_header_of_a_gguf_file(tmp_path):
    writer, file = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3"), tmp_path / "m.gguf"
    for name, value in (("block_count", 1), ("embedding_length", 64), ("feed_forward_length", 96)):
        writer.add_uint32(f"qwen3.{name}", value)
    writer.add_head_count(4)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((32, 68), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = await read_local_checkpoint(file, PARSE)
    assert (found.shape.architecture, found.shape.vocab_size, found.weights_bytes) == ("Qwen3ForCausalLM", 32, 32 * 68)
    assert found.shape.tie_word_embeddings and found.shape.quantization.method == "gguf"
    file.write_bytes(file.read_bytes().replace(b"block_count", b"block_xxxxx"))
    with pytest.raises(ConfigError, match=r"m.gguf: qwen3.block_count is missing; convert"):
        await read_local_checkpoint(file, PARSE)


@pytest.fixture(autouse=True)
def _no_ambient_identity(monkeypatch):
    for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def web():
    files = FakeHttpServer(at("/models/llama", SINGLE) | at("/sharded", SHARDED))
    server = await start_server(files.handle)
    files.url = str(server.make_url("/")).rstrip("/")
    yield files
    await server.close()


def http(url):
    return Source(http=HttpSource(url, None, SecretRef("web")))


async def test_reads_the_header_and_not_the_weights_over_http(web):
    checkpoint = await read_source_checkpoint(http(f"{web.url}/models/llama/"), lambda ref: SECRETS[ref.name], PARSE)
    assert (checkpoint.weights_bytes, checkpoint.size_source) == (5_000_000, SizeSource.HEADER)
    assert web.ranges()[-2:] == HEADER_RANGES
    assert {request.headers["X-Key"] for request in web.requests} == {"s3cr3t"}


async def test_prefers_the_index_to_the_header(web):
    checkpoint = await load(http(f"{web.url}/sharded"))
    assert (checkpoint.weights_bytes, checkpoint.size_source) == (16_060_522_496, SizeSource.INDEX)
    assert not [path for path in web.paths() if path.endswith(".safetensors")]


async def test_reads_from_the_hub_at_one_commit():
    files = FakeHttpServer(at("", SINGLE))
    cdn = await start_server(files.handle)
    hub = FakeHub(files, "org/llama", COMMIT, "hf_s3cr3t", f"http://localhost:{cdn.port}")
    server = await start_server(hub.handle)
    endpoint = str(server.make_url("/")).rstrip("/")
    for revision in (None, "main", COMMIT):
        source = Source(huggingFace=HuggingFaceSource("org/llama", revision, SecretRef("hub")))
        checkpoint = await load(source, hub_endpoint=endpoint)
        assert (checkpoint.weights_bytes, checkpoint.size_source) == (5_000_000, SizeSource.HEADER)
    assert not [r for r in files.requests if "Authorization" in r.headers], "the token is for the hub alone"
    assert files.ranges() == HEADER_RANGES * 3
    assert {r.path.split("/")[4] for r in hub.requests if r.method == "GET"} == {COMMIT}
    with pytest.raises(NotFound, match=r"'v9'.*has no such revision"):
        await load(Source(huggingFace=HuggingFaceSource("org/llama", "v9", SecretRef("hub"))), hub_endpoint=endpoint)
    with pytest.raises(AccessDenied, match="secret 'hub': has no key 'other'"):
        ref = SecretRef("hub", "other")
        await load(Source(huggingFace=HuggingFaceSource("org/llama", None, ref)), hub_endpoint=endpoint)
    await server.close()
    await cdn.close()


def folder(path, content):
    path.mkdir(exist_ok=True)
    for name, data in content.items():
        (path / name).write_bytes(data)
    return path


async def test_reads_a_local_folder_or_config_file(tmp_path):
    assert (await read_local_checkpoint(folder(tmp_path, SINGLE), PARSE)).size_source is SizeSource.HEADER
    assert (await read_local_checkpoint(tmp_path / "config.json", PARSE)).size_source is SizeSource.SHAPE
    assert (await read_local_checkpoint(folder(tmp_path, SHARDED), PARSE)).size_source is SizeSource.INDEX
    # As in huggingface_hub's cache, where a snapshot consists of links to ../../blobs.
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to("../config.json")
    assert (await read_local_checkpoint(tmp_path / "snapshot", PARSE)).size_source is SizeSource.SHAPE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "config.json: does not exist"),
        ({"config.json": b"{"}, "config.json: not JSON: "),
        ({"config.json": b"[" * 100_000}, "config.json: not JSON: "),
        ({"config.json": b"{}"}, "architecture 'none' is not supported"),
        (SINGLE | {"model.safetensors": b"PK"}, "does not begin like a safetensors file"),
        (SINGLE | {"model.safetensors": WEIGHTS[:20]}, "its header is not JSON"),
        (SHARDED | {"model.safetensors.index.json": b"{}"}, "must be the size of all tensors in bytes, got None"),
    ],
)
async def test_rejects_invalid_files(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message) as error:
        await read_local_checkpoint(folder(tmp_path / "m", content), PARSE)
    assert str(error.value).count(str(tmp_path / "m")) == 1


SECRET = "INTERNAL-SECRET-42"
PLACES = st.lists(
    st.sampled_from([*LLAMA_8B, "quantization_config", "rope_scaling", "rope_parameters"]), min_size=1, max_size=3
)
VALUES = [SECRET, [SECRET], {"rope_type": SECRET}, {"quant_method": SECRET}, {SECRET: 1}, {"a": {SECRET: [SECRET]}}]
VALUES += [[[SECRET] * 9], {"quant_method": "gptq", "bits": SECRET}, {"rope_type": "yarn", "factor": SECRET}]


@given(places=PLACES, value=st.sampled_from(VALUES), method=st.sampled_from(["", "eagle3", "medusa", "draft_model"]))
@settings(max_examples=300, deadline=None)
def test_errors_about_a_server_of_another_person_quote_no_value(places, value, method):
    config = LLAMA_8B | dict.fromkeys(places, value)
    parse = PARSE
    if method:
        spec = SpeculativeConfigSpec(method=method, numSpeculativeTokens=3)
        parse = partial(DraftInfo.from_files, spec, PARSE(LLAMA_8B).shape)
    try:
        parse(config, None, None)
    except ConfigError as error:
        text = without_values(str(error), config)
        assert "SECRET" not in text.upper(), (text, str(error))


async def test_an_unsupported_architecture_is_not_quoted_by_the_operator():
    files = FakeHttpServer(at("/m", {"config.json": json.dumps({"architectures": [SECRET]}).encode()}))
    server = await start_server(files.handle)
    everything = SimpleNamespace(refusal=lambda address: None)
    for borders, quoted in ((None, True), (everything, False)):
        with pytest.raises(ConfigError, match="architecture") as error:
            await read_source_checkpoint(Source(http=HttpSource(str(server.make_url("/m")))), None, PARSE, borders)
        assert (SECRET in str(error.value)) == quoted
    await server.close()


async def test_rejects_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_documents, "MAX_CONFIG_BYTES", 100)
    with pytest.raises(ConfigError, match=r"config.json: is larger than 100 bytes; check that it is the file"):
        await read_local_checkpoint(folder(tmp_path, SINGLE), PARSE)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, r"has no tokenizer \(tokenizer\.json, .*tekken\.json.*set spec\.engine\.skipTokenizerInit"),
        ({"vocab.json": b"{}"}, "has no tokenizer"),
        ({"vocab.json": b"{}", "merges.txt": b""}, None),
        ({"tekken.json": b"{}"}, None),
        ({"tokenizer.json": b"{}"}, None),
        ({"hy.tiktoken": b"", "tokenizer_config.json": b'{"tokenizer_class": "HYTokenizer"}'}, None),
        (
            {"hy.tiktoken": b"", "tokenizer_config.json": b'{"tokenizer_class": "X"}'},
            "tokenizer_class 'X' cannot be built",
        ),
        ({"qwen.tiktoken": b""}, "tokenizer_class None cannot be built from qwen.tiktoken"),
    ],
    ids=str,
)
async def test_a_model_needs_a_tokenizer_that_the_engine_reads(tmp_path, files, error):
    model = folder(tmp_path, {**SINGLE, **files})
    await read_local_checkpoint(model, PARSE)
    if error is None:
        await read_local_checkpoint(model, PARSE, needs_tokenizer=True)
        return
    with pytest.raises(ConfigError, match=error):
        await read_local_checkpoint(model, PARSE, needs_tokenizer=True)
