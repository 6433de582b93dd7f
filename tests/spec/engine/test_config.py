# SPDX-License-Identifier: Apache-2.0
"""engine.json and adapters.json: what is read back, and what is refused with which words."""

import json

import pytest

from quire_spec.documents.adapter_catalog import AdapterCatalog, Expose
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, InvalidArgument


def test_round_trip(tmp_path):
    config = EngineConfig(model="org/name", block_size=32, enable_lora=True)
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(config.to_json()))
    assert EngineConfig.load(path) == config


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "model: missing"),
        ({"model": ""}, "model: empty"),
        ({"model": 3}, "model: expected a string, found an integer 3"),
        ({"model": "m", "blocksize": 16}, "blocksize: unknown field"),
        ({"model": "m", "block_size": 17}, "block_size: 17 is not one of 8, 16"),
        ({"model": "m", "block_size": True}, "block_size: expected an integer"),
        ({"model": "m", "dtype": "int8"}, "dtype: 'int8' is not one of"),
        ({"model": "m", "gpu_memory_utilization": 1.2}, "gpu_memory_utilization: 1.2 is outside"),
        ({"model": "m", "max_num_seqs": 0}, "max_num_seqs: 0 is less than 1"),
        ({"model": "m", "max_logprobs": -2}, "max_logprobs: -2 is less than -1"),
        ({"model": "m", "max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens: 32 is less"),
        ({"model": "m", "max_loras": 8, "max_cpu_loras": 4}, "max_cpu_loras: 4 is less than max_loras 8"),
        ({"model": "m", "swap_space": -1}, "swap_space: -1.0 is no size"),
        ({"model": "m", "quantization": "awq"}, "quantization: 'awq' is not one of None"),
        ({"model": "m", "speculative_config": {"method": "ngram"}}, "speculative_config: not supported"),
        ([], "EngineConfig: expected an object, found a list"),
    ],
)
def test_refusals(document, message):
    with pytest.raises(ConfigError, match="^" + message.replace("[", r"\[")):
        EngineConfig.from_json(document)


@pytest.mark.parametrize("content", [b"{", b'"\xff"', b"[" * 100_000], ids=["cut", "not UTF-8", "too deep"])
def test_a_file_that_is_not_json_names_the_file(tmp_path, content):
    (tmp_path / "engine.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"engine\.json"):
        EngineConfig.load(tmp_path / "engine.json")


def adapter(name, **more):
    return {"name": name, "source": {"path": f"/adapters/{name}"}, **more}


def test_catalogue_round_trip():
    document = {"generation": 3, "adapters": [adapter("sql", pinned=True, expose="Model"), adapter("pirate")]}
    catalogue = AdapterCatalog.from_json(document)
    assert catalogue.adapters[0].expose is Expose.MODEL
    assert AdapterCatalog.from_json(json.loads(json.dumps(catalogue.to_json()))) == catalogue


def test_the_first_64_get_models_of_their_own():
    many = [adapter(f"a{i}") for i in range(70)]
    many[3]["expose"] = "Parameter"
    many[69]["expose"] = "Model"
    exposed = AdapterCatalog.from_json({"adapters": many}).exposed_names()
    assert len(exposed) == 64
    assert "a3" not in exposed
    assert "a69" in exposed
    assert "a68" not in exposed


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([adapter("a"), adapter("a")], r"adapters\[1\].name: 'a' is there twice"),
        ([adapter("A/b")], r"adapters\[0\].name: 'A/b' is not a model name"),
        ([{"name": "a", "source": {}}], r"adapters\[0\].source: exactly one of .* found none"),
        ([{"name": "a", "source": {"path": "/x", "http": {"url": "u"}}}], "found http, path"),
        ([{"name": "a"}], r"adapters\[0\].source: missing"),
        ([adapter("a", expose="Both")], r"adapters\[0\].expose: 'Both' is not one of Model, Parameter"),
        ([{"name": "a", "source": {"http": {"uri": "u"}}}], r"adapters\[0\].source.http.uri: unknown field"),
    ],
)
def test_catalogue_refusals(adapters, message):
    with pytest.raises(InvalidArgument, match=message):
        AdapterCatalog.from_json({"adapters": adapters})
