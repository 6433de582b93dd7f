# SPDX-License-Identifier: Apache-2.0
"""Applier: applies the manifests of a service that differ from the existing objects, and prunes obsolete objects.

It never changes an object with another owner: if one has the name of a manifest, nothing is written. Called by the
reconciler; it knows nothing of plans and status.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from quire_operator.controller.apply.compare import is_up_to_date
from quire_operator.controller.object_cache import (
    CachedObject,
    ObjectCache,
    ServiceKey,
    controller_uid,
    to_cached_object,
)
from quire_operator.controller.observe.secret_store import SecretStore
from quire_operator.controller.template_revision import mounted_configmaps
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import Forbidden, InvalidObject, WriteConflict
from quire_operator.kube.resources import Resource, resource_for
from quire_operator.render import object_names
from quire_spec import constants as spec_names

Manifest = dict[str, Any]
ExistingObject = Mapping[str, Any] | CachedObject | None
"""The existing object of a manifest: a cached object, the body of a Secret, or None."""

FreshnessCheck = Callable[[], Awaitable[None]]
"""Raises StaleService if the manifests were rendered from a stale service."""

APPLIED_DIGEST_ANNOTATION = f"{spec_names.API_GROUP}/applied"
"""Annotation with the digest of the applied manifest; a later release finds fields that it no longer sets."""

_ORDERED_KINDS = (
    (
        resources.SERVICE_ACCOUNT, resources.SECRET, resources.CONFIG_MAP, resources.PERSISTENT_VOLUME_CLAIM,
        resources.NETWORK_POLICY, resources.SERVICE,
    ),
    (resources.JOB,),
    (resources.DEPLOYMENT,),
)  # fmt: skip
"""Kinds that are written together, in this order; all others come last. A rejection stops the rest: pods of a new
Deployment would wait for an object that does not exist."""


class OwnershipConflict(Exception):
    """An object with another owner has the name of a manifest; the message contains object, owner and what to do."""


class PendingDeletion(Exception):
    """An object of a manifest is being deleted, and is created again afterwards; the message names it."""


@dataclass(slots=True)
class ApplyResult:
    """The result of applying manifests."""

    rejections: list[str] = field(default_factory=list)
    """Errors of the manifests that the API server rejected."""
    forbidden: bool = False
    """One of them was rejected by a Role or a quota: a retry can help."""
    conflict: str = ""
    pending_deletion: str = ""
    """An object that must be deleted before anything is applied; empty: none."""
    written_objects: list[CachedObject] = field(default_factory=list)
    """The objects that were written, except Secrets."""
    _required_rejected: bool = False

    def add_rejection(self, error: InvalidObject | Forbidden, resource: Resource) -> None:
        """Record that the API server rejected a manifest."""
        self.rejections.append(str(error))
        self.forbidden = self.forbidden or isinstance(error, Forbidden)
        self._required_rejected = self._required_rejected or resource not in resources.OPTIONAL_RESOURCES

    @property
    def required_complete(self) -> bool:
        """Whether all objects of required kinds exist as rendered: one optional kind must not delay the others."""
        return not (self.conflict or self.pending_deletion or self._required_rejected)

    @property
    def complete(self) -> bool:
        """Whether all objects exist as rendered."""
        return not (self.conflict or self.rejections or self.pending_deletion)


@dataclass(frozen=True, slots=True)
class _AppliedObject:
    """An object that was up to date after an apply."""

    manifest_digest: str
    """Digest of the manifest."""
    uid: str
    spec_digest: str
    """CachedObject.spec_digest of the object."""


class Applier:
    """Writes the objects of services."""

    def __init__(
        self,
        client: ApiClient,
        cache: ObjectCache,
        secrets: SecretStore,
        record_write: Callable[[Resource, str], None] = lambda k, v: None,
    ) -> None:
        """`record_write` is called for each write with the resource and the verb."""
        self._client, self._cache, self._secrets, self._record_write = client, cache, secrets, record_write
        self._applied: dict[ServiceKey, dict[tuple[str, str], _AppliedObject]] = {}

    async def apply(
        self, key: ServiceKey, uid: str, manifests: Iterable[Manifest], check_newest: FreshnessCheck
    ) -> ApplyResult:
        """Apply all manifests that differ; `uid` is the service's, `check_newest` is awaited before the first write.

        Raises:
            ApiError: the API server does not respond, or an object was changed concurrently; the rest is not applied.
            StaleService: by `check_newest`.
        """
        result = ApplyResult()
        try:
            pairs = await self._lookup_all(key, uid, manifests, check_newest, result)
        except OwnershipConflict as error:
            result.conflict = str(error)
            return result
        except PendingDeletion as error:
            result.pending_deletion = str(error)
            return result
        outdated = [each for each in pairs if not self._is_applied(key, *each)]
        if outdated:
            await check_newest()
        for wave in _apply_order(outdated):
            results = await _gather(self._apply_manifest(key, manifest, existing) for manifest, existing in wave)
            rejections = [error for error in results if isinstance(error, InvalidObject | Forbidden)]
            if failures := [each for each in results if isinstance(each, BaseException) and each not in rejections]:
                raise failures[0]
            result.written_objects += [each for each in results if isinstance(each, CachedObject)]
            for (manifest, _), outcome in zip(wave, results, strict=True):
                if isinstance(outcome, InvalidObject | Forbidden):
                    result.add_rejection(outcome, resource_for(manifest))
            if rejections:
                break
        return result

    async def prune(
        self, key: ServiceKey, uid: str, retained: Set[tuple[str, str]], check_newest: FreshnessCheck
    ) -> None:
        """Delete the objects of a service except `retained` (kind and name). Raises the same errors as `apply`.

        ConfigMaps that a ReplicaSet or a pod still mounts are kept: an old pod that restarts needs its own.
        """
        mounted: set[str] = set()
        for entry in self._cache.children_of(key, resources.POD, resources.REPLICA_SET):
            spec = entry.body().get("spec", {})
            mounted |= mounted_configmaps(
                spec if entry.resource is resources.POD else spec.get("template", {}).get("spec", {})
            )
        obsolete = [
            entry
            for entry in self._cache.children_of(key, *resources.CHILD_RESOURCES)
            if entry.controller_uid == uid
            and not entry.deleting
            and (entry.resource.kind, entry.name) not in retained
            and not (entry.resource is resources.CONFIG_MAP and entry.name in mounted)
        ]
        if obsolete:
            await check_newest()
        for entry in obsolete:
            await self._delete(entry.resource, entry.namespace, entry.name, entry.uid)
        await self._prune_credentials(key, uid, retained, check_newest)

    def num_applied(self, key: ServiceKey) -> int:
        """Return the number of objects of a service that are up to date. An increase means progress."""
        return len(self._applied.get(key, ()))

    def forget_service(self, key: ServiceKey) -> None:
        """Drop all state of a deleted service."""
        self._applied.pop(key, None)

    async def _lookup_all(
        self,
        key: ServiceKey,
        uid: str,
        manifests: Iterable[Manifest],
        check_newest: FreshnessCheck,
        result: ApplyResult,
    ) -> list[tuple[Manifest, ExistingObject]]:
        """Return each manifest with the object that exists.

        A manifest of an optional kind that the operator is not allowed to read becomes a rejection of `result`.

        Raises the same errors as `_lookup`, but only after all lookups. All objects of a deleted service are then
        removed in one pass. Otherwise each pass would remove one object, with a growing wait between the passes.
        """
        annotated = [_with_applied_digest(manifest) for manifest in manifests]
        existing: list[Any] = await _gather(self._lookup(key, uid, manifest, check_newest) for manifest in annotated)
        pairs, errors = [], []
        for manifest, item in zip(annotated, existing, strict=True):
            if isinstance(item, Forbidden) and resource_for(manifest) in resources.OPTIONAL_RESOURCES:
                result.add_rejection(item, resource_for(manifest))
            elif isinstance(item, BaseException):
                errors.append(item)
            else:
                pairs.append((manifest, item))
        if errors:
            raise next((error for error in errors if not isinstance(error, PendingDeletion)), errors[0])
        return pairs

    async def _lookup(
        self, key: ServiceKey, uid: str, manifest: Manifest, check_newest: FreshnessCheck
    ) -> ExistingObject:
        """Return the object of a manifest, if it exists.

        Raises:
            OwnershipConflict: it has another owner.
            PendingDeletion: it is being deleted.
        """
        resource, name = resource_for(manifest), manifest["metadata"]["name"]
        if resource is resources.SECRET:
            body = (await self._secrets.get(key[0], name)).body
        else:
            entry = self._cache.get(resource, key[0], name)
            if entry is not None and entry.key == key and entry.controller_uid in (uid, ""):
                if entry.deleting:
                    raise PendingDeletion(
                        f"{resource.kind} {key[0]}/{name} is being deleted; it is created again afterwards"
                    )
                return entry
            body = await self._client.get_or_none(resource, key[0], name)
        if body is not None:
            await self._check_owner(key, uid, resource, body, check_newest)
            if resource is not resources.SECRET:
                self._cache.upsert(resource, body)
                return to_cached_object(resource, body)
        return body

    async def _check_owner(
        self, key: ServiceKey, uid: str, resource: Resource, body: Mapping[str, Any], check_newest: FreshnessCheck
    ) -> None:
        meta = body["metadata"]
        labels = meta.get("labels") or {}
        is_labeled = (
            labels.get(object_names.MANAGED_BY) == object_names.MANAGER and labels.get(object_names.INSTANCE) == key[1]
        )
        owner = controller_uid(body)
        # An object without our labels, which the watch does not see, still belongs to the service that controls it.
        if owner == uid or (is_labeled and not owner):
            return
        owners = [o for o in meta.get("ownerReferences") or () if o.get("uid") == owner]
        if (
            is_labeled
            and owners
            and owners[0].get("kind") == resources.LLM_SERVICE.kind
            and owners[0].get("name") == key[1]
        ):
            # Of a deleted service of the same name, whose objects only the garbage collector would delete; unless the
            # cached service is the stale one.
            await check_newest()
            await self._delete(resource, key[0], meta["name"], meta["uid"])
            raise PendingDeletion(f"{resource.kind} {key[0]}/{meta['name']} has a deleted owner; it is deleted first")
        ownership = f"belongs to {owners[0].get('kind')} {owners[0].get('name')!r}" if owners else "has another owner"
        raise OwnershipConflict(
            f"{resource.kind} {meta['name']!r} in namespace {key[0]!r} {ownership} and is not changed; delete it, or "
            "give the "
            f"{resources.LLM_SERVICE.kind} another name"
        )

    def _is_applied(self, key: ServiceKey, manifest: Manifest, existing: ExistingObject) -> bool:
        """Whether the existing object is as the manifest."""
        if isinstance(existing, CachedObject):
            object_id = _kind_and_name(manifest)
            recorded, current = self._applied.get(key, {}).get(object_id), _applied_object(manifest, existing)
            if up_to_date := recorded == current if recorded is not None else is_up_to_date(manifest, existing.body()):
                self._record_applied(key, object_id, current)
            return up_to_date
        # A Secret, with exactly the keys of the manifest.
        return (
            existing is not None
            and is_up_to_date(manifest, existing)
            and set(manifest["data"]) == set(existing.get("data") or ())
        )

    async def _apply_manifest(
        self, key: ServiceKey, manifest: Manifest, existing: ExistingObject
    ) -> CachedObject | None:
        """Apply a manifest and return the object; None for a Secret."""
        resource = resource_for(manifest)
        if resource is resources.SECRET:
            await self._write_secret(key, manifest, existing if isinstance(existing, Mapping) else None)
            return None
        assert existing is None or isinstance(existing, CachedObject)
        written = to_cached_object(
            resource, await self._server_side_apply(resource, manifest, existing.uid if existing else None)
        )
        self._record_applied(key, _kind_and_name(manifest), _applied_object(manifest, written))
        return written

    async def _server_side_apply(self, resource: Resource, manifest: Manifest, uid: str | None) -> dict[str, Any]:
        precondition = {"uid": uid} if uid else {}
        body = await self._client.apply(resource, {**manifest, "metadata": {**manifest["metadata"], **precondition}})
        self._record_write(resource, "apply")
        if resource is not resources.SECRET:
            self._cache.upsert(resource, body)
        return body

    async def _write_secret(self, key: ServiceKey, manifest: Manifest, existing: Mapping[str, Any] | None) -> None:
        """Write a Secret. A new admin key is created, not applied: if two operators run for a moment, only the first
        key must reach the pods."""
        name = manifest["metadata"]["name"]
        is_new_key = name == object_names.admin_secret(key[1]) and (
            existing is None or self._secrets.is_key_superseded(key, existing)
        )
        try:
            if is_new_key:
                body = await self._client.create(resources.SECRET, manifest)
                self._record_write(resources.SECRET, "create")
            else:
                body = await self._server_side_apply(
                    resources.SECRET, manifest, existing["metadata"]["uid"] if existing else None
                )
        except WriteConflict:
            if is_new_key:
                self._secrets.forget_service(key)
            self._secrets.invalidate(key[0], name)
            raise
        self._secrets.update(key[0], name, body)

    async def _delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        await self._client.delete(resource, namespace, name, uid)
        self._record_write(resource, "delete")
        if resource is resources.SECRET:
            self._secrets.update(namespace, name, None)

    async def _prune_credentials(
        self, key: ServiceKey, uid: str, retained: Set[tuple[str, str]], check_newest: FreshnessCheck
    ) -> None:
        name = object_names.credentials_secret(key[1])
        if (resources.SECRET.kind, name) in retained:
            return
        body = (await self._secrets.get(key[0], name)).body
        if body is not None and controller_uid(body) == uid:
            await check_newest()
            await self._delete(resources.SECRET, key[0], name, body["metadata"]["uid"])

    def _record_applied(self, key: ServiceKey, object_id: tuple[str, str], applied: _AppliedObject) -> None:
        self._applied.setdefault(key, {})[object_id] = applied


def _kind_and_name(manifest: Manifest) -> tuple[str, str]:
    return resource_for(manifest).kind, manifest["metadata"]["name"]


def _applied_object(manifest: Manifest, entry: CachedObject) -> _AppliedObject:
    return _AppliedObject(manifest["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION], entry.uid, entry.spec_digest)


def _apply_order(pairs: Iterable[tuple[Manifest, ExistingObject]]) -> list[list[tuple[Manifest, ExistingObject]]]:
    order = {resource: number for number, wave in enumerate(_ORDERED_KINDS) for resource in wave}
    groups: list[list[tuple[Manifest, ExistingObject]]] = [[] for _ in range(len(_ORDERED_KINDS) + 1)]
    for manifest, existing in pairs:
        groups[order.get(resource_for(manifest), -1)].append((manifest, existing))
    return groups


async def _gather(requests: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all requests and return results or errors; none of them still writes afterwards."""
    return await asyncio.gather(*requests, return_exceptions=True)


def _with_applied_digest(manifest: Manifest) -> Manifest:
    """Add the digest annotation; not to a Secret, whose digest would help to guess its values."""
    if manifest["kind"] == resources.SECRET.kind:
        return manifest
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
    meta = manifest["metadata"]
    annotations = {
        **meta.get("annotations", {}),
        APPLIED_DIGEST_ANNOTATION: hashlib.blake2b(text, digest_size=12).hexdigest(),
    }
    return {**manifest, "metadata": {**meta, "annotations": annotations}}
