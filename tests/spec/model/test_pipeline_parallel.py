# SPDX-License-Identifier: Apache-2.0
"""Layers are split into stages by bytes, and models without a split are refused by name."""

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_spec.errors import ConfigError
from quire_spec.model import memory_sizing
from quire_spec.model.kv_layout import KVLayout
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.pipeline_parallel import check, split_layers, split_stages

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 7, "hidden_size": 64, "intermediate_size": 112,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
}  # fmt: skip
GEMMA2 = {
    **LLAMA, "architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "sliding_window": 16, "num_hidden_layers": 8,
    "query_pre_attn_scalar": 16,
}  # fmt: skip


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 60))
def test_no_other_split_has_a_smaller_largest_stage(sizes, num_stages, first_size):
    num_stages = min(num_stages, len(sizes))
    stages = split_layers(sizes, num_stages, first_size)
    assert [layer for stage in stages for layer in stage] == list(range(len(sizes)))
    assert len(stages) == num_stages and all(stages)

    def largest(ends):
        parts = [sum(sizes[a:b]) for a, b in zip((0, *ends), (*ends, len(sizes)), strict=True)]
        return max([first_size + parts[0], *parts[1:]])

    best = min(map(largest, combinations(range(1, len(sizes)), num_stages - 1)))
    assert largest([stage.stop for stage in stages[:-1]]) == best
    if num_stages > 2:  # what the first stage leaves is split in the same way
        rest = split_layers(sizes[stages[0].stop :], num_stages - 1)
        assert [len(stage) for stage in rest] == [len(stage) for stage in stages[1:]]


def test_stages_have_all_weights_of_the_model_once():
    shape = ModelConfig.from_config(LLAMA)
    for size in (1, 2, 3, 7):
        stages = split_stages(shape, size)
        assert sum(memory_sizing.weights_bytes(stage, 2) for stage in stages) == memory_sizing.weights_bytes(shape, 2)
        assert stages[0].has_outer_parts and not any(stage.has_outer_parts for stage in stages[1:])
        assert sum(stage.num_layers for stage in stages) == 7


def test_stages_have_their_part_of_every_field_that_describes_layers():
    names = [f.name for f in dataclasses.fields(ModelConfig) if str(f.type).startswith("tuple[")]
    names.remove("eos_token_ids")
    shape = ModelConfig.from_config(LLAMA)
    marked = dataclasses.replace(shape, **{name: tuple(range(7)) for name in names})
    for name in names:
        parts = [getattr(stage, name) for stage in split_stages(marked, 3)]
        assert sum(parts, ()) == tuple(range(7)) and [len(part) for part in parts] == [
            stage.num_layers for stage in split_stages(shape, 3)
        ]


def test_stages_share_block_tables_and_have_equal_parts_of_every_group():
    """Every second layer has a window, so there are two kinds of blocks."""
    shape = ModelConfig.from_config(GEMMA2)
    layout = KVLayout.from_model(shape, 512, is_staged=True)
    parts = [layout.for_stage(range(i, i + 4)) for i in (0, 4)]
    for part in parts:
        assert part.num_groups == layout.num_groups == 2 and part.num_layers == 2
        assert len(set(zip(part.groups, part.rows, strict=True))) == 4


def test_models_without_a_split_are_refused_by_name():
    shape = ModelConfig.from_config(LLAMA)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: 8 .* 7 layers, and each stage needs one; use 7"):
        check(shape, 8)
    learned = dataclasses.replace(shape, num_learned_positions=512)
    with pytest.raises(ConfigError, match=r"learned positions outside of its layers; use 1"):
        check(learned, 2)
    foreign = dataclasses.replace(shape, model_impl="transformers")
    with pytest.raises(ConfigError, match="model_impl transformers computes all layers in one process"):
        check(foreign, 2)
    bert = ModelConfig.from_config(
        {**LLAMA, "architectures": ["BertModel"], "num_key_value_heads": 4, "type_vocab_size": 2, "model_type": "bert"}
    )
    with pytest.raises(ConfigError, match="all tokens of an encoder attend to each other"):
        check(bert, 2)
    check(learned, 1)
