# SPDX-License-Identifier: Apache-2.0
"""Signed, unsigned and tampered adapters of every policy, from folders and web servers."""

import json

import pytest
from support.fake_sources import FakeHttpServer
from support.fetching import write_adapter_folder
from support.signing import Key
from support.source_fixtures import isolated_sources, serve  # noqa: F401

from quire_server.adapters.fetcher import AdapterFetcher, AdapterTrust
from quire_server.downloads.adapter_cache import AdapterCache
from quire_sources.factory import SourceOptions
from quire_spec.documents.sources import HttpSource, Source
from quire_spec.documents.trust import TrustConfig, TrustPolicy
from quire_spec.errors import InvalidArgument


@pytest.fixture
def key(tmp_path):
    return Key(tmp_path, "release")


@pytest.fixture
def make_fetcher(tmp_path, key):
    def make(policy=TrustPolicy.REQUIRE):
        trust = TrustConfig(signers=(key.signer,), adapters=policy)
        options = SourceOptions(allow_paths=True)
        return AdapterFetcher(AdapterCache(tmp_path / "cache"), options, trust=AdapterTrust.of(trust))

    return make


async def test_policies(tmp_path, key, make_fetcher, caplog):
    source = Source(path=str(write_adapter_folder(tmp_path / "a")))
    async with make_fetcher() as fetcher:
        with pytest.raises(InvalidArgument, match=r"is not signed \(no model.sig\)"):
            await fetcher.fetch(source)
    async with make_fetcher(TrustPolicy.WARN) as fetcher:
        assert (await fetcher.fetch(source)).signer is None
        assert "is not signed" in caplog.text
    async with make_fetcher(TrustPolicy.IGNORE) as fetcher:
        assert (await fetcher.fetch(source)).signer is None
    key.sign(tmp_path / "a")
    async with make_fetcher() as fetcher:
        content = await fetcher.fetch(source)
        assert content.signer == "release"
        assert not (content.folder / "model.sig").exists(), "a folder of the cache contains what its digest covers"
        assert (await fetcher.fetch(source)).signer == "release"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"])
async def test_every_file_that_is_used_must_be_signed(tmp_path, key, make_fetcher, name):
    folder = write_adapter_folder(tmp_path / "a")
    key.sign(folder)
    (folder / name).write_bytes(b'{"r": 9}' if name.endswith("json") else b"tampered")
    async with make_fetcher() as fetcher:
        with pytest.raises(InvalidArgument, match=rf"{name} (differs from|is not in) the signature of 'release'"):
            await fetcher.fetch(Source(path=str(folder)))


async def test_a_signature_belongs_to_its_source(tmp_path, key, make_fetcher):
    """Both folders have the same content, and share one folder of the cache."""
    signed, unsigned = write_adapter_folder(tmp_path / "signed"), write_adapter_folder(tmp_path / "unsigned")
    key.sign(signed)
    async with make_fetcher() as fetcher:
        for _ in range(2):
            assert (await fetcher.fetch(Source(path=str(signed)))).signer == "release"
            with pytest.raises(InvalidArgument, match="is not signed"):
                await fetcher.fetch(Source(path=str(unsigned)))
        (signed / "model.sig").unlink()
        with pytest.raises(InvalidArgument, match="is not signed"):
            await fetcher.fetch(Source(path=str(signed)))


async def test_a_file_that_was_changed_in_the_cache_is_noticed(tmp_path, key, make_fetcher):
    folder = write_adapter_folder(tmp_path / "a")
    key.sign(folder)
    async with make_fetcher() as fetcher:
        content = await fetcher.fetch(Source(path=str(folder)))
        (content.folder / "adapter_config.json").write_text(json.dumps({"r": 64}))
        with pytest.raises(InvalidArgument, match=r"adapter_config.json differs"):
            await fetcher.fetch(Source(path=str(folder)))


async def test_signatures_on_a_web_server(tmp_path, key, make_fetcher, serve):  # noqa: F811
    folder = write_adapter_folder(tmp_path / "a")
    key.sign(folder)
    files = FakeHttpServer({f"/sql/{path.name}": path.read_bytes() for path in folder.iterdir()})
    source = Source(http=HttpSource(f"{await serve(files.handle)}/sql"))
    async with make_fetcher() as fetcher:
        assert (await fetcher.fetch(source)).signer == "release"
        files.files["/sql/model.sig"] = b"x" * (5 * 2**20)
        with pytest.raises(InvalidArgument, match="the limit is 4194304"):
            await fetcher.fetch(source)
