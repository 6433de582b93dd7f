# SPDX-License-Identifier: Apache-2.0
"""Tokenizes the text of requests without blocking the event loop: long texts are encoded in a thread.

Only the request manager calls this module, which has no knowledge of queues, frontends or the engine core.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from quire_engine.text.request_state import RequestState
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.errors import QuireError
from quire_spec.protocol.messages import GenerateRequest

_MAX_INLINE_CHARS = 2048
"""A text that has at most this number of characters is encoded on the event loop, which takes about 0.5 ms. A longer
text is encoded in a thread, which costs 0.1 ms.
"""

_NUM_THREADS = 2
"""With two threads, one very long prompt does not delay all others. More threads would take cores away from an engine
on the same CPU."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The token ids of a request's text."""

    token_ids: list[int]
    bad_word_ids: list[list[int]]
    """Token sequences that the output must not contain."""


class PromptTokenizer:
    """Encodes the prompts and bad words of requests."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._thread_pool = ThreadPoolExecutor(_NUM_THREADS, "tokenize")

    def tokenize(
        self,
        request: GenerateRequest,
        request_state: RequestState,
        on_done: Callable[[TokenizedPrompt | QuireError], None],
    ) -> None:
        """Encode the prompt and the bad words of a request and pass the result to `on_done`.

        `on_done` runs on the event loop. For a short text it runs before this method returns.
        """
        # A bad word is encoded twice, with a space before it and without one, so its length counts twice.
        num_chars = len(request.prompt or "") + 2 * sum(map(len, request_state.params.bad_words))
        if num_chars <= _MAX_INLINE_CHARS:
            on_done(self._encode(request, request_state))
        else:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._thread_pool, self._encode, request, request_state)
            future.add_done_callback(lambda encode_future: on_done(encode_future.result()))

    async def run(self, function: Callable[[], _T], num_chars: int) -> _T:
        """Call a function of the tokenizer for a text of `num_chars` characters. Long texts are processed in a
        thread."""
        if num_chars <= _MAX_INLINE_CHARS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._thread_pool, function)

    def _encode(self, request: GenerateRequest, request_state: RequestState) -> TokenizedPrompt | QuireError:
        # A request can be cancelled while its prompt waits for a thread.
        if request_state.is_closed:
            return TokenizedPrompt([], [])
        params, token_ids = request_state.params, request.prompt_token_ids
        try:
            if request.chat is not None:
                assert request.prompt is not None, "the conversation is rendered"
                token_ids = self.tokenizer.encode_rendered(request.prompt, request.cache_salt or "")
            elif token_ids is None:
                assert request.prompt is not None, "admission accepts a text or token ids"
                token_ids = self.tokenizer.encode(
                    request.prompt,
                    params.max_prompt_tokens(self._max_model_len),
                    request.add_special_tokens,
                    params.truncation_side,
                )
            bad_word_ids = self.tokenizer.bad_word_ids(params.bad_words) if params.bad_words else []
        except QuireError as error:
            return error
        return TokenizedPrompt(token_ids, bad_word_ids)
