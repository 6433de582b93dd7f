# SPDX-License-Identifier: Apache-2.0
"""Checks whether a request is allowed to use a route. The checks depend on the keys that are configured. If no keys are
configured, requests from web pages of other sites are rejected.

If keys are configured, every route except OPEN_ROUTES needs a key. A new route therefore needs a key unless it is added
to OPEN_ROUTES.
"""

import ipaddress
from collections.abc import Mapping

from quire_server.openai.errors import ApiError, error_from_code
from quire_server.openai.http.admin_key import AdminKey
from quire_server.openai.http.api_keys import ApiKeys
from quire_server.openai.http.cache_salts import CacheSalts
from quire_server.openai.http.message import HttpRequest
from quire_server.openai.settings import FrontSettings
from quire_spec.errors import Unavailable

OPEN_ROUTES = frozenset({"/", "/health", "/ping", "/version", "/metrics", "/load", "/live", "/openapi.json"})
"""Routes that need no key. The live page itself contains no data. The events that it shows need a key."""
ALL_ADAPTERS_ROUTES = frozenset({"/metrics", "/live", "/live/events"})
"""Routes that name all adapters. They are not served if keys may use different adapters."""
ADMIN_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that need the admin key instead of an API key."""


class AccessControl:
    """Checks the requests of one front."""

    def __init__(self, settings: FrontSettings) -> None:
        openai = settings.openai
        self._has_key_rules = bool(openai.keys)
        self._keys = ApiKeys(openai.apiKeysDir) if openai.apiKeysDir else None
        self._salts = None if self._keys is None or openai.sharedPrefixCache else CacheSalts(settings)
        self._admin_key = AdminKey(settings.admin_key_file) if settings.admin_key_file else None
        self._is_loopback = is_loopback(settings.host)
        self._origins = {origin.encode() for origin in openai.corsAllowedOrigins}

    def check(self, request: HttpRequest) -> None:
        """Check a request and record the name of its API key; raises ApiError if the request is not allowed."""
        if self._keys is None:
            self._check_without_keys(request)
        if self._has_key_rules and request.path in ALL_ADAPTERS_ROUTES:
            raise ApiError(
                403,
                f"{request.path}: not served, because it names the adapters of all API keys; read /metrics on the "
                "health port",
            )
        if request.path in ADMIN_ROUTES and self._admin_key is not None:
            self._check_admin_key(self._admin_key, request)
        elif self._keys is not None and request.path not in OPEN_ROUTES:
            request.api_key_name = self._keys.authenticate(_authorization(request.headers))
        if request.path in ADMIN_ROUTES and self._admin_key is None:
            raise ApiError(
                403,
                f"{request.path}: adapters cannot be changed through this API; on a cluster, edit spec.adapters of the "
                "LLMService; elsewhere, start the server with --allow-runtime-lora-updating",
            )

    def cache_salt(self, request: HttpRequest, salt: str | None) -> str | None:
        """Return the salt that the prefix cache uses for a request. `salt` is the field cache_salt of the request."""
        return salt if self._salts is None else self._salts.salt(request.api_key_name, salt)

    def cors_headers(self, request: HttpRequest) -> list[tuple[bytes, bytes]]:
        """Return the headers that allow a web page to read a response. The list is empty unless the origin of the page
        is configured."""
        origin = request.headers.get(b"origin", b"")
        if not origin or not ({origin, b"*"} & self._origins):
            return []
        headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        return [*headers, (b"access-control-expose-headers", b"x-request-id, retry-after, x-quire-ignored-fields")]

    def preflight_headers(self, request: HttpRequest) -> list[tuple[bytes, bytes]]:
        """Return the additional headers for the response to a browser's OPTIONS request. The list is empty unless the
        origin of the page is configured.

        The page may send all headers that it asks for, as in vLLM. OpenAI's JavaScript client adds several of its own.
        """
        if not self.cors_headers(request):
            return []
        requested = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
        return [
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", requested),
            (b"access-control-max-age", b"600"),
        ]

    def _check_admin_key(self, key: AdminKey, request: HttpRequest) -> None:
        try:
            is_admin = key.matches(request.headers.get(b"authorization", b"").decode("latin-1"))
        except Unavailable as error:
            raise error_from_code(error.code, str(error)) from None
        if not is_admin:
            raise ApiError(401, "authorization: send 'Authorization: Bearer KEY' with the admin key", "authorization")

    def _check_without_keys(self, request: HttpRequest) -> None:
        """Reject requests that a web page could send. A user of this machine may have opened such a page in a
        browser."""
        content_type = request.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if request.method == "POST" and content_type != b"application/json":
            raise ApiError(415, "content-type: must be application/json", "content-type")
        # Another site can make its own name point to this machine (DNS rebinding). The requests of its pages then
        # contain that name as Host.
        host = request.headers.get(b"host", b"").decode("latin-1")
        if self._is_loopback and not is_loopback(_without_port(host)):
            raise ApiError(
                403, f"host: {host[:100]!r} is not this machine; use localhost, or configure API keys", "host"
            )


def is_loopback(host: str) -> bool:
    """Return True for localhost and for addresses of this machine."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _authorization(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the header Authorization. Clients of Anthropic's API send the key as X-Api-Key instead."""
    authorization, key = headers.get(b"authorization", b""), headers.get(b"x-api-key")
    return b"Bearer " + key if key is not None and not authorization else authorization


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (
        name
        if colon and port.isdigit() and not name.endswith(":") and (":" not in name or name.endswith("]"))
        else host
    )
