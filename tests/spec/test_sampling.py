# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: what clients may send, and what they are told when it is wrong."""

import dataclasses

import pytest

from quire_spec.errors import InvalidArgument
from quire_spec.sampling import MAX_STOP_STRINGS, SamplingParams


def test_strings_as_vllm_backend_clients_send_them():
    params = SamplingParams.from_mapping({"temperature": "0.1", "max_tokens": "7", "ignore_eos": "True"})
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.1, 7, True)


@pytest.mark.parametrize(
    ("given", "stop"),
    [("end", ("end",)), ('["a", "b"]', ("a", "b")), (["a"], ("a",)), (None, ()), ("[a", ("[a",)), ("7", ("7",))],
)
def test_stop_in_every_form(given, stop):
    assert SamplingParams.from_mapping({"stop": given}).stop == stop


def test_mapping_round_trip():
    params = SamplingParams(temperature=0.0, stop=("x",), seed=3, logprobs=2)
    assert SamplingParams.from_mapping(params.to_mapping()) == params


def test_defaults_are_vllms():
    values = dataclasses.asdict(SamplingParams())
    assert (values["temperature"], values["max_tokens"], values["top_p"], values["n"]) == (1.0, 16, 1.0, 1)
    assert SamplingParams().to_mapping() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", "nan"),
        ("temperature", float("inf")),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("min_tokens", 17),
        ("logprobs", 21),
        ("n", 2),
        ("stop", ["ok"] * (MAX_STOP_STRINGS + 1)),
        ("stop", ["x"] * 10_000),
        ("stop", [""]),
        ("stop", ["y" * 2000]),
        ("stop", [1]),
        ("stop", {}),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("logits_processors", []),
        ("temprature", 0.5),
    ],
)
def test_refusals_name_the_parameter(name, value):
    with pytest.raises(InvalidArgument, match=name) as caught:
        SamplingParams.from_mapping({name: value})
    assert len(str(caught.value)) < 400
