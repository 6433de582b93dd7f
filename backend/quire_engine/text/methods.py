# SPDX-License-Identifier: Apache-2.0
"""The methods of the text process: everything that its clients can call, except requests.

The supervisor sets the adapters, reads the status and drains the process. The frontends read model names and metrics,
and tokenize and detokenize texts. Work that can take longer than a millisecond runs in a thread. The text server
answers the calls (quire_spec/protocol/server.py).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec

from quire_engine.requests.processor import RequestProcessor
from quire_engine.structured_outputs.checker import GrammarChecker
from quire_engine.text.adapter_finder import AdapterFinder
from quire_engine.text.admission.admission_controller import AdmissionController
from quire_engine.text.chat_renderer import ChatRenderer
from quire_engine.text.cores.core_client import CoreClient
from quire_engine.text.images.image_reader import ImageReader
from quire_engine.text.live_snapshot import build_live_snapshot, merge_live
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.request_manager import RequestManager
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.constants import AdapterDigest, AdapterName
from quire_spec.documents.adapter_catalog import AdapterLimits
from quire_spec.documents.pod_status import CoreState, utc_now
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import Conversation, GenerateRequest, ImageInput, SequenceRequest
from quire_spec.protocol.results import ServedModels, TextStatus, Tokenized, UncachedPrompt

_LIVE_TIMEOUT_S = 10.0
"""Seconds to wait for the core's answer. A step of a large model on a slow CPU can take seconds."""

logger = logging.getLogger(__name__)


class TextMethods:
    """The methods of the text process."""

    def __init__(
        self,
        admission: AdmissionController,
        processor: RequestProcessor,
        workers: Sequence[ChatRenderer | GrammarChecker | ImageReader],
        request_manager: RequestManager,
        metrics: RequestMetrics,
        sampling_defaults: Mapping[str, Any],
        tokenizer_config: Mapping[str, Any],
        clients: Sequence[CoreClient],
        core_states: Callable[[], dict[str, CoreState]],
        finder: AdapterFinder,
    ) -> None:
        """`sampling_defaults` are the default sampling parameters of the checkpoint. They are passed to frontends that
        apply them. `core_states` returns the state of each core if there are several."""
        self._admission = admission
        self._processor = processor
        self._workers = workers
        self._request_manager = request_manager
        self._metrics = metrics
        self._sampling_defaults = dict(sampling_defaults)
        self._tokenizer_config = tokenizer_config
        self._clients = clients
        self._core_states = core_states
        self._finder = finder
        self._started_at = utc_now()

    def table(self) -> tuple[Callable[..., Any], ...]:
        """Return the methods that clients can call."""
        return (
            self.set_adapters,
            self.set_loading_adapters,
            self.adapter_idle_times,
            self.status,
            self.drain,
            self.models,
            self.adapters,
            self.metrics,
            self.tokenize,
            self.render,
            self.uncached_prompt,
            self.detokenize,
            self.tokenizer_info,
            self.live,
        )

    def start_workers(self) -> None:
        """Start the processes that render chat templates and check constraints, before a request needs them."""
        for worker in self._workers:
            worker.start()

    def set_adapters(
        self,
        adapters: dict[AdapterName, AdapterDigest],
        limits: dict[str, AdapterLimits] | None = None,
        chat_templates: dict[str, str] | None = None,
        findable_names: list[str] | None = None,
        sums: dict[AdapterName, str] | None = None,
        version_weights: dict[str, dict[str, int]] | None = None,
    ) -> None:
        """Replace the adapters that requests can name, their limits, the files of their chat templates, the patterns of
        further names that the supervisor can look up, the names of weighted sums (`a:0.7,b:0.3`), and the weights of
        versions."""
        self._request_manager.set_adapters(adapters, limits, chat_templates, findable_names or (), sums)
        self._admission.versions.weights_by_name = version_weights or {}
        logger.info("adapters set count=%d", len(adapters))

    def set_loading_adapters(self, names: frozenset[str]) -> None:
        """Replace the adapters that are being loaded."""
        self._request_manager.set_loading_adapters(names)

    def adapter_idle_times(self) -> dict[AdapterName, float]:
        """Return for each adapter that had a request the seconds since its last one; 0 if a request is open."""
        return self._request_manager.adapter_idle_times()

    def status(self) -> TextStatus:
        """Return the counts of requests, and the names of the parsers of chat outputs."""
        return TextStatus(self._started_at, **self._request_manager.status(), cores=self._core_states())

    async def drain(self) -> None:
        """Reject new requests, and return when all open requests have ended."""
        logger.info("draining num_open=%d", self._request_manager.num_open)
        drained = asyncio.Event()
        self._request_manager.drain(drained.set)
        await drained.wait()

    def models(self, api_key_name: str = "") -> ServedModels:
        """Return the model names that requests of an API key can use, and the reason why requests are rejected at the
        moment."""
        admission, pooler = self._admission, self._admission.limits.pooler
        return ServedModels(
            served_name=admission.served_name,
            adapters=sorted({*admission.visible_adapters(api_key_name), *admission.visible_sums(api_key_name)}),
            loading=sorted(admission.visible_loading_names(api_key_name) - (admission.digest_by_name or {}).keys()),
            max_model_len=admission.limits.max_model_len,
            sampling_defaults=self._sampling_defaults,
            closed_reason="draining" if admission.draining else admission.closed_reason,
            has_thinking_budget=admission.limits.parser_names.has_thinking_budget,
            pooling_task="" if pooler is None else pooler.task,
            labels=[] if pooler is None else list(pooler.labels),
            has_step_token=admission.limits.step_token_id is not None,
            has_score_template=admission.limits.has_score_template,
            joins_pairs=admission.limits.is_encoder,
        )

    def adapters(self) -> list[dict[str, Any]]:
        """Return where each adapter is: its name, digest, level (gpu, cpu or disk), pin and rank."""
        return self._metrics.adapter_metrics.residency.rows()

    def metrics(self, page_format: str = "") -> str:
        """Return the metrics in Prometheus's text format; with the format vllm_backend, under its names."""
        self._request_manager.refresh_adapter_gauges()
        return self._metrics.render_vllm_backend() if page_format == "vllm_backend" else self._metrics.render()

    async def live(self) -> dict[str, Any]:
        """Return the state that the live page shows. The state is computed only when a page requests it."""
        calls = (client.call("live", dict[str, Any], timeout_s=_LIVE_TIMEOUT_S) for client in self._clients)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        if not (cores := [answer for answer in answers if not isinstance(answer, BaseException)]):
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        core = merge_live(cores)
        digest_by_name = self._admission.digest_by_name or {}
        load_times = self._metrics.adapter_metrics.mean_load_times()
        snapshot = build_live_snapshot(core, self._admission.served_name, digest_by_name, load_times)
        return {
            **snapshot,
            "requests": {
                "running": core["stats"]["num_running"],
                "waiting": core["stats"]["num_waiting"],
                "open": self._request_manager.num_open,
            },
            "counters": self._metrics.live_counters(),
            "cores": [{"name": name, **asdict(state)} for name, state in self._core_states().items()],
        }

    async def tokenize(
        self,
        prompt: str | None = None,
        chat: Conversation | None = None,
        model: str | None = None,
        add_special_tokens: bool | None = None,
        return_token_strs: bool = False,
        api_key_name: str = "",
    ) -> Tokenized:
        """Return the token ids of `prompt`, or those of the conversation `chat` after it was rendered with the template
        of `model`.

        `return_token_strs` adds their texts. Raises NotFound if there is no such model.
        """
        await self._require_model(model, api_key_name)
        tokenizer, text, limits = self._require_tokenizer(), prompt, self._processor.limits
        if chat is not None:
            template = self._admission.chat_template_by_name.get(model or self._admission.served_name)
            limits.check_chat(template is not None)
            text = await self._processor.render(chat, template)
        elif text is None:
            raise InvalidArgument("prompt: must be a string")
        else:
            limits.check_prompt_text(text)
        adds_special_tokens = chat is None if add_special_tokens is None else add_special_tokens

        def encode() -> list[int]:
            if chat is None or adds_special_tokens:
                return tokenizer.encode(text, None, adds_special_tokens)
            return tokenizer.encode_rendered(text)

        token_ids = await self._processor.run_tokenizer(encode, len(text))
        token_strs = [tokenizer.token_text(i) for i in token_ids] if return_token_strs else None
        return Tokenized(token_ids, token_strs, limits.max_model_len)

    async def render(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of the prompt that the engine would get for `request`. The request is not run.

        The errors are those of running it, except those about its constraint.
        """
        await self._require_model(request.model, request.api_key_name)
        token_ids, _ = await self._tokenize(request)
        return token_ids

    async def uncached_prompt(self, request: GenerateRequest, num_local_tokens: int) -> UncachedPrompt:
        """Return how much of the prompt of `request` a core would have to compute. The request is not run.

        A prompt with at most `num_local_tokens` tokens is not looked up, and counts as not cached. With several cores,
        the result is that of the core with most of the prompt. The errors are those of `render`.
        """
        request = self._admission.choose_version(request, request.session)
        adapter = self._admission.resolve_model(request.model, request.api_key_name)
        token_ids, images = await self._tokenize(request)
        if len(token_ids) <= num_local_tokens or (adapter.name is not None and adapter.digest is None):
            return UncachedPrompt(len(token_ids))
        sequence = SequenceRequest(
            0,
            token_ids,
            SamplingParams(seed=0),
            adapter.digest,
            request.cache_salt,
            # The digests of images are enough to look a prompt up.
            images=[msgspec.structs.replace(image, tensors={}) for image in images],
        )
        calls = (client.call("uncached_prompt", UncachedPrompt, {"request": sequence}) for client in self._clients)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        if not (prompts := [answer for answer in answers if isinstance(answer, UncachedPrompt)]):
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return min(prompts, key=lambda prompt: prompt.num_tokens)

    def tokenizer_info(self) -> dict[str, Any]:
        """Return tokenizer_config.json with the chat template that is used."""
        self._require_tokenizer()
        return dict(self._tokenizer_config)

    async def detokenize(
        self, tokens: list[Annotated[int, msgspec.Meta(ge=0)]], model: str | None = None, api_key_name: str = ""
    ) -> str:
        """Return the text of `tokens`. Raises NotFound if there is no such model."""
        await self._require_model(model, api_key_name)
        tokenizer, vocab_size = self._require_tokenizer(), self._processor.limits.vocab_size
        if max(tokens, default=0) >= vocab_size:
            raise InvalidArgument(f"tokens: must be a list of token ids from 0 to {vocab_size - 1}")
        return await self._processor.run_tokenizer(lambda: tokenizer.decode(tokens, False), 4 * len(tokens))

    async def _tokenize(self, request: GenerateRequest) -> tuple[list[int], list[ImageInput]]:
        """Return the token ids and the images of the prompt that the engine would get for `request`."""
        template = self._admission.chat_template_by_name.get(request.model)
        self._processor.limits.check(request, template is not None)
        return await self._processor.tokenize(request, template)

    async def _require_model(self, model: str | None, api_key_name: str) -> None:
        """Check that a model exists, or can be found; the errors are those of a request."""
        if model is not None:
            for name in self._admission.resolve_model(model, api_key_name).missing_names:
                await self._finder.find(name, api_key_name, api_key_name)

    def _require_tokenizer(self) -> Tokenizer:
        if self._processor.tokenizer is None:
            raise InvalidArgument("prompt: the model has no tokenizer; send token ids")
        return self._processor.tokenizer
