# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: continues one or several prompts. As in vLLM, the response is either complete or a stream of
server-sent events."""

from typing import Any

from msgspec import structs

from quire_server.openai.errors import ApiError
from quire_server.openai.formatter import Formatter, encode
from quire_server.openai.generation import Choice, Generation, Prompt
from quire_server.openai.http.message import EventStream, HttpRequest, Reply, Response
from quire_server.openai.http.remote_prefill import RemotePrefill
from quire_server.openai.logprobs import completion_logprobs
from quire_server.openai.request_fields import GenerationFields, build_sampling_params, parse_fields
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.kv_transfer_params import KVTransferParams
from quire_spec.protocol.messages import OutputDelta

MAX_PROMPTS = 1024


class CompletionFields(GenerationFields, kw_only=True):
    """Fields of a request for completions."""

    prompt: Any = None
    """A text, a list of texts, a list of token ids, or a list of lists of token ids."""
    max_completion_tokens: int | None = None
    """A field of chat completions. llm-d's sidecar sends it in completions, too, with the value of max_tokens."""
    kv_transfer_params: KVTransferParams | None = None


class Completions:
    """The route /v1/completions."""

    def __init__(self, client: TextClient, settings: FrontSettings, remote_prefill: RemotePrefill) -> None:
        self._client = client
        self._settings = settings
        self._remote_prefill = remote_prefill

    async def handle(self, request: HttpRequest) -> Reply:
        """POST /v1/completions: continue prompts."""
        generation, fields, params, omits_output = await self._prepare(request)
        if fields.echo:
            generation.prompts = [await self._with_text(prompt) for prompt in generation.prompts]
        formatter = CompletionFormatter(generation, fields, params, omits_output)
        return_prompt_token_ids = fields.echo and params.logprobs is not None
        deltas = generation.deltas(self._client, return_prompt_token_ids)
        if fields.stream:
            return EventStream(formatter.events(deltas))
        return Response(await formatter.document(deltas))

    async def render(self, request: HttpRequest) -> Reply:
        """POST /v1/completions/render: return the token ids of each prompt."""
        generation, *_ = await self._prepare(request)
        return Response(encode(await generation.render(self._client)))

    async def _prepare(self, request: HttpRequest) -> tuple[Generation, CompletionFields, SamplingParams, bool]:
        """Check a request and return its generation, which is not started yet, and whether its output is dropped.
        Raises ApiError if the request is invalid."""
        document = await request.json_object()
        fields, sampling_values = parse_fields(document, CompletionFields, request.ignored_fields)
        if fields.max_completion_tokens not in (None, sampling_values.get("max_tokens")):
            raise ApiError(400, "max_completion_tokens: is a field of chat completions; send max_tokens")
        prompts, fields.prompt = parse_prompts(fields.prompt), None
        # The engine always generates at least one token. If the request needs only the prompt, this token is dropped.
        omits_output = fields.echo and sampling_values.get("max_tokens") == 0
        if omits_output:
            sampling_values["max_tokens"] = 1
        defaults = await self._client.sampling_defaults() if self._settings.openai.generationConfig == "auto" else {}
        # As in vLLM, a completion has up to 16 tokens if the request does not contain max_tokens. A default of the
        # checkpoint is ignored.
        defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
        params, copies = build_sampling_params(defaults | sampling_values, fields.stream)
        if fields.echo:
            params = structs.replace(params, prompt_logprobs=params.logprobs)
            params.check_consistency()
        generation = Generation("cmpl-", request, fields, params, copies, prompts, self._settings)
        generation.kv_transfer_params = fields.kv_transfer_params
        generation.remote_prompt = self._remote_prefill.prompt(request, "/v1/completions", document, params)
        return generation, fields, params, omits_output

    async def _with_text(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its text, because the response repeats the text. If the prompt is given as token ids,
        they are converted to text."""
        if prompt.text is not None:
            return prompt
        text = await self._client.call("detokenize", str, {"tokens": prompt.token_ids})
        return Prompt(text, prompt.token_ids)


def parse_prompts(value: object, name: str = "prompt", max_prompts: int = MAX_PROMPTS) -> list[Prompt]:
    """Return the prompts in the field `name`; raises ApiError if the value has none of the four allowed forms."""
    if isinstance(value, str):
        return [Prompt(value)]
    if isinstance(value, list) and value:
        if set(map(type, value)) == {int}:
            return [Prompt(None, value)]
        if len(value) > max_prompts:
            raise ApiError(400, f"{name}: at most {max_prompts} prompts are allowed, got {len(value)}; send fewer")
        if all(isinstance(item, str) for item in value):
            return [Prompt(item) for item in value]
        if all(isinstance(item, list) and item and set(map(type, item)) == {int} for item in value):
            return [Prompt(None, item) for item in value]
    problem = "missing" if value is None else "empty" if value == [] else "not of a valid form"
    raise ApiError(400, f"{name}: {problem}; give a text, a list of texts, token ids, or a list of lists of token ids")


class CompletionFormatter(Formatter):
    """Formats a request for completions."""

    def __init__(
        self, generation: Generation, fields: CompletionFields, params: SamplingParams, omits_output: bool
    ) -> None:
        super().__init__(generation, "text_completion")
        self._fields = fields
        self._params = params
        self._omits_output = omits_output
        self._has_details = fields.return_token_ids or params.logprobs is not None or self.continuous_usage
        # The parts of an event that do not change are encoded once.
        head = encode(self.envelope)[:-1]
        self._prefixes = [b'data: %b,"choices":[{"index":%d,"text":' % (head, c.index) for c in generation.choices]

    def event(self, choice: Choice, delta: OutputDelta) -> bytes:
        """Return the event for a delta; return b"" if the delta has no content."""
        is_first, choice.is_started = not choice.is_started, True
        if delta.finish_reason is not None or self._has_details or (is_first and self._fields.echo):
            return self.encode_event(self._choice(choice, delta, is_first))
        if not delta.text:
            return b""
        return b'%b%b,"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n' % (
            self._prefixes[choice.index],
            encode(delta.text),
        )

    def complete_choice(self, choice: Choice, delta: OutputDelta) -> dict[str, Any]:
        """Return a choice of a complete response."""
        return self._choice(choice, delta, True)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far. A request can ask for a response that contains only the prompt, without any output.
        Even then, the engine generates one token, which is not counted."""
        usage = super().usage()
        if self._omits_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, choice: Choice, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        generation, fields = self.generation, self._fields
        echoes = fields.echo and is_first
        text = "" if self._omits_output else delta.text
        document: dict[str, Any] = {
            "index": choice.index,
            "text": (generation.prompt_of(choice).text or "") + text if echoes else text,
            "logprobs": self._logprobs(choice, delta, echoes),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if fields.return_token_ids:
            document["token_ids"] = [] if self._omits_output else delta.token_ids
            if is_first:
                document["prompt_token_ids"] = generation.prompt_token_ids.get(choice.request_index)
        if is_first and self._params.prompt_logprobs is not None:
            document["prompt_logprobs"] = generation.prompt_logprobs_document(choice)
        return document

    def _logprobs(self, choice: Choice, delta: OutputDelta, echoes: bool) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        positions: list[Any] = [] if self._omits_output else list(delta.logprobs)
        token_ids = [] if self._omits_output else delta.token_ids
        if echoes:
            positions = [*self.generation.prompt_logprobs.get(choice.request_index, []), *positions]
            token_ids = [*self.generation.prompt_token_ids.get(choice.request_index, []), *token_ids]
        document, choice.text_offset = completion_logprobs(
            positions,
            token_ids,
            choice.text_offset,
            self._fields.return_tokens_as_token_ids,
            self.generation.first_token_texts.get(choice.request_index, ""),
        )
        return document
