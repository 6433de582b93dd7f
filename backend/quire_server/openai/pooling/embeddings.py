# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings: returns a vector for each text, in the form of OpenAI's API."""

import asyncio

from quire_server.openai.formatter import encode
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.pooling.pooling_request import PoolingRequest, parse_pooling_fields
from quire_server.openai.pooling.vector_encoding import EncodedFields, bytes_response, vector_json
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.pooling_params import PoolingParams


class Embeddings:
    """The route /v1/embeddings."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def create(self, request: HttpRequest) -> Reply:
        """POST /v1/embeddings: return the vectors of inputs."""
        fields = parse_pooling_fields(await request.json_object(), EncodedFields, request)
        prompts = fields.take_prompts(request)
        pooling = PoolingParams(dimensions=fields.dimensions, use_activation=fields.use_activation)
        run = PoolingRequest("embd-", request, fields, self._settings)
        vectors = await run.vectors(self._client, prompts, pooling)
        # A response can have millions of numbers, so another thread writes it, vector by vector.
        if fields.encoding_format.startswith("bytes"):
            return await asyncio.to_thread(bytes_response, vectors, [[len(v) // 4] for v in vectors], run, fields)
        data = await asyncio.to_thread(lambda: b",".join(_entry(i, v, fields) for i, v in enumerate(vectors)))
        head = encode({**run.envelope(), "usage": run.usage()}).removesuffix(b"}")
        return Response(b'%b,"data":[%b]}' % (head, data))


def _entry(index: int, vector: bytes, fields: EncodedFields) -> bytes:
    """Return an entry of `data` as JSON."""
    return b'{"index":%d,"object":"embedding","embedding":%b}' % (index, vector_json(vector, fields))
