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

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.reconcile.cache import Key, controller
from quire_operator.render import names
from quire_operator.render.config import secret_refs
from quire_operator.service import LLMService
from quire_spec.documents.adapter_catalog import SecretRef

REMEMBER_S = 300.0
"""A Secret that somebody changes reaches the pods within this time, and the kubelet's minute."""
MISSING_S = 15.0
"""One that a source names and that is not there, or lacks its key: somebody has just been told to make it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A Secret as it was read."""

    read_at: float
    body: Mapping[str, Any] | None
    """None: there is none."""

    @property
    def values(self) -> dict[str, str]:
        """Its texts by key; what is not text is left out."""
        found = {}
        for key, text in ((self.body or {}).get("data") or {}).items():
            try:
                found[key] = base64.b64decode(text).decode()
            except (binascii.Error, UnicodeDecodeError):
                continue
        return found


class SecretStore:
    """Secrets by namespace and name."""

    def __init__(self, client: Client, remember_s: float = REMEMBER_S) -> None:
        self._client, self._remember_s = client, remember_s
        self._kept: dict[tuple[str, str], Kept] = {}
        """In the order in which they were read."""
        self._keys: dict[Key, tuple[str, str]] = {}
        self._new: set[Key] = set()
        """Services whose key in `_keys` was drawn, and is not known to be anywhere else."""

    async def get(self, namespace: str, name: str, most_s: float = math.inf) -> Kept:
        """A Secret, as old as is remembered at most, or `most_s`; raises ApiError."""
        now = asyncio.get_running_loop().time()
        kept = self._kept.get((namespace, name))
        if kept is None or now - kept.read_at > min(most_s, self._remember_s):
            kept = Kept(now, await self._client.find(kinds.SECRET, namespace, name))
            self._remember(namespace, name, kept)
        return kept

    async def credentials(self, service: LLMService) -> dict[str, dict[str, str]]:
        """The values of the Secrets that a service's sources name, no more keys than they use; raises ApiError.

        One that is missing is left out: whoever needs it says so.
        """
        found: dict[str, dict[str, str]] = {}
        for ref in secret_refs(service):
            wanted = _wanted(ref, await self.get(service.namespace or "", ref.name))
            if wanted or (wanted := _wanted(ref, await self.get(service.namespace or "", ref.name, MISSING_S))):
                found.setdefault(ref.name, {}).update(wanted)
        return found

    async def admin_key(self, key: Key, uid: str) -> str:
        """The key of the pods' admin port: the one that is there, else a new one; raises ApiError.

        The same for ever once made, also when the Secret is deleted by hand: pods that run know no other.
        """
        known_uid, value = self._keys.get(key, ("", ""))
        if known_uid != uid or key in self._new:
            kept = await self.get(key[0], names.admin_key(key[1]))
            # Not that of a service of the same name which is gone.
            mine = kept.body is not None and controller(kept.body) in (uid, "")
            there = kept.values.get(names.ADMIN_KEY) if mine else None
            value = there or (value if known_uid == uid else secrets.token_urlsafe(32))
            self._keys[key] = (uid, value)
            (self._new.discard if there else self._new.add)(key)
        return value

    def is_behind(self, key: Key, found: Mapping[str, Any]) -> bool:
        """Whether we have drawn a key for a service while somebody else made one, in the Secret `found`."""
        return key in self._new and bool(Kept(0.0, found).values.get(names.ADMIN_KEY))

    def put(self, namespace: str, name: str, body: Mapping[str, Any] | None) -> None:
        """What a write was answered with."""
        self._remember(namespace, name, Kept(asyncio.get_running_loop().time(), body))

    def forget(self, namespace: str, name: str) -> None:
        """It is not as it was read: read it again."""
        self._kept.pop((namespace, name), None)

    def drop(self, key: Key) -> None:
        """Forget a service that is gone, or whose Secrets somebody else has made."""
        self._keys.pop(key, None)
        self._new.discard(key)
        for name in (names.admin_key(key[1]), names.credentials(key[1])):
            self._kept.pop((key[0], name), None)

    def _remember(self, namespace: str, name: str, kept: Kept) -> None:
        """Nobody may ever ask again for those of a service that is gone: what is too old goes, oldest first."""
        self._kept.pop((namespace, name), None)
        self._kept[namespace, name] = kept
        while kept.read_at - next(iter(self._kept.values())).read_at > self._remember_s:
            del self._kept[next(iter(self._kept))]


def _wanted(ref: SecretRef, kept: Kept) -> dict[str, str]:
    """What a source uses of a Secret."""
    return {key: value for key, value in kept.values.items() if ref.key in (None, key)}
