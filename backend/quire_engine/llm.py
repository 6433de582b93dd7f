# SPDX-License-Identifier: Apache-2.0
"""LLM: generate offline, in this process, through vLLM's names. No server, no sockets, the same engine."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from quire_engine.admission import check_text_parameters
from quire_engine.chat import TEMPLATE_FILE, ChatTemplate, Message, each_conversation, template_source
from quire_engine.engine import Engine
from quire_engine.job import Job
from quire_engine.outputs import LoRARequest, RequestOutput
from quire_engine.prompt import Prompt, PromptParts, each_prompt, per_prompt
from quire_engine.text import Tokenizer
from quire_spec.dataclass_json import read_json_object
from quire_spec.documents.adapter_digest import DigestCache
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.vllm_arguments import from_vllm_arguments
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.protocol.messages import SequenceRequest

_GENERATION_CONFIG = {
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""What generation_config.json recommends, by what it is called here."""


class LLM:
    """A loaded model.

        llm = LLM(model="examples/models/tiny", enable_lora=True)
        outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=32))
        print(outputs[0].outputs[0].text)

    `tokenizer` is the folder of a tokenizer other than the model's own, `chat_template` the text of a template, or a
    file with one. `config` are the fields of EngineConfig, which are vLLM's engine arguments: dtype, device,
    max_model_len, block_size, max_num_seqs, enable_prefix_caching, enable_lora, max_loras, max_lora_rank, seed and so
    on. Arguments of vLLM that change no output, such as enforce_eager, are taken and do nothing.

    Raises:
        ConfigError: an argument is unknown or out of range, or the model cannot be served so; the message names it.
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
            raise ConfigError(f"tokenizer: {str(tokenizer)[:80]!r} is no folder")
        progress = sys.stderr.isatty()
        arguments = from_vllm_arguments({"model": str(model)} | config)
        self.engine = Engine.from_config(EngineConfig.from_json(arguments), progress=progress)
        folder = self.engine.model_folder if tokenizer is None else Path(tokenizer).expanduser()
        self.tokenizer = Tokenizer.find(folder) if tokenizer is None else Tokenizer(folder)
        """None for a model folder without tokenizer.json: it is prompted with token ids."""
        self._tokenizer_folder = folder
        self._chat_template = chat_template
        self._next_id = 0
        self._digests = DigestCache()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            InvalidArgument: the model has none.
        """
        if self.tokenizer is None:
            raise InvalidArgument(
                f"{self._tokenizer_folder} has no tokenizer.json; give prompt_token_ids instead of text"
            )
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends; `generate` takes it when it is given none.

        Raises:
            ConfigError: a value there is out of range.
        """
        return _generation_defaults(self.engine.model_folder)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., "tqdm[NoReturn]"] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched as the engine sees fit; outputs are in the order of the prompts.

        `sampling_params`, `lora_request` and `priority` hold for all prompts, or are lists with one entry per prompt
        (an adapter of None: the base model). `use_tqdm` may be what makes the progress bar. `priority`, lower first,
        is for an engine whose scheduling_policy is priority.

        Raises:
            InvalidArgument: a prompt, a parameter or an adapter is wrong; nothing was generated then.
            QuireError: the engine failed while generating; it can be used again.
        """
        each = each_prompt(prompts)
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        # Copies are checked as a whole, and keep what they are whatever is assigned to the given ones.
        params = [replace(p) for p in per_prompt("sampling_params", default, SamplingParams, len(each))]
        loras = per_prompt("lora_request", lora_request, LoRARequest, len(each), optional=True)
        priorities = per_prompt("priority", 0 if priority is None else priority, int, len(each))
        digests = {lora: self.load_adapter(lora) for lora in dict.fromkeys(loras) if lora is not None}
        jobs: list[Job] = []
        try:
            for prompt, param, lora, rank in zip(each, params, loras, priorities, strict=True):
                first = self._request(prompt, param, None if lora is None else digests[lora], rank)
                text = PromptParts.of(prompt).text
                jobs.append(Job(first, text, param, lora, self.tokenizer, self.engine.eos_token_ids))
                for request in jobs[-1].requests:
                    self.engine.add(request)
            self._run(jobs, use_tqdm)
        finally:
            self.engine.abort([id for job in jobs for id in job.unfinished])
        return [job.output() for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
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
        """Answer one conversation or many: `generate` for the prompts that the model's chat template makes of them.

        A conversation is a list of {"role": ..., "content": ...}; the other arguments are those of `generate` and of
        `ChatTemplate.render`. Without `chat_template`, the one that this object or the model has is used. Templates get
        contents as texts, which `chat_template_content_format` may say ("string") or leave open ("auto").

        Raises:
            InvalidArgument: there is no template, it refuses the messages, or what `generate` refuses.
        """
        if str(chat_template_content_format) not in ("auto", "string"):
            raise InvalidArgument(
                f"chat_template_content_format: {chat_template_content_format!r} is not supported; use auto or string"
            )
        template, tokenizer = self._find_template(chat_template, tools is not None), self.get_tokenizer()
        conversations = each_conversation(messages)
        arguments: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        arguments |= _template_arguments(chat_template_kwargs)
        if taken := sorted(arguments.keys() & {"self", "messages", "documents"}):
            raise InvalidArgument(f"chat_template_kwargs: {taken[0]!r} is not the template's to choose; leave it out")
        texts = [template.render(conversation, **arguments) for conversation in conversations]
        # The template writes the special tokens itself.
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        prompts = [{"prompt": text, "prompt_token_ids": i} for text, i in zip(texts, ids, strict=True)]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, priority)

    def _find_template(self, given: str | Path | None, tools: bool) -> ChatTemplate:
        given = self._chat_template if given is None else given
        template = ChatTemplate.find(self._tokenizer_folder, None if given is None else template_source(given), tools)
        if template is None:
            raise InvalidArgument(
                f"chat: {self._tokenizer_folder} has no chat template ({TEMPLATE_FILE}, or chat_template in "
                "tokenizer_config.json); give chat_template, or use generate"
            )
        return template

    def _request(self, prompt: Prompt, params: SamplingParams, digest: str | None, priority: int) -> SequenceRequest:
        """What the engine is asked for one output of a prompt, parameters excepted."""
        parts = PromptParts.of(prompt)
        check_text_parameters(params, self.tokenizer is not None)
        if priority and self.engine.config.scheduling_policy != "priority":
            raise InvalidArgument(f"priority: {priority}, but scheduling_policy is fcfs; set it to priority")
        most = params.max_prompt_tokens(self.engine.max_model_len)
        token_ids = parts.token_ids
        if token_ids is None:
            assert parts.text is not None
            token_ids = self.get_tokenizer().encode(parts.text, most)
        elif most is not None:
            token_ids = token_ids[-most:]
        bad = self.get_tokenizer().bad_word_ids(params.bad_words) if params.bad_words else []
        id, self._next_id = self._next_id, self._next_id + params.num_sequences
        return SequenceRequest(id, token_ids, {}, digest, parts.cache_salt, bad, priority=priority)

    def load_adapter(self, lora: LoRARequest) -> str:
        """Load an adapter, by what its folder holds now; returns its content digest. `generate` does it when needed.

        Raises:
            InvalidArgument: the folder cannot be read, or holds no adapter that this engine can serve.
        """
        try:
            path = Path(lora.lora_path).expanduser()
            digest = self._digests.get(path)
        # Also for a path with a null character, and one in the home of somebody who is not known.
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidArgument(f"adapter {lora.lora_name!r}: {error}") from error
        if digest not in self.engine.adapters():
            self.engine.add_adapter(digest, path, self.engine.read_adapter(path), pinned=False)
        return digest

    def _run(self, jobs: Sequence[Job], use_tqdm: bool | Callable[..., "tqdm[NoReturn]"]) -> None:
        by_id = {request.id: job for job in jobs for request in job.requests}
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(jobs), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            num_input = num_output = 0
            while self.engine.has_work:
                self.engine.fetch()
                for result in self.engine.step().results:
                    job = by_id[result.id]
                    if job.take(result):
                        self.engine.abort([result.id])
                    if job.unfinished:
                        continue
                    num_input += job.num_input_tokens
                    num_output += job.num_output_tokens
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(
                        f"input: {num_input / seconds:.1f} tok/s, output: {num_output / seconds:.1f} tok/s",
                        refresh=False,
                    )
                    bar.update()


def _template_arguments(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidArgument(f"chat_template_kwargs: {str(given)[:80]!r} is no object of arguments by name")
    return given


def _generation_defaults(folder: Path) -> SamplingParams:
    """What generation_config.json says of sampling, by the rules of vLLM."""
    path = folder / "generation_config.json"
    config = read_json_object(path) if path.exists() else {}
    found = {ours: config[theirs] for theirs, ours in _GENERATION_CONFIG.items() if config.get(theirs) is not None}
    try:
        return SamplingParams(**found)
    except InvalidArgument as error:
        raise ConfigError(f"{path}: {error}") from error
