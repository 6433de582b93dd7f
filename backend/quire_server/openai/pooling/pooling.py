# SPDX-License-Identifier: Apache-2.0
"""POST /pooling: what a model returns for a text or for each of its tokens, in the form of vLLM."""

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
from quire_spec.engine.pooling_params import PoolingParams, PoolingTask
from quire_spec.protocol.messages import OutputDelta


class _Fields(PoolingFields, kw_only=True):
    input: Any = None
    """See EmbeddingFields."""
    task: PoolingTask | None = None
    """None: what the model returns for a text, or for its tokens if it returns nothing for a text."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class Pooling:
    """The route /pooling."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def create(self, request: HttpRequest) -> Reply:
        """POST /pooling: return the outputs of the pooler."""
        fields = parse_pooling_fields(await request.json_object(), _Fields, request)
        prompts, fields.input = parse_prompts(fields.input, "input", MAX_INPUTS), None
        if fields.dimensions is not None and fields.dimensions < 1:
            raise ApiError(400, f"dimensions: must be at least 1, got {fields.dimensions}; or omit it")
        served = await self._client.pooling()
        task: Any = fields.task or served.pooling_task or "embed"
        pooling = PoolingParams(task=task, dimensions=fields.dimensions, use_activation=fields.use_activation)
        run = PoolingRequest("pool-", request, fields, self._settings)
        deltas = await run.pooled(self._client, prompts, pooling)
        row_bytes = 4 * len(served.labels) if served.has_step_token else None
        is_text = fields.encoding_format == "base64"
        # A response can have millions of numbers, so another thread writes it.
        data = await asyncio.to_thread(
            lambda: b",".join(entry_json(i, delta, pooling, is_text, row_bytes) for i, delta in enumerate(deltas))
        )
        head = encode({**run.envelope(), "usage": run.usage()}).removesuffix(b"}")
        return Response(b'%b,"data":[%b]}' % (head, data))


def entry_json(index: int, delta: OutputDelta, pooling: PoolingParams, is_text: bool, row_bytes: int | None) -> bytes:
    """Return an entry of `data` as JSON. `row_bytes` is the size of a vector; None if all tokens have one."""
    numbers = delta.pooled or b""
    if is_text:
        data = b'"%b"' % base64.b64encode(numbers)
    elif pooling.is_by_token:
        size = row_bytes or len(numbers) // delta.num_input_tokens
        rows = (encode(floats(numbers[start : start + size])) for start in range(0, len(numbers), size))
        data = b"[%b]" % b",".join(rows)
    else:
        data = encode(floats(numbers))
    return b'{"index":%d,"object":"pooling","data":%b}' % (index, data)
