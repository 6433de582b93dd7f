# SPDX-License-Identifier: Apache-2.0
"""A request of a client for vectors instead of outputs: its common fields, and its engine requests, one for each
prompt."""

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.generation import Prompt
from quire_server.openai.http.ignored_fields import names_of
from quire_server.openai.http.message import HttpRequest
from quire_server.openai.output_stream import OutputStream
from quire_server.openai.request_fields import BOOKKEEPING_FIELDS, check_cache_salt, describe_invalid
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.dataclass_json import without_zero_fraction
from quire_spec.engine.pooling_params import MAX_POOLED_BYTES, PoolingParams
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, truncated_repr
from quire_spec.protocol.messages import GenerateRequest, OutputDelta

MAX_INPUTS = 2048
"""Maximum number of texts in a request, as in OpenAI's API."""
_MAX_OPEN = 256
"""An HTTP request has at most this number of engine requests at a time, so that it does not fill the queue."""
_WAIT_S = 60.0

_FORMER_NAMES = dict.fromkeys(("normalize", "softmax", "activation"), "use_activation")
"""Names that vLLM had before."""
_UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("messages", "max_tokens_per_doc", "chat_template"), ()),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "embedding_type": ("float",),
    "late_chunking": (False,),
    "mm_processor_kwargs": ({},),
}
"""Fields of vLLM, Cohere and Jina that change the vectors, and the values that have no effect. Only these values are
accepted."""
_T = TypeVar("_T", bound="PoolingFields")


class PoolingFields(msgspec.Struct, kw_only=True):
    """Fields that all these routes share. The names are those of vLLM."""

    model: str | None = None
    """Name of the base model or of an adapter; None: the base model."""
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    """As in vLLM, the end of a text is removed. Generation removes the start."""
    add_special_tokens: bool = True
    use_activation: bool = True
    """See PoolingParams."""
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    user: Any = None
    """The session of the request, if it is a text and the header X-Session-Id is missing."""


def parse_pooling_fields(
    document: Mapping[str, Any],
    fields_type: type[_T],
    request: HttpRequest,
    other_names: Mapping[str, str] | None = None,
) -> _T:
    """Return the fields of a request. A field whose value is null counts as missing. `other_names` maps further names
    of fields to the names in `fields_type`.

    Raises:
        ApiError: a field is not supported, or has a wrong type.
    """
    aliases = {**_FORMER_NAMES, **(other_names or {})}
    for name in (document.keys() & _UNSUPPORTED_FIELDS) - names_of(fields_type):
        if document[name] is not None and document[name] not in _UNSUPPORTED_FIELDS[name]:
            shown = truncated_repr(document[name])
            raise ApiError(400, f"{name}: is not supported by this route, got {shown}; leave it out", name)
    present = {
        aliases.get(name, name): without_zero_fraction(value) for name, value in document.items() if value is not None
    }
    known = names_of(fields_type) | BOOKKEEPING_FIELDS | _UNSUPPORTED_FIELDS.keys()
    request.ignored_fields.check(present, known)
    try:
        fields = msgspec.convert(present, fields_type)
    except msgspec.ValidationError as error:
        raise ApiError(400, describe_invalid(error)) from None
    check_cache_salt(fields.cache_salt)
    return fields


def floats(vector: bytes) -> list[float]:
    """Return the numbers of a vector."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


class PoolingRequest:
    """The engine requests of one HTTP request, and its usage."""

    def __init__(
        self, id_prefix: str, http_request: HttpRequest, fields: PoolingFields, settings: FrontSettings
    ) -> None:
        self.id = id_prefix + (fields.request_id or http_request.request_id)[:128]
        self.created = int(time.time())
        self.model = settings.model_names[0] if fields.model is None else fields.model
        self.num_input_tokens = 0
        self.num_cached_tokens = 0
        self._engine_model = settings.engine_model(self.model)
        self._http_request = http_request
        self._fields = fields
        self._cache_salt = http_request.salt_cache(fields.cache_salt)
        user = fields.user if isinstance(fields.user, str) else ""
        self._session = http_request.session_id or user or http_request.request_id

    async def vectors(self, client: TextClient, prompts: Sequence[Prompt], pooling: PoolingParams) -> list[bytes]:
        """Return the vector of each prompt: float32 numbers in little-endian order. Raises the errors of `pooled`."""
        return [delta.pooled or b"" for delta in await self.pooled(client, prompts, pooling)]

    async def pooled(self, client: TextClient, prompts: Sequence[Prompt], pooling: PoolingParams) -> list[OutputDelta]:
        """Return the final delta of each prompt, whose `pooled` has float32 numbers in little-endian order.

        Raises:
            ApiError: one of the requests failed.
        """
        truncation = {"truncate_prompt_tokens": self._fields.truncate_prompt_tokens}
        try:
            params = SamplingParams.checked(max_tokens=1, truncation_side=self._fields.truncation_side, **truncation)
        except InvalidArgument as error:
            raise ApiError(400, str(error).removeprefix("sampling parameter ")) from None
        return await self.run(client, prompts, params, pooling)

    async def run(
        self, client: TextClient, prompts: Sequence[Prompt], params: SamplingParams, pooling: PoolingParams | None
    ) -> list[OutputDelta]:
        """Return the final delta of each prompt. Without `pooling`, the prompts are continued.

        Raises:
            ApiError: one of the requests failed, or tokens have too many vectors.
        """
        results: list[OutputDelta] = []
        num_bytes = 0
        for start in range(0, len(prompts), _MAX_OPEN):
            requests = [self._engine_request(client, p, params, pooling) for p in prompts[start : start + _MAX_OPEN]]
            found: dict[int, OutputDelta] = {}
            with OutputStream(client, requests) as stream:
                while not stream.is_complete:
                    new = await stream.next(_WAIT_S)
                    num_bytes += sum(len(delta.pooled or b"") for _, delta in new)
                    if pooling is not None and pooling.is_by_token and num_bytes > MAX_POOLED_BYTES:
                        raise ApiError(
                            400,
                            f"input: the vectors of the tokens of {len(prompts)} texts have more than "
                            f"{MAX_POOLED_BYTES // 2**20} MiB in float32; send fewer texts in a request",
                            "input",
                        )
                    found |= dict(new)
            results += [found[index] for index in range(len(requests))]
        self.num_input_tokens += sum(delta.num_input_tokens for delta in results)
        self.num_cached_tokens += sum(delta.num_cached_tokens for delta in results)
        for delta in results:
            if delta.adapter_version:
                self._http_request.response_headers[b"quire-adapter-version"] = delta.adapter_version.encode()
        return results

    def envelope(self) -> dict[str, Any]:
        """Return the fields that all responses share."""
        return {"id": self.id, "object": "list", "created": self.created, "model": self.model}

    def usage(self, num_output_tokens: int = 0) -> dict[str, Any]:
        """Return the number of tokens."""
        return {
            "prompt_tokens": self.num_input_tokens,
            "total_tokens": self.num_input_tokens + num_output_tokens,
            "completion_tokens": num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def _engine_request(
        self, client: TextClient, prompt: Prompt, params: SamplingParams, pooling: PoolingParams | None
    ) -> GenerateRequest:
        return GenerateRequest(
            client.new_id(),
            self._engine_model,
            prompt.text,
            prompt.token_ids,
            params,
            False,
            self._cache_salt,
            self._fields.priority,
            self._fields.add_special_tokens,
            chat=prompt.chat,
            api_key_name=self._http_request.api_key_name,
            client=self._http_request.client,
            data_parallel_rank=self._http_request.data_parallel_rank,
            session=self._session,
            traceparent=self._http_request.traceparent,
            pooling=pooling,
            second_text=prompt.second_text,
        )
