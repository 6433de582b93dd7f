# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: accepted forms of values, and error messages of invalid ones."""

import functools
import json
import math
import re
from pathlib import Path

import pytest
from msgspec import msgpack, structs

from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.engine.structured_outputs import StructuredOutputsParams
from quire_spec.errors import InvalidArgument


def test_parses_strings_of_vllm_backend_clients():
    params = SamplingParams.from_mapping({"temperature": "0.1", "max_tokens": "7", "ignore_eos": "True"})
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.1, 7, True)


@pytest.mark.parametrize(
    ("value", "stop"),
    [
        *[("end", ("end",)), ('["a", "b"]', ("a", "b")), (["a"], ("a",)), (None, ()), ("7", ("7",))],
        *((text, (text,)) for text in ("[", "[INST]", "[/INST]", "[a", "[[a]]")),
    ],
)
def test_accepts_all_forms_of_stop(value, stop):
    assert SamplingParams.from_mapping({"stop": value}).stop == stop


@pytest.mark.parametrize("name", ["stop", "bad_words"])
@pytest.mark.parametrize("text", ['["a"', '["a", ]', "['a', 'b']", '[ "a]'])
def test_rejects_malformed_list_of_strings(name, text):
    with pytest.raises(InvalidArgument, match=rf"'{name}': must be a JSON list of strings.*; write it like \["):
        SamplingParams.from_mapping({name: text})


def test_round_trips():
    constraint = StructuredOutputsParams(json={"maximum": 10**30}, begin_after_token_ids=(7,))
    constraint.check()
    params = SamplingParams(temperature=0.0, stop=("x",), seed=3, logprobs=2, structured_outputs=constraint)
    assert SamplingParams.from_mapping(json.loads(json.dumps(params.to_mapping()))) == params
    assert msgpack.decode(msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    "values",
    [
        {"structured_outputs": {"choice": ["a"]}},
        {"structured_outputs": '{"choice": ["a"]}'},
        {"guided_choice": ["a"]},
        {"guided_choice": '["a"]'},
        {"guided_decoding": {"choice": ["a"], "backend": "xgrammar"}},
    ],
)
def test_accepts_all_forms_of_a_constraint(values):
    expected = SamplingParams.checked(structured_outputs={"choice": ["a"]})
    assert SamplingParams.from_mapping(values) == expected
    assert expected.structured_outputs.choice == ("a",)


def test_rejects_two_names_of_a_constraint():
    with pytest.raises(InvalidArgument, match="remove the older one"):
        SamplingParams.from_mapping({"guided_regex": "a", "structured_outputs": {"regex": "a"}})


VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "bad_words": (),
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "structured_outputs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "allowed_token_ids": None,
}
"""Defaults of vllm.SamplingParams, release 0.32."""


def test_defaults_match_vllm():
    others = {"best_of": None, "truncate_prompt_tokens": None, "truncation_side": "left", "thinking_token_budget": None}
    others["logprob_token_ids"] = None
    # In vLLM they are fields of BeamSearchParams and of the OpenAI API.
    others |= {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    assert structs.asdict(SamplingParams()) == VLLM_DEFAULTS | others
    assert SamplingParams().to_mapping() == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("logits_processors", "known parameters are"),
        ("temprature", r"did you mean temperature\? Known parameters are"),
        ("a" * 10**6, "known parameters are"),
    ],
    ids=["other", "misspelt", "long"],
)
def test_rejects_unknown_name(name, words):
    with pytest.raises(InvalidArgument, match=f"unknown sampling parameter '{name[:70]}.*; {words} allowed_token_ids,"):
        SamplingParams.from_mapping({name: 1})


INVALID_VALUES = {
    "temperature": (-0.1, 101, 10**400, "warm", None, True, [1.0], math.nan, "nan", math.inf),
    "top_p": (0, 1.01, "most", None),
    "top_k": (-2, 2.5, "many", None, True),
    "min_p": (-0.1, 1.1, "few", None),
    "presence_penalty": (-2.1, 2.1, "x", None),
    "frequency_penalty": (-2.1, 2.1, "x", None),
    "repetition_penalty": (0, -1, "x", None, math.inf),
    "logit_bias": ([1, 2], {"a": 1}, {1.5: 1}, {1: "x"}, {1: math.nan}, "x", dict.fromkeys(range(1025), 0)),
    "allowed_token_ids": ([], "7,8", ["a"], [1.5], 7, [True]),
    "bad_words": ([""], [1], {"a": 1}, ["x" * 1025], ["x"] * 129),
    "seed": (-(2**63) - 1, 2**63, 1.5, "x"),
    "max_tokens": (0, -1, 1.5, "x", 2**31, "[" * 100_000),
    "min_tokens": (-1, 17, 1.5, None),
    "stop": ([""], [1], {"a": 1}, ["x" * 1025], ["x"] * 65),
    "stop_token_ids": (["a"], [1.5], 7, [0] * 129, "[" * 100_000),
    "ignore_eos": (1, "maybe", None),
    "logprobs": (-2, 1.5, True, "x"),
    "prompt_logprobs": (-2, 1.5, True, "x"),
    "detokenize": (0, "no", None),
    "include_stop_str_in_output": (1, "yes", None),
    "skip_special_tokens": (1, "yes", None),
    "spaces_between_special_tokens": (1, "yes", None),
    "truncate_prompt_tokens": (0, -2, 1.5, "x"),
    "truncation_side": ("middle", 1, None),
    "thinking_token_budget": (-2, 1.5, "x", 2**31),
    "logprob_token_ids": ([], [5], "7", ["a"], [1.5], 7, [0] * 129),
    "n": (0, 129, 10**400, 1.5, None, True),
    "best_of": (0, 129, 1.5, "x", True),
    "use_beam_search": (1, "yes", None),
    "length_penalty": (-11, 11, "x", None, math.nan),
    "early_stopping": ("always", 1, None),
    "structured_outputs": (
        *(7, "x", [], {}, {"x": 1}, {"regex": ""}, {"regex": "\ud800"}, {"choice": []}, {"choice": [1]}),
        *({"json": 1}, {"json": "{"}, {"json": {}, "regex": "a"}, {"regex": "a", "begin_after_token_ids": [-1]}),
        *({"choice": ["a"] * 10_001}, {"json": {"enum": [0] * 10_001}}, {"regex": "a" * 2**18}, {"json_object": False}),
        {"json": functools.reduce(lambda schema, _: {"items": schema}, range(33), {})},
    ),
}
"""Invalid values of each parameter."""


def test_every_parameter_has_invalid_values():
    assert set(INVALID_VALUES) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in INVALID_VALUES.items() for value in values]
)
def test_rejects_invalid_value_by_name(name, value):
    with pytest.raises(InvalidArgument, match=f"'{name}'") as caught:
        SamplingParams.from_mapping({name: value})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", sorted(INVALID_VALUES.keys() - {"stop", "bad_words"}))
def test_rejects_the_text_null(name):
    """Parsing it as None would remove a limit: the longest output, the whole prompt."""
    for text in ("null", " null ", "NULL"):
        with pytest.raises(InvalidArgument, match=f"'{name}': must be .*, got '{text}'"):
            SamplingParams.from_mapping({name: text})
    assert SamplingParams.from_mapping({"stop": "null", "bad_words": "null"}).stop == ("null",)


def test_logit_bias_from_json_is_clamped():
    params = SamplingParams.from_mapping({"logit_bias": '{"7": 200, "8": -3}'})
    assert params.logit_bias == {7: 100.0, 8: -3.0}
    assert SamplingParams.from_mapping(json.loads(json.dumps(params.to_mapping()))) == params
    assert SamplingParams.checked(logit_bias={}).logit_bias is None


def test_text_is_parsed_only_by_from_mapping():
    assert SamplingParams.from_mapping({"stop": '["a"]', "allowed_token_ids": "[1, 2]"}).allowed_token_ids == (1, 2)
    assert SamplingParams.checked(stop='["a"]').stop == ('["a"]',)
    with pytest.raises(InvalidArgument, match="'temperature'"):
        SamplingParams.checked(temperature="0.5")


def test_rejects_inconsistent_parameters():
    with pytest.raises(InvalidArgument, match=r"'stop'.*detokenize"):
        SamplingParams.checked(stop="x", detokenize=False)
    with pytest.raises(InvalidArgument, match="'min_tokens'"):
        SamplingParams.checked(max_tokens=3, min_tokens=4)
    with pytest.raises(InvalidArgument, match="'best_of': must be from 3 to 128, got 2"):
        SamplingParams.checked(n=3, best_of=2)
    for name in ("n", "best_of"):
        with pytest.raises(InvalidArgument, match=f"'{name}': must be 1 with temperature 0.*, got 2"):
            SamplingParams.checked(temperature=0, **{name: 2})
    assert SamplingParams.checked(max_tokens=None, min_tokens=4000).min_tokens == 4000
    assert SamplingParams.checked(seed=-1).seed is None


def test_beam_search_parameters():
    params = SamplingParams.from_mapping({"use_beam_search": "true", "n": 2, "best_of": 4, "early_stopping": "never"})
    assert (params.num_sequences, params.num_results, params.early_stopping) == (4, 2, "never")
    assert params.child_params(0) == params
    assert SamplingParams.from_mapping(params.to_mapping()) == params
    # Beams are not sampled, so temperature 0 is allowed.
    assert SamplingParams.checked(use_beam_search=True, n=3, temperature=0).num_results == 3
    for name, value in (("length_penalty", 2.0), ("early_stopping", True)):
        with pytest.raises(InvalidArgument, match=f"'{name}': requires use_beam_search"):
            SamplingParams.checked(**{name: value})
    for name, value in (("prompt_logprobs", 1), ("structured_outputs", {"regex": "a"}), ("thinking_token_budget", 5)):
        with pytest.raises(InvalidArgument, match=f"'{name}': not allowed with use_beam_search"):
            SamplingParams.checked(use_beam_search=True, **{name: value})


def test_child_params():
    params = SamplingParams(n=2, best_of=3, seed=2**63 - 1, prompt_logprobs=4, top_k=5)
    outputs = [params.child_params(i) for i in range(params.num_sequences)]
    assert [p.seed for p in outputs] == [2**63 - 1, 0, 1]
    assert [p.prompt_logprobs for p in outputs] == [4, None, None]
    assert {(p.n, p.best_of, p.logprobs, p.top_k) for p in outputs} == {(1, None, 0, 5)}
    assert [p.logprobs for p in map(SamplingParams(n=2).child_params, range(2))] == [None, None]
    assert SamplingParams(n=2, best_of=3, logprobs=7).child_params(1).logprobs == 7


def test_max_prompt_tokens():
    assert SamplingParams().max_prompt_tokens(100) is None
    assert SamplingParams(truncate_prompt_tokens=7).max_prompt_tokens(100) == 7
    assert SamplingParams(truncate_prompt_tokens=-1, max_tokens=30).max_prompt_tokens(100) == 70
    assert SamplingParams(truncate_prompt_tokens=-1, max_tokens=None).max_prompt_tokens(100) == 99
    assert SamplingParams(truncate_prompt_tokens=-1, max_tokens=500).max_prompt_tokens(100) == 1
    assert SamplingParams(truncate_prompt_tokens=2).truncate_prompt([1, 2, 3], 100) == [2, 3]
    assert SamplingParams(truncate_prompt_tokens=2, truncation_side="right").truncate_prompt([1, 2, 3], 100) == [1, 2]


def test_documentation_lists_every_parameter():
    text = (Path(__file__).parents[3] / "docs/parameters.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(SamplingParams.__struct_fields__)
