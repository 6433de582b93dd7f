# SPDX-License-Identifier: Apache-2.0
"""POST /pooling: what a model returns for a text or for each of its tokens, in the form of vLLM."""

import asyncio
from typing import Any

from quire_server.openai.formatter import encode
from quire_server.openai.http.message import HttpRequest, Reply, Response
from quire_server.openai.pooling.pooling_request import PoolingRequest, floats, parse_pooling_fields
from quire_server.openai.pooling.vector_encoding import EncodedFields, bytes_response, vector_json
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.pooling_params import PoolingParams, PoolingTask
from quire_spec.protocol.messages import OutputDelta


class _Fields(EncodedFields, kw_only=True):
    task: PoolingTask | None = None
    """None: what the model returns for a text, or for its tokens if it returns nothing for a text."""


class Pooling:
    """The route /pooling."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def create(self, request: HttpRequest) -> Reply:
        """POST /pooling: return the outputs of the pooler."""
        fields = parse_pooling_fields(await request.json_object(), _Fields, request)
        prompts = fields.take_prompts(request)
        served = await self._client.pooling()
        task: Any = fields.task or served.pooling_task or "embed"
        pooling = PoolingParams(task=task, dimensions=fields.dimensions, use_activation=fields.use_activation)
        run = PoolingRequest("pool-", request, fields, self._settings)
        deltas = await run.pooled(self._client, prompts, pooling)
        row_bytes = 4 * len(served.labels) if served.has_step_token else None
        # A response can have millions of numbers, so another thread writes it.
        if fields.encoding_format.startswith("bytes"):
            vectors = [delta.pooled or b"" for delta in deltas]
            shapes = [_shape(delta, pooling, row_bytes) for delta in deltas]
            return await asyncio.to_thread(bytes_response, vectors, shapes, run, fields)
        data = await asyncio.to_thread(
            lambda: b",".join(entry_json(i, delta, pooling, fields, row_bytes) for i, delta in enumerate(deltas))
        )
        head = encode({**run.envelope(), "usage": run.usage()}).removesuffix(b"}")
        return Response(b'%b,"data":[%b]}' % (head, data))


def entry_json(
    index: int, delta: OutputDelta, pooling: PoolingParams, fields: EncodedFields, row_bytes: int | None
) -> bytes:
    """Return an entry of `data` as JSON. `row_bytes` is the size of a vector; None if all tokens have one."""
    numbers = delta.pooled or b""
    if pooling.is_by_token and fields.encoding_format == "float":
        size = 4 * _shape(delta, pooling, row_bytes)[1]
        rows = (encode(floats(numbers[start : start + size])) for start in range(0, len(numbers), size))
        data = b"[%b]" % b",".join(rows)
    else:
        data = vector_json(numbers, fields)
    return b'{"index":%d,"object":"pooling","data":%b}' % (index, data)


def _shape(delta: OutputDelta, pooling: PoolingParams, row_bytes: int | None) -> list[int]:
    """Return [size], or [num_vectors, size] if there are vectors of tokens; see `entry_json`."""
    num_bytes = len(delta.pooled or b"")
    if not pooling.is_by_token:
        return [num_bytes // 4]
    size = row_bytes or num_bytes // delta.num_input_tokens
    return [num_bytes // size, size // 4]
