# SPDX-License-Identifier: Apache-2.0
"""Input processor: checks the requests of the engine and converts them to sequences; vLLM's class has the same name.

It owns the tokenizer, the compiler of grammars and the generator of seeds. It does not know the scheduler or the
runner. The engine calls it for each request.
"""

import random
import threading
from array import array
from collections.abc import Callable, Iterable

from quire_engine.sequence import Sequence
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.structured_outputs.thinking_budget import ThinkingBudget
from quire_engine.tokenization.stop_strings import StopStrings
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from quire_spec.errors import Internal, InvalidArgument
from quire_spec.protocol.messages import SequenceRequest


class InputProcessor:
    """Converts requests to sequences. Not thread-safe, except `grammar_compiler`."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        """`clock` returns monotonic seconds. The arrival times of sequences come from this clock."""
        self.tokenizer_folder = checkpoint.folder
        """Folder of the tokenizer. The offline API can set another folder before the first request."""
        self._max_logprobs = config.max_logprobs
        self._vocab_size = checkpoint.shape.vocab_size
        self._eos_token_ids = checkpoint.eos_token_ids
        self._max_model_len = max_model_len
        self._clock = clock
        self._seed_generator = random.Random(config.seed)
        # The tokenizer and the grammar compiler are created in another thread at startup, or by the first request that
        # needs them.
        self._tokenizer_lock = threading.RLock()
        self._tokenizer: Tokenizer | None = None
        self._grammar_compiler: GrammarCompiler | None = None

    def grammar_compiler(self) -> GrammarCompiler:
        """Return the compiler of grammars for this model. The first call creates it. Safe to call from any thread.

        Raises:
            InvalidArgument: the model has no tokenizer, or no end-of-sequence token.
        """
        with self._tokenizer_lock:
            if self._grammar_compiler is None:
                if (tokenizer := self._load_tokenizer()) is None:
                    raise InvalidArgument("structured_outputs: the model has no tokenizer; leave it out")
                self._grammar_compiler = GrammarCompiler(tokenizer, self._vocab_size, self._eos_token_ids)
            return self._grammar_compiler

    def process(self, request: SequenceRequest) -> Sequence:
        """Return the sequence of a request.

        Raises:
            InvalidArgument: a parameter or token id is invalid, or the prompt is empty.
        """
        params = request.params
        prompt_token_ids = self._check_tokens("prompt", request.prompt_token_ids)
        if not prompt_token_ids:
            raise InvalidArgument("prompt: empty; give at least one token")
        stop_token_ids = frozenset(self._check_tokens("stop_token_ids", params.stop_token_ids))
        self._check_logprobs(params, len(prompt_token_ids))
        self._check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        self._check_tokens("logit_bias", params.logit_bias or ())
        self._check_tokens("logprob_token_ids", params.logprob_token_ids or ())
        bad_words = tuple(tuple(self._check_tokens("bad_words", word)) for word in request.bad_word_ids)
        if not all(bad_words):
            raise InvalidArgument("bad_words: a word has no tokens; give at least one token for each word")
        _check_allowed_tokens(params, stop_token_ids | self._eos_token_ids, bad_words)
        grammar = self._create_grammar(request, params, prompt_token_ids)
        stop_strings = self._create_stop_strings(params)
        max_output_tokens = max(self._max_model_len - len(prompt_token_ids), 0)
        return Sequence(
            id=request.id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=params.seed if params.seed is not None else self._seed_generator.getrandbits(63),
            max_output_tokens=max_output_tokens
            if params.max_tokens is None
            else min(params.max_tokens, max_output_tokens),
            # After the end of its grammar, an output cannot continue. So an end-of-sequence token then ends it even
            # with ignore_eos.
            stop_token_ids=stop_token_ids
            if params.ignore_eos and request.grammar is None
            else stop_token_ids | self._eos_token_ids,
            suppressed_token_ids=stop_token_ids | self._eos_token_ids if params.min_tokens else frozenset(),
            bad_words=bad_words,
            grammar=grammar,
            stop_strings=stop_strings,
            adapter_digest=request.adapter_digest,
            cache_salt=request.cache_salt,
            parent_id=request.parent_id,
            priority=request.priority,
            arrival_time=self._clock(),
        )

    def _create_grammar(
        self, request: SequenceRequest, params: SamplingParams, prompt_token_ids: list[int]
    ) -> Grammar | None:
        if params.structured_outputs is not None:
            raise Internal("structured_outputs: the request has a constraint but no grammar")
        grammar = None
        if request.grammar is not None:
            if params.use_beam_search:
                raise InvalidArgument(
                    "use_beam_search: not possible with a constraint on the output; leave out one of them"
                )
            grammar = self.grammar_compiler().create(request.grammar, request.begin_after_token_ids)
        if params.thinking_token_budget is not None:
            if len(request.reasoning_marks) != 2 or not request.reasoning_marks[1]:
                raise Internal(
                    "thinking_token_budget: the request does not contain the marks at which reasoning begins and ends"
                )
            start, end = (self._check_tokens("reasoning_marks", mark) for mark in request.reasoning_marks)
            grammar = grammar or Grammar(None)
            grammar.thinking_budget = ThinkingBudget(params.thinking_token_budget, start, end, prompt_token_ids)
        return grammar

    def _create_stop_strings(self, params: SamplingParams) -> StopStrings | None:
        """Return the stop strings of a beam search.

        For other requests, return None, because the text process searches their outputs for stop strings.
        """
        if not (params.use_beam_search and params.stop):
            return None
        if (tokenizer := self._load_tokenizer()) is None:
            raise InvalidArgument("sampling parameter 'stop': the model has no tokenizer; use stop_token_ids")
        return StopStrings(tokenizer, params)

    def _load_tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None if the model has none. The first call reads the tokenizer from its folder."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_folder(self.tokenizer_folder)
            return self._tokenizer

    def _check_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        vocab_size, max_logprobs = self._vocab_size, self._max_logprobs
        # If a request names tokens in logprob_token_ids, their number has its own limit.
        num_top = None if params.logprob_token_ids else params.logprobs
        for name, requested in (("logprobs", num_top), ("prompt_logprobs", params.prompt_logprobs)):
            count = vocab_size if requested == -1 else requested or 0
            if count > max_logprobs != -1:
                requested_text = f"-1 (all {count} tokens)" if requested == -1 else count
                raise InvalidArgument(
                    f"sampling parameter {name!r}: {requested_text} is more than max_logprobs {max_logprobs}; "
                    "request fewer or raise max_logprobs"
                )
            if (
                name == "prompt_logprobs"
                and requested is not None
                and (count + 1) * num_prompt_tokens > MAX_PROMPT_LOGPROBS
            ):
                raise InvalidArgument(
                    f"sampling parameter {name!r}: got {count} for each of {num_prompt_tokens} tokens; at most "
                    f"{MAX_PROMPT_LOGPROBS} in total can be returned, and each prompt token itself counts as one; "
                    "request fewer, or shorten the prompt"
                )

    def _check_tokens(self, name: str, token_ids: Iterable[int]) -> list[int]:
        try:
            # The array checks types and signs at C speed, because a prompt can have a hundred thousand tokens.
            tokens = array("Q", token_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidArgument(f"{name}: not a list of token ids: {error}") from error
        if tokens and (largest := max(tokens)) >= self._vocab_size:
            raise InvalidArgument(f"{name}: token id {largest} is outside the vocabulary of {self._vocab_size}")
        return tokens.tolist()


def _check_allowed_tokens(
    params: SamplingParams, end_token_ids: frozenset[int], bad_words: Iterable[tuple[int, ...]]
) -> None:
    forbidden = {word[0] for word in bad_words if len(word) == 1} | (
        end_token_ids if params.min_tokens else frozenset()
    )
    if params.allowed_token_ids and forbidden.issuperset(params.allowed_token_ids):
        raise InvalidArgument(
            "sampling parameter 'allowed_token_ids': bad_words and min_tokens forbid all of these tokens; "
            "allow another token"
        )
