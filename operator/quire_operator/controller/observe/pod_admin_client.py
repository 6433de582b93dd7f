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

from quire_operator.controller.status.adapters import has_newer_catalog, needs_push
from quire_operator.controller.status.conditions import to_single_line
from quire_operator.controller.status.observed_state import PodState
from quire_spec.dataclass_json import drop_nulls, from_json
from quire_spec.documents.adapter_catalog import REPLACES_HEADER, AdapterCatalog, CatalogVersion
from quire_spec.documents.download_progress import PROGRESS_PATH, DownloadProgress
from quire_spec.documents.pod_status import PodStatus
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import format_for_url

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
TOTAL_TIMEOUT_S = 4.0
"""Of one pod, with all requests to it. An edit of the adapters waits for the pass before it to end, and is to be on
every pod that answers within 5 s."""
UNRESPONSIVE_TIMEOUT_S = 1.0
"""Of a pod that did not answer the last time."""
_FULL_TIMEOUT_INTERVAL_S = 30.0
"""How often such a pod has all the time again: it may only be slow."""
MAX_RESPONSE_BYTES = 16 * 2**20
"""The status of 4096 adapters that have all failed has about 4 MB."""
_MAX_ERROR = 300
_MAX_UNRESPONSIVE_VISITS = 16
"""Pods asked at a time of those that did not answer the last time: they must not take the others' turns."""


class VisitResult(StrEnum):
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


class PodAdminClient:
    """The operator's side of the admin port, for all services; one session, bounded in how much it asks at once."""

    def __init__(
        self,
        max_pods: int = 128,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        total_timeout_s: float = TOTAL_TIMEOUT_S,
        unresponsive_timeout_s: float = UNRESPONSIVE_TIMEOUT_S,
        record_visit: Callable[[VisitResult, float], None] = lambda exchange, seconds: None,
    ) -> None:
        """Make it inside a running event loop; `observe` is told of each visit to a pod and its seconds."""
        self._total_timeout_s, self._unresponsive_timeout_s = total_timeout_s, unresponsive_timeout_s
        self._record_visit = record_visit
        self._visit_semaphore = asyncio.Semaphore(max_pods)
        self._unresponsive_semaphore = asyncio.Semaphore(_MAX_UNRESPONSIVE_VISITS)
        self._unresponsive_since: dict[str, float] = {}
        """Pods that did not answer the last time, and when they had all the time last."""
        # No environment: a proxy has no business between the operator and its pods.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s),
        )

    async def refresh(
        self, pods: Iterable[PodState], catalog: AdapterCatalog | None, admin_key: str, replace_newer: bool = False
    ) -> tuple[PodState, ...]:
        """The same pods in the same order, each with what its GET /status answered, or why it did not; a pod that
        downloads, with what GET /progress did.

        Pods whose container runs are asked, all at once. One that works on other adapters than the catalogue's is told
        them (PUT /adapters) and asked again; with None nobody is told anything. One that works on newer ones is told
        only with `overrule`: the catalogue is known to be the newest there is. Takes 4 s at most, however many pods
        hang, and mostly 1 s where they have hung before; raises nothing for a pod.
        """
        push = None if catalog is None else CatalogPush.from_catalog(catalog, replace_newer)
        return tuple(await asyncio.gather(*(self._refresh_pod(pod, push, admin_key) for pod in pods)))

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _refresh_pod(self, pod: PodState, push: "CatalogPush | None", admin_key: str) -> PodState:
        is_reachable = pod.alive and pod.ip and pod.health_port
        if is_reachable and pod.downloading:
            # Whoever downloads has not been given the key.
            progress, _ = await self._visit(pod, "", lambda admin: admin.get_progress())
            return replace(pod, report=None, report_error="", progress=progress)
        if not (is_reachable and pod.started_at):
            return replace(pod, report=None, report_error="", progress=None)
        report, message = await self._visit(pod, admin_key, lambda admin: admin.visit(push))
        return replace(pod, report=report, report_error=message, progress=None)

    async def _visit(
        self,
        pod: PodState,
        admin_key: str,
        send_requests: Callable[["_AdminPort"], Awaitable[tuple[T, VisitResult, str]]],
    ) -> tuple[T | None, str]:
        """What the pod answered, and why it did not or did not take what it was told."""
        started_at = time.monotonic()
        is_unresponsive = started_at - self._unresponsive_since.get(pod.uid, -math.inf) < _FULL_TIMEOUT_INTERVAL_S
        timeout_s = self._unresponsive_timeout_s if is_unresponsive else self._total_timeout_s
        answer: T | None = None
        result, message = VisitResult.FAILED, ""
        acquired_at = math.inf
        try:
            async with asyncio.timeout(timeout_s):
                async with (
                    self._unresponsive_semaphore if pod.uid in self._unresponsive_since else self._visit_semaphore
                ):
                    acquired_at = time.monotonic()
                    answer, result, message = await send_requests(_AdminPort(self._session, pod, admin_key))
            self._unresponsive_since.pop(pod.uid, None)
        except TimeoutError:
            # Whoever got a turn when the time was almost over has not been asked.
            timed_out = time.monotonic() - acquired_at > timeout_s / 2
            # The same words for both limits: a status that changes with each pass is written with each.
            message = (
                f"no answer within {self._total_timeout_s:g} s"
                if timed_out
                else "not asked: too many pods do not answer"
            )
            if timed_out and not is_unresponsive:
                self._mark_unresponsive(pod)
        except (aiohttp.ClientError, OSError) as error:
            message = str(error) or type(error).__name__
        except _Rejected as rejection:
            result, message = rejection.result, str(rejection)
        self._record_visit(result, time.monotonic() - started_at)
        # A pod or a proxy may show us our own header.
        message = to_single_line(message.replace(admin_key, "***") if admin_key else message, _MAX_ERROR)
        if result is VisitResult.PUSHED:
            logger.info("catalogue pushed pod=%s", pod.name)
        elif message:
            logger.debug("pod visited pod=%s outcome=%s error=%s", pod.name, result.value, message)
        return answer, message

    def _mark_unresponsive(self, pod: PodState) -> None:
        """It had all the time, and did not answer."""
        if len(self._unresponsive_since) >= 10_000:
            # Pods that have gone are never asked again; so many at once only means that much time has passed.
            self._unresponsive_since.clear()
        self._unresponsive_since[pod.uid] = time.monotonic()


@dataclass(frozen=True, slots=True)
class CatalogPush:
    """A catalogue, ready to be sent to many."""

    version: CatalogVersion
    body: bytes
    replace_newer: bool

    @classmethod
    def from_catalog(cls, catalog: AdapterCatalog, replace_newer: bool) -> "CatalogPush":
        return cls(
            catalog.version, json.dumps(drop_nulls(catalog.to_json()), separators=(",", ":")).encode(), replace_newer
        )

    def replaced_digest(self, report: PodStatus) -> str:
        """Digest of a newer catalogue that this one goes before; empty: none."""
        return report.catalogue if self.replace_newer and has_newer_catalog(report, self.version) else ""


class _Rejected(Exception):
    """The pod answered, and not with what was asked for; the message says how."""

    def __init__(self, result: VisitResult, message: str) -> None:
        self.result = result
        super().__init__(message)


class _AdminPort:
    """The admin port of one pod."""

    def __init__(self, session: aiohttp.ClientSession, pod: PodState, admin_key: str) -> None:
        self._session, self._base_url = session, f"http://{format_for_url(pod.ip)}:{pod.health_port}"
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}

    async def visit(self, push: CatalogPush | None) -> tuple[PodStatus, VisitResult, str]:
        """Ask, tell where that is needed, and ask again: report, how it went, and why the catalogue was not taken.

        Raises:
            _Refusal: no report that could be believed. TimeoutError, aiohttp.ClientError, OSError: no answer.
        """
        report = await self._get_status()
        if push is None:
            return report, VisitResult.ASKED, ""
        replaced_digest = push.replaced_digest(report)
        if not needs_push(report, push.version) and not replaced_digest:
            return report, VisitResult.ASKED, ""
        try:
            await self._put_adapters(push.body, {REPLACES_HEADER: replaced_digest} if replaced_digest else {})
        except _Rejected as rejection:
            if rejection.result is VisitResult.AHEAD:
                return await self._get_status(), VisitResult.AHEAD, ""
            return report, rejection.result, str(rejection)
        return await self._get_status(), VisitResult.PUSHED, ""

    async def get_progress(self) -> tuple[DownloadProgress, VisitResult, str]:
        """Ask how far the download is; raises as `visit`."""
        async with self._request("GET", PROGRESS_PATH) as response:
            text = await _read_body(response)
        progress = DownloadProgress.parse(text.decode(errors="replace")) if response.status == 200 else None
        if progress is None:
            raise _rejection(response.status, text, f"GET {PROGRESS_PATH}")
        return progress, VisitResult.ASKED, ""

    async def _get_status(self) -> PodStatus:
        async with self._request("GET", "/status") as response:
            text = await _read_body(response)
        if response.status != 200:
            raise _rejection(response.status, text, "GET /status")
        try:
            # An operator is upgraded before and after its pods: what a later one adds is left out.
            return from_json(PodStatus, json.loads(text), ignore_unknown=True)
        except (ValueError, RecursionError, ConfigError) as error:
            raise _Rejected(VisitResult.FAILED, f"its status document cannot be read: {error}") from error

    async def _put_adapters(self, body: bytes, headers: Mapping[str, str]) -> None:
        async with self._request("PUT", "/adapters", body, {"Content-Type": "application/json", **headers}) as response:
            text = await _read_body(response)
        if response.status != 202:
            raise _rejection(response.status, text, "PUT /adapters")

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        # Redirects would carry the key to where they lead.
        async with self._session.request(
            method,
            self._base_url + path,
            data=body,
            headers={**self._headers, **(headers or {})},
            allow_redirects=False,
        ) as response:
            yield response


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        text += chunk
        if len(text) > MAX_RESPONSE_BYTES:
            raise _Rejected(VisitResult.FAILED, f"its answer has more than {MAX_RESPONSE_BYTES} bytes")
    return bytes(text)


def _rejection(status: int, text: bytes, request: str) -> _Rejected:
    try:
        document = json.loads(text)
        message = str(document["error"])
    except (ValueError, RecursionError, KeyError, TypeError):
        message = text[:_MAX_ERROR].decode(errors="replace")
    if status in (401, 403):
        hint = "the key in its admin Secret is not the operator's; a changed Secret reaches a pod within two minutes"
        return _Rejected(VisitResult.UNAUTHORIZED, f"{request}: HTTP {status}: {hint}")
    if status == 409:
        return _Rejected(VisitResult.AHEAD, message)
    return _Rejected(VisitResult.REFUSED, f"{request}: HTTP {status}: {message}")
