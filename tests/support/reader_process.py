# SPDX-License-Identifier: Apache-2.0
"""Every remote reader in a process of its own, because its environment sets trusted certificates and the proxy.

`python reader_process.py` takes [reader, URL] pairs as a JSON list. For each pair it writes the content of the config
file, or a colon and the error message.
"""

import asyncio
import json
import sys

from quire_sources.factory import SourceFactory, SourceOptions
from quire_sources.reader import read_range
from quire_spec.documents.adapter_digest import CONFIG_FILE
from quire_spec.documents.sources import HttpSource, HuggingFaceSource, S3Source, Source
from quire_spec.errors import Unavailable

READERS = ("http", "hub", "s3")


def source(protocol: str, url: str) -> Source:
    match protocol:
        case "http":
            return Source(http=HttpSource(f"{url}/m"))
        case "hub":
            return Source(huggingFace=HuggingFaceSource("org/m"))
    return Source(s3=S3Source("s3://bucket/m", url))


async def read(protocol: str, url: str) -> str:
    try:
        async with SourceFactory(SourceOptions(hub_endpoint=url)) as sources:
            reader = sources.open_reader(source(protocol, url))
            return (await read_range(reader, CONFIG_FILE, 0, 100) or b"").decode()
    except Unavailable as error:
        return f":{error}"


async def main() -> None:
    json.dump([await read(protocol, url) for protocol, url in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
