# SPDX-License-Identifier: Apache-2.0
"""Real engines with random configurations under random traffic: each output equals that of the request alone."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.graph_captures import replace_captures
from support.thread_workers import ThreadWorker
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.api.outputs import RequestOutput
from quire_engine.api.request_runner import RunningRequest
from quire_engine.core.engine import Engine
from quire_engine.executor.runner_factory import create_runner
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.requests.processor import PreparedRequest
from quire_engine.requests.request_adapter import RequestAdapter
from quire_engine.requests.request_state import RequestState
from quire_engine.step.plan import SlotLoad
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.checkpoint import Checkpoint
from quire_kernels import kv_cache_write
from quire_kernels.kv_cache_layout import quantize_rows
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, NotFound
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard
from quire_spec.protocol.messages import GenerateRequest, SequenceRequest

NAMES = ["llama", "llama-longrope", "qwen2-windows", "gemma2", "opt", "phi3"]
ADAPTERS: list[dict[str, Any]] = [
    {"r": 3},
    {"r": 8, "use_rslora": True, "rank_pattern": {"layers.1.*": 2}},
    {"r": 4, "target_modules": "all-linear", "lora_alpha": 5},
]
STEMS = [[random.Random(i).randrange(VOCAB) for _ in range(40)] for i in range(3)]


@dataclass
class TimedRequest:
    """A request with the steps at which it arrives and is aborted."""

    prompt: list[int]
    params: dict[str, Any]
    adapter_digest: str | None
    priority: int
    arrival: int
    """Step at which it arrives."""
    abort_after: int | None
    """Steps after arrival at which it is aborted; None: never."""


@dataclass
class FuzzHarness:
    """Runs requests on engines of one checkpoint."""

    folder: Path
    adapters: dict[str, Path]
    rng: random.Random
    fields: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def engine(self, **fields: Any) -> Engine:
        config = EngineConfig.from_json(
            {"model": str(self.folder), "dtype": "float32", "max_model_len": 96} | self.fields | fields
        )
        checkpoint = Checkpoint.load(self.folder)
        runner = create_runner(config, checkpoint.shape, self.folder, start_worker=ThreadWorker)
        return Engine(config, checkpoint, runner, runner.memory, lambda: self.now)

    def prepare(self, timed: TimedRequest, first_id: int) -> tuple[RunningRequest, list[SequenceRequest]]:
        tokenizer = Tokenizer(self.folder)
        params = SamplingParams(**timed.params)
        request = GenerateRequest(first_id, "", None, timed.prompt, params, False, priority=timed.priority)
        bad_word_ids = tokenizer.bad_word_ids(params.bad_words) if params.bad_words else []
        prepared = PreparedRequest(None, timed.prompt, bad_word_ids, None, [], [], None, [])
        state = RequestState(first_id, request, RequestAdapter(digest=timed.adapter_digest), 0.0)
        sequence_requests = state.submit(prepared, tokenizer, frozenset(), 0.0)
        return RunningRequest(state, prepared, 0.0), sequence_requests

    def add_adapter(self, engine: Engine, digest: str, pinned: bool = False) -> None:
        engine.add_adapter(digest, self.adapters[digest], engine.read_adapter(self.adapters[digest]), pinned)

    def run_alone(self, timed_requests: list[TimedRequest]) -> list[RunningRequest]:
        """Run one request at a time, in an engine with enough memory."""
        lora = {"enable_lora": True, "max_loras": len(self.adapters)} if self.adapters else {}
        engine = self.engine(enable_prefix_caching=False, max_num_batched_tokens=200, **lora)
        for digest in self.adapters:
            self.add_adapter(engine, digest)
        running: list[RunningRequest] = []
        for i, timed in enumerate(timed_requests):
            running_request, sequence_requests = self.prepare(timed, 100 * i)
            running.append(running_request)
            for request in sequence_requests:
                engine.add(
                    SequenceRequest(
                        request.id,
                        timed.prompt,
                        request.params,
                        timed.adapter_digest,
                        None,
                        request.bad_word_ids,
                    )
                )
            while engine.has_work:
                for result in engine.step().results:
                    if running_request.update(result):
                        engine.abort([result.id])
        return running

    def run_together(self, engine: Engine, timed_requests: list[TimedRequest]) -> dict[int, RunningRequest]:
        """Run all requests as they arrive, while adapters are added and removed; return them by index."""
        rng, running, step = self.rng, dict[int, RunningRequest](), 0
        reads: list[tuple[str, Path]] = []
        copies: list[tuple[SlotLoad, Any]] = []
        # Adapters are read and copied while steps run.
        engine.delegate_slot_copies(lambda *copy: copies.append(copy))
        for digest in self.adapters:
            self.add_adapter(engine, digest)
        while step <= max(timed.arrival for timed in timed_requests) or engine.has_work or reads or copies:
            assert step < 3000, f"the engine does not become idle: {engine.stats()}"
            self.now += rng.choice([0.01, 0.5])
            for i, timed in enumerate(timed_requests):
                if timed.arrival == step:
                    running_request, sequence_requests = self.prepare(timed, 100 * i)
                    try:
                        for request in sequence_requests:
                            engine.add(request)
                        running[i] = running_request
                    except NotFound:
                        assert timed.adapter_digest not in engine.adapter_states()
                elif i in running and timed.abort_after is not None and step == timed.arrival + timed.abort_after:
                    engine.abort(running[i].unfinished_sequence_ids)
            if self.adapters and step < 60 and rng.random() < 0.1:
                digest = rng.choice(list(self.adapters))
                if rng.random() < 0.4:
                    engine.remove_adapter(digest)
                else:
                    try:
                        self.add_adapter(engine, digest, pinned=rng.random() < 0.3)
                    except InvalidArgument as error:
                        assert "pinned" in str(error)
            reads += engine.pop_adapter_reads()
            while reads and rng.random() < 0.5:
                digest, path = reads.pop()
                engine.add_adapter(digest, path, engine.read_adapter(path))
            while copies and rng.random() < 0.5:
                slot_load, copy = copies.pop()
                copy()
                engine.on_slot_loaded(slot_load)
            for result in engine.step().results:
                assert result.error_code is None, result.error
                if running[result.id // 100].update(result):
                    engine.abort([result.id])
            engine.check_integrity()
            step += 1
        return running


def _random_request(rng: random.Random, digests: list[str], priorities: list[int]) -> TimedRequest:
    stem = rng.choice(STEMS)[: rng.randint(1, 40)]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.choice([1, 12, 25, 50]), "ignore_eos": True}
    if rng.random() < 0.4:
        params |= {"temperature": 1.0, "seed": rng.randrange(99), "top_k": rng.choice([0, 40])}
        params["n"] = rng.randint(1, 3)
    for name, value in {
        "stop_token_ids": rng.sample(range(VOCAB), 40),
        "stop": rng.sample(["e", "th", " ", "a", "ö"], 2),
        "min_tokens": rng.randint(0, params["max_tokens"]),
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {rng.randrange(VOCAB): 5.0},
        "allowed_token_ids": rng.sample(range(VOCAB), 90),
        "bad_words": ["th", "e"],
        "logprobs": rng.choice([0, 3]),
        "prompt_logprobs": 1,
    }.items():
        if rng.random() < 0.12:
            params[name] = value
    return TimedRequest(
        prompt=stem + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 9]))],
        params=params,
        adapter_digest=rng.choice([None, *digests]),
        priority=rng.choice(priorities),
        arrival=rng.choice([0, 0, rng.randint(0, 30)]),
        abort_after=rng.randint(0, 25) if rng.random() < 0.15 else None,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Path]]]:
    models = {}
    for name in NAMES:
        folder = make_checkpoint(tmp_path_factory.mktemp(name), name)
        save_tokenizer(byte_level(VOCAB - 1), folder)
        adapters = [make_adapter(folder, tmp_path_factory.mktemp(name), i, **kind) for i, kind in enumerate(ADAPTERS)]
        models[name] = folder, {f"sha256:{i}": path for i, path in enumerate(adapters)}
    return models


@pytest.mark.parametrize("seed", [*range(14), 18, 19])
def test_outputs_equal_those_of_each_request_alone(models, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    folder, adapters = models[NAMES[seed % len(NAMES)]]
    harness = FuzzHarness(folder, adapters if seed % 3 else {}, rng)
    is_int8 = seed % 4 == 1
    if is_int8:
        harness.fields["kv_cache_dtype"] = "int8_per_token_head"
        # The last bits of a key depend on the batch, and can change its code; without them the output is the same.
        monkeypatch.setattr(kv_cache_write, "quantize_rows", lambda x: quantize_rows(x.bfloat16()))
    policy = rng.choice(["fcfs", "priority"])
    timed_requests = [
        _random_request(rng, list(harness.adapters), [0, 0, -1, 1] if policy == "priority" else [0]) for _ in range(12)
    ]
    expected = harness.run_alone(timed_requests)
    block_size = rng.choice([8, 16])
    tp_size = rng.choice([2, 4]) if seed in (12, 13) else 1
    pp_size = 2 if seed > 13 else 1
    bytes_per_block = kv_block_bytes(
        TensorParallelShard(ModelConfig.load(folder), 0, tp_size).local_config,
        block_size,
        *((1, 4) if is_int8 else (4, 0)),
    )
    bytes_per_block //= pp_size  # each stage has one of two layers
    fields: dict[str, Any] = {
        "tensor_parallel_size": tp_size,
        "pipeline_parallel_size": pp_size,
        "block_size": block_size,
        # Enough for one sequence, and little more.
        "kv_cache_memory_bytes": (96 // block_size + rng.randint(0, 4)) * bytes_per_block,
        "max_num_seqs": rng.choice([1, 4, 8]),
        "max_num_batched_tokens": rng.choice([8, 24, 60]),
        "enable_prefix_caching": rng.random() < 0.7,
        "async_scheduling": rng.random() < 0.6 and pp_size == 1,
        "scheduling_policy": policy,
        "swap_space": rng.choice([0, 3.5, 20.5]) * bytes_per_block / 2**30,
    }
    if fields["enable_prefix_caching"]:
        # For all ranks together.
        fields["kv_offloading_size"] = rng.choice([0, 8.5, 40.5]) * tp_size * pp_size * bytes_per_block / 2**30
    if harness.adapters:
        fields |= {"enable_lora": True, "max_loras": rng.choice([1, 2]), "max_cpu_loras": 2}
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    # In half of the runs, decode steps replay the graphs of a GPU, whose steps run eagerly here.
    captures = replace_captures(monkeypatch) if seed % 2 == 0 else []
    engine = harness.engine(**fields)
    for i, running_request in harness.run_together(engine, timed_requests).items():
        if not running_request.unfinished_sequence_ids:
            _assert_equal(running_request.to_request_output(None, None), expected[i].to_request_output(None, None))
    stats = engine.stats()
    assert stats.num_used_blocks == stats.num_used_host_blocks == 0
    assert all(capture.replayed for capture in captures)
    assert len(captures) == (tp_size if seed % 2 == 0 and pp_size == 1 else 0)


def _assert_equal(actual: RequestOutput, expected: RequestOutput) -> None:
    assert _logprobs(actual.prompt_logprobs) == pytest.approx(_logprobs(expected.prompt_logprobs), abs=1e-3)
    for output, reference in zip(actual.outputs, expected.outputs, strict=True):
        assert (output.token_ids, output.text) == (reference.token_ids, reference.text)
        assert (output.finish_reason, output.stop_reason) == (reference.finish_reason, reference.stop_reason)
        assert _logprobs(output.logprobs) == pytest.approx(_logprobs(reference.logprobs), abs=1e-3)


def _logprobs(positions: list[Any] | None) -> list[float]:
    """Return all log probabilities by position, the most likely first."""
    entries_by_position = (position.values() for position in positions or [] if position)
    return [p for entries in entries_by_position for p in sorted((entry.logprob for entry in entries), reverse=True)]
