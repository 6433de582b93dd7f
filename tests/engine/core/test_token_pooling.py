# SPDX-License-Identifier: Apache-2.0
"""Vectors of tokens, classifiers of tokens and reward models equal transformers in float32, with adapters."""

import random

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from support.encoder_checkpoints import TARGETS, make_encoder
from support.pooling_checkpoints import VOCAB, make_classifier, make_embedding_model
from support.tiny_checkpoints import BASE, CHECKPOINTS, library_warnings_ignored, save_random_adapter
from support.tokenizer import byte_level, save_tokenizer
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from quire_engine import LLM, LoRARequest, PoolingParams
from quire_spec.engine import pooling_params
from quire_spec.errors import InvalidArgument
from quire_spec.model import pooler_config
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig

MAX_ERROR = 2e-5
RAW = PoolingParams(task="token_classify", use_activation=False)


def _prompts():
    rng = random.Random(3)
    return [{"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(n)]} for n in (1, 17, 60, 40, 5)]


def _llm(folder, **changes):
    return LLM(str(folder), dtype="float32", max_model_len=100, max_num_seqs=8, **changes)


def _encode(llm, params, **changes):
    return [output.outputs.data for output in llm.encode(_prompts(), params, use_tqdm=False, **changes)]


@torch.inference_mode()
def _check(llm, params, compute, **changes):
    for prompt, found in zip(_prompts(), _encode(llm, params, **changes), strict=True):
        expected = compute(torch.tensor([prompt["prompt_token_ids"]]))[0]
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < MAX_ERROR * max(1, expected.abs().max())


def _token_classifier(folder, name, num_labels=3):
    if name not in CHECKPOINTS:
        return make_encoder(folder, name, "token", num_labels=num_labels)
    kind, overrides = CHECKPOINTS[name]
    torch.manual_seed(4)
    config = kind(**(BASE | overrides | {"vocab_size": VOCAB, "pad_token_id": 0, "num_labels": num_labels}))
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_((model.classifier if name == "gpt_neox" else model.score).bias)
    model.save_pretrained(folder)
    return save_tokenizer(byte_level(), folder)


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "modernbert", "qwen3", "gpt_neox"])
def test_classes_of_tokens_and_adapters(tmp_path, name):
    folder = _token_classifier(tmp_path / "model", name)
    targets = TARGETS[name][:2] if name in TARGETS else ["q_proj", "down_proj"]
    targets = ["query_key_value"] if name == "gpt_neox" else targets
    config = LoraConfig(r=4, target_modules=targets, task_type="TOKEN_CLS")
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    llm = _llm(folder, enable_lora=True, max_num_batched_tokens=32)
    _check(llm, RAW, lambda ids: model(ids).logits)
    _check(llm, PoolingParams(task="token_classify"), lambda ids: model(ids).logits.softmax(-1))
    adapter = save_random_adapter(model, config, tmp_path / "adapter")
    with library_warnings_ignored():
        fresh = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
        adapted = PeftModel.from_pretrained(fresh, adapter).eval()
    _check(llm, RAW, lambda ids: adapted(ids).logits, lora_request=LoRARequest("a", 1, str(adapter)))
    with pytest.raises(InvalidArgument, match="model: returns classes of tokens, and not embeddings; use /pooling"):
        llm.embed("a", use_tqdm=False)


def test_embeddings_of_tokens(tmp_path, monkeypatch):
    folder = make_embedding_model(tmp_path / "model", dense=8)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    weights = load_file(folder / "2_Dense/model.safetensors")

    def compute(ids):
        hidden = model(ids).last_hidden_state
        return functional.normalize(
            torch.tanh(functional.linear(hidden, weights["linear.weight"], weights["linear.bias"])), dim=-1
        )

    # Prompts are computed in chunks, and few of them fit into the cache.
    num_bytes = 8 * kv_block_bytes(ModelConfig.load(folder), 16, 4)
    llm = _llm(folder, max_num_batched_tokens=20, kv_cache_memory_bytes=num_bytes)
    _check(llm, PoolingParams(task="token_embed"), compute)
    mixed = llm.encode(_prompts(), PoolingParams(), use_tqdm=False)
    for output, prompt in zip(mixed, _prompts(), strict=True):
        assert (
            output.outputs.data - compute(torch.tensor([prompt["prompt_token_ids"]]))[0, -1]
        ).abs().max() < MAX_ERROR
        assert output.outputs.data.shape == (8,)
    monkeypatch.setattr("quire_engine.requests.limits.MAX_POOLED_BYTES", 30 * 8 * 4)
    with pytest.raises(InvalidArgument, match="input: the vectors of its 60 tokens have more than"):
        _encode(llm, PoolingParams(task="token_embed"))
    monkeypatch.setattr("quire_engine.requests.limits.MAX_POOLED_BYTES", pooling_params.MAX_POOLED_BYTES)
    monkeypatch.setattr("quire_engine.worker.pooler.MAX_POOLED_BYTES", 30 * 8 * 4)
    with pytest.raises(InvalidArgument, match="input: the vectors of its 60 tokens have more than"):
        _encode(llm, PoolingParams(task="token_embed"))
    assert _encode(llm, PoolingParams())[0].shape == (8,)


@pytest.mark.parametrize("kind", ["ForRewardModel", "ForProcessRewardModel"])
def test_reward_models(tmp_path, kind, monkeypatch):
    """The head is that of https://huggingface.co/Qwen/Qwen2.5-Math-RM-72B, modeling_qwen2_rm.py: two linear layers, and
    ReLU between them."""
    folder = make_classifier(tmp_path / "model", "qwen2", 1)
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    torch.manual_seed(5)
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1 if kind == "ForRewardModel" else 2)
    for index, layer in ((0, first), (2, second)):
        tensors |= {f"score.{index}.{key}": value for key, value in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("Qwen2ForSequenceClassification", f"Qwen2{kind}"))
    model = AutoModelForSequenceClassification.from_pretrained(
        make_classifier(tmp_path / "same", "qwen2", 1), dtype=torch.float32
    ).model.eval()

    def rewards(ids):
        return second(functional.relu(first(model(ids).last_hidden_state)))

    if kind == "ForProcessRewardModel":
        # The tokenizer of the tests has no token <extra_0>.
        monkeypatch.setattr(pooler_config, "STEP_TOKEN", "e")
        llm = _llm(folder, max_num_batched_tokens=20)
        [step] = llm.get_tokenizer().encode("e", add_special_tokens=False)
        prompts = [[step], [5, step, 6, 7, step], [7, 8] * 30 + [step, 9, step] + [4] * 30]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        for output, prompt in zip(
            llm.encode(inputs, PoolingParams(task="token_classify"), use_tqdm=False), prompts, strict=True
        ):
            with torch.inference_mode():
                expected = rewards(torch.tensor([prompt]))[0].softmax(-1)[torch.tensor(prompt) == step]
            assert output.outputs.data.shape == expected.shape
            assert (output.outputs.data - expected).abs().max() < MAX_ERROR
        with pytest.raises(InvalidArgument, match="input: does not contain e; this model judges the text before each"):
            llm.encode({"prompt_token_ids": [5, 6]}, RAW, use_tqdm=False)
        return
    llm = _llm(folder, max_num_batched_tokens=20)
    _check(llm, RAW, rewards)
    _check(llm, PoolingParams(task="classify"), lambda ids: rewards(ids)[:, -1])
