# SPDX-License-Identifier: Apache-2.0
"""EngineConfig and AdapterCatalog: round trip through JSON, and error messages of invalid documents."""

import json

import pytest

from quire_spec.documents.adapter_catalog import AdapterCatalog, Expose
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError, InvalidArgument


def test_engine_config_round_trip():
    config = EngineConfig(model="org/name", block_size=32, enable_lora=True)
    assert EngineConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "model: missing"),
        ({"model": ""}, "model: must not be empty"),
        ({"model": 3}, "model: expected a string, got an integer 3"),
        ({"model": "m", "blocksize": 16}, "blocksize: unknown field"),
        ({"model": "m", "block_size": 17}, "block_size: must be one of 8, 16, 32, 64, 128, got 17"),
        ({"model": "m", "block_size": True}, "block_size: expected an integer"),
        ({"model": "m", "dtype": "int8"}, "dtype: must be one of .*, got 'int8'"),
        ({"model": "m", "gpu_memory_utilization": 1.2}, "gpu_memory_utilization: must be in .*, got 1.2"),
        ({"model": "m", "max_num_seqs": 0}, "max_num_seqs: must be at least 1, got 0"),
        ({"model": "m", "max_logprobs": -2}, "max_logprobs: must be at least -1, got -2"),
        (
            {"model": "m", "max_num_seqs": 64, "max_num_batched_tokens": 32},
            "max_num_batched_tokens: must be at least max_num_seqs 64, got 32",
        ),
        ({"model": "m", "max_loras": 8, "max_cpu_loras": 4}, "max_cpu_loras: must be at least max_loras 8, got 4"),
        ({"model": "m", "swap_space": -1}, "swap_space: must be a size in GiB, got -1.0"),
        (
            {"model": "m", "max_loaded_lora_ranks": 15},
            "max_loaded_lora_ranks: must be at least 16, .* got 15; raise it",
        ),
        (
            {"model": "m", "max_lora_rank": 1, "max_loaded_lora_ranks": 1},
            "max_loaded_lora_ranks: must be at least 2, .* got 1",
        ),
        ({"model": "m", "kv_offloading_size": -1}, "kv_offloading_size: must be a size in GiB, got -1.0"),
        (
            {"model": "m", "kv_offloading_size": 1, "enable_prefix_caching": False},
            "kv_offloading_size: needs enable_prefix_caching, .*; remove it or set enable_prefix_caching",
        ),
        (
            {"model": "m", "quantization": "quark"},
            "quantization: must be one of None, int8, .*, gguf, got 'quark'",
        ),
        (
            {"model": "m", "kv_events_config": {"enable_kv_cache_events": True, "endpoint": "ipc:///tmp/events"}},
            "kv_events_config.endpoint: must be tcp://HOST:PORT with a port from 1 to 65535, got 'ipc:///tmp/events'",
        ),
        (
            {"model": "m", "kv_events_config": {"replay_endpoint": "tcp://*:70000"}},
            "kv_events_config.replay_endpoint: must be tcp://HOST:PORT with a port",
        ),
        (
            {"model": "m", "kv_events_config": {"publisher": "kafka"}},
            "kv_events_config.publisher: must be zmq or null, got 'kafka'",
        ),
        ({"model": "m", "kv_events_config": {"hwm": 0}}, "kv_events_config.hwm: must be at least 1, got 0"),
        (
            {"model": "m", "kv_events_config": {"enable_kv_cache_events": True}, "enable_prefix_caching": False},
            "kv_events_config: requires enable_prefix_caching",
        ),
        (
            {"model": "m", "speculative_config": {"method": "ngram"}},
            "speculative_config.num_speculative_tokens: missing; SpeculativeConfig requires it",
        ),
        (
            {"model": "m", "speculative_config": {"method": "eagle", "num_speculative_tokens": 2}},
            "speculative_config.method: must be one of ngram, suffix, mtp, draft_model, eagle3, medusa, got 'eagle'",
        ),
        (
            {"model": "m", "speculative_config": {"method": "ngram", "num_speculative_tokens": 0}},
            "speculative_config.num_speculative_tokens: must be from 1 to 16, got 0",
        ),
        (
            {"model": "m", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
            | {"async_scheduling": True},
            "async_scheduling: must not be true with speculative_config",
        ),
        (
            {
                "model": "m",
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}
                | {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            },
            "speculative_config.prompt_lookup_max: must be at least prompt_lookup_min 4, got 3",
        ),
        (
            {
                "model": "m",
                "speculative_config": {"method": "suffix", "num_speculative_tokens": 2}
                | {"suffix_decoding_max_tree_depth": 1},
            },
            "speculative_config.suffix_decoding_max_tree_depth: must be from 2 to 128, got 1",
        ),
        (
            {
                "model": "m",
                "speculative_config": {"method": "suffix", "num_speculative_tokens": 2}
                | {"suffix_decoding_max_spec_factor": 0.0},
            },
            "speculative_config.suffix_decoding_max_spec_factor: must be a positive number, got 0.0",
        ),
        (
            {"model": "m", "speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
            "speculative_config.model: missing; give the folder of the draft model with method 'draft_model'",
        ),
        (
            {"model": "m", "speculative_config": {"method": "suffix", "num_speculative_tokens": 2, "model": "d"}},
            "speculative_config.model: must not be given with method 'suffix'",
        ),
        ([], "EngineConfig: expected an object, got a list"),
    ],
)
def test_rejects_invalid_engine_config(document, message):
    with pytest.raises(ConfigError, match="^" + message.replace("[", r"\[")):
        EngineConfig.from_json(document)


def adapter(name, **fields):
    return {"name": name, "source": {"path": f"/adapters/{name}"}, **fields}


def test_catalog_round_trip():
    document = {"generation": 3, "adapters": [adapter("sql", pinned=True, expose="Model"), adapter("pirate")]}
    catalog = AdapterCatalog.from_json(document)
    assert catalog.adapters[0].expose is Expose.MODEL
    assert AdapterCatalog.from_json(json.loads(json.dumps(catalog.to_json()))) == catalog


def test_64_adapters_are_exposed_by_default():
    adapters = [adapter(f"a{i}") for i in range(70)]
    adapters[3]["expose"] = "Parameter"
    adapters[69]["expose"] = "Model"
    exposed = AdapterCatalog.from_json({"adapters": adapters}).exposed_names()
    assert len(exposed) == 64
    assert "a3" not in exposed
    assert "a69" in exposed
    assert "a68" not in exposed


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ([adapter("a"), adapter("a")], r"adapters\[1\].name: 'a' is a duplicate"),
        ([adapter("A/b")], r"adapters\[0\].name: 'A/b' is not a model name"),
        ([{"name": "a", "source": {}}], r"adapters\[0\].source: missing"),
        ([{"name": "a", "source": {"path": "/x", "http": {"url": "u"}}}], "got http, path"),
        ([{"name": "a"}], r"adapters\[0\].source: missing"),
        ([adapter("a", expose="Both")], r"adapters\[0\].expose: must be one of Model, Parameter, got 'Both'"),
        ([{"name": "a", "source": {"http": {"uri": "u"}}}], r"adapters\[0\].source.http.uri: unknown field"),
    ],
)
def test_rejects_invalid_catalog(adapters, message):
    with pytest.raises(InvalidArgument, match=message):
        AdapterCatalog.from_json({"adapters": adapters})


@pytest.mark.parametrize(
    ("fields", "max_loras"),
    [
        ({}, 8),
        ({"max_cpu_loras": None}, 8),
        ({"max_cpu_loras": 1}, 1),
        ({"max_cpu_loras": 2}, 2),
        ({"max_cpu_loras": 64}, 8),
        ({"max_loras": 1, "max_cpu_loras": 2}, 1),
    ],
)
def test_default_of_max_loras_is_at_most_max_cpu_loras(fields, max_loras):
    config = EngineConfig.from_json({"model": "m"} | fields)
    assert config.max_loras == max_loras <= config.max_host_loras
    assert EngineConfig.from_json(config.to_json()) == config
