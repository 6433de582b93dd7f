# SPDX-License-Identifier: Apache-2.0
"""pod.json: round trip, wrong documents, and the options of the command lines that it has replaced."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_spec.documents.pod_config import (
    LimitsConfig,
    OpenAIConfig,
    PodConfig,
    Ports,
    ServerConfig,
    SourcesConfig,
)
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

MINIMAL = {"servedName": "tales", "engine": {"model": "m"}, "adapters": "/a/adapters.json"}

texts = st.text("ab-", min_size=1, max_size=4)
paths = st.lists(texts, min_size=1, max_size=3).map(lambda parts: Path("/", *parts))
optional_paths = st.none() | paths
text_tuples = st.lists(texts, max_size=3).map(tuple)
port_numbers = st.lists(st.integers(1, 2**16 - 1), min_size=5, max_size=5, unique=True)


@st.composite
def pod_configs(draw):
    """Draw a valid configuration; every field can have another value than its default."""
    *ports, openai_port = draw(port_numbers)
    server = st.builds(
        ServerConfig,
        expose=st.sampled_from([("http", "grpc"), ("http",), ("grpc",), ()]),
        serverArgs=st.sampled_from([(), ("log-info=true",), ("rate-limit=off", "log-verbose=1")]),
        modelRepository=optional_paths,
        modelEnv=text_tuples,
        verbose=st.booleans(),
    )
    openai = st.builds(
        OpenAIConfig,
        port=st.just(openai_port),
        apiServerCount=st.integers(1, 16),
        corsAllowedOrigins=st.lists(texts.map("https://{}.example".format), max_size=2).map(tuple),
        allowedMediaDomains=st.lists(st.sampled_from(["a.example", "b"]), max_size=2).map(tuple),
        sharedPrefixCache=st.booleans(),
        rejectUnknownFields=st.booleans(),
        live=st.booleans(),
        enableLogRequests=st.booleans(),
        allowRuntimeLoraUpdating=st.booleans(),
        generationConfig=st.sampled_from(["auto", "vllm"]),
        servedModelNames=text_tuples,
        apiKeysDir=optional_paths,
        sslCertfile=paths,
        sslKeyfile=optional_paths,
        maxBodyBytes=st.integers(1, 2**40),
        allowedLocalLoraPaths=st.just(()),
    )
    server_config = draw(server)
    return PodConfig(
        servedName=draw(st.sampled_from(["tales", "Llama-3.1", "x"])),
        engine=EngineConfig(model=draw(texts), block_size=draw(st.sampled_from([16, 32])), seed=draw(st.integers())),
        adapters=draw(paths),
        host=draw(st.sampled_from(["127.0.0.1", "0.0.0.0", "::"])),
        ports=Ports(*ports),
        adminKeyFile=draw(paths),
        server=server_config,
        openai=draw(openai if not server_config.expose else st.none() | openai),
        sources=draw(
            st.builds(SourcesConfig, secretsDir=optional_paths, claims=st.dictionaries(texts, paths, max_size=2))
        ),
        limits=draw(st.builds(LimitsConfig, drainSeconds=st.floats(0, 1e6), maxAdapterBytes=st.integers(1, 2**50))),
        vllmRepository=draw(optional_paths),
    )


@given(pod_configs())
def test_round_trip(config):
    document = json.loads(json.dumps(config.to_json()))
    assert PodConfig.from_json(document) == config


@given(pod_configs())
def test_only_values_that_differ_from_the_defaults_are_written(config):
    def check(value, document):
        for field in dataclasses.fields(value):
            default = field.default_factory() if callable(field.default_factory) else field.default
            item = getattr(value, field.name)
            assert (field.name in document) == (item != default), field.name
            if dataclasses.is_dataclass(item) and field.name in document:
                check(item, document[field.name])

    check(config, config.to_json())


def test_the_smallest_document():
    assert PodConfig.from_json(MINIMAL).to_json() == MINIMAL


def test_with_fields():
    config = PodConfig.from_json(MINIMAL)
    changed = config.with_fields({"ports.http": 9000, "openai.apiKeysDir": Path("/k"), "engine.seed": 7, "host": "::"})
    assert (changed.ports.http, changed.openai.apiKeysDir, changed.engine.seed) == (9000, Path("/k"), 7)
    assert changed.with_fields({}) == changed and changed.host == "::"
    with pytest.raises(ConfigError, match=r"ports\.http: must be a port"):
        config.with_fields({"ports.http": 0})
    with pytest.raises(ConfigError, match=r"ports\.htp: unknown field"):
        config.with_fields({"ports.htp": 1})


def test_explicit_fields_of_the_engine_are_written_with_their_defaults():
    document = PodConfig.from_json(MINIMAL).to_json(explicit={"block_size", "model"})
    assert document["engine"] == {"model": "m", "block_size": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"servedname": "x"}, "servedname: unknown field; PodConfig has adapters, adminKeyFile, engine, host"),
        ({"openai": {"corsOrigins": []}}, "openai.corsOrigins: unknown field; OpenAIConfig has "),
        ({"servedName": "two words"}, "servedName: 'two words' is not a model name; use at most 63"),
        ({"engine": {"model": "m", "block_size": 3}}, "engine.block_size: must be one of 8, 16, 32"),
        ({"engine": {"model": "m", "max_num_seq": 3}}, "engine.max_num_seq: unknown field; EngineConfig has "),
        ({"engine": {}}, "engine.model: missing"),
        ({"adapters": "adapters.json"}, "adapters: expected an absolute path, got 'adapters.json'; begin it with /"),
        ({"adapters": 7}, "adapters: expected an absolute path, got 7; begin it with /"),
        ({"ports": {"http": 0}}, "ports.http: must be a port from 1 to 65535, got 0"),
        ({"ports": {"http": 65536}}, "ports.http: must be a port from 1 to 65535, got 65536"),
        ({"ports": {"http": "8000"}}, "ports.http: expected an integer, got a string '8000'"),
        ({"ports": {"http": 8001}}, "ports.grpc: 8001 is also the value of ports.http; ports must differ"),
        ({"openai": {"port": 8003}}, "openai.port: 8003 is also the value of ports.health; ports must differ"),
        ({"server": {"expose": ["https"]}}, "server.expose: 'https' is not a protocol; give http, grpc, both or an"),
        (
            {"server": {"expose": []}},
            "server.expose: empty, but openai is not set, so no client could send a request; expose http",
        ),
        ({"server": {"serverArgs": ["http-port=1"]}}, "server.serverArgs: 'http-port=1': not allowed: it names a port"),
        ({"limits": {"drainSeconds": -1}}, "limits.drainSeconds: must be at least 0, got -1"),
        ({"limits": {"drainSeconds": float("nan")}}, "limits.drainSeconds: must be at least 0, got nan"),
        ({"limits": {"maxAdapterBytes": 0}}, "limits.maxAdapterBytes: must be at least 1, got 0"),
        ({"openai": {"apiServerCount": 17}}, "openai.apiServerCount: must be from 1 to 16, got 17"),
        ({"openai": {"generationConfig": "x"}}, "openai.generationConfig: must be auto or vllm, got 'x'"),
        (
            {"openai": {"allowedMediaDomains": ["a.example", "https://b.example/"]}},
            "openai.allowedMediaDomains: must be a host like images.example, without https:// and without a port, got "
            "'https://b.example/'",
        ),
        ({"openai": {"corsAllowedOrigins": ["chat.example"]}}, "openai.corsAllowedOrigins: must be an origin like"),
        ({"openai": {"maxBodyBytes": 0}}, "openai.maxBodyBytes: must be at least 1, got 0"),
        ({"openai": {"keys": [{"name": "a"}]}}, "openai.keys: requires openai.apiKeysDir; add it, or remove keys"),
        (
            {"openai": {"apiKeysDir": "/k", "keys": [{"name": "a"}, {"name": "a"}]}},
            "openai.keys: 2 entries have the name 'a'; merge them",
        ),
        (
            {"openai": {"apiKeysDir": "/k", "keys": [{"name": "a", "tokensPerMinute": 0}]}},
            "openai.keys[0].tokensPerMinute: must be at least 1, got 0; omit it for no limit",
        ),
        (
            {"openai": {"apiKeysDir": "/k", "keys": [{"name": "a"}]}},
            "server.expose: must be empty with openai.keys, because the server's ports know no API keys, got http",
        ),
        ({"openai": {"sslKeyfile": "/k"}}, "openai.sslKeyfile: requires openai.sslCertfile; add it"),
        ({"openai": {"live": 1}}, "openai.live: expected true or false, got an integer 1"),
        (
            {"openai": {"allowRuntimeLoraUpdating": True}},
            "openai.allowRuntimeLoraUpdating: requires adminKeyFile; add it",
        ),
        (
            {"adminKeyFile": "/k", "openai": {"allowedLocalLoraPaths": ["/a"], "allowRuntimeLoraUpdating": True}},
            "openai.allowedLocalLoraPaths: requires sources.allowPaths; add it",
        ),
        (
            {"openai": {"allowedLocalLoraPaths": ["/a"]}},
            "openai.allowedLocalLoraPaths: requires openai.allowRuntimeLoraUpdating; add it",
        ),
    ],
)
def test_wrong_documents_name_field_value_and_fix(changes, message, tmp_path):
    file = tmp_path / "pod.json"
    file.write_text(json.dumps(MINIMAL | changes))
    with pytest.raises(ConfigError) as error:
        PodConfig.load(file)
    assert str(error.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b'"text"', b"\xff", b"[" * 100_000])
def test_a_file_without_a_document_is_one_error(content, tmp_path):
    (tmp_path / "pod.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"pod\.json: "):
        PodConfig.load(tmp_path / "pod.json")
