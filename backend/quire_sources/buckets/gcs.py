# SPDX-License-Identifier: Apache-2.0
"""Signs URLs of Google Cloud Storage, whose XML API answers at https://storage.googleapis.com/BUCKET/OBJECT.

A service account's key signs URLs on this machine. The identity of a pod comes as a token from the metadata server of
Google's platform; its requests have a header instead of a signature, because signing would need a further permission.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from obstore.store import GCSStore, ObjectStore

from quire_sources.buckets.url_signer import (
    RETRY_CONFIG,
    Method,
    SignedRequest,
    UrlSigner,
    client_options,
    object_url,
)
from quire_spec.documents.sources import GcsSource
from quire_spec.errors import Unavailable
from quire_spec.net.redaction import describe_error

_ENDPOINT = "https://storage.googleapis.com"
_METADATA_HOST = "GCE_METADATA_HOST"
"""Environment variable of Google's client libraries. If it is set, the pod uses the identity of its platform."""
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"
_TOKEN_TIMEOUT = aiohttp.ClientTimeout(total=20)
_RENEW_BEFORE_S = 300.0
"""A token is renewed this long before it expires. Google keeps tokens until about then."""


class GcsSigner(UrlSigner):
    """Signs the URLs of one bucket of Google Cloud Storage."""

    KIND, SCHEME = "gcs", "gs"

    def __init__(self, source: GcsSource) -> None:
        super().__init__(source)
        self._token, self._token_until = "", 0.0

    async def sign(self, method: Method, key: str, credentials: Mapping[str, str], display_name: str) -> SignedRequest:
        if credentials:
            options = {"service_account_key": credentials["key.json"]}
            return SignedRequest(await self._sign(method, key, options, display_name))
        url = object_url(self.endpoint or _ENDPOINT, self._bucket, key)
        if host := os.environ.get(_METADATA_HOST):
            return SignedRequest(url, {"Authorization": f"Bearer {await self._identity_token(host, display_name)}"})
        return SignedRequest(url)

    def _new_store(self, options: dict[str, Any]) -> ObjectStore:
        return GCSStore(
            self._bucket,
            **options,
            base_url=self.endpoint or _ENDPOINT,
            client_options=client_options(self.endpoint),
            retry_config=RETRY_CONFIG,
        )

    async def _identity_token(self, host: str, display_name: str) -> str:
        """Return the access token of the pod's service account.

        A session of its own asks for it: the metadata server has a link-local address, to which the readers of an
        operator never connect, and no proxy leads to it.
        """
        if time.monotonic() < self._token_until:
            return self._token
        headers = {"Metadata-Flavor": "Google"}
        try:
            async with (
                aiohttp.ClientSession(timeout=_TOKEN_TIMEOUT) as session,
                session.get(f"http://{host}{_TOKEN_PATH}", headers=headers, allow_redirects=False) as response,
            ):
                response.raise_for_status()
                answer = await response.json(content_type=None)
            self._token, lifetime_s = str(answer["access_token"]), float(answer["expires_in"])
        except aiohttp.ClientResponseError as error:
            raise Unavailable(f"{display_name}: the metadata server {host} answered HTTP {error.status}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(
                f"{display_name}: no token from the metadata server {host}: {describe_error(error)}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{display_name}: the metadata server {host} sent no token") from error
        self._token_until = time.monotonic() + max(0.0, lifetime_s - _RENEW_BEFORE_S)
        return self._token
