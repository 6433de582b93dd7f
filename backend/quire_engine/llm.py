# SPDX-License-Identifier: Apache-2.0
"""LLM: generate offline, in this process, through vLLM's names. No server, no sockets, the same engine."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from quire_engine.admission import check_text_parameters
from quire_engine.engine import Engine
from quire_engine.job import Job
from quire_engine.outputs import LoRARequest, RequestOutput
from quire_engine.text import Tokenizer
from quire_spec.config import EngineConfig
from quire_spec.digest import adapter_digest
from quire_spec.errors import InvalidArgument
from quire_spec.messages import Generate
from quire_spec.sampling import SamplingParams

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, {"prompt": text}, {"prompt_token_ids": ids}, or token ids."""


class LLM:
    """A loaded model.

        llm = LLM(model="examples/models/tiny", enable_lora=True)
        outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=32))
        print(outputs[0].outputs[0].text)

    `config` are the fields of EngineConfig, which are vLLM's engine arguments: dtype, device, max_model_len,
    block_size, max_num_seqs, enable_prefix_caching, enable_lora, max_loras, max_lora_rank, seed and so on.

    Raises:
        ConfigError: a field is unknown or out of range, or the model cannot be served so; the message names it.
    """

    def __init__(self, model: str | Path, **config: Any) -> None:
        progress = sys.stderr.isatty()
        self.engine = Engine.from_config(EngineConfig.from_json({"model": str(model)} | config), progress=progress)
        self.tokenizer = Tokenizer.find(self.engine.model_folder)
        """None for a model folder without tokenizer.json: it is prompted with token ids."""
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched as the engine sees fit; outputs are in the order of the prompts.

        `sampling_params` and `lora_request` hold for all prompts, or are lists with one entry per prompt (None: the
        base model). None is `SamplingParams()`.

        Raises:
            InvalidArgument: a prompt, a parameter or an adapter is wrong; nothing was generated then.
            QuireError: the engine failed while generating; it can be used again.
        """
        each = _prompts(prompts)
        default = SamplingParams() if sampling_params is None else sampling_params
        params = _per_prompt("sampling_params", default, SamplingParams, len(each))
        loras = _per_prompt("lora_request", lora_request, LoRARequest, len(each))
        digests = {lora: self.load_adapter(lora) for lora in dict.fromkeys(loras) if lora is not None}
        jobs: list[Job] = []
        try:
            for prompt, param, lora in zip(each, params, loras, strict=True):
                job = self._job(prompt, param, lora, None if lora is None else digests[lora])
                jobs.append(job)
                for request in job.requests:
                    self.engine.add(request)
            self._run(jobs, use_tqdm)
        finally:
            self.engine.abort([id for job in jobs for id in job.unfinished])
        return [job.output() for job in jobs]

    def _job(self, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None, digest: str | None) -> Job:
        text, token_ids = _parts(prompt)
        check_text_parameters(params, self.tokenizer is not None)
        most = params.max_prompt_tokens(self.engine.max_model_len)
        if token_ids is None:
            if self.tokenizer is None:
                raise InvalidArgument(
                    f"prompt: {self.engine.model_folder} has no tokenizer.json; give prompt_token_ids instead of text"
                )
            assert text is not None
            token_ids = self.tokenizer.encode(text, most)
        elif most is not None:
            token_ids = token_ids[-most:]
        bad = self.tokenizer.bad_word_ids(params.bad_words) if self.tokenizer and params.bad_words else []
        first = Generate(self._next_id, token_ids, {}, digest, bad_word_ids=bad)
        self._next_id += params.num_sequences
        return Job(first, text, params, lora, self.tokenizer, self.engine.eos_token_ids)

    def load_adapter(self, lora: LoRARequest) -> str:
        """Load an adapter, by what its folder holds now; returns its content digest. `generate` does it when needed.

        Raises:
            InvalidArgument: the folder cannot be read, or holds no adapter that this engine can serve.
        """
        path = Path(lora.lora_path).expanduser()
        try:
            digest = adapter_digest(path)
        except OSError as error:
            raise InvalidArgument(f"adapter {lora.lora_name!r}: {error}") from error
        if digest not in self.engine.adapters():
            self.engine.add_adapter(digest, path, self.engine.read_adapter(path), pinned=False)
        return digest

    def _run(self, jobs: Sequence[Job], use_tqdm: bool) -> None:
        by_id = {request.id: job for job in jobs for request in job.requests}
        with tqdm(total=len(jobs), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
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


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [cast(Prompt, prompts)] if single else list(cast(Sequence[Prompt], prompts))


def _parts(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """Text and token ids of a prompt, one of them None."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, list(prompt)
    if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
        raise InvalidArgument(f"prompt: unknown key {unknown[0]!r}; use 'prompt' or 'prompt_token_ids'")
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is None and not isinstance(text, str):
        raise InvalidArgument(f"prompt: {prompt!r} has neither a text 'prompt' nor 'prompt_token_ids'")
    return text, None if token_ids is None else list(token_ids)


def _per_prompt(name: str, value: Any, kind: type[Any], count: int) -> list[Any]:
    """One value for all prompts, or a list with one each."""
    values = [value] * count if value is None or isinstance(value, kind) else list(value)
    if len(values) != count:
        raise InvalidArgument(f"{name}: {len(values)} entries for {count} prompts; give one, or one per prompt")
    return values
