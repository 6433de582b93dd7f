# SPDX-License-Identifier: Apache-2.0
"""Frontend calls that do not run a request: they return model names or metrics, or tokenize or detokenize a text.

The text server passes each ControlRequest of a frontend to `FrontendCalls.handle`, which answers with one
ControlResponse. Work that can take longer than a millisecond runs in a thread.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quire_engine.ipc.connection import Connection
from quire_engine.structured_outputs.checker import GrammarChecker
from quire_engine.text.admission import AdmissionController
from quire_engine.text.chat_renderer import ChatRenderer
from quire_engine.text.live_snapshot import build_live_snapshot
from quire_engine.text.metrics import RequestMetrics
from quire_engine.text.prompt_tokenizer import PromptTokenizer
from quire_engine.text.request_manager import RequestManager
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import Code, InvalidArgument, QuireError
from quire_spec.protocol.messages import ControlRequest, ControlResponse

_LIVE_TIMEOUT_S = 10.0
"""Seconds to wait for the core's answer. A step of a large model on a slow CPU can take seconds."""

logger = logging.getLogger(__name__)


class FrontendCalls:
    """The methods that a frontend can call."""

    def __init__(
        self,
        admission: AdmissionController,
        prompt_tokenizer: PromptTokenizer | None,
        chat_renderer: ChatRenderer | None,
        grammar_checker: GrammarChecker | None,
        request_manager: RequestManager,
        metrics: RequestMetrics,
        sampling_defaults: Mapping[str, Any],
        call_core: Callable[[str, float], Awaitable[Any]],
    ) -> None:
        """`sampling_defaults` are the default sampling parameters of the checkpoint. They are passed to frontends that
        apply them.

        `call_core(method, timeout_s)` calls a method of the engine core.
        """
        self._admission = admission
        self._prompt_tokenizer = prompt_tokenizer
        self._chat_renderer = chat_renderer
        self._grammar_checker = grammar_checker
        self._request_manager = request_manager
        self._metrics = metrics
        self._sampling_defaults = dict(sampling_defaults)
        self._call_core = call_core
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods: dict[str, Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]] = {
            "models": self._models,
            "metrics": self._render_metrics,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "live": self._live,
        }

    def handle(self, connection: Connection, request: ControlRequest) -> None:
        """Run a call in the background and send its response."""
        task = asyncio.get_running_loop().create_task(self._run(connection, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, connection: Connection, request: ControlRequest) -> None:
        try:
            if not isinstance(request.args, Mapping) or (method := self._methods.get(request.method)) is None:
                raise InvalidArgument(f"method {str(request.method)[:80]!r} is unknown; use {', '.join(self._methods)}")
            response = ControlResponse(request.id, await method(request.args))
        except QuireError as error:
            response = ControlResponse(request.id, None, error.code, str(error))
        except Exception:
            logger.exception("call of a frontend failed method=%s", request.method)
            response = ControlResponse(
                request.id, None, Code.INTERNAL, "internal error; see the log of the text process"
            )
        connection.send(response)

    def start_workers(self) -> None:
        """Start the processes that render chat templates and check constraints, before a request needs them."""
        if self._chat_renderer is not None:
            self._chat_renderer.start()
        if self._grammar_checker is not None:
            self._grammar_checker.start()

    async def _models(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model names that requests can use, and the reason why requests are rejected at the moment."""
        admission = self._admission
        return {
            "served_name": admission.served_name,
            "adapters": sorted(admission.digest_by_name or ()),
            "loading": sorted((admission.loading_names or frozenset()) - (admission.digest_by_name or {}).keys()),
            "max_model_len": admission.limits.max_model_len,
            "sampling_defaults": self._sampling_defaults,
            "closed_reason": "draining" if admission.draining else admission.closed_reason,
        }

    async def _render_metrics(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._request_manager.refresh_adapter_gauges()
        # Metrics use the default thread pool, so that a scrape does not wait for prompts that are being tokenized.
        is_vllm_backend = args.get("format") == "vllm_backend"
        render = self._metrics.render_vllm_backend if is_vllm_backend else self._metrics.render
        return {"text": await asyncio.get_running_loop().run_in_executor(None, render)}

    async def _live(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that the live page shows. The state is computed only when a page requests it."""
        core = await self._call_core("live", _LIVE_TIMEOUT_S)
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
        }

    async def _tokenize(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the token ids of `prompt`, or those of the conversation `chat` after it was rendered with the template
        of `model`.

        `return_token_strs` adds their texts.
        """
        prompt_tokenizer, text, chat = self._require_tokenizer(), args.get("prompt"), args.get("chat")
        if chat is not None:
            model = str(args.get("model", self._admission.served_name))
            self._admission.check_chat(model)
            assert self._chat_renderer is not None, "checked"
            text = await self._chat_renderer.render(chat, self._admission.chat_template_by_name.get(model))
        self._admission.check_prompt_text(text)
        assert isinstance(text, str), "checked"
        tokenizer, add_special_tokens = prompt_tokenizer.tokenizer, bool(args.get("add_special_tokens", chat is None))

        def encode() -> list[int]:
            if chat is None or add_special_tokens:
                return tokenizer.encode(text, None, add_special_tokens)
            return tokenizer.encode_rendered(text)

        token_ids = await prompt_tokenizer.run(encode, len(text))
        token_strs = [tokenizer.token_text(i) for i in token_ids] if args.get("return_token_strs") else None
        return {
            "tokens": token_ids,
            "token_strs": token_strs,
            "max_model_len": self._admission.limits.max_model_len,
        }

    async def _detokenize(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the text of `tokens`."""
        prompt_tokenizer, token_ids = self._require_tokenizer(), args.get("tokens")
        vocab_size = self._admission.limits.vocab_size
        if not isinstance(token_ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in token_ids):
            raise InvalidArgument(f"tokens: must be a list of token ids from 0 to {vocab_size - 1}")
        tokenizer: Tokenizer = prompt_tokenizer.tokenizer
        text = await prompt_tokenizer.run(lambda: tokenizer.decode(token_ids, False), 4 * len(token_ids))
        return {"prompt": text}

    def _require_tokenizer(self) -> PromptTokenizer:
        if self._prompt_tokenizer is None:
            raise InvalidArgument("prompt: the model has no tokenizer; send token ids")
        return self._prompt_tokenizer
