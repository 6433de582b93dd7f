# SPDX-License-Identifier: Apache-2.0
"""Files under a prefix of an S3-compatible bucket, by obstore."""

import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import S3Store

from quire_server.places import Opened
from quire_spec.errors import AccessDenied, InvalidArgument, NotFound, QuireError, Unavailable
from quire_spec.s3 import check_endpoint, refused, store_options

_BUCKET = re.compile(r"[\w.-]+", re.ASCII)
_AS_IT_IS = ("identity", "aws-chunked", "")
"""Encodings that change nothing: the second is what some uploads leave behind."""
_READ_BYTES = 2**18
"""What a cut may cost: obstore keeps back what is less."""
_TIMEOUT_S = 600.0
"""Of a file as a whole; a download that it cuts is resumed."""


class S3Place:
    """One prefix of one bucket."""

    fixed = False
    revision = None

    def __init__(
        self, uri: str, endpoint: str | None, region: str | None, credentials: Callable[[], Mapping[str, str]]
    ) -> None:
        """`credentials` reads AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and maybe AWS_SESSION_TOKEN; or nothing.

        Raises:
            InvalidArgument: the URI is not s3://bucket/prefix, or the endpoint not a URL.
        """
        parts = urlsplit(uri)
        if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc) or ".." in parts.path.split("/"):
            raise InvalidArgument("s3 source: the uri is not s3://bucket/prefix; a key belongs into a Secret")
        if endpoint is not None:
            check_endpoint(endpoint)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._endpoint = endpoint
        self._region = region
        self._credentials = credentials

    def where(self, name: str) -> str:
        at = f" at {self._endpoint}" if self._endpoint else ""
        return f"s3://{self._bucket}/{self._path(name)}{at}"

    def expected_sha256(self, name: str) -> str | None:
        return None

    async def version(self, name: str) -> str | None:
        try:
            return _etag(await obstore.head_async(self._store(), self._path(name)))
        except Exception as error:
            raise self._refused(name, error) from error

    @asynccontextmanager
    async def open(self, name: str, start: int, version: str | None) -> AsyncIterator[Opened]:
        try:
            found, begin = await _get(self._store(), self._path(name), start, version)
        except Exception as error:
            raise self._refused(name, error) from error
        encoding = str(found.attributes.get("Content-Encoding", _AS_IT_IS[0]))
        if encoding not in _AS_IT_IS:
            raise Unavailable(f"{self.where(name)}: is stored as {encoding}; store the files as they are")
        # A part need not say what version it is of: it was asked for by its version.
        now = _etag(found.meta) or (version if begin else None)
        yield Opened(begin, found.meta["size"], now, self._chunks(found, name))

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    def _store(self) -> S3Store:
        options = store_options(self._endpoint, self._region, self._credentials(), os.environ, _TIMEOUT_S)
        return S3Store(self._bucket, **options)

    async def _chunks(self, found: "obstore.GetResult", name: str) -> AsyncIterator[bytes]:
        try:
            async for data in found.stream(min_chunk_size=_READ_BYTES):
                yield bytes(data)
        except Exception as error:
            raise self._refused(name, error) from error

    def _refused(self, name: str, error: Exception) -> QuireError:
        """What to tell of any error of obstore's; one of them, RustPanic, can be imported from nowhere."""
        if isinstance(error, QuireError):
            # Of the Secret: it has said all there is.
            return error
        where = self.where(name)
        if isinstance(error, FileNotFoundError):
            return NotFound(f"{where}: no such object; check bucket and prefix, and that it is stored as safetensors")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return AccessDenied(f"{where}: access denied; the source's secret is missing, wrong, or lacks access")
        return refused(where, error)


async def _get(store: S3Store, path: str, start: int, version: str | None) -> "tuple[obstore.GetResult, int]":
    """The object from `start` if it still is `version`, else from its beginning; and where that is."""
    if start and version:
        # Nothing comes after the end, which no range can ask for; and it may end sooner than what we hold.
        if start >= (await obstore.head_async(store, path))["size"]:
            return await obstore.get_async(store, path), 0
        with contextlib.suppress(PreconditionError):
            found = await obstore.get_async(store, path, options={"range": {"offset": start}, "if_match": version})
            if _etag(found.meta) in (None, version):
                return found, start
    return await obstore.get_async(store, path), 0


def _etag(meta: Mapping[str, Any]) -> str | None:
    etag = meta.get("e_tag")
    return str(etag) if etag else None
