# SPDX-License-Identifier: Apache-2.0
"""Reads a repository of the Hugging Face hub at one revision.

huggingface_hub builds the URLs and the headers (tokens, HF_ENDPOINT), and http/client.py sends the requests.
hf_hub_download is not used. It cannot stop at a size limit, and it discards the partial file when a download fails.
"""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import huggingface_hub
from huggingface_hub.errors import HFValidationError
from yarl import URL

from quire_sources.http.client import HttpClient, range_headers
from quire_sources.http.errors import error_from_status
from quire_sources.reader import FileMissing, OpenFile
from quire_spec.documents.sources import HuggingFaceSource
from quire_spec.errors import AccessDenied, ConfigError, NotFound, Unavailable

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ERRORS = {
    "RepoNotFound": "no such repository, or it is private and the source's token is missing or lacks access",
    "RevisionNotFound": "the repository has no such revision; correct the revision, or omit it",
    "GatedRepo": "the repository is gated; accept its licence on the hub and use a token that has access",
}
"""Maps the possible values of the header X-Error-Code to error messages."""


class HubReader:
    """Reads one repository at one revision. The revision is resolved to a commit only once, so that all files belong to
    the same commit."""

    def __init__(
        self,
        client: HttpClient,
        source: HuggingFaceSource,
        token: Callable[[], str | None],
        endpoint: str | None = None,
    ) -> None:
        """`token` returns the token for the hub. If the function returns None, the token of the environment is used
        (HF_TOKEN, or a login).

        `endpoint` is the URL of the hub. None: the default of huggingface_hub, which can be set with HF_ENDPOINT.
        """
        self.is_immutable = bool(source.revision and _COMMIT.fullmatch(source.revision))
        self._client = client
        self._repo = source.repo
        self._requested_revision = source.revision
        self._token = token
        self._endpoint = endpoint
        self._sha256: dict[str, str] = {}
        self._commit: str | None = None

    @property
    def revision(self) -> str | None:
        return self._commit

    def display_name(self, name: str) -> str:
        revision = self._commit or self._requested_revision
        repository = f"hub repository {self._repo!r} at {repr(revision) if revision else 'its default branch'}"
        return f"{repository}, {name}" if name else repository

    def expected_sha256(self, name: str) -> str | None:
        return self._sha256.get(name)

    async def version(self, name: str) -> str | None:
        display_name = self.display_name(name)
        async with self._client.request(
            "HEAD", self._file_url(name), self._headers(), {}, display_name, _has_metadata
        ) as response:
            headers = response.headers
            if response.status >= 400:
                raise _error_from_response(display_name, response)
        commit = headers.get("X-Repo-Commit")
        etag = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/").strip('"')
        # The ETag of a large file is the SHA-256 of its content.
        if _SHA256.fullmatch(etag):
            self._sha256[name] = etag
        if commit:
            self._commit = commit
        return f"{commit}/{etag}" if commit and etag else None

    @asynccontextmanager
    async def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AsyncIterator[OpenFile]:
        current_version = await self.version(name)
        # Within a commit, a file never changes. A request for a range therefore needs no If-Range, which the storage
        # behind a redirect may not implement.
        offset = start if version in (None, current_version) else 0
        headers = range_headers(offset, None, num_bytes)
        async with AsyncExitStack() as stack:
            try:
                file_context = self._client.open(
                    self._file_url(name), self._headers(), headers, self.display_name(name)
                )
                file = await stack.enter_async_context(file_context)
            except NotFound as error:
                # The hub has just reported that the file exists. If NotFound was raised, the caller would leave out an
                # optional file.
                raise Unavailable(str(error)) from error
            yield OpenFile(file.start, file.size, current_version, file.chunks)

    def _file_url(self, name: str) -> URL:
        try:
            url = huggingface_hub.hf_hub_url(
                self._repo, name, revision=self._commit or self._requested_revision, endpoint=self._endpoint
            )
        except HFValidationError as error:
            raise ConfigError(f"{self.display_name(name)}: {error}") from error
        return URL(url)

    def _headers(self) -> dict[str, str]:
        return dict(huggingface_hub.utils.build_hf_headers(token=self._token(), library_name="quire"))


def _has_metadata(response: aiohttp.ClientResponse) -> bool:
    """Return True if the headers of a response contain the commit and the ETag. For a large file, the hub redirects to
    the storage, and the redirect already contains both headers."""
    return "X-Repo-Commit" in response.headers and ("X-Linked-Etag" in response.headers or "ETag" in response.headers)


def _error_from_response(display_name: str, response: aiohttp.ClientResponse) -> NotFound | Unavailable:
    code = response.headers.get("X-Error-Code", "")
    if code in _ERRORS:
        # The hub responds with 401 both for a private repository and for a repository that does not exist.
        return (NotFound if response.status == 404 else AccessDenied)(f"{display_name}: {_ERRORS[code]}")
    if response.status == 404:
        return FileMissing(f"{display_name}: no such file; Quire reads files stored as safetensors")
    return error_from_status(display_name, response.status, response.headers)
