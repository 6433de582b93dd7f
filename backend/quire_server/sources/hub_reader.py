# SPDX-License-Identifier: Apache-2.0
"""Files of a Hugging Face hub repository: huggingface_hub says what and where, http_place.py reads the bytes.

Not hf_hub_download: it cannot stop at a size, and forgets what it has when a download fails.
"""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import httpx
import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from yarl import URL

from quire_server.blocking import run_in_daemon_thread
from quire_server.sources.http_reader import HttpClient
from quire_server.sources.reader import OpenFile
from quire_spec.errors import AccessDenied, InvalidArgument, NotFound, Unavailable
from quire_spec.net.http_errors import error_from_status
from quire_spec.net.redaction import describe_error, redact_urls

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_S = 15.0


class HubReader:
    """One repository at one revision. The revision is resolved once, so that both files are of one commit."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        repo: str,
        revision: str | None,
        token: Callable[[], str | None],
        endpoint: str | None = None,
    ) -> None:
        """`token` reads the token; None is the environment's (HF_TOKEN, or a login).

        `endpoint` None is huggingface_hub's own, which HF_ENDPOINT sets.
        """
        self.is_immutable = bool(revision and _COMMIT.fullmatch(revision))
        self._client = HttpClient(session)
        self._repo = repo
        self._revision = revision
        self._token = token
        self._endpoint = endpoint
        self._sha256: dict[str, str] = {}
        self._resolved_commit: str | None = None

    @property
    def revision(self) -> str | None:
        return self._resolved_commit

    def display_name(self, name: str) -> str:
        revision = repr(self._revision) if self._revision else "its default branch"
        return f"hub repository {self._repo!r} at {revision}, {name}"

    def expected_sha256(self, name: str) -> str | None:
        return self._sha256.get(name)

    async def version(self, name: str) -> str | None:
        metadata = await run_in_daemon_thread(self._fetch_metadata, name)
        # Large files have their content's SHA-256 for an ETag.
        if metadata.etag and _SHA256.fullmatch(metadata.etag):
            self._sha256[name] = metadata.etag
        if metadata.commit_hash:
            self._revision = self._resolved_commit = metadata.commit_hash
        return f"{metadata.commit_hash}/{metadata.etag}" if metadata.commit_hash and metadata.etag else None

    @asynccontextmanager
    async def open(self, name: str, start: int, version: str | None) -> AsyncIterator[OpenFile]:
        current_version = await self.version(name)
        # A commit's file never changes: a range of it needs no If-Range, which storage behind redirects may not know.
        range_headers = {"Range": f"bytes={start}-"} if start and version and version == current_version else {}
        async with AsyncExitStack() as stack:
            try:
                file_context = self._client.open(URL(self._url(name)), self._headers(), range_headers)
                file = await stack.enter_async_context(file_context)
            except NotFound as error:
                # The hub has just said that it is there: one that need not be there would be left out.
                raise Unavailable(f"{self.display_name(name)}: {error}") from error
            except Unavailable as error:
                raise type(error)(f"{self.display_name(name)}: {error}", error.retry_after_s) from error
            yield OpenFile(file.start, file.size, current_version, file.chunks)

    def _url(self, name: str) -> str:
        return str(huggingface_hub.hf_hub_url(self._repo, name, revision=self._revision, endpoint=self._endpoint))

    def _headers(self) -> dict[str, str]:
        return dict(huggingface_hub.utils.build_hf_headers(token=self._token(), library_name="quire"))

    def _fetch_metadata(self, name: str) -> huggingface_hub.HfFileMetadata:
        display_name = self.display_name(name)
        try:
            return huggingface_hub.get_hf_file_metadata(
                self._url(name), token=self._token(), timeout=_TIMEOUT_S, endpoint=self._endpoint
            )
        except HFValidationError as error:
            raise InvalidArgument(f"{display_name}: {error}") from error
        except EntryNotFoundError as error:
            raise NotFound(f"{display_name}: no such file; Quire reads adapters stored as safetensors") from error
        except RepositoryNotFoundError as error:
            # The hub answers 401 to whoever may not know; so it does for a name that nobody has.
            error_type = NotFound if error.response.status_code == 404 else AccessDenied
            raise error_type(
                f"{display_name}: no such repository, or it is private and the source's token is missing or lacks "
                "access"
            ) from error
        except HfHubHTTPError as error:
            raise _hub_error(display_name, error) from error
        except httpx.InvalidURL as error:
            raise Unavailable(f"{display_name}: {describe_error(error)}; correct HF_ENDPOINT or NO_PROXY") from error
        except (httpx.HTTPError, ImportError, OSError, RuntimeError, ValueError) as error:
            # ImportError: a proxy by SOCKS. RuntimeError: another thread has closed huggingface_hub's client.
            raise Unavailable(
                f"{display_name}: no answer from {redact_urls(self._url(name))}: {describe_error(error)}"
            ) from error


def _hub_error(display_name: str, error: HfHubHTTPError) -> NotFound | Unavailable:
    status = error.response.status_code
    if status == 404:
        return NotFound(f"{display_name}: HTTP 404; check repo and revision")
    if status in (401, 403):
        return AccessDenied(f"{display_name}: HTTP {status}; the source's token is missing, wrong, or lacks access")
    return error_from_status(display_name, status, error.response.headers)
