# SPDX-License-Identifier: Apache-2.0
"""What one request can ask of a model: the checks that need the vocabulary, the tokenizer or the engine's limits.

Policy only: no socket, no clock, no thread. Every request is checked here once, when it enters the text process or the
offline `LLM`. The engine core does not check it again.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from quire_engine.images.processor import ProcessedImage
from quire_engine.parsers.parser_names import ParserNames
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.constants import MAX_IMAGE_BYTES
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.pooling_params import MAX_POOLED_BYTES, PoolingParams, too_large_error
from quire_spec.engine.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.model.images.image_config import ImageConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.pooler_config import PoolerConfig
from quire_spec.protocol.framing import MAX_PAYLOAD_BYTES
from quire_spec.protocol.messages import GenerateRequest
from quire_spec.protocol.parsed_output import OutputParsing

_MIN_PROMPT_BYTES = 64 * 1024
"""A prompt that has at most this number of bytes is always tokenized before its length is checked. Tokenizing it takes
only milliseconds. A check of the number of bytes could reject a valid prompt: if a tokenizer normalizes text, a piece
of text that has more bytes than the longest token can become a single token.
"""

MAX_IMAGES_BYTES = 192 * 2**20
"""Maximum size of the tensors of all images of a request, which are sent to the core in one frame."""
_MAX_SALT_CHARS = 256
_MAX_PRIORITY = 2**31 - 1
_MAX_GRAMMAR_CHARS = 4 * 2**20
"""Maximum number of characters of all grammars of a request together. Each output has a copy of the grammar."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a single request."""

    max_model_len: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int
    """Size of the vocabulary; every token id is less than this."""
    max_prompt_bytes: int
    """A prompt that has more bytes than this cannot fit into max_model_len tokens. Such prompts are not tokenized."""
    has_tokenizer: bool = True
    """If false, prompts must be token ids."""
    has_chat_template: bool = False
    """Whether the checkpoint has a chat template; an adapter can have its own."""
    parser_names: ParserNames = field(default_factory=ParserNames)
    """Parsers of chat outputs."""
    eos_token_ids: frozenset[int] = frozenset()
    max_logprobs: int = -1
    """Maximum number of log probabilities at a position; -1: all tokens."""
    data_parallel_size: int = 1
    """Number of cores."""
    pooler: PoolerConfig | None = None
    """What the model returns for requests with `pooling`; None if it only generates."""
    step_token_id: int | None = None
    """The token of PoolerConfig.step_token; None if all tokens have a vector."""
    is_encoder: bool = False
    """Whether the model is an encoder, whose tokenizer joins the texts of a pair."""
    has_score_template: bool = False
    """Whether the chat template has the roles query and document, instead of those of a conversation."""
    can_generate: bool = True
    """Whether the checkpoint has an output projection."""
    images: ImageConfig | None = None
    """How the engine reads images; None if it reads none."""
    why_no_images: str = "this model does not read images; send text parts only, or use another model"
    """Why the engine reads no images, and what to do."""
    max_images: int = 0
    """Maximum number of images of a prompt."""
    max_image_tokens: int = 0
    """Maximum number of tokens of an image whose tokens are computed in one step; 0: not limited."""

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        templates: ChatTemplateFiles,
        pooler: PoolerConfig | None = None,
        why_no_images: str | None = None,
    ) -> Self:
        """Return the limits of an engine's configuration and checkpoint. `why_no_images` is set if the engine reads no
        images."""
        images = model_config.images if why_no_images is None and tokenizer is not None else None
        added_tokens = tokenizer.added_tokens.values() if tokenizer else ()
        response_template = tokenizer.response_template if tokenizer else ""
        detected = ParserNames.detect(templates.sources, added_tokens, response_template)
        parser_names = detected.configured(config.tool_call_parser, config.reasoning_parser)
        parser_names.check_template(response_template)
        max_model_len = config.max_model_len or model_config.max_length
        longest_prompt_bytes = max_model_len * (tokenizer.max_token_bytes if tokenizer else 1)
        return cls(
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            max_prompt_bytes=max(longest_prompt_bytes, _MIN_PROMPT_BYTES),
            has_tokenizer=tokenizer is not None,
            has_chat_template=templates.default is not None,
            parser_names=parser_names,
            eos_token_ids=eos_token_ids,
            max_logprobs=config.max_logprobs,
            data_parallel_size=config.data_parallel_size,
            pooler=pooler,
            step_token_id=tokenizer.encode(pooler.step_token, None, False)[0]
            if tokenizer is not None and pooler is not None and pooler.step_token
            else None,
            has_score_template=all(role.search(templates.default or "") for role in _SCORE_ROLES),
            is_encoder=model_config.encoder is not None,
            can_generate=model_config.head == "lm",
            images=images,
            why_no_images=why_no_images or "the model has no tokenizer; start it without skip_tokenizer_init",
            max_images=config.max_images,
            max_image_tokens=max(1, config.max_num_batched_tokens - config.max_num_seqs)
            if images is not None and images.is_bidirectional
            else 0,
        )

    @property
    def max_payload_bytes(self) -> int:
        """Maximum size in bytes of a GenerateRequest. A token id takes up to 9 bytes."""
        text_bytes = 2**20 + max(2 * self.max_prompt_bytes, 9 * self.max_model_len)
        image_bytes = 0 if self.images is None else self.max_images * MAX_IMAGE_BYTES
        return min(text_bytes + image_bytes, MAX_PAYLOAD_BYTES)

    def check(self, request: GenerateRequest, has_own_template: bool = False) -> None:
        """Check a new request before work is done for it.

        `has_own_template` is True if the adapter of the request has its own chat template.

        Raises:
            InvalidArgument: a parameter or the prompt is invalid.
        """
        if len(request.cache_salt or "") > _MAX_SALT_CHARS:
            raise InvalidArgument(f"cache_salt: must be a string of at most {_MAX_SALT_CHARS} characters")
        self._check_priority(request.priority)
        rank, num_cores = request.data_parallel_rank, self.data_parallel_size
        if rank is not None and not 0 <= rank < num_cores:
            raise InvalidArgument(f"data_parallel_rank: must be from 0 to {num_cores - 1}, got {rank}; or omit it")
        self._check_task(request.pooling)
        if request.second_text is not None:
            if not self.is_encoder or request.pooling is None:
                raise InvalidArgument("second_text: only encoders read pairs of texts; put both into the prompt")
            self.check_prompt_text(request.second_text)
        self._check_params(request.params, request.stream)
        if [request.prompt, request.prompt_token_ids, request.chat].count(None) != 2:
            raise InvalidArgument("prompt: give either a text or token ids, but not both")
        if request.chat is not None:
            self.check_chat(has_own_template)
        elif request.prompt is not None:
            self.check_prompt_text(request.prompt)
        elif request.prompt_token_ids is not None:
            token_ids = request.params.truncate_prompt(request.prompt_token_ids, self.max_model_len)
            self.check_prompt(token_ids, request.pooling)
        if request.parsing is not None:
            self._check_parsing(request.parsing, request.params)
        if request.images:
            self._check_image_files(request)

    def check_images(self, images: Sequence[ProcessedImage]) -> None:
        """Check the images of a request after they were resized. Raises InvalidArgument if they are too large."""
        num_bytes = sum(len(tensor.data) for image in images for tensor in image.tensors.values())
        if num_bytes > MAX_IMAGES_BYTES:
            raise InvalidArgument(
                f"images: the {len(images)} images have {num_bytes} bytes after they were resized, and at most "
                f"{MAX_IMAGES_BYTES} are allowed; send fewer or smaller images"
            )
        for i, image in enumerate(images):
            if image.num_tokens > self.max_image_tokens > 0:
                raise InvalidArgument(
                    f"images[{i}]: has {image.num_tokens} tokens, which must be computed in one step, and a step has "
                    f"room for {self.max_image_tokens}; raise max_num_batched_tokens"
                )

    def _check_image_files(self, request: GenerateRequest) -> None:
        """Check the number and the size of image files, before they are decoded."""
        num_images = len(request.images)
        if self.images is None:
            raise InvalidArgument(f"images: got {num_images}, but {self.why_no_images}")
        if num_images > self.max_images:
            raise InvalidArgument(
                f"images: at most {self.max_images} are allowed, got {num_images}; send fewer, or raise "
                "limit_mm_per_prompt.image"
            )
        for i, data in enumerate(request.images):
            if len(data) > MAX_IMAGE_BYTES:
                raise InvalidArgument(
                    f"images[{i}]: has {len(data)} bytes, and at most {MAX_IMAGE_BYTES} are allowed; send a smaller "
                    "image"
                )
        if request.params.truncate_prompt_tokens is not None:
            raise InvalidArgument("truncate_prompt_tokens: not possible with images; omit one of the two")

    def check_chat(self, has_own_template: bool) -> None:
        """Reject a conversation if neither the adapter nor the checkpoint has a chat template, or if the model has no
        tokenizer."""
        if not self.has_tokenizer or not (self.has_chat_template or has_own_template):
            raise InvalidArgument(
                "messages: the model has no chat template; use completions, or add chat_template.jinja to its folder"
            )

    def check_prompt_text(self, prompt: str) -> None:
        """Check the text of a prompt before it is tokenized. Raises InvalidArgument if it is too long for the model, or
        if the model has no tokenizer."""
        if not self.has_tokenizer:
            raise InvalidArgument("prompt: the model has no tokenizer; send prompt_token_ids")
        # The text must be encoded to count its bytes. So they are counted only if the number of characters does not
        # already show that the text is short enough.
        if 4 * len(prompt) > self.max_prompt_bytes:
            num_bytes = len(prompt.encode(errors="replace"))
            if num_bytes > self.max_prompt_bytes:
                raise self.oversize_error(num_bytes)

    def oversize_error(self, num_bytes: int) -> InvalidArgument:
        """Return the error for a request of `num_bytes` bytes, which is more than a request with a prompt of
        max_model_len tokens can have."""
        return InvalidArgument(
            f"the request has {num_bytes} bytes, but max_model_len is {self.max_model_len}, and a prompt of so many "
            f"tokens has at most {self.max_prompt_bytes} bytes; shorten the prompt or raise max_model_len"
        )

    def check_prompt(self, token_ids: list[int], pooling: PoolingParams | None = None) -> None:
        """Check the token ids of a prompt. If the request sets truncate_prompt_tokens, they are already truncated. A
        request with `pooling` has no output tokens.

        Raises:
            InvalidArgument: there are no token ids or too many, or one is outside the vocabulary.
        """
        has_pooling = pooling is not None
        if not token_ids:
            raise InvalidArgument("the prompt is empty; give at least one token")
        if has_pooling and len(token_ids) > self.max_model_len:
            raise InvalidArgument(
                f"the input has {len(token_ids)} tokens and max_model_len is {self.max_model_len}; shorten the input, "
                "set truncate_prompt_tokens, or raise max_model_len"
            )
        if pooling is not None and pooling.is_by_token and self.pooler is not None:
            if self.step_token_id is not None and self.step_token_id not in token_ids:
                raise InvalidArgument(
                    f"input: does not contain {self.pooler.step_token}; this model judges the text before each of "
                    "these tokens, so write one after each step"
                )
            size = pooling.dimensions or self.pooler.size
            if 4 * size * len(token_ids) > MAX_POOLED_BYTES:
                raise InvalidArgument(too_large_error(len(token_ids)))
        if not has_pooling and len(token_ids) >= self.max_model_len:
            raise InvalidArgument(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {self.max_model_len}, which includes at "
                f"least one output token; shorten the prompt to {self.max_model_len - 1} tokens, set "
                "truncate_prompt_tokens, or raise max_model_len"
            )
        # A Python loop is avoided, because a prompt can have 100,000 tokens, and this check blocks the event loop.
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            invalid_id = str(self._invalid_id(token_ids))[:40]
            raise InvalidArgument(
                f"the prompt contains {invalid_id!r}, which is not a token id of this model; use ids from 0 to "
                f"{self.vocab_size - 1}"
            )

    def check_prompt_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Reject more log probabilities of a prompt than a response can contain."""
        if params.prompt_logprobs is None:
            return
        count = self.vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
        if (count + 1) * num_prompt_tokens > MAX_PROMPT_LOGPROBS:
            raise InvalidArgument(
                f"sampling parameter 'prompt_logprobs': got {count} for each of {num_prompt_tokens} tokens; at most "
                f"{MAX_PROMPT_LOGPROBS} in total can be returned, and each prompt token itself counts as one; "
                "request fewer, or shorten the prompt"
            )

    def check_allowed_tokens(self, params: SamplingParams, bad_word_ids: Iterable[list[int]]) -> None:
        """Reject a request if other parameters forbid all of its allowed_token_ids."""
        if not params.allowed_token_ids:
            return
        forbidden = {word[0] for word in bad_word_ids if len(word) == 1}
        if params.min_tokens:
            forbidden |= {*params.stop_token_ids, *self.eos_token_ids}
        if forbidden.issuperset(params.allowed_token_ids):
            raise InvalidArgument(
                "sampling parameter 'allowed_token_ids': bad_words and min_tokens forbid all of these tokens; "
                "allow another token"
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

    def _check_task(self, pooling: PoolingParams | None) -> None:
        """Reject a request that the model cannot answer."""
        pooler = self.pooler
        if pooling is None:
            if self.is_encoder:
                route = _ROUTES["embed" if pooler is None else pooler.task]
                raise InvalidArgument(f"model: is an encoder, so it cannot generate; use {route}")
            if not self.can_generate:
                routes = {"classify": "/v1/classify", "token_classify": "/pooling"}
                route = routes.get("" if pooler is None else pooler.task, "/v1/embeddings")
                raise InvalidArgument(f"model: has no output projection, so it cannot generate; use {route}")
            return
        if pooler is None:
            raise InvalidArgument(
                f"model: only generates, so it has no {_RESULTS[pooling.task]}; start the server with --convert "
                f"{pooling.task.removeprefix('token_')}, or use another model"
            )
        if pooling.task not in pooler.tasks:
            raise InvalidArgument(
                f"model: returns {_RESULTS[pooler.task]}, and not {_RESULTS[pooling.task]}; use "
                f"{_ROUTES[pooler.task]}, or another model"
            )
        if pooling.dimensions is not None:
            self._check_dimensions(pooler, pooling.dimensions)

    def _check_dimensions(self, pooler: PoolerConfig, dimensions: int) -> None:
        if pooler.dimensions is None and dimensions != pooler.size:
            raise InvalidArgument(
                f"dimensions: must be {pooler.size} for this model, got {dimensions}; omit it, or, if the model was "
                "trained with Matryoshka representations, add is_matryoshka or matryoshka_dimensions to its config.json"
            )
        if pooler.dimensions and dimensions not in pooler.dimensions:
            raise InvalidArgument(
                f"dimensions: must be one of {', '.join(map(str, pooler.dimensions))} for this model, got {dimensions}"
            )
        if not 1 <= dimensions <= pooler.size:
            raise InvalidArgument(f"dimensions: must be from 1 to {pooler.size}, got {dimensions}; or omit it")

    def _check_priority(self, priority: int) -> None:
        if abs(priority) > _MAX_PRIORITY:
            raise InvalidArgument(f"priority: must be a 32-bit integer, got {str(priority)[:80]!r}")

    def _check_params(self, params: SamplingParams, stream: bool) -> None:
        if not self.has_tokenizer:
            for name, advice in _TEXT_PARAMETERS.items():
                if getattr(params, name):
                    raise InvalidArgument(
                        f"sampling parameter {name!r}: not possible, because the model has no tokenizer; {advice}"
                    )
        self.parser_names.check_thinking_budget(params.thinking_token_budget)
        if stream and params.num_results > params.n:
            raise InvalidArgument(
                f"sampling parameter 'best_of': the best {params.n} of {params.best_of} outputs are only known at the "
                "end; do not stream, or leave best_of out"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            token_ids: Collection[int] = getattr(params, name) or ()
            if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
                raise InvalidArgument(
                    f"sampling parameter {name!r}: {self._invalid_id(token_ids)} is not a token id of this model; use "
                    f"ids from 0 to {self.vocab_size - 1}"
                )
        # If a request names tokens in logprob_token_ids, their number has its own limit.
        num_top = None if params.logprob_token_ids else params.logprobs
        for name, requested in (("logprobs", num_top), ("prompt_logprobs", params.prompt_logprobs)):
            count = self.vocab_size if requested == -1 else requested or 0
            if count > self.max_logprobs != -1:
                requested_text = f"-1 (all {count} tokens)" if requested == -1 else count
                raise InvalidArgument(
                    f"sampling parameter {name!r}: {requested_text} is more than max_logprobs {self.max_logprobs}; "
                    "request fewer or raise max_logprobs"
                )

    def _invalid_id(self, token_ids: Iterable[int]) -> int:
        return next(i for i in token_ids if not 0 <= i < self.vocab_size)

    def _check_parsing(self, parsing: OutputParsing, params: SamplingParams) -> None:
        if parsing.tool_choice == "none":
            return
        if self.parser_names.tool_call_parser is None:
            raise InvalidArgument(
                "tools: the format of tool calls of this model is unknown; set tool_choice to none, or start the "
                "server with a tool_call_parser"
            )
        if params.structured_outputs is not None and params.structured_outputs.begin_after_token_ids:
            raise InvalidArgument(
                "structured_outputs: begin_after_token_ids cannot be combined with tools, because calls can come "
                "before these tokens; leave it out, or set tool_choice to none"
            )
        if params.structured_outputs is not None and parsing.tool_choice != "auto":
            raise InvalidArgument(
                "tool_choice: a required or named tool leaves no place for an answer in a format; leave out "
                "structured_outputs, or set tool_choice to auto"
            )


_SCORE_ROLES = (re.compile(r"""(["'])query\1"""), re.compile(r"""(["'])document\1"""))
_RESULTS = {
    "embed": "embeddings",
    "classify": "classes",
    "token_embed": "embeddings of tokens",
    "token_classify": "classes of tokens",
}
_ROUTES = {
    "embed": "/v1/embeddings, /v1/score or /v1/rerank",
    "classify": "/v1/classify, /v1/score or /v1/rerank",
    "token_classify": "/pooling",
}
_TEXT_PARAMETERS = {
    "stop": "use stop_token_ids",
    "structured_outputs": "leave it out",
    "bad_words": "use logit_bias",
}
"""Maps parameters that need a tokenizer to the advice for a model that has none."""
