# SPDX-License-Identifier: Apache-2.0
"""Whole engines of random configurations under random traffic: each output is the one of its request alone."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.thread_workers import ThreadWorker
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.api.offline_request import OfflineRequest
from quire_engine.api.outputs import RequestOutput
from quire_engine.core.engine import Engine
from quire_engine.executor.tensor_parallel import create_runner
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.step.plan import SlotLoad
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.worker import cuda_graphs
from quire_kernels import paged_attention
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, NotFound
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.tensor_parallel import TensorParallelShard
from quire_spec.protocol.messages import SequenceRequest

NAMES = ["llama", "llama-longrope", "qwen2-windows", "gemma2", "opt", "phi3"]
ADAPTERS: list[dict[str, Any]] = [
    {"r": 3},
    {"r": 8, "use_rslora": True, "rank_pattern": {"layers.1.*": 2}},
    {"r": 4, "target_modules": "all-linear", "lora_alpha": 5},
]
STEMS = [[random.Random(i).randrange(VOCAB) for _ in range(40)] for i in range(3)]


@dataclass
class Asked:
    """A request, and when it comes and goes."""

    prompt: list[int]
    params: dict[str, Any]
    adapter: str | None
    priority: int
    arrival: int
    """Number of a step."""
    patience: int | None
    """Steps after which it is aborted; None: it is not."""


@dataclass
class World:
    """What an engine was asked, and what came of it."""

    folder: Path
    adapters: dict[str, Path]
    draw: random.Random
    fields: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def engine(self, **fields: Any) -> Engine:
        config = EngineConfig.from_json({"model": str(self.folder), "dtype": "float32", "max_model_len": 96} | fields)
        checkpoint = Checkpoint.load(self.folder)
        runner = create_runner(config, checkpoint.shape, self.folder, start_worker=ThreadWorker)
        return Engine(config, checkpoint, runner, runner.memory, lambda: self.now)

    def job(self, asked: Asked, first_id: int) -> OfflineRequest:
        tokenizer = Tokenizer(self.folder)
        params = SamplingParams(**asked.params)
        bad = tokenizer.bad_word_ids(params.bad_words) if params.bad_words else []
        first = SequenceRequest(first_id, asked.prompt, {}, asked.adapter, None, bad, priority=asked.priority)
        return OfflineRequest(first, None, params, None, tokenizer, frozenset())

    def add_adapter(self, engine: Engine, digest: str, pinned: bool = False) -> None:
        engine.add_adapter(digest, self.adapters[digest], engine.read_adapter(self.adapters[digest]), pinned)

    def alone(self, asked: list[Asked]) -> list[OfflineRequest]:
        """Each in an engine that does nothing else, and has room for everything."""
        lora = {"enable_lora": True, "max_loras": len(self.adapters)} if self.adapters else {}
        engine = self.engine(enable_prefix_caching=False, max_num_batched_tokens=200, **lora)
        for digest in self.adapters:
            self.add_adapter(engine, digest)
        jobs = [self.job(one, 100 * i) for i, one in enumerate(asked)]
        for job, one in zip(jobs, asked, strict=True):
            for request in job.sequence_requests:
                engine.add(
                    SequenceRequest(request.id, one.prompt, request.params, one.adapter, None, request.bad_word_ids)
                )
            while engine.has_work:
                for result in engine.step().results:
                    if job.update(result):
                        engine.abort([result.id])
        return jobs

    def together(self, engine: Engine, asked: list[Asked]) -> dict[int, OfflineRequest]:
        """All of them, as they come, with adapters that come and go; by their place in `asked`."""
        draw, jobs, step = self.draw, dict[int, OfflineRequest](), 0
        fetches: list[tuple[str, Path]] = []
        loads: list[tuple[SlotLoad, Any]] = []
        # Adapters are read and copied while steps run.
        engine.slot_copier = lambda *load: loads.append(load)
        for digest in self.adapters:
            self.add_adapter(engine, digest)
        while step <= max(one.arrival for one in asked) or engine.has_work or fetches or loads:
            assert step < 3000, f"it does not end: {engine.stats()}"
            self.now += draw.choice([0.01, 0.5])
            for i, one in enumerate(asked):
                if one.arrival == step:
                    job = self.job(one, 100 * i)
                    try:
                        for request in job.sequence_requests:
                            engine.add(request)
                        jobs[i] = job
                    except NotFound:
                        assert one.adapter not in engine.adapter_states()
                elif i in jobs and one.patience is not None and step == one.arrival + one.patience:
                    engine.abort(jobs[i].unfinished_sequence_ids)
            if self.adapters and step < 60 and draw.random() < 0.1:
                digest = draw.choice(list(self.adapters))
                if draw.random() < 0.4:
                    engine.remove_adapter(digest)
                else:
                    try:
                        self.add_adapter(engine, digest, pinned=draw.random() < 0.3)
                    except InvalidArgument as error:
                        assert "pinned" in str(error)
            fetches += engine.pop_adapter_reads()
            while fetches and draw.random() < 0.5:
                digest, path = fetches.pop()
                engine.add_adapter(digest, path, engine.read_adapter(path))
            while loads and draw.random() < 0.5:
                load, work = loads.pop()
                work()
                engine.on_slot_loaded(load)
            for result in engine.step().results:
                assert result.error_code is None, result.error
                job = jobs[result.id // 100]
                if job.update(result):
                    engine.abort([result.id])
            engine.check_integrity()
            step += 1
        return jobs


def _asked(draw: random.Random, digests: list[str], priorities: list[int]) -> Asked:
    stem = draw.choice(STEMS)[: draw.randint(1, 40)]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw.choice([1, 12, 25, 50]), "ignore_eos": True}
    if draw.random() < 0.4:
        params |= {"temperature": 1.0, "seed": draw.randrange(99), "top_k": draw.choice([0, 40])}
        params["n"] = draw.randint(1, 3)
    for name, value in {
        "stop_token_ids": draw.sample(range(VOCAB), 40),
        "stop": draw.sample(["e", "th", " ", "a", "ö"], 2),
        "min_tokens": draw.randint(0, params["max_tokens"]),
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {draw.randrange(VOCAB): 5.0},
        "allowed_token_ids": draw.sample(range(VOCAB), 90),
        "bad_words": ["th", "e"],
        "logprobs": draw.choice([0, 3]),
        "prompt_logprobs": 1,
    }.items():
        if draw.random() < 0.12:
            params[name] = value
    return Asked(
        prompt=stem + [draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, 9]))],
        params=params,
        adapter=draw.choice([None, *digests]),
        priority=draw.choice(priorities),
        arrival=draw.choice([0, 0, draw.randint(0, 30)]),
        patience=draw.randint(0, 25) if draw.random() < 0.15 else None,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Path]]]:
    made = {}
    for name in NAMES:
        folder = make_checkpoint(tmp_path_factory.mktemp(name), name)
        save_tokenizer(byte_level(VOCAB - 1), folder)
        adapters = [make_adapter(folder, tmp_path_factory.mktemp(name), i, **kind) for i, kind in enumerate(ADAPTERS)]
        made[name] = folder, {f"sha256:{i}": path for i, path in enumerate(adapters)}
    return made


@pytest.mark.parametrize("seed", range(14))
def test_outputs_are_those_of_each_request_alone(models, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    folder, adapters = models[NAMES[seed % len(NAMES)]]
    world = World(folder, adapters if seed % 3 else {}, draw)
    policy = draw.choice(["fcfs", "priority"])
    asked = [_asked(draw, list(world.adapters), [0, 0, -1, 1] if policy == "priority" else [0]) for _ in range(12)]
    expected = world.alone(asked)
    size = draw.choice([8, 16])
    ranks = draw.choice([2, 4]) if seed >= 12 else 1
    block = kv_block_bytes(TensorParallelShard(ModelConfig.load(folder), 0, ranks).local_config, size, 4)
    fields: dict[str, Any] = {
        "tensor_parallel_size": ranks,
        "block_size": size,
        # Room for one sequence, and little more.
        "kv_cache_memory_bytes": (96 // size + draw.randint(0, 4)) * block,
        "max_num_seqs": draw.choice([1, 4, 8]),
        "max_num_batched_tokens": draw.choice([8, 24, 60]),
        "enable_prefix_caching": draw.random() < 0.7,
        "async_scheduling": draw.random() < 0.6,
        "scheduling_policy": policy,
        "swap_space": draw.choice([0, 3.5, 20.5]) * block / 2**30,
    }
    if world.adapters:
        fields |= {"enable_lora": True, "max_loras": draw.choice([1, 2]), "max_cpu_loras": 2}
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    if seed % 4 == 0:
        # Decoding steps as graphs have them, run again instead of replayed.
        monkeypatch.setattr(cuda_graphs, "should_capture", lambda device: True)
        monkeypatch.setattr(cuda_graphs, "GraphCapture", lambda device: lambda step: step)
        monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    engine = world.engine(**fields)
    for i, job in world.together(engine, asked).items():
        if not job.unfinished_sequence_ids:
            _same(job.to_request_output(), expected[i].to_request_output())
    stats = engine.stats()
    assert stats.num_used_blocks == stats.num_used_host_blocks == 0


def _same(found: RequestOutput, wanted: RequestOutput) -> None:
    assert _logprobs(found.prompt_logprobs) == pytest.approx(_logprobs(wanted.prompt_logprobs), abs=1e-3)
    for mine, its in zip(found.outputs, wanted.outputs, strict=True):
        assert (mine.token_ids, mine.text) == (its.token_ids, its.text)
        assert (mine.finish_reason, mine.stop_reason) == (its.finish_reason, its.stop_reason)
        assert _logprobs(mine.logprobs) == pytest.approx(_logprobs(its.logprobs), abs=1e-3)


def _logprobs(positions: list[Any] | None) -> list[float]:
    """All of them, position by position, the likeliest first."""
    each = (position.values() for position in positions or [] if position)
    return [p for entries in each for p in sorted((entry.logprob for entry in entries), reverse=True)]
