# SPDX-License-Identifier: Apache-2.0
"""Everything that reads sources, in a process of its own: its environment says what it trusts, and its proxy.

`python readers.py` takes [reader, URL] pairs as a JSON list, and writes for each what config it read, or what it said
instead, with a colon before it.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from quire_operator.plan.checkpoint_files import open_source_reader
from quire_operator.plan.remote_readers import HubReader
from quire_server.adapters.fetcher import AdapterFetcher
from quire_server.sources import resumable_download
from quire_server.sources.adapter_cache import AdapterCache
from quire_server.sources.factory import SourceOptions
from quire_spec.documents.adapter_catalog import HttpSource, HuggingFaceSource, S3Source, Source
from quire_spec.documents.adapter_digest import CONFIG_FILE
from quire_spec.errors import Unavailable

READERS = ("pod http", "pod hub", "pod s3", "plan http", "plan hub", "plan s3")


def source(protocol: str, url: str) -> Source:
    match protocol:
        case "http":
            return Source(http=HttpSource(f"{url}/m"))
        case "hub":
            return Source(huggingFace=HuggingFaceSource("org/m"))
    return Source(s3=S3Source("s3://bucket/m", url))


async def in_pod(protocol: str, url: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        async with AdapterFetcher(AdapterCache(Path(folder)), SourceOptions(hub_endpoint=url)) as fetcher:
            fetched = await fetcher.fetch(source(protocol, url))
            return (fetched.folder / CONFIG_FILE).read_text()


def in_plan(protocol: str, url: str) -> str:
    of = source(protocol, url)
    files = HubReader(of.huggingFace, None, url) if of.huggingFace else open_source_reader(of, None, lambda ref: {})
    return (files.read_range(CONFIG_FILE, 0, 100) or b"").decode()


def main() -> None:
    resumable_download._FIRST_RETRY_S = 0.01
    found = []
    for reader, url in json.load(sys.stdin):
        where, protocol = reader.split()
        try:
            found.append(asyncio.run(in_pod(protocol, url)) if where == "pod" else in_plan(protocol, url))
        except Unavailable as error:
            found.append(f":{error}")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
