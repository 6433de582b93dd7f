# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings: returns a vector for each text, in the form of OpenAI's API."""

import asyncio
import base64
from typing import Any, Literal

from quire_server.openai.completions import parse_prompts
from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import encode
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.pooling.pooling_request import (
    MAX_INPUTS,
    PoolingFields,
    PoolingRequest,
    floats,
    parse_pooling_fields,
)
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.pooling_params import PoolingParams


class EmbeddingFields(PoolingFields, kw_only=True):
    """Fields of a request for embeddings."""

    input: Any = None
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class Embeddings:
    """The route /v1/embeddings."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def create(self, request: HttpRequest) -> Reply:
        """POST /v1/embeddings: return the vectors of inputs."""
        fields = parse_pooling_fields(await request.json_object(), EmbeddingFields, request)
        prompts, fields.input = parse_prompts(fields.input, "input", MAX_INPUTS), None
        if fields.dimensions is not None and fields.dimensions < 1:
            raise ApiError(400, f"dimensions: must be at least 1, got {fields.dimensions}; or omit it")
        pooling = PoolingParams(dimensions=fields.dimensions, use_activation=fields.use_activation)
        run = PoolingRequest("embd-", request, fields, self._settings)
        vectors = await run.vectors(self._client, prompts, pooling)
        is_text = fields.encoding_format == "base64"
        # A response can have millions of numbers, so another thread writes it, vector by vector.
        data = await asyncio.to_thread(lambda: b",".join(_entry(i, v, is_text) for i, v in enumerate(vectors)))
        head = encode({**run.envelope(), "usage": run.usage()}).removesuffix(b"}")
        return Response(b'%b,"data":[%b]}' % (head, data))


def _entry(index: int, vector: bytes, is_text: bool) -> bytes:
    """Return an entry of `data` as JSON."""
    numbers = b'"%b"' % base64.b64encode(vector) if is_text else encode(floats(vector))
    return b'{"index":%d,"object":"embedding","embedding":%b}' % (index, numbers)
