# SPDX-License-Identifier: Apache-2.0
"""Reconciler: one pass over one service: read, plan, apply, prune, ask the pods, write the status.

Level-based: a pass starts from what is, not from what happened, and may end anywhere; the next one goes on from there.
Nothing is written when nothing differs.
"""

import asyncio
import functools
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire_operator.engine_config import EngineRefuses
from quire_operator.kube import kinds
from quire_operator.kube.errors import Missing
from quire_operator.reconcile import children as children_of
from quire_operator.reconcile.apply import Outcome
from quire_operator.reconcile.cache import Entry, Key
from quire_operator.reconcile.children import Around, Children, Live
from quire_operator.reconcile.model_cache import downloads, is_going, is_of_another_claim, job_condition
from quire_operator.reconcile.observed import Observed, Verdict
from quire_operator.reconcile.observer import Observer
from quire_operator.reconcile.parts import Parts
from quire_operator.reconcile.pinned import Pinned
from quire_operator.reconcile.planning import stored_plan
from quire_operator.reconcile.pod_events import LOOK_S
from quire_operator.reconcile.service_store import Behind, ServiceStore
from quire_operator.reconcile.status import status
from quire_operator.reconcile.wanted import Wanted, identity
from quire_operator.render import names
from quire_operator.service import LLMService
from quire_spec.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_S, _POLL_MOST_S, _POLL_SETTLED_S = 2.0, 10.0, 30.0
"""Pods are asked how they are: while something is on its way, when that lasts, and when all is well."""
_POLL_DOWNLOAD_S = 10.0
"""A download is asked how far it is; progress.py tells it no more often."""
_FAILED_JOB_S = 300.0
"""A download that failed is tried again after this time: what was wrong may have been a Secret."""


@dataclass(frozen=True, slots=True)
class Again:
    """When a service is to be looked at next."""

    after_s: float
    failed: bool = False
    """Sooner, and then later and later, until it works."""


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


class Reconciler:
    """Passes over services."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._services = ServiceStore(parts)
        self._observer = Observer(parts, self._services)
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
        body = entry.body()
        previous = body.get("status") or {}
        memory = self._memory.setdefault(key, Memory())
        if memory.wanted is not None and memory.wanted.uid != entry.uid:
            # Made again, and nobody told us that the one before is gone.
            self.drop(key)
            memory = self._memory[key] = Memory()
        if memory.wanted is None or (memory.wanted.uid, memory.wanted.generation) != identity(body):
            memory.wanted = Wanted.read(body)
        wanted = memory.wanted
        try:
            verdict, outcome = await self._converge(key, wanted, previous, memory)
            observed = await self._observer.observe(key, wanted, memory.children, memory.applied, outcome)
            found = status(
                wanted.service, wanted.generation, verdict, observed, previous, datetime.now(UTC).replace(microsecond=0)
            )
            if found != previous:
                await self._services.write_status(entry, previous, found)
        except Behind:
            log.info("service has changed meanwhile service=%s/%s generation=%d", *key, wanted.generation)
            return Again(0.0)
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
        pinned = Pinned.read(self._live(key, service).deployment)
        verdict = await parts.planning.judge(service, wanted.uid, wanted.digest, stored, pinned, around.credentials)
        if verdict.plan is None or verdict.invalid or verdict.unplannable or verdict.pending:
            return verdict, Outcome()
        # Not only when something differs: a failed Job stays as it is.
        await self._retry_downloads(key, self._live(key, service))
        facts = (wanted.generation, verdict.plan, around, await self._secret_versions(key))
        live, contents = self._live(key, service), self._contents(key)
        if memory.seen is not None and memory.seen == (facts, contents):
            return verdict, Outcome()
        memory.seen = None
        try:
            found = children_of.children(service, wanted.digest, verdict.plan, around, live)
        except (ConfigError, EngineRefuses) as error:
            return Verdict(plan=stored, invalid=str(error)), Outcome()
        outcome = await self._apply(key, wanted, found, memory)
        if outcome.complete:
            facts = (*facts[:3], await self._secret_versions(key))
            # What was looked at and what was written, and not what is there by now: whatever else happened meanwhile is
            # news for the next pass.
            memory.seen = (facts, contents | {_place(entry): _state(entry) for entry in outcome.written})
        return verdict, outcome

    async def _apply(self, key: Key, wanted: Wanted, found: Children, memory: Memory) -> Outcome:
        parts = self._parts
        newest = functools.partial(self._services.check_newest, key, wanted.uid, wanted.generation)
        try:
            outcome = await parts.applier.apply(key, wanted.uid, found.manifests, newest)
        except Missing:
            # A kind that was there is gone; what is offered is asked anew, and the next pass leaves it out.
            await parts.discovery.offered(anew=True)
            raise
        assert wanted.service is not None, "something was rendered"
        lost = children_of.fields_left_out(wanted.service, parts.client.undeclared(kinds.DEPLOYMENT))
        # Without the manifests: a thousand services' would be 50 MB.
        memory.children = replace(found, manifests=(), fields_left_out=lost)
        if not outcome.complete:
            return outcome
        await parts.applier.prune(key, wanted.uid, found.kept, newest)
        if not found.held:
            memory.applied = wanted.generation
        return outcome

    async def _retry_downloads(self, key: Key, live: Live) -> None:
        """Take away downloads for a later pass to make again: those that failed some time ago, and those to a claim
        that is gone, or that waits for the Job's pod to go."""
        for name, job in (live.jobs or {}).items():
            lost = job_condition(job, "Complete") and is_of_another_claim(job, live.claim)
            if lost or is_going(live.claim) or _until_retry_s(job) == 0:
                await self._parts.client.delete(kinds.JOB, key[0], name, job["metadata"]["uid"])
                self._parts.wrote(kinds.JOB, "delete")

    def _live(self, key: Key, service: LLMService) -> Live:
        cache = self._parts.cache
        deployment = cache.get(kinds.DEPLOYMENT, *key)
        claim = cache.get(kinds.CLAIM, key[0], names.model_claim(service.name))
        jobs = {entry.name: entry.body() for entry in downloads(cache.of(key, kinds.JOB), service)}
        return Live(deployment.body() if deployment else None, claim.body() if claim else None, jobs)

    def _contents(self, key: Key) -> dict[Any, Any]:
        """What children are there, by place, and as what."""
        entries = (entry for entry in self._parts.cache.of(key) if entry.kind is not kinds.LLM_SERVICE)
        return {_place(entry): _state(entry) for entry in entries}

    async def _secret_versions(self, key: Key) -> tuple[str, ...]:
        kept = [
            await self._parts.secrets.get(key[0], name) for name in (names.admin_key(key[1]), names.credentials(key[1]))
        ]
        return tuple(str((secret.body or {}).get("metadata", {}).get("resourceVersion", "")) for secret in kept)

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
        lasts = now - (memory.unsettled_at or now)
        poll = min(max(_POLL_S, lasts / 30), _POLL_MOST_S)
        if any(pod.ip and pod.started_at for pod in observed.pods):
            after = min(after, _POLL_SETTLED_S * random.uniform(0.8, 1.2) if ready else poll)
        if outcome.going:
            # Nobody tells of a Secret that is gone.
            after = min(after, poll)
        if any(pod.alive and pod.downloading for pod in (*observed.pods, *observed.job_pods)):
            after = min(after, _POLL_DOWNLOAD_S)
        if (left_s := _until_retry_s(observed.job)) is not None:
            # Nobody tells of time. No sooner, as nothing is done about it while the service is paused.
            after = min(after, max(left_s, poll))
        if any(pod.creating for pod in (*observed.pods, *observed.job_pods)):
            after = min(after, LOOK_S)
        return Again(after)


def _until_retry_s(job: Mapping[str, Any] | None) -> float | None:
    """Seconds until a download is tried again, None for one that did not fail."""
    failed = job_condition(job, "Failed")
    if failed is None:
        return None
    ago = datetime.now(UTC) - datetime.fromisoformat(failed["lastTransitionTime"])
    return max(0.0, _FAILED_JOB_S - ago.total_seconds())


def _place(entry: Entry) -> tuple[str, str]:
    return entry.kind.name, entry.name


def _state(entry: Entry) -> tuple[Any, ...]:
    """What of an object decides about others: of Jobs also how they are, of pods only that they are."""
    if entry.kind in (kinds.POD, kinds.REPLICA_SET):
        return (entry.uid,)
    return entry.uid, entry.whole if entry.kind is kinds.JOB else entry.content, entry.deleting
