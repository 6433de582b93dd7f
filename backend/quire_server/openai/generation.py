# SPDX-License-Identifier: Apache-2.0
"""One generation request of a client. It has one or several engine requests, the choices of its response, and its
usage.

If a client's request has several prompts, one engine request runs for each prompt. If the client's request is greedy
and asks for n outputs, n equal engine requests run for each prompt. The choices are numbered in the order of the
prompts. The modules for completions and chat completions format the deltas.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs

from quire_server.openai.errors import ApiError
from quire_server.openai.http.message import HttpRequest
from quire_server.openai.http.remote_prefill import RemotePrompt
from quire_server.openai.output_stream import OutputStream
from quire_server.openai.request_fields import GenerationFields
from quire_server.openai.settings import FrontSettings
from quire_server.openai.text_client import TextClient
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.kv_transfer_params import KVTransferParams
from quire_spec.protocol.messages import Conversation, GenerateRequest, OutputDelta, TokenLogprob, logprobs_by_token
from quire_spec.protocol.parsed_output import OutputParsing

KEEP_ALIVE_S = 15.0
"""A stream that has no event for this many seconds sends a comment. The comments keep the connection open, because
proxies close connections that are idle for 60 s."""
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

MAX_CHOICES = 1024
"""Maximum number of outputs of one HTTP request."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text, token ids or a conversation."""

    text: str | None = None
    token_ids: list[int] | None = None
    chat: Conversation | None = None
    second_text: str | None = None
    """The second text of a pair, of which `text` is the first one; see GenerateRequest."""
    parsing: OutputParsing | None = None
    """Settings for parsing the output; None: the output is not parsed."""
    images: list[bytes] = field(default_factory=list)
    """Files of the images of the conversation."""


class Choice:
    """State of one choice of the response."""

    __slots__ = (
        *("has_tool_calls", "index", "is_started", "num_reasoning_tokens", "num_tokens", "request_index"),
        "text_offset",
    )

    def __init__(self, index: int, request_index: int) -> None:
        self.index = index
        self.request_index = request_index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_started = False
        self.has_tool_calls = False
        self.text_offset = 0


Deltas = AsyncGenerator[list[tuple[Choice, OutputDelta]], None]
"""Asynchronous iterator over lists of new deltas. Each delta is paired with its choice."""


class Generation:
    """A generation request: its fields, its engine requests, and the deltas of its choices."""

    def __init__(
        self,
        id_prefix: str,
        http_request: HttpRequest,
        fields: GenerationFields,
        params: SamplingParams,
        copies: int,
        prompts: Sequence[Prompt],
        settings: FrontSettings,
    ) -> None:
        """`copies` is the number of equal engine requests that each prompt needs. Raises ApiError if there are too many
        choices."""
        self.id = id_prefix + (fields.request_id or http_request.request_id)[:128]
        self.created = int(time.time())
        self.model = settings.model_names[0] if fields.model is None else fields.model
        self.engine_model = settings.engine_model(self.model)
        self.fields = fields
        self.params = params
        self.prompts = prompts
        self.copies = copies
        self.choices = [
            Choice(request_index * params.n + index, request_index)
            for request_index in range(len(prompts) * copies)
            for index in range(params.n)
        ]
        if len(prompts) * copies * params.num_sequences > MAX_CHOICES:
            raise ApiError(
                400, f"prompt: {len(prompts)} prompts with n {copies * params.n} need more than {MAX_CHOICES} outputs"
            )
        self._api_key_name = http_request.api_key_name
        self._client = http_request.client
        self._release_body = http_request.release_body
        self._cache_salt = http_request.salt_cache(fields.cache_salt)
        self._data_parallel_rank = http_request.data_parallel_rank
        self._kv_source = http_request.kv_source
        user = fields.user if isinstance(fields.user, str) else ""
        self._session = http_request.session_id or user or http_request.request_id
        self._traceparent = http_request.traceparent
        self._response_headers = http_request.response_headers
        self._num_input_tokens = [0] * (len(prompts) * copies)
        self._num_cached_tokens = [0] * (len(prompts) * copies)
        self.kv_transfer_params: KVTransferParams | None = None
        """The role of this pod for the request."""
        self.kv_transfer_response: dict[str, Any] | None = None
        """Where a decode pod finds the blocks of the prompt. It is a field of a complete response."""
        self.remote_prompt: RemotePrompt | None = None
        """The prompt, if another pod can compute it."""
        self.prompt_token_ids: dict[int, list[int]] = {}
        """Maps the index of an engine request to the token ids of its prompt. Empty unless the response needs them
        (return_token_ids, or echo with logprobs)."""
        self.first_token_texts: dict[int, str] = {}
        """Maps the index of an engine request to the text of the first token of its prompt. The log probabilities have
        no entry for this token."""
        self.prompt_logprobs: dict[int, list[list[TokenLogprob] | None]] = {}
        """Maps the index of an engine request to the log probabilities of its prompt."""

    def prompt_of(self, choice: Choice) -> Prompt:
        """Return the prompt of a choice."""
        return self.prompts[choice.request_index // self.copies]

    def prompt_logprobs_document(self, choice: Choice) -> list[dict[str, dict[str, Any]] | None] | None:
        """Return the log probabilities of a choice's prompt in vLLM's form; None if there are none yet."""
        positions = self.prompt_logprobs.get(choice.request_index)
        return None if positions is None else [None if p is None else logprobs_by_token(p) for p in positions]

    async def deltas(self, client: TextClient, return_prompt_token_ids: bool = False) -> Deltas:
        """Run the request and yield lists of new deltas. If no delta arrives for KEEP_ALIVE_S seconds, yield an empty
        list.

        Raises:
            ApiError: the request failed.
        """
        num_outputs, choices = self.params.n, self.choices
        engine_requests = self._engine_requests(client, return_prompt_token_ids)
        if (prompt := self.remote_prompt) is not None:
            self.remote_prompt = None
            if (params := await prompt.compute(client, engine_requests[:: self.copies])) is not None:
                engine_requests = [structs.replace(request, kv_transfer_params=params) for request in engine_requests]
            del prompt
        with OutputStream(client, engine_requests, self.fields.stream_interval) as stream:
            del engine_requests
            self._drop_prompts()
            while not stream.is_complete:
                deltas = await stream.next(KEEP_ALIVE_S)
                for request_index, delta in deltas:
                    if delta.prompt_token_ids is not None and delta.prompt_logprobs is not None:
                        args = {"tokens": delta.prompt_token_ids[:1]}
                        self.first_token_texts[request_index] = await client.call("detokenize", str, args)
                    self._count(request_index, choices[request_index * num_outputs + delta.index], delta)
                yield [(choices[request_index * num_outputs + delta.index], delta) for request_index, delta in deltas]

    async def render(self, client: TextClient) -> list[dict[str, Any]]:
        """Return the token ids of each prompt, in the document that vLLM's render routes return. Nothing is generated.

        Raises:
            QuireError: the request is invalid.
        """
        fields = self.fields
        document = {
            "request_id": self.id,
            "features": None,
            "sampling_params": msgspec.to_builtins(self.params),
            "model": self.model,
            "stream": fields.stream,
            "stream_options": None if fields.stream_options is None else msgspec.to_builtins(fields.stream_options),
            "cache_salt": fields.cache_salt,
            "priority": fields.priority,
            "kv_transfer_params": None,
        }
        requests = self._engine_requests(client, False)[:: self.copies]
        return [document | {"token_ids": await client.call("render", list[int], {"request": r})} for r in requests]

    def usage(self) -> dict[str, Any]:
        """Return the number of tokens so far. If several equal engine requests run for a prompt, the tokens of the
        prompt are counted once."""
        num_input = sum(self._num_input_tokens[:: self.copies])
        num_output = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_input,
            "total_tokens": num_input + num_output,
            "completion_tokens": num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens[:: self.copies])},
        }

    def _drop_prompts(self) -> None:
        """Drop the prompts that the text process has now, and release the body of the HTTP request. A response with
        `echo` repeats its prompts."""
        if not self.fields.echo:
            self.prompts = [Prompt()] * len(self.prompts)
        self._release_body()

    def _engine_requests(self, client: TextClient, return_prompt_token_ids: bool) -> list[GenerateRequest]:
        fields = self.fields
        return [
            GenerateRequest(
                client.new_id(),
                self.engine_model,
                # A prompt of token ids has a text only if the response repeats it.
                prompt.text if prompt.token_ids is None else None,
                prompt.token_ids,
                self.params,
                fields.stream,
                self._cache_salt,
                fields.priority,
                fields.add_special_tokens is not False,
                return_prompt_token_ids or fields.return_token_ids,
                self.params.logprobs is not None,
                prompt.chat,
                self._api_key_name,
                prompt.parsing,
                self._client,
                self._data_parallel_rank,
                self._session,
                self._traceparent,
                images=prompt.images,
                kv_source=self._kv_source,
                kv_transfer_params=self.kv_transfer_params,
            )
            for prompt in self.prompts
            for _ in range(self.copies)
        ]

    def _count(self, request_index: int, choice: Choice, delta: OutputDelta) -> None:
        if delta.adapter_version:
            self._response_headers[b"quire-adapter-version"] = delta.adapter_version.encode()
        choice.num_tokens = delta.num_output_tokens
        choice.num_reasoning_tokens = delta.num_reasoning_tokens
        self._num_input_tokens[request_index] = delta.num_input_tokens
        self._num_cached_tokens[request_index] = delta.num_cached_tokens
        if delta.kv_transfer_params is not None:
            self.kv_transfer_response = delta.kv_transfer_params | {"remote_request_id": self.id}
            if len(self.prompts) > 1:
                # The keys are those of one prompt.
                self.kv_transfer_response.pop("quire", None)
        if delta.prompt_token_ids is not None:
            self.prompt_token_ids[request_index] = delta.prompt_token_ids
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[request_index] = delta.prompt_logprobs
