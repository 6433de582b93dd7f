# SPDX-License-Identifier: Apache-2.0
"""Draft models and heads in plans: their bytes, their KV cache, and what does not fit the model."""

import dataclasses
import math

import pytest
import torch
from support.draft_heads import AUX_LAYERS, DRAFT_VOCAB, HEADS, HIDDEN, KV_HEADS, MLP, random_eagle3_head
from support.planning import LLAMA_8B, MODELS, TINY, checkpoint_info, planner_inputs, schema_problems
from support.tiny_checkpoints import VOCAB

from quire_operator.api.engine_spec import SpeculativeConfigSpec
from quire_operator.plan.draft_info import DraftInfo
from quire_operator.plan.errors import Unplannable
from quire_operator.plan.limits import draft_bytes, kv_bytes_per_token
from quire_operator.plan.plan import Plan
from quire_operator.plan.planner import make_plan
from quire_spec.errors import ConfigError

SMALL = LLAMA_8B | {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128}
EAGLE = LLAMA_8B | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
MEDUSA = {"medusa_num_heads": 4, "medusa_num_layers": 1}
CONFIGS = {"draft_model": SMALL, "eagle3": EAGLE, "medusa": MEDUSA}


def spec(method, num_tokens=3):
    return SpeculativeConfigSpec(method=method, numSpeculativeTokens=num_tokens)


def inputs_with(method, gpu="NVIDIA-H100-80GB-HBM3", **changes):
    draft = DraftInfo.from_files(spec(method), MODELS["8b"].shape, CONFIGS[method] | changes)
    return dataclasses.replace(planner_inputs("8b", gpu), draft=draft)


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("gpu", ["NVIDIA-H100-80GB-HBM3", None])
def test_a_plan_counts_weights_and_kv_cache(method, gpu):
    inputs = inputs_with(method, gpu)
    without = dataclasses.replace(inputs, draft=None)
    plan, plain = make_plan(inputs), make_plan(without)
    assert plan.bytes.draft > 0 == plain.bytes.draft and plan.bytes.weights == plain.bytes.weights
    assert plan.bytes.draft >= draft_bytes(inputs, 1)
    layers = {"draft_model": 4, "eagle3": 1, "medusa": 0}[method]
    per_layer = kv_bytes_per_token(without, 1) // 32
    assert kv_bytes_per_token(inputs, 1) == (32 + layers) * per_layer
    # The first of two ranks has the whole draft model.
    assert kv_bytes_per_token(inputs, 2) == 16 * per_layer + layers * per_layer
    assert draft_bytes(inputs, 2) >= draft_bytes(inputs, 1)
    if gpu is not None:
        assert plan.kvTokens < plain.kvTokens
    assert Plan.from_json(plan.to_json()) == plan and schema_problems(plan.to_json()) == []
    assert "draft" not in plain.to_json()["bytes"]
    # Plans that were made before this field existed stay valid, and another draft model is another input.
    assert inputs.inputs_hash != without.inputs_hash


def test_the_elements_of_a_head_are_those_of_its_tensors():
    layer = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS, "vocab_size": VOCAB}
    layer |= {"num_key_value_heads": KV_HEADS, "max_position_embeddings": 512, "draft_vocab_size": DRAFT_VOCAB}
    target = checkpoint_info(TINY | {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": VOCAB}).shape
    config = layer | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS}}
    draft = DraftInfo.from_files(spec("eagle3"), target, config)
    tensors = random_eagle3_head().values()
    assert draft.num_elements == sum(math.prod(t.shape) for t in tensors if t.dim() == 2 and t.dtype == torch.float32)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_embedding_of_a_head_is_counted_once(name, is_sharded):
    tensors = {name: {"dtype": "BF16", "shape": [128256, 4096], "data_offsets": [0, 128256 * 4096 * 2]}}
    files = ({"weight_map": {name: "model-00001-of-00002.safetensors"}}, None) if is_sharded else (None, tensors)
    plain = inputs_with("eagle3")
    draft = DraftInfo.from_files(spec("eagle3"), MODELS["8b"].shape, EAGLE, *files)
    inputs = dataclasses.replace(plain, draft=draft)
    embedding = 128256 * 4096 * 2
    assert draft.file_bytes == plain.draft.file_bytes + embedding
    assert draft_bytes(inputs, 1) == pytest.approx(draft_bytes(plain, 1) + embedding, rel=0.01)
    # The first of several ranks has the whole embedding in any case.
    assert draft_bytes(inputs, 2) == draft_bytes(plain, 2) == draft_bytes(inputs, 1)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "draft_model",
            {"vocab_size": 1000},
            "the draft model has vocab_size 1000, but the model has 128256; use",
        ),
        (
            "eagle3",
            {"vocab_size": 1000},
            "vocab_size of the EAGLE-3 head is 1000, but vocab_size of the model is 128256; use",
        ),
        (
            "eagle3",
            {"hidden_size": 2048},
            "hidden_size of the EAGLE-3 head is 2048, but hidden_size of the model is 4096; use",
        ),
        ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "fc_norm"),
        ("eagle3", {"num_hidden_layers": 32}, "num_hidden_layers is 32, but an EAGLE-3 head has 1 layer; give"),
        ("medusa", {"medusa_num_heads": 2}, "numSpeculativeTokens: must be at most medusa_num_heads 2, got 3"),
    ],
)
def test_what_does_not_fit_the_model_is_rejected_before_pods_start(method, changes, message):
    with pytest.raises(ConfigError, match=f"^spec.engine.speculativeConfig: .*{message}"):
        inputs_with(method, **changes)


def test_heads_of_an_unsupported_architecture_are_rejected():
    inputs = inputs_with("medusa")
    model = dataclasses.replace(
        inputs.model, shape=dataclasses.replace(inputs.model.shape, architecture="OPTForCausalLM")
    )
    engine = dataclasses.replace(inputs.engine, speculativeConfig=spec("medusa"))
    with pytest.raises(Unplannable, match=r"speculativeConfig.method: medusa does not support architecture 'OPT"):
        make_plan(dataclasses.replace(inputs, model=model, engine=engine))
