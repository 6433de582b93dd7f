# SPDX-License-Identifier: Apache-2.0
"""Offline generation with vLLM's API.

It uses the same engine as a pod. However, the engine runs in this process, and there is no server and no socket.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from tqdm import tqdm

from quire_engine.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire_engine.api.inputs import ParsedPrompt, Prompt, as_prompt_list, broadcast_to_prompts
from quire_engine.api.offline_request import OfflineRequest
from quire_engine.api.outputs import CompletionOutput, LoRARequest, RequestOutput
from quire_engine.api.sampling_params import SamplingParams
from quire_engine.core.engine import Engine
from quire_engine.parsers.parser_names import ParserNames
from quire_engine.structured_outputs.grammar_text import to_grammar_text
from quire_engine.text.admission import check_text_parameters
from quire_engine.tokenization.chat_template import (
    ChatMessage,
    ChatTemplate,
    as_conversation_list,
    load_chat_template,
)
from quire_engine.tokenization.chat_template_files import TEMPLATE_FILE, ChatTemplateFiles
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.generation_config import load_default_sampling_params
from quire_spec.constants import AdapterDigest
from quire_spec.documents.adapter_digest import DigestCache
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams as FrozenParams
from quire_spec.engine.vllm_arguments import from_vllm_arguments
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.protocol.messages import SequenceRequest


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
        self.engine = Engine.from_config(EngineConfig.from_json(engine_args), progress=progress)
        tokenizer_folder = self.engine.model_folder if tokenizer is None else Path(tokenizer).expanduser()
        self.engine.input_processor.tokenizer_folder = tokenizer_folder
        self.tokenizer: Tokenizer | None = None
        """None if the model has no tokenizer or skip_tokenizer_init is set; prompts must then be token ids."""
        if not self.engine.config.skip_tokenizer_init:
            load = Tokenizer.from_folder if tokenizer is None else Tokenizer
            self.tokenizer = load(tokenizer_folder)
        self._tokenizer_folder = tokenizer_folder
        self._chat_template = chat_template
        self._next_id = 0
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
        prompt_list = as_prompt_list(prompts)
        default_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        given_params = broadcast_to_prompts("sampling_params", default_params, SamplingParams, len(prompt_list))
        frozen = {id(p): p.freeze() for p in given_params}
        params = [frozen[id(p)] for p in given_params]
        lora_requests = broadcast_to_prompts("lora_request", lora_request, LoRARequest, len(prompt_list), optional=True)
        priorities = broadcast_to_prompts("priority", 0 if priority is None else priority, int, len(prompt_list))
        adapter_digests = {lora: self.load_adapter(lora) for lora in dict.fromkeys(lora_requests) if lora is not None}
        # Each constraint is converted only once, because prompts usually share it, and converting a schema takes about
        # a millisecond.
        constraints = {id(p.structured_outputs): p.structured_outputs for p in params}
        grammars = {key: None if c is None else to_grammar_text(c) for key, c in constraints.items()}
        offline_requests: list[OfflineRequest] = []
        try:
            for prompt, param, lora, request_priority in zip(
                prompt_list, params, lora_requests, priorities, strict=True
            ):
                base_request = self._build_request(
                    prompt, param, None if lora is None else adapter_digests[lora], request_priority
                )
                if param.structured_outputs is not None:
                    base_request = msgspec.structs.replace(
                        base_request,
                        grammar=grammars[id(param.structured_outputs)],
                        begin_after_token_ids=list(param.structured_outputs.begin_after_token_ids),
                    )
                prompt_text = ParsedPrompt.from_prompt(prompt).text
                offline_requests.append(
                    OfflineRequest(base_request, prompt_text, param, lora, self.tokenizer, self.engine.eos_token_ids)
                )
                for request in offline_requests[-1].sequence_requests:
                    self.engine.add(request)
            self._run_engine(offline_requests, use_tqdm)
        finally:
            for offline_request in offline_requests:
                self.engine.abort(offline_request.unfinished_sequence_ids)
        return [offline_request.to_request_output() for offline_request in offline_requests]

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
        """Answer one or many conversations: render each with the chat template, then call `generate`.

        A conversation is a list of {"role": ..., "content": ...}. For the other arguments see `generate` and
        `ChatTemplate.render`. If `chat_template` is None, the template that was passed to the constructor is used. If
        there is none, the template of the model is used. Templates always receive contents as text, so
        `chat_template_content_format` must be "string" or "auto".

        Raises:
            InvalidArgument: there is no chat template, the template rejects the messages, or `generate` rejects an
                argument.
        """
        if str(chat_template_content_format) not in ("auto", "string"):
            raise InvalidArgument(
                f"chat_template_content_format: {chat_template_content_format!r} is not supported; use auto or string"
            )
        template, tokenizer = self._resolve_chat_template(chat_template, tools is not None), self.get_tokenizer()
        conversations = as_conversation_list(messages)
        template_kwargs: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        template_kwargs |= _validate_template_kwargs(chat_template_kwargs)
        if reserved_names := sorted(template_kwargs.keys() & {"self", "messages", "documents"}):
            raise InvalidArgument(f"chat_template_kwargs: {reserved_names[0]!r} cannot be set; leave it out")
        texts = [template.render(conversation, **template_kwargs) for conversation in conversations]
        # The template renders the special tokens itself.
        token_id_lists = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        prompts = [
            {"prompt": text, "prompt_token_ids": token_ids}
            for text, token_ids in zip(texts, token_id_lists, strict=True)
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, priority)

    def _resolve_chat_template(self, chat_template: str | Path | None, has_tools: bool) -> ChatTemplate:
        chat_template = self._chat_template if chat_template is None else chat_template
        template = ChatTemplate.from_folder(
            self._tokenizer_folder, None if chat_template is None else load_chat_template(chat_template), has_tools
        )
        if template is None:
            raise InvalidArgument(
                f"chat: {self._tokenizer_folder} has no chat template ({TEMPLATE_FILE}, or chat_template in "
                "tokenizer_config.json); give chat_template, or use generate"
            )
        return template

    def _build_request(
        self, prompt: Prompt, params: FrozenParams, adapter_digest: AdapterDigest | None, priority: int
    ) -> SequenceRequest:
        """Return the engine request for one output of a prompt; its sampling parameters are set later."""
        parsed_prompt = ParsedPrompt.from_prompt(prompt)
        check_text_parameters(params, self.tokenizer is not None)
        if priority and self.engine.config.scheduling_policy != "priority":
            raise InvalidArgument(
                f"priority: got {priority}, but scheduling_policy is fcfs; set scheduling_policy to priority"
            )
        token_ids = parsed_prompt.token_ids
        if token_ids is None:
            assert parsed_prompt.text is not None
            token_ids = self.get_tokenizer().encode(
                parsed_prompt.text,
                params.max_prompt_tokens(self.engine.max_model_len),
                truncation_side=params.truncation_side,
            )
        else:
            token_ids = params.truncate_prompt(token_ids, self.engine.max_model_len)
        bad_word_ids = self.get_tokenizer().bad_word_ids(params.bad_words) if params.bad_words else []
        reasoning_marks: list[list[int]] = []
        if params.thinking_token_budget is not None:
            self._parser_names.check_thinking_budget(params.thinking_token_budget)
            reasoning_marks = self._parser_names.reasoning_mark_ids(self.get_tokenizer())
        sequence_id, self._next_id = self._next_id, self._next_id + params.num_sequences
        return SequenceRequest(
            sequence_id,
            token_ids,
            params,
            adapter_digest,
            parsed_prompt.cache_salt,
            bad_word_ids,
            priority=priority,
            reasoning_marks=reasoning_marks,
        )

    @cached_property
    def _parser_names(self) -> ParserNames:
        config, templates = self.engine.config, ChatTemplateFiles.from_folder(self._tokenizer_folder)
        names = ParserNames.detect(templates.sources, self.get_tokenizer().added_tokens.values())
        return names.configured(config.tool_call_parser, config.reasoning_parser)

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
        if adapter_digest not in self.engine.adapter_states():
            self.engine.add_adapter(adapter_digest, path, self.engine.read_adapter(path), slot_pinned=False)
        return adapter_digest

    def _run_engine(
        self, offline_requests: Sequence[OfflineRequest], use_tqdm: bool | Callable[..., "tqdm[NoReturn]"]
    ) -> None:
        offline_request_by_sequence = {
            sequence_id: offline_request
            for offline_request in offline_requests
            for sequence_id in offline_request.sequence_ids
        }
        create_progress_bar = use_tqdm if callable(use_tqdm) else tqdm
        with create_progress_bar(
            total=len(offline_requests), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True
        ) as progress_bar:
            num_input_tokens = num_output_tokens = 0
            while self.engine.has_work:
                self.engine.read_pending_adapters()
                step = self.engine.step()
                for sequence_id, queued_s in step.started:
                    # If an earlier call failed, its sequences can still return results. They are ignored.
                    if (started := offline_request_by_sequence.get(sequence_id)) is not None:
                        started.mark_started(queued_s)
                for result in step.results:
                    offline_request = offline_request_by_sequence[result.id]
                    if offline_request.update(result):
                        self.engine.abort([result.id])
                    if offline_request.unfinished_sequence_ids:
                        continue
                    num_input_tokens += offline_request.num_input_tokens
                    num_output_tokens += offline_request.num_output_tokens
                    elapsed_s = max(progress_bar.format_dict["elapsed"], 1e-9)
                    progress_bar.set_postfix_str(
                        f"input: {num_input_tokens / elapsed_s:.1f} tok/s, output: "
                        f"{num_output_tokens / elapsed_s:.1f} tok/s",
                        refresh=False,
                    )
                    progress_bar.update()


def _validate_template_kwargs(template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping) or not all(isinstance(name, str) for name in template_kwargs):
        raise InvalidArgument(
            f"chat_template_kwargs: must be an object of arguments by name, got {str(template_kwargs)[:80]!r}"
        )
    return template_kwargs
