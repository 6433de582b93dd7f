# SPDX-License-Identifier: Apache-2.0
"""What a plan reads of a model: over HTTP, from the hub and from a bucket, a few kilobytes of files of gigabytes."""

import asyncio
import json

import pytest
from support.fake_sources import FakeHttpServer, FakeHub, FakeS3, RawServer, start_server
from support.planning import LLAMA_8B

from quire_operator.plan import checkpoint_files as plan_files
from quire_operator.plan.checkpoint import SizeSource
from quire_operator.plan.checkpoint_files import FolderReader, open_source_reader, read_checkpoint
from quire_operator.plan.remote_readers import HttpReader, HubReader, S3Reader
from quire_spec.documents.adapter_catalog import HttpSource, HuggingFaceSource, PvcSource, S3Source, SecretRef, Source
from quire_spec.errors import AccessDenied, ConfigError, NotFound, Unavailable

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADER = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "BF16", "data_offsets": [0, 5_000_000]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + b"\0" * 5_000_000
CONFIG = json.dumps(LLAMA_8B).encode()
INDEX = json.dumps({"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}).encode()
SHARDED = {"config.json": CONFIG, "model.safetensors.index.json": INDEX}
SINGLE = {"config.json": CONFIG, "model.safetensors": WEIGHTS}


def at(prefix, content):
    return {f"{prefix}/{name}": data for name, data in content.items()}


async def load(files):
    return await asyncio.to_thread(read_checkpoint, files)


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


def http(url, **headers):
    return HttpReader(HttpSource(url), headers)


async def test_http_reads_the_header_and_not_the_weights(web):
    found = await load(http(f"{web.url}/models/llama/"))
    assert (found.weights_bytes, found.size_source) == (5_000_000, SizeSource.HEADER)
    assert [r for r in web.ranges() if r.startswith(("bytes=0-7", "bytes=8-"))] == [
        "bytes=0-7", f"bytes=8-{8 + len(HEADER) - 1}"
    ]  # fmt: skip


async def test_http_takes_the_index_where_there_is_one(web):
    found = await load(http(f"{web.url}/sharded"))
    assert (found.weights_bytes, found.size_source) == (16_060_522_496, SizeSource.INDEX)
    assert not [path for path in web.paths() if path.endswith(".safetensors")]


async def test_a_server_without_ranges_is_read_no_further_than_needed(web):
    answer = web.respond

    async def without_ranges(request, data):
        return await answer(request.clone(headers={k: v for k, v in request.headers.items() if k != "Range"}), data)

    web.respond = without_ranges
    found = await load(http(f"{web.url}/models/llama"))
    assert found.weights_bytes == 5_000_000


async def test_secret_headers_stay_with_their_server(web):
    from aiohttp import web as aiohttp_web

    seen = []

    async def redirect(request):
        seen.append(request.headers.get("X-Key"))
        raise aiohttp_web.HTTPFound(f"{web.url.replace('127.0.0.1', 'localhost')}{request.path}")

    first = await start_server(redirect)
    found = await load(http(str(first.make_url("/models/llama")), **{"X-Key": "s3cr3t"}))
    assert found.weights_bytes == 5_000_000
    assert seen == ["s3cr3t"] * 4
    assert not [r for r in web.requests if "X-Key" in r.headers]
    await first.close()


async def test_http_errors_name_the_url_and_no_secret(web):
    with pytest.raises(ConfigError, match=r"/nowhere/config.json: there is none; give the folder"):
        await load(http(f"{web.url}/nowhere?signature=s3cr3t"))
    web.is_down = True
    with pytest.raises(Unavailable, match="HTTP 503") as error:
        await load(http(f"{web.url.replace('http://', 'http://user:s3cr3t@')}/models/llama?signature=s3cr3t"))
    assert "s3cr3t" not in str(error.value)
    with pytest.raises(Unavailable, match=r"http://127.0.0.1:9/m/config.json: "):
        await load(http("http://127.0.0.1:9/m"))


@pytest.fixture
async def hub():
    files = FakeHttpServer(at("", SINGLE))
    cdn = await start_server(files.handle)
    hub = FakeHub(files, "org/llama", COMMIT, "hf_s3cr3t", f"http://localhost:{cdn.port}")
    server = await start_server(hub.handle)
    hub.url = str(server.make_url("/")).rstrip("/")
    yield hub
    await server.close()
    await cdn.close()


def repo(hub, name="org/llama", revision=None, token="hf_s3cr3t"):
    return HubReader(HuggingFaceSource(name, revision), token, hub.url)


async def test_hub(hub):
    for revision in (None, "main", COMMIT):
        found = await load(repo(hub, revision=revision))
        assert (found.weights_bytes, found.size_source) == (5_000_000, SizeSource.HEADER)
    assert not [r for r in hub.http_server.requests if "Authorization" in r.headers], "the token is for the hub alone"
    assert {r.headers["Range"] for r in hub.http_server.requests} == {"bytes=0-7", f"bytes=8-{8 + len(HEADER) - 1}"}


async def test_hub_errors(hub):
    with pytest.raises(AccessDenied, match="no such repository, or it is private and the token is missing"):
        await load(repo(hub, token="wrong"))
    with pytest.raises(AccessDenied, match="no such repository"):
        await load(repo(hub, "org/other"))
    with pytest.raises(NotFound, match=r"'v9'.*has no such revision"):
        await load(repo(hub, revision="v9"))
    del hub.http_server.files["/config.json"]
    with pytest.raises(ConfigError, match=r"hub repository 'org/llama' at its default branch, config.json: there is"):
        await load(repo(hub))


@pytest.fixture
async def bucket():
    bucket = FakeS3(FakeHttpServer(at("/models/llama", SINGLE)), "AKIA1", "s3cr3t")
    server = await start_server(bucket.handle)
    bucket.endpoint = str(server.make_url("/")).rstrip("/")
    yield bucket
    await server.close()


KEYS = {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "s3cr3t"}


def s3(bucket, uri="s3://models/llama", keys=KEYS):
    return S3Reader(S3Source(uri, bucket.endpoint, "eu-central-1", SecretRef("s3")), keys)


async def test_s3(bucket):
    found = await load(s3(bucket))
    assert (found.weights_bytes, found.size_source) == (5_000_000, SizeSource.HEADER)
    bucket.key_id = None
    assert await load(s3(bucket, "s3://models/llama/", {})) == found


async def test_s3_errors(bucket):
    with pytest.raises(Unavailable, match=r"s3://models/llama/config.json at http.*: access denied; the Secret"):
        await load(s3(bucket, keys=KEYS | {"AWS_SECRET_ACCESS_KEY": "wrong"}))
    with pytest.raises(ConfigError, match=r"s3://models/other/config.json at .*: there is none"):
        await load(s3(bucket, "s3://models/other"))
    with pytest.raises(ConfigError, match="secret 's3': needs the keys"):
        s3(bucket, keys={"AWS_ACCESS_KEY_ID": "x"})


async def test_s3_tells_what_a_bucket_says_and_not_what_it_quotes():
    body = b"<Error><Code>ExpiredToken</Code><Token-0>s3cr3t</Token-0></Error>"
    raw = RawServer(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    source = S3Source("s3://models/llama", await raw.start(), None, SecretRef("s3"))
    with pytest.raises(AccessDenied, match="HTTP 400 ExpiredToken; the source's secret is wrong") as caught:
        await load(S3Reader(source, KEYS))
    assert "s3cr3t" not in str(caught.value)
    await raw.close()


async def test_nothing_secret_follows_a_bucket_to_another_host(web):
    from aiohttp import web as aiohttp_web

    asked = []

    async def redirect(request):
        asked.append(request.query.get("X-Amz-Security-Token"))
        raise aiohttp_web.HTTPTemporaryRedirect(f"{web.url.replace('127.0.0.1', 'localhost')}{request.path}")

    first = await start_server(redirect)
    source = S3Source("s3://models/llama", str(first.make_url("/")), None, SecretRef("s3"))
    assert (await load(S3Reader(source, KEYS | {"AWS_SESSION_TOKEN": "t0ken"}))).weights_bytes == 5_000_000
    assert set(asked) == {"t0ken"} and len(web.requests) == len(asked)
    for request in web.requests:
        assert not request.query and "t0ken" not in str(request.headers) and "AKIA1" not in str(request.headers)
    await first.close()


async def test_every_place_may_say_how_long_it_wants_to_be_left_alone():
    raw = RawServer(
        b"HTTP/1.1 503 Slow\r\nRetry-After: 7\r\nContent-Length: 31\r\n\r\n<Error><Code>SlowDown</Code></E>"
    )
    url = await raw.start()
    of_hub, of_s3 = HubReader(HuggingFaceSource("org/llama"), None, url), S3Reader(S3Source("s3://models/a", url), {})
    for files, code in ((http(url), ""), (of_hub, ""), (of_s3, " SlowDown")):
        with pytest.raises(Unavailable, match=f"HTTP 503{code}; it asks for 7 s of patience$") as error:
            await load(files)
        assert error.value.retry_after_s == 7
    await raw.close()


@pytest.mark.parametrize(
    "endpoint", ["http://user:s3cr3t@h", "http://[::", "http://h:99999", 'http://a"b', "http://h:9)"]
)
def test_an_endpoint_that_obstore_would_panic_on_is_refused(endpoint):
    """The CRD's pattern takes all of these."""
    with pytest.raises(ConfigError, match=r"s3 source: the endpoint is not http\(s\)://host") as caught:
        S3Reader(S3Source("s3://models/llama", endpoint), KEYS)
    assert "s3cr3t" not in str(caught.value)


def test_a_panic_is_an_error_of_one_service(monkeypatch):
    class Panic(BaseException):
        """As pyo3's: no Exception, so that whoever waits for everything of one service does not catch it."""

    def panic(*_, **__):
        raise Panic("called unwrap on an Err value")

    monkeypatch.setattr("obstore.sign", panic)
    with pytest.raises(ConfigError, match="cannot be asked: called unwrap on an Err value; correct source or Secret"):
        S3Reader(S3Source("s3://models/llama"), KEYS).read_range("config.json", 0, 8)


async def test_a_secret_may_end_in_a_newline_and_have_none_inside(web, bucket):
    """Files mostly end in one, and so do the values of Secrets that are made of files."""
    values = {"token": "hf_s3cr3t\n", "ca.crt": "a\nb\n", **{key: f"{value}\n" for key, value in KEYS.items()}}
    mine = SecretRef("mine")
    of_s3 = Source(s3=S3Source("s3://models/llama", bucket.endpoint, "eu-central-1", mine))
    of_hub = Source(huggingFace=HuggingFaceSource("org/llama", None, mine))
    of_http = Source(http=HttpSource(f"{web.url}/models/llama", None, mine))
    assert (await load(open_source_reader(of_s3, None, lambda ref: values))).weights_bytes == 5_000_000
    assert open_source_reader(of_hub, None, lambda ref: values).token == "hf_s3cr3t"
    assert (await load(open_source_reader(of_http, None, lambda ref: {"X-Key": "s3cr3t\n"}))).weights_bytes == 5_000_000
    assert {r.headers["X-Key"] for r in web.requests} == {"s3cr3t"}
    for source in (of_s3, of_hub, of_http):
        with pytest.raises(AccessDenied, match="holds a line break or another") as caught:
            open_source_reader(source, None, lambda ref: dict.fromkeys(values, "s3cr3t\ns3cr3t"))
        assert "s3cr3t" not in str(caught.value)


def test_a_url_that_is_none_is_said():
    with pytest.raises(ConfigError, match=r"the url cannot be read as one; use http\(s\)://host/folder"):
        read_checkpoint(http("http://user:s3cr3t@[::1"))
    with pytest.raises(Unavailable, match=r"http://a\.\.b/m/config.json: "):
        read_checkpoint(http("http://a..b/m"))


async def test_bytes_that_trickle_hold_no_thread(monkeypatch):
    monkeypatch.setattr("quire_operator.plan.remote_readers._READ_TIMEOUT_S", 0.2)
    raw = RawServer(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b" " * 10_000, pause_s=0.01)
    with pytest.raises(Unavailable, match=r"only \d+ bytes came in 0.2 s"):
        await load(http(await raw.start()))
    await raw.close()


def folder(path, content):
    path.mkdir(exist_ok=True)
    for name, data in content.items():
        (path / name).write_bytes(data)
    return path


def test_folders(tmp_path):
    assert read_checkpoint(FolderReader(folder(tmp_path, SINGLE))).size_source is SizeSource.HEADER
    assert read_checkpoint(FolderReader(tmp_path / "config.json")).size_source is SizeSource.SHAPE
    assert read_checkpoint(FolderReader(folder(tmp_path, SHARDED))).size_source is SizeSource.INDEX


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "config.json: there is none"),
        ({"config.json": b"{"}, "config.json: not JSON: "),
        ({"config.json": b"[" * 100_000}, "config.json: not JSON: "),
        ({"config.json": b"{}"}, "architecture 'none' is not supported"),
        (SINGLE | {"model.safetensors": b"PK"}, "does not begin like a safetensors file"),
        (SINGLE | {"model.safetensors": WEIGHTS[:20]}, "its header is not JSON"),
        (SHARDED | {"model.safetensors.index.json": b"{}"}, "metadata.total_size is None"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path, content, words):
    with pytest.raises(ConfigError, match=words) as error:
        read_checkpoint(FolderReader(folder(tmp_path / "m", content)))
    assert str(error.value).count(str(tmp_path / "m")) == 1


def test_a_file_too_large_is_no_config(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_files, "MAX_JSON_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes; this is no config"):
        read_checkpoint(FolderReader(folder(tmp_path, SINGLE)))


def test_each_source_has_its_reader_and_its_secret(tmp_path):
    secrets = {"hub": {"token": "t"}, "s3": KEYS, "web": {"Authorization": "Bearer x"}}

    def found(source, where=None):
        return open_source_reader(source, where, lambda ref: secrets[ref.name])

    assert found(Source(huggingFace=HuggingFaceSource("o/m", None, SecretRef("hub")))).token == "t"
    assert found(Source(huggingFace=HuggingFaceSource("o/m"))).token is None
    assert found(Source(http=HttpSource("http://h/m", None, SecretRef("web")))).headers == secrets["web"]
    assert isinstance(found(Source(s3=S3Source("s3://b/m", None, None, SecretRef("s3")))), S3Reader)
    assert found(Source(pvc=PvcSource("c")), tmp_path) == FolderReader(tmp_path)
    with pytest.raises(ConfigError, match="secret 'hub': has no key 'other'"):
        found(Source(huggingFace=HuggingFaceSource("o/m", None, SecretRef("hub", "other"))))
    with pytest.raises(ConfigError, match="give --volume or --model-config"):
        found(Source(pvc=PvcSource("c")))
