# SPDX-License-Identifier: Apache-2.0
"""Client of the pods' admin port: it reads the status and the download progress, and pushes the adapter catalog.

The client does not trust the responses of pods. It does not follow redirects, and it limits the size of a response.
Messages never contain the key. Called by the catalog pusher.
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
"""Timeout for a visit, which can consist of several requests to one pod. Within 5 s, a new adapter must reach every pod
that responds. This time includes a wait for the previous pass to end.
"""
UNRESPONSIVE_TIMEOUT_S = 1.0
"""Timeout for a visit to a pod that did not respond to its last visit."""
_FULL_TIMEOUT_INTERVAL_S = 30.0
"""Interval at which an unresponsive pod is visited again with TOTAL_TIMEOUT_S. The pod may be slow instead of dead."""
MAX_RESPONSE_BYTES = 16 * 2**20
"""Maximum size of a response. If 4,096 adapters have failed, the status of a pod has about 4 MB."""
_MAX_ERROR = 300
RANK_LOOP_AFTER = 2
"""A rank that was lost this many times is in a loop."""
_MAX_UNRESPONSIVE_VISITS = 16
"""Maximum number of unresponsive pods that are visited at the same time. Otherwise, they would delay visits to other
pods.
"""


class VisitResult(StrEnum):
    """Result of a visit to a pod. The metrics use it as a label."""

    ASKED = "asked"
    PUSHED = "pushed"
    AHEAD = "ahead"
    """The pod already has a newer catalog (HTTP 409)."""
    REFUSED = "refused"
    """The pod rejected the catalog."""
    UNAUTHORIZED = "unauthorized"
    """The pod uses a different key (HTTP 401)."""
    FAILED = "failed"
    """The pod did not respond, or its response was invalid."""


class PodAdminClient:
    """Visits the pods of all services. Only a limited number of pods is visited at the same time."""

    def __init__(
        self,
        max_pods: int = 128,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        total_timeout_s: float = TOTAL_TIMEOUT_S,
        unresponsive_timeout_s: float = UNRESPONSIVE_TIMEOUT_S,
        record_visit: Callable[[VisitResult, float], None] = lambda exchange, seconds: None,
    ) -> None:
        """Create the client. An event loop must already be running. After each visit, `record_visit` is called with its
        result and its duration in seconds.
        """
        self._total_timeout_s, self._unresponsive_timeout_s = total_timeout_s, unresponsive_timeout_s
        self._record_visit = record_visit
        self._visit_semaphore = asyncio.Semaphore(max_pods)
        self._unresponsive_semaphore = asyncio.Semaphore(_MAX_UNRESPONSIVE_VISITS)
        self._unresponsive_since: dict[str, float] = {}
        """Pods that did not respond to their last visit. The value is the time at which the pod was last visited with
        TOTAL_TIMEOUT_S.
        """
        # trust_env stays off, because requests to pods must not use a proxy.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=total_timeout_s, sock_connect=connect_timeout_s),
        )

    async def push_catalog(
        self, pods: Iterable[PodState], catalog: AdapterCatalog | None, admin_key: str, replace_newer: bool = False
    ) -> tuple[PodState, ...]:
        """Push `catalog` to each pod that has a different catalog. Return all pods in the same order.

        All pods that have a running container are visited at the same time. Each visit reads the status of the pod (GET
        /status), or the progress if the pod is still downloading (GET /progress). If the pod has a different catalog,
        `catalog` is pushed to it (PUT /adapters), and the status is read again. A newer catalog in a pod is replaced
        only if `replace_newer` is true. The caller must then know that `catalog` is the latest one. None pushes no
        catalog. A visit takes at most 4 s. For unresponsive pods, it usually takes 1 s. If a pod causes an error, the
        error is stored in the returned pod and not raised.
        """
        push = None if catalog is None else CatalogPush.from_catalog(catalog, replace_newer)
        return tuple(await asyncio.gather(*(self._visit_pod(pod, push, admin_key) for pod in pods)))

    async def read_ranks(self, pods: Iterable[PodState], admin_key: str) -> tuple[PodState, ...]:
        """Return all pods in the same order. Those that are not ready contain why their rank left its last group."""
        return tuple(await asyncio.gather(*(self._read_rank(pod, admin_key) for pod in pods)))

    async def _read_rank(self, pod: PodState, admin_key: str) -> PodState:
        if pod.ready or not (pod.alive and pod.ip and pod.health_port and pod.started_at):
            return pod
        error, _ = await self._visit(pod, admin_key, lambda admin: admin.get_rank_error())
        return replace(pod, rank_error=to_single_line(error or "", _MAX_ERROR))

    async def close(self) -> None:
        """Close the HTTP session."""
        await self._session.close()

    async def _visit_pod(self, pod: PodState, push: "CatalogPush | None", admin_key: str) -> PodState:
        is_reachable = pod.alive and pod.ip and pod.health_port
        if is_reachable and pod.downloading:
            # A pod that downloads the model does not have the admin key.
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
        """Return the pod's response and an error.

        If the pod rejected the catalog or did not respond, the error is not empty.
        """
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
            # If the visit waited for the semaphore until the time was almost over, the pod is not marked as
            # unresponsive.
            timed_out = time.monotonic() - acquired_at > timeout_s / 2
            # The text is the same for both timeouts. If it changed from pass to pass, the status would be written in
            # each pass.
            message = "not visited: too many pods do not respond"
            if timed_out:
                message = f"no response within {self._total_timeout_s:g} s"
                if not is_unresponsive:
                    self._mark_unresponsive(pod)
        except (aiohttp.ClientError, OSError) as error:
            message = str(error) or type(error).__name__
        except _Rejected as rejection:
            result, message = rejection.result, str(rejection)
        self._record_visit(result, time.monotonic() - started_at)
        # The response of a pod or of a proxy can repeat the request's headers, which contain the key.
        message = to_single_line(message.replace(admin_key, "***") if admin_key else message, _MAX_ERROR)
        if result is VisitResult.PUSHED:
            logger.info("catalog pushed pod=%s", pod.name)
        elif message:
            logger.debug("pod visited pod=%s outcome=%s error=%s", pod.name, result.value, message)
        return answer, message

    def _mark_unresponsive(self, pod: PodState) -> None:
        """Record that a pod did not respond, although it had the full timeout."""
        if len(self._unresponsive_since) >= 10_000:
            # Most entries belong to deleted pods, which are not visited again.
            self._unresponsive_since.clear()
        self._unresponsive_since[pod.uid] = time.monotonic()


@dataclass(frozen=True, slots=True)
class CatalogPush:
    """An adapter catalog that is serialized once, to be sent to many pods."""

    version: CatalogVersion
    body: bytes
    replace_newer: bool

    @classmethod
    def from_catalog(cls, catalog: AdapterCatalog, replace_newer: bool) -> "CatalogPush":
        body = json.dumps(drop_nulls(catalog.to_json()), separators=(",", ":")).encode()
        return cls(catalog.version, body, replace_newer)

    def replaced_digest(self, report: PodStatus) -> str:
        """If the pod has a newer catalog and this push may replace it, return the digest of the pod's catalog.

        Otherwise, return an empty text.
        """
        return report.catalogue if self.replace_newer and has_newer_catalog(report, self.version) else ""


class _Rejected(Exception):
    """The pod responded with an error or with an invalid document. The message describes it."""

    def __init__(self, result: VisitResult, message: str) -> None:
        self.result = result
        super().__init__(message)


class _AdminPort:
    """The admin port of one pod."""

    def __init__(self, session: aiohttp.ClientSession, pod: PodState, admin_key: str) -> None:
        self._session, self._base_url = session, f"http://{format_for_url(pod.ip)}:{pod.health_port}"
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}

    async def visit(self, push: CatalogPush | None) -> tuple[PodStatus, VisitResult, str]:
        """Read the status.

        If needed, push the catalog and then read the status again. Return the status, the result of the visit and the
        error of the push.

        Raises:
            _Rejected: the status is invalid. TimeoutError, aiohttp.ClientError, OSError: no response.
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
        """Read the download progress. Raises the same errors as `visit`."""
        async with self._request("GET", PROGRESS_PATH) as response:
            text = await _read_body(response)
        progress = DownloadProgress.parse(text.decode(errors="replace")) if response.status == 200 else None
        if progress is None:
            raise _rejection(response.status, text, f"GET {PROGRESS_PATH}")
        return progress, VisitResult.ASKED, ""

    async def get_rank_error(self) -> tuple[str, VisitResult, str]:
        """Read why the rank of a worker left its last group; "" if it left only one, which can have another cause.
        Raises the same errors as `visit`."""
        async with self._request("GET", "/status") as response:
            text = await _read_body(response)
        if response.status != 200:
            raise _rejection(response.status, text, "GET /status")
        try:
            document = json.loads(text)
            is_loop = int(document["num_groups_lost"]) >= RANK_LOOP_AFTER
            return str(document["last_error"]) if is_loop else "", VisitResult.ASKED, ""
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise _Rejected(VisitResult.FAILED, f"its status document is invalid: {error}") from error

    async def _get_status(self) -> PodStatus:
        async with self._request("GET", "/status") as response:
            text = await _read_body(response)
        if response.status != 200:
            raise _rejection(response.status, text, "GET /status")
        try:
            # Pods can be newer than the operator: unknown fields are ignored.
            return from_json(PodStatus, json.loads(text), ignore_unknown=True)
        except (ValueError, RecursionError, ConfigError) as error:
            raise _Rejected(VisitResult.FAILED, f"its status document is invalid: {error}") from error

    async def _put_adapters(self, body: bytes, headers: Mapping[str, str]) -> None:
        async with self._request("PUT", "/adapters", body, {"Content-Type": "application/json", **headers}) as response:
            text = await _read_body(response)
        if response.status != 202:
            raise _rejection(response.status, text, "PUT /adapters")

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        # A redirect would send the key to its target.
        all_headers = {**self._headers, **(headers or {})}
        url = self._base_url + path
        async with self._session.request(
            method, url, data=body, headers=all_headers, allow_redirects=False
        ) as response:
            yield response


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        text += chunk
        if len(text) > MAX_RESPONSE_BYTES:
            raise _Rejected(VisitResult.FAILED, f"its response has more than {MAX_RESPONSE_BYTES} bytes")
    return bytes(text)


def _rejection(status: int, text: bytes, request: str) -> _Rejected:
    try:
        document = json.loads(text)
        message = str(document["error"])
    except (ValueError, RecursionError, KeyError, TypeError):
        message = text[:_MAX_ERROR].decode(errors="replace")
    if status in (401, 403):
        hint = "the pod has another admin key than the operator; after a Secret changes, pods get it within two minutes"
        return _Rejected(VisitResult.UNAUTHORIZED, f"{request}: HTTP {status}: {hint}")
    if status == 409:
        return _Rejected(VisitResult.AHEAD, message)
    return _Rejected(VisitResult.REFUSED, f"{request}: HTTP {status}: {message}")
