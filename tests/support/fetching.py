# SPDX-License-Identifier: Apache-2.0
"""The files of an adapter, and a fetcher with its own cache."""

import random
from pathlib import Path

from quire_server.adapters.fetcher import MAX_WEIGHTS_BYTES, AdapterFetcher
from quire_server.downloads.adapter_cache import AdapterCache
from quire_sources.factory import SourceOptions
from quire_spec.documents.adapter_digest import CONFIG_FILE, WEIGHTS_FILE
from quire_spec.documents.sources import Source

CONFIG = b'{"r": 8}'
WEIGHTS = random.Random(1).randbytes(3 * 2**20)
ADAPTER_FILES = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: WEIGHTS}


def files_under(prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}/{name}": data for name, data in ADAPTER_FILES.items()}


def write_adapter_folder(folder: Path, config: bytes = CONFIG, weights: bytes = WEIGHTS) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_bytes(config)
    (folder / WEIGHTS_FILE).write_bytes(weights)
    return folder


def make_fetcher(tmp_path: Path, max_weights_bytes: int = MAX_WEIGHTS_BYTES, **options) -> AdapterFetcher:
    return AdapterFetcher(AdapterCache(tmp_path / "cache"), SourceOptions(**options), max_weights_bytes)


def folder_content(cached_adapter):
    return {p.name: p.read_bytes() for p in cached_adapter.folder.iterdir()}


async def fetch(
    tmp_path: Path, source: Source, max_weights_bytes: int = MAX_WEIGHTS_BYTES, **options
) -> dict[str, bytes]:
    """Fetch a source with a new fetcher on the same cache; return the cached files."""
    async with make_fetcher(tmp_path, max_weights_bytes, **options) as fetcher:
        return folder_content(await fetcher.fetch(source))
