# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize converts a text or a conversation to token ids. POST /detokenize converts token ids to text."""

from typing import Any

import msgspec

from quire_server.openai.chat import ConversationFields, build_conversation
from quire_server.openai.errors import ApiError
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.images.image_parts import image_urls
from quire_server.openai.request_fields import parse_fields
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.protocol.results import Tokenized


class TokenizeFields(ConversationFields, kw_only=True):
    """Fields of a request to tokenize."""

    prompt: str | None = None
    return_token_strs: bool = False


class DetokenizeFields(ConversationFields, kw_only=True):
    """Fields of a request to detokenize."""

    tokens: Any = None


class Tokenization:
    """The routes /tokenize and /detokenize."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def tokenize(self, request: HttpRequest) -> Reply:
        """POST /tokenize: return the tokens of a prompt or of messages."""
        fields, _ = parse_fields(await request.json_object(), TokenizeFields, request.ignored_fields)
        if (fields.prompt is None) == (fields.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages")
        if image_urls(fields.messages):
            raise ApiError(400, "messages: images are not possible here; use /v1/chat/completions/render")
        args = {
            "prompt": fields.prompt,
            "chat": None if fields.messages is None else build_conversation(fields, request.ignored_fields),
            "model": None if fields.model is None else self._settings.engine_model(fields.model),
            "add_special_tokens": fields.add_special_tokens,
            "return_token_strs": fields.return_token_strs,
            "api_key_name": request.api_key_name,
        }
        result = await self._client.call("tokenize", Tokenized, args)
        return Response(msgspec.json.encode({"count": len(result.tokens), **msgspec.structs.asdict(result)}))

    async def info(self, request: HttpRequest) -> Reply:
        """GET /tokenizer_info: return tokenizer_config.json with the chat template that is used, as vLLM does."""
        return Response(msgspec.json.encode(await self._client.call("tokenizer_info", dict[str, Any])))

    async def detokenize(self, request: HttpRequest) -> Reply:
        """POST /detokenize: return the text of tokens."""
        fields, _ = parse_fields(await request.json_object(), DetokenizeFields, request.ignored_fields)
        model = None if fields.model is None else self._settings.engine_model(fields.model)
        args = {"tokens": fields.tokens, "model": model, "api_key_name": request.api_key_name}
        text = await self._client.call("detokenize", str, args)
        return Response(msgspec.json.encode({"prompt": text}))
