# SPDX-License-Identifier: Apache-2.0
"""LLM: generate offline, in this process, through vLLM's names. No server, no sockets, the same engine."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from quire_engine.admission import check_text_parameters
from quire_engine.engine import Engine
from quire_engine.outputs import CompletionOutput, Logprob, LoRARequest, RequestOutput
from quire_engine.text import Detokenizer, Tokenizer
from quire_spec.config import EngineConfig
from quire_spec.digest import adapter_digest
from quire_spec.errors import InvalidArgument, error_from
from quire_spec.messages import Generate, SequenceResult
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
        self._ids = itertools.count()

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
        jobs: dict[int, _Job] = {}
        try:
            for prompt, param, lora in zip(each, params, loras, strict=True):
                job = self._job(prompt, param, lora)
                adapter = None if lora is None else digests[lora]
                bad = self.tokenizer.bad_word_ids(param.bad_words) if self.tokenizer and param.bad_words else []
                request = Generate(job.id, job.prompt_token_ids, param.to_mapping(), adapter, bad_word_ids=bad)
                self.engine.add(request)
                jobs[job.id] = job
            self._run(jobs, use_tqdm)
        finally:
            self.engine.abort([job.id for job in jobs.values() if job.finish_reason is None])
        return [job.output() for job in jobs.values()]

    def _job(self, prompt: Prompt, params: SamplingParams, lora: LoRARequest | None) -> "_Job":
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
        return _Job(next(self._ids), text, token_ids, params, lora, self.tokenizer)

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

    def _run(self, jobs: "Mapping[int, _Job]", use_tqdm: bool) -> None:
        with tqdm(total=len(jobs), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            num_input = num_output = 0
            while self.engine.has_work:
                self.engine.fetch()
                for result in self.engine.step().results:
                    job = jobs[result.id]
                    if not job.take(result, self.engine.eos_token_ids):
                        continue
                    if result.finish_reason is None:  # a stop string ended it, which the engine cannot see
                        self.engine.abort([job.id])
                    num_input += len(job.prompt_token_ids)
                    num_output += len(job.token_ids)
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(
                        f"input: {num_input / seconds:.1f} tok/s, output: {num_output / seconds:.1f} tok/s",
                        refresh=False,
                    )
                    bar.update()


class _Job:
    """One prompt on its way to a RequestOutput."""

    def __init__(
        self,
        id: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        lora: LoRARequest | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.id = id
        self.prompt_token_ids = prompt_token_ids
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._prompt = prompt
        self._params = params
        self._lora = lora
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = Detokenizer(tokenizer, params, prompt_token_ids)
        self._texts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens: int | None = None
        self._cumulative_logprob = 0.0
        self._stop_reason: int | str | None = None

    def take(self, result: SequenceResult, eos_token_ids: frozenset[int]) -> bool:
        """Add new tokens; True when they were the last.

        Raises:
            QuireError: the engine could not go on with it.
        """
        if result.error_code is not None:
            raise error_from(result.error_code, result.error)
        if result.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *map(self._position, result.prompt_logprobs)]
        if result.num_cached_tokens is not None:
            self._num_cached_tokens = result.num_cached_tokens
        stop_token = result.finish_reason == "stop"
        delta = self._detokenizer.push(result.token_ids, result.finish_reason is not None, stop_token)
        self.token_ids += result.token_ids[: delta.num_tokens]
        self._texts.append(delta.text)
        self._add_logprobs((result.logprobs or [])[: delta.num_tokens])
        self.finish_reason = "stop" if delta.stopped else result.finish_reason
        if delta.stopped:
            self._stop_reason = delta.stop
        elif stop_token and (self._params.ignore_eos or self.token_ids[-1] not in eos_token_ids):
            self._stop_reason = self.token_ids[-1]
        return self.finish_reason is not None

    def output(self) -> RequestOutput:
        """The finished request."""
        wanted = self._params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text="".join(self._texts),
            token_ids=self.token_ids,
            cumulative_logprob=self._cumulative_logprob if wanted else None,
            logprobs=self._logprobs if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            lora_request=self._lora,
        )
        return RequestOutput(
            str(self.id),
            self._prompt,
            self.prompt_token_ids,
            [completion],
            True,
            self._lora,
            self._prompt_logprobs,
            self._num_cached_tokens,
        )

    def _add_logprobs(self, positions: list[list[list[float]]]) -> None:
        for entries in positions:
            self._cumulative_logprob += entries[0][1]
            self._logprobs.append(self._position(entries))

    def _position(self, entries: list[list[float]]) -> dict[int, Logprob]:
        return {int(i): Logprob(p, int(rank), self._text(int(i))) for i, p, rank in entries}

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._tokenizer is not None else None


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
