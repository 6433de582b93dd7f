# SPDX-License-Identifier: Apache-2.0
"""The fields of a generation request: their names and types, which fields are ignored, and which fields are rejected.

A request can contain five kinds of fields. The first kind consists of the front's own fields, which are declared as
Structs. `SamplingParams` checks sampling parameters. Fields that only help the client with its own bookkeeping are
accepted and ignored. Fields of other servers that would change the output are rejected by name. Otherwise, a constraint
could be ignored without notice. All other fields are unknown: http/ignored_fields.py names them in the response.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from quire_server.openai.errors import ApiError
from quire_server.openai.http.ignored_fields import IgnoredFields, names_of
from quire_server.openai.response_format import check_response_format, merge_response_format
from quire_spec.dataclass_json import without_zero_fraction
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.structured_outputs import FORMER_NAMES, merge_former_names
from quire_spec.errors import InvalidArgument, truncated_repr

SAMPLING_FIELDS = (frozenset(SamplingParams.__struct_fields__) | FORMER_NAMES) - {"detokenize"}

BOOKKEEPING_FIELDS = frozenset(
    {
        *("store", "metadata", "service_tier", "safety_identifier", "session_id", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "verbosity", "web_search_options"),
    }
)
"""Fields that are accepted and ignored, because they do not change the output."""

UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    # Fields of other routes.
    **dict.fromkeys(("prompt", "messages", "max_completion_tokens", "top_logprobs"), ()),
    **dict.fromkeys(("tools", "documents"), ([],)),
    "suffix": ("",),
    "prompt_embeds": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    # SGLang; vllm-router and sglang-router add the first three fields to every request.
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "stream_reasoning": (True, False),
    **dict.fromkeys(("regex", "ebnf", "stop_regex", "lora_path", "custom_logit_processor"), ("", [])),
    **dict.fromkeys(("session_params", "sampling_seed", "input_embeds", "input_ids"), ()),
    # vLLM until 0.10, llama.cpp, and servers of LoRA adapters.
    "logits_processors": ([],),
    **dict.fromkeys(("json_schema", "grammar"), ("", {})),
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("adapter_id", "adapter_source", "merged_adapters"), ("",)),
}
"""Fields of the OpenAI API, of vLLM and of other servers that change the output, and that this server does not support.
For each field, the values that have no effect are listed. Only these values are accepted."""
CHAT_ONLY_FIELDS = (
    *("n", "best_of", "echo", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "use_beam_search"),
    *("length_penalty", "early_stopping", "add_generation_prompt", "continue_final_message", "separate_reasoning"),
)
"""Fields of chat completions that the other routes for conversations do not have."""
_OTHER_KNOWN_FIELDS = SAMPLING_FIELDS | BOOKKEEPING_FIELDS | UNSUPPORTED_FIELDS.keys()

MAX_SALT_CHARS = 128
MAX_STREAM_INTERVAL = 1024
_SALT = re.compile(r"[^@/\\\0]*")
_MSGSPEC_PATH = re.compile(r"(?P<problem>.*) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)
_T = TypeVar("_T", bound="GenerationFields")


class StreamOptions(msgspec.Struct, kw_only=True):
    """stream_options of a request."""

    include_usage: bool = False
    """Whether the last chunk contains the usage."""
    continuous_usage_stats: bool = False
    """Whether each chunk contains the usage so far. As in vLLM, it has no effect without include_usage."""
    include_obfuscation: bool = False
    """Accepted and ignored."""


_STREAM_OPTIONS = names_of(StreamOptions)


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share, in addition to the sampling parameters."""

    model: str | None = None
    """Name of the base model or of an adapter; None: the base model."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    user: Any = None
    """The session of the request, if it is a text and the header X-Session-Id is missing."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream_interval: int = 1
    """Each event of a stream contains this many output tokens."""
    response_format: dict[str, Any] | None = None
    """Constraint on the output, written in the form of the OpenAI API. It is converted to `structured_outputs`."""


def parse_fields(
    document: Mapping[str, Any], fields_type: type[_T], ignored: IgnoredFields
) -> tuple[_T, dict[str, Any]]:
    """Return the front's own fields of a request, and its sampling parameters. A field whose value is null is treated
    like a field that is missing. `ignored` gets the fields that are not known.

    Raises:
        ApiError: a field is not supported, or has a wrong type.
    """
    present = {name: without_zero_fraction(value) for name, value in document.items() if value is not None}
    own_fields = names_of(fields_type)
    for name in present.keys() & UNSUPPORTED_FIELDS.keys() - own_fields:
        if present[name] not in UNSUPPORTED_FIELDS[name]:
            shown = truncated_repr(present[name])
            raise ApiError(400, f"{name}: is not supported by this server, got {shown}; leave it out", name)
    ignored.check(present, own_fields | _OTHER_KNOWN_FIELDS)
    ignored.check(present.get("stream_options"), _STREAM_OPTIONS, "stream_options.")
    check_response_format(present.get("response_format"), ignored)
    try:
        fields = msgspec.convert(present, fields_type)
    except msgspec.ValidationError as error:
        raise ApiError(400, describe_invalid(error)) from None
    if fields.stream_options is not None and not fields.stream:
        raise ApiError(400, "stream_options: requires stream; set stream to true, or leave stream_options out")
    if not 1 <= fields.stream_interval <= MAX_STREAM_INTERVAL:
        raise ApiError(400, f"stream_interval: must be from 1 to {MAX_STREAM_INTERVAL}, got {fields.stream_interval}")
    check_cache_salt(fields.cache_salt)
    values = {name: present[name] for name in present if name in SAMPLING_FIELDS and name not in own_fields}
    return fields, values | merge_response_format(fields.response_format, values.get("structured_outputs"))


def check_cache_salt(salt: str | None) -> None:
    """Raise ApiError if a salt is too long, or contains characters that are not allowed."""
    if salt is not None and (len(salt) > MAX_SALT_CHARS or not _SALT.fullmatch(salt)):
        raise ApiError(
            400, f"cache_salt: must have at most {MAX_SALT_CHARS} characters and none of '@', '/', '\\' and NUL"
        )


def build_sampling_params(values: dict[str, Any], stream: bool) -> tuple[SamplingParams, int]:
    """Return the parameters of one engine request, and how many equal engine requests must run to produce `n` outputs.

    Without randomness, all outputs of a request are equal, and the engine accepts only n = 1. Therefore n equal engine
    requests are run.

    Raises:
        ApiError: a parameter is invalid.
    """
    values, copies = dict(values), 1
    try:
        values = dict(merge_former_names(values))
        is_greedy = values.get("temperature", 1) == 0 and not values.get("use_beam_search")
        if is_greedy and type(values.get("n")) is int and "best_of" not in values:
            copies = SamplingParams.checked(n=values.pop("n")).n
        params = SamplingParams.checked(**values)
    except InvalidArgument as error:
        raise ApiError(400, str(error)) from None
    if stream and params.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs: not available with stream; set stream to false")
    return params, copies


def describe_invalid(error: msgspec.ValidationError) -> str:
    """Return the message of a msgspec error in the form `field: problem`."""
    match = _MSGSPEC_PATH.match(str(error))
    if match is None:
        return f"body: {str(error)[:300]}"
    problem = match["problem"]
    return f"{match['path'] or 'body'}: {problem[:1].lower()}{problem[1:300]}"
