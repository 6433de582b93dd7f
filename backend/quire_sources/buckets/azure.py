# SPDX-License-Identifier: Apache-2.0
"""Signs URLs of Azure Blob Storage, whose API answers at https://ACCOUNT.blob.core.windows.net/CONTAINER/BLOB."""

import os
import re
from collections.abc import Mapping
from typing import Any

from obstore.store import AzureStore, ObjectStore

from quire_sources.buckets.url_signer import (
    RETRY_CONFIG,
    Method,
    SignedRequest,
    UrlSigner,
    client_options,
    object_url,
)
from quire_sources.http.errors import error_from_status
from quire_spec.documents.sources import AzureSource
from quire_spec.errors import Unavailable

_IDENTITY = "AZURE_FEDERATED_TOKEN_FILE"
"""Environment variable that the webhook of Azure's workload identity adds to a pod, beside AZURE_CLIENT_ID and
AZURE_TENANT_ID."""
_VARIABLES = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN")
_ERROR_CODE = re.compile(
    r"(AuthenticationFailed|AuthorizationFailure|AuthorizationPermissionMismatch|ContainerNotFound|NoAuthenticationInformation|"
    r"PublicAccessNotPermitted|ResourceNotFound|ServerBusy|AccountIsDisabled|InvalidAuthenticationInfo)"
)
"""Codes in the header x-ms-error-code that are quoted. The response can come from any service."""


class AzureSigner(UrlSigner):
    """Signs the URLs of one container of Azure Blob Storage."""

    KIND, SCHEME = "azure", "az"

    def __init__(self, source: AzureSource) -> None:
        super().__init__(source)
        self._account = source.account
        self.place = f"az://{source.account}/{self._bucket}"

    async def sign(self, method: Method, key: str, credentials: Mapping[str, str], display_name: str) -> SignedRequest:
        url = object_url(self.endpoint or f"https://{self._account}.blob.core.windows.net", self._bucket, key)
        # Without a Secret, the variables of Azure's tools count.
        credentials = credentials or {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
        if token := credentials.get("AZURE_STORAGE_SAS_TOKEN"):
            return SignedRequest(f"{url}?{token.lstrip('?')}")
        if credentials or os.environ.get(_IDENTITY):
            # A signature allows reading, by GET and HEAD. obstore's signature for HEAD allows nothing.
            return SignedRequest(await self._sign("GET", key, self._store_options(credentials), display_name))
        return SignedRequest(url)

    def error_from_status(self, source: str, status: int, headers: Mapping[str, str], body: bytes) -> Unavailable:
        match = _ERROR_CODE.fullmatch(headers.get("x-ms-error-code", ""))
        return error_from_status(source, status, headers, f" {match[1]}" if match else "")

    def _new_store(self, options: dict[str, Any]) -> ObjectStore:
        endpoint = {"endpoint": self.endpoint} if self.endpoint else {}
        return AzureStore(
            self._bucket,
            account_name=self._account,
            **options,
            **endpoint,
            client_options=client_options(self.endpoint),
            retry_config=RETRY_CONFIG,
        )

    def _store_options(self, credentials: Mapping[str, str]) -> dict[str, Any]:
        if key := credentials.get("AZURE_STORAGE_ACCOUNT_KEY"):
            return {"account_key": key}
        if credentials:
            return {
                "client_id": credentials["AZURE_CLIENT_ID"],
                "client_secret": credentials["AZURE_CLIENT_SECRET"],
                "tenant_id": credentials["AZURE_TENANT_ID"],
            }
        # obstore reads the variables of workload identity from the environment.
        return {}
