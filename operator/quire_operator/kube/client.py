# SPDX-License-Identifier: Apache-2.0
"""Client: the requests that the operator makes, over one HTTP session. Raises ApiError by what can be done about it.

Applying is server-side apply by one field manager, forced: fields that we set are ours, all others are not touched.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson

from quire_operator.kube.errors import ApiError, Busy, Missing, Rejected, Stale, Undeclared, from_answer
from quire_operator.kube.kinds import Kind
from quire_operator.kube.login import Login
from quire_spec.errors import Unavailable

log = logging.getLogger(__name__)

MANAGER = "quire-operator"
_APPLY = "application/apply-patch+yaml"
_JSON = "application/json"
_JSON_PATCH = "application/json-patch+json"
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=1"
_PAGE = 500
_CONNECT_S = 10.0
_MAX_CONNECTIONS = 32
_CLOSE_S = 0.1
_TWICE = ("GET", "PATCH", "DELETE")
"""Requests that may be sent again when the answer is lost; patches are applies here, deletes name a uid."""
_RETRY_S = (0.2, 1.0)
_MOST_RETRY_S = 2.0
"""A server that wants a longer pause gets it from the work queue, which does something else meanwhile."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Listing:
    """The objects of a kind at one moment."""

    items: tuple[Body, ...]
    """Without apiVersion and kind, as the API server lists them."""
    version: str
    """resourceVersion that a watch goes on from."""


class Client:
    """Requests to one API server; an asynchronous context manager."""

    def __init__(self, login: Login, timeout_s: float = 30.0) -> None:
        """`timeout_s` bounds every request but watches."""
        self.login = login
        self.heard_at = 0.0
        """When the API server answered last, by the event loop's clock; 0: never."""
        self._undeclared: dict[Kind, set[tuple[str, ...]]] = {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)

    async def __aenter__(self) -> Self:
        tls = self.login.tls if self.login.tls is not None else False
        # Watches hold a connection each for ever; they must not use up those of the workers.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=_MAX_CONNECTIONS), auto_decompress=True
        )
        self._watches = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls, limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        await self._watches.close()
        # aiohttp's close only begins to end TLS connections.
        await asyncio.sleep(_CLOSE_S)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body:
        """One object; raises Missing."""
        return await self.request("GET", kind.path(namespace, name))

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Body | None:
        """One object, or None."""
        try:
            return await self.get(kind, namespace, name)
        except Missing:
            return None

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: str = "", metadata_only: bool = False
    ) -> Listing:
        """All objects of a kind in a namespace (None: in all), in pages; `labels` is a selector."""
        params = {"limit": str(_PAGE), **({"labelSelector": labels} if labels else {})}
        items: list[Body] = []
        while True:
            accept = f"{_METADATA_LIST},{_JSON}" if metadata_only else _JSON
            page = await self.request("GET", kind.path(namespace), params=params, accept=accept)
            items += page.get("items") or ()
            if not (more := page["metadata"].get("continue")):
                return Listing(tuple(items), page["metadata"]["resourceVersion"])
            params["continue"] = more

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Server-side apply; the object as it is then.

        A metadata.uid in the manifest is a condition: another object of that name raises Stale.
        """
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"])
        params = {"fieldManager": MANAGER, "force": "true"}
        unknown = self._undeclared.setdefault(kind, set())
        while True:
            try:
                body = without(manifest, unknown)
                return await self.request("PATCH", path, body, params=params, content_type=_APPLY)
            except Undeclared as error:
                if error.field in unknown:
                    raise
                # Written for a current API server; what an older one lacks it does without.
                log.info(
                    "field left out, too new for the API server kind=%s field=%s", kind.name, ".".join(error.field)
                )
                unknown.add(error.field)

    async def set_status(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Put the manifest's status in the place of the object's whole one; the object as it is then.

        Not server-side apply: API servers before 1.21 leave null where an object within was taken out, and then refuse
        it as no object. metadata.uid is a condition, as for `apply`.
        """
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"], "status")
        patch = [
            {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
            {"op": "add", "path": "/status", "value": manifest["status"]},
        ]
        try:
            return await self.request("PATCH", path, patch, params={"fieldManager": MANAGER}, content_type=_JSON_PATCH)
        except Rejected as error:
            # A test that fails and a status that is wrong are both 422.
            found = await self.get(kind, meta.get("namespace"), meta["name"])
            if found["metadata"]["uid"] != meta["uid"]:
                raise Stale(f"{error} (another object has the name by now)", error.status) from error
            raise

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Make an object that must not be there yet; raises Stale when it is."""
        path = kind.path(manifest["metadata"].get("namespace"))
        return await self.request("POST", path, manifest, params={"fieldManager": MANAGER})

    async def replace(self, kind: Kind, manifest: Mapping[str, Any]) -> Body:
        """Put an object in the place of the version that it names; raises Stale when there is a newer one."""
        meta = manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"])
        return await self.request("PUT", path, manifest, params={"fieldManager": MANAGER})

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        """Delete the object of that uid and, by the garbage collector, what it owns; it may be gone already.

        Raises:
            Stale: the name is another object's by now.
        """
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        options["propagationPolicy"] = "Background"
        try:
            await self.request("DELETE", kind.path(namespace, name), options)
        except Missing:
            return

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> Body:
        """One request; the parsed answer. Where there is none, or a server's error, it is sent again if it may be."""
        for wait in (*_RETRY_S, None):
            try:
                return await self._request(method, path, body, params, content_type, accept)
            except Busy as error:
                wanted = error.retry_after_s or 0.0
                if wait is None or wanted > _MOST_RETRY_S or method not in _TWICE:
                    raise
                await asyncio.sleep(max(wanted, wait * random.uniform(0.5, 1.0)))
        raise AssertionError("the last attempt returns or raises")

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        params: Mapping[str, str] | None,
        content_type: str,
        accept: str,
    ) -> Body:
        data = None if body is None else orjson.dumps(body)
        headers = {"Accept": accept, **({"Content-Type": content_type} if data is not None else {})}
        asked = f"{method} {path}"
        for last in (False, True):
            who = await self._who(asked)
            try:
                async with self._session.request(
                    method,
                    self.login.server + path,
                    params=params,
                    data=data,
                    headers={**headers, **who},
                    timeout=self._timeout,
                ) as answer:
                    text = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Busy(f"{asked}: no answer ({type(error).__name__}: {error})") from error
            self.heard_at = asyncio.get_running_loop().time()
            if answer.status == 401 and not last:
                # Tokens of a ServiceAccount are replaced while they still hold, but clocks differ.
                self.login.forget(who)
                continue
            return _parsed(asked, answer, text)
        raise AssertionError("the second attempt returns or raises")

    async def _who(self, asked: str) -> Mapping[str, str]:
        try:
            return await self.login.headers()
        except Unavailable as error:
            raise Busy(f"{asked}: not asked: {error}") from error

    @asynccontextmanager
    async def watch(
        self, kind: Kind, namespace: str | None, version: str, labels: str, timeout_s: float, answer_s: float = 30.0
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of a watch from a resource version on; the server ends it after `timeout_s`.

        It begins to answer within `answer_s`.

        Raises:
            ApiError: it was refused. What breaks it later comes from the iterator, as aiohttp raises it.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(timeout_s)),
            **({"labelSelector": labels} if labels else {}),
        }
        path = kind.path(namespace)
        asked = f"watch {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        who = await self._who(asked)
        headers = {"Accept": _JSON, **who}
        try:
            # aiohttp has no limit for the time between request and answer alone.
            async with asyncio.timeout(answer_s):
                answer = await self._watches.get(
                    self.login.server + path, params=params, headers=headers, timeout=timeout
                )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Busy(f"{asked}: no answer ({type(error).__name__}: {error})") from error
        try:
            if answer.status != 200:
                if answer.status == 401:
                    self.login.forget(who)
                _parsed(asked, answer, await answer.read())
            yield _lines(answer.content)
        finally:
            # Ending TLS politely takes a turn of the other side, which may be gone.
            if answer.connection is not None and answer.connection.transport is not None:
                answer.connection.transport.abort()
            answer.close()


def without(value: Any, fields: Collection[tuple[str, ...]]) -> Any:
    """A JSON value without the fields of these paths; entries of lists have no names in a path."""
    if not fields:
        return value
    if isinstance(value, list):
        return [without(item, fields) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: without(item, {path[1:] for path in fields if path[0] == key and len(path) > 1})
        for key, item in value.items()
        if (key,) not in fields
    }


def _parsed(asked: str, answer: aiohttp.ClientResponse, text: bytes) -> Body:
    try:
        body: Any = orjson.loads(text) if text else {}
    except ValueError:
        body = text.decode(errors="replace")[:200]
    if answer.status >= 300:
        raise from_answer(asked, answer.status, body, answer.headers.get("Retry-After"))
    if not isinstance(body, dict):
        raise Busy(f"{asked}: answered {body!r}, which is not JSON; is there a proxy on the way?", answer.status)
    return body


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; StreamReader's own refuses those over 128 KiB, and objects may have 1.5 MiB."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def error_of(event: Mapping[str, Any], asked: str) -> ApiError:
    """The error that a watch's event of type ERROR carries."""
    status = event["object"]
    return from_answer(asked, int(status.get("code") or 500), status)
