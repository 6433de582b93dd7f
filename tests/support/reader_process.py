# SPDX-License-Identifier: Apache-2.0
"""Everything that reads sources, in a process of its own: its environment says what it trusts, and its proxy.

`python reader_process.py` takes [reader, URL] pairs as a JSON list, and writes for each what config it read, or what it
said
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


async def read_in_pod(protocol: str, url: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        async with AdapterFetcher(AdapterCache(Path(folder)), SourceOptions(hub_endpoint=url)) as fetcher:
            fetched = await fetcher.fetch(source(protocol, url))
            return (fetched.folder / CONFIG_FILE).read_text()


def read_in_planner(protocol: str, url: str) -> str:
    model_source = source(protocol, url)
    files = (
        HubReader(model_source.huggingFace, None, url)
        if model_source.huggingFace
        else open_source_reader(model_source, None, lambda ref: {})
    )
    return (files.read_range(CONFIG_FILE, 0, 100) or b"").decode()


def main() -> None:
    resumable_download._FIRST_RETRY_S = 0.01
    results = []
    for reader, url in json.load(sys.stdin):
        component, protocol = reader.split()
        try:
            results.append(
                asyncio.run(read_in_pod(protocol, url)) if component == "pod" else read_in_planner(protocol, url)
            )
        except Unavailable as error:
            results.append(f":{error}")
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
