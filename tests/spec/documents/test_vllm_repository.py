# SPDX-License-Identifier: Apache-2.0
"""Reading model repositories of NVIDIA's vllm_backend."""

import json

import pytest

from quire_spec.documents.sources import HuggingFaceSource
from quire_spec.documents.vllm_repository import read_served_model_names, read_vllm_repository
from quire_spec.errors import ConfigError, InvalidArgument


@pytest.fixture
def vllm(tmp_path):
    """Return a function that writes a vllm_backend model into a repository and returns the model's folder."""

    def write(arguments, loras=None, name="vllm_model"):
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (version / "model.json").write_text(json.dumps(arguments))
        if loras is not None:
            (version / "multi_lora.json").write_text(json.dumps(loras))
        return version.parent

    return write


def test_reads_upstream_sample(vllm):
    folder = vllm(
        {
            "model": "facebook/opt-125m",
            "disable_log_requests": True,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "disable_log_stats": False,
        }
    )
    for path in (folder, folder.parent):
        config, catalog = read_vllm_repository(path)
        assert (config.model, config.gpu_memory_utilization, config.device) == ("facebook/opt-125m", 0.5, "cuda")
        assert catalog.adapters == ()


def test_reads_upstream_multi_lora_tutorial_with_string_values(vllm):
    folder = vllm(
        {
            "model": "/weights/backbone/llama-7b-hf",
            "disable_log_requests": "true",
            "gpu_memory_utilization": 0.8,
            "tensor_parallel_size": "1",
            "block_size": 16,
            "enforce_eager": "true",
            "enable_lora": "true",
            "max_lora_rank": 16,
            "dtype": "half",
            "device": "cpu",
            "model_impl": "vllm",
        },
        {"alpaca": "/weights/loras/alpaca-lora-7b", "bactrian": "loras/bactrian"},
    )
    (folder / "1/loras/bactrian").mkdir(parents=True)
    config, catalog = read_vllm_repository(folder)
    assert (config.enable_lora, config.max_lora_rank, config.dtype, config.device) == (True, 16, "float16", "cpu")
    assert config.model_impl == "quire"  # the engine's own classes
    assert {a.name: a.source.path for a in catalog.adapters} == {
        "alpaca": "/weights/loras/alpaca-lora-7b",
        "bactrian": str((folder / "1/loras/bactrian").resolve()),
    }


def test_resolves_a_model_folder_beside_the_file(vllm):
    folder = vllm({"model": "weights"})
    (folder / "1/weights").mkdir()
    assert read_vllm_repository(folder)[0].model == str((folder / "1/weights").resolve())


def test_ignores_adapters_without_enable_lora(vllm):
    assert read_vllm_repository(vllm({"model": "m"}, {"alpaca": "/a"}))[1].adapters == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "m", "max_num_seq": 2}, "'max_num_seq': unknown engine argument"),
        ({"model": "m", "pipeline_parallel_size": 99}, "pipeline_parallel_size: must be from 1 to 16, got 99"),
        ({"model": "m", "tensor_parallel_size": 64}, "tensor_parallel_size: must be one of 1, 2, 4, 8, got 64"),
        ({"model": "m", "trust_remote_code": "true"}, "'trust_remote_code': value True is not supported"),
        ({"model": "m", "tokenizer": "other"}, "'tokenizer': value 'other' is not supported"),
        ({"model": "m", "stream_interval": 4}, "'stream_interval': value 4 is not supported"),
        ({"model": "m", "quantization": "quark"}, "quantization: must be one of None, int8, int4, fp8, fbgemm_fp8"),
        ({"model": "m", "max_model_len": "long"}, "max_model_len: expected an integer"),
        ({"model": "m", "dtype": ["float16"]}, "dtype: expected a string"),
        ({"gpu_memory_utilization": 0.5}, "model: missing"),
        ({"model": "m", "enable_lora": True}, "multi_lora.json: missing"),
        ([], "expected an object"),
    ],
)
def test_rejects_unsupported_arguments_by_name(vllm, arguments, words):
    with pytest.raises(ConfigError) as caught:
        read_vllm_repository(vllm(arguments))
    assert words in str(caught.value)


def test_rejects_invalid_adapter_name(vllm):
    with pytest.raises(InvalidArgument, match="'my/lora' is not a model name"):
        read_vllm_repository(vllm({"model": "m", "enable_lora": True}, {"my/lora": "/a"}))


def test_all_problems_are_reported_with_file_and_fix(vllm):
    folder = vllm({"model": "m", "decode_context_parallel_size": 2, "config_format": "mistral", "max_num_seq": 2})
    with pytest.raises(ConfigError) as caught:
        read_vllm_repository(folder)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{folder}/1/model.json: '") and "; " in line for line in lines)


def test_arguments_without_effect_are_one_warning(vllm, caplog):
    arguments = {"distributed_executor_backend": "ray", "num_scheduler_steps": "1", "lora_dtype": "auto"}
    assert read_vllm_repository(vllm({"model": "m", "fully_sharded_loras": False} | arguments))[0].model == "m"
    (record,) = caplog.records
    assert all(name in record.getMessage() for name in (*arguments, "fully_sharded_loras"))


def test_adapters_resolve_as_folders_then_as_hub_ids(vllm, tmp_path, monkeypatch):
    loras = {"a": "loras/a", "b": "loras/b", "c": "c", "d": "loras/d", "e": "org/e", "f": "/nowhere"}
    folder = vllm({"model": "m", "enable_lora": True}, loras)
    working_dir = tmp_path / "working"
    # `a` exists in two places: the working directory comes first, as in vLLM.
    for path in (
        working_dir / "loras/a",
        folder / "1/loras/a",
        folder / "1/loras/b",
        folder / "c",
        tmp_path / "loras/d",
    ):
        path.mkdir(parents=True)
    monkeypatch.chdir(working_dir)
    sources = {adapter.name: adapter.source for adapter in read_vllm_repository(folder)[1].adapters}
    assert {name: source.path for name, source in sources.items()} == {
        "a": str(working_dir / "loras/a"),
        "b": str(folder / "1/loras/b"),
        "c": str(folder / "c"),
        "d": str(tmp_path / "loras/d"),
        "e": None,
        "f": "/nowhere",
    }
    assert sources["e"].huggingFace == HuggingFaceSource("org/e")
    (folder / "1/multi_lora.json").write_text(json.dumps({"x": "no/such/folder", "y": ""}))
    with pytest.raises(ConfigError, match=r"multi_lora\.json: 'x': .*\n.*multi_lora\.json: 'y': "):
        read_vllm_repository(folder)


def test_serves_the_highest_version(vllm, tmp_path):
    folder = vllm({"model": "old"})
    for version, model in (("2", "newer"), ("10", "newest"), ("011", "ignored")):
        (folder / version).mkdir()
        (folder / version / "model.json").write_text(json.dumps({"model": model}))
    assert read_vllm_repository(tmp_path)[0].model == "newest"


def test_requires_exactly_one_model(vllm, tmp_path):
    with pytest.raises(ConfigError, match=r"VERSION/model\.json is required, got 0"):
        read_vllm_repository(tmp_path)
    vllm({"model": "a"}, name="a")
    vllm({"model": "b"}, name="b")
    with pytest.raises(ConfigError, match=r"VERSION/model\.json is required, got 2 \(a, b\)"):
        read_vllm_repository(tmp_path)


def test_error_of_invalid_json_names_the_file(vllm):
    folder = vllm({})
    (folder / "1/model.json").write_text("{")
    with pytest.raises(ConfigError, match=r"1/model\.json: "):
        read_vllm_repository(folder)


def test_arguments_of_the_openai_api_and_of_downloads(vllm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"model": "org/name", "served_model_name": ["a", "org/b"], "download_dir": "cache"}
    folder = vllm(arguments | {"generation_config": "defaults"})
    (folder / "1/defaults").mkdir()
    config, _ = read_vllm_repository(folder)
    assert (config.download_dir, config.generation_config) == (str(tmp_path / "cache"), str(folder / "1/defaults"))
    assert read_served_model_names(folder) == ("a", "org/b")
    other = vllm({"model": "org/name", "served_model_name": "one"}, name="other")
    assert read_served_model_names(other) == ("one",) and read_vllm_repository(other)[0].generation_config == "auto"


@pytest.mark.parametrize(
    "names", [5, "", [""], ["a"] * 17, "x" * 257, [["a"]], "sql"], ids=lambda value: str(value)[:20]
)
def test_rejects_names_that_cannot_be_served(vllm, names):
    folder = vllm({"model": "m", "served_model_name": names}, {"sql": "org/sql"})
    with pytest.raises(ConfigError, match="served_model_name"):
        read_served_model_names(folder)
