# SPDX-License-Identifier: Apache-2.0
"""Files of a model on a web server, on the Hugging Face hub and in an S3 bucket, read by range. Called by files.py."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import huggingface_hub
import obstore
from huggingface_hub.errors import HFValidationError
from obstore.exceptions import BaseError
from obstore.store import S3Store

from quire_spec.documents.adapter_catalog import HttpSource, HuggingFaceSource, S3Source
from quire_spec.errors import AccessDenied, ConfigError, NotFound, Unavailable
from quire_spec.net import s3
from quire_spec.net.http_errors import error_from_status
from quire_spec.net.redaction import describe_error

_MAX_REDIRECTS = 5
_TIMEOUT = httpx.Timeout(30.0, connect=15.0)
_READ_TIMEOUT_S = 60.0
"""Of one file, where that can be said: few threads read for all services."""


@dataclass(frozen=True, slots=True)
class HttpReader:
    """A folder under a URL. Secret headers go to the URL's own origin only, never where it redirects to."""

    source: HttpSource
    headers: Mapping[str, str] = field(repr=False)

    def display_name(self, name: str) -> str:
        return _redacted(self._url(name))

    def read_range(self, name: str, start: int, max_bytes: int) -> bytes | None:
        with _open_response(
            self._url(name), self.headers, _range_headers(start, max_bytes), self.display_name(name)
        ) as response:
            return (
                None
                if response.status_code in (404, 410)
                else _read_body(response, start, max_bytes, self.display_name(name))
            )

    def _url(self, name: str) -> httpx.URL:
        try:
            base = httpx.URL(self.source.url)
        except httpx.InvalidURL as error:
            # Not quoted: what is wrong with it may be where its password is.
            raise ConfigError("http source: the url cannot be read as one; use http(s)://host/folder") from error
        return base.copy_with(path=f"{base.path.rstrip('/')}/{name}")


@dataclass(frozen=True, slots=True)
class HubReader:
    """A repository of the hub at one revision."""

    source: HuggingFaceSource
    token: str | None = field(default=None, repr=False)
    """None: this machine's own (HF_TOKEN, a login)."""
    endpoint: str | None = None
    """None is huggingface_hub's own, which HF_ENDPOINT sets."""

    def display_name(self, name: str) -> str:
        revision = repr(self.source.revision) if self.source.revision else "its default branch"
        repository = f"hub repository {self.source.repo!r} at {revision}"
        return f"{repository}, {name}" if name else repository

    def read_range(self, name: str, start: int, max_bytes: int) -> bytes | None:
        display_name = self.display_name(name)
        try:
            url = huggingface_hub.hf_hub_url(
                self.source.repo, name, revision=self.source.revision, endpoint=self.endpoint
            )
        except HFValidationError as error:
            raise ConfigError(f"{display_name}: {error}") from error
        headers = huggingface_hub.utils.build_hf_headers(token=self.token, library_name="quire")
        with _open_response(httpx.URL(url), headers, _range_headers(start, max_bytes), display_name) as response:
            code = response.headers.get("X-Error-Code", "")
            if response.status_code == 404 and code in ("", "EntryNotFound"):
                return None
            if code in _HUB_ERRORS:
                # To whoever may not know, the hub says of a private repository that there is none.
                raise (NotFound if response.status_code == 404 else AccessDenied)(
                    f"{display_name}: {_HUB_ERRORS[code]}"
                )
            return _read_body(response, start, max_bytes, display_name)


class S3Reader:
    """The files under a prefix of a bucket."""

    def __init__(self, source: S3Source, credentials: Mapping[str, str]) -> None:
        """`credentials` are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and maybe AWS_SESSION_TOKEN, or nothing.

        Raises:
            ConfigError: one of the two is missing, or the endpoint is no URL.
        """
        if source.endpoint is not None:
            s3.check_endpoint(source.endpoint)
        parts = urlsplit(source.uri)
        self._bucket, self._prefix, self._endpoint = parts.netloc, parts.path.strip("/"), source.endpoint
        if credentials and not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= set(credentials):
            name = source.credentialsSecretRef.name if source.credentialsSecretRef else ""
            raise ConfigError(f"secret {name!r}: needs the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        self._options = s3.store_options(source.endpoint, source.region, credentials, os.environ)

    def display_name(self, name: str) -> str:
        endpoint_suffix = f" at {self._endpoint}" if self._endpoint else ""
        return f"s3://{self._bucket}/{self._key(name)}{endpoint_suffix}"

    def read_range(self, name: str, start: int, max_bytes: int) -> bytes | None:
        display_name = self.display_name(name)
        with _open_response(self._url(name), {}, _range_headers(start, max_bytes), display_name) as response:
            if response.status_code == 404:
                return None
            if response.status_code not in (200, 206, 416):
                body = next(response.iter_raw(s3.MAX_ERROR_BYTES), b"")
                raise s3.error_from_status(display_name, response.status_code, response.headers, body)
            return _read_body(response, start, max_bytes, display_name)

    def _url(self, name: str) -> httpx.URL:
        display_name = self.display_name(name)
        try:
            store = S3Store(self._bucket, **self._options)
            signed = obstore.sign(store, "GET", self._key(name), s3.SIGNED_URL_LIFETIME)
        except (BaseError, OSError, ValueError) as error:
            raise s3.signing_error(display_name, error) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # A panic of obstore's is no Exception: let out, one service's would end the operator.
            raise ConfigError(
                f"{display_name}: cannot be asked: {describe_error(error)}; correct source or Secret"
            ) from error
        return httpx.URL(s3.object_url(signed, self._options))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/")


_HUB_ERRORS = {
    "RepoNotFound": "no such repository, or it is private and the token is missing or lacks access",
    "RevisionNotFound": "the repository has no such revision; correct revision, or omit it",
    "GatedRepo": "the repository is gated; accept its licence on the hub and give a token that may read it",
}


def _range_headers(start: int, max_bytes: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{start + max_bytes - 1}", "Accept-Encoding": "identity"}


@contextlib.contextmanager
def _open_response(
    url: httpx.URL, secret_headers: Mapping[str, str], plain_headers: Mapping[str, str], display_name: str
) -> Iterator[httpx.Response]:
    """The answer to GET behind all redirects, its body unread."""
    target = url
    try:
        for _ in range(_MAX_REDIRECTS + 1):
            headers = {**plain_headers, **(secret_headers if _origin(target) == _origin(url) else {})}
            with httpx.Client(timeout=_TIMEOUT) as client, client.stream("GET", target, headers=headers) as response:
                if not response.has_redirect_location:
                    yield response
                    return
                target = target.join(response.headers["Location"])
                if target.scheme not in ("http", "https") or (url.scheme, target.scheme) == ("https", "http"):
                    raise Unavailable(f"{display_name}: refused a redirect to {target.scheme}")
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        # An ImportError: a proxy by SOCKS. A ValueError: a host that is none.
        origin = _redacted(target.join("/"))
        redirect_note = f"no answer from {origin}: " if target == url else f"it redirects to {origin}: "
        raise Unavailable(f"{display_name}: {redirect_note}{describe_error(error)}") from error
    raise Unavailable(f"{display_name}: more than {_MAX_REDIRECTS} redirects")


def _read_body(response: httpx.Response, start: int, max_bytes: int, display_name: str) -> bytes:
    """The bytes asked for, also of a server that does not know ranges; never more is read."""
    if response.status_code == 416:
        return b""
    if response.status_code in (401, 403):
        raise AccessDenied(
            f"{display_name}: HTTP {response.status_code}; the Secret is missing, wrong, or lacks access"
        )
    if response.status_code not in (200, 206):
        raise error_from_status(display_name, response.status_code, response.headers)
    skip = start if response.status_code == 200 else 0
    data, started_at = bytearray(), time.monotonic()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) >= skip + max_bytes:
            break
        if time.monotonic() - started_at > _READ_TIMEOUT_S:
            raise Unavailable(f"{display_name}: only {len(data)} bytes came in {_READ_TIMEOUT_S:g} s")
    return bytes(data[skip : skip + max_bytes])


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _redacted(url: httpx.URL) -> str:
    """For messages: the query may be a signature, the user a password."""
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))
