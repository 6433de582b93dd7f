# SPDX-License-Identifier: Apache-2.0
"""Runs requests on an engine in this process, with the request layer of the text process. `LLM` owns it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NoReturn

from tqdm import tqdm

from quire_engine.api.outputs import (
    CompletionOutput,
    Logprob,
    LoRARequest,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from quire_engine.core.engine import Engine
from quire_engine.requests.processor import PreparedRequest, RequestProcessor, run_without_waiting
from quire_engine.requests.request_adapter import RequestAdapter
from quire_engine.requests.request_state import RequestState
from quire_spec.constants import AdapterDigest
from quire_spec.errors import error_from_code
from quire_spec.protocol.messages import GenerateRequest, OutputDelta, SequenceDelta, TokenLogprob

ProgressBar = bool | Callable[..., "tqdm[NoReturn]"]
"""Whether a progress bar is shown, or the function that creates it."""


@dataclass(slots=True)
class RunningRequest:
    """A request and its outputs so far."""

    state: RequestState
    prepared: PreparedRequest
    arrival_time: float
    """Seconds since the epoch."""
    deltas: list[OutputDelta] = field(default_factory=list)
    """One delta for each finished output."""

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have finished."""
        return bool(self.deltas) and self.deltas[-1].final

    @property
    def unfinished_sequence_ids(self) -> list[int]:
        """Ids of the sequences that the engine still runs."""
        outputs = zip(self.state.sequence_ids, self.state.completions, strict=True)
        return [sequence_id for sequence_id, completion in outputs if completion.finish_reason is None]

    def update(self, result: SequenceDelta) -> bool:
        """Add a result of the engine. Return True if a stop string ended the output.

        The caller must then abort the sequence: the engine core does not search for stop strings.

        Raises:
            QuireError: the engine reported an error.
        """
        if result.error_code is not None:
            raise error_from_code(result.error_code, result.error)
        self.deltas += self.state.update(result, time.monotonic())
        return self.state.completion(result.id).finish_reason is not None and result.finish_reason is None

    def to_request_output(self, prompt: str | None, lora_request: LoRARequest | None) -> RequestOutput:
        """Return the result; the request has finished. If best_of exceeds n, the most likely outputs come first."""
        state, deltas = self.state, sorted(self.deltas, key=attrgetter("index"))
        prompt_logprobs = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
        queued_ts = state.arrival_time
        last_token_times = [c.last_token_time for c in state.completions if c.last_token_time is not None]
        return RequestOutput(
            request_id=str(state.sequence_ids.start),
            prompt=prompt,
            prompt_token_ids=self.prepared.prompt_token_ids,
            outputs=[_build_completion_output(delta, lora_request) for delta in deltas],
            finished=True,
            lora_request=lora_request,
            prompt_logprobs=None
            if prompt_logprobs is None
            else [None if position is None else _by_token(position) for position in prompt_logprobs],
            num_cached_tokens=self.deltas[-1].num_cached_tokens,
            metrics=RequestMetrics(
                self.arrival_time,
                queued_ts,
                queued_ts if state.start_time is None else state.start_time,
                queued_ts if state.first_token_time is None else state.first_token_time,
                max(last_token_times, default=queued_ts),
                state.num_output_tokens,
            ),
        )

    def to_pooling_output(self) -> PoolingRequestOutput[bytes]:
        """Return the numbers of a request with `pooling`, which has finished: float32 in little-endian order."""
        state = self.state
        return PoolingRequestOutput(
            request_id=str(state.sequence_ids.start),
            outputs=self.deltas[-1].pooled or b"",
            prompt_token_ids=self.prepared.prompt_token_ids,
            finished=True,
            num_cached_tokens=state.num_cached_tokens,
        )


class RequestRunner:
    """Runs the requests of one call of `LLM`."""

    def __init__(self, engine: Engine, processor: RequestProcessor) -> None:
        self._engine = engine
        self._processor = processor
        self._next_sequence_id = 0

    def run(
        self,
        requests: Sequence[GenerateRequest],
        adapter_digests: Sequence[AdapterDigest | None],
        templates: Sequence[str | None],
        use_tqdm: ProgressBar,
    ) -> list[RunningRequest]:
        """Run requests until all of them have finished. `templates` contains the chat template that each
        conversation uses instead of the model's.

        Raises:
            InvalidArgument: a request is invalid; nothing was generated.
            QuireError: the engine failed while generating; it remains usable.
        """
        running: list[RunningRequest] = []
        try:
            for request, adapter_digest, template in zip(requests, adapter_digests, templates, strict=True):
                prepared = self._prepare(request, template)
                state = RequestState(
                    self._next_sequence_id, request, RequestAdapter(digest=adapter_digest), time.monotonic()
                )
                self._next_sequence_id += request.params.num_sequences
                eos_token_ids = self._processor.limits.eos_token_ids
                sequence_requests = state.submit(prepared, self._processor.tokenizer, eos_token_ids, state.arrival_time)
                running.append(RunningRequest(state, prepared, time.time()))
                for sequence_request in sequence_requests:
                    self._engine.add(sequence_request)
            self._step_until_finished(running, use_tqdm)
        finally:
            for unfinished in running:
                self._engine.abort(unfinished.unfinished_sequence_ids)
        return running

    def _prepare(self, request: GenerateRequest, template: str | None) -> PreparedRequest:
        self._processor.limits.check(request, has_own_template=template is not None)
        prepared = run_without_waiting(self._processor.prepare(request, template))
        # As in vLLM, reasoning and tool calls stay in the text. `parsing` only decides what the constraint applies to.
        return replace(prepared, create_parser=None)

    def _step_until_finished(self, requests: Sequence[RunningRequest], use_tqdm: ProgressBar) -> None:
        by_sequence = {sequence_id: request for request in requests for sequence_id in request.state.sequence_ids}
        create_progress_bar = use_tqdm if callable(use_tqdm) else tqdm
        with create_progress_bar(
            total=len(requests), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True
        ) as progress_bar:
            num_input_tokens = num_output_tokens = 0
            while self._engine.has_work:
                self._engine.read_pending_adapters(verify_digests=True)
                step = self._engine.step()
                for started in step.started:
                    # If an earlier call failed, its sequences can still return results. They are ignored.
                    owner = by_sequence.get(started.id)
                    if owner is not None and owner.state.start_time is None:
                        owner.state.start_time = owner.state.arrival_time + started.queued_s
                for result in step.results:
                    request = by_sequence[result.id]
                    if request.update(result):
                        self._engine.abort([result.id])
                    if not request.is_finished:
                        continue
                    num_input_tokens += request.state.num_input_tokens
                    num_output_tokens += request.state.num_output_tokens
                    elapsed_s = max(progress_bar.format_dict["elapsed"], 1e-9)
                    progress_bar.set_postfix_str(
                        f"input: {num_input_tokens / elapsed_s:.1f} tok/s, output: "
                        f"{num_output_tokens / elapsed_s:.1f} tok/s",
                        refresh=False,
                    )
                    progress_bar.update()


def _build_completion_output(delta: OutputDelta, lora_request: LoRARequest | None) -> CompletionOutput:
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        cumulative_logprob=delta.cumulative_logprob,
        logprobs=None if delta.logprobs is None else list(map(_by_token, delta.logprobs)),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        lora_request=lora_request,
    )


def _by_token(position: Iterable[TokenLogprob]) -> dict[int, Logprob]:
    return {entry.token_id: Logprob(entry.logprob, entry.rank, entry.text) for entry in position}
