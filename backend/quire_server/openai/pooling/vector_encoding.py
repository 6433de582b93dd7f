# SPDX-License-Identifier: Apache-2.0
"""Fields of requests for vectors, and the encodings of vectors in responses, in the forms of vLLM: numbers in JSON,
base64, or bytes with their places in a header."""

import base64
import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

from quire_server.openai.chat import ConversationFields, build_conversation
from quire_server.openai.completions import parse_prompts
from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import encode
from quire_server.openai.generation import Prompt
from quire_server.openai.http.message import HttpRequest, Response
from quire_server.openai.images.image_parts import image_urls
from quire_server.openai.pooling.pooling_request import MAX_INPUTS, PoolingFields, PoolingRequest, floats

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


class EncodedFields(PoolingFields, kw_only=True):
    """Fields of a request that returns vectors."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    """With bytes, the header `metadata` of the response describes its body; with bytes_only, this header is missing."""
    embed_dtype: EmbedDtype = "float32"
    """Type of the numbers in base64 and in bytes."""
    endianness: Literal["native", "little", "big"] = "native"
    """Order of the bytes of a number in base64 and in bytes."""
    dimensions: int | None = None
    input: Any = None
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    messages: Any = None
    """A conversation instead of `input`. The chat template makes the text."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def take_prompts(self, request: HttpRequest) -> list[Prompt]:
        """Return the prompts, and drop their fields, which can be large.

        Raises:
            ApiError: a field is invalid, or the request has not exactly one of `input` and `messages`.
        """
        if self.dimensions is not None and self.dimensions < 1:
            raise ApiError(400, f"dimensions: must be at least 1, got {self.dimensions}; or omit it")
        if self.messages is None:
            prompts, self.input = parse_prompts(self.input, "input", MAX_INPUTS), None
            return prompts
        if self.input is not None:
            raise ApiError(400, "messages: not possible with input; give only one of them")
        if image_urls(self.messages):
            raise ApiError(400, "messages: images are not possible here; use /v1/chat/completions")
        fields = ConversationFields(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return [Prompt(chat=build_conversation(fields, request.ignored_fields))]


def vector_json(vector: bytes, fields: EncodedFields) -> bytes:
    """Return a vector of float32 numbers in little-endian order as JSON."""
    if fields.encoding_format == "base64":
        return b'"%b"' % base64.b64encode(vector_bytes(vector, fields))
    return encode(floats(vector))


def bytes_response(
    vectors: Sequence[bytes], shapes: Sequence[Sequence[int]], run: PoolingRequest, fields: EncodedFields
) -> Response:
    """Return the vectors as a body, and their places in the header `metadata`. Vectors are float32 numbers in
    little-endian order."""
    parts, entries, start = [vector_bytes(vector, fields) for vector in vectors], [], 0
    for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        place = {"start": start, "end": start + len(part), "shape": list(shape)}
        kind = {"embed_dtype": fields.embed_dtype, "endianness": fields.endianness}
        entries.append({"index": index, **kind, **place})
        start += len(part)
    head = {key: value for key, value in run.envelope().items() if key != "object"}
    metadata = json.dumps({**head, "data": entries, "usage": run.usage()}).encode()
    headers = [(b"metadata", metadata)] if fields.encoding_format == "bytes" else []
    return Response(b"".join(parts), content_type=b"application/octet-stream", headers=headers)


def vector_bytes(vector: bytes, fields: EncodedFields) -> bytes:
    """Return float32 numbers in little-endian order in the dtype and the order of `fields`."""
    order = sys.byteorder if fields.endianness == "native" else fields.endianness
    if fields.embed_dtype == "float32" and order == "little":
        return vector
    # numpy takes time and memory, so it is imported only for requests that need it.
    from quire_server.openai.pooling.narrow_floats import convert

    return convert(vector, fields.embed_dtype, order)
