# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions: continues a conversation. As in vLLM, the response is either complete or a stream of
server-sent events."""

from typing import Any

from quire_server.openai.chat_messages import (
    check_parts,
    normalize_documents,
    normalize_messages,
    normalize_template_kwargs,
)
from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import Formatter, encode
from quire_server.openai.generation import Choice, Generation, Prompt
from quire_server.openai.http.ignored_fields import IgnoredFields
from quire_server.openai.http.message import EventStream, HttpRequest, Reply, Response
from quire_server.openai.http.remote_prefill import RemotePrefill
from quire_server.openai.images.image_loader import ImageLoader
from quire_server.openai.images.image_parts import image_urls
from quire_server.openai.logprobs import chat_logprobs
from quire_server.openai.request_fields import GenerationFields, build_sampling_params, parse_fields
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_server.openai.tools import (
    apply_allowed_tools,
    check_tool_choice,
    check_tools,
    normalize_tools,
    output_parsing,
)
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.kv_transfer_params import KVTransferParams
from quire_spec.protocol.messages import Conversation, OutputDelta, to_raw
from quire_spec.protocol.parsed_output import (
    ContentDelta,
    Event,
    ParsedOutput,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    join_neighbours,
    merge_events,
)


class ConversationFields(GenerationFields, kw_only=True):
    """Fields of a request that contains a conversation."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    documents: Any = None
    """A list of objects. Some chat templates add these documents to the conversation."""
    add_generation_prompt: bool | None = None
    """True if the template must add the beginning of an answer. None means True, unless continue_final_message is
    set."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatFields(ConversationFields, kw_only=True):
    """Fields of a request for chat completions."""

    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    """Maximum number of output tokens; overrides max_tokens."""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    """If False, the response does not contain the reasoning."""
    separate_reasoning: bool = True
    """If False, the reasoning is part of the content, as in SGLang."""
    kv_transfer_params: KVTransferParams | None = None


class ChatCompletions:
    """The route /v1/chat/completions."""

    def __init__(self, client: TextClient, settings: FrontSettings, remote_prefill: RemotePrefill) -> None:
        self._client = client
        self._settings = settings
        self._remote_prefill = remote_prefill
        self._images = ImageLoader(settings.openai.allowedMediaDomains)

    async def handle(self, request: HttpRequest) -> Reply:
        """POST /v1/chat/completions: answer a conversation."""
        generation, fields, params = await self.prepare(request, await request.json_object(), "chatcmpl-")
        formatter = ChatFormatter(generation, fields, params)
        deltas = generation.deltas(self._client)
        if fields.stream:
            return EventStream(formatter.events(deltas))
        return Response(await formatter.document(deltas))

    async def render(self, request: HttpRequest) -> Reply:
        """POST /v1/chat/completions/render: return the token ids of the conversation."""
        generation, _, _ = await self.prepare(request, await request.json_object(), "chatcmpl-")
        [document] = await generation.render(self._client)
        return Response(encode(document))

    async def prepare(
        self, request: HttpRequest, document: dict[str, Any], id_prefix: str
    ) -> tuple[Generation, ChatFields, SamplingParams]:
        """Check a request and return its generation, which is not started yet; raises ApiError if the request is
        invalid."""
        fields, sampling_values = parse_fields(document, ChatFields, request.ignored_fields)
        check_tool_choice(fields.tool_choice, request.ignored_fields)
        fields.tools, fields.tool_choice = apply_allowed_tools(fields.tools, fields.tool_choice)
        chat = build_conversation(fields, request.ignored_fields)
        images = await self._images.load(image_urls(fields.messages))
        # Only the last message is needed again, for `echo`.
        fields.messages = fields.messages[-1:]
        parsing = output_parsing(
            normalize_tools(fields.tools), fields.tool_choice, fields.parallel_tool_calls, fields.separate_reasoning
        )
        if parsing.tool_choice not in ("none", "auto") and document.get("structured_outputs") is None:
            # response_format describes an answer, but the output consists of calls.
            sampling_values.pop("structured_outputs", None)
        prompt = Prompt(chat=chat, parsing=parsing, images=images)
        defaults = await self._client.sampling_defaults() if self._settings.openai.generationConfig == "auto" else {}
        values = defaults | sampling_values | _own_sampling_values(fields, sampling_values, defaults)
        params, copies = build_sampling_params(values, fields.stream)
        generation = Generation(id_prefix, request, fields, params, copies, [prompt], self._settings)
        generation.kv_transfer_params = fields.kv_transfer_params
        generation.remote_prompt = self._remote_prefill.prompt(request, "/v1/chat/completions", document, params)
        return generation, fields, params


def build_conversation(fields: ConversationFields, ignored: IgnoredFields) -> Conversation:
    """Return the conversation for a GenerateRequest; raises ApiError if a field is invalid. `ignored` gets the fields
    that are not known."""
    add_generation_prompt = fields.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not fields.continue_final_message
    if add_generation_prompt and fields.continue_final_message:
        raise ApiError(400, "continue_final_message: not possible with add_generation_prompt; set only one of them")
    check_tools(fields.tools, ignored)
    check_parts(fields.messages, ignored)
    tools, documents = normalize_tools(fields.tools), normalize_documents(fields.documents)
    template_kwargs = normalize_template_kwargs(fields.chat_template_kwargs, fields.reasoning_effort)
    return Conversation(
        to_raw(normalize_messages(fields.messages), "messages"),
        to_raw(tools, "tools"),
        to_raw(documents, "documents"),
        to_raw(template_kwargs, "chat_template_kwargs"),
        add_generation_prompt,
        fields.continue_final_message,
    )


def _own_sampling_values(
    fields: ChatFields, sampling_values: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return those sampling parameters that have a different name or a different default in chat completions than in
    completions."""
    values: dict[str, Any] = {}
    if fields.max_completion_tokens is not None:
        values["max_tokens"] = fields.max_completion_tokens
    elif "max_tokens" not in sampling_values:
        # The text can have any length up to the context length, unless the checkpoint contains another limit.
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
        last_message = normalize_messages(fields.messages[-1:])[0] if fields.echo else {"role": ""}
        self._echo = last_message["content"] if last_message["role"] == "assistant" else ""
        # The parts of an event that do not change are encoded once.
        head = encode(self.envelope)[:-1]
        self._prefixes = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (head, c.index) for c in generation.choices
        ]

    def event(self, choice: Choice, delta: OutputDelta) -> bytes:
        """Return the events for a delta. The first event of each choice also contains the role."""
        first = b""
        if not choice.is_started:
            choice.is_started = True
            first = self._first_event(choice)
        events = self._events(choice, delta)
        if delta.finish_reason is None and not self._has_details:
            return first + b"".join([self._event_of(choice, event) for event in events])
        # The last chunk also contains the delta's tokens and its finish reason.
        chunk = self.encode_event(self._chunk_choice(choice, delta, _delta_document(events[-1]) if events else {}))
        return first + b"".join([self._event_of(choice, event) for event in events[:-1]]) + chunk

    def complete_choice(self, choice: Choice, delta: OutputDelta) -> dict[str, Any]:
        """Return a choice of a complete response."""
        message = _message(merge_events(self._events(choice, delta)), delta.parsed is not None)
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        document: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": _finish_reason(choice, delta),
            "stop_reason": delta.stop_reason,
        }
        if self._fields.return_token_ids:
            document["token_ids"] = delta.token_ids
        return document

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields of the prompt. As in vLLM, a chat has them at the top level of the response."""
        choice, fields = self.generation.choices[0], dict[str, Any]()
        if self._fields.return_token_ids:
            fields["prompt_token_ids"] = self.generation.prompt_token_ids.get(choice.request_index)
        if self._params.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self.generation.prompt_logprobs_document(choice)
        return fields

    def usage(self) -> dict[str, Any]:
        """Return the usage so far, including the number of reasoning tokens."""
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self.generation.choices)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": num_reasoning}}

    def _first_event(self, choice: Choice) -> bytes:
        document: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        event = self.encode_event(document, self.prompt_fields() if choice.index == 0 else {}, has_tokens=False)
        if self._echo:
            event += self.encode_event({**document, "delta": {"content": self._echo}}, has_tokens=False)
        return event

    def _events(self, choice: Choice, delta: OutputDelta) -> list[Event]:
        """Return the parsed events of a delta."""
        if delta.parsed is None:
            return [ContentDelta(delta.text)] if delta.text else []
        events = join_neighbours(delta.parsed)
        choice.has_tool_calls |= any(isinstance(event, ToolCallStart) for event in events)
        if self._fields.include_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]

    def _event_of(self, choice: Choice, event: Event) -> bytes:
        """Return the encoded form of an event that does not end an output."""
        if isinstance(event, ContentDelta) and not self.continuous_usage:
            prefix = self._prefixes[choice.index]
            return b'%b%b},"logprobs":null,"finish_reason":null}]}\n\n' % (prefix, encode(event.text))
        document = {"index": choice.index, "delta": _delta_document(event), "logprobs": None, "finish_reason": None}
        return self.encode_event(document)

    def _chunk_choice(self, choice: Choice, delta: OutputDelta, delta_document: dict[str, Any]) -> dict[str, Any]:
        document: dict[str, Any] = {
            "index": choice.index,
            "delta": delta_document,
            "logprobs": self._logprobs(delta),
            "finish_reason": _finish_reason(choice, delta),
        }
        if delta.finish_reason is not None:
            document["stop_reason"] = delta.stop_reason
        if self._fields.return_token_ids:
            document["token_ids"] = delta.token_ids
        return document

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        if not self._fields.logprobs or delta.logprobs is None:
            return None
        num_top = -1 if self._params.logprob_token_ids else self._fields.top_logprobs or 0
        return chat_logprobs(delta.logprobs, num_top, self._fields.return_tokens_as_token_ids)


def _finish_reason(choice: Choice, delta: OutputDelta) -> str | None:
    """Return the finish reason of a choice.

    A complete output that contains a tool call has the reason tool_calls. An output that ended because of max_tokens
    has the reason length, even if it contains a tool call.
    """
    return "tool_calls" if delta.finish_reason == "stop" and choice.has_tool_calls else delta.finish_reason


def _delta_document(event: Event) -> dict[str, Any]:
    """Return the `delta` of a chunk."""
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning": text, "reasoning_content": text}
        case ToolCallStart(index, name, call_id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _message(output: ParsedOutput, is_parsed: bool) -> dict[str, Any]:
    """Return the message of a complete response. The content is null if the message has only tool calls or
    reasoning."""
    message: dict[str, Any] = {"role": "assistant", "content": output.content}
    if is_parsed and not output.content:
        message["content"] = None
    if output.reasoning:
        message |= {"reasoning": output.reasoning, "reasoning_content": output.reasoning}
    if output.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.tool_calls
        ]
    return message
