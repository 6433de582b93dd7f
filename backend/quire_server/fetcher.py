# SPDX-License-Identifier: Apache-2.0
"""Brings adapters from where the catalogue says into the cache: bounded, resumed, verified, and complete or not there.

Knows every protocol by its Place and no more. What is returned never changes: names move, digests do not. Two files of
an adapter are read and nothing else, so a source can hold no code that anyone would run. adapters.py calls this.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

import aiohttp

from quire_server.background import in_thread
from quire_server.cache import Cache, Partial, Record, key_of
from quire_server.credentials import Credentials
from quire_server.http_place import HttpPlace
from quire_server.hub_place import HubPlace
from quire_server.places import FolderPlace, Opened, Place
from quire_server.s3_place import S3Place
from quire_spec.catalogue import HttpSource, HuggingFaceSource, PvcSource, S3Source, SecretRef, Source
from quire_spec.digest import ADAPTER_FILES, WEIGHTS_FILE, file_sha256
from quire_spec.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Tries in a row that bring nothing new, before the adapter is called Failed (and tried again later)."""
_PAUSE_S = 0.25
_LOCKED_PAUSE_S = 0.2
_SILENCE_S = 60.0
"""How long a place may say nothing: a hung file system or peer must not hold an adapter for ever."""
_S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_S3_TOKEN = "AWS_SESSION_TOKEN"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What sources may name on this machine."""

    secrets_dir: Path | None = None
    """Where Secrets are mounted; None: sources cannot name any."""
    pvcs: Mapping[str, Path] = field(default_factory=dict)
    """Folder that each claim is mounted at."""
    allow_paths: bool = False
    """Take `path` sources: true for a person's own machine, never for a pod."""
    max_weights_bytes: int = 4 * 2**30
    """A rank 64 adapter of a 70B model has 3.3 GiB."""
    max_config_bytes: int = 2**20
    hub_endpoint: str | None = None
    """None is huggingface_hub's own, which HF_ENDPOINT sets."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter in the cache."""

    digest: str
    folder: Path


class Fetcher:
    """One cache and its sources. Use it as an async context manager."""

    def __init__(self, cache: Cache, options: SourceOptions) -> None:
        self._cache = cache
        self._options = options
        self._credentials = Credentials(options.secrets_dir)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # trust_env: many clusters reach the outside by a proxy only.
        self._session = aiohttp.ClientSession(trust_env=True, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, source: Source) -> Fetched:
        """Bring what `source` holds now; quick when it has not changed since the last time.

        A source that cannot be reached but was fetched before is answered from the cache, with a warning.

        Raises:
            InvalidArgument: the source is wrong, too large, not allowed, or not what its sha256 says. Do not retry.
            NotFound: nothing is there. Unavailable: right, but not now.
        """
        place = self._place(source)
        key = key_of(source)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            record = await self._unchanged(place, key)
            with _disk_errors():
                if record is None:
                    record = await self._bring_all(place, key)
                else:
                    self._cache.touch(record.digest)
        return Fetched(record.digest, self._cache.folder(record.digest))

    def sweep(self, used: set[str]) -> list[str]:
        """Remove from the cache what nobody uses; blocking."""
        return self._cache.sweep(used)

    async def _unchanged(self, place: Place, key: str) -> Record | None:
        """The cached record, if the source still has that content."""
        record = self._cache.record(key)
        if record is None or place.fixed:
            return record
        try:
            for name in ADAPTER_FILES:
                with _silence(place.where(name)):
                    async with asyncio.timeout(_SILENCE_S):
                        version = await place.version(name)
                if version is None or version != record.versions.get(name):
                    return None
        except Unavailable as error:
            log.warning("source cannot be reached, using the cached adapter digest=%s error=%s", record.digest, error)
        return record

    async def _bring_all(self, place: Place, key: str) -> Record:
        async with self._partial(key) as partial:
            for name in ADAPTER_FILES:
                await self._bring(place, partial, name)
                await self._verify(place, partial, name)
            return await in_thread(self._cache.commit, key, partial)

    @contextlib.asynccontextmanager
    async def _partial(self, key: str) -> AsyncIterator[Partial]:
        """Wait for our turn where another supervisor shares the cache and is at the same source."""
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    partial = stack.enter_context(self._cache.partial(key))
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCKED_PAUSE_S)
            yield partial

    async def _bring(self, place: Place, partial: Partial, name: str) -> None:
        """Read one file to its end, going on where a cut left it."""
        idle = 0
        while True:
            before = partial.size(name)
            try:
                await self._read(place, partial, name)
                return
            except Unavailable as error:
                idle = 0 if partial.size(name) > before else idle + 1
                if idle >= _ATTEMPTS:
                    raise
                log.info("fetch goes on after an error file=%s bytes=%d error=%s", name, partial.size(name), error)
                await asyncio.sleep(_PAUSE_S * 2**idle)

    async def _read(self, place: Place, partial: Partial, name: str) -> None:
        noted = partial.versions().get(name)
        start = partial.size(name) if noted else 0
        async with contextlib.AsyncExitStack() as stack:
            with _silence(place.where(name)):
                async with asyncio.timeout(_SILENCE_S):
                    opened = await stack.enter_async_context(place.open(name, start, noted))
            self._check_size(place, name, opened.size or 0)
            if opened.start not in (0, start):
                raise Unavailable(f"{place.where(name)}: asked for byte {start}, got byte {opened.start}")
            if opened.start == 0:
                # Before the new version is noted: old bytes must never pass for bytes of it.
                partial.drop(name)
            partial.note(name, opened.version)
            size = await self._write(place, partial, name, opened)
        if opened.size is not None and size != opened.size:
            raise Unavailable(f"{place.where(name)}: {size} bytes of {opened.size} came")

    async def _write(self, place: Place, partial: Partial, name: str, opened: Opened) -> int:
        """Append what comes to the partial file; returns its size then."""
        size = opened.start
        with (partial.folder / name).open("r+b" if opened.start else "wb") as file:
            file.seek(opened.start)
            while data := await _next(opened, place.where(name)):
                size += len(data)
                try:
                    # The place may have said less, or nothing, about the size.
                    self._check_size(place, name, size)
                except InvalidArgument:
                    partial.drop(name)
                    raise
                await in_thread(file.write, data)
        return size

    def _check_size(self, place: Place, name: str, size: int) -> None:
        weights = name == WEIGHTS_FILE
        limit = self._options.max_weights_bytes if weights else self._options.max_config_bytes
        if size > limit:
            fix = "; raise --max-adapter-bytes" if weights else ""
            raise InvalidArgument(f"{place.where(name)}: {size} bytes or more, the limit is {limit}{fix}")

    async def _verify(self, place: Place, partial: Partial, name: str) -> None:
        expected = place.expected_sha256(name)
        if expected is None:
            return
        found = (await in_thread(file_sha256, partial.folder / name)).hex()
        if found != expected:
            partial.drop(name)
            raise InvalidArgument(
                f"{place.where(name)}: its sha256 is {found}, not {expected}; correct the source or what is there"
            )

    def _place(self, source: Source) -> Place:
        match source:
            case Source(huggingFace=HuggingFaceSource() as hub):
                return HubPlace(
                    self._http(), hub.repo, hub.revision, lambda: self._token(hub), self._options.hub_endpoint
                )
            case Source(s3=S3Source() as s3):
                return S3Place(s3.uri, s3.endpoint, s3.region, lambda: self._s3_keys(s3.credentialsSecretRef))
            case Source(http=HttpSource() as http):
                return HttpPlace(self._http(), http.url, http.sha256, lambda: self._headers(http))
            case Source(pvc=PvcSource() as pvc):
                return self._pvc_place(pvc)
            case Source(path=str() as path):
                return self._path_place(path)
        raise InvalidArgument("source: none is given")

    def _pvc_place(self, pvc: PvcSource) -> Place:
        root = self._options.pvcs.get(pvc.claimName)
        if root is None:
            known = ", ".join(sorted(self._options.pvcs)) or "none"
            raise InvalidArgument(
                f"pvc {pvc.claimName!r}: not mounted here (mounted: {known}); give --pvc {pvc.claimName}=FOLDER"
            )
        return FolderPlace(root, pvc.path, f"pvc {pvc.claimName!r}")

    def _path_place(self, path: str) -> Place:
        if not self._options.allow_paths:
            raise InvalidArgument(f"path {path!r}: folders of this machine are for `quire serve`; use another source")
        if not Path(path).is_absolute() or ".." in Path(path).parts:
            raise InvalidArgument(f"path {path!r}: must be absolute, without '..'")
        return FolderPlace(Path(path), "", f"path {path!r}")

    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "Fetcher is an async context manager"
        return self._session

    def _token(self, hub: HuggingFaceSource) -> str | None:
        ref = hub.tokenSecretRef
        return None if ref is None else self._credentials.value(ref, ref.key or "token")

    def _headers(self, http: HttpSource) -> dict[str, str]:
        return {} if http.headersSecretRef is None else self._credentials.items(http.headersSecretRef)

    def _s3_keys(self, secret: SecretRef | None) -> dict[str, str]:
        if secret is None:
            return {}
        keys = {key: self._credentials.value(secret, key) for key in _S3_KEYS}
        if self._credentials.has(secret, _S3_TOKEN):
            keys[_S3_TOKEN] = self._credentials.value(secret, _S3_TOKEN)
        return keys


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """A full or read-only cache is worth another try later, and a message that says which it is."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cache: {error}; make room, or give another --cache-dir") from error


@contextlib.contextmanager
def _silence(where: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(f"{where}: no answer for {_SILENCE_S:g} s") from error


async def _next(opened: Opened, where: str) -> bytes:
    """The next bytes of a file; none at its end."""
    with _silence(where):
        async with asyncio.timeout(_SILENCE_S):
            return await anext(opened.chunks, b"")
