# SPDX-License-Identifier: Apache-2.0
"""HTTP client of the pods that compute prompts for this pod (prefill pods).

A pod that fails is not asked for a while, and then by one request at a time until it answers. The pods of a service
have the same certificate, so that the one of this front also identifies them.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire_spec.engine.kv_transfer_config import PeerAddress
from quire_spec.protocol.messages import PrefillResult

if TYPE_CHECKING:
    import aiohttp

_CONNECT_S = 2.0
"""A pod must accept a connection within this many seconds."""
_MAX_EXTENSIONS = 6
"""A request waits at most this many times as long as its timeout, if the pod answers other requests meanwhile."""
_RETRY_S = 5.0
"""After a failure, a pod is not asked for this many seconds."""
_MAX_ANSWER_BYTES = 2**20
"""Maximum size of an answer, which contains one token."""
_MAX_PODS = 64
"""Number of pods whose state is known; that of the pod that was named least recently is forgotten."""

logger = logging.getLogger(__name__)


class PrefillError(Exception):
    """A pod did not compute a prompt."""

    def __init__(self, result: PrefillResult, message: str) -> None:
        super().__init__(message)
        self.result = result


class Prefillers:
    """The prefill pods that requests have named."""

    def __init__(self, certfile: Path | None) -> None:
        """`certfile` is the certificate chain of the own front. The others are then reached over TLS, too."""
        self._certfile = certfile
        self._session: aiohttp.ClientSession | None = None
        self._retry_at: OrderedDict[PeerAddress, float] = OrderedDict()
        """Monotonic seconds at which a pod that has failed is asked again. It is infinite while a request asks it."""
        self._waiting: dict[PeerAddress, dict[asyncio.Timeout, tuple[float, float]]] = {}
        """The timeouts of the requests that wait for each pod: how long it is, and when it is over at the latest."""
        self._logged: set[PrefillResult] = set()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def post(
        self, pod: PeerAddress, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> dict[str, Any]:
        """Send a request to a pod, and return the JSON object that it answers. The pod has `timeout_s` seconds, and the
        same time again after each answer to another request: it then has a queue, but does not hang.

        Raises:
            PrefillError: the pod did not answer in time with status 200 and an object, or it is not asked at the
                moment.
        """
        retry_at = self._retry_at.get(pod)
        if retry_at is not None:
            if time.monotonic() < retry_at:
                raise PrefillError("skipped", "the pod has failed")
            self._set_retry(pod, float("inf"))
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                with self._extended(pod, timeout, timeout_s):
                    answer = await self._post(pod, path, headers, body)
        except (PrefillError, TimeoutError) as failure:
            error = failure if isinstance(failure, PrefillError) else PrefillError("deadline", "no answer in time")
            # A request that is rejected by its own fault does not show that the pod would reject the next one.
            self._set_retry(pod, None if error.result == "rejected" else time.monotonic() + _RETRY_S)
            self._log(pod, error)
            raise error from None
        except BaseException:
            # The client has disconnected: the next request asks the pod.
            if retry_at is not None:
                self._set_retry(pod, time.monotonic())
            raise
        self._set_retry(pod, None)
        now = asyncio.get_running_loop().time()
        for timeout, (seconds, end) in self._waiting.get(pod, {}).items():
            if not timeout.expired():
                timeout.reschedule(min(now + seconds, end))
        return answer

    @contextlib.contextmanager
    def _extended(self, pod: PeerAddress, timeout: asyncio.Timeout, timeout_s: float) -> Iterator[None]:
        """Let a timeout begin again at each answer of a pod."""
        waiting = self._waiting.setdefault(pod, {})
        waiting[timeout] = timeout_s, asyncio.get_running_loop().time() + _MAX_EXTENSIONS * timeout_s
        try:
            yield
        finally:
            del waiting[timeout]
            if not waiting:
                self._waiting.pop(pod, None)

    def _set_retry(self, pod: PeerAddress, retry_at: float | None) -> None:
        self._retry_at.pop(pod, None)
        if retry_at is not None:
            self._retry_at[pod] = retry_at
            if len(self._retry_at) > _MAX_PODS:
                self._retry_at.popitem(last=False)

    def _log(self, pod: PeerAddress, error: PrefillError) -> None:
        if error.result not in self._logged:
            self._logged.add(error.result)
            logger.warning(
                "prefill failed, prompt is computed here pod=%s result=%s error=%s", pod, error.result, error
            )

    async def _post(self, pod: PeerAddress, path: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        # Imported here, because most fronts have no prefill pods.
        import aiohttp

        if self._session is None:
            # Neither proxies nor credentials of the environment are used, and no cookies are stored.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls()),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        url = f"{'http' if self._certfile is None else 'https'}://{pod}{path}"
        data = bytearray()
        try:
            # A redirect could lead to any host.
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                async for chunk in response.content.iter_chunked(2**16):
                    data += chunk
                    if len(data) > _MAX_ANSWER_BYTES:
                        raise PrefillError("invalid", f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
        except aiohttp.ConnectionTimeoutError as error:
            raise PrefillError("unreachable", f"no connection within {_CONNECT_S:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PrefillError("unreachable", f"{type(error).__name__}: {str(error)[:200]}") from error
        if response.status != 200:
            text = data[:200].decode(errors="replace")
            result: PrefillResult = "rejected" if 400 <= response.status < 500 else "failed"
            raise PrefillError(result, f"status {response.status}: {text}")
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PrefillError("invalid", f"the answer is not a JSON object: {error}"[:300]) from error

    def _tls(self) -> ssl.SSLContext | bool:
        if self._certfile is None:
            return True
        context = ssl.create_default_context(cafile=str(self._certfile))
        # Requests name pods by address, and the certificate contains the name of the service. The certificate itself
        # is trusted, so that neither its issuer nor its name matters.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
        return context
