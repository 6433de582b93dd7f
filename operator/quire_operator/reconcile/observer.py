# SPDX-License-Identifier: Apache-2.0
"""Observer: what one pass sees of a service: its objects from the cache, and what its pods say of themselves."""

import logging
from collections.abc import Mapping
from typing import Any

from quire_operator.kube import kinds
from quire_operator.reconcile.adapters import is_ahead
from quire_operator.reconcile.apply import Outcome
from quire_operator.reconcile.cache import Entry, Key
from quire_operator.reconcile.children import Children
from quire_operator.reconcile.model_cache import downloads, job_succeeded
from quire_operator.reconcile.observed import Observed, Pod, pod_of
from quire_operator.reconcile.parts import Parts
from quire_operator.reconcile.service_store import ServiceStore
from quire_operator.reconcile.wanted import Wanted
from quire_operator.render import names

log = logging.getLogger(__name__)


class Observer:
    """Looks at services."""

    def __init__(self, parts: Parts, services: ServiceStore) -> None:
        self._parts, self._services = parts, services

    async def observe(
        self, key: Key, wanted: Wanted, children: Children | None, applied: int, outcome: Outcome
    ) -> Observed:
        """All of it, with pods asked, and told their adapters where they need it.

        `children` and `applied` (a generation) are of the last complete apply, `outcome` of this pass's.

        Raises:
            ApiError: the API server does not answer.
        """
        cache = self._parts.cache
        # In an order of their own: a status names the first of several, and two operators would correct each other.
        bodies = [entry.body() for entry in sorted(cache.of(key, kinds.POD), key=lambda entry: entry.name)]
        serving = [body for body in bodies if _component(body) == names.SERVER]
        claim = cache.get(kinds.CLAIM, key[0], names.model_claim(key[1]))
        # Not that of the last apply, which may be of another source, or by an operator before this one.
        job_entry = self._download(key, wanted, claim.body() if claim else None)
        job = job_entry.name if job_entry else None
        jobs = [body for body in bodies if job and body["metadata"].get("labels", {}).get("job-name") == job]
        deployment = cache.get(kinds.DEPLOYMENT, *key)
        pods = await self._parts.pod_events.told(key[0], (pod_of(body) for body in (*serving, *jobs)))
        if any(pod.ip for pod in pods):
            secret = await self._parts.secrets.admin_key(key, wanted.uid)
            pods = await self._ask(key, pods, wanted, secret)
        return Observed(
            deployment=deployment.body() if deployment else None,
            pods=pods[: len(serving)],
            job=job_entry.body() if job_entry else None,
            job_pods=pods[len(serving) :],
            claim=claim.body() if claim else None,
            applied=applied,
            left_out=children.left_out if children else (),
            fields_left_out=children.fields_left_out if children else (),
            rejected="; ".join(outcome.rejected),
            conflict=outcome.conflict,
            going=outcome.going,
        )

    def _download(self, key: Key, wanted: Wanted, claim: Mapping[str, Any] | None) -> Entry | None:
        """The Job that brings the model of the spec: of several the one that has done so, or else the newest."""
        if wanted.service is None:
            return None
        found = downloads(self._parts.cache.of(key, kinds.JOB), wanted.service)
        return max(found, key=lambda entry: _rank(entry, claim), default=None)

    async def _ask(self, key: Key, pods: tuple[Pod, ...], wanted: Wanted, secret: str) -> tuple[Pod, ...]:
        """The pods with their reports, told the adapters where they need it."""
        catalogue = wanted.catalogue
        found = await self._parts.pods.refresh(pods, catalogue, secret)
        if catalogue is None or not any(pod.report and is_ahead(pod.report, catalogue.version) for pod in found):
            return found
        # Either we are behind, or the service was restored from a backup and its pods are of a time that never was.
        if not await self._services.is_newest(key, wanted):
            return found
        log.info("pods work on a catalogue that is no more service=%s/%s generation=%d", *key, wanted.generation)
        return await self._parts.pods.refresh(pods, catalogue, secret, overrule=True)


def _rank(entry: Entry, claim: Mapping[str, Any] | None) -> tuple[bool, str, str]:
    body = entry.body()
    return job_succeeded(body, claim), body["metadata"]["creationTimestamp"], entry.name


def _component(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("labels", {}).get(names.COMPONENT, ""))
