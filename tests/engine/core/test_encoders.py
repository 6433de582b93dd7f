# SPDX-License-Identifier: Apache-2.0
"""Encoders: embeddings, scores of pairs and adapters equal those of transformers and peft, in ragged batches."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.encoder_checkpoints import ENCODERS, VOCAB, embed, load, make_encoder, make_encoder_adapter, score
from support.thread_workers import engine_with_thread_workers
from transformers import AutoTokenizer

from quire_engine import LLM, LoRARequest, PoolingParams
from quire_engine.core.engine import Engine
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

MAX_ERROR = 2e-5
PAIRS = [("the quick brown fox", "jumps, over the lazy dog"), ("naïve café", "sleeps"), ("dog", "then sleeps. " * 9)]


def _prompts(longest=120):
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 17, 17, 60, longest, 2, 5)] + [[7, 1, 9, 1, 1, 8]]


def _vectors(engine, prompts, second_text_start=0):
    params = SamplingParams(max_tokens=1)
    for i, prompt in enumerate(prompts):
        start = second_text_start if len(prompt) > second_text_start else 0
        engine.add(SequenceRequest(i, prompt, params, pooling=PoolingParams(), second_text_start=start))
    vectors = {}
    while engine.has_work:
        vectors |= {result.id: result.pooled for result in engine.step().results}
        engine.check_integrity()
    return [torch.frombuffer(bytearray(vectors[i]), dtype=torch.float32) for i in range(len(prompts))]


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_equal_transformers_and_depend_on_every_parameter(tmp_path, name):
    is_mean = name != "roberta"
    head, pooling = "mlm" if name in ("roberta", "modernbert") else "none", "mean_tokens" if is_mean else "cls_token"
    folder = make_encoder(tmp_path / "model", name, head, pooling)
    prompts = _prompts({"modernbert_mean": 700, "mpnet": 390}.get(name, 120))
    model = load(folder)
    types = {i: [0, 0, *[1] * (len(p) - 2)] for i, p in enumerate(prompts) if name == "bert" and len(p) > 2}
    expected = [embed(model, prompt, pooling, types.get(i)) for i, prompt in enumerate(prompts)]
    start = 2 if name == "bert" else 0
    for config in ({"max_num_seqs": 16}, {"max_num_seqs": 3, "max_num_batched_tokens": 3}):
        engine = Engine.from_config(EngineConfig(str(folder), dtype="float32", **config))
        assert engine.memory.kv_bytes == 0
        for found, wanted in zip(_vectors(engine, prompts, start), expected, strict=True):
            assert (found - wanted).abs().max() < MAX_ERROR
    engine = Engine.from_config(EngineConfig(str(folder), dtype="bfloat16"))
    own, other = _vectors(engine, prompts, start), load(folder, dtype=torch.bfloat16)
    theirs = [embed(other, prompt, pooling, types.get(i)) for i, prompt in enumerate(prompts)]
    errors = [sum((a - b).norm() for a, b in zip(vectors, expected, strict=True)) for vectors in (own, theirs)]
    assert errors[0] < 1.3 * errors[1]
    unused = ("pooler.", "lm_head.", "head.", "decoder.", "cls.")
    tensors = load_file(folder / "model.safetensors")
    for key in [
        key for key in tensors if not key.startswith(unused) and "layers.1" not in key and "layer.1" not in key
    ]:
        value = tensors[key]
        # Adding the same number to all keys of a head does not change the softmax.
        if key.endswith(("key.bias", "k_lin.bias", "attn.k.bias")):
            continue
        neutral = torch.ones_like(value) if key.lower().endswith("norm.weight") else torch.zeros_like(value)
        save_file(tensors | {key: neutral}, folder / "model.safetensors", {"format": "pt"})
        changed = Engine.from_config(EngineConfig(str(folder), dtype="float32", max_num_seqs=4))
        found = _vectors(changed, prompts[3:5], start)
        assert max((a - b).abs().max() for a, b in zip(found, expected[3:5], strict=True)) > 1e-4, key


@pytest.mark.parametrize("name", ENCODERS)
def test_scores_of_pairs_and_adapters_equal_transformers(tmp_path, name):
    folder = make_encoder(tmp_path / "model", name, "score", num_labels=1)
    adapter = make_encoder_adapter(tmp_path / "adapter", name, folder, num_labels=1)
    three = make_encoder_adapter(tmp_path / "three", name, folder, num_labels=3)
    llm = LLM(str(folder), dtype="float32", max_model_len=100, enable_lora=True, max_lora_rank=8)
    firsts, seconds = map(list, zip(*PAIRS, strict=True))
    for path in (None, adapter):
        lora = None if path is None else LoRARequest("a", 1, str(path))
        outputs = llm.score(firsts, seconds, use_tqdm=False, lora_request=lora)
        model = load(folder, path, num_labels=1)
        for output, pair in zip(outputs, PAIRS, strict=True):
            expected = score(model, folder, *pair)[0]
            assert abs(output.outputs.score - torch.sigmoid(expected).item()) < MAX_ERROR
    [output] = llm.classify(firsts[0], use_tqdm=False, lora_request=LoRARequest("b", 2, str(three)))
    expected = torch.softmax(score(load(folder, three, num_labels=3), folder, firsts[0]), -1)
    assert output.outputs.probs == pytest.approx(expected.tolist(), abs=MAX_ERROR)
    # Each tensor of the head must change the score.
    tensors = load_file(folder / "model.safetensors")
    before = llm.score(firsts[0], seconds[0], use_tqdm=False)[0].outputs.score
    for key in [key for key in tensors if key.startswith(("classifier", "pre_classifier", "head", "bert.pooler"))]:
        neutral = torch.ones_like if key.endswith("norm.weight") else torch.zeros_like
        save_file(tensors | {key: neutral(tensors[key])}, folder / "model.safetensors", {"format": "pt"})
        changed = LLM(str(folder), dtype="float32", max_model_len=100)
        assert abs(changed.score(firsts[0], seconds[0], use_tqdm=False)[0].outputs.score - before) > 1e-5, key


def test_adapters_of_the_inner_model(tmp_path):
    folder = make_encoder(tmp_path / "model", "bert")
    adapter = make_encoder_adapter(tmp_path / "adapter", "bert", folder)
    llm = LLM(str(folder), dtype="float32", enable_lora=True, max_lora_rank=8)
    requests = [None, LoRARequest("a", 1, str(adapter))]
    outputs = llm.embed(["the quick brown fox"] * 2, use_tqdm=False, lora_request=requests)
    for output, path in zip(outputs, (None, adapter), strict=True):
        model = load(folder, path)
        assert (torch.tensor(output.outputs.embedding) - embed(model, output.prompt_token_ids)).abs().max() < MAX_ERROR
    [output] = llm.score("the fox", "the dog", use_tqdm=False)
    a, b = (embed(load(folder), llm.get_tokenizer().encode(text)) for text in ("the fox", "the dog"))
    assert output.outputs.score == pytest.approx(float(a @ b), abs=MAX_ERROR)
    with pytest.raises(InvalidArgument, match="model: is an encoder, so it cannot generate; use /v1/embeddings"):
        llm.generate("a", use_tqdm=False)


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
def test_tensor_parallel_ranks(tmp_path, name):
    folder = make_encoder(tmp_path / "model", name)
    prompts = _prompts()
    config = EngineConfig(str(folder), dtype="float32", tensor_parallel_size=2, max_num_seqs=8)
    config = config.for_model(ModelConfig.load(folder))
    types = [0, 0, *[1] * 200]
    engine = engine_with_thread_workers(config)
    found = _vectors(engine, prompts, 2 if name == "bert" else 0)
    for vector, prompt in zip(found, prompts, strict=True):
        given = types[: len(prompt)] if name == "bert" and len(prompt) > 2 else None
        assert (vector - embed(load(folder), prompt, "cls_token", given)).abs().max() < MAX_ERROR


def test_limits_and_errors_of_encoders(tmp_path):
    folder = make_encoder(tmp_path / "model", "xlm_roberta")
    assert ModelConfig.load(folder).max_length == 128  # the table begins with two rows for padding
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert ModelConfig.load(folder).max_length == 40
    llm = LLM(str(folder), dtype="float32", max_num_batched_tokens=64)
    with pytest.raises(InvalidArgument, match="the input has 41 tokens and max_model_len is 40"):
        llm.embed({"prompt_token_ids": [5] * 41}, use_tqdm=False)
    for changes, message in (
        ({"convert": "classify"}, "convert: must be auto or embed for an encoder without the head"),
        ({"kv_offloading_size": 1}, "kv_offloading_size: not possible with an encoder, which has no KV cache"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(folder), dtype="float32", **changes)
    document = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"architectures": ["XLMRobertaForQuestionAnswering"]}, "is an encoder that is not served; use a decoder"),
        ({"pad_token_id": 0}, "pad_token_id: must be 1"),
        ({"is_decoder": True}, "is_decoder: must be False"),
        ({"model_type": "bert"}, "model_type of architecture 'XLMRobertaModel' must be 'xlm-roberta', got 'bert'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelConfig.from_config(document | changes)


def test_pairs_are_truncated_as_by_transformers(tmp_path):
    for name in ("bert", "xlm_roberta"):
        folder = make_encoder(tmp_path / name, name)
        theirs = AutoTokenizer.from_pretrained(folder)
        ours = Tokenizer(folder)
        for pair in (*PAIRS, *((b, a) for a, b in PAIRS)):
            for length in (None, 5, 8, 9, 20):
                options = {} if length is None else {"truncation": "longest_first", "max_length": length}
                assert ours.encode_pair(*pair, length)[0] == theirs(*pair, **options)["input_ids"]
        assert ours.decode([5, 9, 30, 40]) == theirs.decode([5, 9, 30, 40])
