# SPDX-License-Identifier: Apache-2.0
"""The ASGI application. It passes requests to routes, returns errors as JSON, sends server-sent events, and cancels a
request when its client disconnects."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import msgspec

from quire_server.openai.chat import ChatCompletions, ChatFields
from quire_server.openai.completions import CompletionFields, Completions
from quire_server.openai.errors import CODE_BY_STATUS, ApiError, as_api_error
from quire_server.openai.generation import DONE
from quire_server.openai.http.access import AccessControl
from quire_server.openai.http.body_budget import BodyBudget
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_server.openai.http.message import (
    ClientDisconnected,
    EventStream,
    HttpRequest,
    Receive,
    Reply,
    Response,
    Scope,
    Send,
)
from quire_server.openai.http.remote_prefill import RemotePrefill
from quire_server.openai.http.route_index import RouteIndex
from quire_server.openai.live.routes import Live
from quire_server.openai.lora_adapters import LoraAdapters
from quire_server.openai.messages import errors as message_errors
from quire_server.openai.messages.message_request import MessageFields
from quire_server.openai.messages.messages import Messages
from quire_server.openai.models import ANTHROPIC_VERSION, Models
from quire_server.openai.pooling.embeddings import Embeddings
from quire_server.openai.pooling.generative_scoring import GenerativeScoring
from quire_server.openai.pooling.pooling import Pooling
from quire_server.openai.pooling.scores import Scores
from quire_server.openai.responses.response_request import ResponseFields
from quire_server.openai.responses.responses import Responses
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_server.openai.tokenization import Tokenization
from quire_spec.errors import Code, QuireError, truncated_repr
from quire_spec.protocol.allowed_peers import PREFILLER_HEADER, AllowedPeers

logger = logging.getLogger(__name__)

_Handler = Callable[[HttpRequest], Awaitable[Reply]]
_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Without this header, nginx collects several events before it sends them to the client.
    (b"x-accel-buffering", b"no"),
]

_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionFields,
    "/v1/chat/completions": ChatFields,
    "/v1/responses": ResponseFields,
    "/v1/messages": MessageFields,
}
"""Fields of requests beside the sampling parameters, for the description of the routes."""


class Application:
    """The ASGI application of the OpenAI front, with all routes."""

    def __init__(self, settings: FrontSettings, client: TextClient) -> None:
        self._settings = settings
        self._client = client
        self._access = AccessControl(settings)
        self._allowed_peers = AllowedPeers(settings.engine.kv_transfer)
        self._body_budget = BodyBudget()
        models, tokenization = Models(client, settings), Tokenization(client, settings)
        lora_adapters = LoraAdapters(settings.run_dir)
        self._remote_prefill = RemotePrefill(settings, self._allowed_peers)
        completions = Completions(client, settings, self._remote_prefill)
        chat = ChatCompletions(client, settings, self._remote_prefill)
        embeddings, scores = Embeddings(client, settings), Scores(client, settings)
        responses, messages = Responses(client, chat), Messages(client, chat)
        self._routes: dict[str, Mapping[str, _Handler]] = {
            "/health": {"GET": models.health},
            "/ping": {"GET": models.health, "POST": models.health},
            "/load": {"GET": models.load},
            "/server_info": {"GET": models.server_info},
            "/tokenizer_info": {"GET": tokenization.info},
            "/version": {"GET": models.version},
            "/metrics": {"GET": models.metrics},
            "/v1/models": {"GET": models.get_all},
            "/v1/models/": {"GET": models.get},
            "/v1/completions": {"POST": completions.handle},
            "/v1/completions/render": {"POST": completions.render},
            "/v1/chat/completions": {"POST": chat.handle},
            "/v1/chat/completions/render": {"POST": chat.render},
            "/v1/responses": {"POST": responses.create},
            "/v1/responses/": dict.fromkeys(("GET", "POST", "DELETE"), responses.get),
            "/v1/messages": {"POST": messages.create},
            "/v1/messages/count_tokens": {"POST": messages.count_tokens},
            "/v1/load_lora_adapter": {"POST": lora_adapters.load},
            "/v1/unload_lora_adapter": {"POST": lora_adapters.unload},
            "/v1/embeddings": {"POST": embeddings.create},
            "/pooling": {"POST": Pooling(client, settings).create},
            **{path: {"POST": scores.score} for path in ("/score", "/v1/score")},
            **{path: {"POST": scores.rerank} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
            **{path: {"POST": scores.classify} for path in ("/classify", "/v1/classify")},
            "/generative_scoring": {"POST": GenerativeScoring(client, settings).score},
            "/tokenize": {"POST": tokenization.tokenize},
            "/detokenize": {"POST": tokenization.detokenize},
        }
        self._live = Live(client) if settings.openai.live else None
        if self._live is not None:
            self._routes |= {"/live": {"GET": self._live.page}, "/live/events": {"GET": self._live.events}}
        index = RouteIndex(self._routes, _BODIES)
        self._routes |= {"/": {"GET": index.page}, "/openapi.json": {"GET": index.document}}

    def close(self) -> None:
        """End the streams of /live/events, which never end by themselves. This must happen before the server waits for
        open responses."""
        if self._live is not None:
            self._live.close()

    async def close_connections(self) -> None:
        """Close the connections to other pods, after all responses have ended."""
        await self._remote_prefill.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = HttpRequest.from_scope(scope, receive, self._settings.openai.maxBodyBytes, self._body_budget)
        if request.method == "OPTIONS" and (headers := self._access.preflight_headers(request)):
            # A browser does not send a key with this request, so the key is not checked.
            await self._send(request, Response(b"", 204, headers=headers), send)
            return
        if self._settings.openai.enableLogRequests:
            send = _logged(request, send)
        try:
            await self._respond(request, send)
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            # The client has disconnected. This ends the context of the stream, which cancels the engine's requests.
            if request.watcher is None or not request.watcher.done():
                raise
        finally:
            request.end()
            if request.ignored_fields:
                self._client.report_ignored_fields()

    async def _respond(self, request: HttpRequest, send: Send) -> None:
        try:
            self._access.check(request)
            request.salt_cache = partial(self._access.cache_salt, request)
            request.ignored_fields = IgnoredFields(self._settings.openai.rejectUnknownFields)
            request.kv_source = await self._allowed_peers.source(request.headers)
            request.prefiller = await self._allowed_peers.source(request.headers, PREFILLER_HEADER)
            reply = await self._handler(request)(request)
            if isinstance(reply, EventStream):
                await self._stream(request, reply, send)
            else:
                await self._send(request, reply, send)
        except (ApiError, QuireError) as error:
            await self._send_error(request, as_api_error(error), send)
        except ClientDisconnected:
            raise
        except Exception:
            logger.exception("request failed path=%s %s", request.path, request.log_ids)
            await self._send_error(request, ApiError(500, "internal error; see the log of the pod"), send)

    def _handler(self, request: HttpRequest) -> _Handler:
        path = request.path
        for prefix in ("/v1/models/", "/v1/responses/"):
            if path.startswith(prefix):
                path, request.path_arg = prefix, path[len(prefix) :]
        if (methods := self._routes.get(path)) is None:
            raise ApiError(404, f"{path[:100]}: no such route", "path")
        method = "GET" if request.method == "HEAD" else request.method
        if (handler := methods.get(method)) is None:
            raise ApiError(405, f"{request.method} {path}: the method is not allowed; use {', '.join(methods)}")
        return handler

    async def _stream(self, request: HttpRequest, reply: EventStream, send: Send) -> None:
        """Send the events. The headers are sent together with the first chunk. If an error occurs before that, the
        response can still have the status of the error."""
        is_started = False
        try:
            async for chunk in reply.chunks:
                if not is_started:
                    is_started = True
                    headers = [*_EVENT_STREAM_HEADERS, *self._common_headers(request)]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (ApiError, QuireError) as error:
            if not is_started:
                raise
            await send(
                {"type": "http.response.body", "body": _error_event(request, as_api_error(error)), "more_body": True}
            )
        except Exception:
            if not is_started:
                raise
            logger.exception("stream failed path=%s %s", request.path, request.log_ids)
            event = _error_event(request, ApiError(500, "internal error; see the log of the pod"))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            # The stream is closed now, and not when it is garbage-collected, because this cancels the engine's
            # requests.
            await reply.chunks.aclose()
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, request: HttpRequest, reply: Response, send: Send) -> None:
        headers = [
            (b"content-type", reply.content_type),
            (b"content-length", str(len(reply.body)).encode()),
            *self._common_headers(request),
            *reply.headers,
        ]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    def _common_headers(self, request: HttpRequest) -> list[tuple[bytes, bytes]]:
        request_id = request.request_id.encode()
        own = [(b"x-request-id", request_id)]
        if _is_messages(request):
            own.append((b"request-id", request_id))
        ignored = request.ignored_fields.header()
        return [*own, *request.response_headers.items(), *ignored, *self._access.cors_headers(request)]

    async def _send_error(self, request: HttpRequest, error: ApiError, send: Send) -> None:
        if not error.is_counted:
            self._client.report_rejected(CODE_BY_STATUS.get(error.status, Code.INVALID_ARG))
        body, status = error.body(), error.status
        if _is_messages(request):
            body, status = message_errors.error_body(error, request.request_id), message_errors.status_of(error)
        await self._send(request, Response(body, status, headers=error.headers()), send)


def _logged(request: HttpRequest, send: Send) -> Send:
    """Return a function that works like `send`, and also logs the request when its response ends."""
    started_at, status = time.monotonic(), 0

    async def send_and_log(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            logger.info(
                "request method=%s path=%s status=%d seconds=%.3f api_key=%s %s",
                request.method[:20],
                truncated_repr(request.path),
                status,
                time.monotonic() - started_at,
                request.api_key_name or "-",
                request.log_ids,
            )

    return send_and_log


def _is_messages(request: HttpRequest) -> bool:
    """Return True if the client speaks the Messages API, whose errors have another form. Its clients send their version
    of the API to all routes."""
    return (
        request.path == "/v1/messages"
        or request.path.startswith("/v1/messages/")
        or ANTHROPIC_VERSION in request.headers
    )


def _error_event(request: HttpRequest, error: ApiError) -> bytes:
    if _is_messages(request):
        return message_errors.error_event(error, request.request_id)
    return b"data: %b\n\n%b" % (error.body(), DONE)
