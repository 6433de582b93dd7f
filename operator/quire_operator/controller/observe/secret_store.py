# SPDX-License-Identifier: Apache-2.0
"""Secrets of a service: the key of its pods' admin port, made once, and copies of those that its sources name.

Read by name and remembered for some minutes; never listed, never in a log, a status or an event.
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
from quire_spec.documents.adapter_catalog import SecretRef

SECRET_TTL_S = 300.0
"""A Secret that somebody changes reaches the pods within this time, and the kubelet's minute."""
MISSING_SECRET_TTL_S = 15.0
"""One that a source names and that is not there, or lacks its key: somebody has just been told to make it."""


@dataclass(frozen=True, slots=True)
class CachedSecret:
    """A Secret as it was read."""

    read_at: float
    body: Mapping[str, Any] | None
    """None: there is none."""

    @property
    def values(self) -> dict[str, str]:
        """Its texts by key; what is not text is left out."""
        decoded = {}
        for key, text in ((self.body or {}).get("data") or {}).items():
            try:
                decoded[key] = base64.b64decode(text).decode()
            except (binascii.Error, UnicodeDecodeError):
                continue
        return decoded


class SecretStore:
    """Secrets by namespace and name."""

    def __init__(self, client: ApiClient, ttl_s: float = SECRET_TTL_S) -> None:
        self._client, self._ttl_s = client, ttl_s
        self._cached_secrets: dict[tuple[str, str], CachedSecret] = {}
        """In the order in which they were read."""
        self._admin_keys: dict[ServiceKey, tuple[str, str]] = {}
        self._unwritten_keys: set[ServiceKey] = set()
        """Services whose key in `_keys` was drawn, and is not known to be anywhere else."""

    async def get(self, namespace: str, name: str, max_age_s: float = math.inf) -> CachedSecret:
        """A Secret, as old as is remembered at most, or `most_s`; raises ApiError."""
        now = asyncio.get_running_loop().time()
        cached = self._cached_secrets.get((namespace, name))
        if cached is None or now - cached.read_at > min(max_age_s, self._ttl_s):
            cached = CachedSecret(now, await self._client.get_or_none(resources.SECRET, namespace, name))
            self._store(namespace, name, cached)
        return cached

    async def credentials(self, service: LLMService) -> dict[str, dict[str, str]]:
        """The values of the Secrets that a service's sources name, no more keys than they use; raises ApiError.

        One that is missing is left out: whoever needs it says so.
        """
        values_by_secret: dict[str, dict[str, str]] = {}
        for ref in secret_refs(service):
            referenced = _referenced_values(ref, await self.get(service.namespace or "", ref.name))
            if referenced or (
                referenced := _referenced_values(
                    ref, await self.get(service.namespace or "", ref.name, MISSING_SECRET_TTL_S)
                )
            ):
                values_by_secret.setdefault(ref.name, {}).update(referenced)
        return values_by_secret

    async def admin_key(self, key: ServiceKey, uid: str) -> str:
        """The key of the pods' admin port: the one that is there, else a new one; raises ApiError.

        The same for ever once made, also when the Secret is deleted by hand: pods that run know no other.
        """
        known_uid, value = self._admin_keys.get(key, ("", ""))
        if known_uid != uid or key in self._unwritten_keys:
            cached = await self.get(key[0], object_names.admin_secret(key[1]))
            # Not that of a service of the same name which is gone.
            is_owned = cached.body is not None and controller_uid(cached.body) in (uid, "")
            stored_key = cached.values.get(object_names.ADMIN_KEY_FIELD) if is_owned else None
            value = stored_key or (value if known_uid == uid else secrets.token_urlsafe(32))
            self._admin_keys[key] = (uid, value)
            (self._unwritten_keys.discard if stored_key else self._unwritten_keys.add)(key)
        return value

    def is_key_superseded(self, key: ServiceKey, existing: Mapping[str, Any]) -> bool:
        """Whether we have drawn a key for a service while somebody else made one, in the Secret `found`."""
        return key in self._unwritten_keys and bool(
            CachedSecret(0.0, existing).values.get(object_names.ADMIN_KEY_FIELD)
        )

    def update(self, namespace: str, name: str, body: Mapping[str, Any] | None) -> None:
        """What a write was answered with."""
        self._store(namespace, name, CachedSecret(asyncio.get_running_loop().time(), body))

    def invalidate(self, namespace: str, name: str) -> None:
        """It is not as it was read: read it again."""
        self._cached_secrets.pop((namespace, name), None)

    def forget_service(self, key: ServiceKey) -> None:
        """Forget a service that is gone, or whose Secrets somebody else has made."""
        self._admin_keys.pop(key, None)
        self._unwritten_keys.discard(key)
        for name in (object_names.admin_secret(key[1]), object_names.credentials_secret(key[1])):
            self._cached_secrets.pop((key[0], name), None)

    def _store(self, namespace: str, name: str, cached: CachedSecret) -> None:
        """Nobody may ever ask again for those of a service that is gone: what is too old goes, oldest first."""
        self._cached_secrets.pop((namespace, name), None)
        self._cached_secrets[namespace, name] = cached
        while cached.read_at - next(iter(self._cached_secrets.values())).read_at > self._ttl_s:
            del self._cached_secrets[next(iter(self._cached_secrets))]


def _referenced_values(ref: SecretRef, cached: CachedSecret) -> dict[str, str]:
    """What a source uses of a Secret."""
    return {key: value for key, value in cached.values.items() if ref.key in (None, key)}
