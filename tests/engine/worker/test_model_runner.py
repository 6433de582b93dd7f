# SPDX-License-Identifier: Apache-2.0
"""The runner by itself: order of results, slots, isolation between sequences, types, and memory."""

import dataclasses
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_checkpoints import VOCAB, load_oracle, make_adapter, make_checkpoint

from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.lora.peft.adapter import WEIGHTS_FILE, read_adapter
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.sequence import Sequence
from quire_engine.step.plan import ScheduledSpan, SlotLoad, StepPlan
from quire_engine.worker import model_runner
from quire_engine.worker.memory_budget import GIB, MemoryBudget, num_kv_blocks
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_engine.worker.warmup import compile_steps, peak_memory_steps
from quire_kernels import attention
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.memory_sizing import kv_block_bytes, lora_slot_bytes
from quire_spec.model.model_config import ModelConfig

CONFIG = EngineConfig(
    model="m", dtype="float32", max_model_len=128, block_size=8, max_num_seqs=8, max_num_batched_tokens=64,
    enable_lora=True, max_loras=2, max_lora_rank=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def shape(folder):
    return ModelConfig.load(folder)


@pytest.fixture(scope="module")
def adapters(folder, shape, tmp_path_factory):
    """Three adapters in host memory, by digest."""
    paths = {f"d{seed}": make_adapter(folder, tmp_path_factory.mktemp(f"a{seed}"), seed=seed) for seed in range(3)}
    return {digest: read_adapter(path, shape, 8, torch.float32) for digest, path in paths.items()}


@pytest.fixture
def engine_runner(folder, shape, adapters):
    made = DeviceModelRunner(CONFIG, shape, folder)
    for digest, adapter in adapters.items():
        made.store_adapter(digest, made.pack_adapter(adapter))
    return made


class Blocks:
    """Hands out blocks in turn."""

    def __init__(self) -> None:
        self.next = 0

    def sequence(self, tokens, **params):
        made = Sequence(0, tokens, SamplingParams(**({"temperature": 0.0} | params)), seed=0, max_output_tokens=50)
        count = -(-(len(tokens) + 20) // CONFIG.block_size)
        made.block_table = list(range(self.next, self.next + count))
        self.next += count
        return made


def _prompt(length, seed=0):
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _first(made, tokens, slot=None, loads=(), **params):
    """First output token of a prompt, alone."""
    sequence = Blocks().sequence(tokens, **params)
    _load(made, loads)
    return made.execute(StepPlan([ScheduledSpan(sequence, 0, len(tokens), slot)]))[0].token_ids


def _load(made, loads):
    for load in loads:
        made.load_adapter_slot(load)()


def test_results_come_in_the_order_of_the_spans(engine_runner):
    _load(engine_runner, [SlotLoad("d0", 0), SlotLoad("d1", 1)])
    prompts = [_prompt(n, seed=n) for n in (9, 30, 3, 17, 25, 8)]
    slots = [1, None, 0, 1, None, 0]
    blocks = Blocks()
    sequences = [blocks.sequence(p) for p in prompts]
    first = engine_runner.execute(
        StepPlan([ScheduledSpan(s, 0, len(p), slot) for s, p, slot in zip(sequences, prompts, slots, strict=True)])
    )
    alone = [_first(engine_runner, p, slot) for p, slot in zip(prompts, slots, strict=True)]
    assert [r.token_ids for r in first] == alone
    # Then decoding ones, chunks that do not sample and a whole prompt, mixed.
    engine_runner.execute(
        StepPlan([ScheduledSpan(s, 0, len(p), slot) for s, p, slot in zip(sequences, prompts, slots, strict=True)])
    )
    for sequence, result in zip(sequences, first, strict=True):
        sequence.output_token_ids += result.token_ids
    chunked, whole = blocks.sequence(_prompt(20, seed=50)), blocks.sequence(_prompt(12, seed=51))
    spans = [
        ScheduledSpan(chunked, 0, 11, 1),
        *(ScheduledSpan(s, s.num_tokens - 1, 1, slot) for s, slot in zip(sequences[:3], slots[:3], strict=True)),
        ScheduledSpan(whole, 0, 12, None),
        *(ScheduledSpan(s, s.num_tokens - 1, 1, slot) for s, slot in zip(sequences[3:], slots[3:], strict=True)),
    ]
    results = [r.token_ids for r in engine_runner.execute(StepPlan(spans))]
    expected = [
        _first(engine_runner, s.tokens(0, s.num_tokens), slot) for s, slot in zip(sequences, slots, strict=True)
    ]
    assert results == [[], *expected[:3], _first(engine_runner, whole.prompt_token_ids), *expected[3:]]


def test_a_slot_holds_what_was_loaded_last(engine_runner, adapters):
    prompt = _prompt(20)
    found = {d: _first(engine_runner, prompt, 0, [SlotLoad(d, 0)], logprobs=0) for d in adapters}
    assert [_first(engine_runner, prompt, 1, [SlotLoad(d, 1)]) for d in adapters] == list(found.values())
    # A dropped host copy leaves the slot as it is.
    engine_runner.discard_adapter("d2")
    assert _first(engine_runner, prompt, 1) == found["d2"]
    assert _first(engine_runner, prompt, 0) == found["d2"]
    assert _first(engine_runner, prompt, 1, [SlotLoad("d0", 1)]) == found["d0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_smaller_adapter_leaves_nothing_of_a_larger_one(dtype, folder, shape, tmp_path):
    made = DeviceModelRunner(dataclasses.replace(CONFIG, dtype=str(dtype).removeprefix("torch.")), shape, folder)
    for name, config in {"large": {}, "small": {"r": 1, "target_modules": ["v_proj"]}}.items():
        adapter = read_adapter(make_adapter(folder, tmp_path / name, **config), shape, 8, dtype)
        made.store_adapter(name, made.pack_adapter(adapter))
    prompt = _prompt(30)
    fresh = _logprobs(made, prompt, 0, [SlotLoad("small", 0)])
    assert _logprobs(made, prompt, 0, [SlotLoad("large", 0)]) != fresh
    assert _logprobs(made, prompt, 0, [SlotLoad("small", 0)]) == fresh


def _logprobs(made, tokens, slot=None, loads=()):
    sequence = Blocks().sequence(tokens, logprobs=20)
    _load(made, loads)
    (result,) = made.execute(StepPlan([ScheduledSpan(sequence, 0, len(tokens), slot)]))
    return result.logprobs


def test_an_adapter_that_overflows_harms_its_own_sequences_only(folder, shape, adapters, tmp_path):
    broken = make_adapter(folder, tmp_path, seed=1)
    tensors = load_file(broken / WEIGHTS_FILE)
    save_file({name: tensor * 1e25 for name, tensor in tensors.items()}, broken / WEIGHTS_FILE)
    made = DeviceModelRunner(CONFIG, shape, folder)
    made.store_adapter("broken", made.pack_adapter(read_adapter(broken, shape, 8, torch.float32)))
    made.store_adapter("d0", made.pack_adapter(adapters["d0"]))
    loads = [SlotLoad("broken", 0), SlotLoad("d0", 1)]
    prompts = [_prompt(20, seed=i) for i in range(3)]
    expected = [_first(made, prompts[1], 1, loads), _first(made, prompts[2])]
    # Its NaNs are left in the blocks that the next step's sequences get.
    for slots in ((0, 0, 0), (0, 1, None)):
        blocks = Blocks()
        sequences = [blocks.sequence(p) for p in prompts]
        plan = StepPlan([ScheduledSpan(s, 0, 20, slot) for s, slot in zip(sequences, slots, strict=True)])
        results = [r.token_ids for r in made.execute(plan)]
    assert results[1:] == expected
    assert not made._kv_cache.layers[1].isfinite().all()
    assert 0 <= results[0][0] < VOCAB
    for sequence, result in zip(sequences, results, strict=True):
        sequence.output_token_ids += result
    decoded = made.execute(StepPlan([ScheduledSpan(s, 20, 1, slot) for s, slot in zip(sequences, slots, strict=True)]))
    assert decoded[1].token_ids == _first(made, prompts[1] + expected[0], 1)
    assert decoded[2].token_ids == _first(made, prompts[2] + expected[1])


def test_bfloat16_is_as_exact_as_transformers_in_bfloat16(folder, shape, monkeypatch):
    monkeypatch.setattr(attention, "MIN_SINGLE_GEMM_KEYS", 0)
    made = DeviceModelRunner(dataclasses.replace(CONFIG, dtype="bfloat16"), shape, folder)
    assert made.memory.dtype == "bfloat16"
    truth, rounded = load_oracle(folder), load_oracle(folder).to(torch.bfloat16)
    ours, theirs = [], []
    for seed in range(12):
        tokens = _prompt(40, seed)
        sequence = Blocks().sequence(tokens, logprobs=20)
        made.execute(StepPlan([ScheduledSpan(sequence, 0, 39, None)]))
        (entries,) = made.execute(StepPlan([ScheduledSpan(sequence, 39, 1, None)]))[0].logprobs
        ids = [e.token_id for e in entries]
        with torch.inference_mode():
            exact = truth(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)[ids]
            theirs.append(rounded(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)[ids] - exact)
        ours.append(torch.tensor([e.logprob for e in entries]) - exact)
    assert torch.cat(ours).norm() < 1.5 * torch.cat(theirs).norm()


def test_memory_is_what_was_allocated(folder, shape, engine_runner):
    memory = engine_runner.memory
    assert memory.weights_bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    assert memory.lora_bytes == 2 * lora_slot_bytes(shape, 8, 4)
    assert memory.num_blocks == engine_runner.num_blocks == 8 * 128 // 8
    assert memory.kv_bytes == memory.num_blocks * kv_block_bytes(shape, 8, 4)
    assert (memory.block_size, memory.max_model_len, memory.dtype, memory.device) == (8, 128, "float32", "cpu")


def test_swap_space_is_measured_where_there_is_some(folder, shape, engine_runner):
    assert engine_runner.swap_costs == SwapCosts() and engine_runner.memory.swap_bytes == 0
    one = kv_block_bytes(shape, 8, 4)
    made = DeviceModelRunner(dataclasses.replace(CONFIG, swap_space=5.5 * one / 2**30), shape, folder)
    assert made.swap_costs.num_host_blocks == 5 and made.memory.swap_bytes == 5 * one
    assert 0 < made.swap_costs.seconds_per_block < 1 and 0 < made.swap_costs.seconds_per_token < 1


def test_no_adapter_slots_unless_asked(folder, shape):
    made = DeviceModelRunner(dataclasses.replace(CONFIG, enable_lora=False), shape, folder)
    assert made.memory.lora_bytes == 0


def test_max_model_len_is_the_checkpoints_by_default(folder, shape):
    made = DeviceModelRunner(dataclasses.replace(CONFIG, max_model_len=None, max_num_seqs=1), shape, folder)
    assert made.memory.max_model_len == 512
    assert made.num_blocks == 512 // 8


def test_a_cache_too_small_for_one_sequence_is_refused(folder, shape):
    with pytest.raises(ConfigError) as error:
        DeviceModelRunner(dataclasses.replace(CONFIG, kv_cache_memory_bytes=65_535), shape, folder)
    message = str(error.value)
    assert "raise kv_cache_memory_bytes to 65536 or more" in message
    assert "KV cache" in message
    assert "65,535 bytes" in message


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("kv_cache_memory_bytes", 2**60, rf"{2**60} are more than the \d+ bytes that are free; lower it"),
        ("swap_space", 2.0**30, "the memory cannot be had; lower it"),
    ],
)
def test_memory_that_the_machine_does_not_have(folder, shape, name, value, complaint):
    with pytest.raises(ConfigError, match=f"^{name}: {complaint}"):
        DeviceModelRunner(dataclasses.replace(CONFIG, **{name: value}), shape, folder)


BUDGET = MemoryBudget(total=20 * GIB, weights=4 * GIB, lora=1 * GIB, activations=3 * GIB)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kv_cache_memory_bytes": 100 * MIB + 1}, 100),
        # A quarter of the 12 GiB that are left.
        ({"device": "cpu", "max_num_seqs": 10_000}, 3 * 1024),
        # As much as 8 sequences of 16 blocks can use.
        ({"device": "cpu"}, 128),
        ({"device": "cuda"}, 12 * 1024),
    ],
)
def test_number_of_blocks(changes, expected):
    assert num_kv_blocks(dataclasses.replace(CONFIG, **changes), 128, MIB, BUDGET) == expected


def test_four_gib_at_most_on_a_cpu():
    config = dataclasses.replace(CONFIG, device="cpu", max_num_seqs=10_000)
    assert num_kv_blocks(config, 128, MIB, dataclasses.replace(BUDGET, total=100 * GIB)) == 4 * 1024


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"device": "cpu"}, "set kv_cache_memory_bytes to 16777216 or more, if the machine has it"),
        ({"device": "cuda"}, "raise gpu_memory_utilization, lower max_num_batched_tokens or max_loras"),
    ],
)
def test_refusals_name_the_setting_and_the_bytes(changes, fix):
    budget = dataclasses.replace(BUDGET, total=8 * GIB + 15 * MIB)
    with pytest.raises(ConfigError) as error:
        num_kv_blocks(dataclasses.replace(CONFIG, **changes), 128, MIB, budget)
    message = str(error.value)
    assert message.startswith(
        "max_model_len: a sequence of 128 tokens does not fit into the KV cache; lower max_model_"
    )
    assert fix in message.splitlines()[0]
    assert "adapter slots (2 of rank 8)" in message
    assert "4,294,967,296 bytes      4.00 GiB" in message


def test_the_largest_steps_take_the_whole_budget(engine_runner):
    seen, sampled = [], []
    model, sample = engine_runner._model, engine_runner._sampler

    class Watch:
        shape = model.shape
        compute_logits = model.compute_logits

        def __call__(self, batch, kv):
            widest = batch.attention.block_tables.shape
            seen.append((len(batch.token_ids), batch.num_logits, tuple(widest), batch.adapters.active_slots))
            assert all(linear.adapters.applies_to(batch.adapters) for _, linear in model.linears())
            return model(batch, kv)

    def choose(logits, rows):
        sampled.append([row.sequence for row in rows])
        return sample(logits, rows)

    engine_runner._model, engine_runner._sampler = Watch(), choose
    engine_runner._run_dummy_steps(CONFIG, peak_memory_steps(CONFIG, 128, VOCAB))
    # Logits of all tokens but those of one sequence: every span chooses one, and the rest are of prompts that ask how
    # likely their tokens are. The eighth sequence's prompt has 9 tokens, of which 2 are.
    assert seen == [(64, 57, (8, 16), {0, 1}), (64, 64, (1, 16), {0})]
    for sequences in sampled:
        assert all(s.params.has_penalties and s.params.allowed_token_ids and s.params.logit_bias for s in sequences)
        assert all(s.params.logprobs is not None and s.suppressed_token_ids and s.bad_words for s in sequences)
    assert [max(s.params.logprobs for s in sequences) for sequences in sampled] == [CONFIG.max_logprobs, 1]


@pytest.mark.parametrize(("loras", "more"), [(0, ""), (4, ", or lower max_loras or max_lora_rank")])
def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(folder, shape, monkeypatch, loras, more):
    monkeypatch.setattr("quire_engine.worker.device.available_memory_bytes", lambda: 100_000)
    monkeypatch.setattr("quire_engine.worker.model_runner.load_weights", None)
    config = dataclasses.replace(CONFIG, enable_lora=loras > 0, max_loras=loras or 1, dtype="float32")
    with pytest.raises(ConfigError) as refused:
        DeviceModelRunner(config, shape, folder)
    first, *table = str(refused.value).splitlines()
    fix = f"free memory, or choose a smaller model{more}"
    assert first == f"model: {config.model!r} does not fit into the memory that is free; {fix}"
    of_slots = ["adapter slots (4 of rank 8)"] * (loras > 0)
    assert [line.split("  ")[1] for line in table] == ["weights", *of_slots, "free"]
    assert table[-1].split()[1:] == ["100,000", "bytes", "0.00", "GiB"]


def test_before_requests_come_a_prompt_ran_beside_a_decoding_sequence(engine_runner, monkeypatch):
    """In every way of choosing; the kernels that they need are compiled then."""
    seen, forward, sample = [], engine_runner._forward, engine_runner._sampler

    def watch(work, *others):
        seen.append((work.starts, work.lengths, work.adapter_slots))
        return forward(work, *others)

    def choose(logits, rows):
        greedy, cut, penalized = {
            (p.greedy, p.top_p < 1, p.has_penalties) for p in (r.sequence.params for r in rows)
        }.pop()
        seen[-1] += (greedy, cut, penalized)
        return sample(logits, rows)

    monkeypatch.setattr(engine_runner, "_forward", watch)
    monkeypatch.setattr(engine_runner, "_sampler", choose)
    engine_runner._run_dummy_steps(CONFIG, compile_steps(CONFIG, 128))
    alone = [([126], [1], [0]), ([0], [64], [0])]
    both = ([126, 0], [1, 64], [0, 0])
    plain = [(True, False, False), (False, False, False), (False, True, False)]
    penalized = [(True, False, True), (False, False, True), (False, True, True)]
    assert seen == [(*step, True, False, False) for step in alone] + [(*both, *way) for way in plain + penalized]


def test_ranks_ask_for_tokens_that_all_of_them_have():
    config = dataclasses.replace(CONFIG, tensor_parallel_size=4)
    for span in (span for spans in peak_memory_steps(config, 128, 400) for span in spans):
        asked = {
            *span.sequence.suppressed_token_ids,
            *(span.sequence.params.logit_bias or ()),
            *span.sequence.tokens(0, 1),
        }
        assert max(asked.union(*span.sequence.bad_words)) == 99


def test_kernels_are_compiled_while_weights_are_read(folder, shape, monkeypatch):
    """By steps that run beside it, of which nothing is left and whose numbers are finite."""
    expected = _first(DeviceModelRunner(CONFIG, shape, folder), _prompt(20))
    ran, waited, project, load = threading.Event(), [], LlamaForCausalLM.compute_logits, model_runner.load_weights

    def seen(model, hidden, batch):
        logits = project(model, hidden, batch)
        assert logits.isfinite().all()
        ran.set()
        return logits

    def after_a_step(*args, **options):
        waited.append(ran.wait(60))
        load(*args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", seen)
    monkeypatch.setattr(model_runner, "load_weights", after_a_step)
    monkeypatch.setattr(model_runner, "_compiles_kernels", lambda device: True)
    assert _first(DeviceModelRunner(CONFIG, shape, folder), _prompt(20)) == expected
    assert waited == [True]


def test_a_kernel_that_does_not_compile_ends_the_start(folder, shape, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", broken)
    monkeypatch.setattr(model_runner, "_compiles_kernels", lambda device: True)
    with pytest.raises(RuntimeError, match="no such instruction"):
        DeviceModelRunner(CONFIG, shape, folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_eight_bit_cache_takes_less_and_costs_little(dtype, folder, shape):
    """Log probabilities of a prompt that is read in two parts, so that the second one reads the cache."""
    found = []
    for kv_cache_dtype in ("auto", "fp8"):
        made = DeviceModelRunner(dataclasses.replace(CONFIG, dtype=dtype, kv_cache_dtype=kv_cache_dtype), shape, folder)
        sequence = Blocks().sequence(_prompt(60), prompt_logprobs=0)
        made.execute(StepPlan([ScheduledSpan(sequence, 0, 40, None)]))
        [sampled] = made.execute(StepPlan([ScheduledSpan(sequence, 40, 20, None)]))
        found.append(torch.tensor([entries[0].logprob for entries in sampled.prompt_logprobs]))
        one = made.memory.kv_bytes // made.num_blocks
        assert one == kv_block_bytes(
            shape, 8, 1 if kv_cache_dtype == "fp8" else torch.finfo(getattr(torch, dtype)).bits // 8
        )
    error = (found[1] - found[0]).norm() / found[0].norm()
    # 3 % of attention's output a layer, of two layers; weights of this model are ten times as wide as a trained one's.
    assert 1e-4 < error < 0.15


def test_cuda_is_refused_where_there_is_none(folder, shape, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        DeviceModelRunner(dataclasses.replace(CONFIG, device="cuda"), shape, folder)
