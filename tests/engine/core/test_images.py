# SPDX-License-Identifier: Apache-2.0
"""Prompts with images give the greedy output of transformers, for any schedule. The oracle computes the whole prompt
for each token, and its images with it."""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from support.folder_store import drain
from support.image_checkpoints import (
    FAMILIES,
    GEMMA4,
    IMAGE_TOKEN,
    ImagePrompt,
    greedy,
    image_prompts,
    make_image_checkpoint,
)
from support.near_ties import assert_greedy_tokens
from support.thread_workers import engine_with_thread_workers
from support.tiny_checkpoints import load_adapted_oracle, load_oracle, make_adapter

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.worker.image_encoder import ImageEncoder
from quire_spec.documents.adapter_digest import adapter_digest
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import Internal, InvalidArgument
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

BIDIRECTIONAL = ("gemma3-vision", "gemma4-vision", "gemma4_unified-vision")
"""The tokens of an image attend to each other in both directions."""
NUM_TOKENS = 20
MAX_MODEL_LEN = 48
MAX_LOGIT_ERROR = 2e-5
"""In float32, relative to the largest log probability."""
PLANS: list[list[Any]] = [
    [3, [0], 2],
    [[1], 1, [2], 4],  # two images, one at the beginning
    [9],
    [3, [2], 2],  # another image at the same place
    [5, [0]],  # an image at the end
    [2, [0], [0], 1],  # the same image twice
]
PLANS += [PLANS[0]]


class Case(NamedTuple):
    folder: Path
    prompts: list[ImagePrompt]
    references: list[tuple[list[int], torch.Tensor]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    @functools.cache
    def make(name: str) -> Case:
        folder = make_image_checkpoint(tmp_path_factory.mktemp(name), name)
        prompts, oracle = image_prompts(folder, PLANS), load_oracle(folder)
        prompts[3] = prompts[3].with_text_of(prompts[0])
        return Case(folder, prompts, [greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts])

    return make


def _config(folder: Path, num_blocks: int | None = None, **changes: Any) -> EngineConfig:
    if num_blocks is not None:
        shape = ModelConfig.load(folder)
        changes["kv_cache_memory_bytes"] = num_blocks * kv_block_bytes(shape, 8, 4)
    defaults = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 8, "max_logprobs": -1}
    config = EngineConfig(str(folder), **(defaults | changes))  # type: ignore[arg-type]
    config.validate()
    return config


def _request(sequence_id: int, prompt: ImagePrompt, digest: str | None = None) -> SequenceRequest:
    allowed = list(range(IMAGE_TOKEN))
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, logprobs=-1, ignore_eos=True, allowed_token_ids=allowed
    )
    return SequenceRequest(sequence_id, prompt.token_ids, params, digest, images=prompt.images)


def _run(
    engine: Engine,
    prompts: list[ImagePrompt],
    digests: Mapping[int, str] | None = None,
    n: int = 1,
    on_step: Callable[[], None] = lambda: None,
) -> dict[int, tuple[list[int], list[dict[int, float]], int]]:
    """Return the tokens of each sequence, the log probabilities, and the number of cached tokens."""
    for i, prompt in enumerate(prompts):
        request = _request(i * n, prompt, (digests or {}).get(i))
        engine.add(request)
        empty = [replace(image, tensors={}) for image in prompt.images]
        for j in range(1, n):
            engine.add(replace(request, id=i * n + j, parent_id=i * n, images=empty))
    outputs: dict[int, tuple[list[int], list[dict[int, float]], int]] = {}
    while engine.has_work:
        for digest, path in engine.pop_adapter_reads():
            engine.add_adapter(digest, path, engine.read_adapter(path))
        on_step()
        for result in engine.step().results:
            assert result.error == ""
            tokens, tables, cached = outputs.get(result.id, ([], [], 0))
            tables += [{entry[0]: entry[1] for entry in entries} for entries in result.logprobs or []]
            outputs[result.id] = tokens + result.token_ids, tables, cached + (result.num_cached_tokens or 0)
        engine.check_integrity()
    return outputs


def _check(outputs: Any, references: list[tuple[list[int], torch.Tensor]], n: int = 1) -> None:
    assert len(outputs) == n * len(references)
    for i, (tokens, tables, _) in outputs.items():
        expected, logprobs = references[i // n]
        num_comparable = assert_greedy_tokens(tokens, expected, logprobs)
        for table, row in list(zip(tables, logprobs, strict=True))[:num_comparable]:
            errors = [abs(table[token] - float(row[token])) for token in range(IMAGE_TOKEN)]
            assert max(errors) < MAX_LOGIT_ERROR * float(row.abs().max())


SCENARIOS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "in chunks": {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    "preempted": {"num_blocks": MAX_MODEL_LEN // 8 + 1},
    "nothing cached": {"enable_prefix_caching": False},
    "drafts": {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_equal_transformers(cases, name, scenario):
    case = cases(name)
    changes = SCENARIOS[scenario]
    if name in BIDIRECTIONAL and scenario == "in chunks":
        changes = changes | {"max_num_batched_tokens": 12}  # an image is computed in one step
    if name in GEMMA4 and scenario == "preempted":
        changes = {"num_blocks": 2 * changes["num_blocks"] - 1}  # layers with a window have blocks of their own
    engine = Engine.from_config(_config(case.folder, **changes))
    _check(_run(engine, case.prompts), case.references)
    if name not in BIDIRECTIONAL:  # they free the blocks outside their window
        assert (engine.stats().num_preemptions > 0) == (scenario == "preempted")


@torch.inference_mode()
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_exact_as_transformers(cases, name):
    case = cases(name)
    outputs = _run(Engine.from_config(_config(case.folder, dtype="bfloat16")), case.prompts)
    oracle, errors, oracle_errors = load_oracle(case.folder, torch.bfloat16), [], []
    for i, prompt in enumerate(case.prompts):
        exact, first = case.references[i][1][0], outputs[i][1][0]
        errors.append(torch.tensor([first[token] for token in range(IMAGE_TOKEN)]) - exact)
        oracle_errors.append(greedy(oracle, prompt, 1)[1][0] - exact)
    sizes, oracle_sizes = torch.stack(errors).norm(dim=1), torch.stack(oracle_errors).norm(dim=1)
    if name == "mistral3-mistral4":
        # In a few prompts, rounding chooses another expert, here or in transformers, and the error is several times as
        # large.
        assert 0 < sizes.median() < 1.3 * oracle_sizes.median()
    else:
        assert 0 < sizes.norm() < 1.3 * oracle_sizes.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prefix_cache_never_mixes_images(cases, name):
    case = cases(name)
    engine = Engine.from_config(_config(case.folder))
    first = _run(engine, case.prompts[:1])
    other, same = _run(engine, case.prompts[3:4]), _run(engine, case.prompts[:1])
    assert case.prompts[3].token_ids[:8] == case.prompts[0].token_ids[:8]
    num_tokens = len(case.prompts[0].token_ids)
    num_cached = min(num_tokens // 8 * 8, num_tokens - 1)
    assert [outputs[0][2] for outputs in (first, other, same)] == [0, 0, num_cached]
    _check(same, case.references[:1])
    _check(other, case.references[3:4])
    # The tower has computed each image once.
    assert engine._runner._image_encoder.num_encoded == 2  # type: ignore[attr-defined]


def test_forks_share_the_images_of_their_parent(cases):
    case = cases("qwen3_vl")
    _check(_run(Engine.from_config(_config(case.folder)), case.prompts, n=2), case.references, n=2)


def test_ranks_get_the_embeddings_of_rank_0_or_the_blocks_of_another_engine(cases, tmp_path, monkeypatch):
    monkeypatch.setattr(SwapCosts, "is_worthwhile", lambda *_: True)
    case = cases("qwen3_vl")
    ranks = {"tensor_parallel_size": 2, "max_num_batched_tokens": 64}
    tiers = {"kv_offloading_size": 0.01, "kv_offloading_folder": str(tmp_path)}
    for num_rounds in (2, 1):
        engine = engine_with_thread_workers(_config(case.folder, **ranks, **tiers))
        for _ in range(num_rounds):
            drain(engine._scheduler.store_traffic._store)
            _check(_run(engine, case.prompts), case.references)
        drain(engine._scheduler.store_traffic._store)
    # Blocks are written when they are used for the second time.
    assert engine.stats().num_folder_read_blocks >= 5


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma4-e2b-vision"])
def test_adapters_of_the_language_model_equal_peft(cases, name, tmp_path):
    case = cases(name)
    targets = r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"
    adapter = make_adapter(case.folder, tmp_path / "adapter", target_modules=targets)
    oracle = load_adapted_oracle(case.folder, adapter).base_model.model
    engine = Engine.from_config(_config(case.folder, enable_lora=True))
    digest = adapter_digest(adapter)
    engine.add_adapter(digest, adapter, engine.read_adapter(adapter))
    outputs = _run(engine, case.prompts[:3], {0: digest, 2: digest})
    adapted = [greedy(oracle, case.prompts[i], NUM_TOKENS) for i in (0, 2)]
    _check(outputs, [adapted[0], case.references[1], adapted[1]])
    assert adapted[0][0] != case.references[0][0]


@pytest.mark.parametrize(
    ("name", "targets", "first"),
    [
        ("qwen2_5_vl", r".*\.(q_proj|qkv)", r"visual\.blocks"),
        ("gemma4-vision", r".*(language_model.*q_proj|linear)", r"vision_tower\.encoder"),
    ],
)
def test_adapters_of_the_vision_tower_are_refused_unless_only_texts_are_served(cases, name, targets, first, tmp_path):
    folder = cases(name).folder
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=targets)
    with pytest.raises(InvalidArgument, match=rf"{first}.*changes the vision tower.*language_model_only"):
        Engine.from_config(_config(folder, enable_lora=True)).read_adapter(adapter)
    engine = Engine.from_config(_config(folder, enable_lora=True, language_model_only=True))
    assert engine._runner._image_encoder is None  # type: ignore[attr-defined]
    engine.read_adapter(adapter)


class _Owner:
    """Encodes images like the core server, but only when the test calls `encode`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pending: list[Callable[[], object]] = []
        engine.delegate_image_encoding(self.pending.append)

    def encode(self) -> None:
        """Encode the image of which the encoding has started, in another thread."""
        [encode] = self.pending
        self.pending.clear()
        with ThreadPoolExecutor(1) as executor:
            self.engine.on_image_encoded(executor.submit(encode).result())


@pytest.mark.parametrize("num_blocks", [None, MAX_MODEL_LEN // 8 + 1])
def test_images_that_are_encoded_beside_steps_delay_no_other_sequence(cases, num_blocks):
    case = cases("qwen3_vl")
    engine = Engine.from_config(_config(case.folder, num_blocks))
    owner, encoder = _Owner(engine), engine._runner.background_image_encoder
    assert isinstance(encoder, ImageEncoder)
    outputs = _run(engine, case.prompts, on_step=lambda: owner.encode() if owner.pending else None)
    _check(outputs, case.references)
    assert not encoder._held


def test_a_text_gets_its_tokens_while_an_image_is_encoded(cases):
    case = cases("qwen3_vl")
    engine = Engine.from_config(_config(case.folder))
    owner = _Owner(engine)
    for i in (1, 2):
        engine.add(_request(i, case.prompts[i]))
    results = []
    while engine.has_runnable:
        results += engine.step().results
    assert owner.pending and {result.id for result in results} == {2}
    assert assert_greedy_tokens([token for result in results for token in result.token_ids], *case.references[2])


def test_a_failed_image_ends_only_its_sequences(cases):
    case = cases("qwen3_vl")
    engine = Engine.from_config(_config(case.folder))
    owner = _Owner(engine)
    for i in (0, 1, 2):
        engine.add(_request(i, case.prompts[i]))
    results = engine.step().results
    engine.abort([1])
    engine.fail_image(Internal("images: broken"))
    owner.pending.clear()
    while engine.has_work:
        results += engine.step().results
    assert [(r.id, r.error) for r in results if r.error] == [(0, "images: broken")]
    assert sum(len(r.token_ids) for r in results if r.id == 2) == NUM_TOKENS
    engine.check_integrity()
    # An aborted request leaves its image to the cache.
    engine.add(_request(3, case.prompts[0]))
    engine.step()
    engine.abort([3])
    owner.encode()
    assert not engine.has_work and not engine._runner.background_image_encoder._held  # type: ignore[union-attr]
    engine.check_integrity()
