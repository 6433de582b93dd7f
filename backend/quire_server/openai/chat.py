# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: conversations to answers, complete or as server-sent events, in the format of vLLM."""

from typing import Any

from quire_server.openai.chat_messages import normalize_messages, normalize_template_kwargs
from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import Formatter, encode
from quire_server.openai.generation import Choice, Generation, Prompt
from quire_server.openai.http.message import EventStream, HttpRequest, Reply, Response
from quire_server.openai.logprobs import chat_logprobs
from quire_server.openai.request_fields import GenerationFields, build_sampling_params, parse_fields
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import OutputDelta


class ConversationFields(GenerationFields, kw_only=True):
    """Fields of a request that contains a conversation."""

    messages: Any = None
    add_generation_prompt: bool | None = None
    """None: True, unless continue_final_message."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatFields(ConversationFields, kw_only=True):
    """Fields of a request for chat completions."""

    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    """Wins over max_tokens."""


class ChatCompletions:
    """The route."""

    def __init__(self, client: TextClient, settings: FrontSettings) -> None:
        self._client = client
        self._settings = settings

    async def handle(self, request: HttpRequest) -> Reply:
        """Answer a request."""
        fields, sampling_values = parse_fields(await request.json_object(), ChatFields)
        prompt = Prompt(chat=build_conversation(fields))
        defaults = await self._client.sampling_defaults() if self._settings.uses_generation_config else {}
        values = defaults | sampling_values | _own_sampling_values(fields, sampling_values, defaults)
        params, copies = build_sampling_params(values, fields.stream)
        generation = Generation("chatcmpl-", request, fields, params, copies, [prompt], self._settings.served_name)
        formatter = ChatFormatter(generation, fields, params)
        deltas = generation.deltas(self._client)
        if fields.stream:
            return EventStream(formatter.events(deltas))
        return Response(await formatter.document(deltas))


def build_conversation(fields: ConversationFields) -> dict[str, Any]:
    """Return the conversation of a GenerateRequest; raises ApiError if it is wrong."""
    add_generation_prompt = fields.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not fields.continue_final_message
    if add_generation_prompt and fields.continue_final_message:
        raise ApiError(400, "continue_final_message: not possible with add_generation_prompt; set only one of them")
    return {
        "messages": normalize_messages(fields.messages),
        "tools": None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
        "template_kwargs": normalize_template_kwargs(fields.chat_template_kwargs, fields.reasoning_effort),
    }


def _own_sampling_values(
    fields: ChatFields, sampling_values: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return the sampling parameters that chat completions name or default differently."""
    values: dict[str, Any] = {}
    if fields.max_completion_tokens is not None:
        values["max_tokens"] = fields.max_completion_tokens
    elif "max_tokens" not in sampling_values:
        # Up to the context length, unless the checkpoint says otherwise.
        values["max_tokens"] = defaults.get("max_tokens")
    if fields.logprobs:
        values["logprobs"] = fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise ApiError(400, "top_logprobs: requires logprobs; set logprobs to true")
    if fields.top_logprobs is not None and fields.top_logprobs < -1:
        raise ApiError(400, f"top_logprobs: must be at least -1, got {fields.top_logprobs}")
    return values


class ChatFormatter(Formatter):
    """Formats a request for chat completions."""

    def __init__(self, generation: Generation, fields: ChatFields, params: SamplingParams) -> None:
        super().__init__(generation, "chat.completion.chunk" if fields.stream else "chat.completion")
        self._fields = fields
        self._params = params
        self._has_details = fields.return_token_ids or fields.logprobs or self.continuous_usage
        messages = (generation.prompts[0].chat or {})["messages"]
        self._echo = messages[-1]["content"] if fields.echo and messages[-1]["role"] == "assistant" else ""
        # The parts of an event that do not change are encoded once.
        head = encode(self.envelope)[:-1]
        self._prefixes = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (head, c.index) for c in generation.choices
        ]

    def event(self, choice: Choice, delta: OutputDelta) -> bytes:
        """Return the events for a delta; the role comes first."""
        first = b""
        if not choice.is_started:
            choice.is_started = True
            first = self._first_event(choice)
        if delta.finish_reason is not None or self._has_details:
            return first + self.encode_event(self._chunk_choice(choice, delta))
        if not delta.text:
            return first
        return b'%b%b%b},"logprobs":null,"finish_reason":null}]}\n\n' % (
            first,
            self._prefixes[choice.index],
            encode(delta.text),
        )

    def complete_choice(self, choice: Choice, delta: OutputDelta) -> dict[str, Any]:
        """Return a choice of a complete response."""
        document: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": self._echo + delta.text},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._fields.return_token_ids:
            document["token_ids"] = delta.token_ids
            document["prompt_token_ids"] = self.generation.prompt_token_ids.get(choice.request_index)
        if self._params.prompt_logprobs is not None:
            document["prompt_logprobs"] = self.generation.prompt_logprobs.get(choice.request_index)
        return document

    def _first_event(self, choice: Choice) -> bytes:
        document: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._fields.return_token_ids:
            document["prompt_token_ids"] = self.generation.prompt_token_ids.get(choice.request_index)
        event = self.encode_event(document)
        if self._echo:
            event += self.encode_event({**document, "delta": {"content": self._echo}})
        return event

    def _chunk_choice(self, choice: Choice, delta: OutputDelta) -> dict[str, Any]:
        document: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            document["stop_reason"] = delta.stop_reason
        if self._fields.return_token_ids:
            document["token_ids"] = delta.token_ids
        return document

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if not self._fields.logprobs or delta.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs, self._fields.top_logprobs or 0, self._fields.return_tokens_as_token_ids)
