# SPDX-License-Identifier: Apache-2.0
"""Secret store, which reads the Secrets of a service and creates its admin key.

The admin key belongs to the service's pods and is created only once. The other Secrets are those to which the service's
sources refer.

Secrets are read by name and cached for some minutes. They are never listed, and their values are never written to logs,
status or events.
"""

import asyncio
import base64
import binascii
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.controller.object_cache import ServiceKey, controller_uid
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.render import object_names
from quire_operator.render.configmaps import secret_refs
from quire_spec.documents.adapter_catalog import AdapterCatalog

SECRET_TTL_S = 300.0
"""Seconds for which a Secret is cached. After a Secret has changed, its new value reaches the pods after at most this
time, plus a minute for the kubelet.
"""
MISSING_SECRET_TTL_S = 15.0
"""If a Secret or a key in it does not exist, the operator does not look for it again within this many seconds. The time
is short, because the user often creates the Secret soon.
"""


@dataclass(frozen=True, slots=True)
class CachedSecret:
    """A Secret and the time at which it was read."""

    read_at: float
    body: Mapping[str, Any] | None
    """Body of the Secret, or None if the Secret does not exist."""

    @property
    def values(self) -> dict[str, str]:
        """The values that are text, by key. Other values are omitted."""
        decoded = {}
        for key, text in ((self.body or {}).get("data") or {}).items():
            try:
                decoded[key] = base64.b64decode(text).decode()
            except (binascii.Error, UnicodeDecodeError):
                continue
        return decoded


class SecretStore:
    """Reads and caches Secrets, by namespace and name."""

    def __init__(self, client: ApiClient, ttl_s: float = SECRET_TTL_S) -> None:
        self._client, self._ttl_s = client, ttl_s
        self._cached_secrets: dict[tuple[str, str], CachedSecret] = {}
        """Cached Secrets by namespace and name. The Secret that was read first comes first."""
        self._admin_keys: dict[ServiceKey, tuple[str, str]] = {}
        self._unwritten_keys: set[ServiceKey] = set()
        """Services for which the key in `_admin_keys` is new and has not yet been written to a Secret."""

    async def get(self, namespace: str, name: str, max_age_s: float = math.inf) -> CachedSecret:
        """Return a Secret. Raises ApiError.

        The cached Secret is returned if its age is less than `max_age_s` and less than the TTL.
        """
        now = asyncio.get_running_loop().time()
        cached = self._cached_secrets.get((namespace, name))
        if cached is None or now - cached.read_at > min(max_age_s, self._ttl_s):
            cached = CachedSecret(now, await self._client.get_or_none(resources.SECRET, namespace, name))
            self._store(namespace, name, cached)
        return cached

    async def credentials(
        self, service: LLMService, catalog: AdapterCatalog | None = None
    ) -> dict[str, dict[str, str]]:
        """Return the values of the Secrets to which the service's sources refer. Raises ApiError. `catalog` contains
        the adapters; None: those of the spec.

        Keys that are not used are omitted.

        A Secret that does not exist is omitted too. The reader of the source reports this problem.
        """
        values_by_secret: dict[str, dict[str, str]] = {}
        for ref in secret_refs(service, catalog):
            for max_age_s in (math.inf, MISSING_SECRET_TTL_S):
                values = (await self.get(service.namespace or "", ref.name, max_age_s)).values
                if used_values := {key: value for key, value in values.items() if ref.key in (None, key)}:
                    values_by_secret.setdefault(ref.name, {}).update(used_values)
                    break
        return values_by_secret

    async def admin_key(self, key: ServiceKey, uid: str) -> str:
        """Return the key of the pods' admin port. Raises ApiError.

        This is the key that is stored in the Secret. If there is none, a new key is generated.

        The key never changes, even if its Secret is deleted, because running pods would still use the first key.
        """
        known_uid, value = self._admin_keys.get(key, ("", ""))
        if known_uid != uid or key in self._unwritten_keys:
            cached = await self.get(key[0], object_names.admin_secret(key[1]))
            # The Secret may belong to a deleted service of the same name. Then it is not used.
            is_owned = cached.body is not None and controller_uid(cached.body) in (uid, "")
            stored_key = cached.values.get(object_names.ADMIN_KEY_FIELD) if is_owned else None
            value = stored_key or (value if known_uid == uid else secrets.token_urlsafe(32))
            self._admin_keys[key] = (uid, value)
            (self._unwritten_keys.discard if stored_key else self._unwritten_keys.add)(key)
        return value

    def is_key_superseded(self, key: ServiceKey, existing: Mapping[str, Any]) -> bool:
        """Whether `existing` already contains a key. If it does, the key that was generated for the service must not be
        used.
        """
        return key in self._unwritten_keys and object_names.ADMIN_KEY_FIELD in CachedSecret(0.0, existing).values

    def update(self, namespace: str, name: str, body: Mapping[str, Any] | None) -> None:
        """Store the Secret that a write returned. If the Secret was deleted, `body` is None."""
        self._store(namespace, name, CachedSecret(asyncio.get_running_loop().time(), body))

    def invalidate(self, namespace: str, name: str) -> None:
        """Remove a changed Secret from the cache."""
        self._cached_secrets.pop((namespace, name), None)

    def forget_service(self, key: ServiceKey) -> None:
        """Discard the keys and Secrets of a service.

        This is done if the service was deleted, or if its Secret was created by another client at the same time.
        """
        self._admin_keys.pop(key, None)
        self._unwritten_keys.discard(key)
        self.invalidate(key[0], object_names.admin_secret(key[1]))
        self.invalidate(key[0], object_names.credentials_secret(key[1]))

    def _store(self, namespace: str, name: str, cached: CachedSecret) -> None:
        """Store a Secret in the cache. Expired Secrets are removed, because they can belong to deleted services."""
        self.invalidate(namespace, name)
        self._cached_secrets[namespace, name] = cached
        while cached.read_at - next(iter(self._cached_secrets.values())).read_at > self._ttl_s:
            del self._cached_secrets[next(iter(self._cached_secrets))]
