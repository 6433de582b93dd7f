# SPDX-License-Identifier: Apache-2.0
"""Constraints together with a draft model, an EAGLE-3 head and Medusa heads: equal tokens, which match."""

import json
import re
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire_engine import LLM, SamplingParams, StructuredOutputsParams
from quire_engine.speculation.draft_policy import DraftPolicy

MODELS = Path(__file__).parents[3] / "examples/models"
PROMPTS = ["Once upon a time", "The captain", "One day a dog", "Question: Can I change my order?\nAnswer:"]
NUM_TOKENS = 48


def load(**fields):
    return LLM(MODELS / "tiny", dtype="float32", device="cpu", max_model_len=72, block_size=8, **fields)


@pytest.fixture(scope="module")
def plain():
    return load(kv_cache_memory_bytes=2**24)


@pytest.fixture(scope="module")
def medusa_folder(tmp_path_factory):
    """Heads without residual blocks, fitted to greedy outputs of the model by least squares."""
    folder = tmp_path_factory.mktemp("medusa")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny")
    hidden, token_ids = [], []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.inference_mode():
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=200, do_sample=False)
            states = model.model(ids).last_hidden_state[0]
        hidden.append(states[:-4])
        # Head i proposes the token after the next i + 1 tokens.
        token_ids.append(torch.stack([ids[0, 2 + i : len(states) - 2 + i] for i in range(3)]))
    targets = functional.one_hot(torch.cat(token_ids, dim=1), model.config.vocab_size).float()
    states = torch.cat(hidden)
    heads = {f"{i}.0.weight": torch.linalg.lstsq(states, targets[i]).solution.T.contiguous() for i in range(3)}
    save_file(heads, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 0}))
    return folder


def _json_schema(keys, length):
    values = [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"}, {"enum": ["red", "green"]}]
    values.append({"type": "string", "maxLength": length})
    properties = {key: values[i % 4] for i, key in enumerate(keys)}
    schema = {"type": "object", "properties": properties, "required": keys, "additionalProperties": False}
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return params, lambda text: jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def _regex(parts):
    pattern = "".join(parts)
    return StructuredOutputsParams(regex=pattern), lambda text: _check(re.fullmatch(pattern, text))


def _choice(texts):
    return StructuredOutputsParams(choice=texts), lambda text: _check(text in texts)


def _lark(operator, num_digits):
    lark = f'start: number (" {operator} " number)*\nnumber: /[0-9]{{1,{num_digits}}}/'
    pattern = rf"[0-9]{{1,{num_digits}}}( {re.escape(operator)} [0-9]{{1,{num_digits}}})*"
    return StructuredOutputsParams(grammar=lark), lambda text: _check(re.fullmatch(pattern, text))


def _check(is_valid):
    assert is_valid


KEYS = ["name", "age", "is_captain", "colour of the boat"]
PARTS = [
    "(ab|cd){1,6}",
    r"-\d{4}",
    r"[A-Za-z ,.'\"]{5,100}",
    r"[^\d]{5,60}",
    " once upon a time ",
    "(no, )*yes",
    "x{3,12}",
]
TEXTS = ["the old man and the sea", "the old man", "a dog", "🦊 a fox"]
CONSTRAINTS = st.one_of(
    st.builds(_json_schema, st.lists(st.sampled_from(KEYS), min_size=1, unique=True), st.integers(0, 12)),
    st.builds(_regex, st.lists(st.sampled_from(PARTS), min_size=1, max_size=3)),
    st.builds(_choice, st.lists(st.sampled_from(TEXTS), min_size=1)),
    st.builds(_lark, st.sampled_from("+*"), st.integers(1, 9)),
)
SEQUENCES = st.tuples(
    st.sampled_from(PROMPTS),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.7]), "seed": st.integers(0, 99)},
        optional={"min_tokens": st.integers(1, 8), "presence_penalty": st.just(0.8)},
    ),
)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_outputs_equal_those_without_drafts(plain, medusa_folder, method, monkeypatch):
    """Sequences with and without a constraint share a batch; with a draft model, some are preempted."""
    folder = {"draft_model": MODELS / "tiny", "eagle3": MODELS / "tiny-eagle3", "medusa": medusa_folder}[method]
    speculation = {"method": method, "num_speculative_tokens": 3, "model": str(folder)}
    llm = load(speculative_config=speculation, kv_cache_memory_bytes=2**19, max_num_batched_tokens=32, max_num_seqs=24)
    accepted = Counter()
    record = DraftPolicy.record

    def count(policy, sequence, num_draft, num_accepted, *, is_forced=False):
        accepted["forced" if is_forced else "proposed", sequence.grammar is not None] += num_accepted
        record(policy, sequence, num_draft, num_accepted, is_forced=is_forced)

    monkeypatch.setattr(DraftPolicy, "record", count)
    monkeypatch.setattr(DraftPolicy, "draft_length", lambda *_: 3)

    @settings(max_examples=3, deadline=None)
    @given(st.lists(st.tuples(SEQUENCES, CONSTRAINTS), min_size=4, max_size=6), SEQUENCES)
    def check(constrained, free):
        prompts = [prompt for (prompt, _), _ in constrained] + [free[0]]
        params = [
            SamplingParams(max_tokens=NUM_TOKENS, **sampling, structured_outputs=constraint)
            for (_, sampling), (constraint, _) in constrained
        ]
        params.append(SamplingParams(max_tokens=NUM_TOKENS, **free[1]))
        outputs = [engine.generate(prompts, params, use_tqdm=False) for engine in (plain, llm)]
        expected, actual = ([list(r.outputs[0].token_ids) for r in results] for results in outputs)
        assert actual == expected
        for (_, (_, check_text)), request in zip(constrained, outputs[1], strict=False):
            if request.outputs[0].finish_reason == "stop":
                check_text(request.outputs[0].text)
        llm.engine.check_integrity()

    check()
    assert all(accepted[key] for key in (("forced", True), ("proposed", True), ("proposed", False))), accepted
    # The draft model's keys leave ten blocks for the sequences.
    assert llm.engine.stats().num_preemptions or method != "draft_model"
