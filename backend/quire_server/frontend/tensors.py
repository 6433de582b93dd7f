# SPDX-License-Identifier: Apache-2.0
"""What clients of a model send and get: input tensors and request parameters -> Submit, Event -> output tensors.

Pure: numpy arrays in, dataclasses out and the other way round; frontend.py does the talking. Tensors behave as those of
NVIDIA's vllm_backend do. Sampling parameters come from the `sampling_parameters` tensor and from request parameters; of
a name that is in both, the tensor's value is taken. (vllm_backend takes the tensor's and reads no request parameter at
all then; here the others count too, so that none is dropped silently.)

Source: https://github.com/triton-inference-server/vllm_backend/blob/11c4e0fd7c6e22c0b451d74adcd51ee70d1d4115/src/utils/request.py
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire_server.model_server.model_interface import INPUTS
from quire_spec import constants
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, InvalidArgument, QuireError, truncated_repr
from quire_spec.protocol.messages import GenerateRequest, OutputDelta, merge_deltas

Array = npt.NDArray[Any]

MAX_PROMPT_BYTES = 16 * 2**20
"""Beyond any context length; keeps one request from filling the stub's memory."""
MAX_ERROR_CHARS = 800

CACHE_SALT = "cache_salt"
"""Parameter: prompts share cached prefixes only with prompts of the same salt."""

PRIORITY = "priority"
"""Parameter: lower runs first. The server keeps one of this name to itself except on its generate endpoint, so
elsewhere it belongs into the tensor sampling_parameters."""

_SERVER_PARAMETERS = frozenset(("id", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"))
"""Fields of the server's own protocol: its generate endpoint passes each top-level key on as a request parameter."""


_NON_SAMPLING_NAMES = (constants.LORA_NAME, CACHE_SALT, PRIORITY, *(name for name, _, _ in INPUTS))
"""What else a request may have, at one level with its parameters on the generate endpoint."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the responses to one request are to hold, besides the text."""

    stream: bool
    prompt_prefix: str
    """Text before the output: the prompt, or nothing; nothing when streaming, so it is for the only response."""
    finish_reason: bool
    cumulative_logprob: bool
    logprobs: bool
    num_input_tokens: bool
    num_output_tokens: bool
    output_ids: bool
    prompt_logprobs: bool
    num_outputs: int
    """How many the responses hold, each."""
    has_logprobs: bool
    """False: `logprobs` is answered by null, because the request set no number of them."""


def parse_request(
    request_id: int, model: str, base: str, inputs: Mapping[str, Array], parameters: str
) -> tuple[GenerateRequest, OutputOptions]:
    """One request of a client, checked.

    `model` is the server model that got it and `base` the base model; any other model is an adapter of that name.
    `inputs` holds the tensors that were sent, `parameters` the request parameters as the server's JSON text.

    Raises:
        InvalidArgument: the message names the tensor or parameter, and says what it is and may be.
    """
    stream = _flag(inputs, constants.STREAM, False)
    prompt, token_ids = _prompt(inputs)
    values = _parameters(inputs, parameters)
    adapter_name = _pop_string(values, constants.LORA_NAME)
    cache_salt = _pop_string(values, CACHE_SALT)
    priority = _pop_int(values, PRIORITY)
    params = _sampling_params(values)
    options = _output_options(inputs, stream, prompt, params)
    if options.cumulative_logprob and params.logprobs is None:
        # The sum is over the tokens taken, which costs no more than logprobs=0 does.
        params = dataclasses.replace(params, logprobs=0)
    target_model = _target_model(model, base, adapter_name)
    return GenerateRequest(
        request_id, target_model, prompt, token_ids, params.to_mapping(), stream, cache_salt, priority
    ), options


def initial_outputs(request_id: int, options: OutputOptions) -> list[OutputDelta]:
    """What was told of each output of a request before its first response."""
    # Not a sum that is not there: NaN is no JSON.
    return [OutputDelta(request_id, index=index, cumulative_logprob=0.0) for index in range(options.num_outputs)]


def merge_by_output(deltas: Sequence[OutputDelta], last_sent: Sequence[OutputDelta]) -> list[OutputDelta]:
    """What `events`, successive ones of a request, say of each of its outputs.

    An output that they do not mention is as it was when `told`, with nothing new.
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
    """Output tensors of one response, by name; of each, one element for each output of the request.

    `events` are its `news`, `told` what earlier responses told of. `output_ids` has the tokens of all outputs, one
    after the other: num_output_tokens tells them apart.
    """
    tensors = {constants.TEXT_OUTPUT: _strings(options.prompt_prefix + delta.text for delta in deltas)}
    if options.finish_reason:
        # As vllm_backend, which sends str(None) while there is more to come.
        tensors[constants.FINISH_REASON] = _strings(str(delta.finish_reason) for delta in deltas)
    if options.cumulative_logprob:
        tensors[constants.CUMULATIVE_LOGPROB] = np.array([delta.cumulative_logprob for delta in deltas], np.float32)
    if options.logprobs:
        positions = [(delta.logprobs or []) if options.has_logprobs else None for delta in deltas]
        tensors[constants.LOGPROBS] = _strings(map(json.dumps, positions))
    if options.prompt_logprobs:
        # Of a stream, the first response has them.
        first = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None)
        tensors[constants.PROMPT_LOGPROBS] = _strings([json.dumps(first)])
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
    return tensors


def error_response(error: QuireError) -> tuple[Code, str]:
    """Code and message of an error as clients get it; every error response of ours is made here.

    The server sends the code to gRPC clients that ask for it, and 400 to HTTP clients whatever it is: so the message
    begins with it.
    """
    message = f"{error.code}: {error}"
    if len(message) > MAX_ERROR_CHARS:
        message = message[: MAX_ERROR_CHARS - 3] + "..."
    # A client can send lone surrogates, which no response can hold.
    return error.code, message.encode("utf-8", "backslashreplace").decode()


def _prompt(inputs: Mapping[str, Array]) -> tuple[str | None, list[int] | None]:
    has_text, has_ids = constants.TEXT_INPUT in inputs, constants.INPUT_IDS in inputs
    if has_text == has_ids:
        presence = "both" if has_text else "neither"
        raise InvalidArgument(f"{constants.TEXT_INPUT}, {constants.INPUT_IDS}: {presence} given; give one of them")
    if has_text:
        return _string_value(inputs, constants.TEXT_INPUT), None
    return None, _token_ids(inputs[constants.INPUT_IDS])


def _token_ids(array: Array) -> list[int]:
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgument(
            f"{constants.INPUT_IDS}: shape {list(array.shape)} of {array.dtype}; give one prompt as a list of integers"
        )
    if array.nbytes > MAX_PROMPT_BYTES:
        raise InvalidArgument(f"{constants.INPUT_IDS}: {array.size} tokens are more than any model's context")
    if not array.size:
        raise InvalidArgument(f"{constants.INPUT_IDS}: empty; give at least one token")
    if array.min() < 0:
        position = int(np.argmax(array < 0))
        raise InvalidArgument(f"{constants.INPUT_IDS}: token {int(array[position])} at position {position} is negative")
    ids: list[int] = array.tolist()
    return ids


def _string_value(inputs: Mapping[str, Array], name: str) -> str:
    """The only element of a string tensor."""
    array = inputs[name]
    if array.size != 1:
        raise InvalidArgument(f"{name}: shape {list(array.shape)}; a request holds one prompt, shape [1]")
    value = array.reshape(-1)[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise InvalidArgument(f"{name}: {array.dtype} is not a string")
    if len(value) > MAX_PROMPT_BYTES:
        raise InvalidArgument(f"{name}: {len(value)} bytes; at most {MAX_PROMPT_BYTES} are taken")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name}: not valid UTF-8 at byte {error.start}: {error.reason}") from error


def _flag(inputs: Mapping[str, Array], name: str, default: bool) -> bool:
    array = inputs.get(name)
    if array is None:
        return default
    if array.size != 1 or array.dtype != np.bool_:
        raise InvalidArgument(f"{name}: shape {list(array.shape)} of {array.dtype}; give one BOOL, shape [1]")
    return bool(array.reshape(-1)[0])


def _parameters(inputs: Mapping[str, Array], parameters: str) -> dict[str, Any]:
    """Parameters by name from both places, without those of the server and without nulls, which mean "default"."""
    merged = {
        k: v for k, v in _parse_object(parameters or "{}", "request parameters").items() if k not in _SERVER_PARAMETERS
    }
    if constants.SAMPLING_PARAMETERS in inputs:
        merged |= _parse_object(_string_value(inputs, constants.SAMPLING_PARAMETERS), constants.SAMPLING_PARAMETERS)
    return {key: value for key, value in merged.items() if value is not None}


def _parse_object(text: str, source_name: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{source_name}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgument(f"{source_name}: expected a JSON object, found {type(values).__name__}")
    return values


def _pop_string(values: dict[str, Any], name: str) -> str | None:
    """Take a parameter out of `values` that is not a sampling parameter."""
    value = values.pop(name, None)
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidArgument(f"{name}: {truncated_repr(value)} is not a text; give a string that is not empty")
    if value is not None:
        _check_encodable(name, value)
    return value


def _pop_int(values: dict[str, Any], name: str) -> int:
    """Take a parameter out of `values` that is a number; 0 if it is not there."""
    value = values.pop(name, 0)
    try:
        number = int(value) if isinstance(value, str) and len(value) < 20 else value
    except ValueError:
        number = value
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgument(f"{name}: {truncated_repr(value)} is not an integer")
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
    """Escapes in JSON can spell lone surrogates, which no message of ours can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name}: {text[:80]!r} has a lone surrogate, which is not text") from error


def _target_model(model: str, base: str, adapter_name: str | None) -> str:
    if adapter_name is None or adapter_name == model:
        return model
    if model != base:
        raise InvalidArgument(
            f"{constants.LORA_NAME}: {adapter_name!r} asked of model {model!r}, which is an adapter itself; ask it of "
            f"{base!r}"
        )
    return adapter_name


def _output_options(
    inputs: Mapping[str, Array], stream: bool, prompt: str | None, params: SamplingParams
) -> OutputOptions:
    exclude = constants.EXCLUDE_INPUT_IN_OUTPUT
    prepends_prompt = not _flag(inputs, exclude, stream or prompt is None)
    if prepends_prompt and stream:
        raise InvalidArgument(f"{exclude}: false is not possible with {constants.STREAM}; leave it out")
    if prepends_prompt and prompt is None:
        raise InvalidArgument(f"{exclude}: false is not possible with {constants.INPUT_IDS}; leave it out")
    return OutputOptions(
        stream=stream,
        prompt_prefix=prompt if prepends_prompt and prompt is not None else "",
        finish_reason=_flag(inputs, constants.RETURN_FINISH_REASON, False),
        cumulative_logprob=_flag(inputs, constants.RETURN_CUMULATIVE_LOGPROB, False),
        logprobs=_flag(inputs, constants.RETURN_LOGPROBS, False),
        num_input_tokens=_flag(inputs, constants.RETURN_NUM_INPUT_TOKENS, False),
        num_output_tokens=_flag(inputs, constants.RETURN_NUM_OUTPUT_TOKENS, False),
        # Who sends ids wants ids.
        output_ids=_flag(inputs, constants.RETURN_OUTPUT_IDS, prompt is None),
        prompt_logprobs=_flag(inputs, constants.RETURN_PROMPT_LOGPROBS, False),
        num_outputs=params.n,
        has_logprobs=params.logprobs is not None,
    )


def _without_new_output(delta: OutputDelta) -> OutputDelta:
    return dataclasses.replace(delta, text="", token_ids=[], logprobs=None, prompt_logprobs=None)


def _strings(texts: Iterable[str]) -> Array:
    return np.array([text.encode("utf-8", "replace") for text in texts], np.object_)
