# SPDX-License-Identifier: Apache-2.0
"""Offline generation with vLLM's API.

It uses the same engine as a pod. However, the engine runs in this process, and there is no server and no socket.
"""

import gc
import json
import struct
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from msgspec import Raw, structs
from tqdm import tqdm

from quire_engine.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire_engine.api.inline_workers import InlineGrammarChecker, InlineImageReader, InlineRenderer
from quire_engine.api.inputs import ParsedPrompt, Prompt, as_prompt_list, broadcast_to_prompts
from quire_engine.api.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    LoRARequest,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from quire_engine.api.request_runner import ProgressBar, RequestRunner, RunningRequest
from quire_engine.api.sampling_params import SamplingParams
from quire_engine.core.engine import Engine
from quire_engine.images.support import why_no_images
from quire_engine.requests.limits import RequestLimits
from quire_engine.requests.processor import RequestProcessor
from quire_engine.tokenization.chat_template import ChatMessage, as_conversation_list, load_chat_template
from quire_engine.tokenization.chat_template_files import ChatTemplateFiles
from quire_engine.tokenization.control_tokens import split_marked
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.generation_config import load_default_sampling_params
from quire_spec.constants import AdapterDigest
from quire_spec.documents.adapter_digest import CHAT_TEMPLATE_FILE, DigestCache
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.pooling_params import PoolingParams, PoolingTask, cosine
from quire_spec.engine.sampling_params import SamplingParams as FrozenParams
from quire_spec.engine.vllm_arguments import from_vllm_arguments
from quire_spec.errors import ConfigError, InvalidArgument, truncated_repr
from quire_spec.model.pooler_config import PoolerConfig
from quire_spec.protocol.messages import Conversation, GenerateRequest, to_raw
from quire_spec.protocol.parsed_output import OutputParsing


class LLM:
    """A loaded model.

        llm = LLM(model="examples/models/tiny", enable_lora=True)
        outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=32))
        print(outputs[0].outputs[0].text)

    `tokenizer` is the folder of a tokenizer to use instead of the model's own. `chat_template` is the text or the
    path of a template. `config` contains fields of EngineConfig, which are vLLM's engine arguments: dtype, device,
    max_model_len, block_size, max_num_seqs, enable_prefix_caching, enable_lora, max_loras, max_lora_rank, seed and so
    on. Arguments of vLLM that do not change the output, such as enforce_eager, are accepted and ignored.

    Raises:
        ConfigError: an argument is unknown, out of range, or not possible with this model; the message names it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        chat_template: str | Path | None = None,
        **config: Any,
    ) -> None:
        if not isinstance(tokenizer, str | Path | None):
            raise ConfigError(f"tokenizer: must be a folder, got {str(tokenizer)[:80]!r}")
        progress = sys.stderr.isatty()
        engine_args = from_vllm_arguments({"model": str(model)} | config)
        engine_config = EngineConfig.from_json(engine_args)
        if engine_config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size: LLM runs one core, got {engine_config.data_parallel_size}; use `quire batch` or "
                "`quire serve`, or omit the argument"
            )
        self.engine = Engine.from_config(engine_config, progress=progress)
        tokenizer_folder = self.engine.model_folder if tokenizer is None else Path(tokenizer).expanduser()
        self.engine.input_processor.tokenizer_folder = tokenizer_folder
        self.tokenizer: Tokenizer | None = None
        """None if the model has no tokenizer or skip_tokenizer_init is set; prompts must then be token ids."""
        if not self.engine.config.skip_tokenizer_init:
            load = Tokenizer.from_folder if tokenizer is None else Tokenizer
            self.tokenizer = load(tokenizer_folder)
        self._tokenizer_folder = tokenizer_folder
        self._chat_template = chat_template
        self._digest_cache = DigestCache()
        # Freezing keeps garbage collections from traversing the model in the middle of a step, as in core/process.py.
        # When the LLM is deleted, its objects can be collected again.
        gc.collect()
        gc.freeze()
        weakref.finalize(self, gc.unfreeze)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            InvalidArgument: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidArgument(
                f"prompt: {self._tokenizer_folder} has no tokenizer; give prompt_token_ids instead of text"
            )
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `generate` uses by default.

        They come from the file that the argument `generation_config` selects.

        Raises:
            ConfigError: a value in the file is out of range.
        """
        defaults = load_default_sampling_params(self.engine.model_folder, self.engine.config.generation_config)
        return SamplingParams(**defaults.to_mapping())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for one or many prompts, and return them in the order of the prompts.

        The engine runs the prompts in batches.

        Each of `sampling_params`, `lora_request` and `priority` is either one value for all prompts, or a list with one
        entry per prompt. If `lora_request` is None, the base model is used. `use_tqdm` can be a function that creates
        the progress bar. `priority` requires the scheduling_policy `priority`; requests with lower values run first.

        Raises:
            InvalidArgument: a prompt, a parameter or an adapter is invalid; nothing was generated.
            QuireError: the engine failed while generating; it remains usable.
        """
        parsed_prompts = [ParsedPrompt.from_prompt(prompt) for prompt in as_prompt_list(prompts)]
        inputs: list[dict[str, Any]] = [
            {
                "prompt": prompt.text if prompt.token_ids is None else None,
                "prompt_token_ids": prompt.token_ids,
                "cache_salt": prompt.cache_salt,
                "images": prompt.images,
            }
            for prompt in parsed_prompts
        ]
        if any(prompt.token_ids is None for prompt in parsed_prompts):
            self.get_tokenizer()
        options = self._options(len(inputs), sampling_params, lora_request, priority)
        running = self._run(inputs, options, use_tqdm)
        return [
            request.to_request_output(prompt.text, lora)
            for request, prompt, lora in zip(running, parsed_prompts, options.lora_requests, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of each prompt. For the other arguments see `generate`.

        Raises:
            InvalidArgument: the model does not return embeddings (see `convert` in EngineConfig), or a prompt, a
                parameter or an adapter is invalid.
        """
        params = structs.replace(pooling_params or PoolingParams(), task="embed")
        outputs = self._pool(prompts, use_tqdm, params, lora_request)
        return [output.with_outputs(lambda numbers: EmbeddingOutput(_floats(numbers))) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of the classes for each prompt. The arguments and errors are those of `embed`."""
        params = structs.replace(pooling_params or PoolingParams(), task="classify")
        outputs = self._pool(prompts, use_tqdm, params, lora_request)
        return [output.with_outputs(lambda numbers: ClassificationOutput(_floats(numbers))) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a tensor for each prompt; with the tasks token_embed and token_classify, it has a row for each token.
        `pooling_task` replaces `pooling_params.task`. The other arguments and the errors are those of `embed`."""
        params = pooling_params or PoolingParams()
        params = structs.replace(params, task=pooling_task or params.task)
        outputs = self._pool(prompts, use_tqdm, params, lora_request)
        step, by_token = self._processor.limits.step_token_id, params.is_by_token
        ids = [output.prompt_token_ids if by_token else [] for output in outputs]
        rows = [len(tokens) if step is None else tokens.count(step) for tokens in ids]
        return [output.with_outputs(partial(_to_output, num_rows=n)) for output, n in zip(outputs, rows, strict=True)]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the score of each pair of texts; a single text in `data_1` belongs to all pairs.

        An encoder with the head of a classifier reads both texts in one prompt. With a model for embeddings, the score
        is the cosine of both, and `prompt_token_ids` are those of the second text. The other arguments are those of
        `embed`.

        Raises:
            InvalidArgument: the numbers of texts differ, the model has several classes, it is a decoder that
                classifies, or a reason of `embed`.
        """
        firsts, seconds = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
        if len(firsts) != len(seconds):
            raise InvalidArgument(f"data_1: has {len(firsts)} texts and data_2 has {len(seconds)}; give equally many")
        limits = self._processor.limits
        if limits.pooler is None or limits.pooler.task == "embed":
            params = structs.replace(pooling_params or PoolingParams(), task="embed")
            vectors = [self._pool(texts, use_tqdm, params, lora_request) for texts in (firsts, seconds)]
            scores = [cosine(_floats(a.outputs), _floats(b.outputs)) for a, b in zip(*vectors, strict=True)]
            return [
                output.with_outputs(lambda _, score=score: ScoringOutput(score))  # type: ignore[misc]
                for output, score in zip(vectors[1], scores, strict=True)
            ]
        if not limits.is_encoder:
            raise InvalidArgument("model: a decoder reads both texts in one prompt; write the prompt, and use classify")
        params = structs.replace(pooling_params or PoolingParams(), task="classify")
        inputs: list[dict[str, Any]] = [
            {"prompt": first, "second_text": second, "pooling": params}
            for first, second in zip(firsts, seconds, strict=True)
        ]
        options = self._options(len(inputs), SamplingParams(max_tokens=1), lora_request, None)
        outputs = [request.to_pooling_output() for request in self._run(inputs, options, use_tqdm)]
        if outputs and (num_classes := len(outputs[0].outputs) // 4) != 1:
            raise InvalidArgument(f"model: has {num_classes} classes, and a score needs one; use classify")
        return [output.with_outputs(lambda numbers: ScoringOutput(_floats(numbers)[0])) for output in outputs]

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"],
        params: PoolingParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[PoolingRequestOutput[bytes]]:
        parsed_prompts = [ParsedPrompt.from_prompt(prompt) for prompt in as_prompt_list(prompts)]
        inputs: list[dict[str, Any]] = [
            {
                "prompt": prompt.text if prompt.token_ids is None else None,
                "prompt_token_ids": prompt.token_ids,
                "cache_salt": prompt.cache_salt,
                "pooling": params,
            }
            for prompt in parsed_prompts
        ]
        options = self._options(len(inputs), SamplingParams(max_tokens=1), lora_request, None)
        return [request.to_pooling_output() for request in self._run(inputs, options, use_tqdm)]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the best outputs of one or many prompts; all searches run in one batch.

        `generate` also runs beam searches, if it is called with SamplingParams(use_beam_search=True). It supports
        further parameters, such as stop strings. `concurrency_limit` is accepted and ignored, because the scheduler
        limits the number of beams.

        Raises:
            InvalidArgument: a prompt, a parameter or an adapter is invalid; nothing was generated.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument(f"params: must be BeamSearchParams, got {type(params).__name__}")
        outputs = self.generate(prompts, params.to_sampling_params(), use_tqdm, lora_request)
        return [
            BeamSearchOutput([self._beam(output, completion) for completion in output.outputs]) for output in outputs
        ]

    def _beam(self, output: RequestOutput, completion: CompletionOutput) -> BeamSearchSequence:
        assert completion.cumulative_logprob is not None
        tokens = output.prompt_token_ids + completion.token_ids
        return BeamSearchSequence(
            tokens,
            completion.cumulative_logprob,
            None if self.tokenizer is None else self.tokenizer.decode(tokens),
            completion.finish_reason,
            completion.stop_reason,
            completion.lora_request,
        )

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many conversations, each rendered with the chat template.

        A conversation is a list of {"role": ..., "content": ...}. For the other arguments see `generate` and
        `ChatTemplate.render`. If `chat_template` is None, the first template that exists is used: the adapter's
        chat_template.jinja, the template that was passed to the constructor, the template of the model. Templates
        always receive contents as text, so `chat_template_content_format` must be "string" or "auto".

        As on the server, control tokens in the messages are plain text, and a constraint applies to the answer after
        the reasoning. The text of an output contains the reasoning and the tool calls.

        Raises:
            InvalidArgument: there is no chat template, the template rejects the messages, or `generate` rejects an
                argument.
        """
        if str(chat_template_content_format) not in ("auto", "string"):
            raise InvalidArgument(
                f"chat_template_content_format: {chat_template_content_format!r} is not supported; use auto or string"
            )
        template = None if chat_template is None else load_chat_template(chat_template)
        arguments: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        arguments |= _validate_template_kwargs(chat_template_kwargs)
        if reserved_names := sorted(arguments.keys() & {"self", "messages", "documents"}):
            raise InvalidArgument(f"chat_template_kwargs: {reserved_names[0]!r} cannot be set; leave it out")
        tools = arguments.pop("tools")
        conversation = Conversation(
            messages=Raw(),
            tools=_to_raw(tools, "tools"),
            add_generation_prompt=bool(arguments.pop("add_generation_prompt")),
            continue_final_message=bool(arguments.pop("continue_final_message")),
            template_kwargs=_to_raw(arguments, "chat_template_kwargs"),
        )
        chats = [
            structs.replace(conversation, messages=_messages_to_raw(chat)) for chat in as_conversation_list(messages)
        ]
        options = self._options(len(chats), sampling_params, lora_request, priority)
        own: dict[LoRARequest | None, str | None] = {
            lora: _adapter_template(lora) for lora in dict.fromkeys(options.lora_requests) if lora is not None
        }
        templates = [own.get(lora) if template is None else template for lora in options.lora_requests]
        if None in templates and self._template_files.source(bool(tools)) is None:
            raise InvalidArgument(
                f"chat: {self._tokenizer_folder} has no chat template ({CHAT_TEMPLATE_FILE}, or chat_template in "
                "tokenizer_config.json); give chat_template, or use generate"
            )
        self.get_tokenizer()
        inputs = [
            {"chat": chat, "parsing": self._output_parsing(tools, params)}
            for chat, params in zip(chats, options.params, strict=True)
        ]
        running = self._run(inputs, options, use_tqdm, templates)
        return [
            request.to_request_output("".join(split_marked(request.prepared.prompt or "")), lora)
            for request, lora in zip(running, options.lora_requests, strict=True)
        ]

    def _options(
        self,
        num_prompts: int,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        priority: int | Sequence[int] | None,
    ) -> "_Options":
        """Check the arguments that are one value for all prompts or a list with one value per prompt."""
        default_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        given_params = broadcast_to_prompts("sampling_params", default_params, SamplingParams, num_prompts)
        frozen = {id(params): params.freeze() for params in given_params}
        return _Options(
            [frozen[id(params)] for params in given_params],
            broadcast_to_prompts("lora_request", lora_request, LoRARequest, num_prompts, optional=True),
            broadcast_to_prompts("priority", 0 if priority is None else priority, int, num_prompts),
        )

    def _run(
        self,
        inputs: Sequence[dict[str, Any]],
        options: "_Options",
        use_tqdm: ProgressBar,
        templates: Sequence[str | None] | None = None,
    ) -> list[RunningRequest]:
        """Run one request for each entry of `inputs`, which contains the fields of a GenerateRequest."""
        loras = options.lora_requests
        digests = {lora: self.load_adapter(lora) for lora in dict.fromkeys(loras) if lora is not None}
        empty: dict[str, Any] = {"prompt": None, "prompt_token_ids": None}
        requests = [
            GenerateRequest(id=i, model="", params=params, stream=False, priority=priority, **(empty | fields))
            for i, (fields, params, priority) in enumerate(zip(inputs, options.params, options.priorities, strict=True))
        ]
        adapter_digests = [None if lora is None else digests[lora] for lora in loras]
        return self._runner.run(requests, adapter_digests, templates or [None] * len(inputs), use_tqdm)

    def _output_parsing(self, tools: Sequence[Mapping[str, Any]] | None, params: FrozenParams) -> OutputParsing:
        """Return how the server would parse the output of a conversation. This decides what a constraint applies to.

        Tools whose calls the model cannot write in a known form are only given to the template.
        """
        own = params.structured_outputs
        are_functions = isinstance(tools, Sequence) and all(
            isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
        )
        can_call = bool(tools) and are_functions and self._processor.limits.parser_names.tool_call_parser is not None
        return OutputParsing("auto" if can_call and not (own and own.begin_after_token_ids) else "none")

    @cached_property
    def _template_files(self) -> ChatTemplateFiles:
        files = ChatTemplateFiles.from_folder(self._tokenizer_folder)
        if self._chat_template is None:
            return files
        return replace(files, default=load_chat_template(self._chat_template), tool_use=None)

    @cached_property
    def _processor(self) -> RequestProcessor:
        engine, tokenizer, templates = self.engine, self.tokenizer, self._template_files
        config, shape = engine.config, engine.shape
        pooler = PoolerConfig.load(engine.model_folder, shape, config.convert, config.pooling_type)
        no_images = why_no_images(config, shape, engine.model_folder)
        limits = RequestLimits.from_config(config, shape, tokenizer, engine.eos_token_ids, templates, pooler, no_images)
        # A prompt of any length is tokenized, because truncate_prompt_tokens can shorten it.
        limits = replace(limits, max_prompt_bytes=sys.maxsize)
        renderer = None if tokenizer is None else InlineRenderer(templates, tokenizer)
        images = None if limits.images is None else InlineImageReader(engine.model_folder, limits.images)
        return RequestProcessor(limits, tokenizer, renderer, InlineGrammarChecker(), image_reader=images)

    @cached_property
    def _runner(self) -> RequestRunner:
        return RequestRunner(self.engine, self._processor)

    def load_adapter(self, lora: LoRARequest) -> AdapterDigest:
        """Load the current content of an adapter's folder and return its digest. `generate` calls this when needed.

        Raises:
            InvalidArgument: the folder cannot be read, or does not contain an adapter that this engine can serve.
        """
        try:
            path = Path(lora.lora_path).expanduser()
            adapter_digest = self._digest_cache.get(path)
        # ValueError is raised if the path contains a null byte, and RuntimeError if it starts with the home directory
        # of an unknown user.
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidArgument(f"adapter {lora.lora_name!r}: {error}") from error
        if adapter_digest in self.engine.adapter_states():
            # The adapter may have been registered from another folder, which no longer exists or has other content.
            self.engine.set_adapter_path(adapter_digest, path)
        else:
            packed_adapter = self.engine.read_adapter(path, adapter_digest)
            self.engine.add_adapter(adapter_digest, path, packed_adapter, slot_pinned=False)
        return adapter_digest


def _adapter_template(lora: LoRARequest) -> str | None:
    """Return the text of the adapter's own chat template, or None if it has none."""
    path = Path(lora.lora_path) / CHAT_TEMPLATE_FILE
    try:
        return load_chat_template(path) if path.expanduser().exists() else None
    # RuntimeError is raised if the path starts with the home directory of an unknown user, and ValueError if it
    # contains a null byte.
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"adapter {lora.lora_name!r}: {error}") from error


class _Options(NamedTuple):
    """Arguments of a call, with one value for each prompt."""

    params: list[FrozenParams]
    lora_requests: list[LoRARequest | None]
    priorities: list[int]


def _floats(numbers: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(numbers) // 4}f", numbers))


def _to_output(numbers: bytes, num_rows: int) -> PoolingOutput:
    """Return a tensor [num_rows, size], or [size] without rows."""
    # Imported here, so that importing LLM does not import torch.
    import torch

    tensor = torch.frombuffer(bytearray(numbers), dtype=torch.float32)
    return PoolingOutput(tensor.view(num_rows, -1) if num_rows else tensor)


def _messages_to_raw(messages: Sequence[ChatMessage]) -> Raw:
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidArgument(
                f'messages: each must be an object such as {{"role": "user", "content": "Hello"}}, got '
                f"{truncated_repr(message)}"
            )
        content = message.get("content")
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        if any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts):
            raise InvalidArgument("messages: images are not possible here; use generate with multi_modal_data")
    return _to_raw(messages, "messages")


def _to_raw(value: object, name: str) -> Raw:
    """Encode a JSON value. Mappings of all types are accepted."""
    try:
        return to_raw(json.loads(json.dumps(value, default=dict)), name)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{name}: must be a JSON value ({error})") from None


def _validate_template_kwargs(template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(name, str) for name in template_kwargs):
        raise InvalidArgument(
            f"chat_template_kwargs: must be an object of arguments by name, got {str(template_kwargs)[:80]!r}"
        )
    return template_kwargs
