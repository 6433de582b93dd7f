# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel engines generate the same tokens as engines of one rank, and all ranks end together."""

import dataclasses
import gc
import random
import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from support.draft_heads import random_eagle3_head, save_eagle3_head, save_medusa_heads
from support.engine_processes import wait_for
from support.graph_captures import replace_captures
from support.thread_workers import ThreadWorker, engine_with_thread_workers, rank_worker_processes
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint

from quire_engine import SamplingParams
from quire_engine.api.llm import LLM
from quire_engine.core.engine import Engine
from quire_engine.distributed.communicator import Communicator
from quire_engine.distributed.worker_handle import WorkerProcess
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.step.plan import RunnerLost
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.model.memory_sizing import kv_block_bytes, lora_bytes, lora_pages
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard
from quire_spec.protocol.messages import SequenceRequest

GREEDY = {"temperature": 0.0, "max_tokens": 18, "logprobs": 2}
DRAWN = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "max_tokens": 18}
# Chunked prefill beside decoding sequences, preemptions, and prefix cache hits.
SMALL = {"block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 40, "max_model_len": 128}
NUM_BLOCKS = 17
FAMILIES = ["llama", "qwen2", "opt", "phi3", "phi4", "gemma2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: make_checkpoint(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="module")
def adapters(folders, tmp_path_factory):
    """Three adapters for each of two architectures: of all linear layers, of some layers whose output or vocabulary is
    sharded, and of a layer whose input is sharded."""
    outside = ["k_proj", "up_proj", "embed_tokens", "lm_head"]
    kinds = {
        "llama": (
            {"use_dora": True, "modules_to_save": ["embed_tokens", "lm_head", "norm"]},
            {"r": 4, "target_modules": outside},
            {"r": 2, "target_modules": ["down_proj"], "lora_bias": True, "trainable_token_indices": [*range(8)]},
        ),
        "phi3": ({}, {"r": 4, "target_modules": ["qkv_proj"]}, {"r": 2, "target_modules": ["o_proj"]}),
    }
    return {
        name: [
            make_adapter(folders[name], tmp_path_factory.mktemp(name), i, **config) for i, config in enumerate(configs)
        ]
        for name, configs in kinds.items()
    }


def _config(folder, size, **changes):
    shape = ModelConfig.load(folder)
    local = kv_block_bytes(shape, SMALL["block_size"], 4) // shape.num_kv_heads * max(1, shape.num_kv_heads // size)
    config = EngineConfig(model=str(folder), dtype="float32", kv_cache_memory_bytes=NUM_BLOCKS * local, **SMALL)
    config = dataclasses.replace(config, tensor_parallel_size=size, **changes)
    config.validate()
    return config


def _requests():
    """Greedy and random requests, some with prompt log probabilities, some with a common prefix."""
    rng = random.Random(5)
    stem = [rng.randrange(VOCAB) for _ in range(30)]
    for i in range(9):
        prompt = (stem if i % 3 == 1 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        params = (GREEDY, GREEDY, DRAWN)[i % 3] | ({"prompt_logprobs": 1} if i % 5 == 0 else {})
        yield SequenceRequest(i, prompt, SamplingParams.from_mapping(params | {"seed": i}))


def _generate(engine, adapter=lambda i: None):
    """Return tokens and log probabilities of all requests, which arrive a few per step; `adapter(id)` is a digest."""
    waiting = [msgspec.structs.replace(request, adapter_digest=adapter(request.id)) for request in _requests()]
    tokens: dict[int, list[int]] = {request.id: [] for request in waiting}
    logprobs: dict[int, list[float]] = {request.id: [] for request in waiting}
    while waiting or engine.has_work:
        for request in waiting[:4]:
            engine.add(request)
        del waiting[:4]
        engine.read_pending_adapters()
        for result in engine.step().results:
            assert not result.error
            tokens[result.id] += result.token_ids
            for entries in (*(result.logprobs or []), *(result.prompt_logprobs or [])):
                logprobs[result.id] += [entries[0][1]] if entries else []
        engine.check_integrity()
    return tokens, [logprob for of_one in logprobs.values() for logprob in of_one]


def _count_ahead(engine):
    """Return a list that receives each step planned while another one is in flight."""
    schedule_async, planned = engine._scheduler.schedule_async, []

    def counted(now):
        if (plan := schedule_async(now)) is not None:
            planned.append(plan)
        return plan

    engine._scheduler.schedule_async = counted
    return planned


# Other architectures and sizes differ in the model only; test_sharded_model.py covers them.
@pytest.mark.parametrize(
    ("name", "size", "ahead", "replayed"),
    [("opt", 2, False, False), ("opt", 2, True, True), ("phi4", 4, True, False), ("gemma2", 2, False, True)],
)
def test_ranks_generate_the_tokens_of_one_rank(folders, name, size, ahead, replayed, monkeypatch):
    """With asynchronous scheduling, where rank 0 broadcasts the tokens, and with replayed decoding steps."""
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    expected = _generate(alone := Engine.from_config(_config(folders[name], 1, swap_space=0.0001)))
    captures = replace_captures(monkeypatch) if replayed else []
    engine = engine_with_thread_workers(_config(folders[name], size, swap_space=0.0001, async_scheduling=ahead))
    planned, outputs = _count_ahead(engine), _generate(engine)
    assert (len(planned) > 15) == ahead, len(planned)
    # All ranks replay the same steps in the same order.
    assert len(captures) == (size if replayed else 0)
    assert all(len(c.replayed) > 15 and c.replayed == captures[0].replayed for c in captures)
    assert outputs[0] == expected[0]
    assert outputs[1] == pytest.approx(expected[1], abs=1e-4)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    # In gemma2, layers with a window have blocks of their own. They are not swapped, and here no prefix stays cached.
    num_groups = 2 if name == "gemma2" else 1
    assert num_groups == 2 or (stats.prefix_cache_hits > 0 and stats.num_swapped_in_blocks > 0)
    assert engine.memory.num_blocks == num_groups * NUM_BLOCKS and engine.memory.tensor_parallel_size == size
    assert engine.memory.weights_bytes < 0.75 * alone.memory.weights_bytes
    captured = engine._runner._local_runner._graphs
    assert (captured is not None) == replayed
    del engine
    gc.collect()
    # Graphs contain NCCL calls, so they must be released before the communicator.
    assert captured is None or not captured._graphs


@pytest.mark.parametrize("is_small", [True, False])
def test_ranks_with_states_generate_the_tokens_of_one_rank(tmp_path, is_small, monkeypatch):
    """Every rank copies states to snapshots and back in the same steps, with steps planned ahead. A GPU has no graphs
    then."""
    folder = make_checkpoint(tmp_path, "qwen3_5")
    expected = _generate(Engine.from_config(_config(folder, 1)))
    captures = replace_captures(monkeypatch)
    changes = {} if is_small else {"kv_cache_memory_bytes": 1 << 22}
    engine = engine_with_thread_workers(_config(folder, 2, async_scheduling=True, **changes))
    planned, outputs = _count_ahead(engine), _generate(engine)
    assert len(planned) > 15 and not captures
    assert outputs[0] == expected[0]
    assert outputs[1] == pytest.approx(expected[1], abs=2e-3)
    assert engine._scheduler.states.num_snapshots_taken > 0
    assert _generate(engine)[0] == expected[0]
    stats = engine.stats()
    assert (stats.num_preemptions if is_small else stats.prefix_cache_hits) > 0


@pytest.mark.parametrize(("method", "size"), [("draft_model", 4), ("eagle3", 2), ("medusa", 2)])
def test_ranks_with_drafts_generate_the_tokens_of_one_rank(folders, tmp_path, method, size):
    """The draft model is the model itself, so its greedy drafts are right."""
    expected = _generate(Engine.from_config(_config(folders["llama"], 1)))[0]
    if method == "eagle3":
        save_eagle3_head(tmp_path, random_eagle3_head(), "safeailab")
    if method == "medusa":
        save_medusa_heads(tmp_path)
    drafts = SpeculativeConfig(method, 3, str(folders["llama"] if method == "draft_model" else tmp_path))
    config = _config(folders["llama"], size, speculative_config=drafts)
    # Blocks of rank 0 also contain the cache of the draft model, which has all heads.
    factor = {"draft_model": 3, "eagle3": 2, "medusa": 1}[method]
    config = dataclasses.replace(config, kv_cache_memory_bytes=factor * config.kv_cache_memory_bytes)
    engine = engine_with_thread_workers(config)
    assert engine.memory.num_blocks == NUM_BLOCKS
    planner = engine._scheduler.draft_planner
    planner._policy.draft_length = lambda *_: 3
    assert _generate(engine)[0] == expected
    assert planner.counts.num_draft_tokens > 50
    assert method != "draft_model" or planner.counts.num_accepted_tokens > 50


@pytest.mark.parametrize(("name", "size", "replayed"), [("llama", 4, False), ("phi3", 2, True)])
def test_one_batch_with_different_adapters_and_the_base_model(folders, adapters, name, size, replayed, monkeypatch):
    """More adapters than host copies and than slots, so that adapters are evicted."""
    captures = replace_captures(monkeypatch) if replayed else []
    lora = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8, "async_scheduling": replayed}
    lora |= {"lora_modules_to_save": True}
    outputs = []
    for ranks in (1, size):
        workers: list[ThreadWorker] = []

        def start(channels, workers=workers):
            workers.append(ThreadWorker(channels))
            return workers[-1]

        engine = engine_with_thread_workers(_config(folders[name], ranks, **lora), start_worker=start)
        for i, path in enumerate(adapters[name]):
            engine.add_adapter(f"d{i}", path, engine.read_adapter(path), slot_pinned=False)
        outputs.append(_generate(engine, lambda i: None if i % 4 == 3 else f"d{i % 4}")[0])
        assert engine.stats().num_adapter_evictions > 0
        with pytest.raises(InvalidArgument, match=r"adapter_config.json is missing"):
            engine.read_adapter(folders[name] / "none")
        slots = engine.memory.lora_bytes
        assert len(workers) == ranks - 1
        gc.collect()
        # The workers discard the adapters of rank 0 a moment later.
        for worker in workers:
            wait_for(lambda worker=worker: len(worker.stored_adapter_digests) == 2)
    assert outputs[0] == outputs[1]
    assert all(c.replayed == captures[1].replayed != [] for c in captures[1:])
    base = _generate(engine_with_thread_workers(_config(folders[name], 1)))[0]
    assert {i for i in base if base[i] == outputs[1][i]} == {3, 7}
    shape = ModelConfig.load(folders[name])
    assert slots < lora_bytes(shape, lora_pages(shape, 2, 2 * 8, has_vocab_modules=True), 4)


def _outputs(llm):
    """Generate all requests with LLM at once."""
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in _requests()]
    params = [SamplingParams(**request.params.to_mapping()) for request in _requests()]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _llm(folder, size, **changes):
    config = _config(folder, size, **changes).to_json()
    return LLM(config.pop("model"), **config)


def test_worker_process_ends_with_the_engine(folders):
    engine = Engine.from_config(_config(folders["qwen2"], 2))
    assert len(rank_worker_processes()) == 1
    engine.add(SequenceRequest(1, [1, 2, 3], SamplingParams.from_mapping(GREEDY)))
    assert len(engine.step().results[0].token_ids) == 1
    del engine
    gc.collect()
    wait_for(lambda: rank_worker_processes() == [])


def test_killed_worker_ends_all_ranks_with_two_steps_in_flight(folders):
    """Four ranks, two of which share a KV head."""
    expected = _outputs(_llm(folders["llama"], 1))
    llm = _llm(folders["llama"], 4, async_scheduling=True)
    assert _outputs(llm) == expected
    ranks = rank_worker_processes()
    assert len(ranks) == 3
    future_tokens, in_flight = llm.engine._runner._local_runner._future_tokens, []
    resolve = future_tokens.resolve

    def kill_and_resolve(token_ids, spans):
        if not in_flight:
            ranks[1].send_signal(signal.SIGKILL)
        in_flight.append(len(llm.engine._scheduler._in_flight.plans))
        resolve(token_ids, spans)

    future_tokens.resolve = kill_and_resolve
    with pytest.raises(RunnerLost, match=r"ended: killed by SIGKILL; .* restart the engine"):
        while True:
            _outputs(llm)
    assert in_flight[0] == 2
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    # A lost engine stays lost, and its state stays consistent.
    with pytest.raises(RunnerLost):
        _outputs(llm)
    llm.engine.check_integrity()


def test_on_lost_is_called_at_once_when_a_worker_dies(folders):
    reasons: list[str] = []
    engine = Engine.from_config(_config(folders["llama"], 2), on_lost=reasons.append)
    (rank,) = rank_worker_processes()
    rank.send_signal(signal.SIGKILL)
    wait_for(lambda: len(reasons) == 1 and "rank 1 of 2 ended: killed by SIGKILL" in reasons[0])
    assert not engine.has_work
    # Waiting for the device, or for a result from it, fails as well.
    group = engine._runner._worker_group
    with pytest.raises(RunnerLost, match="killed by SIGKILL"):
        group.wait_until(lambda: False)
    with pytest.raises(RunnerLost, match="killed by SIGKILL"):
        group.wait_result(lambda: 1)


def test_hanging_worker_is_detected_and_killed(folders):
    engine = engine_with_thread_workers(_config(folders["llama"], 2), start_worker=WorkerProcess, timeout_s=4.0)
    (rank,) = rank_worker_processes()
    engine.add(SequenceRequest(1, [1, 2, 3], SamplingParams.from_mapping(GREEDY)))
    engine.step()
    rank.suspend()
    start = time.monotonic()
    with pytest.raises(RunnerLost, match="a step failed in rank 0"):
        engine.step()
    assert 3.5 < time.monotonic() - start < 60
    assert psutil.wait_procs([rank], timeout=10)[1] == []


def test_startup_error_of_a_rank_leaves_no_processes(folders, monkeypatch):
    with pytest.raises(ConfigError, match=r"^max_model_len: a sequence of 128 tokens does not fit"):
        Engine.from_config(dataclasses.replace(_config(folders["llama"], 2), kv_cache_memory_bytes=1000))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size: 8 is .* attention heads, 4, is not a multiple of 8; use 4"
    ):
        Engine.from_config(_config(folders["llama"], 8))
    assert rank_worker_processes() == []


def test_load_error_of_a_worker_is_reported(folders, tmp_path):
    """Rank 0 finds its weights, but the worker, which starts later, does not."""

    def start(channels):
        (folders["llama"] / "model.safetensors").rename(tmp_path / "hidden")
        return WorkerProcess(channels)

    with pytest.raises(ConfigError, match="found neither"):
        engine_with_thread_workers(_config(folders["llama"], 2), start_worker=start)
    (tmp_path / "hidden").rename(folders["llama"] / "model.safetensors")
    wait_for(lambda: rank_worker_processes() == [])


@pytest.mark.parametrize("ahead", [False, True])
def test_sigint_is_deferred_to_the_end_of_a_step(folders, ahead):
    engine = engine_with_thread_workers(_config(folders["llama"], 2, async_scheduling=ahead))
    expected = _generate(engine)
    model = engine._runner._local_runner._model

    class Interrupted:
        shape = model.shape
        compute_logits = model.compute_logits

        def __call__(self, batch, kv):
            signal.raise_signal(signal.SIGINT)
            return model(batch, kv)

    engine._runner._local_runner._model = Interrupted()
    engine.add(SequenceRequest(100, [1, 2, 3], SamplingParams.from_mapping(GREEDY)))
    # SIGINT can be ignored when the tests start, as in a shell's background job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    finally:
        signal.signal(signal.SIGINT, before)
    engine.abort([100])
    engine._runner._local_runner._model = model
    assert _generate(engine)[0] == expected[0]


def test_wait_for_the_device_has_the_time_limit_of_a_collective(folders):
    engine = engine_with_thread_workers(_config(folders["llama"], 2), timeout_s=5.0)
    group = engine._runner._worker_group
    assert group.wait_result(lambda: 1) == 1
    group._timeout_s = 0.05
    group.wait_until(lambda: True)
    with pytest.raises(RunnerLost, match=r"a step did not finish within 0\.05 s"):
        group.wait_until(lambda: False)
    with pytest.raises(RunnerLost, match="a step did not finish"):
        engine.add(SequenceRequest(1, [1, 2, 3], SamplingParams.from_mapping(GREEDY)))
        engine.step()


def test_nccl_is_aborted_once_and_not_while_a_step_uses_it(folders):
    """An abort during a step would make the step hang. A fake replaces NCCL, which requires a GPU."""
    aborts = []
    communicator = Communicator(TensorParallelShard(ModelConfig.load(folders["llama"]), 0, 2), lambda: None)
    communicator._device, communicator._process_group = (
        torch.device("cuda"),
        SimpleNamespace(abort=lambda: aborts.append(step_lock.locked())),
    )
    step_lock = threading.Lock()
    with step_lock:
        communicator.abort(step_lock)
        communicator.abort(step_lock)
        assert aborts == []
    wait_for(lambda: aborts == [False])
