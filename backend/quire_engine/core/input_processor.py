# SPDX-License-Identifier: Apache-2.0
"""Input processor: converts the requests of the engine to sequences; vLLM's class has the same name.

It owns the tokenizer, the compiler of grammars and the generator of seeds. It does not know the scheduler or the
runner. The engine calls it for each request.
"""

import random
import threading
from collections.abc import Callable
from pathlib import Path

from quire_engine.sequence import Sequence
from quire_engine.structured_outputs.compiler import GrammarCompiler
from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.structured_outputs.thinking_budget import ThinkingBudget
from quire_engine.tokenization.adapter_tokens import check_adapter_tokens
from quire_engine.tokenization.stop_strings import StopStrings
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.documents.adapter_digest import TOKENIZER_FILES
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.model.pooler_config import PoolerConfig
from quire_spec.protocol.messages import SequenceRequest

_MAX_CHECKED = 4096


class InputProcessor:
    """Converts requests to sequences. Not thread-safe, except `grammar_compiler`, `tokenizer` and
    `check_adapter_tokens`."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        """`clock` returns monotonic seconds. The arrival times of sequences come from this clock."""
        self.tokenizer_folder = checkpoint.folder
        """Folder of the tokenizer. The offline API can set another folder before the first request."""
        self._vocab_size = checkpoint.shape.vocab_size
        self._eos_token_ids = checkpoint.eos_token_ids
        self._max_model_len = max_model_len
        pooler = PoolerConfig.load(checkpoint.folder, checkpoint.shape, config.convert, config.pooling_type)
        pooling = "last" if pooler is None else pooler.pooling
        self._pools_first_token, self._pools_all_tokens = pooling == "cls", pooling not in ("last", "cls")
        images = checkpoint.shape.images
        self._has_unsplit_images = images is not None and images.is_bidirectional
        self._clock = clock
        self._seed_generator = random.Random(config.seed)
        # The tokenizer and the grammar compiler are created in another thread at startup, or by the first request that
        # needs them.
        self._tokenizer_lock = threading.RLock()
        self._tokenizer: Tokenizer | None = None
        self._grammar_compiler: GrammarCompiler | None = None
        self._checked_tokens: set[tuple[Path, object]] = set()
        """Folders of adapters whose tokenizer files passed the check, with the state of these files."""

    def grammar_compiler(self) -> GrammarCompiler:
        """Return the compiler of grammars for this model. The first call creates it. Safe to call from any thread.

        Raises:
            InvalidArgument: the model has no tokenizer, or no end-of-sequence token.
        """
        with self._tokenizer_lock:
            if self._grammar_compiler is None:
                if (tokenizer := self.tokenizer()) is None:
                    raise InvalidArgument("structured_outputs: the model has no tokenizer; leave it out")
                self._grammar_compiler = GrammarCompiler(tokenizer, self._vocab_size, self._eos_token_ids)
            return self._grammar_compiler

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None if the model has none. The first call reads the tokenizer from its folder. Safe to
        call from any thread."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_folder(self.tokenizer_folder)
            return self._tokenizer

    def check_adapter_tokens(self, folder: Path) -> None:
        """Check that an adapter's tokenizer has no tokens that this model's tokenizer has not. Safe to call from any
        thread.

        Raises:
            InvalidArgument: see `check_adapter_tokens`.
        """
        stats = [(folder / name).stat() for name in TOKENIZER_FILES if (folder / name).exists()]
        key = folder, tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
        # Adapters that left host memory are read again and again.
        if not stats or key in self._checked_tokens or (tokenizer := self.tokenizer()) is None:
            return
        check_adapter_tokens(folder, tokenizer, self.tokenizer_folder)
        if len(self._checked_tokens) >= _MAX_CHECKED:
            self._checked_tokens.clear()
        self._checked_tokens.add(key)

    def process(self, request: SequenceRequest) -> Sequence:
        """Return the sequence of a request.

        The sender has checked the parameters and the token ids (quire_engine/requests/limits.py).

        Raises:
            InvalidArgument: the model has no tokenizer for the grammar or the stop strings.
        """
        params = request.params
        stop_token_ids = frozenset(params.stop_token_ids)
        max_output_tokens = max(self._max_model_len - len(request.prompt_token_ids), 0)
        return Sequence(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
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
            bad_words=tuple(map(tuple, request.bad_word_ids)),
            grammar=self._create_grammar(request),
            stop_strings=self._create_stop_strings(params),
            adapter_digest=request.adapter_digest,
            adapter_parts=tuple(request.adapter_parts),
            cache_salt=request.cache_salt,
            parent_id=request.parent_id,
            priority=request.priority,
            arrival_time=self._clock(),
            client=request.client,
            kv_source=request.kv_source,
            kv_source_required=request.kv_source_required,
            pooling=request.pooling,
            pools_all_tokens=request.pooling is not None and (request.pooling.is_by_token or self._pools_all_tokens),
            pools_first_token=request.pooling is not None
            and not request.pooling.is_by_token
            and self._pools_first_token,
            second_text_start=request.second_text_start,
            images=tuple(request.images),
            unsplit=tuple(range(image.start, image.start + image.num_tokens) for image in request.images)
            if self._has_unsplit_images
            else (),
        )

    def _create_grammar(self, request: SequenceRequest) -> Grammar | None:
        grammar = None
        if request.grammar is not None:
            grammar = self.grammar_compiler().create(request.grammar, request.begin_after_token_ids)
        if request.params.thinking_token_budget is not None:
            start, end = request.reasoning_marks
            grammar = grammar or Grammar(None)
            grammar.thinking_budget = ThinkingBudget(
                request.params.thinking_token_budget, start, end, request.prompt_token_ids
            )
        return grammar

    def _create_stop_strings(self, params: SamplingParams) -> StopStrings | None:
        """Return the stop strings of a beam search.

        For other requests, return None, because the text process searches their outputs for stop strings.
        """
        if not (params.use_beam_search and params.stop):
            return None
        if (tokenizer := self.tokenizer()) is None:
            raise InvalidArgument("sampling parameter 'stop': the model has no tokenizer; use stop_token_ids")
        return StopStrings(tokenizer, params)
