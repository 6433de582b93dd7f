# SPDX-License-Identifier: Apache-2.0
"""Engine: a model, its scheduler and its runner as one object. Requests in, tokens out, a step at a time.

Owns no thread and no socket: the core process and the offline LLM drive it. Importing this module costs no torch;
`from_config` does.
"""

import logging
import random
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

from quire_engine.adapters import AdapterRegistry
from quire_engine.blocks import BlockPool, ContentKey
from quire_engine.checkpoint import Checkpoint
from quire_engine.hub import resolve_model
from quire_engine.request import Sequence
from quire_engine.scheduler import Scheduler
from quire_engine.step import Runner, SlotLoad
from quire_engine.steps import Steps, failure
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams
from quire_spec.errors import ConfigError, Internal, InvalidArgument, QuireError
from quire_spec.model.capabilities import DTYPE_BYTES
from quire_spec.model.memory_sizing import lora_slot_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import AdapterEvent, SchedulerStats, SequenceDelta, SequenceRequest, StepResult

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests with one model. Not thread-safe: one thread calls it, `read_adapter` excepted.

    Raises:
        ConfigError: max_model_len exceeds the model's, or the KV cache cannot hold one sequence of that length.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        runner: Runner,
        memory: MeasuredMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.shape: ModelConfig = checkpoint.shape
        self.memory = memory
        self.model_folder = checkpoint.folder
        self.max_model_len = check_max_model_len(config, checkpoint.shape)
        self.eos_token_ids = checkpoint.eos_token_ids
        self._runner = runner
        self._clock = clock
        self._seeds = random.Random(config.seed)
        self._blocks = BlockPool(memory.num_blocks)
        self._adapters = _registry(config, checkpoint.shape, memory)
        key = ContentKey(checkpoint.fingerprint, memory.dtype, config.block_size, checkpoint.shape.long_rope_threshold)
        self._scheduler = Scheduler(config, self._blocks, self._adapters, key, self.max_model_len, runner.swap_space)
        self.carry: Callable[[SlotLoad, Callable[[], None]], None] = self._carry_now
        """Has an adapter copied into a slot: by default at once; an owner with threads has the work done in another one
        and then calls `slot_loaded`."""
        self._begun: dict[SlotLoad, float] = {}
        """When copies into slots were asked for."""
        self._moves: list[AdapterEvent] = []
        # Ended without a step; reported with the next one.
        self._failed: list[SequenceDelta] = []
        self._steps = Steps(self._scheduler, runner, config.overlap_steps, clock, self._load_slots)

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, progress: bool = False, on_lost: Callable[[str], None] | None = None
    ) -> Self:
        """Find the model, load it, and lay out the device's memory. `progress` shows bars on stderr.

        With a tensor_parallel_size, other processes share the layers; when one of them ends, all do, `on_lost(why)` is
        called in a thread of its own, and each step raises RunnerLost.

        Raises:
            ConfigError: the model cannot be found or served, or does not fit; the message says what to change.
        """
        checkpoint = Checkpoint.load(resolve_model(config.model, config.revision, progress))
        check_max_model_len(config, checkpoint.shape)
        # Here, so that importing the engine costs no torch.
        from quire_engine.executor import open_runner

        runner = open_runner(config, checkpoint.shape, checkpoint.folder, progress=progress, on_lost=on_lost)
        engine = cls(config, checkpoint, runner, runner.memory)
        effective = config.to_json() | {"max_model_len": engine.max_model_len, "dtype": engine.memory.dtype}
        logger.info("engine config %s", " ".join(f"{name}={value!r}" for name, value in effective.items()))
        return engine

    @property
    def has_work(self) -> bool:
        """Any sequence that is not over, or whose end was not reported yet, or a step in flight."""
        return self._scheduler.has_work or bool(self._failed)

    @property
    def runnable(self) -> bool:
        """False when step() has nothing to do until something else is called: all wait for adapters to be read."""
        return self._scheduler.runnable or bool(self._failed)

    def add(self, request: SequenceRequest) -> None:
        """Queue a request.

        Raises:
            InvalidArgument: a parameter or token id is wrong, or the prompt is empty or too long.
            NotFound: its adapter is not loaded.
        """
        params = SamplingParams.from_mapping(request.params)
        prompt = self._check_tokens("prompt", request.prompt_token_ids)
        if not prompt:
            raise InvalidArgument("prompt: empty; give at least one token")
        stops = frozenset(self._check_tokens("stop_token_ids", params.stop_token_ids))
        self._check_logprobs(params, len(prompt))
        self._check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        self._check_tokens("logit_bias", params.logit_bias or ())
        bad_words = tuple(tuple(self._check_tokens("bad_words", word)) for word in request.bad_word_ids)
        if not all(bad_words):
            raise InvalidArgument("bad_words: a word without tokens; give each at least one")
        _check_allowed(params, stops | self.eos_token_ids, bad_words)
        room = max(self.max_model_len - len(prompt), 0)
        self._scheduler.add(
            Sequence(
                id=request.id,
                prompt_token_ids=prompt,
                params=params,
                seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
                max_output_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_token_ids=stops if params.ignore_eos else stops | self.eos_token_ids,
                held_token_ids=stops | self.eos_token_ids if params.min_tokens else frozenset(),
                bad_words=bad_words,
                adapter=request.adapter_digest,
                cache_salt=request.cache_salt,
                fork_of=request.fork_of,
                priority=request.priority,
                arrival=self._clock(),
            )
        )

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences without a result; unknown ids are ignored."""
        ids = set(ids)
        self._scheduler.abort(ids)
        self._failed = [result for result in self._failed if result.id not in ids]
        self._drop_copies()

    def step(self) -> StepResult:
        """Run at most one step, with the next one begun before it is over if steps are begun ahead; also reports
        sequences that failed since the last one.

        Raises:
            RunnerLost: no step can run any more; make a new engine.
        """
        results = self._steps.advance()
        self._drop_copies()
        results += self._failed
        self._failed = []
        return StepResult(results, self._steps.take_started(), self.stats(), self.take_moves())

    def take_moves(self) -> list[AdapterEvent]:
        """What became of adapters since the last call."""
        moves, self._moves = self._moves, []
        return moves + [AdapterEvent("evicted", digest) for digest in self._adapters.slots.take_evicted()]

    def read_adapter(self, path: Path) -> object:
        """Read an adapter's folder; what `add_adapter` takes. Slow, and safe to call from any thread.

        Raises:
            InvalidArgument: the engine has no adapter slots; or the folder holds no adapter for this model, or one that
                cannot be served; the message says why.
        """
        self._check_takes_adapters(path)
        return self._runner.read(path)

    def add_adapter(
        self, digest: str, path: Path, host: object, pinned: bool | None = None, read_s: float = 0.0
    ) -> None:
        """Register what `read_adapter` read, under its content digest.

        `pinned` None answers `take_fetches` for an adapter that is registered (or was, until a moment ago), and
        registers an unknown one; True or False registers in any case, also one that is being removed. `read_s`: seconds
        that reading took.

        Raises:
            InvalidArgument: the engine has no adapter slots, or all of them are pinned already.
        """
        self._check_takes_adapters(digest)
        keep = self._adapters.add(digest, path, pinned, self._runner.host_bytes(host))
        self._drop_copies()
        if keep:
            self._runner.hold(digest, host)
            self._moves.append(AdapterEvent("host", digest, read_s))
        self._scheduler.wake()

    def remove_adapter(self, digest: str) -> None:
        """Refuse new sequences of an adapter and free it with its last one; unknown digests are ignored."""
        self._adapters.remove(digest)
        self._drop_copies()

    def take_fetches(self) -> list[tuple[str, Path]]:
        """Adapters to be read again, because sequences wait for them; answer each with add_adapter or fail_adapter."""
        fetches = self._adapters.take_fetches()
        self._drop_copies()
        return fetches

    def slot_loaded(self, load: SlotLoad, error: QuireError | None = None) -> None:
        """Work that `carry` was given is done, or has failed: then the sequences that wait for it fail with `error`."""
        self._adapters.slots.loaded(load, error is None)
        begun = self._begun.pop(load)
        if error is None:
            self._moves.append(AdapterEvent("slot", load.digest, self._clock() - begun))
        if error is not None:
            self._fail_waiting(load.digest, error)
        self._scheduler.wake()

    def fail_adapter(self, digest: str, error: QuireError) -> None:
        """An adapter could not be read again: the sequences that wait for it fail with `error`."""
        if self._adapters.fail(digest):
            self._fail_waiting(digest, error)

    def fetch(self) -> None:
        """Do what `take_fetches` asks in this thread, for owners that have no other to keep the steps going."""
        fetches = self.take_fetches()
        try:
            while fetches:
                digest, path = fetches[0]
                try:
                    host = self.read_adapter(path)
                except QuireError as error:
                    self.fail_adapter(digest, error)
                else:
                    self.add_adapter(digest, path, host)
                del fetches[0]
        finally:
            # Control-C, or no memory: the next sequence asks for them again.
            for digest, _ in fetches:
                self.fail_adapter(digest, Internal(f"adapter {digest!r}: reading it was cut short"))

    def adapters(self) -> dict[str, str]:
        """Where each registered adapter is, by digest: slot, host or disk."""
        return self._adapters.states()

    def stats(self) -> SchedulerStats:
        """State of the scheduler now."""
        scheduler, tables = self._scheduler, self._scheduler.tables
        return SchedulerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=self._blocks.num_blocks,
            num_used_blocks=self._blocks.num_used,
            prefix_cache_queries=scheduler.prefixes.num_queries,
            prefix_cache_hits=scheduler.prefixes.num_hits,
            num_preemptions=scheduler.num_preemptions,
            num_block_copies=tables.num_block_copies,
            num_swapped=scheduler.num_swapped,
            num_host_blocks=tables.num_host_blocks,
            num_used_host_blocks=tables.num_used_host_blocks,
            num_swapped_out_blocks=tables.num_swapped_out_blocks,
            num_swapped_in_blocks=tables.num_swapped_in_blocks,
            num_steps=scheduler.num_steps,
            num_adapter_evictions=self._adapters.slots.num_evictions,
            slot_adapters=self._adapters.slots.adapters(),
            num_host_adapters=self._adapters.num_host,
            host_adapter_bytes=self._adapters.host_bytes,
        )

    def check_integrity(self) -> None:
        """Raise Internal, with the counts, unless sequences, blocks and adapters agree."""
        self._scheduler.check_integrity()

    def _load_slots(self) -> bool:
        """Have adapters copied into slots; whether sequences may run now that could not before."""
        loads = self._adapters.slots.take_loads()
        self._begun |= dict.fromkeys(loads, self._clock())
        rest = iter(loads)
        try:
            for load in rest:
                self.carry(load, self._runner.load(load))
        finally:
            # There are none, unless Control-C came.
            for load in rest:
                self.slot_loaded(load, copy_failure(load, "it was cut short"))
        return bool(loads) and not self._scheduler.stalled

    def _carry_now(self, load: SlotLoad, work: Callable[[], None]) -> None:
        failure: QuireError | None = copy_failure(load, "it was cut short")
        try:
            work()
            failure = None
        except Exception as error:  # whatever a device throws costs this adapter's sequences, never the engine
            failure = copy_failure(load, f"{type(error).__name__}: {error}")
        finally:
            self.slot_loaded(load, failure)

    def _fail_waiting(self, digest: str, error: QuireError) -> None:
        failed = self._scheduler.fail_adapter(digest)
        self._failed += [failure(sequence, error.code, str(error)) for sequence in failed]
        self._drop_copies()

    def _check_takes_adapters(self, which: object) -> None:
        if not self.config.enable_lora:
            raise InvalidArgument(f"adapter {str(which)!r}: this engine takes no adapters; set enable_lora")

    def _drop_copies(self) -> None:
        for digest in self._adapters.take_dropped():
            self._runner.drop(digest)

    def _check_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        vocab_size, most = self.shape.vocab_size, self.config.max_logprobs
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            count = vocab_size if asked == -1 else asked or 0
            if count > most != -1:
                found = f"-1, all {count}," if asked == -1 else count
                raise InvalidArgument(
                    f"sampling parameter {name!r}: {found} is more than max_logprobs {most}; ask for fewer or raise it"
                )
            if (
                name == "prompt_logprobs"
                and asked is not None
                and (count + 1) * num_prompt_tokens > MAX_PROMPT_LOGPROBS
            ):
                raise InvalidArgument(
                    f"sampling parameter {name!r}: {count} for each of {num_prompt_tokens} tokens; together at most "
                    f"{MAX_PROMPT_LOGPROBS} are given, the tokens' own included; ask for fewer or shorten the prompt"
                )

    def _check_tokens(self, name: str, token_ids: Iterable[int]) -> list[int]:
        try:
            # Checks types and signs at C speed: prompts have up to a hundred thousand tokens.
            tokens = array("Q", token_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidArgument(f"{name}: not a list of token ids: {error}") from error
        if tokens and (largest := max(tokens)) >= self.shape.vocab_size:
            raise InvalidArgument(f"{name}: token id {largest} is outside the vocabulary of {self.shape.vocab_size}")
        return tokens.tolist()


def _registry(config: EngineConfig, shape: ModelConfig, memory: MeasuredMemory) -> AdapterRegistry:
    """An empty one; raises ConfigError when the copies of a full set of slots do not fit into host memory."""
    largest = lora_slot_bytes(shape, config.max_lora_rank, DTYPE_BYTES[memory.dtype]) if config.enable_lora else 0
    least, given = config.max_loras * largest, config.cpu_lora_memory_bytes
    if given is not None and given < least:
        raise ConfigError(
            f"cpu_lora_memory_bytes: {given} is less than {least}, the host copies of {config.max_loras} adapters of "
            f"{largest} bytes each; raise it, or lower max_loras or max_lora_rank"
        )
    return AdapterRegistry(config.max_loras, config.max_host_loras, given)


def copy_failure(load: SlotLoad, why: str) -> Internal:
    """What the sequences of an adapter are told when its copy into a slot failed."""
    return Internal(f"adapter {load.digest!r}: copying it into a slot failed: {why}")


def check_max_model_len(config: EngineConfig, shape: ModelConfig) -> int:
    """Tokens of prompt and output together that an engine serves.

    Raises:
        ConfigError: more than the model has positions for.
    """
    limit = shape.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len: {config.max_model_len} exceeds the model's max_position_embeddings {limit}")
    return config.max_model_len or limit


def _check_allowed(params: SamplingParams, ends: frozenset[int], bad_words: Iterable[tuple[int, ...]]) -> None:
    forbidden = {word[0] for word in bad_words if len(word) == 1} | (ends if params.min_tokens else frozenset())
    if params.allowed_token_ids and forbidden.issuperset(params.allowed_token_ids):
        raise InvalidArgument(
            "sampling parameter 'allowed_token_ids': bad_words and min_tokens forbid all of them; allow another token"
        )
