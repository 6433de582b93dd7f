# SPDX-License-Identifier: Apache-2.0
"""Applier, which applies manifests and deletes obsolete objects of a service.

It applies only the manifests that differ from the existing objects.

The applier never changes an object that belongs to another owner. If such an object has the same name as a manifest,
the applier does not write anything. It is called by the reconciler, and does not depend on plans or on the status.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from quire_operator.api.llmservice import queue_of
from quire_operator.controller.apply.compare import is_up_to_date
from quire_operator.controller.object_cache import CachedObject, ObjectCache, ServiceKey, controller_uid
from quire_operator.controller.observe.secret_store import SecretStore
from quire_operator.controller.parsed_service import ParsedService
from quire_operator.controller.template_revision import PODS_ANNOTATION, mounted_configmaps
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.errors import Forbidden, InvalidObject, WriteConflict
from quire_operator.kube.resources import Resource, resource_for
from quire_operator.render import object_names
from quire_operator.render.manifests import Manifest
from quire_spec import constants as spec_names

ExistingObject = Mapping[str, Any] | CachedObject | None
"""The existing object that has the kind and the name of a manifest.

It is a cached object or the body of a Secret. None if no such object exists.
"""

FreshnessCheck = Callable[[ParsedService], Awaitable[None]]
"""A function that raises StaleService if the service is out of date.

This is the case if the API server has a later generation of the service, or no longer has the service.
"""

APPLIED_DIGEST_ANNOTATION = f"{spec_names.API_GROUP}/applied"
"""The annotation that contains the digest of the applied manifest. From this digest, a later release can detect that it
renders fewer fields than before.
"""

_ORDERED_KINDS = (
    (
        resources.SERVICE_ACCOUNT, resources.SECRET, resources.CONFIG_MAP, resources.PERSISTENT_VOLUME_CLAIM,
        resources.NETWORK_POLICY, resources.SERVICE,
    ),
    (resources.JOB,),
    resources.WORKLOADS,
)  # fmt: skip
"""Groups of kinds. The groups are written in this order, and all other kinds are written after them."""

_WAITING_KINDS = (resources.JOB, *resources.WORKLOADS)
"""Kinds whose new pods need the objects of the groups before them.

If such an object does not exist, because the API server rejects it or because an earlier one is being deleted, objects
of these kinds are not written. Otherwise, new pods would wait for the object that is missing. A workload that keeps its
pods is written: its replicas depend on nothing.
"""
_INDEPENDENT_KINDS = (*resources.OPTIONAL_RESOURCES, resources.SERVICE)
"""Kinds that no pod needs when it starts."""
_NAME_OF_GROUP = re.compile(r"(?P<set>.+)-(?P<group>0|[1-9][0-9]*)")
"""Name of a group of a LeaderWorkerSet. Its leader, its headless Service and the StatefulSet of its workers have it."""


class OwnershipConflict(Exception):
    """An existing object has the same name as a manifest, but another owner.

    The message contains the object, its owner and a fix.
    """


class PendingDeletion(Exception):
    """An object that has the same name as a manifest is being deleted. The message contains its name, and the
    finalizers that it waits for.

    A later pass creates the object again.
    """

    def __init__(self, message: str, is_stuck: bool = False) -> None:
        """`is_stuck` is True if the object has finalizers, which only others can remove."""
        super().__init__(message)
        self.is_stuck = is_stuck


@dataclass(slots=True)
class ApplyResult:
    """The result of applying manifests."""

    rejections: list[str] = field(default_factory=list)
    """Errors for the manifests that the API server rejected."""
    forbidden: bool = False
    """True if a manifest was rejected because of a missing permission or a quota. In this case, a later attempt can
    succeed.
    """
    conflict: str = ""
    pending_deletions: list[str] = field(default_factory=list)
    """Messages about objects that must first be deleted completely, before their manifests can be applied."""
    stuck_deletions: list[str] = field(default_factory=list)
    """Those of `pending_deletions` whose objects wait for finalizers."""
    claim_rejection: str = ""
    """Answer of the API server if an existing claim cannot grow. Empty if it can. Pods can use the claim as it is."""
    num_written: int = 0
    """Number of objects that were written."""
    missing: set[Resource] = field(default_factory=set)
    """Kinds with an object that does not exist, or must not be changed."""
    outdated: set[Resource] = field(default_factory=set)
    """Kinds with an object that exists, but not as it was rendered. A claim may be smaller."""

    def add_rejection(self, error: InvalidObject | Forbidden, manifest: Manifest, exists: bool) -> None:
        """Record that the API server rejected a manifest. `exists` is True if it only rejected a change."""
        resource = resource_for(manifest)
        if exists and resource is resources.PERSISTENT_VOLUME_CLAIM:
            self.claim_rejection = str(error)
            return
        self.rejections.append(str(error))
        self.forbidden = self.forbidden or isinstance(error, Forbidden)
        (self.outdated if exists else self.missing).add(resource)

    def add_pending_deletion(self, error: PendingDeletion, manifest: Manifest) -> None:
        """Record that an object must first be deleted completely."""
        self.pending_deletions.append(str(error))
        self.stuck_deletions += [str(error)] if error.is_stuck else []
        self.missing.add(resource_for(manifest))

    def add_conflict(self, error: OwnershipConflict, manifest: Manifest) -> None:
        """Record that an object has another owner."""
        self.conflict = self.conflict or str(error)
        self.missing.add(resource_for(manifest))

    @property
    def required_complete(self) -> bool:
        """Whether all objects exist as they were rendered, except those of optional kinds."""
        return (self.missing | self.outdated).issubset(resources.OPTIONAL_RESOURCES)

    @property
    def complete(self) -> bool:
        """Whether all objects exist as they were rendered."""
        return not (self.conflict or self.rejections or self.pending_deletions or self.claim_rejection)


_AppliedVersion = tuple[str, str, str]
"""The state of an object after it was applied. It consists of the digest of the manifest, the uid, and
CachedObject.spec_digest.
"""


class Applier:
    """Writes the objects of services."""

    def __init__(
        self,
        client: ApiClient,
        cache: ObjectCache,
        secrets: SecretStore,
        check_newest: FreshnessCheck,
        record_write: Callable[[Resource, str], None],
    ) -> None:
        """`check_newest` is awaited before the first write. After each write, `record_write` is called with the
        resource and the verb.
        """
        self._client, self._cache, self._secrets = client, cache, secrets
        self._check_newest, self._record_write = check_newest, record_write
        self._applied: dict[ServiceKey, dict[tuple[str, str], _AppliedVersion]] = {}

    async def apply(self, desired: ParsedService, manifests: Iterable[Manifest]) -> ApplyResult:
        """Apply all manifests that differ from their existing objects.

        Raises:
            ApiError: the API server does not respond, or an object was changed concurrently. The remaining manifests
                are not applied.
            StaleService: `check_newest` raised it.
        """
        result = ApplyResult()
        pairs = await self._lookup_all(desired, manifests, result)
        if result.conflict and not result.required_complete:
            return result
        outdated = [pair for pair in pairs if not self._is_applied(desired.key, *pair)]
        if outdated:
            await self._check_newest(desired)
        for wave in _apply_order(outdated):
            is_blocked = not result.missing.issubset(_INDEPENDENT_KINDS)
            ready = [pair for pair in wave if not is_blocked or _needs_nothing(*pair)]
            outcomes = await _gather(self._apply_manifest(desired.key, *pair) for pair in ready)
            for (manifest, existing), outcome in zip(ready, outcomes, strict=True):
                if isinstance(outcome, PendingDeletion):
                    result.add_pending_deletion(outcome, manifest)
                elif isinstance(outcome, InvalidObject | Forbidden):
                    result.add_rejection(outcome, manifest, existing is not None)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    result.num_written += 1
        return result

    async def prune(self, desired: ParsedService, retained: Set[tuple[str, str]]) -> None:
        """Delete all objects of a service except those in `retained`, which contains their kinds and names.

        Raises the same errors as `apply`.

        A ConfigMap is kept if a ReplicaSet or a pod mounts it. Without its ConfigMap, an old pod could not restart. The
        NetworkPolicy and the Service of groups are kept until their workers are gone, because the pods of a group
        connect to each other until the last request has ended.
        """
        mounted: set[str] = set()
        workers: list[Mapping[str, str]] = []
        for entry in self._cache.children_of(desired.key, resources.POD, resources.REPLICA_SET):
            body = entry.body()
            spec, labels = body.get("spec", {}), body["metadata"].get("labels") or {}
            is_pod = entry.resource is resources.POD
            mounted |= mounted_configmaps(spec if is_pod else spec.get("template", {}).get("spec", {}))
            if is_pod and labels.get(object_names.COMPONENT) == object_names.WORKER:
                workers.append(labels)
        if self._cache.get(resources.LEADER_WORKER_SET, *desired.key) is not None and desired.service is not None:
            # While a group is created anew, it has no workers.
            workers.append(object_names.group_labels(desired.service))
        obsolete = [
            entry
            for entry in self._cache.children_of(desired.key, *resources.CHILD_RESOURCES)
            if entry.controller_uid == desired.uid
            and not entry.deleting
            and (entry.resource.kind, entry.name) not in retained
            and not (entry.resource is resources.CONFIG_MAP and entry.name in mounted)
            and not (workers and _connects_any(entry, workers, desired))
        ]
        if obsolete:
            await self._check_newest(desired)
        for entry in obsolete:
            await self._delete(entry.resource, entry.namespace, entry.name, entry.uid)
        await self._prune_credentials(desired, retained)

    def num_applied(self, key: ServiceKey) -> int:
        """Return how many objects of a service are up to date. If this number has grown, the pass made progress."""
        return len(self._applied.get(key, ()))

    def forget_service(self, key: ServiceKey) -> None:
        """Discard everything that is stored about a deleted service."""
        self._applied.pop(key, None)

    def forget_kind(self, resource: Resource) -> None:
        """Compare all objects of a kind with their manifests again."""
        for versions in self._applied.values():
            for kind_and_name in [key for key in versions if key[0] == resource.kind]:
                del versions[kind_and_name]

    async def _lookup_all(
        self, desired: ParsedService, manifests: Iterable[Manifest], result: ApplyResult
    ) -> list[tuple[Manifest, ExistingObject]]:
        """Return each manifest that can be applied, together with its existing object.

        The reasons why manifests cannot be applied are added to `result`. Other errors of `_lookup` are raised only
        after all lookups have ended. In this way, a single pass removes all objects of a deleted service. If the first
        error ended the lookups, each pass would remove only one object, and the delay between passes would grow.
        """
        annotated = [_with_applied_digest(manifest) for manifest in manifests]
        pairs, errors = [], []
        existing_objects = await _gather(self._lookup(desired, manifest) for manifest in annotated)
        for manifest, existing in zip(annotated, existing_objects, strict=True):
            if isinstance(existing, Forbidden):
                result.add_rejection(existing, manifest, exists=False)
            elif isinstance(existing, PendingDeletion):
                result.add_pending_deletion(existing, manifest)
            elif isinstance(existing, OwnershipConflict):
                result.add_conflict(existing, manifest)
            elif isinstance(existing, BaseException):
                errors.append(existing)
            else:
                pairs.append((manifest, existing))
        if errors:
            raise errors[0]
        return pairs

    async def _lookup(self, desired: ParsedService, manifest: Manifest) -> ExistingObject:
        """Return the existing object that has the kind and the name of a manifest, if there is one.

        Raises:
            OwnershipConflict: the object has another owner.
            PendingDeletion: the object is being deleted.
        """
        resource, namespace, name = resource_for(manifest), desired.key[0], manifest["metadata"]["name"]
        if resource is resources.SECRET:
            body = (await self._secrets.get(namespace, name)).body
        else:
            entry = self._cache.get(resource, namespace, name)
            if entry is not None and entry.key == desired.key and entry.controller_uid in (desired.uid, ""):
                _check_not_deleting(entry)
                return entry
            body = await self._client.get_or_none(resource, namespace, name)
        if body is None and resource is resources.SERVICE:
            self._check_no_group_has_name(namespace, name)
        if body is None and resource is resources.LEADER_WORKER_SET:
            await self._check_names_of_groups_are_free(namespace, name)
        if body is not None:
            await self._check_owner(desired, resource, body)
            if resource is not resources.SECRET:
                return self._cache.upsert(resource, body)
        return body

    def _check_no_group_has_name(self, namespace: str, name: str) -> None:
        """Raise OwnershipConflict if a LeaderWorkerSet makes a Service of this name for one of its groups. While the
        group is created anew, the Service does not exist.
        """
        match = _NAME_OF_GROUP.fullmatch(name)
        if match and self._cache.get(resources.LEADER_WORKER_SET, namespace, match["set"]) is not None:
            raise OwnershipConflict(
                f"Service {name!r} in namespace {namespace!r} belongs to group {match['group']} of the "
                f"{resources.LEADER_WORKER_SET.kind} {match['set']!r}, so the operator does not create it; give the "
                f"{resources.LLM_SERVICE.kind} another name"
            )

    async def _check_names_of_groups_are_free(self, namespace: str, name: str) -> None:
        """Raise OwnershipConflict if a Service has the name of a group of a new LeaderWorkerSet. The controller would
        use that Service for the addresses of the group's pods.
        """
        for service in (await self._client.list(resources.SERVICE, namespace)).items:
            meta = service["metadata"]
            match = _NAME_OF_GROUP.fullmatch(meta["name"])
            if match and match["set"] == name and (meta.get("labels") or {}).get(object_names.LWS_NAME) != name:
                raise OwnershipConflict(
                    f"Service {meta['name']!r} in namespace {namespace!r} has the name that the Service of group "
                    f"{match['group']} needs, so the operator does not create a {resources.LEADER_WORKER_SET.kind}; "
                    f"delete it, or give the {resources.LLM_SERVICE.kind} another name"
                )

    async def _check_owner(self, desired: ParsedService, resource: Resource, body: Mapping[str, Any]) -> None:
        meta, (namespace, service_name) = body["metadata"], desired.key
        labels = meta.get("labels") or {}
        is_managed = labels.get(object_names.MANAGED_BY) == object_names.MANAGER
        is_labeled = is_managed and labels.get(object_names.INSTANCE) == service_name
        owner_uid = controller_uid(body)
        # If an object lacks our labels, the watch does not see it. It still belongs to the service that controls it.
        if owner_uid == desired.uid or (is_labeled and not owner_uid):
            return
        owners = [o for o in meta.get("ownerReferences") or () if o.get("uid") == owner_uid]
        owner_names = [(o.get("kind"), o.get("name")) for o in owners]
        if is_labeled and owner_names[:1] == [(resources.LLM_SERVICE.kind, service_name)]:
            # The object belongs to a deleted service of the same name. Without this, only the garbage collector would
            # delete it. If the cached service is stale instead, `_check_newest` raises StaleService.
            await self._check_newest(desired)
            await self._delete(resource, namespace, meta["name"], meta["uid"])
            object_text = f"{resource.kind} {namespace}/{meta['name']}"
            raise PendingDeletion(
                f"{object_text} belongs to a deleted service; the operator deletes it before it creates a new one"
            )
        owner = f"belongs to {owner_names[0][0]} {owner_names[0][1]!r}" if owners else "has another owner"
        raise OwnershipConflict(
            f"{resource.kind} {meta['name']!r} in namespace {namespace!r} {owner}, so the operator does "
            f"not change it; delete it, or give the {resources.LLM_SERVICE.kind} another name"
        )

    def _is_applied(self, key: ServiceKey, manifest: Manifest, existing: ExistingObject) -> bool:
        """Whether the existing object already has all values of the manifest."""
        if isinstance(existing, CachedObject):
            recorded = self._applied.get(key, {}).get(_kind_and_name(manifest))
            if recorded is not None:
                return recorded == _applied_version(manifest, existing)
            if is_applied := is_up_to_date(manifest, existing.body()):
                self._record_applied(key, manifest, existing)
            return is_applied
        # A Secret, with exactly the keys of the manifest.
        has_same_keys = existing is not None and set(manifest["data"]) == set(existing.get("data") or ())
        return has_same_keys and is_up_to_date(manifest, existing)

    async def _apply_manifest(self, key: ServiceKey, manifest: Manifest, existing: ExistingObject) -> None:
        """Apply a manifest.

        Raises:
            PendingDeletion: the object is being deleted.
        """
        if resource_for(manifest) is resources.SECRET:
            await self._write_secret(key, manifest, existing if isinstance(existing, Mapping) else None)
            return
        assert existing is None or isinstance(existing, CachedObject)
        try:
            body = await self._server_side_apply(manifest, existing.uid if existing else None)
        except (InvalidObject, Forbidden) as error:
            if existing is None or not _is_fixed_by_queue(existing, manifest, error):
                raise
            await self._delete(existing.resource, existing.namespace, existing.name, existing.uid)
            raise PendingDeletion(
                f"{existing.resource.kind} {existing.namespace}/{existing.name} is deleted and created again, because "
                f"Kueue does not permit the change: {error}"
            ) from error
        written = self._cache.upsert(resource_for(manifest), body)
        # Somebody can delete the object after it was looked up. The API server accepts the manifest nevertheless.
        _check_not_deleting(written)
        self._record_applied(key, manifest, written)

    async def _server_side_apply(self, manifest: Manifest, uid: str | None) -> dict[str, Any]:
        resource, precondition = resource_for(manifest), {"uid": uid} if uid else {}
        body = await self._client.apply(resource, {**manifest, "metadata": {**manifest["metadata"], **precondition}})
        self._record_write(resource, "apply")
        return body

    async def _write_secret(self, key: ServiceKey, manifest: Manifest, existing: Mapping[str, Any] | None) -> None:
        """Write a Secret. A Secret that contains a new admin key is created, not applied. Otherwise, the new key could
        replace an existing key.
        """
        name = manifest["metadata"]["name"]
        is_superseded = existing is None or self._secrets.is_key_superseded(key, existing)
        is_new_key = is_superseded and name == object_names.admin_secret(key[1])
        try:
            if is_new_key:
                body = await self._client.create(resources.SECRET, manifest)
                self._record_write(resources.SECRET, "create")
            else:
                body = await self._server_side_apply(manifest, existing["metadata"]["uid"] if existing else None)
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

    async def _prune_credentials(self, desired: ParsedService, retained: Set[tuple[str, str]]) -> None:
        namespace, name = desired.key[0], object_names.credentials_secret(desired.key[1])
        if (resources.SECRET.kind, name) in retained:
            return
        body = (await self._secrets.get(namespace, name)).body
        if body is not None and controller_uid(body) == desired.uid:
            await self._check_newest(desired)
            await self._delete(resources.SECRET, namespace, name, body["metadata"]["uid"])

    def _record_applied(self, key: ServiceKey, manifest: Manifest, applied: CachedObject) -> None:
        self._applied.setdefault(key, {})[_kind_and_name(manifest)] = _applied_version(manifest, applied)


def _connects_any(entry: CachedObject, workers: Iterable[Mapping[str, str]], desired: ParsedService) -> bool:
    """Whether an object that is no longer rendered is a NetworkPolicy or Service of one of the workers with these
    labels, which the spec does not forbid."""
    service = desired.service
    if service is None:
        return False
    if entry.resource is resources.NETWORK_POLICY and service.spec.networking.networkPolicy.enabled:
        selector = entry.body()["spec"]["podSelector"].get("matchLabels") or {}
    elif entry.resource is resources.SERVICE and service.kv_transfer is not None:
        selector = entry.body()["spec"].get("selector") or {}
    else:
        return False
    return bool(selector) and any(selector.items() <= labels.items() for labels in workers)


def _check_not_deleting(entry: CachedObject) -> None:
    if entry.deleting:
        finalizers = entry.body()["metadata"].get("finalizers") or ()
        cause = f" and waits for its finalizers {', '.join(finalizers)}" if finalizers else ""
        raise PendingDeletion(
            f"{entry.resource.kind} {entry.namespace}/{entry.name} is being deleted{cause}; the operator creates it "
            "again when the deletion is complete",
            bool(finalizers),
        )


def _is_fixed_by_queue(existing: CachedObject, manifest: Manifest, error: Exception) -> bool:
    """Whether Kueue refuses a change. An object that is in a queue was admitted as it is, and none can enter one."""
    is_queued = bool(queue_of(existing.body()) or queue_of(manifest))
    return existing.resource is resources.LEADER_WORKER_SET and is_queued and "immutable" in str(error)


def _needs_nothing(manifest: Manifest, existing: ExistingObject) -> bool:
    """Whether a manifest can be applied although an object is missing that new pods need."""
    if resource_for(manifest) not in _WAITING_KINDS:
        return True
    annotations = existing.body()["metadata"].get("annotations") or {} if isinstance(existing, CachedObject) else {}
    revision = manifest["metadata"]["annotations"].get(PODS_ANNOTATION)
    return revision is not None and annotations.get(PODS_ANNOTATION) == revision


def _kind_and_name(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _applied_version(manifest: Manifest, applied: CachedObject) -> _AppliedVersion:
    return manifest["metadata"]["annotations"][APPLIED_DIGEST_ANNOTATION], applied.uid, applied.spec_digest


def _apply_order(pairs: Iterable[tuple[Manifest, ExistingObject]]) -> list[list[tuple[Manifest, ExistingObject]]]:
    order = {resource: number for number, wave in enumerate(_ORDERED_KINDS) for resource in wave}
    groups: list[list[tuple[Manifest, ExistingObject]]] = [[] for _ in range(len(_ORDERED_KINDS) + 1)]
    for manifest, existing in pairs:
        groups[order.get(resource_for(manifest), -1)].append((manifest, existing))
    return groups


async def _gather(requests: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all requests, and return the result or the error of each. When this function returns, all requests have
    ended.
    """
    return await asyncio.gather(*requests, return_exceptions=True)


def _with_applied_digest(manifest: Manifest) -> Manifest:
    """Add the annotation with the digest to a manifest.

    Secrets do not get a digest, because a digest would make it easier to guess their values.
    """
    if manifest["kind"] == resources.SECRET.kind:
        return manifest
    text = json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode()
    meta, digest = manifest["metadata"], hashlib.blake2b(text, digest_size=12).hexdigest()
    annotations = {**meta.get("annotations", {}), APPLIED_DIGEST_ANNOTATION: digest}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}
