# SPDX-License-Identifier: Apache-2.0
"""Applier: brings a service's objects to what is wanted, writing only what differs, and takes away what is not wanted.

An object of somebody else is never touched: nothing is written when one has the name of one of ours.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.errors import Forbidden, Rejected, Stale
from quire_operator.kube.kinds import Kind, kind_of
from quire_operator.reconcile.cache import Cache, Entry, Key, controller, entry_of
from quire_operator.reconcile.compare import holds
from quire_operator.reconcile.pinned import config_maps
from quire_operator.reconcile.secrets import SecretStore
from quire_operator.render import names
from quire_spec import constants as spec_names

Manifest = dict[str, Any]
Found = Mapping[str, Any] | Entry | None
"""What is there by a manifest's name: an entry of the cache, the body of a Secret, or nothing."""

Newest = Callable[[], Awaitable[None]]
"""Raises Behind where the service that the manifests are of is not the newest."""

APPLIED = f"{spec_names.API_GROUP}/applied"
"""Annotation with the digest of what was applied: it tells what a later release no longer sets."""

_BEFORE_PODS = (
    (
        kinds.SERVICE_ACCOUNT, kinds.SECRET, kinds.CONFIG_MAP, kinds.CLAIM, kinds.NETWORK_POLICY, kinds.SERVICE,
    ),
    (kinds.JOB,),
    (kinds.DEPLOYMENT,),
)  # fmt: skip
"""What is written together, and in which order; all other kinds come last. A refusal ends it: pods of a new Deployment
would wait for what is not there."""


class Conflict(Exception):
    """An object of somebody else has the name of one of ours; the message says which, whose, and what to do."""


class Going(Exception):
    """An object that is wanted is on its way out, and comes again once it is gone; the message says which."""


@dataclass(slots=True)
class Outcome:
    """What came of applying."""

    rejected: list[str] = field(default_factory=list)
    """What the API server refused, and why."""
    forbidden: bool = False
    """Among it is something that a Role or a quota forbids: it is worth trying again."""
    conflict: str = ""
    going: str = ""
    """An object that has to be gone before anything is applied; empty: none."""
    written: list[Entry] = field(default_factory=list)
    """What it wrote, as it was then; Secrets aside."""

    @property
    def complete(self) -> bool:
        """Whether everything is there as it was wanted."""
        return not (self.conflict or self.rejected or self.going)


@dataclass(frozen=True, slots=True)
class _Done:
    """An object that is as it was wanted."""

    digest: str
    """Of what was wanted."""
    uid: str
    content: str
    """Entry.content of what it led to."""


class Applier:
    """Writes the objects of services."""

    def __init__(
        self, client: Client, cache: Cache, secrets: SecretStore, wrote: Callable[[Kind, str], None] = lambda k, v: None
    ) -> None:
        """`wrote` is told of each write: the kind, and apply or delete."""
        self._client, self._cache, self._secrets, self._wrote = client, cache, secrets, wrote
        self._done: dict[Key, dict[tuple[str, str], _Done]] = {}

    async def apply(self, key: Key, uid: str, manifests: Iterable[Manifest], newest: Newest) -> Outcome:
        """Have all of these there; `uid` is the service's, `newest` is asked before something is written.

        Raises:
            ApiError: the API server does not answer, or somebody else was faster; the rest is left for another time.
            Behind: by `newest`.
        """
        outcome = Outcome()
        try:
            wanted = await self._all_found(key, uid, manifests, newest)
        except Conflict as error:
            outcome.conflict = str(error)
            return outcome
        except Going as error:
            outcome.going = str(error)
            return outcome
        due = [each for each in wanted if not self._is_settled(key, *each)]
        if due:
            await newest()
        for wave in _waves(due):
            settled = await _together(self._settle(key, manifest, found) for manifest, found in wave)
            refused = [error for error in settled if isinstance(error, Rejected | Forbidden)]
            if broken := [each for each in settled if isinstance(each, BaseException) and each not in refused]:
                raise broken[0]
            outcome.written += [each for each in settled if isinstance(each, Entry)]
            outcome.rejected += map(str, refused)
            outcome.forbidden = outcome.forbidden or any(isinstance(error, Forbidden) for error in refused)
            if refused:
                break
        return outcome

    async def prune(self, key: Key, uid: str, kept: Set[tuple[str, str]], newest: Newest) -> None:
        """Delete what the service owns but for `kept`, by kind and name; raises as `apply`.

        ConfigMaps that a ReplicaSet or a pod still mounts stay: an old pod that starts again needs its own.
        """
        used: set[str] = set()
        for entry in self._cache.of(key, kinds.POD, kinds.REPLICA_SET):
            spec = entry.body().get("spec", {})
            used |= config_maps(spec if entry.kind is kinds.POD else spec.get("template", {}).get("spec", {}))
        gone = [
            entry
            for entry in self._cache.of(key, *kinds.CHILDREN)
            if entry.owner == uid
            and not entry.deleting
            and (entry.kind.name, entry.name) not in kept
            and not (entry.kind is kinds.CONFIG_MAP and entry.name in used)
        ]
        if gone:
            await newest()
        for entry in gone:
            await self._delete(entry.kind, entry.namespace, entry.name, entry.uid)
        await self._prune_credentials(key, uid, kept, newest)

    def num_done(self, key: Key) -> int:
        """Objects of a service that were found or made as they should be."""
        return len(self._done.get(key, ()))

    def drop(self, key: Key) -> None:
        """Forget a service that is gone."""
        self._done.pop(key, None)

    async def _all_found(
        self, key: Key, uid: str, manifests: Iterable[Manifest], newest: Newest
    ) -> list[tuple[Manifest, Found]]:
        """Each manifest with what is there; raises as `_found`, after all were looked at: what a deleted service left
        goes in one pass, not one object a pass with a growing wait between them."""
        stamped = [_stamped(manifest) for manifest in manifests]
        found: list[Any] = await _together(self._found(key, uid, manifest, newest) for manifest in stamped)
        errors = [each for each in found if isinstance(each, BaseException)]
        if errors:
            raise next((error for error in errors if not isinstance(error, Going)), errors[0])
        return list(zip(stamped, found, strict=True))

    async def _found(self, key: Key, uid: str, manifest: Manifest, newest: Newest) -> Found:
        """The object of a manifest's name, if it is there and ours.

        Raises:
            Conflict: it is somebody else's.
            Going: it is on its way out.
        """
        kind, name = kind_of(manifest), manifest["metadata"]["name"]
        if kind is kinds.SECRET:
            body = (await self._secrets.get(key[0], name)).body
        else:
            entry = self._cache.get(kind, key[0], name)
            if entry is not None and entry.key == key and entry.owner in (uid, ""):
                if entry.deleting:
                    raise Going(f"{kind.name} {key[0]}/{name} is being deleted; it is made again once it is gone")
                return entry
            body = await self._client.find(kind, key[0], name)
        if body is not None:
            await self._check_owner(key, uid, kind, body, newest)
            if kind is not kinds.SECRET:
                self._cache.put(kind, body)
                return entry_of(kind, body)
        return body

    async def _check_owner(self, key: Key, uid: str, kind: Kind, body: Mapping[str, Any], newest: Newest) -> None:
        meta = body["metadata"]
        labels = meta.get("labels") or {}
        mine = labels.get(names.MANAGED_BY) == names.MANAGER and labels.get(names.INSTANCE) == key[1]
        owner = controller(body)
        # What the service controls is its own also without our labels, which is how a watch loses sight of it.
        if owner == uid or (mine and not owner):
            return
        owners = [o for o in meta.get("ownerReferences") or () if o.get("uid") == owner]
        if mine and owners and owners[0].get("kind") == kinds.LLM_SERVICE.name and owners[0].get("name") == key[1]:
            # Of a service of the same name that is gone; nothing but the garbage collector would come for it. Unless we
            # are the one that has not heard of the new service yet.
            await newest()
            await self._delete(kind, key[0], meta["name"], meta["uid"])
            raise Going(f"{kind.name} {key[0]}/{meta['name']} is of a deleted {kinds.LLM_SERVICE.name}; it goes first")
        whose = (
            f"belongs to {owners[0].get('kind')} {owners[0].get('name')!r}" if owners else "was made by somebody else"
        )
        raise Conflict(
            f"{kind.name} {meta['name']!r} in namespace {key[0]!r} {whose}, and is left alone; delete it, or give the "
            f"{kinds.LLM_SERVICE.name} another name"
        )

    def _is_settled(self, key: Key, manifest: Manifest, found: Found) -> bool:
        """Whether what is there is as a manifest says."""
        if isinstance(found, Entry):
            place = _place(manifest)
            done, here = self._done.get(key, {}).get(place), _done(manifest, found)
            if settled := done == here if done is not None else holds(manifest, found.body()):
                self._remember(key, place, here)
            return settled
        # A Secret, which has all keys that it should have and no others.
        return found is not None and holds(manifest, found) and set(manifest["data"]) == set(found.get("data") or ())

    async def _settle(self, key: Key, manifest: Manifest, found: Found) -> Entry | None:
        """Apply a manifest; what was written, Secrets aside."""
        kind = kind_of(manifest)
        if kind is kinds.SECRET:
            await self._write_secret(key, manifest, found if isinstance(found, Mapping) else None)
            return None
        assert found is None or isinstance(found, Entry)
        written = entry_of(kind, await self._write(kind, manifest, found.uid if found else None))
        self._remember(key, _place(manifest), _done(manifest, written))
        return written

    async def _write(self, kind: Kind, manifest: Manifest, uid: str | None) -> dict[str, Any]:
        condition = {"uid": uid} if uid else {}
        body = await self._client.apply(kind, {**manifest, "metadata": {**manifest["metadata"], **condition}})
        self._wrote(kind, "apply")
        if kind is not kinds.SECRET:
            self._cache.put(kind, body)
        return body

    async def _write_secret(self, key: Key, manifest: Manifest, found: Mapping[str, Any] | None) -> None:
        """Apply a Secret. A new admin key is not applied but made: another operator may do so in the same moment with a
        key of its own, and only the first of both may be pods'."""
        name = manifest["metadata"]["name"]
        anew = name == names.admin_key(key[1]) and (found is None or self._secrets.is_behind(key, found))
        try:
            if anew:
                body = await self._client.create(kinds.SECRET, manifest)
                self._wrote(kinds.SECRET, "create")
            else:
                body = await self._write(kinds.SECRET, manifest, found["metadata"]["uid"] if found else None)
        except Stale:
            if anew:
                self._secrets.drop(key)
            self._secrets.forget(key[0], name)
            raise
        self._secrets.put(key[0], name, body)

    async def _delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        await self._client.delete(kind, namespace, name, uid)
        self._wrote(kind, "delete")
        if kind is kinds.SECRET:
            self._secrets.put(namespace, name, None)

    async def _prune_credentials(self, key: Key, uid: str, kept: Set[tuple[str, str]], newest: Newest) -> None:
        name = names.credentials(key[1])
        if (kinds.SECRET.name, name) in kept:
            return
        body = (await self._secrets.get(key[0], name)).body
        if body is not None and controller(body) == uid:
            await newest()
            await self._delete(kinds.SECRET, key[0], name, body["metadata"]["uid"])

    def _remember(self, key: Key, place: tuple[str, str], done: _Done) -> None:
        self._done.setdefault(key, {})[place] = done


def _place(manifest: Manifest) -> tuple[str, str]:
    return kind_of(manifest).name, manifest["metadata"]["name"]


def _done(manifest: Manifest, entry: Entry) -> _Done:
    return _Done(manifest["metadata"]["annotations"][APPLIED], entry.uid, entry.content)


def _waves(wanted: Iterable[tuple[Manifest, Found]]) -> list[list[tuple[Manifest, Found]]]:
    order = {kind: number for number, wave in enumerate(_BEFORE_PODS) for kind in wave}
    waves: list[list[tuple[Manifest, Found]]] = [[] for _ in range(len(_BEFORE_PODS) + 1)]
    for manifest, found in wanted:
        waves[order.get(kind_of(manifest), -1)].append((manifest, found))
    return waves


async def _together(requests: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of requests made at once, or their errors; all have ended then, so that none writes later."""
    return await asyncio.gather(*requests, return_exceptions=True)


def _stamped(manifest: Manifest) -> Manifest:
    """With the digest of what is applied; not a Secret, whose digest would help to guess it."""
    if manifest["kind"] == kinds.SECRET.name:
        return manifest
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), APPLIED: hashlib.blake2b(text, digest_size=12).hexdigest()}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}
