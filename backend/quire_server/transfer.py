# SPDX-License-Identifier: Apache-2.0
"""Brings one file from a place to the disk: bounded, resumed where a cut left it, verified.

Bytes of two versions never mix: the version is noted before its first byte. What becomes of the files is the caller's.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from quire_server.background import in_thread
from quire_server.cache import Partial
from quire_server.places import Opened, Place
from quire_spec.digest import file_sha256
from quire_spec.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Tries in a row that bring next to nothing, before the caller is told."""
_LEAST_BYTES = 2**16
"""Less than that is next to nothing, of a try and in SILENCE_S: a place that gives a byte at a time would never end."""
_PAUSE_S = 0.25
PATIENCE_S = 10.0
"""What a place may have us wait for the next try (Retry-After); other adapters may wait behind us."""
SILENCE_S = 60.0
"""How long a place may say nothing: a hung file system or peer must not hold an adapter for ever."""


MAX_CHANGES = 3
"""Times that files may change while they are read, before whoever writes there is told."""


class DigestMismatch(InvalidArgument):
    """What came is not what the source says it should be."""


class Transfer:
    """How files are brought: with what limit each."""

    def __init__(
        self,
        limit: Callable[[str], tuple[int | None, str]],
        sized: Callable[[str, int], None] = lambda name, size: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`limit(name)` is the largest size of a file, None: any, and what its refusal ends with; `sized` is told the
        size of each file whose place says it; `patience_s` is the longest wait that a place may ask for."""
        self._limit, self._sized, self._patience_s = limit, sized, patience_s

    async def bring(self, place: Place, partial: Partial, name: str) -> None:
        """Read one file to its end, going on where a cut left it."""
        idle = 0
        while True:
            before = partial.size(name)
            try:
                await self._read(place, partial, name)
                return
            except Unavailable as error:
                idle = 0 if partial.size(name) - before >= _LEAST_BYTES else idle + 1
                if idle >= _ATTEMPTS:
                    raise
                pause_s = self._pause_s(idle, error)
                log.info("fetch goes on after an error file=%s bytes=%d error=%s", name, partial.size(name), error)
                await asyncio.sleep(pause_s)

    def _pause_s(self, idle: int, error: Unavailable) -> float:
        """How long to wait for the next try; raises the error where the place wants longer: the caller tries later."""
        asked_s = error.retry_after_s or 0.0
        if asked_s > self._patience_s:
            raise error
        return max(_PAUSE_S * 2.0**idle, asked_s)

    async def _read(self, place: Place, partial: Partial, name: str) -> None:
        noted = partial.versions().get(name)
        start = partial.size(name) if noted else 0
        async with contextlib.AsyncExitStack() as stack:
            with silence(place.where(name)):
                async with asyncio.timeout(SILENCE_S):
                    opened = await stack.enter_async_context(place.open(name, start, noted))
            self._check_size(place, name, opened.size or 0)
            if opened.size is not None:
                self._sized(name, opened.size)
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
        size = before = opened.start
        since = time.monotonic()
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
                if (now := time.monotonic()) - since >= SILENCE_S:
                    if size - before < _LEAST_BYTES:
                        raise Unavailable(f"{place.where(name)}: {size - before} bytes came in {SILENCE_S:g} s")
                    since, before = now, size
        return size

    def _check_size(self, place: Place, name: str, size: int) -> None:
        limit, fix = self._limit(name)
        if limit is not None and size > limit:
            raise InvalidArgument(f"{place.where(name)}: {size} bytes or more, the limit is {limit}{fix}")

    async def version(self, place: Place, name: str) -> str | None:
        """What version a file is of now; asked as often as a file is read: an error would lose what was read."""
        for idle in range(1, _ATTEMPTS):
            try:
                return await ask_version(place, name)
            except Unavailable as error:
                pause_s = self._pause_s(idle, error)
                log.info("place is asked again after an error file=%s error=%s", name, error)
                await asyncio.sleep(pause_s)
        return await ask_version(place, name)

    async def changed(self, place: Place, noted: Mapping[str, str | None]) -> list[str]:
        """Files that are others by now than the versions that were noted of them, as far as their place can tell: files
        of two versions may fit each other by form."""
        found = {name: await self.version(place, name) for name, version in noted.items() if version is not None}
        return [name for name, version in found.items() if version not in (None, noted[name])]

    async def verify(self, place: Place, partial: Partial, name: str) -> None:
        """Compare a whole file's SHA-256 with what the place expects; raises DigestMismatch, and drops the file."""
        expected = place.expected_sha256(name)
        if expected is None:
            return
        found = (await in_thread(file_sha256, partial.folder / name)).hex()
        if found != expected:
            partial.drop(name)
            raise DigestMismatch(
                f"{place.where(name)}: its sha256 is {found}, not {expected}; correct the source or what is there"
            )


async def ask_version(place: Place, name: str) -> str | None:
    """`place.version`, in bounded time."""
    with silence(place.where(name)):
        async with asyncio.timeout(SILENCE_S):
            return await place.version(name)


@contextlib.contextmanager
def silence(where: str) -> Iterator[None]:
    """Say which place it was that did not answer in time."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(f"{where}: no answer for {SILENCE_S:g} s") from error


async def _next(opened: Opened, where: str) -> bytes:
    """The next bytes of a file; none at its end."""
    with silence(where):
        async with asyncio.timeout(SILENCE_S):
            return await anext(opened.chunks, b"")
