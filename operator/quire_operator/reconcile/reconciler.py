# SPDX-License-Identifier: Apache-2.0
"""Reconciler: one pass over one service: read, plan, apply, prune, ask the pods, write the status.

Level-based: a pass starts from what is, not from what happened, and may end anywhere; the next one goes on from there.
Nothing is written when nothing differs.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from quire_operator import crd
from quire_operator.engine_config import EngineRefuses
from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.discovery import Discovery
from quire_operator.kube.errors import ApiError, Missing, Stale
from quire_operator.kube.kinds import Kind
from quire_operator.reconcile import children as children_of
from quire_operator.reconcile.adapters import is_ahead
from quire_operator.reconcile.apply import Applier, Outcome
from quire_operator.reconcile.cache import Cache, Entry, Key
from quire_operator.reconcile.children import Around, Children, Live
from quire_operator.reconcile.events import Event, events
from quire_operator.reconcile.models import Models
from quire_operator.reconcile.observed import Observed, Pod, Verdict, pod_of
from quire_operator.reconcile.pinned import Pinned, spec_digest
from quire_operator.reconcile.planning import Planning, stored_plan
from quire_operator.reconcile.secrets import SecretStore
from quire_operator.reconcile.status import status
from quire_operator.render import names
from quire_operator.service import LLMService
from quire_spec.catalogue import Catalogue
from quire_spec.errors import ConfigError

log = logging.getLogger(__name__)

RESYNC_S = 600.0
"""A service of which nothing is heard is looked at this often, a fifth more or less."""
_POLL_S, _POLL_MOST_S, _POLL_SETTLED_S = 2.0, 10.0, 30.0
"""Pods are asked how they are: while something is on its way, when that lasts, and when all is well."""
_FAILED_JOB_S = 300.0
"""A download that failed is tried again after this time: what was wrong may have been a Secret."""


class Pods(Protocol):
    """Who talks to pods."""

    async def refresh(
        self, pods: tuple[Pod, ...], catalogue: Catalogue | None, key: str, overrule: bool = False
    ) -> tuple[Pod, ...]:
        """The pods with their reports, told the catalogue where they need it; `overrule`: even in the place of a newer."""
        ...


@dataclass(frozen=True, slots=True)
class Again:
    """When a service is to be looked at next."""

    after_s: float
    failed: bool = False
    """Sooner, and then later and later, until it works."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a spec says, as far as it can be read."""

    uid: str
    generation: int
    service: LLMService | None
    digest: str
    """pinned.spec_digest."""
    invalid: str
    """Why it cannot be read; empty: it can."""


@dataclass(slots=True)
class Memory:
    """What is remembered of a service between passes; all of it can be lost."""

    wanted: Wanted | None = None
    seen: Any = None
    """What the last complete apply was made from, and led to."""
    applied: int = 0
    """Generation of the last complete apply."""
    children: Children | None = None
    unsettled_at: float | None = None
    """Since when it is not ready."""


@dataclass(slots=True)
class Parts:
    """What a reconciler works with."""

    client: Client
    cache: Cache
    secrets: SecretStore
    models: Models
    planning: Planning
    discovery: Discovery
    applier: Applier
    pods: Pods
    operator: Mapping[str, Any] | None = None
    """NetworkPolicy peer that the operator is."""
    resync_s: float = RESYNC_S
    wrote: Callable[[Kind, str], None] = field(default=lambda kind, verb: None)


class Reconciler:
    """Passes over services."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._memory: dict[Key, Memory] = {}

    async def reconcile(self, key: Key) -> Again | None:
        """One pass; None: the service is gone, and its objects go with it by the garbage collector.

        Raises:
            ApiError: the API server does not do its part now.
        """
        entry = self._parts.cache.get(kinds.LLM_SERVICE, *key)
        if entry is None or entry.deleting:
            self.drop(key)
            return None
        memory = self._memory.setdefault(key, Memory())
        body = entry.body()
        previous = body.get("status") or {}
        if memory.wanted is None or (memory.wanted.uid, memory.wanted.generation) != _identity(body):
            memory.wanted = _read(body)
        wanted = memory.wanted
        verdict, outcome = await self._converge(key, wanted, previous, memory)
        observed = await self._observe(key, wanted, verdict, outcome, memory)
        found = status(
            wanted.service, wanted.generation, verdict, observed, previous, datetime.now(UTC).replace(microsecond=0)
        )
        if found != previous:
            await self._write_status(entry, previous, found)
        return self._again(verdict, outcome, observed, found, memory)

    def drop(self, key: Key) -> None:
        """Forget a service that is gone."""
        self._memory.pop(key, None)
        self._parts.applier.drop(key)
        self._parts.secrets.drop(key)

    def num_writes(self, key: Key) -> int:
        """Objects of a service that were written; one that grows shows progress."""
        return self._parts.applier.num_done(key)

    async def _converge(
        self, key: Key, wanted: Wanted, previous: Mapping[str, Any], memory: Memory
    ) -> tuple[Verdict, Outcome]:
        """Plan, and have the objects there; what cannot be planned leaves them as they are."""
        stored = stored_plan(previous)
        service = wanted.service
        if service is None:
            return Verdict(plan=stored, invalid=wanted.invalid), Outcome()
        if service.spec.paused:
            return Verdict(plan=stored), Outcome()
        parts = self._parts
        around = Around(
            wanted.uid,
            await parts.secrets.admin_key(key, wanted.uid),
            await parts.secrets.credentials(service),
            await parts.discovery.offered(),
            parts.operator,
        )
        live = self._live(key, service)
        pinned = Pinned.read(live.deployment)
        verdict = await parts.planning.judge(service, wanted.uid, wanted.digest, stored, pinned, around.credentials)
        if verdict.plan is None or verdict.invalid or verdict.unplannable or verdict.pending:
            return verdict, Outcome()
        facts = (wanted.generation, verdict.plan, around, await self._secret_versions(key))
        if memory.seen is not None and memory.seen == (facts, self._contents(key)):
            return verdict, Outcome()
        memory.seen = None
        try:
            found = children_of.children(service, wanted.digest, verdict.plan, around, live)
        except (ConfigError, EngineRefuses) as error:
            return Verdict(plan=stored, invalid=str(error)), Outcome()
        outcome = await self._apply(key, wanted, found, memory)
        if not outcome.conflict and not outcome.rejected:
            memory.seen = ((*facts[:3], await self._secret_versions(key)), self._contents(key))
        return verdict, outcome

    async def _apply(self, key: Key, wanted: Wanted, found: Children, memory: Memory) -> Outcome:
        parts = self._parts
        try:
            outcome = await parts.applier.apply(key, wanted.uid, found.manifests)
        except Missing:
            # A kind that was there is gone; what is offered is asked anew, and the next pass leaves it out.
            await parts.discovery.offered(anew=True)
            raise
        # Without the manifests: a thousand services' would be 50 MB.
        memory.children = replace(found, manifests=())
        if outcome.conflict or outcome.rejected:
            return outcome
        await parts.applier.prune(key, wanted.uid, found.manifests)
        await self._retry_download(key, found.job)
        if not found.held:
            memory.applied = wanted.generation
        return outcome

    async def _retry_download(self, key: Key, name: str | None) -> None:
        """Take away a download that failed some time ago: the next pass makes it again."""
        entry = self._parts.cache.get(kinds.JOB, key[0], name) if name else None
        if entry is None or entry.deleting:
            return
        for condition in entry.body().get("status", {}).get("conditions") or ():
            if condition["type"] == "Failed" and condition["status"] == "True":
                failed_at = datetime.fromisoformat(condition["lastTransitionTime"].replace("Z", "+00:00"))
                if (datetime.now(UTC) - failed_at).total_seconds() > _FAILED_JOB_S:
                    await self._parts.client.delete(kinds.JOB, key[0], entry.name, entry.uid)
                    self._parts.wrote(kinds.JOB, "delete")

    async def _observe(self, key: Key, wanted: Wanted, verdict: Verdict, outcome: Outcome, memory: Memory) -> Observed:
        cache = self._parts.cache
        bodies = [entry.body() for entry in cache.of(key, kinds.POD)]
        serving = [body for body in bodies if _component(body) == names.SERVER]
        job = memory.children.job if memory.children else None
        jobs = [body for body in bodies if job and body["metadata"].get("labels", {}).get("job-name") == job]
        deployment = cache.get(kinds.DEPLOYMENT, *key)
        claim = cache.get(kinds.CLAIM, key[0], names.model_claim_of(key[1]))
        job_entry = cache.get(kinds.JOB, key[0], job) if job else None
        pods = tuple(pod_of(body) for body in serving)
        if any(pod.ip for pod in pods):
            secret = await self._parts.secrets.admin_key(key, wanted.uid)
            pods = await self._ask(key, pods, wanted, secret)
        return Observed(
            deployment=deployment.body() if deployment else None,
            pods=pods,
            job=job_entry.body() if job_entry else None,
            job_pods=tuple(pod_of(body) for body in jobs),
            claim=claim.body() if claim else None,
            applied=memory.applied,
            left_out=memory.children.left_out if memory.children else (),
            rejected="; ".join(outcome.rejected),
            conflict=outcome.conflict,
        )

    async def _ask(self, key: Key, pods: tuple[Pod, ...], wanted: Wanted, secret: str) -> tuple[Pod, ...]:
        """The pods with their reports, told the adapters where they need it."""
        catalogue = self._catalogue(key, wanted)
        found = await self._parts.pods.refresh(pods, catalogue, secret)
        if catalogue is None or not any(pod.report and is_ahead(pod.report, catalogue.mark) for pod in found):
            return found
        # Either we are behind, or the service was restored from a backup and its pods are of a time that never was.
        if not await self._is_newest(key, wanted):
            return found
        log.info("pods work on a catalogue that is no more service=%s/%s generation=%d", *key, wanted.generation)
        return await self._parts.pods.refresh(pods, catalogue, secret, overrule=True)

    def _catalogue(self, key: Key, wanted: Wanted) -> Catalogue | None:
        """What pods are told: the spec's adapters, and of a spec that cannot be used or is paused nothing new."""
        if wanted.service is None or wanted.service.spec.paused:
            return None
        return wanted.service.catalogue()

    def _live(self, key: Key, service: LLMService) -> Live:
        cache = self._parts.cache
        deployment = cache.get(kinds.DEPLOYMENT, *key)
        claim = cache.get(kinds.CLAIM, key[0], names.model_claim(service))
        jobs = {entry.name: entry.body() for entry in cache.of(key, kinds.JOB) if not entry.deleting}
        return Live(deployment.body() if deployment else None, claim.body() if claim else None, jobs)

    def _contents(self, key: Key) -> frozenset[Any]:
        """What children are there, and as what; of Jobs also how they are, of pods only that they are."""
        found: list[Any] = []
        for entry in self._parts.cache.of(key):
            if entry.kind in (kinds.POD, kinds.REPLICA_SET):
                found.append((entry.kind.name, entry.name, entry.uid))
            elif entry.kind is not kinds.LLM_SERVICE:
                state = entry.whole if entry.kind is kinds.JOB else entry.content
                found.append((entry.kind.name, entry.name, entry.uid, state, entry.deleting))
        return frozenset(found)

    async def _secret_versions(self, key: Key) -> tuple[str, ...]:
        kept = [
            await self._parts.secrets.get(key[0], name)
            for name in (names.admin_key_of(key[1]), names.credentials_of(key[1]))
        ]
        return tuple(str((secret.body or {}).get("metadata", {}).get("resourceVersion", "")) for secret in kept)

    async def _write_status(self, entry: Entry, previous: Mapping[str, Any], found: dict[str, Any]) -> None:
        parts = self._parts
        manifest = {
            "apiVersion": kinds.LLM_SERVICE.api_version,
            "kind": kinds.LLM_SERVICE.name,
            # The uid is a condition: a new service of the same name does not get the old one's status.
            "metadata": {"name": entry.name, "namespace": entry.namespace, "uid": entry.uid},
            "status": found,
        }
        try:
            body = await parts.client.set_status(kinds.LLM_SERVICE, manifest)
        except (Missing, Stale):
            # Deleted, or made again, and nobody told us: a watch that lists again does not say what has gone.
            await self._read_again((entry.namespace, entry.name), entry.uid)
            raise
        parts.wrote(kinds.LLM_SERVICE, "status")
        parts.cache.put(kinds.LLM_SERVICE, body)
        for event in events(previous, found):
            try:
                await parts.client.create(kinds.EVENT, _event_body(entry, event))
                parts.wrote(kinds.EVENT, "create")
            except ApiError as error:
                log.warning("event was not written reason=%s error=%s", event.reason, error)

    async def _is_newest(self, key: Key, wanted: Wanted) -> bool:
        body = await self._read_again(key, wanted.uid)
        return body is not None and _identity(body) == (wanted.uid, wanted.generation)

    async def _read_again(self, key: Key, uid: str) -> dict[str, Any] | None:
        """The service as the API server has it now, of which the cache is told; None: it is gone."""
        body = await self._parts.client.find(kinds.LLM_SERVICE, *key)
        if body is None or body["metadata"]["uid"] != uid:
            gone = {"metadata": {"namespace": key[0], "name": key[1], "uid": uid}}
            self._parts.cache.remove(kinds.LLM_SERVICE, gone)
        if body is not None:
            self._parts.cache.put(kinds.LLM_SERVICE, body)
        return body

    def _again(
        self, verdict: Verdict, outcome: Outcome, observed: Observed, found: Mapping[str, Any], memory: Memory
    ) -> Again:
        now = asyncio.get_running_loop().time()
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in found.get("conditions") or ())
        if ready:
            memory.unsettled_at = None
        elif memory.unsettled_at is None:
            memory.unsettled_at = now
        if outcome.forbidden or verdict.retry:
            return Again(0.0, failed=True)
        after = self._parts.resync_s * random.uniform(0.8, 1.2)
        if any(pod.ip and pod.started_at for pod in observed.pods):
            lasts = now - (memory.unsettled_at or now)
            poll = min(max(_POLL_S, lasts / 30), _POLL_MOST_S)
            after = min(after, _POLL_SETTLED_S * random.uniform(0.8, 1.2) if ready else poll)
        return Again(after)


def _identity(body: Mapping[str, Any]) -> tuple[str, int]:
    return body["metadata"]["uid"], body["metadata"].get("generation", 0)


def _read(body: Mapping[str, Any]) -> Wanted:
    """What a stored LLMService says; an old API server knows no rules and stores what breaks them."""
    uid, generation = _identity(body)
    checked = crd.check(body)
    if checked.problems:
        return Wanted(uid, generation, None, "", "\n".join(map(str, checked.problems)))
    try:
        service = LLMService.from_body(checked.body)
    except ConfigError as error:
        return Wanted(uid, generation, None, "", str(error))
    return Wanted(uid, generation, service, spec_digest(checked.body, service), "")


def _component(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("labels", {}).get(names.COMPONENT, ""))


def _event_body(entry: Entry, event: Event) -> dict[str, Any]:
    regarding = {
        "apiVersion": kinds.LLM_SERVICE.api_version,
        "kind": kinds.LLM_SERVICE.name,
        "name": entry.name,
        "namespace": entry.namespace,
        "uid": entry.uid,
    }
    return {
        "apiVersion": kinds.EVENT.api_version,
        "kind": kinds.EVENT.name,
        # As others name theirs; a generateName may not end in a dot.
        "metadata": {"name": f"{entry.name}.{time.time_ns():x}", "namespace": entry.namespace},
        "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "reportingController": f"{kinds.LLM_SERVICE.group}/operator",
        "reportingInstance": "quire-operator",
        "action": "Reconcile",
        "reason": event.reason,
        "type": event.type,
        "note": event.message,
        "regarding": regarding,
    }
