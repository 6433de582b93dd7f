# SPDX-License-Identifier: Apache-2.0
"""Outputs under constraints, from the trained tiny model: they match with all other features of the engine."""

import json
import math
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_drafts import ScriptedProposer
from support.thread_workers import engine_with_thread_workers

from quire_engine import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire_engine.structured_outputs.grammar_text import to_grammar_text
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import SequenceRequest

EXAMPLES = Path(__file__).parents[3] / "examples"
PROMPTS = ["Once upon a time", "The captain", "One day a dog", "Once upon a time, a bird"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


def load(**fields):
    defaults = {"device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 2**24}
    return LLM(model=EXAMPLES / "models/tiny", **(defaults | fields))


@pytest.fixture(scope="module")
def llm():
    return load(async_scheduling=True)


def schemas():
    """Random small schemas whose values have few tokens."""
    leaves = st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 'é\\"\n'}, {"enum": [1, "a", None, [2]]}]),
        st.tuples(st.integers(-50, 50), st.integers(0, 60)).map(
            lambda bounds: {"type": "integer", "minimum": bounds[0], "maximum": bounds[0] + bounds[1]}
        ),
        st.integers(0, 6).map(lambda length: {"type": "string", "maxLength": length}),
        st.sampled_from(["^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "^(ab|cd){1,3}e$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}
        ),
        st.just({"type": "number", "minimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25}),
    )
    return st.recursive(leaves, _composites, max_leaves=5)


def _composites(children):
    objects = st.dictionaries(st.sampled_from("abc"), children, min_size=1, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties))).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        *(children, st.integers(0, 2), st.integers(0, 1)),
    )
    return st.one_of(objects, arrays, st.lists(children, min_size=1, max_size=2).map(lambda any_of: {"anyOf": any_of}))


SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 1.0, 5.0]), "seed": st.integers(0, 2**31), "n": st.integers(1, 2)},
    optional={
        "top_k": st.integers(1, 40),
        "top_p": st.floats(0.1, 1.0),
        "min_p": st.floats(0.0, 0.5),
        "presence_penalty": st.floats(-1.0, 2.0),
        "min_tokens": st.integers(0, 8),
        "logprobs": st.integers(0, 3),
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(schemas(), SAMPLING, st.booleans()), min_size=4, max_size=8))
def test_every_output_is_valid(llm, cases):
    params = [
        SamplingParams(
            max_tokens=100,
            **sampling,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=c),
        )
        for schema, sampling, c in cases
    ]
    outputs = llm.generate(["Once upon a time"] * len(cases), params, use_tqdm=False)
    for (schema, sampling, is_compact), output in zip(cases, outputs, strict=True):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                value = json.loads(completion.text)
                jsonschema.Draft202012Validator(schema).validate(value)
            else:
                assert not is_compact and len(completion.token_ids) == 100, "free whitespace can fill an output"
            if "logprobs" in sampling:
                assert all(
                    math.isfinite(entry.logprob) for logprobs in completion.logprobs for entry in logprobs.values()
                )
    llm.engine.check_integrity()


GREEDY = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=StructuredOutputsParams(json=PERSON))
LORA = {"enable_lora": True, "max_lora_rank": 16}


@pytest.fixture(scope="module")
def expected():
    """Greedy outputs of one request at a time, without adapter and with one."""
    llm = load(async_scheduling=False, enable_prefix_caching=False, **LORA)
    return {name: [tokens(llm, [prompt], name)[0] for prompt in PROMPTS] for name in (None, "pirate")}


def tokens(llm, prompts, adapter=None):
    lora = None if adapter is None else LoRARequest(adapter, 1, str(EXAMPLES / "adapters" / adapter))
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora)
    for output in outputs:
        jsonschema.validate(json.loads(output.outputs[0].text), PERSON)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "fields",
    [
        {"async_scheduling": False, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {
            "async_scheduling": True,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 2**18,
            "swap_space": 0,
        },
        {"async_scheduling": True, "kv_cache_memory_bytes": 2**18, "swap_space": 0.01},
    ],
    ids=["chunked", "preempted", "swapped"],
)
def test_greedy_output_does_not_depend_on_scheduling(expected, fields):
    """The requests of all prompts run in one batch, with and without the adapter."""
    llm = load(max_model_len=128, **LORA, **fields)
    prompts = PROMPTS * 3
    for adapter, outputs in expected.items():
        assert tokens(llm, prompts, adapter) == outputs * 3
    assert bool(llm.engine.stats().num_preemptions) == (fields.get("kv_cache_memory_bytes") is not None)
    llm.engine.check_integrity()


def run(engine):
    """Return the tokens and the errors of all sequences, by the last digit of their ids."""
    token_ids, errors = {}, {}
    while engine.has_work:
        for result in engine.step().results:
            if result.error_code is not None:
                errors[result.id % 10] = result.error
            token_ids.setdefault(result.id % 10, []).extend(result.token_ids)
    return token_ids, errors


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2, "async_scheduling": True}, {"pipeline_parallel_size": 2}]
)
def test_several_ranks(llm, ranks):
    config = {"device": "cpu", "max_model_len": 128, "kv_cache_memory_bytes": 2**22}
    config = EngineConfig(model=str(EXAMPLES / "models/tiny"), **config, **ranks)
    engine = engine_with_thread_workers(config)
    grammar = to_grammar_text(GREEDY.structured_outputs)
    for i, prompt in enumerate(PROMPTS):
        token_ids = llm.get_tokenizer().encode(prompt)
        engine.add(
            SequenceRequest(
                i,
                token_ids,
                SamplingParams.from_mapping({"temperature": i / 2, "seed": 1, "max_tokens": 64}),
                grammar=grammar,
            )
        )
    token_ids, errors = run(engine)
    assert not errors and len(token_ids) == len(PROMPTS)
    for output in token_ids.values():
        jsonschema.validate(json.loads(llm.get_tokenizer().decode(output)), PERSON)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_sequence_without_an_allowed_token_fails_alone(llm, is_async):
    """bad words, a grammar that becomes too complex and a parameter that excludes the grammar: others continue."""
    engine = llm.engine
    engine._step_executor.async_scheduling = is_async
    constraint = to_grammar_text(StructuredOutputsParams(json=PERSON))
    prompt = llm.get_tokenizer().encode(PROMPTS[0])
    requests = [
        SequenceRequest(i, prompt, SamplingParams(temperature=0.0, max_tokens=64, **params), grammar=grammar)
        for i, (grammar, params) in enumerate(
            [
                (constraint, {}),
                (constraint, {"allowed_token_ids": [5, 6]}),
                (None, {}),
                ("start: start start | start start start | \"\"", {}),
                (constraint, {}),
            ],
            10_000 + 10 * is_async,
        )
    ]  # fmt: skip
    for request in requests:
        try:
            engine.add(request)
        except InvalidArgument:
            assert request.grammar != constraint
    texts, errors = run(engine)
    assert 1 in errors and errors.keys() <= {1, 3}
    assert "exclude all tokens" in errors[1]
    assert texts[0] == texts[4] and len(texts[2]) > 30 and texts[1] == []
    jsonschema.validate(json.loads(llm.get_tokenizer().decode(texts[0])), PERSON)
    engine.check_integrity()


def test_offline_errors_name_the_problem(llm):
    for constraint, problem in (
        ({"json": {"not": {}}}, "not"),
        ({"regex": "("}, "regex"),
        ({"grammar": "start: ((("}, "grammar|1"),
    ):
        params = SamplingParams(structured_outputs=constraint)
        with pytest.raises(InvalidArgument, match=problem):
            llm.generate("a", params, use_tqdm=False)


def test_sequences_with_a_grammar_have_drafts():
    """Forced tokens are drafts, and so are those of a proposer that the grammar allows; each row has its own mask."""
    constraints = [
        StructuredOutputsParams(json=PERSON),
        StructuredOutputsParams(regex=r"(ab|cd){3,9}-\d{4}"),
        StructuredOutputsParams(choice=["a long answer in one piece", "another answer"]),
    ]
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=60, min_tokens=4, structured_outputs=constraint)
        for constraint in constraints
        for seed in range(3)
    ]
    params.append(SamplingParams(temperature=0.0, max_tokens=60, logit_bias={5: 100.0}))
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    plain, speculating = load(dtype="float32"), load(dtype="float32", speculative_config=speculation)
    prompts = [f"The captain {i}" for i in range(len(params))]
    expected = [list(r.outputs[0].token_ids) for r in plain.generate(prompts, params, use_tqdm=False)]
    # Most of this draft is right, and a grammar allows not all of the rest.
    planner = speculating.engine._scheduler.draft_planner
    recorded = {tuple(plain.get_tokenizer().encode(p)): t for p, t in zip(prompts, expected, strict=True)}

    def continuation(sequence, num_tokens):
        end = len(sequence.output_token_ids)
        return recorded[tuple(sequence.prompt_token_ids)][end : end + num_tokens]

    planner._policy.draft_length = lambda *_: 3
    for proposer in (planner._proposer, ScriptedProposer(continuation, 0.6)):
        planner._proposer = proposer
        steps = speculating.engine.stats().num_steps
        outputs = speculating.generate(prompts, params, use_tqdm=False)
        assert [list(r.outputs[0].token_ids) for r in outputs] == expected
        assert speculating.engine.stats().num_steps - steps < 0.8 * plain.engine.stats().num_steps
    # One stream with forced tokens only.
    planner._proposer = ScriptedProposer(lambda *_: [])
    steps = speculating.engine.stats().num_steps
    [output] = speculating.generate(prompts[0], params[0], use_tqdm=False)
    assert speculating.engine.stats().num_steps - steps < len(output.outputs[0].token_ids)
