# SPDX-License-Identifier: Apache-2.0
"""Converts input tensors to a GenerateRequest, and OutputDeltas to output tensors.

The functions have no side effects and use only numpy arrays and dataclasses. stub_model.py calls them. All tensors have
the same meaning as in NVIDIA's vllm_backend. Sampling parameters can be set in two places: in the tensor
`sampling_parameters` and in the request parameters. If both set a parameter, the value in the tensor is used. If the
tensor exists, vllm_backend ignores all request parameters. Quire still uses the request parameters that the tensor does
not set.

Source:
https://github.com/triton-inference-server/vllm_backend/blob/11c4e0fd7c6e22c0b451d74adcd51ee70d1d4115/src/utils/request.py
"""

import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from quire_server.model_server.model_interface import INPUTS, MAX_PROMPT_BYTES
from quire_spec import constants
from quire_spec.constants import AdapterName
from quire_spec.engine.pooling_params import PoolingParams
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.structured_outputs import FORMER_NAMES
from quire_spec.errors import Code, InvalidArgument, QuireError, truncated_repr
from quire_spec.protocol import kv_transfer_params
from quire_spec.protocol.kv_transfer_params import KVTransferParams
from quire_spec.protocol.messages import GenerateRequest, OutputDelta, TokenLogprob, logprobs_by_token, merge_deltas

Array = npt.NDArray[Any]

MAX_ERROR_CHARS = 800

CACHE_SALT = "cache_salt"
"""Name of the parameter that contains the cache salt. A prompt can use the cached prefix of another prompt only if both
have the same salt."""

PRIORITY = "priority"
"""Name of the parameter that contains the priority. Requests with a lower number run first. The server removes a
request parameter that has this name, except on its generate endpoint. Therefore clients of all other endpoints must put
the priority into the tensor sampling_parameters."""

KV_TRANSFER_PARAMS = kv_transfer_params.FIELD
"""Name of the parameter that contains the object as JSON text. In the tensor sampling_parameters, it can also be an
object. The output with this name contains the object in the response of a prefill pod, as JSON text."""

CLIENT_HEADER = "x-gateway-inference-fairness-id"
"""Header that names the client of a request, if the server forwards it. Clients share the engine equally. Gateways of
the Gateway API Inference Extension set this header. All requests without it belong to one client."""

_MAX_HEADER_CHARS = 128
_SERVER_PARAMETERS = frozenset(("id", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"))
"""Fields that belong to the server's own protocol. They are not parameters of Quire. They appear among the parameters
because the generate endpoint passes on every top-level key."""

_NON_SAMPLING_NAMES = (constants.LORA_NAME, CACHE_SALT, PRIORITY, KV_TRANSFER_PARAMS, *(name for name, _, _ in INPUTS))
"""Names that can appear at the top level of a generate request but are not sampling parameters."""

_KNOWN_NAMES = frozenset((*SamplingParams.__struct_fields__, *_NON_SAMPLING_NAMES, *FORMER_NAMES))


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Outputs that a request selects for its responses, in addition to the text."""

    stream: bool
    prompt_prefix: str
    """Text that is put before the output: the prompt, or an empty string. With streaming, it is always empty."""
    finish_reason: bool
    cumulative_logprob: bool
    logprobs: bool
    num_input_tokens: bool
    num_output_tokens: bool
    output_ids: bool
    prompt_logprobs: bool
    num_outputs: int
    """Number of outputs in each response."""
    has_logprobs: bool
    """True if the request sets `logprobs`. Otherwise, the output tensor `logprobs` contains null."""
    kv_transfer_params: bool = False
    """True if the request is for a prefill pod."""
    is_embedding: bool = False
    """True if the text is the JSON list of the numbers of an embedding."""


def parse_request(
    request_id: int,
    model: str,
    base: str,
    inputs: Mapping[str, Array],
    parameters: str,
    forwarded_headers: re.Pattern[str] | None = None,
) -> tuple[GenerateRequest, OutputOptions]:
    """Parse and validate a client's request.

    Args:
        request_id: id of the message to the text process.
        model: server model that received the request: the base model, or the adapter of that name.
        base: name of the base model.
        inputs: the request's tensors by name.
        parameters: the request parameters as JSON text from the server.
        forwarded_headers: pattern of the headers that the server adds to the parameters; other headers are ignored.

    Raises:
        InvalidArgument: a value is invalid; the message names the tensor or parameter, its value, and the valid values.
    """
    is_embedding = constants.EMBEDDING_REQUEST in inputs
    stream = not is_embedding and _flag(inputs, constants.STREAM, False)
    prompt, token_ids, pooling = _embedding_request(inputs) if is_embedding else (*_prompt(inputs), None)
    values, headers = _parameters(inputs, parameters, forwarded_headers)
    adapter_name = _pop_string(values, constants.LORA_NAME)
    cache_salt = _pop_string(values, CACHE_SALT)
    priority = _pop_int(values, PRIORITY)
    transfer = _pop_kv_transfer_params(values)
    params = SamplingParams(max_tokens=1) if is_embedding else _sampling_params(values)
    options = _embedding_options(inputs) if is_embedding else _output_options(inputs, stream, prompt, params, transfer)
    if options.cumulative_logprob and params.logprobs is None:
        # The sum needs the log probabilities of the sampled tokens. If logprobs is 0, only these are computed.
        params = structs.replace(params, logprobs=0)
    target_model = _target_model(model, base, AdapterName(adapter_name) if adapter_name is not None else None)
    request = GenerateRequest(
        request_id,
        target_model,
        prompt,
        token_ids,
        params,
        stream,
        cache_salt,
        priority,
        client=headers.get(CLIENT_HEADER, ""),
        traceparent=headers.get(constants.TRACE_HEADER, ""),
        pooling=pooling,
        images=[] if is_embedding else _images(inputs),
        kv_transfer_params=None if is_embedding else transfer,
    )
    return request, options


def initial_outputs(request_id: int, options: OutputOptions) -> list[OutputDelta]:
    """Return one empty delta for each output. They are the value of `last_sent` for the first response of a request."""
    # The sum is 0.0, because a missing sum would become NaN, which JSON cannot represent.
    return [OutputDelta(request_id, index=index, cumulative_logprob=0.0) for index in range(options.num_outputs)]


def merge_by_output(deltas: Sequence[OutputDelta], last_sent: Sequence[OutputDelta]) -> list[OutputDelta]:
    """Merge successive deltas of a request into one delta for each output.

    An output that has no new delta gets an empty delta, whose state is copied from `last_sent`.
    """
    by_output: list[list[OutputDelta]] = [[] for _ in last_sent]
    for delta in deltas:
        by_output[delta.index].append(delta)
    return [
        merge_deltas(output_deltas) if output_deltas else _without_new_output(previous)
        for output_deltas, previous in zip(by_output, last_sent, strict=True)
    ]


def to_output_tensors(
    deltas: Sequence[OutputDelta], options: OutputOptions, last_sent: Sequence[OutputDelta]
) -> dict[str, Array]:
    """Return the output tensors of a response, by name. Each tensor has one element per output of the request.

    `deltas` is what `merge_by_output` returned for this response, and `last_sent` is what it returned for the previous
    one. `output_ids` contains the tokens of all outputs, one output after the other. num_output_tokens contains the
    number of tokens of each output.
    """
    texts = (_embedding_text(delta) if options.is_embedding else options.prompt_prefix + delta.text for delta in deltas)
    tensors = {constants.TEXT_OUTPUT: _strings(texts)}
    if options.finish_reason:
        # vllm_backend, too, sends str(None) until the output is finished.
        tensors[constants.FINISH_REASON] = _strings(str(delta.finish_reason) for delta in deltas)
    if options.cumulative_logprob:
        tensors[constants.CUMULATIVE_LOGPROB] = np.array([delta.cumulative_logprob for delta in deltas], np.float32)
    if options.logprobs:
        tensors[constants.LOGPROBS] = _strings(
            _logprobs_json((delta.logprobs or []) if options.has_logprobs else None) for delta in deltas
        )
    if options.prompt_logprobs:
        # In a stream, only the first response contains log probabilities of the prompt.
        first = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None)
        tensors[constants.PROMPT_LOGPROBS] = _strings([_logprobs_json(first)])
    if options.num_input_tokens:
        tensors[constants.NUM_INPUT_TOKENS] = np.array([max(delta.num_input_tokens for delta in deltas)], np.uint32)
    if options.num_output_tokens:
        num_new_tokens = [
            delta.num_output_tokens - previous.num_output_tokens
            for delta, previous in zip(deltas, last_sent, strict=True)
        ]
        tensors[constants.NUM_OUTPUT_TOKENS] = np.array(num_new_tokens, np.uint32)
    if options.output_ids:
        tensors[constants.OUTPUT_IDS] = np.array([token for delta in deltas for token in delta.token_ids], np.int64)
    if options.kv_transfer_params:
        response = next((delta.kv_transfer_params for delta in deltas if delta.kv_transfer_params is not None), None)
        tensors[KV_TRANSFER_PARAMS] = _strings([json.dumps(response)])
    return tensors


def error_response(error: QuireError) -> tuple[Code, str]:
    """Return the code and the message of an error response.

    The message begins with the name of the code, because many clients see only the message. gRPC clients get the code
    itself only if they request it, and HTTP clients always get status 400.
    """
    message = f"{error.code}: {error}"
    if len(message) > MAX_ERROR_CHARS:
        message = message[: MAX_ERROR_CHARS - 3] + "..."
    # A request can contain lone surrogates, which a response cannot encode.
    return error.code, message.encode("utf-8", "backslashreplace").decode()


def _prompt(inputs: Mapping[str, Array]) -> tuple[str | None, list[int] | None]:
    has_text, has_ids = constants.TEXT_INPUT in inputs, constants.INPUT_IDS in inputs
    if has_text == has_ids:
        presence = "both" if has_text else "neither"
        raise InvalidArgument(
            f"{constants.TEXT_INPUT}, {constants.INPUT_IDS}: exactly one is required, got {presence}; send one of them"
        )
    if has_text:
        return _string_value(inputs, constants.TEXT_INPUT), None
    return None, _token_ids(inputs[constants.INPUT_IDS])


def _images(inputs: Mapping[str, Array]) -> list[bytes]:
    """Return the files of the images, which the tensor contains in base64. The prompt contains the model's mark of an
    image for each."""
    array = inputs.get(constants.IMAGE)
    if array is None:
        return []
    files = []
    for i, value in enumerate(array.reshape(-1)):
        name = f"{constants.IMAGE}[{i}]"
        if not isinstance(value, bytes | str):
            raise InvalidArgument(f"{name}: must be a string in base64, got {array.dtype}")
        try:
            files.append(binascii.a2b_base64(value, strict_mode=True))
        except ValueError as error:
            raise InvalidArgument(f"{name}: is not valid base64 ({error}); encode the file again") from None
    return files


def _embedding_request(inputs: Mapping[str, Array]) -> tuple[str | None, list[int] | None, PoolingParams]:
    """Return the text or the token ids of an embedding, and its parameters. As in vllm_backend, the tensor contains a
    JSON object, and all other keys of the object and `text_input` are ignored."""
    name = constants.EMBEDDING_REQUEST
    values = _parse_object(_string_value(inputs, name), name)
    prompt, pooling_params = values.get("input"), values.get("pooling_params") or {}
    if not isinstance(pooling_params, dict):
        raise InvalidArgument(f"{name}: pooling_params: must be an object, got {truncated_repr(pooling_params)}")
    dimensions = pooling_params.get("dimensions", values.get("dimensions"))
    # NVIDIA's frontend sends a list of one number.
    dimensions = dimensions[0] if isinstance(dimensions, list) and len(dimensions) == 1 else dimensions
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions < 2**31):
        raise InvalidArgument(f"{name}: dimensions: must be a positive integer, got {truncated_repr(dimensions)}")
    pooling = PoolingParams(dimensions=dimensions)
    if isinstance(prompt, str):
        _check_encodable(f"{name}: input", prompt)
        return prompt, None, pooling
    if isinstance(prompt, list) and prompt and set(map(type, prompt)) == {int}:
        return None, prompt, pooling
    raise InvalidArgument(
        f"{name}: input: must be a text or a list of token ids, got {truncated_repr(prompt)}; send one request for "
        "each text"
    )


def _embedding_options(inputs: Mapping[str, Array]) -> OutputOptions:
    """Return the outputs that vllm_backend returns for an embedding."""
    return OutputOptions(
        stream=False,
        prompt_prefix="",
        finish_reason=False,
        cumulative_logprob=False,
        logprobs=False,
        num_input_tokens=_flag(inputs, constants.RETURN_NUM_INPUT_TOKENS, False),
        num_output_tokens=_flag(inputs, constants.RETURN_NUM_OUTPUT_TOKENS, False),
        output_ids=False,
        prompt_logprobs=False,
        num_outputs=1,
        has_logprobs=False,
        is_embedding=True,
    )


def _embedding_text(delta: OutputDelta) -> str:
    return json.dumps(np.frombuffer(delta.pooled or b"", "<f4").astype(float).tolist())


def _token_ids(array: Array) -> list[int]:
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgument(
            f"{constants.INPUT_IDS}: must contain integers and have one dimension, got {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    if array.nbytes > MAX_PROMPT_BYTES:
        raise InvalidArgument(f"{constants.INPUT_IDS}: too long for the context of any model, got {array.size} tokens")
    if not array.size:
        raise InvalidArgument(f"{constants.INPUT_IDS}: empty; send at least one token")
    if array.min() < 0:
        position = int(np.argmax(array < 0))
        raise InvalidArgument(
            f"{constants.INPUT_IDS}: token ids must not be negative, got {int(array[position])} at position {position}"
        )
    ids: list[int] = array.tolist()
    return ids


def _string_value(inputs: Mapping[str, Array], name: str) -> str:
    """Return the only element of a string tensor."""
    array = inputs[name]
    if array.size != 1:
        raise InvalidArgument(f"{name}: must have shape [1], got {list(array.shape)}; a request has one prompt")
    value = array.reshape(-1)[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InvalidArgument(f"{name}: must be a string, got {array.dtype}")
    if len(value) > MAX_PROMPT_BYTES:
        raise InvalidArgument(f"{name}: must have at most {MAX_PROMPT_BYTES} bytes, got {len(value)}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: invalid UTF-8 at byte {error.start}: {error.reason}") from error


def _flag(inputs: Mapping[str, Array], name: str, default: bool) -> bool:
    array = inputs.get(name)
    if array is None:
        return default
    if array.size != 1 or array.dtype != np.bool_:
        raise InvalidArgument(f"{name}: must be one BOOL of shape [1], got {array.dtype} of shape {list(array.shape)}")
    return bool(array.reshape(-1)[0])


def _parameters(
    inputs: Mapping[str, Array], parameters: str, forwarded_headers: re.Pattern[str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the parameters that the tensor and the request set, as a mapping from names to values, and the headers
    that the server forwarded, with names in lower case.

    Fields of the server's protocol and parameters that are null are left out.
    """
    headers: dict[str, str] = {}
    merged = {
        k: v for k, v in _parse_object(parameters or "{}", "request parameters").items() if k not in _SERVER_PARAMETERS
    }
    if forwarded_headers is not None:
        names = {k for k in merged if k not in _KNOWN_NAMES and forwarded_headers.fullmatch(k)}
        headers = {k.lower(): str(merged[k])[:_MAX_HEADER_CHARS] for k in names}
        merged = {k: v for k, v in merged.items() if k not in names}
    if constants.SAMPLING_PARAMETERS in inputs:
        merged |= _parse_object(_string_value(inputs, constants.SAMPLING_PARAMETERS), constants.SAMPLING_PARAMETERS)
    return {key: value for key, value in merged.items() if value is not None}, headers


def _parse_object(text: str, source_name: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{source_name}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"{source_name}: expected a JSON object, got {type(values).__name__}")
    return values


def _pop_string(values: dict[str, Any], name: str) -> str | None:
    """Remove the string parameter `name` from `values` and return it; None if it is absent."""
    value = values.pop(name, None)
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidArgument(f"{name}: must be a string that is not empty, got {truncated_repr(value)}")
    if value is not None:
        _check_encodable(name, value)
    return value


def _pop_kv_transfer_params(values: dict[str, Any]) -> KVTransferParams | None:
    value = values.pop(KV_TRANSFER_PARAMS, None)
    if value is None:
        return None
    value = _parse_object(value, KV_TRANSFER_PARAMS) if isinstance(value, str) else value
    try:
        params = msgspec.convert(value, KVTransferParams)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{KV_TRANSFER_PARAMS}: {str(error)[:300]}") from None
    _check_encodable(f"{KV_TRANSFER_PARAMS}.remote_host", params.remote_host or "")
    return params


def _pop_int(values: dict[str, Any], name: str) -> int:
    """Remove an integer parameter from `values` and return it; 0 if it is absent."""
    value = values.pop(name, 0)
    try:
        number = int(value) if isinstance(value, str) and len(value) < 20 else value
    except ValueError:
        number = value
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgument(f"{name}: must be an integer, got {truncated_repr(value)}")
    return number


def _sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    try:
        params = SamplingParams.from_mapping(values, _NON_SAMPLING_NAMES)
    except RecursionError as error:
        raise InvalidArgument("sampling parameters: a value is nested too deeply") from error
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        for text in texts:
            _check_encodable(f"sampling parameter {name!r}", text)
    return params


def _check_encodable(name: str, text: str) -> None:
    """Reject text that contains lone surrogates. A JSON escape can produce them, but messages are encoded in UTF-8,
    which cannot contain them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name}: must not contain a lone surrogate, got {text[:80]!r}") from error


def _target_model(model: str, base: str, adapter_name: AdapterName | None) -> str:
    if adapter_name is None or adapter_name == model:
        return model
    if model != base:
        raise InvalidArgument(
            f"{constants.LORA_NAME}: got {adapter_name!r}, but model {model!r} is itself an adapter; send the request "
            f"to {base!r}"
        )
    return adapter_name


def _output_options(
    inputs: Mapping[str, Array],
    stream: bool,
    prompt: str | None,
    params: SamplingParams,
    transfer: KVTransferParams | None,
) -> OutputOptions:
    exclude = constants.EXCLUDE_INPUT_IN_OUTPUT
    prepends_prompt = not _flag(inputs, exclude, stream or prompt is None)
    if prepends_prompt and stream:
        raise InvalidArgument(f"{exclude}: must not be false with {constants.STREAM}; omit it")
    if prepends_prompt and prompt is None:
        raise InvalidArgument(f"{exclude}: must not be false with {constants.INPUT_IDS}; omit it")
    return OutputOptions(
        stream=stream,
        prompt_prefix=prompt if prepends_prompt and prompt is not None else "",
        finish_reason=_flag(inputs, constants.RETURN_FINISH_REASON, False),
        cumulative_logprob=_flag(inputs, constants.RETURN_CUMULATIVE_LOGPROB, False),
        logprobs=_flag(inputs, constants.RETURN_LOGPROBS, False),
        num_input_tokens=_flag(inputs, constants.RETURN_NUM_INPUT_TOKENS, False),
        num_output_tokens=_flag(inputs, constants.RETURN_NUM_OUTPUT_TOKENS, False),
        # A client that sends token ids gets token ids by default.
        output_ids=_flag(inputs, constants.RETURN_OUTPUT_IDS, prompt is None),
        prompt_logprobs=_flag(inputs, constants.RETURN_PROMPT_LOGPROBS, False),
        num_outputs=params.n,
        has_logprobs=params.logprobs is not None,
        kv_transfer_params=transfer is not None and bool(transfer.do_remote_decode),
    )


def _logprobs_json(positions: Sequence[list[TokenLogprob] | None] | None) -> str:
    """Return the JSON text of log probabilities in vLLM's form."""
    return json.dumps(None if positions is None else [None if p is None else logprobs_by_token(p) for p in positions])


def _without_new_output(delta: OutputDelta) -> OutputDelta:
    return msgspec.structs.replace(delta, text="", token_ids=[], logprobs=None, prompt_logprobs=None)


def _strings(texts: Iterable[str]) -> Array:
    return np.array([text.encode("utf-8", "replace") for text in texts], np.object_)
