# SPDX-License-Identifier: Apache-2.0
"""Models: what a plan needs to know of each service's model, from the hub, a bucket, a web server or a claim.

Read once for a source and then remembered: a plan is pinned anyway, and a branch that moves must restart nobody.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.errors import Stale
from quire_operator.kube.kinds import Kind
from quire_operator.plan.checkpoint import Checkpoint
from quire_operator.plan.files import files_of, read_checkpoint
from quire_operator.reconcile.cache import Cache, Entry, Key, controller
from quire_operator.reconcile.observed import pod_of
from quire_operator.reconcile.packed import unpack
from quire_operator.reconcile.pod_events import LOOK_S, PodEvents
from quire_operator.render import names, reader
from quire_operator.service import LLMService
from quire_spec.dataclass_json import drop_nulls, to_json
from quire_spec.documents.adapter_catalog import PvcSource, SecretRef
from quire_spec.errors import AccessDenied, ConfigError, Unavailable

Secrets = Mapping[str, Mapping[str, str]]
"""Values of Secrets by name and key."""

_MOST = 4096
_PARALLEL = 4
"""Threads that read at a time: each read is a few round trips."""
_AGAIN_S = 120.0
"""After a Job that found no model, until another one looks: files may be on their way to the claim."""
_PATIENCE_S = 300.0
"""What a place may have us wait for the next question (Retry-After), as in the download of a model."""
_LOOK_S = 5.0
"""Until a Job that another service started is in the cache."""


class Waiting(Exception):
    """Not known yet; the message says what is waited for."""


class Models:
    """Checkpoints by source."""

    def __init__(
        self,
        client: Client,
        cache: Cache,
        pod_events: PodEvents,
        wake: Callable[[Key, float], None],
        wrote: Callable[[Kind, str], None],
    ) -> None:
        """`wake` has a service looked at again after so many seconds; `wrote` is told of writes."""
        self._client, self._cache, self._wake, self._wrote = client, cache, wake, wrote
        self._pod_events = pod_events
        self._known: OrderedDict[tuple[str, str], Checkpoint] = OrderedDict()
        self._later: dict[tuple[str, str], tuple[float, ConfigError | Unavailable]] = {}
        """Places that are left alone: until when, and why."""
        self._waiting: dict[tuple[str, str], set[Key]] = {}
        self._threads = asyncio.Semaphore(_PARALLEL)

    async def of(self, service: LLMService, uid: str, secrets: Secrets, image: str) -> Checkpoint:
        """The model of a service; `image` is what a Job that reads a claim would run.

        Raises:
            Waiting: a Job reads it; `wake` comes when it has.
            ConfigError: it is no model that can be served.
            Unavailable, NotFound: the place does not answer, or does not let us in.
            ApiError: the API server refuses a Job.
        """
        source = service.spec.model.source
        place = (service.namespace or "", json.dumps(drop_nulls(to_json(source)), sort_keys=True))
        if place not in self._known:
            self._check_is_due(place, (service.namespace or "", service.name))
            if source.pvc is not None:
                found = await self._from_claim(place, service, uid, source.pvc, image)
            else:
                found = await self._read(place, service, secrets)
            self._known[place] = found
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(place)
        return self._known[place]

    def _check_is_due(self, place: tuple[str, str], key: Key) -> None:
        """Raises what was found there, where that is not to be asked again yet; wakes the service once it is."""
        now = asyncio.get_running_loop().time()
        self._later = {other: found for other, found in self._later.items() if found[0] > now}
        if place in self._later:
            until, why = self._later[place]
            self._wake(key, until - now)
            raise type(why)(str(why))

    def _ask_later(self, place: tuple[str, str], seconds: float, why: ConfigError | Unavailable) -> None:
        # Anew: the error itself holds on to the frames that it came through.
        self._later[place] = asyncio.get_running_loop().time() + seconds, type(why)(str(why))

    async def _read(self, place: tuple[str, str], service: LLMService, secrets: Secrets) -> Checkpoint:
        async with self._threads:
            try:
                return await asyncio.to_thread(_read, service, secrets)
            except Unavailable as error:
                if error.retry_after_s:
                    self._ask_later(place, min(error.retry_after_s, _PATIENCE_S), error)
                raise

    async def _from_claim(
        self, place: tuple[str, str], service: LLMService, uid: str, source: PvcSource, image: str
    ) -> Checkpoint:
        key = (service.namespace or "", service.name)
        manifest = reader.job(service, source, image)
        name, namespace = manifest["metadata"]["name"], key[0]
        self._waiting.setdefault(place, set()).add(key)
        entry = self._cache.get(kinds.JOB, namespace, name)
        if entry is None:
            await self._start(manifest, service, uid)
            raise Waiting(f"Job {name} is to read config.json from claim {source.claimName}")
        try:
            found = _told(entry.body(), await self._messages(entry, name), source)
        except (ConfigError, Unavailable) as error:
            if isinstance(error, ConfigError):
                self._ask_later(place, _AGAIN_S, error)
            await self._client.delete(kinds.JOB, namespace, name, entry.uid)
            self._wake_all(place)
            raise
        if found is None:
            trouble = await self._trouble(key, entry.key, name)
            raise Waiting(f"Job {name} reads config.json from claim {source.claimName}{trouble}")
        # The Job stays until the plan that comes of it is in the cluster (prune takes it away), lest a restart of the
        # operator in between has to start another one.
        self._wake_all(place)
        return found

    async def _start(self, manifest: dict[str, Any], service: LLMService, uid: str) -> None:
        owner = {"apiVersion": kinds.LLM_SERVICE.api_version, "kind": kinds.LLM_SERVICE.name, "name": service.name}
        owned = {**owner, "uid": uid, "controller": True}
        manifest["metadata"]["ownerReferences"] = [owned]
        found = await self._client.find(kinds.JOB, service.namespace, manifest["metadata"]["name"])
        if found is None:
            try:
                # Not applied: several services may want it at once, and the first of them has it.
                found = await self._client.create(kinds.JOB, manifest)
            except Stale as error:
                self._wake((service.namespace or "", service.name), _LOOK_S)
                raise Waiting(f"Job {manifest['metadata']['name']} is being started for another service") from error
            self._wrote(kinds.JOB, "create")
        elif found["metadata"].get("labels", {}).get(names.COMPONENT) != reader.READER:
            raise ConfigError(f"Job {manifest['metadata']['name']} is not ours ({controller(found)}); delete it")
        self._cache.put(kinds.JOB, found)

    def _wake_all(self, place: tuple[str, str]) -> None:
        """Look at all services that waited for a Job."""
        for key in self._waiting.pop(place, set()):
            self._wake(key, 0.0)

    async def _messages(self, entry: Entry, job: str) -> list[tuple[int, str]]:
        """Exit codes and termination messages of the Job's pods."""
        found = _messages(self._pods(entry.key, job))
        if not found and any(_is_over(entry.body(), how) for how in ("Complete", "Failed")):
            # News of pods come by another watch, and may be behind those of their Job.
            found = _messages((await self._client.list(kinds.POD, entry.key[0], labels=f"job-name={job}")).items)
        return found

    async def _trouble(self, asks: Key, key: Key, job: str) -> str:
        """Why a pod of the Job of `key` does not run, for the message to `asks`."""
        bodies = self._pods(key, job)
        for body in bodies:
            for condition in body.get("status", {}).get("conditions") or ():
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    return f"; its pod has no node: {condition.get('message', '')}"
        pods = await self._pod_events.told(key[0], map(pod_of, bodies))
        if any(pod.creating for pod in pods):
            # An event of a pod wakes nobody.
            self._wake(asks, LOOK_S)
        for pod in pods:
            if pod.waiting:
                return f"; its pod waits: {pod.waiting}"
        return ""

    def _pods(self, key: Key, job: str) -> list[dict[str, Any]]:
        bodies = [entry.body() for entry in self._cache.of(key, kinds.POD)]
        return [body for body in bodies if body["metadata"].get("labels", {}).get("job-name") == job]


def _messages(pods: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    states = [
        state
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses") or ()
        if (state := container.get("state", {}).get("terminated"))
    ]
    return [(state.get("exitCode", 1), state.get("message", "")) for state in states]


def _is_over(job: Mapping[str, Any], how: str) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return any(c["type"] == how and c["status"] == "True" for c in conditions)


def _told(job: Mapping[str, Any], messages: list[tuple[int, str]], source: PvcSource) -> Checkpoint | None:
    """What a Job found; None: nothing yet.

    Raises:
        ConfigError: it failed.
        Unavailable: it had no time to, or nobody heard of it.
    """
    for code, message in messages:
        if code == 0 and message:
            return _unpacked(message)
    where = f"spec.model.source.pvc: claim {source.claimName!r}, path {source.path!r}"
    for code, message in messages:
        if code == 2:
            raise ConfigError(f"{where}: {message}")
    conditions = job.get("status", {}).get("conditions") or ()
    for condition in conditions:
        if condition["type"] == "Failed" and condition["status"] == "True":
            said = next((message for _, message in messages if message), condition.get("message", ""))
            if condition.get("reason") == "DeadlineExceeded" and not messages:
                # No node had room, or the claim was not to be had: nothing is known of what is on it.
                raise Unavailable(f"{where}: no pod of the Job that reads config.json came to its end in time ({said})")
            raise ConfigError(f"{where}: the Job that reads config.json failed: {said or condition.get('reason')}")
    if _is_over(job, "Complete"):
        if not messages:
            raise Unavailable(f"{where}: the pod of the Job that read config.json is gone, and what it said with it")
        raise ConfigError(f"{where}: the Job that reads config.json ended without a word; is the image a Quire image?")
    return None


def _unpacked(message: str) -> Checkpoint:
    try:
        facts = unpack(message)
        config, index, header = facts["config"], facts["index"], facts["header"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the Job that reads config.json told {message[:80]!r}; is the image a Quire image?"
        ) from error
    return Checkpoint.from_files(config, index, header)


def _read(service: LLMService, secrets: Secrets) -> Checkpoint:
    def values(ref: SecretRef) -> Mapping[str, str]:
        if ref.name not in secrets:
            raise AccessDenied(f"Secret {ref.name!r}: there is none in namespace {service.namespace!r}; make it")
        return secrets[ref.name]

    return read_checkpoint(files_of(service.spec.model.source, None, values))
