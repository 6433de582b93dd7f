# SPDX-License-Identifier: Apache-2.0
"""The GET routes for health, load, version, configuration and metrics, and for the list of models that requests can
name."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_server.version import VERSION
from quire_spec.dataclass_json import to_json
from quire_spec.protocol.results import ServedModels

ANTHROPIC_VERSION = b"anthropic-version"
"""Header of all requests of clients of Anthropic's API. Models have another form there."""
_METRICS_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Models:
    """The GET routes of models, health, load, version, configuration and metrics."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._names = settings.model_names
        self._engine_config = settings.engine
        self._created = int(time.time())

    async def get_all(self, request: HttpRequest) -> Reply:
        """GET /v1/models: list the base model first, and then the adapters. The base model is the parent of each
        adapter. While the front rejects all requests, the list would be incomplete, and the answer is 503."""
        models = await self._client.models(request.api_key_name)
        if models.closed_reason:
            raise ApiError(503, models.closed_reason, retry_after_s=1.0)
        if ANTHROPIC_VERSION not in request.headers:
            return Response(msgspec.json.encode({"object": "list", "data": self._cards(models)}))
        cards = [self._anthropic_card(card) for card in self._cards(models)]
        page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return Response(msgspec.json.encode({"data": cards, **page}))

    async def get(self, request: HttpRequest) -> Reply:
        """GET /v1/models/{id}: return one model."""
        models = await self._client.models(request.api_key_name)
        for card in self._cards(models):
            if card["id"] == request.path_arg:
                is_anthropic = ANTHROPIC_VERSION in request.headers
                return Response(msgspec.json.encode(self._anthropic_card(card) if is_anthropic else card))
        if request.path_arg in models.loading:
            raise ApiError(
                503, f"model: the adapter {request.path_arg!r} is not loaded yet; try again", retry_after_s=1.0
            )
        raise ApiError(404, f"model: {request.path_arg[:100]!r} is not served; GET /v1/models lists the names")

    async def health(self, request: HttpRequest) -> Reply:
        """GET /health: return 200 while the front accepts requests, and 503 otherwise."""
        closed_reason = (await self._client.models()).closed_reason
        if closed_reason:
            raise ApiError(503, closed_reason, retry_after_s=1.0)
        return Response(b"")

    async def version(self, request: HttpRequest) -> Reply:
        """GET /version: return the version of the server."""
        return Response(msgspec.json.encode({"version": VERSION}))

    async def load(self, request: HttpRequest) -> Reply:
        """GET /load: return the number of requests that are open in this front, as vLLM does."""
        return Response(msgspec.json.encode({"server_load": self._client.num_open}))

    async def server_info(self, request: HttpRequest) -> Reply:
        """GET /server_info: return the version and the configuration of the engine. The names are vLLM's engine
        arguments."""
        info = {"version": VERSION, "vllm_config": to_json(self._engine_config)}
        return Response(msgspec.json.encode(info))

    async def metrics(self, request: HttpRequest) -> Reply:
        """GET /metrics: return the metrics of the text process, because it counts all requests."""
        page = await self._client.call("metrics", str)
        return Response(page.encode(), content_type=_METRICS_CONTENT_TYPE)

    def _cards(self, models: ServedModels) -> list[dict[str, Any]]:
        base = self._names[0]
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "quire",
                "root": name,
                "parent": None if name in self._names else base,
                "max_model_len": models.max_model_len,
            }
            for name in (*self._names, *models.adapters)
        ]

    def _anthropic_card(self, card: Mapping[str, Any]) -> dict[str, Any]:
        """Return a card in the form of Anthropic's API. `max_input_tokens` leaves room for one token of output."""
        return {
            "id": card["id"],
            "type": "model",
            "display_name": card["id"],
            "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
            "max_input_tokens": card["max_model_len"] - 1,
        }
