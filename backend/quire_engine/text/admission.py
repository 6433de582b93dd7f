# SPDX-License-Identifier: Apache-2.0
"""Admission control: decides which requests the text process accepts, and gives the reason for each rejection.

Policy only: no socket, no clock, no thread. The request manager calls it for every request, before and after
tokenizing. If a request is admitted, it can run in the engine, as far as the text process can check this. A rejection
takes only microseconds.
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Self

from quire_engine.parsers.parser_names import ParserNames
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, NotFound, Unavailable
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.framing import MAX_PAYLOAD_BYTES
from quire_spec.protocol.messages import GenerateRequest
from quire_spec.protocol.parsed_output import OutputParsing

_MIN_PROMPT_BYTES = 64 * 1024
"""A prompt that has at most this number of bytes is always tokenized before its length is checked. Tokenizing it takes
only milliseconds. A check of the number of bytes could reject a valid prompt: if a tokenizer normalizes text, a piece
of text that has more bytes than the longest token can become a single token.
"""

_MAX_SALT_CHARS = 256
_MAX_PRIORITY = 2**31 - 1
_MAX_LISTED_NAMES = 10
_MAX_GRAMMAR_CHARS = 4 * 2**20
"""Maximum number of characters of all grammars of a request together. Each output has a copy of the grammar."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a single request."""

    max_model_len: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int
    """Size of the vocabulary; every token id is less than this."""
    max_num_queued_reqs: int
    """Maximum number of requests that have not started."""
    max_prompt_bytes: int
    """A prompt that has more bytes than this cannot fit into max_model_len tokens. Such prompts are not tokenized."""
    priority_scheduling: bool = False
    """Whether a request can have a priority."""

    @classmethod
    def from_config(cls, config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer | None) -> Self:
        """Return the limits of an engine's configuration and checkpoint."""
        max_model_len = config.max_model_len or model_config.max_position_embeddings
        longest_prompt_bytes = max_model_len * (tokenizer.max_token_bytes if tokenizer else 1)
        priority_scheduling = config.scheduling_policy == "priority"
        max_prompt_bytes = max(longest_prompt_bytes, _MIN_PROMPT_BYTES)
        return cls(
            max_model_len, model_config.vocab_size, config.max_num_queued_reqs, max_prompt_bytes, priority_scheduling
        )

    @property
    def max_payload_bytes(self) -> int:
        """Maximum size in bytes of a GenerateRequest. A token id takes up to 9 bytes."""
        return min(2**20 + max(2 * self.max_prompt_bytes, 9 * self.max_model_len), MAX_PAYLOAD_BYTES)


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that was accepted, and that can now be tokenized and queued."""

    params: SamplingParams
    adapter_name: AdapterName | None
    """None for the base model."""
    adapter_digest: AdapterDigest | None
    """Content digest of the adapter that had this name when the request was admitted."""
    parsing: OutputParsing | None = None
    """How the outputs are parsed; None if they are returned as text."""


def check_text_parameters(params: SamplingParams, has_tokenizer: bool) -> None:
    """If the model has no tokenizer, reject parameters that need text.

    Raises:
        InvalidArgument: a parameter needs a tokenizer; the message names the parameter.
    """
    if params.stop and not has_tokenizer:
        raise InvalidArgument(
            "sampling parameter 'stop': not possible, because the model has no tokenizer; use stop_token_ids"
        )
    if params.structured_outputs is not None and not has_tokenizer:
        raise InvalidArgument(
            "sampling parameter 'structured_outputs': not possible, because the model has no tokenizer; leave it out"
        )
    if params.bad_words and not has_tokenizer:
        raise InvalidArgument(
            "sampling parameter 'bad_words': not possible, because the model has no tokenizer; use logit_bias"
        )


class AdmissionController:
    """Accepts or rejects requests; owns the table of adapter names. Only its methods change its state."""

    def __init__(
        self,
        limits: RequestLimits,
        served_name: str,
        has_tokenizer: bool,
        has_chat_template: bool = False,
        parser_names: ParserNames | None = None,
    ) -> None:
        self.limits = limits
        self.digest_by_name: Mapping[AdapterName, AdapterDigest] | None = None
        """Maps the names of adapters to their digests. The mapping is never changed, but only replaced by a new one.
        None until the supervisor has sent the names."""
        self.chat_template_by_name: Mapping[str, str] = {}
        """Maps the names of adapters to the files of their chat templates. It contains only adapters that have their
        own template."""
        self.loading_names: Set[str] | None = None
        """Adapters that requests can name as soon as they are loaded; None until the supervisor has sent the names."""
        self.closed_reason = "engine core is starting; try again"
        """Reason why all requests are rejected at the moment; empty while requests are accepted."""
        self.draining = False
        self.served_name = served_name
        self._has_tokenizer = has_tokenizer
        self._has_chat_template = has_chat_template
        self.parser_names = parser_names or ParserNames()
        """Parsers of chat outputs."""

    def open(self) -> None:
        """Accept requests from now on, because the engine core is connected."""
        self.closed_reason = ""

    def close(self, reason: str) -> None:
        """Reject all requests with `reason` until `open` is called."""
        self.closed_reason = reason

    def start_draining(self) -> None:
        """Reject all requests from now on."""
        self.draining = True

    def set_adapters(
        self, digest_by_name: Mapping[AdapterName, AdapterDigest], chat_template_by_name: Mapping[str, str]
    ) -> None:
        """Replace the adapters that requests can name, and the files of their chat templates."""
        self.digest_by_name, self.chat_template_by_name = dict(digest_by_name), dict(chat_template_by_name)

    def set_loading_adapters(self, names: Set[str]) -> None:
        """Replace the names of adapters that are being loaded."""
        self.loading_names = names

    def admit(self, request: GenerateRequest, num_queued: int) -> AdmittedRequest:
        """Check a new request.

        Raises:
            Unavailable: the server is draining, the engine core is not connected, or max_num_queued_reqs is reached.
            NotFound: the model name is unknown.
            InvalidArgument: a parameter or the prompt is invalid.
        """
        if self.draining:
            raise Unavailable("this server is draining; send the request to another one")
        if self.closed_reason:
            raise Unavailable(self.closed_reason)
        adapter_name, adapter_digest = self._resolve_model(request.model)
        if len(request.cache_salt or "") > _MAX_SALT_CHARS:
            raise InvalidArgument(f"cache_salt: must be a string of at most {_MAX_SALT_CHARS} characters")
        self._check_priority(request.priority)
        params = self._check_params(request)
        self._check_prompt_input(request, params)
        parsing = self._check_parsing(request, params)
        if num_queued >= self.limits.max_num_queued_reqs:
            raise Unavailable(
                f"{num_queued} requests are waiting and max_num_queued_reqs is {self.limits.max_num_queued_reqs}; "
                "try again later, or raise max_num_queued_reqs"
            )
        return AdmittedRequest(params, adapter_name, adapter_digest, parsing)

    def _check_priority(self, priority: int) -> None:
        if abs(priority) > _MAX_PRIORITY:
            raise InvalidArgument(f"priority: must be a 32-bit integer, got {str(priority)[:80]!r}")
        if priority and not self.limits.priority_scheduling:
            raise InvalidArgument(
                f"priority: got {priority}, but scheduling_policy is fcfs, so requests run in order of arrival; "
                "leave it out"
            )

    def check_prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Return the token ids of a prompt. If the request sets truncate_prompt_tokens, they are truncated.

        Raises:
            InvalidArgument: there are no token ids or too many, or one is outside the vocabulary.
        """
        limits = self.limits
        token_ids = params.truncate_prompt(token_ids, limits.max_model_len)
        if not token_ids:
            raise InvalidArgument("the prompt is empty; give at least one token")
        if len(token_ids) >= limits.max_model_len:
            raise InvalidArgument(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {limits.max_model_len}, which includes "
                f"at least one output token; shorten the prompt to {limits.max_model_len - 1} tokens, set "
                "truncate_prompt_tokens, or raise max_model_len"
            )
        # A Python loop is avoided, because a prompt can have 100,000 tokens, and this check blocks the event loop.
        if min(token_ids) >= 0 and max(token_ids) < limits.vocab_size:
            return token_ids
        invalid_id = next(i for i in token_ids if not 0 <= i < limits.vocab_size)
        raise InvalidArgument(
            f"the prompt contains {str(invalid_id)[:40]!r}, which is not a token id of this model; use ids from 0 to "
            f"{limits.vocab_size - 1}"
        )

    def check_grammar_size(self, grammar: str, params: SamplingParams) -> None:
        """Reject a grammar that is too large. It is sent to the core once for each output, so the limit is for all
        outputs together.
        """
        num_chars = len(grammar) * params.num_sequences
        if num_chars > _MAX_GRAMMAR_CHARS:
            raise InvalidArgument(
                f"sampling parameter 'n': the grammar of the constraint has {len(grammar)} characters, and each "
                f"of the {params.num_sequences} outputs needs a copy; at most {_MAX_GRAMMAR_CHARS} characters in total "
                "are allowed; request fewer outputs, or shorten the constraint"
            )

    def oversize_error(self, num_bytes: int) -> InvalidArgument:
        """Return the error for a request of `num_bytes` bytes, which is more than a request with a prompt of
        max_model_len tokens can have."""
        return InvalidArgument(
            f"the request has {num_bytes} bytes, but max_model_len is {self.limits.max_model_len}, and a prompt of so "
            f"many tokens has at most {self.limits.max_prompt_bytes} bytes; shorten the prompt or raise max_model_len"
        )

    def _resolve_model(self, model: str) -> tuple[AdapterName | None, AdapterDigest | None]:
        if model == self.served_name:
            return None, None
        if self.digest_by_name is None and self.loading_names is None:
            raise Unavailable(f"model {str(model)[:100]!r}: adapter names are not known yet after a restart; try again")
        digest_by_name = self.digest_by_name or {}
        adapter_name = AdapterName(model)
        if (adapter_digest := digest_by_name.get(adapter_name)) is not None:
            return adapter_name, adapter_digest
        if model in (self.loading_names or ()):
            raise Unavailable(f"model {model!r}: the adapter is not loaded yet; try again")
        # The message contains a sentence of vllm_backend, because clients of vllm_backend search for it.
        name, adapter_names = str(model)[:100], sorted(digest_by_name)
        num_unlisted = len(adapter_names) - _MAX_LISTED_NAMES
        raise NotFound(
            f"model {name!r} is not served; the base model is {self.served_name!r}: LoRA {name} is not supported, we "
            f"currently support "
            f"{adapter_names[:_MAX_LISTED_NAMES]}" + (f" and {num_unlisted} more" if num_unlisted > 0 else "")
        )

    def _check_params(self, request: GenerateRequest) -> SamplingParams:
        params = request.params
        check_text_parameters(params, self._has_tokenizer)
        self.parser_names.check_thinking_budget(params.thinking_token_budget)
        if request.stream and params.num_results > params.n:
            raise InvalidArgument(
                f"sampling parameter 'best_of': the best {params.n} of {params.best_of} outputs are only known at the "
                "end; do not stream, or leave best_of out"
            )
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_token_ids("logit_bias", params.logit_bias or ())
        self._check_token_ids("logprob_token_ids", params.logprob_token_ids or ())
        return params

    def _check_token_ids(self, param_name: str, token_ids: Collection[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.limits.vocab_size):
            invalid_id = next(i for i in token_ids if not 0 <= i < self.limits.vocab_size)
            raise InvalidArgument(
                f"sampling parameter {param_name!r}: {invalid_id} is not a token id of this model; use ids from 0 to "
                f"{self.limits.vocab_size - 1}"
            )

    def _check_prompt_input(self, request: GenerateRequest, params: SamplingParams) -> None:
        if [request.prompt, request.prompt_token_ids, request.chat].count(None) != 2:
            raise InvalidArgument("prompt: give either a text or token ids, but not both")
        if request.chat is not None:
            self.check_chat(request.model)
            return
        if request.prompt_token_ids is not None:
            self.check_prompt(request.prompt_token_ids, params)
        else:
            self.check_prompt_text(request.prompt)

    def _check_parsing(self, request: GenerateRequest, params: SamplingParams) -> OutputParsing | None:
        parsing = request.parsing
        if parsing is None:
            return None
        if parsing.tool_choice != "none" and self.parser_names.tool_call_parser is None:
            raise InvalidArgument(
                "tools: the format of tool calls of this model is unknown; set tool_choice to none, or start the "
                "server with a tool_call_parser"
            )
        own = params.structured_outputs
        if parsing.tool_choice != "none" and own is not None and own.begin_after_token_ids:
            raise InvalidArgument(
                "structured_outputs: begin_after_token_ids cannot be combined with tools, because calls can come "
                "before these tokens; leave it out, or set tool_choice to none"
            )
        return parsing

    def check_chat(self, model: str) -> None:
        """Reject a conversation if neither the adapter nor the checkpoint has a chat template, or if the model has no
        tokenizer."""
        if not self._has_tokenizer or not (self._has_chat_template or model in self.chat_template_by_name):
            raise InvalidArgument(
                "messages: the model has no chat template; use completions, or add chat_template.jinja to its folder"
            )

    def check_prompt_text(self, prompt: object) -> None:
        """Check the text of a prompt before it is tokenized. Raises InvalidArgument if it is not a string, or if it is
        too long for the model."""
        if not self._has_tokenizer:
            raise InvalidArgument("prompt: the model has no tokenizer; send prompt_token_ids")
        if not isinstance(prompt, str):
            raise InvalidArgument("prompt: must be a string")
        # The text must be encoded to count its bytes. So they are counted only if the number of characters does not
        # already show that the text is short enough.
        if 4 * len(prompt) > self.limits.max_prompt_bytes:
            num_bytes = len(prompt.encode(errors="replace"))
            if num_bytes > self.limits.max_prompt_bytes:
                raise self.oversize_error(num_bytes)
