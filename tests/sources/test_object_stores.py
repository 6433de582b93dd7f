# SPDX-License-Identifier: Apache-2.0
"""The readers of S3, Google Cloud Storage, Azure Blob Storage and OCI registries, below the adapter fetcher, with real
servers."""

import base64
import hashlib
import json
import random
import urllib.parse
from dataclasses import replace

import pytest
from aiohttp import web as aio
from support import object_stores
from support.fetching import ADAPTER_FILES, WEIGHTS, fetch, files_under, folder_content, make_fetcher
from support.object_stores import AZURE_ACCOUNT, AZURE_KEY, push_artifact

from quire_sources.factory import SourceFactory, SourceOptions
from quire_sources.http.borders import Borders
from quire_sources.reader import read_range
from quire_spec.documents.adapter_digest import CONFIG_FILE, WEIGHTS_FILE
from quire_spec.documents.sources import AzureSource, GcsSource, OciSource, S3Source, SecretRef, Source, source_from_url
from quire_spec.errors import AccessDenied, ConfigError, NotFound, QuireError, Unavailable

FILES = {name.lstrip("/"): content for name, content in files_under("/loras/sql").items()}
HTPASSWD = "reader:$2b$04$/oUlI43idCUSOe.DeUZyqe0l5UQ7ecStEjyIyTX98DsUA5e73RTt6"
"""User and bcrypt hash of the password `secret`."""


def write_secret(tmp_path, **values):
    folder = tmp_path / "secrets" / "store"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, value in values.items():
        (folder / name).write_text(value)
    return {"secrets_dir": folder.parent}


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with object_stores.running_s3(tmp_path_factory.mktemp("s3"), "models", FILES, "AKIA1", "s3cr3t") as url:
        yield S3Source("s3://models/loras/sql", url, "us-east-1", SecretRef("store"))


@pytest.fixture(scope="module")
def gcs(tmp_path_factory):
    with object_stores.running_gcs(tmp_path_factory.mktemp("gcs"), "models", FILES) as url:
        yield GcsSource("gs://models/loras/sql", url, SecretRef("store"))


@pytest.fixture(scope="module")
def azure(tmp_path_factory):
    with object_stores.running_azure(tmp_path_factory.mktemp("azure"), "models", FILES) as url:
        yield AzureSource("az://models/loras/sql", AZURE_ACCOUNT, url, SecretRef("store"))


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    with object_stores.running_registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(params=["s3", "gcs", "azure", "oci"])
def store(request, tmp_path):
    """A source that a Secret opens, and the options that contain the Secret."""
    match request.param:
        case "s3":
            options = write_secret(tmp_path, AWS_ACCESS_KEY_ID="AKIA1", AWS_SECRET_ACCESS_KEY="s3cr3t")
            return Source(s3=request.getfixturevalue("s3")), options
        case "gcs":
            options = write_secret(tmp_path, **{"key.json": object_stores.service_account_key()})
            return Source(gcs=request.getfixturevalue("gcs")), options
        case "azure":
            options = write_secret(tmp_path, AZURE_STORAGE_ACCOUNT_KEY=AZURE_KEY)
            return Source(azure=request.getfixturevalue("azure")), options
    registry = request.getfixturevalue("registry")
    push_artifact(registry, "loras/sql", "1", ADAPTER_FILES)
    return Source(oci=OciSource(f"{registry}/loras/sql:1", insecure=True)), {}


async def test_an_adapter_is_read_and_kept(tmp_path, store):
    source, options = store
    async with make_fetcher(tmp_path, **options) as fetcher:
        fetched = await fetcher.fetch(source)
        assert folder_content(fetched) == ADAPTER_FILES
        assert await fetcher.fetch(source) == fetched


async def test_ranges_depend_on_the_version(tmp_path, store):
    source, options = store
    rng = random.Random(0)
    async with SourceFactory(SourceOptions(**options)) as sources:
        reader = sources.open_reader(source)
        for start in (0, 1, len(WEIGHTS) - 1, len(WEIGHTS), *(rng.randrange(len(WEIGHTS)) for _ in range(5))):
            assert await read_range(reader, WEIGHTS_FILE, start, 1000) == WEIGHTS[start : start + 1000]
        version = await reader.version(WEIGHTS_FILE)
        assert version and version == await reader.version(WEIGHTS_FILE)
        for asked in (version, '"other"', "sha256:other"):
            async with reader.open(WEIGHTS_FILE, 7, asked) as file:
                data = b"".join([chunk async for chunk in file.chunks])
                assert file.version == version and file.size in (None, len(WEIGHTS))
                assert (file.start, data) == ((7, WEIGHTS[7:]) if asked == version else (0, WEIGHTS))


async def test_a_missing_file_is_no_error_of_the_store(tmp_path, store):
    source, options = store
    async with SourceFactory(SourceOptions(**options)) as sources:
        assert await read_range(sources.open_reader(source), "tokenizer.json", 0, 10) is None


async def test_operators_do_not_connect_to_this_machine(tmp_path, store):
    source, options = store
    async with SourceFactory(SourceOptions(**options, borders=Borders())) as sources:
        with pytest.raises(Unavailable, match="loopback"):
            await read_range(sources.open_reader(source), CONFIG_FILE, 0, 10)


async def test_azure_credentials(tmp_path, azure, monkeypatch):
    source = Source(azure=azure)
    wrong = base64.b64encode(b"another key" * 6).decode()
    with pytest.raises(AccessDenied, match="HTTP 403 Auth"):
        await fetch(tmp_path / "a", source, **write_secret(tmp_path, AZURE_STORAGE_ACCOUNT_KEY=wrong))
    with pytest.raises(AccessDenied, match="has neither AZURE_STORAGE_ACCOUNT_KEY nor"):
        await fetch(tmp_path / "b", source, **write_secret(tmp_path, password="x"))
    with pytest.raises(QuireError, match=r"secret is missing|no such object"):
        await fetch(tmp_path / "c", Source(azure=replace(azure, credentialsSecretRef=None)))
    token = object_stores.azure_sas_token("models")
    options = write_secret(tmp_path, AZURE_STORAGE_SAS_TOKEN=f"?{token}\n")
    assert await fetch(tmp_path / "d", source, **options) == ADAPTER_FILES
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token)
    own = Source(azure=replace(azure, credentialsSecretRef=None))
    assert await fetch(tmp_path / "e", own) == ADAPTER_FILES, "variables of Azure's tools"


async def test_identity_of_a_google_pod(tmp_path, gcs, serve, monkeypatch):
    """The metadata server gives a token, which reaches the store and is asked for only once."""
    tokens, seen = [], []

    async def metadata(request):
        assert request.headers["Metadata-Flavor"] == "Google"
        tokens.append(request.path)
        return aio.json_response({"access_token": "t0ken", "expires_in": 3600, "token_type": "Bearer"})

    async def bucket(request):
        seen.append(request.headers.get("Authorization"))
        name = request.path.removeprefix("/models/loras/sql/")
        return aio.Response(body=ADAPTER_FILES[name]) if name in ADAPTER_FILES else aio.Response(status=404)

    monkeypatch.setenv("GCE_METADATA_HOST", urllib.parse.urlsplit(await serve(metadata)).netloc)
    source = Source(gcs=GcsSource("gs://models/loras/sql", await serve(bucket)))
    assert await fetch(tmp_path, source) == ADAPTER_FILES
    assert set(seen) == {"Bearer t0ken"} and len(tokens) == 1


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [(404, b"", "HTTP 404"), (200, b"[]", "sent no token"), (200, b'{"access_token": "a"}', "sent no token")],
)
async def test_a_metadata_server_without_a_token(tmp_path, serve, monkeypatch, status, body, message):
    async def metadata(request):
        return aio.Response(status=status, body=body)

    monkeypatch.setenv("GCE_METADATA_HOST", urllib.parse.urlsplit(await serve(metadata)).netloc)
    monkeypatch.setattr("quire_server.downloads.resumable_download._MAX_ATTEMPTS", 0)
    with pytest.raises(Unavailable, match=message):
        await fetch(tmp_path, Source(gcs=GcsSource("gs://models/loras/sql", "http://127.0.0.1:9")))


@pytest.mark.parametrize("value", ["", "{}", "[1]", '{"type": "external_account"}', "no json"])
async def test_only_a_service_account_key_is_accepted(tmp_path, gcs, value):
    with pytest.raises(AccessDenied, match="not the JSON key of a service account"):
        await fetch(tmp_path, Source(gcs=gcs), **write_secret(tmp_path, **{"key.json": value}))


# Registries.


async def test_artifact_of_a_digest_never_changes(tmp_path, registry):
    digest = push_artifact(registry, "loras/fixed", "1", ADAPTER_FILES)
    async with SourceFactory(SourceOptions()) as sources:
        reader = sources.open_reader(Source(oci=OciSource(f"{registry}/loras/fixed@{digest}", insecure=True)))
        assert reader.is_immutable and await reader.version(CONFIG_FILE)
        assert reader.revision == digest
        assert reader.expected_sha256(WEIGHTS_FILE) == hashlib.sha256(WEIGHTS).hexdigest()
        moving = sources.open_reader(Source(oci=OciSource(f"{registry}/loras/fixed:1", insecure=True)))
        assert not moving.is_immutable


async def test_a_tag_that_moves_gives_the_new_adapter(tmp_path, registry):
    source = Source(oci=OciSource(f"{registry}/loras/moving:1", insecure=True))
    changed = ADAPTER_FILES | {WEIGHTS_FILE: random.Random(5).randbytes(2**16)}
    for files in (ADAPTER_FILES, changed):
        push_artifact(registry, "loras/moving", "1", files)
        assert await fetch(tmp_path, source) == files


async def test_names_of_other_tools_and_folders(tmp_path, registry):
    """ModelPack's annotation, and files in one folder."""
    push_artifact(registry, "loras/folder", "1", {f"./out/{name}": data for name, data in ADAPTER_FILES.items()})
    source = Source(oci=OciSource(f"{registry}/loras/folder:1", insecure=True))
    assert await fetch(tmp_path, source) == ADAPTER_FILES


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"layers": []}, "none of its layers is a named file"),
        ({"layers": [{"digest": "sha256:1", "size": 1, "mediaType": "application/x"}]}, "none of its layers"),
        ({"layers": "x"}, "none of its layers"),
        ({"manifests": []}, "index of 0 manifests"),
        ({"manifests": [{"digest": "sha256:1"}, {"digest": "sha256:2"}]}, "index of 2 manifests"),
        (
            {
                "layers": [
                    {
                        "digest": f"sha256:{'0' * 64}",
                        "size": 1,
                        "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                        "annotations": {"org.opencontainers.image.title": CONFIG_FILE},
                    }
                ]
            },
            "its layer is an archive",
        ),
    ],
)
async def test_what_is_no_artifact_of_files(serve, manifest, message):
    async def answer(request):
        return aio.json_response(manifest)

    host = urllib.parse.urlsplit(await serve(answer)).netloc
    async with SourceFactory(SourceOptions()) as sources:
        with pytest.raises(ConfigError, match=message):
            await sources.open_reader(Source(oci=OciSource(f"{host}/loras/x", insecure=True))).version(CONFIG_FILE)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"x" * (2**22 + 1)], ids=["nothing", "a page", "a list", "too much"]
)
async def test_a_host_that_is_no_registry(serve, body):
    async def answer(request):
        return aio.Response(body=body)

    host = urllib.parse.urlsplit(await serve(answer)).netloc
    async with SourceFactory(SourceOptions()) as sources:
        for reference in (f"{host}/loras/x", f"{host}/loras/x@sha256:{'0' * 64}"):
            with pytest.raises(Unavailable):
                await sources.open_reader(Source(oci=OciSource(reference, insecure=True))).version(CONFIG_FILE)


async def test_registry_with_a_password(tmp_path, tmp_path_factory):
    with object_stores.running_registry(tmp_path_factory.mktemp("private"), HTPASSWD) as address:
        basic = {"Authorization": f"Basic {base64.b64encode(b'reader:secret').decode()}"}
        push_artifact(address, "loras/sql", "1", ADAPTER_FILES, **basic)
        source = Source(oci=OciSource(f"{address}/loras/sql:1", True, SecretRef("store")))
        for entry in (
            {"auth": base64.b64encode(b"reader:secret").decode()},
            {"username": "reader", "password": "secret"},
        ):
            config = json.dumps({"auths": {f"http://{address}/v2/": entry}})
            options = write_secret(tmp_path, **{".dockerconfigjson": config})
            assert await fetch(tmp_path / str(len(entry)), source, **options) == ADAPTER_FILES
        for config in ({"auths": {address: {"username": "reader", "password": "wrong"}}}, {"auths": {}}, {}):
            options = write_secret(tmp_path, **{".dockerconfigjson": json.dumps(config)})
            with pytest.raises(AccessDenied, match="HTTP 401"):
                await fetch(tmp_path / "denied", source, **options)


async def test_token_server_gets_the_password_and_no_one_else(tmp_path, serve):
    seen = []

    async def tokens(request):
        seen.append(("tokens", request.headers.get("Authorization", ""), dict(request.query)))
        return aio.json_response({"token": "t0ken"})

    realm = await serve(tokens)

    async def registry(request):
        authorization = request.headers.get("Authorization", "")
        seen.append(("registry", authorization, {}))
        if authorization != "Bearer t0ken":
            challenge = f'Bearer realm="{realm}/token?x=1",service="tests",scope="repository:a:pull"'
            return aio.Response(status=401, headers={"WWW-Authenticate": challenge})
        return aio.Response(status=404)

    host = urllib.parse.urlsplit(await serve(registry)).netloc
    config = json.dumps({"auths": {host: {"username": "me", "password": "s3cr3t"}}})
    options = write_secret(tmp_path, **{".dockerconfigjson": config})
    async with SourceFactory(SourceOptions(**options)) as sources:
        with pytest.raises(NotFound, match="no such artifact"):
            source = Source(oci=OciSource(f"{host}/a", True, SecretRef("store")))
            await sources.open_reader(source).version(CONFIG_FILE)
    basic = f"Basic {base64.b64encode(b'me:s3cr3t').decode()}"
    query = {"x": "1", "service": "tests", "scope": "repository:a:pull"}
    assert seen == [("registry", "", {}), ("tokens", basic, query), ("registry", "Bearer t0ken", {})]


async def test_a_token_that_expires_between_two_files_is_renewed(tmp_path, serve):
    """Tokens of registries are valid for minutes, and a model takes longer to read."""
    issued = []

    async def tokens(request):
        issued.append(f"t{len(issued)}")
        return aio.json_response({"access_token": issued[-1]})

    realm, used = await serve(tokens), []
    layers = [
        {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data), "mediaType": "application/x"}
        | {"annotations": {"org.cncf.model.filepath": name}}
        for name, data in ADAPTER_FILES.items()
    ]
    blobs = {layer["digest"]: data for layer, data in zip(layers, ADAPTER_FILES.values(), strict=True)}

    async def registry(request):
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # A token is valid until the first file was read with it.
        if token not in issued or token in used:
            return aio.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="{realm}"'})
        if "/manifests/" in request.path:
            return aio.json_response({"layers": layers})
        used.append(token)
        return aio.Response(body=blobs[request.path.rpartition("/")[2]])

    host = urllib.parse.urlsplit(await serve(registry)).netloc
    assert await fetch(tmp_path, Source(oci=OciSource(f"{host}/a", insecure=True))) == ADAPTER_FILES
    assert len(issued) == len(used) == len(ADAPTER_FILES)


@pytest.mark.parametrize("url", ["s3://b/m", "gs://bucket/m", "oci://ghcr.io/a/b:1", "https://example.com/m"])
def test_urls_name_sources(url):
    source = source_from_url(url)
    source.validate("source")
    assert url.rpartition("://")[2] in str(source)


def test_url_of_an_azure_container():
    source = source_from_url("https://account1.blob.core.windows.net/models/a/b")
    assert source == Source(azure=AzureSource("az://models/a/b", "account1"))
    assert source_from_url("https://account1.blob.core.windows.net/models/a?sig=x").http is not None
    with pytest.raises(ConfigError, match="does not name an account"):
        source_from_url("az://models/a")
    assert source_from_url("org/model") is None


@pytest.mark.parametrize(
    ("registry", "insecure"), [("localhost:5000", True), ("127.0.0.1", True), ("localhost.example.com", False)]
)
def test_a_registry_of_this_machine_has_no_certificate(registry, insecure):
    assert source_from_url(f"oci://{registry}/a:1") == Source(oci=OciSource(f"{registry}/a:1", insecure=insecure))
