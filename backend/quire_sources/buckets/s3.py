# SPDX-License-Identifier: Apache-2.0
"""Signs URLs of S3-compatible buckets, and converts the errors that these buckets return."""

import os
import re
from collections.abc import Mapping
from typing import Any

from obstore.store import ObjectStore, S3Store

from quire_sources.buckets.url_signer import (
    RETRY_CONFIG,
    Method,
    SignedRequest,
    UrlSigner,
    client_options,
)
from quire_sources.http.errors import error_from_status
from quire_spec.documents.sources import S3Source
from quire_spec.errors import AccessDenied, Unavailable

DEFAULT_REGION = "us-east-1"
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


class S3Signer(UrlSigner):
    """Signs the URLs of one S3-compatible bucket."""

    KIND = SCHEME = "s3"

    def __init__(self, source: S3Source) -> None:
        super().__init__(source)
        self._region = source.region

    async def sign(self, method: Method, key: str, credentials: Mapping[str, str], display_name: str) -> SignedRequest:
        options = self._store_options(credentials, os.environ)
        url = await self._sign(method, key, options, display_name)
        return SignedRequest(url.partition("?")[0] if options.items() >= _ANONYMOUS_CREDENTIALS.items() else url)

    def error_from_status(self, source: str, status: int, headers: Mapping[str, str], body: bytes) -> Unavailable:
        # The message quotes only the error code, because the bucket's response repeats the request with its token.
        match = _ERROR_CODE.search(body.decode(errors="replace"))
        code = f" {match[1]}" if match else ""
        if status == 400:
            return AccessDenied(
                f"{source}: HTTP 400{code}; the source's secret is wrong or expired, or the region is wrong"
            )
        if status == 301:
            return Unavailable(f"{source}: HTTP 301{code}; the bucket is in another region; correct region or endpoint")
        return error_from_status(source, status, headers, code)

    def _new_store(self, options: dict[str, Any]) -> ObjectStore:
        return S3Store(self._bucket, **options)

    def _store_options(self, credentials: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
        options: dict[str, Any] = {
            "region": self._region or DEFAULT_REGION,
            "client_options": client_options(self.endpoint),
            "retry_config": RETRY_CONFIG,
        }
        if self.endpoint:
            options["endpoint"] = self.endpoint
        if credentials:
            options["access_key_id"] = credentials["AWS_ACCESS_KEY_ID"]
            options["secret_access_key"] = credentials["AWS_SECRET_ACCESS_KEY"]
            if token := credentials.get("AWS_SESSION_TOKEN"):
                options["session_token"] = token
        elif not has_ambient_credentials(environment):
            options |= _ANONYMOUS_CREDENTIALS
        return options


def has_ambient_credentials(environment: Mapping[str, str]) -> bool:
    """Return whether the platform gives this process an identity. Otherwise, a source without a Secret is read without
    signatures."""
    return any(environment.get(name) for name in _AMBIENT_CREDENTIAL_VARIABLES)
