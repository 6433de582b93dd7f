# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores equal those of transformers in float32, in one batch with generation and adapters."""

import dataclasses
import json
import math
import random
from collections import defaultdict

import pytest
import torch
from msgspec.structs import replace
from support.graph_captures import replace_captures
from support.pooling_checkpoints import (
    VOCAB,
    classify,
    embed,
    make_classifier,
    make_embedding_model,
    make_pooled_adapter,
)
from support.thread_workers import engine_with_thread_workers
from support.tiny_checkpoints import greedy_output, make_adapter, make_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire_engine.core.engine import Engine
from quire_spec.documents.adapter_digest import adapter_digest
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.pooling_params import PoolingParams
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.model.memory_sizing import kv_block_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.pooler_config import PoolerConfig
from quire_spec.protocol.messages import SequenceRequest

MAX_ERROR = 2e-5
EMBED = PoolingParams()


def _config(folder, num_blocks=None, **changes):
    config = EngineConfig(str(folder), dtype="float32", max_model_len=128, max_num_seqs=16, max_num_batched_tokens=512)
    config = dataclasses.replace(config, **changes)
    if num_blocks is None:
        return config
    num_bytes = num_blocks * kv_block_bytes(ModelConfig.load(folder), config.block_size, 4)
    return dataclasses.replace(config, kv_cache_memory_bytes=num_bytes)


def _prompts(count, seed=0):
    """Return prompts of 1 to 60 tokens, of which many begin alike."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(40)]
    return [stem[: rng.randrange(41)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def _request(index, prompt, pooling=EMBED, digest=None, **params):
    params = SamplingParams(temperature=0.0, **{"max_tokens": 1, **params})
    return SequenceRequest(index, prompt, params, digest, pooling=pooling)


def _run(engine, requests):
    """Return the deltas of each sequence. A new request arrives in each step."""
    deltas = defaultdict(list)
    waiting = list(reversed(requests))
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop())
        engine.read_pending_adapters()
        for result in engine.step().results:
            assert not result.error, result.error
            deltas[result.id].append(result)
        engine.check_integrity()
    return deltas


def _vector(deltas):
    [delta] = deltas
    assert (delta.finish_reason, delta.token_ids) == ("stop", [])
    return torch.frombuffer(bytearray(delta.pooled), dtype=torch.float32)


MODELS = {
    "last": {},
    "mean": {"mode": "mean_tokens"},
    "weighted mean, not normalized": {"mode": "weightedmean_tokens", "normalize": False},
    "dense layer": {"mode": "mean_tokens", "dense": 40},
    "first token": {"mode": "cls_token"},
    "llama": {"name": "llama"},
    "gemma2": {"name": "gemma2"},
    "opt": {"name": "opt", "mode": "mean_tokens"},
    "granite": {"name": "granite"},
    "states": {"name": "qwen3_5", "mode": "mean_tokens"},
    "layer norms": {"name": "gpt_neox"},
}
SCENARIOS = {
    "whole prompts": {},
    "in chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 12},
    "preempted": {"block_size": 8, "num_blocks": 18, "max_num_batched_tokens": 24, "swap_space": 0.001},
    "asynchronous": {"async_scheduling": True, "max_num_batched_tokens": 40},
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    folder = make_embedding_model(tmp_path_factory.mktemp("model"), **MODELS[request.param])
    prompts = _prompts(20)
    return folder, prompts, [embed(folder, prompt) for prompt in prompts]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_embeddings_equal_sentence_transformers(case, scenario):
    folder, prompts, expected = case
    engine = Engine.from_config(_config(folder, **SCENARIOS[scenario]))
    deltas = _run(engine, [_request(i, prompt) for i, prompt in enumerate(prompts)])
    for i, vector in enumerate(expected):
        assert (_vector(deltas[i]) - vector).abs().max() < MAX_ERROR * max(1, vector.abs().max())


def test_embeddings_generation_and_adapters_share_steps(tmp_path):
    model = make_llama(tmp_path / "model")
    adapters = [
        make_adapter(model, tmp_path / f"adapter{i}", seed=i, target_modules=["q_proj", "down_proj"]) for i in (1, 2)
    ]
    config = _config(model, convert="embed", enable_lora=True, max_loras=2, max_num_batched_tokens=30)
    engine = Engine.from_config(config)
    digests = [adapter_digest(adapter) for adapter in adapters]
    for digest, adapter in zip(digests, adapters, strict=True):
        engine.add_adapter(digest, adapter, engine.read_adapter(adapter))
    prompts, requests = _prompts(18, seed=1), []
    for i, prompt in enumerate(prompts):
        digest = [None, *digests][i % 3]
        generates = i % 2 == 0
        params = {"max_tokens": 8, "ignore_eos": True} if generates else {}
        requests.append(_request(i, prompt, None if generates else EMBED, digest, **params))
    deltas = _run(engine, requests)
    for i, request in enumerate(requests):
        if request.pooling is not None:
            vector = embed(model, prompts[i], None if i % 3 == 0 else adapters[i % 3 - 1])
            assert (_vector(deltas[i]) - vector).abs().max() < MAX_ERROR
        elif i % 3 == 0:
            tokens = [token for delta in deltas[i] for token in delta.token_ids]
            assert tokens == greedy_output(model, prompts[i], 8)


def test_adapters_of_the_inner_model(tmp_path):
    folder = make_embedding_model(tmp_path / "model", mode="mean_tokens")
    adapter = make_pooled_adapter(folder, tmp_path / "adapter")
    engine = Engine.from_config(_config(folder, enable_lora=True))
    engine.add_adapter("sha256:a", adapter, engine.read_adapter(adapter))
    deltas = _run(engine, [_request(i, [5, 6, 7, 8], EMBED, digest) for i, digest in enumerate((None, "sha256:a"))])
    vectors = [_vector(deltas[i]) for i in (0, 1)]
    for vector, expected in zip(vectors, (None, adapter), strict=True):
        assert (vector - embed(folder, [5, 6, 7, 8], expected)).abs().max() < MAX_ERROR
    assert (vectors[0] - vectors[1]).abs().max() > 100 * MAX_ERROR


@pytest.mark.parametrize("base", ["generates", "classifies"])
def test_heads_of_adapters(base, tmp_path):
    """Adapters of classifiers with heads of 3, 1 and 5 classes, and one without an own head, share steps."""
    if base == "generates":
        folder, convert = make_llama(tmp_path / "model"), "classify"
        text = (folder / "config.json").read_text().rstrip().removesuffix("}")
        (folder / "config.json").write_text(text + ', "classifier_from_token": ["a", "b"]}')
    else:
        folder, convert = make_classifier(tmp_path / "model", "llama", num_labels=3), "auto"
    sizes = [3, 1, 5]
    adapters = [make_pooled_adapter(folder, tmp_path / f"a{n}", n, seed=n) for n in sizes]
    config = _config(folder, convert=convert, enable_lora=True, max_loras=2, max_cpu_loras=2, max_num_batched_tokens=40)
    engine = Engine.from_config(config)
    for size, adapter in zip(sizes, adapters, strict=True):
        engine.add_adapter(f"sha256:{size}", adapter, engine.read_adapter(adapter))
    raw = PoolingParams(task="classify", use_activation=False)
    prompts = _prompts(12, seed=5)
    kinds = [(None, *sizes)[i % 4] for i in range(12)]
    requests = [
        _request(i, p, raw, None if size is None else f"sha256:{size}")
        for i, (p, size) in enumerate(zip(prompts, kinds, strict=True))
    ]
    deltas = _run(engine, requests)
    for i, (prompt, size) in enumerate(zip(prompts, kinds, strict=True)):
        if size is not None:
            expected = classify(folder, prompt, adapters[sizes.index(size)], size)
            assert (_vector(deltas[i]) - expected).abs().max() < MAX_ERROR * max(1, expected.abs().max())
        elif base == "classifies":
            assert (_vector(deltas[i]) - classify(folder, prompt)).abs().max() < 1e-4
        else:
            assert len(_vector(deltas[i])) == 1
    probabilities = _run(engine, [_request(99, prompts[1], PoolingParams(task="classify"), "sha256:5")])[99]
    expected = torch.softmax(classify(folder, prompts[1], adapters[2], 5), -1)
    assert (_vector(probabilities) - expected).abs().max() < MAX_ERROR


def test_an_adapter_with_a_head_needs_an_engine_that_classifies(tmp_path):
    folder = make_llama(tmp_path / "model")
    adapter = make_pooled_adapter(folder, tmp_path / "adapter", 2)
    engine = Engine.from_config(_config(folder, enable_lora=True))
    with pytest.raises(InvalidArgument, match="is the head of a classifier, and this engine does not classify; set"):
        engine.read_adapter(adapter)


@pytest.mark.parametrize("replayed", [False, True])
def test_tensor_parallel_ranks_and_replayed_graphs(replayed, tmp_path, monkeypatch):
    """Steps that only generate run as graphs, and steps with embeddings do not."""
    folder = make_embedding_model(tmp_path, "llama", "mean_tokens", dense=24)
    captures = replace_captures(monkeypatch) if replayed else []
    config = _config(folder, tensor_parallel_size=1 if replayed else 2, max_num_batched_tokens=32, convert="embed")
    engine = Engine.from_config(config) if replayed else engine_with_thread_workers(config)
    prompts = _prompts(8, seed=3)
    requests = [_request(i, p, EMBED if i % 2 else None, max_tokens=1 if i % 2 else 12) for i, p in enumerate(prompts)]
    deltas = _run(engine, requests)
    for i, prompt in list(enumerate(prompts))[1::2]:
        assert (_vector(deltas[i]) - embed(folder, prompt)).abs().max() < MAX_ERROR
    assert not replayed or len(captures[0].replayed) > 3


@pytest.mark.parametrize("speculates", [False, True])
def test_steps_with_beams_prompt_logprobs_and_drafts(speculates, tmp_path):
    """Their rows of hidden states come before those that are pooled."""
    folder = make_embedding_model(tmp_path, "llama", "mean_tokens")
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3) if speculates else None
    config = _config(folder, convert="embed", max_num_batched_tokens=40, speculative_config=speculative)
    kinds = [
        {"prompt_logprobs": 2, "max_tokens": 6},
        {} if speculates else {"use_beam_search": True, "n": 2, "max_tokens": 6},
        {"logprobs": 2, "max_tokens": 12},
    ]
    prompts = [(prompt * 4)[:60] for prompt in _prompts(12, seed=7)]
    requests = [
        _request(10 * i, p, EMBED if i % 2 else None, ignore_eos=True, **({} if i % 2 else kinds[i // 2 % 3]))
        for i, p in enumerate(prompts)
    ]
    alone = [_run(Engine.from_config(config), [request]) for request in requests[::2]]
    deltas = _run(Engine.from_config(config), requests)
    for i, prompt in enumerate(prompts):
        if i % 2:
            assert (_vector(deltas[10 * i]) - embed(folder, prompt)).abs().max() < MAX_ERROR
        else:
            tokens = [token for delta in deltas[10 * i] for token in delta.token_ids]
            assert tokens == [token for delta in alone[i // 2][10 * i] for token in delta.token_ids]
            logprobs, expected = (d[10 * i][0].prompt_logprobs for d in (deltas, alone[i // 2]))
            assert (logprobs is None) == (expected is None)
            if expected is not None:
                assert [e[0][1] for e in logprobs] == pytest.approx([e[0][1] for e in expected], abs=1e-4)


def test_the_prefix_cache_keeps_embeddings(tmp_path):
    """The last token is always computed. With the mean of all tokens, all of them are."""
    prompt = list(range(48))
    for mode, num_cached in (("lasttoken", 47), ("mean_tokens", 0)):
        folder = make_embedding_model(tmp_path / mode, mode=mode)
        engine = Engine.from_config(_config(folder))
        first, second = ([_request(i, prompt)] for i in (1, 2))
        [a], [b] = _run(engine, first)[1], _run(engine, second)[2]
        assert (a.num_cached_tokens, b.num_cached_tokens) == (0, num_cached)
        for delta in (a, b):
            assert (_vector([delta]) - embed(folder, prompt)).abs().max() < MAX_ERROR


def test_a_prompt_can_have_max_model_len_tokens(tmp_path):
    folder = make_embedding_model(tmp_path)
    prompt = [i % VOCAB for i in range(128)]
    deltas = _run(Engine.from_config(_config(folder)), [_request(1, prompt)])
    assert (_vector(deltas[1]) - embed(folder, prompt)).abs().max() < MAX_ERROR


def test_dimensions_truncate_and_normalize(tmp_path):
    folder = make_embedding_model(tmp_path, is_matryoshka=True)
    engine = Engine.from_config(_config(folder))
    kinds = [PoolingParams(dimensions=8), PoolingParams(dimensions=8, use_activation=False), EMBED]
    deltas = _run(engine, [_request(i, [5, 6, 7], kind) for i, kind in enumerate(kinds)])
    short, raw, whole = (_vector(deltas[i]) for i in range(3))
    assert torch.allclose(short, torch.nn.functional.normalize(embed(folder, [5, 6, 7])[:8], dim=0), atol=MAX_ERROR)
    assert not math.isclose(raw.norm(), 1, abs_tol=1e-3) and torch.allclose(raw / raw.norm(), short, atol=MAX_ERROR)
    assert len(whole) == 64


@pytest.mark.parametrize(
    ("num_labels", "values", "activate"),
    [
        (3, {}, lambda x: torch.softmax(x, -1)),
        (1, {}, torch.sigmoid),
        (2, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (1, {"problem_type": "regression"}, lambda x: x),
    ],
)
def test_scores_equal_transformers(num_labels, values, activate, tmp_path):
    name = "llama" if num_labels == 1 else "qwen3"
    folder = make_classifier(tmp_path, name, num_labels, **values)
    engine = Engine.from_config(_config(folder, max_num_batched_tokens=40))
    prompts, raw = _prompts(6), PoolingParams(task="classify", use_activation=False)
    requests = [_request(i, prompt, PoolingParams(task="classify")) for i, prompt in enumerate(prompts)]
    requests += [_request(100 + i, prompt, raw) for i, prompt in enumerate(prompts)]
    deltas = _run(engine, requests)
    for i, prompt in enumerate(prompts):
        expected = classify(folder, prompt)
        assert (_vector(deltas[100 + i]) - expected).abs().max() < MAX_ERROR * max(1, expected.abs().max())
        assert (_vector(deltas[i]) - activate(expected)).abs().max() < MAX_ERROR * max(1, expected.abs().max())


def test_two_tokens_of_a_chat_model_are_a_score(tmp_path):
    """As Qwen3-Reranker is used: the logit of one token minus that of another."""
    model = make_llama(tmp_path)
    tokens = AutoTokenizer.from_pretrained(model)
    names = [tokens.decode([i]) for i in (70, 80)]
    text = (model / "config.json").read_text().rstrip().removesuffix("}")
    (model / "config.json").write_text(text + f', "classifier_from_token": ["{names[0]}", "{names[1]}"]}}')
    engine = Engine.from_config(_config(model, convert="classify"))
    prompts = _prompts(4)
    deltas = _run(engine, [_request(i, p, PoolingParams(task="classify")) for i, p in enumerate(prompts)])
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        logits = oracle(torch.tensor([prompt])).logits[0, -1].detach()
        assert abs(_vector(deltas[i]) - torch.sigmoid(logits[80] - logits[70])) < MAX_ERROR


@pytest.mark.parametrize(("false_token", "activation"), [(70, "Sigmoid"), (None, "Identity")])
def test_files_of_a_reranker_of_sentence_transformers(false_token, activation, tmp_path):
    """Its module LogitScore names the tokens, and config_sentence_transformers.json the activation."""
    model = make_llama(tmp_path)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1_LogitScore"}]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_LogitScore").mkdir()
    tokens = {"true_token_id": 80, "false_token_id": false_token}
    (model / "1_LogitScore/config.json").write_text(json.dumps(tokens))
    config = {"activation_fn": f"torch.nn.modules.linear.{activation}"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(config))
    deltas = _run(Engine.from_config(_config(model)), [_request(1, [5, 6, 7], PoolingParams(task="classify"))])
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = oracle(torch.tensor([[5, 6, 7]])).logits[0, -1].detach()
    expected = logits[80] if false_token is None else torch.sigmoid(logits[80] - logits[false_token])
    assert abs(_vector(deltas[1]) - expected) < MAX_ERROR * max(1, abs(expected))


def test_nan_fails_only_its_own_request(tmp_path):
    folder = make_embedding_model(tmp_path)
    engine = Engine.from_config(_config(folder))
    engine._runner._model.embed_tokens[7] = math.nan
    requests = [_request(1, [7, 8]), _request(2, [8, 9])]
    for request in requests:
        engine.add(request)
    results = {result.id: result for result in engine.step().results}
    assert "NaN or infinity" in results[1].error and results[1].pooled is None
    assert (_vector([results[2]]) - embed(folder, [8, 9])).abs().max() < MAX_ERROR


def test_aborting_frees_everything(tmp_path):
    folder = make_embedding_model(tmp_path, mode="mean_tokens")
    engine = Engine.from_config(_config(folder, max_num_batched_tokens=16))
    engine.add(_request(1, list(range(100))))
    engine.step()
    engine.abort([1])
    assert not engine.has_work and engine.stats().num_used_blocks == 0
    [delta] = _run(engine, [replace(_request(2, [1, 2]))])[2]
    assert (_vector([delta]) - embed(folder, [1, 2])).abs().max() < MAX_ERROR


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", "{}", "must be a list of 1 to 16"),
        ("modules.json", '[{"type": "x.Transformer", "path": "../.."}]', "path: must be a folder in the checkpoint"),
        ("modules.json", '[{"type": "x.Transformer"}, {"type": "x.LSTM", "path": "1"}]', "LSTM is not supported"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "exactly one of lasttoken, cls"),
        ("1_Pooling/config.json", '{"pooling_mode_lasttoken": true, "pooling_mode_max_tokens": true}', "exactly one"),
        ("1_Pooling/config.json", '{"pooling_mode": 5}', "exactly one of"),
        ("2_Dense/config.json", '{"in_features": 3, "out_features": 3}', "in_features: must be 64, got 3"),
        ("2_Dense/config.json", '{"in_features": 64, "out_features": 3, "activation_function": "os.system"}', "one of"),
    ],
)
def test_a_wrong_file_is_named(file, text, message, tmp_path):
    folder = make_embedding_model(tmp_path, dense=8)
    (folder / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        PoolerConfig.load(folder, ModelConfig.load(folder))


def test_the_configuration_decides_what_is_returned(tmp_path):
    def load(folder, *args):
        return PoolerConfig.load(folder, ModelConfig.load(folder), *args)

    generator, classifier = make_llama(tmp_path / "a"), make_classifier(tmp_path / "b")
    assert load(generator) is None
    assert load(generator, "embed") == PoolerConfig("embed", 64, normalize=True)
    assert load(generator, "embed", "mean").pooling == "mean"
    assert load(classifier).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    for folder, args, message in [
        (classifier, ("embed",), "convert: must be auto or classify"),
        (generator, ("auto", "mean"), "pooling_type: got 'mean', but the model generates; set convert to embed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(folder, *args)
