# SPDX-License-Identifier: Apache-2.0
"""Request processor: renders, tokenizes and checks a request, so that the engine core can run it.

    limits.check(request)                          # before work is done
    prepared = await processor.prepare(request)    # render -> tokenize -> check

The text process runs `prepare` as a task, and cancels the task to cancel the request. The offline `LLM` uses
components that never wait, and runs `prepare` with `run_without_waiting`. This module depends on neither sockets nor
queues.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec import Raw, msgpack

from quire_engine.images.placeholders import Placeholders
from quire_engine.images.processor import ProcessedImage
from quire_engine.parsers.output_grammar import compose_grammar
from quire_engine.parsers.output_parser import OutputParser, create_parser, reasoning_state
from quire_engine.parsers.parser_names import ParserNames
from quire_engine.requests.limits import RequestLimits
from quire_engine.structured_outputs.composed_constraint import ComposedConstraint
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import PROCESS_ENDS, Internal, InvalidArgument
from quire_spec.protocol.messages import Conversation, GenerateRequest, ImageInput

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class ChatRenderer(Protocol):
    """Renders conversations."""

    async def render(self, chat: Conversation, template: str | None) -> str:
        """Return the text of a conversation, in which control tokens are marked. `template` replaces the template of
        the checkpoint. Raises QuireError."""


class GrammarChecker(Protocol):
    """Checks constraints."""

    async def check(self, constraint: StructuredOutputsParams | ComposedConstraint) -> str:
        """Return the grammar of a constraint. Raises QuireError."""


class ImageReader(Protocol):
    """Decodes and resizes images."""

    async def read(self, files: Sequence[bytes]) -> list[ProcessedImage]:
        """Return the images in these files. Raises QuireError."""


class TokenizerRunner(Protocol):
    """Runs functions of the tokenizer."""

    def __call__(self, function: Callable[[], _T], num_chars: int) -> Awaitable[_T]:
        """Return the result of a function that processes a text of `num_chars` characters."""


async def run_inline(function: Callable[[], _T], num_chars: int) -> _T:
    """A TokenizerRunner that calls the function at once."""
    return function()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the engine core can run."""

    prompt: str | None
    """Text of the prompt. In a rendered conversation, control tokens are marked. None if the prompt was given as token
    ids."""
    prompt_token_ids: list[int]
    bad_word_ids: list[list[int]]
    """Token sequences that the output must not contain."""
    grammar: str | None
    """Grammar that the output must match; None allows any output."""
    begin_after_token_ids: list[int]
    """The grammar begins after these output tokens."""
    reasoning_marks: list[list[int]]
    """See SequenceRequest."""
    create_parser: Callable[[], OutputParser] | None
    """Creates the parser of an output; None if outputs are returned as text."""
    images: list[ImageInput]
    """The images of the prompt, in the order of their tokens."""
    second_text_start: int = 0
    """See SequenceRequest."""


class RequestProcessor:
    """Prepares the requests of one model."""

    def __init__(
        self,
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        chat_renderer: ChatRenderer | None,
        grammar_checker: GrammarChecker | None,
        run_tokenizer: TokenizerRunner = run_inline,
        image_reader: ImageReader | None = None,
    ) -> None:
        """`chat_renderer` and `grammar_checker` are None if the model has no tokenizer, `image_reader` if it reads no
        images."""
        self.limits = limits
        self.tokenizer = tokenizer
        self._chat_renderer = chat_renderer
        self._grammar_checker = grammar_checker
        self.run_tokenizer = run_tokenizer
        self._image_reader = image_reader
        images = limits.images
        self._placeholders = None if images is None or tokenizer is None else Placeholders(images, tokenizer)

    async def prepare(self, request: GenerateRequest, template: str | None = None) -> PreparedRequest:
        """Prepare a request that `RequestLimits.check` has accepted.

        `template` replaces the chat template of the checkpoint. The renderer defines its meaning.

        Raises:
            InvalidArgument: the template rejects the conversation, the prompt is too long, or the constraint cannot be
                enforced.
            Unavailable: other requests are being rendered or checked.
        """
        limits, params = self.limits, request.params
        reasoning, tools = "possible", _tools(request.chat)
        text, token_ids, bad_word_ids, images, second_text_start = await self._tokenize(request, template)
        if request.chat is not None:
            reasoning = reasoning_state(limits.parser_names, text or "", _prefill(request.chat))
        limits.check_prompt_logprobs(params, len(token_ids))
        limits.check_allowed_tokens(params, bad_word_ids)
        grammar = None
        if (constraint := self._constraint(request, tools, reasoning)) is not None:
            assert self._grammar_checker is not None, "limits reject constraints without a tokenizer"
            grammar = await self._grammar_checker.check(constraint)
            limits.check_grammar_size(grammar, params)
        own, marks = params.structured_outputs, []
        if self.tokenizer is not None and params.thinking_token_budget is not None:
            marks = limits.parser_names.reasoning_mark_ids(self.tokenizer)
        return PreparedRequest(
            text,
            token_ids,
            bad_word_ids,
            grammar,
            list(own.begin_after_token_ids) if own is not None else [],
            marks,
            self._parser_factory(request, token_ids, tools, reasoning == "open"),
            images,
            second_text_start,
        )

    async def tokenize(
        self, request: GenerateRequest, template: str | None = None
    ) -> tuple[list[int], list[ImageInput]]:
        """Return the token ids of the prompt, and its images. The errors are those of `prepare`."""
        _, token_ids, _, images, _ = await self._tokenize(request, template)
        return token_ids, images

    async def _tokenize(
        self, request: GenerateRequest, template: str | None
    ) -> tuple[str | None, list[int], list[list[int]], list[ImageInput], int]:
        """Return the text of the prompt, its token ids, the token ids of the bad words, the images, and the position of
        the second text of a pair."""
        text = request.prompt if request.chat is None else await self.render(request.chat, template)
        images: list[ProcessedImage] = []
        expanded = text
        if request.images:
            assert self._image_reader is not None and self._placeholders is not None, "limits reject other images"
            images = await self._image_reader.read(request.images)
            self.limits.check_images(images)
            if text is not None:
                expanded = self._placeholders.expand(text, images)
        second_text_start = 0
        if request.second_text is None:
            token_ids, bad_word_ids = await self._encode(request, expanded)
        else:
            token_ids, second_text_start = await self._encode_pair(request, text or "", request.second_text)
            bad_word_ids = []
        if request.prompt_token_ids is None:
            self.limits.check_prompt(token_ids, request.pooling)
        located = self._placeholders.locate(token_ids, images) if images and self._placeholders else []
        return text, token_ids, bad_word_ids, located, second_text_start

    async def _encode_pair(self, request: GenerateRequest, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, and the position of the second one."""
        tokenizer, params = self.tokenizer, request.params
        assert tokenizer is not None, "limits reject text without a tokenizer"
        max_tokens = params.max_prompt_tokens(self.limits.max_model_len)
        encode = partial(tokenizer.encode_pair, first, second, max_tokens, params.truncation_side)
        return await self.run_tokenizer(encode, len(first) + len(second))

    async def render(self, chat: Conversation, template: str | None) -> str:
        """Return the text of a conversation, in which control tokens are marked."""
        assert self._chat_renderer is not None, "limits reject conversations without a chat template"
        text = await self._chat_renderer.render(chat, template)
        self.limits.check_prompt_text(text)
        return text

    async def _encode(self, request: GenerateRequest, text: str | None) -> tuple[list[int], list[list[int]]]:
        """Return the token ids of the prompt and of the bad words."""
        params, max_model_len, tokenizer = request.params, self.limits.max_model_len, self.tokenizer
        if request.prompt_token_ids is not None and not params.bad_words:
            return params.truncate_prompt(request.prompt_token_ids, max_model_len), []
        assert tokenizer is not None, "limits reject text without a tokenizer"

        def encode() -> tuple[list[int], list[list[int]]]:
            if request.prompt_token_ids is not None:
                token_ids = request.prompt_token_ids
            elif request.chat is not None:
                token_ids = tokenizer.encode_rendered(text or "", request.cache_salt or "")
            else:
                max_tokens = params.max_prompt_tokens(max_model_len)
                token_ids = tokenizer.encode(text or "", max_tokens, request.add_special_tokens, params.truncation_side)
            bad_word_ids = tokenizer.bad_word_ids(params.bad_words) if params.bad_words else []
            return params.truncate_prompt(token_ids, max_model_len), bad_word_ids

        # A bad word is encoded twice, with a space before it and without one, so its length counts twice.
        return await self.run_tokenizer(encode, len(text or "") + 2 * sum(map(len, params.bad_words)))

    def _constraint(
        self, request: GenerateRequest, tools: Sequence[Mapping[str, Any]], reasoning: str
    ) -> StructuredOutputsParams | ComposedConstraint | None:
        """Return the constraint that the output must match: the request's own constraint combined with the constraint
        of its tools.
        """
        own, parsing = request.params.structured_outputs, request.parsing
        # With begin_after_token_ids, the constraint itself defines where the reasoning ends.
        if parsing is None or self.tokenizer is None or (own is not None and own.begin_after_token_ids):
            return own
        answer = None if own is None else own.to_mapping()
        try:
            composed = compose_grammar(self.limits.parser_names, self.tokenizer, parsing, tools, reasoning, answer)
        except (InvalidArgument, *PROCESS_ENDS):
            raise
        except BaseException as error:
            logger.exception("grammar of a request cannot be built, ending it")
            raise Internal("tools: no grammar can be built; see the log of the text process") from error
        if composed is not None and request.params.use_beam_search:
            # A constraint of the request itself is not allowed either, so this constraint comes from the tools.
            raise InvalidArgument("tools: not allowed with use_beam_search; omit one of the two")
        return own if composed is None else composed

    def _parser_factory(
        self,
        request: GenerateRequest,
        prompt_token_ids: list[int],
        tools: Sequence[Mapping[str, Any]],
        is_reasoning_open: bool,
    ) -> Callable[[], OutputParser] | None:
        """Return a function that creates a parser for each output of a request; None if nothing is parsed."""
        parsing, names = request.parsing, self.limits.parser_names
        if parsing is None or self.tokenizer is None:
            return None
        used_names = ParserNames(
            names.tool_call_parser if parsing.tool_choice != "none" else None,
            names.reasoning_parser if parsing.separate_reasoning else None,
        )
        if used_names == ParserNames():
            return None
        return partial(
            create_parser,
            used_names,
            self.tokenizer,
            prompt_token_ids,
            tools,
            is_reasoning_open,
            parsing.parallel_tool_calls,
            request.params.skip_special_tokens,
            request.params.structured_outputs is not None,
        )


def run_without_waiting(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that never waits. No event loop is needed."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    coroutine.close()
    raise AssertionError("the coroutine waits")


def decode_conversation(chat: Conversation) -> dict[str, Any]:
    """Return the fields of a conversation, as a renderer reads them."""
    values = {name: getattr(chat, name) for name in chat.__struct_fields__}
    return {name: msgpack.decode(v) if isinstance(v, Raw) else v for name, v in values.items()}


def _tools(chat: Conversation | None) -> Sequence[Mapping[str, Any]]:
    tools: Sequence[Mapping[str, Any]] | None = None if chat is None else msgpack.decode(chat.tools)
    return tools or ()


def _prefill(chat: Conversation) -> str:
    """Return the text of the last message if the output continues it."""
    messages: Any = msgpack.decode(chat.messages) if chat.continue_final_message else None
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""
