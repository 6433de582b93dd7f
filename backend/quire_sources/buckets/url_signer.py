# SPDX-License-Identifier: Apache-2.0
"""Creates signed URLs for the objects of a bucket.

obstore is used only to sign URLs. Its reader would send a session token to any host to which a bucket redirects, and it
would connect to addresses outside of the operator's borders.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import Any, ClassVar, Literal
from urllib.parse import quote, urlsplit

import obstore
from obstore.store import ObjectStore

from quire_sources.http.errors import error_from_status
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.documents.sources import AzureSource, GcsSource, S3Source
from quire_spec.errors import ConfigError, Unavailable
from quire_spec.net.redaction import describe_error

Method = Literal["GET", "HEAD"]

SIGNED_URL_LIFETIME = timedelta(minutes=15)
"""A signed URL is valid for this time, measured by the clock of the bucket. AWS accepts a request even if the clocks of
the client and the bucket differ by up to the same time."""
RETRY_CONFIG: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=20)}
"""Callers retry."""
_BUCKET_NAME = re.compile(r"[\w.$-]+", re.ASCII)
_SYSTEM_ERROR = re.compile(r'(?:message|error): "([\w :,-]{1,200}?)(?:: http|")')
_ENDPOINT = re.compile(r"https?://(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[\w.~/-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """What a request for one object needs."""

    url: str
    """The encoded URL. Its query can contain a signature."""
    secret_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that are sent only to the origin of the URL."""


class UrlSigner(ABC):
    """Signs the URLs of one bucket. All URLs are signed with the same obstore store until the credentials change.

    The store keeps the identity that it has got from the cloud platform. A new store would request the identity again.
    Each object store has a subclass.
    """

    KIND: ClassVar[str]
    """Name of the source's field, for messages."""
    SCHEME: ClassVar[str]
    """Scheme of the source's URI."""

    def __init__(self, source: S3Source | GcsSource | AzureSource) -> None:
        """Raises ConfigError if the URI is not SCHEME://bucket/prefix, or if the endpoint is not a URL."""
        self._bucket, self.prefix = parse_uri(self.KIND, self.SCHEME, source.uri)
        if source.endpoint is not None:
            check_endpoint(self.KIND, source.endpoint)
        self.place, self.endpoint = f"{self.SCHEME}://{self._bucket}", source.endpoint
        self._options: dict[str, Any] = {}
        self._store: ObjectStore | None = None
        self._lock = threading.Lock()

    @abstractmethod
    async def sign(self, method: Method, key: str, credentials: Mapping[str, str], display_name: str) -> SignedRequest:
        """Return what a request for the object `key` needs. `credentials` are the values of the source's Secret. If
        they are empty, the identity that the cloud platform gives to this process is used; if it gives none, the
        request is not signed.

        Raises:
            Unavailable: the cloud platform gave no identity. ConfigError: obstore panicked.
        """

    @abstractmethod
    def _new_store(self, options: dict[str, Any]) -> ObjectStore:
        """Return obstore's store for some credentials."""

    def error_from_status(self, source: str, status: int, headers: Mapping[str, str], body: bytes) -> Unavailable:
        """Return the error for a response of the bucket. It contains no secrets. `body` is the beginning of the
        response's body."""
        return error_from_status(source, status, headers)

    async def _sign(self, method: Method, key: str, options: dict[str, Any], display_name: str) -> str:
        """Return a URL that obstore signs. `options` are the arguments of `_new_store`."""
        return await run_in_daemon_thread(self._sign_now, method, key, options, display_name)

    def _sign_now(self, method: Method, key: str, options: dict[str, Any], display_name: str) -> str:
        try:
            with self._lock:
                if self._store is None or options != self._options:
                    self._store, self._options = self._new_store(options), options
                store = self._store
            # sign_async is not used, because its Rust threads call into Python. If the process ends soon afterwards,
            # they abort it (SIGABRT in 4 of 25 runs of a reader that got no response).
            return str(obstore.sign(store, method, key, SIGNED_URL_LIFETIME))
        except Exception as error:
            raise Unavailable(f"{display_name}: {_describe_signing_error(error)}") from error
        except BaseException as error:
            # A panic in Rust is a BaseException, but not an Exception. If it was not handled here, the source of a
            # single service could end the operator.
            raise ConfigError(
                f"{display_name}: obstore failed: {describe_error(error)}; correct the source or its Secret"
            ) from error


def client_options(endpoint: str | None) -> dict[str, Any]:
    """Return obstore's client options. The timeouts apply to the identity service of the cloud platform. It is the only
    server that obstore itself calls."""
    return {
        "allow_http": bool(endpoint and endpoint.startswith("http://")),
        "connect_timeout": timedelta(seconds=15),
        "timeout": timedelta(seconds=30),
    }


def parse_uri(kind: str, scheme: str, uri: str) -> tuple[str, str]:
    """Return the bucket and the prefix of a URI such as s3://bucket/prefix. `kind` is the name of the source's field.

    Raises:
        ConfigError: the URI has another form. The message does not quote it, because it may contain a password.
    """
    parts = urlsplit(uri)
    if parts.scheme != scheme or not _BUCKET_NAME.fullmatch(parts.netloc) or ".." in parts.path.split("/"):
        raise ConfigError(f"{kind} source: the uri must be {scheme}://bucket/prefix; put credentials into a Secret")
    return parts.netloc, parts.path.strip("/")


def object_url(base: str, bucket: str, key: str) -> str:
    """Return the unsigned URL of an object in a store whose URLs are BASE/BUCKET/KEY."""
    return f"{base.rstrip('/')}/{quote(bucket)}/{quote(key)}"


def check_endpoint(kind: str, endpoint: str) -> None:
    """Raise ConfigError for an endpoint that makes obstore panic. `kind` is the name of the source's field."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match["port"] or 0) >= 2**16 or not _is_host(match["host"]):
        # The message does not quote the endpoint, because the invalid part of it may be a password.
        raise ConfigError(f"{kind} source: the endpoint must be http(s)://host[:port][/path]; correct it")


def _is_host(text: str) -> bool:
    """Return False for an invalid IP address."""
    try:
        if text.startswith("["):
            IPv6Address(text[1:-1])
        elif text.rstrip(".").rpartition(".")[2].isdecimal():
            IPv4Address(text)
    except ValueError:
        return False
    return True


def _describe_signing_error(error: BaseException) -> str:
    """Return the cause of a signing error. The message of obstore is the same for all connections that fail, so the
    cause is read from obstore's debug output."""
    text = describe_error(error).rpartition(" - ")[2]
    if "error sending request" not in text:
        # The part before the dash contains the URL and the duration.
        return text
    if match := _SYSTEM_ERROR.search(str(error)):
        return match[1]
    return "no response in time" if "TimedOut" in str(error) else text
