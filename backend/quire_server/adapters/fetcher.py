# SPDX-License-Identifier: Apache-2.0
"""Downloads the adapters of the catalog into the cache.

The size of a download is limited. An interrupted download is resumed, and a complete one is verified. An adapter is
added to the cache only when all its files are complete. The fetcher uses the readers of quire_sources and does not
depend on protocols. A cached adapter is immutable: a name can get another digest, but the content with a given digest
never changes. The fetcher reads only the two required files, a chat template and the tokenizer's JSON files. Therefore,
a source cannot deliver code. A chat template runs in a sandbox. The adapter manager calls this module.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from weakref import WeakValueDictionary

from quire_server.downloads.adapter_cache import (
    AdapterCache,
    PartialDownload,
    SourceRecord,
    folder_bytes,
    source_key,
)
from quire_server.downloads.resumable_download import MAX_SOURCE_CHANGES, ResumableDownload, query_version
from quire_server.downloads.signatures import MAX_SIGNATURE_BYTES, SIGNATURE_FILE, SignatureVerifier
from quire_sources.factory import SourceFactory, SourceOptions
from quire_sources.reader import FileMissing, SourceReader
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.constants import AdapterDigest
from quire_spec.documents.adapter_digest import (
    ADAPTER_FILES,
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    MAX_TOKENIZER_BYTES,
    OPTIONAL_FILES,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    present_files,
)
from quire_spec.documents.sources import Source
from quire_spec.documents.trust import TrustConfig, TrustPolicy
from quire_spec.errors import AccessDenied, ConfigError, InvalidArgument, Unavailable
from quire_spec.model.safetensors_header import LENGTH_BYTES, expected_file_bytes, header_length

logger = logging.getLogger(__name__)

MAX_WEIGHTS_BYTES = 4 * 2**30
"""Maximum size of an adapter's weights. For comparison, an adapter with LoRA rank 64 for a 70B model has 3.3 GiB."""
_MAX_CONFIG_BYTES = 2**20
_LOCK_RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class CachedAdapter:
    """An adapter in the cache."""

    digest: AdapterDigest
    folder: Path
    signer: str | None = None
    """Name of the signer in spec.trust whose signature was verified."""

    @property
    def chat_template(self) -> Path | None:
        """Path of the adapter's chat template. None if the adapter has no chat template."""
        path = self.folder / CHAT_TEMPLATE_FILE
        return path if path.exists() else None

    def num_bytes(self) -> int:
        """Return the size of the files. This call blocks."""
        return folder_bytes(self.folder)


class AdapterTrust:
    """Verifies the signatures of adapters as spec.trust says."""

    def __init__(self, trust: TrustConfig) -> None:
        """Raises ConfigError if a key is invalid."""
        self._verifier, self._policy = SignatureVerifier(trust), trust.adapters

    @classmethod
    def of(cls, trust: TrustConfig | None) -> Self | None:
        """Return the verifier of a pod; None if it does not read the signatures of adapters."""
        return None if trust is None or trust.adapters is TrustPolicy.IGNORE else cls(trust)

    def signer(self, folder: Path, signature: Path, what: str) -> str | None:
        """Return the signer of an adapter; None if it has none and the policy is Warn. This call blocks.

        Raises:
            InvalidArgument: the policy is Require, and the signature is refused.
        """
        try:
            return self._verifier.verify(folder, present_files(folder), signature, what).signer
        except InvalidArgument as error:
            if self._policy is TrustPolicy.REQUIRE:
                raise
            logger.warning("signature refused, policy Warn: %s", error)
            return None


class AdapterFetcher(contextlib.AsyncExitStack):
    """Fetches adapters from their sources into one cache. It must be used as an async context manager."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        options: SourceOptions,
        max_weights_bytes: int = MAX_WEIGHTS_BYTES,
        limit_field: str = "limits.maxAdapterBytes in pod.json",
        trust: AdapterTrust | None = None,
    ) -> None:
        """`limit_field` is the field with the value of `max_weights_bytes`, for messages. Without `trust`, signatures
        are not read."""
        super().__init__()
        self._limit_field = limit_field
        self._trust = trust
        self._optional_files = OPTIONAL_FILES if trust is None else (*OPTIONAL_FILES, SIGNATURE_FILE)
        self._adapter_cache = adapter_cache
        self._max_weights_bytes = max_weights_bytes
        self._sources = SourceFactory(options)
        self._downloader = ResumableDownload(self._size_limit, check_start=_check_weights)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> Self:
        await self.enter_async_context(self._sources)
        return self

    async def fetch(self, source: Source) -> CachedAdapter:
        """Return the current content of `source`.

        This is fast if the content has not changed since the last fetch. If the source cannot be reached, a warning is
        logged and the content of the last fetch is returned.

        Raises:
            InvalidArgument: the source is wrong, too large or not allowed, its sha256 differs, or its signature is
                refused; a retry cannot succeed.
            NotFound: the files do not exist.
            Unavailable: the source cannot be read now; a retry can succeed.
        """
        reader = self._sources.open_reader(source)
        key = source_key(source)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            record = await self._unchanged_record(reader, key)
            with _translate_disk_errors():
                if record is None or not self._adapter_cache.touch(record.digest):
                    record = await self._download_all(reader, key)
            content = CachedAdapter(record.digest, self._adapter_cache.folder(record.digest))
            if self._trust is None:
                return content
            signature, what = self._adapter_cache.signature(key), reader.display_name("")
            return replace(
                content, signer=await run_in_daemon_thread(self._trust.signer, content.folder, signature, what)
            )

    async def check_exists(self, source: Source) -> None:
        """Ask a source for an adapter without writing anything to the cache.

        Raises:
            NotFound: the source has no adapter.
            InvalidArgument, Unavailable: see `fetch`.
        """
        reader = self._sources.open_reader(source)
        if self._adapter_cache.record(source_key(source)) is None:
            await query_version(reader, CONFIG_FILE)

    def secret_version(self, source: Source) -> int:
        """Return a number that changes when the content of the source's Secret changes.

        Raises InvalidArgument if the source is wrong.
        """
        return self._sources.secret_version(source)

    def shrink_cache(self, max_bytes: int, used_digests: set[AdapterDigest]) -> tuple[list[AdapterDigest], int]:
        """Remove the least recently used adapters; see `AdapterCache.shrink`. This call blocks."""
        return self._adapter_cache.shrink(max_bytes, used_digests)

    def prune_cache(self, used_digests: set[AdapterDigest]) -> list[AdapterDigest]:
        """Remove unused adapters from the cache. This call blocks."""
        return self._adapter_cache.prune(used_digests)

    async def _unchanged_record(self, reader: SourceReader, key: str) -> SourceRecord | None:
        """Return the cached record, or None if the source's content has changed since the last fetch."""
        record = self._adapter_cache.record(key)
        if record is None or not record.versions.keys() >= {*self._optional_files}:
            return None
        if reader.is_immutable:
            return record
        try:
            for name in ADAPTER_FILES:
                version = await query_version(reader, name)
                if version is None or version != record.versions.get(name):
                    return None
            for name in self._optional_files:
                if await _optional_version(reader, name) != record.versions.get(name):
                    return None
        except Unavailable as error:
            logger.warning(
                "source cannot be reached, using the cached adapter digest=%s error=%s", record.digest, error
            )
        return record

    async def _download_all(self, reader: SourceReader, key: str) -> SourceRecord:
        async with self._lock_partial(key) as partial:
            stale_files = [*ADAPTER_FILES, *self._optional_files]
            for _ in range(MAX_SOURCE_CHANGES):
                for name in stale_files:
                    await self._download(reader, partial, name)
                stale_files = (
                    [] if reader.is_immutable else await self._downloader.changed_files(reader, partial.versions())
                )
                if not stale_files:
                    return await self._commit(key, partial)
                for name in stale_files:
                    partial.discard(name)
        raise Unavailable(
            f"{reader.display_name(stale_files[0])}: changed {MAX_SOURCE_CHANGES} times during the download; write "
            "the new adapter to a separate folder, then rename it to replace the old one"
        )

    async def _download(self, reader: SourceReader, partial: PartialDownload, name: str) -> None:
        try:
            await self._downloader.download(reader, partial, name)
            await self._downloader.verify(reader, partial, name)
        except (FileMissing, AccessDenied):
            # Without the right to list files, S3 answers 403 for a file that does not exist.
            if name not in self._optional_files:
                raise
            partial.discard(name)
            partial.record_version(name, None)

    async def _commit(self, key: str, partial: PartialDownload) -> SourceRecord:
        # A cancelled fetch does not stop its thread, so the thread keeps the lock on the files that it hashes.
        lock = partial.lock()

        def commit() -> SourceRecord:
            with lock:
                return self._adapter_cache.commit(key, partial)

        return await run_in_daemon_thread(commit)

    def _size_limit(self, name: str) -> tuple[int, str]:
        if name == WEIGHTS_FILE:
            return self._max_weights_bytes, f"; raise {self._limit_field}"
        if name in TOKENIZER_FILES:
            return MAX_TOKENIZER_BYTES, ""
        return MAX_SIGNATURE_BYTES if name == SIGNATURE_FILE else _MAX_CONFIG_BYTES, ""

    @contextlib.asynccontextmanager
    async def _lock_partial(self, key: str) -> AsyncIterator[PartialDownload]:
        """Lock the partial download. If another supervisor that shares the cache has the lock, wait for it."""
        with contextlib.ExitStack() as stack:
            is_waiting = False
            while True:
                try:
                    partial = stack.enter_context(self._adapter_cache.partial(key))
                    break
                except BlockingIOError:
                    if not is_waiting:
                        logger.info("waiting for another supervisor that fetches the same source key=%s", key)
                    is_waiting = True
                    await asyncio.sleep(_LOCK_RETRY_S)
            yield partial


def _check_weights(path: Path, size: int) -> int | None:
    """Compare the size of the weights with their header before all of their bytes are copied. See `check_start` of
    ResumableDownload."""
    if path.name != WEIGHTS_FILE:
        return None
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
    if len(start) < LENGTH_BYTES:
        return LENGTH_BYTES
    try:
        header_end = LENGTH_BYTES + header_length(start)
    except ConfigError:
        return None  # the core rejects the file with a message of its own
    if path.stat().st_size < header_end:
        return header_end
    expected = expected_file_bytes(path)
    if expected is not None and expected != size:
        raise InvalidArgument(
            f"{WEIGHTS_FILE}: has {size} bytes, but its header describes {expected}; save or copy the adapter again"
        )
    return None


@contextlib.contextmanager
def _translate_disk_errors() -> Iterator[None]:
    """Convert disk errors to Unavailable, because a full or read-only cache can become usable later."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cache: {error}; free some space, or use another --cache-dir") from error


async def _optional_version(reader: SourceReader, name: str) -> str | None:
    """Return the version of a file, or None if the file does not exist."""
    try:
        return await query_version(reader, name)
    except (FileMissing, AccessDenied):
        return None
