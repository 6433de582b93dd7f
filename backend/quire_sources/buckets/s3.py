# SPDX-License-Identifier: Apache-2.0
"""Creates signed URLs for S3-compatible buckets, and converts the errors that buckets return.

obstore is used only to sign URLs. Its reader would send a session token to any host to which a bucket redirects.
"""

import os
import re
import threading
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Literal

import obstore
from obstore.store import S3Store

from quire_sources.http.errors import error_from_status as http_error_from_status
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.errors import AccessDenied, ConfigError, Unavailable
from quire_spec.net.redaction import describe_error

SIGNED_URL_LIFETIME = timedelta(minutes=15)
"""A signed URL is valid for this time, measured by the clock of the bucket. AWS accepts a request even if the clocks of
the client and the bucket differ by up to the same time."""
_DEFAULT_REGION = "us-east-1"
_ANONYMOUS_CREDENTIALS = {"access_key_id": "-", "secret_access_key": "-"}
"""Placeholder credentials for public buckets. The URL is signed with them, and then the signature is removed."""
_AMBIENT_CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Environment variables through which a cloud platform gives an identity to a pod. If none of them is set, requests are
not signed."""
_ERROR_CODES = (
    "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken", "InternalError",
    "InvalidAccessKeyId", "InvalidBucketName", "InvalidRequest", "InvalidToken", "MethodNotAllowed", "NoSuchBucket",
    "NoSuchKey", "PermanentRedirect", "RequestTimeTooSkewed", "RequestTimeout", "ServiceUnavailable",
    "SignatureDoesNotMatch", "SlowDown", "TemporaryRedirect", "XAmzContentSHA256Mismatch",
)  # fmt: skip
_ERROR_CODE = re.compile(rf"<Code>({'|'.join(_ERROR_CODES)})</Code>")
"""Only known codes are quoted, because the response can come from any service."""
_SYSTEM_ERROR = re.compile(r'(?:message|error): "([\w :,-]{1,200}?)(?:: http|")')
_ENDPOINT = re.compile(r"https?://(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[\w.~/-]*)?", re.ASCII)


class S3Signer:
    """Signs the URLs of one bucket. All URLs are signed with the same obstore store until the credentials change.

    The store keeps the identity that it has got from the cloud platform. A new store would request the identity again.
    """

    def __init__(self, bucket: str, endpoint: str | None, region: str | None) -> None:
        self._bucket, self._endpoint, self._region = bucket, endpoint, region
        self._options: dict[str, Any] = {}
        self._store: S3Store | None = None
        self._lock = threading.Lock()

    async def sign(
        self, method: Literal["GET", "HEAD"], key: str, credentials: Mapping[str, str], display_name: str
    ) -> str:
        """Return a signed URL for one request. If there are no credentials, the URL has no signature.

        Raises:
            Unavailable: the cloud platform gave no identity. ConfigError: obstore panicked.
        """
        options = store_options(self._endpoint, self._region, credentials, os.environ)
        url = await run_in_daemon_thread(self._sign, method, key, options, display_name)
        return url.partition("?")[0] if options.items() >= _ANONYMOUS_CREDENTIALS.items() else url

    def _sign(self, method: Literal["GET", "HEAD"], key: str, options: dict[str, Any], display_name: str) -> str:
        try:
            with self._lock:
                if self._store is None or options != self._options:
                    self._store, self._options = S3Store(self._bucket, **options), options
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


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for an endpoint that makes obstore panic."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match["port"] or 0) >= 2**16 or not _is_host(match["host"]):
        # The message does not quote the endpoint, because the invalid part of it may be a password.
        raise ConfigError("s3 source: the endpoint must be http(s)://host[:port][/path]; correct it")


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


def store_options(
    endpoint: str | None, region: str | None, credentials: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of obstore's S3Store, without the name of the bucket.

    `credentials` contains AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally AWS_SESSION_TOKEN. It can also be
    empty.
    """
    options: dict[str, Any] = {
        "region": region or _DEFAULT_REGION,
        "client_options": {
            "allow_http": bool(endpoint and endpoint.startswith("http://")),
            # These timeouts apply to the identity service of the cloud platform. It is the only server that obstore
            # itself calls.
            "connect_timeout": timedelta(seconds=15),
            "timeout": timedelta(seconds=30),
        },
        # Callers retry.
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=20)},
    }
    if endpoint:
        options["endpoint"] = endpoint
    if credentials:
        options["access_key_id"] = credentials["AWS_ACCESS_KEY_ID"]
        options["secret_access_key"] = credentials["AWS_SECRET_ACCESS_KEY"]
        if token := credentials.get("AWS_SESSION_TOKEN"):
            options["session_token"] = token
    elif not any(environment.get(name) for name in _AMBIENT_CREDENTIAL_VARIABLES):
        options |= _ANONYMOUS_CREDENTIALS
    return options


def error_from_status(source: str, status: int, headers: Mapping[str, str], body: bytes) -> Unavailable:
    """Return the error for a response of a bucket. It contains no secrets. `body` is the beginning of the response's
    body."""
    # The message quotes only the error code, because the bucket's response repeats the request with its token.
    match = _ERROR_CODE.search(body.decode(errors="replace"))
    code = f" {match[1]}" if match else ""
    if status == 400:
        return AccessDenied(
            f"{source}: HTTP 400{code}; the source's secret is wrong or expired, or the region is wrong"
        )
    if status == 301:
        return Unavailable(f"{source}: HTTP 301{code}; the bucket is in another region; correct region or endpoint")
    return http_error_from_status(source, status, headers, code)


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
