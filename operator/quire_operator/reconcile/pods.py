# SPDX-License-Identifier: Apache-2.0
"""Talks to the pods' health ports: asks each how it is, and tells it the catalogue when it works on another one; asks
one that downloads the model how far it is.

What a pod answers is not trusted further than its status: no redirect is followed, no more than a bounded answer is
read, and the key is in no message.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import aiohttp

from quire_operator.reconcile.adapters import is_ahead, needs_push
from quire_operator.reconcile.conditions import short
from quire_operator.reconcile.observed import Pod
from quire_spec.dataclass_json import drop_nulls, from_json
from quire_spec.documents.adapter_catalog import REPLACES_HEADER, AdapterCatalog, CatalogVersion
from quire_spec.documents.download_progress import PROGRESS_PATH, DownloadProgress
from quire_spec.documents.pod_status import PodStatus
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import format_for_url

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_S = 3.0
TOTAL_S = 4.0
"""Of one pod, with all requests to it. An edit of the adapters waits for the pass before it to end, and is to be on
every pod that answers within 5 s."""
SUSPECT_S = 1.0
"""Of a pod that did not answer the last time."""
_FULL_AGAIN_S = 30.0
"""How often such a pod has all the time again: it may only be slow."""
MAX_ANSWER_BYTES = 16 * 2**20
"""The status of 4096 adapters that have all failed has about 4 MB."""
_MAX_ERROR = 300
_SUSPECTS = 16
"""Pods asked at a time of those that did not answer the last time: they must not take the others' turns."""


class Exchange(StrEnum):
    """How a visit to a pod went, for metrics."""

    ASKED = "asked"
    PUSHED = "pushed"
    AHEAD = "ahead"
    """The pod has a newer catalogue than ours (HTTP 409)."""
    REFUSED = "refused"
    """The pod did not take the catalogue."""
    UNAUTHORIZED = "unauthorized"
    """The pod has another key (HTTP 401)."""
    FAILED = "failed"
    """No answer, or none that can be read."""


class AdapterPusher:
    """The operator's side of the admin port, for all services; one session, bounded in how much it asks at once."""

    def __init__(
        self,
        max_pods: int = 128,
        connect_s: float = CONNECT_S,
        total_s: float = TOTAL_S,
        suspect_s: float = SUSPECT_S,
        observe: Callable[[Exchange, float], None] = lambda exchange, seconds: None,
    ) -> None:
        """Make it inside a running event loop; `observe` is told of each visit to a pod and its seconds."""
        self._total_s, self._suspect_s = total_s, suspect_s
        self._observe = observe
        self._turns = asyncio.Semaphore(max_pods)
        self._suspect_turns = asyncio.Semaphore(_SUSPECTS)
        self._suspects: dict[str, float] = {}
        """Pods that did not answer the last time, and when they had all the time last."""
        # No environment: a proxy has no business between the operator and its pods.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s),
        )

    async def refresh(
        self, pods: Iterable[Pod], catalogue: AdapterCatalog | None, key: str, overrule: bool = False
    ) -> tuple[Pod, ...]:
        """The same pods in the same order, each with what its GET /status answered, or why it did not; a pod that
        downloads, with what GET /progress did.

        Pods whose container runs are asked, all at once. One that works on other adapters than the catalogue's is told
        them (PUT /adapters) and asked again; with None nobody is told anything. One that works on newer ones is told
        only with `overrule`: the catalogue is known to be the newest there is. Takes 4 s at most, however many pods
        hang, and mostly 1 s where they have hung before; raises nothing for a pod.
        """
        push = None if catalogue is None else _Push.of(catalogue, overrule)
        return tuple(await asyncio.gather(*(self._refreshed(pod, push, key) for pod in pods)))

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _refreshed(self, pod: Pod, push: "_Push | None", key: str) -> Pod:
        answers = pod.alive and pod.ip and pod.health_port
        if answers and pod.downloading:
            # Whoever downloads has not been given the key.
            far, _ = await self._visit(pod, "", lambda admin: admin.progress())
            return replace(pod, report=None, report_error="", progress=far)
        if not (answers and pod.started_at):
            return replace(pod, report=None, report_error="", progress=None)
        report, words = await self._visit(pod, key, lambda admin: admin.visit(push))
        return replace(pod, report=report, report_error=words, progress=None)

    async def _visit(
        self, pod: Pod, key: str, ask: Callable[["_Admin"], Awaitable[tuple[T, Exchange, str]]]
    ) -> tuple[T | None, str]:
        """What the pod answered, and why it did not or did not take what it was told."""
        begun = time.monotonic()
        suspect = begun - self._suspects.get(pod.uid, -math.inf) < _FULL_AGAIN_S
        limit_s = self._suspect_s if suspect else self._total_s
        answer: T | None = None
        exchange, words = Exchange.FAILED, ""
        turn_at = math.inf
        try:
            async with asyncio.timeout(limit_s):
                async with self._suspect_turns if pod.uid in self._suspects else self._turns:
                    turn_at = time.monotonic()
                    answer, exchange, words = await ask(_Admin(self._session, pod, key))
            self._suspects.pop(pod.uid, None)
        except TimeoutError:
            # Whoever got a turn when the time was almost over has not been asked.
            hung = time.monotonic() - turn_at > limit_s / 2
            # The same words for both limits: a status that changes with each pass is written with each.
            words = f"no answer within {self._total_s:g} s" if hung else "not asked: too many pods do not answer"
            if hung and not suspect:
                self._suspect(pod)
        except (aiohttp.ClientError, OSError) as error:
            words = str(error) or type(error).__name__
        except _Refusal as refusal:
            exchange, words = refusal.exchange, str(refusal)
        self._observe(exchange, time.monotonic() - begun)
        # A pod or a proxy may show us our own header.
        words = short(words.replace(key, "***") if key else words, _MAX_ERROR)
        if exchange is Exchange.PUSHED:
            log.info("catalogue pushed pod=%s", pod.name)
        elif words:
            log.debug("pod visited pod=%s outcome=%s error=%s", pod.name, exchange.value, words)
        return answer, words

    def _suspect(self, pod: Pod) -> None:
        """It had all the time, and did not answer."""
        if len(self._suspects) >= 10_000:
            # Pods that have gone are never asked again; so many at once only means that much time has passed.
            self._suspects.clear()
        self._suspects[pod.uid] = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Push:
    """A catalogue, ready to be sent to many."""

    mark: CatalogVersion
    body: bytes
    overrule: bool

    @classmethod
    def of(cls, catalogue: AdapterCatalog, overrule: bool) -> "_Push":
        return cls(
            catalogue.version, json.dumps(drop_nulls(catalogue.to_json()), separators=(",", ":")).encode(), overrule
        )

    def replaces(self, report: PodStatus) -> str:
        """Digest of a newer catalogue that this one goes before; empty: none."""
        return report.catalogue if self.overrule and is_ahead(report, self.mark) else ""


class _Refusal(Exception):
    """The pod answered, and not with what was asked for; the message says how."""

    def __init__(self, exchange: Exchange, message: str) -> None:
        self.exchange = exchange
        super().__init__(message)


class _Admin:
    """The admin port of one pod."""

    def __init__(self, session: aiohttp.ClientSession, pod: Pod, key: str) -> None:
        self._session, self._base = session, f"http://{format_for_url(pod.ip)}:{pod.health_port}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def visit(self, push: _Push | None) -> tuple[PodStatus, Exchange, str]:
        """Ask, tell where that is needed, and ask again: report, how it went, and why the catalogue was not taken.

        Raises:
            _Refusal: no report that could be believed. TimeoutError, aiohttp.ClientError, OSError: no answer.
        """
        report = await self._status()
        if push is None:
            return report, Exchange.ASKED, ""
        replaces = push.replaces(report)
        if not needs_push(report, push.mark) and not replaces:
            return report, Exchange.ASKED, ""
        try:
            await self._put(push.body, {REPLACES_HEADER: replaces} if replaces else {})
        except _Refusal as refusal:
            if refusal.exchange is Exchange.AHEAD:
                return await self._status(), Exchange.AHEAD, ""
            return report, refusal.exchange, str(refusal)
        return await self._status(), Exchange.PUSHED, ""

    async def progress(self) -> tuple[DownloadProgress, Exchange, str]:
        """Ask how far the download is; raises as `visit`."""
        async with self._request("GET", PROGRESS_PATH) as answer:
            text = await _read(answer)
        found = DownloadProgress.parse(text.decode(errors="replace")) if answer.status == 200 else None
        if found is None:
            raise _refusal(answer.status, text, f"GET {PROGRESS_PATH}")
        return found, Exchange.ASKED, ""

    async def _status(self) -> PodStatus:
        async with self._request("GET", "/status") as answer:
            text = await _read(answer)
        if answer.status != 200:
            raise _refusal(answer.status, text, "GET /status")
        try:
            # An operator is upgraded before and after its pods: what a later one adds is left out.
            return from_json(PodStatus, json.loads(text), ignore_unknown=True)
        except (ValueError, RecursionError, ConfigError) as error:
            raise _Refusal(Exchange.FAILED, f"its status document cannot be read: {error}") from error

    async def _put(self, body: bytes, headers: Mapping[str, str]) -> None:
        async with self._request("PUT", "/adapters", body, {"Content-Type": "application/json", **headers}) as answer:
            text = await _read(answer)
        if answer.status != 202:
            raise _refusal(answer.status, text, "PUT /adapters")

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        # Redirects would carry the key to where they lead.
        async with self._session.request(
            method, self._base + path, data=body, headers={**self._headers, **(headers or {})}, allow_redirects=False
        ) as answer:
            yield answer


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for data in answer.content.iter_chunked(2**16):
        text += data
        if len(text) > MAX_ANSWER_BYTES:
            raise _Refusal(Exchange.FAILED, f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(text)


def _refusal(status: int, text: bytes, request: str) -> _Refusal:
    try:
        document = json.loads(text)
        words = str(document["error"])
    except (ValueError, RecursionError, KeyError, TypeError):
        words = text[:_MAX_ERROR].decode(errors="replace")
    if status in (401, 403):
        hint = "the key in its admin Secret is not the operator's; a changed Secret reaches a pod within two minutes"
        return _Refusal(Exchange.UNAUTHORIZED, f"{request}: HTTP {status}: {hint}")
    if status == 409:
        return _Refusal(Exchange.AHEAD, words)
    return _Refusal(Exchange.REFUSED, f"{request}: HTTP {status}: {words}")
