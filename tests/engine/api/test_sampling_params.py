# SPDX-License-Identifier: Apache-2.0
"""The parameters that a script creates: constructors and assignments are checked, and `freeze` returns an immutable
value."""

import pytest

from quire_engine import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from quire_spec.engine import sampling_params
from quire_spec.errors import InvalidArgument


def test_clone_is_independent():
    params = SamplingParams(stop=["a"], logit_bias={3: 1.0}, max_tokens=7)
    other = params.clone()
    assert other == params
    other.max_tokens = 8
    other.stop = ["b"]
    assert (params.max_tokens, params.stop) == (7, SamplingParams(stop=["a"]).stop)


def test_assignment_is_checked():
    params = SamplingParams()
    params.max_tokens, params.stop, params.seed, params.logit_bias = 5, "x", -1, {3: 10**400}
    assert params == SamplingParams(max_tokens=5, stop=["x"], logit_bias={3: 100.0})
    with pytest.raises(InvalidArgument, match="'temperature'"):
        params.temperature = -1
    with pytest.raises(InvalidArgument, match="unknown sampling parameter 'max_new_tokens'"):
        params.max_new_tokens = 5
    assert params.temperature == 1.0


def test_parameters_are_keyword_only():
    # The first parameter of vLLM's class is n, so that a positional value would have another meaning here.
    with pytest.raises(TypeError):
        SamplingParams(2)


def test_constructors_check_their_arguments():
    for values in ({"temperature": -1}, {"stop": ["x"], "detokenize": False}, {"structured_outputs": {"regex": ""}}):
        with pytest.raises(InvalidArgument, match=f"'{next(iter(values))}'"):
            SamplingParams(**values)
    with pytest.raises(InvalidArgument, match="'structured_outputs'"):
        StructuredOutputsParams(json="{")
    assert StructuredOutputsParams(json='{"type": "null"}').json == {"type": "null"}


def test_older_name_of_a_constraint():
    constraint = GuidedDecodingParams(choice=["a"], backend="xgrammar")
    params = SamplingParams(guided_decoding=constraint)
    assigned = SamplingParams()
    assigned.guided_decoding = constraint
    assert params == assigned == SamplingParams(structured_outputs=constraint)
    assert params.structured_outputs.choice == ("a",)


def test_frozen_parameters_are_checked_again():
    params = SamplingParams(max_tokens=5, min_tokens=5, logit_bias={3: 1.0}, guided_decoding={"regex": "a"})
    frozen = params.freeze()
    assert type(frozen) is sampling_params.SamplingParams and frozen.to_mapping() == params.to_mapping()
    with pytest.raises(AttributeError):
        frozen.max_tokens = 7
    params.max_tokens = 4
    with pytest.raises(InvalidArgument, match="'min_tokens'"):
        params.freeze()
    params.min_tokens = 0
    params.logit_bias[3] = "x"
    with pytest.raises(InvalidArgument, match="'logit_bias'"):
        params.freeze()
