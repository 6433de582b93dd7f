# SPDX-License-Identifier: Apache-2.0
"""Model configs as the server reads them, and vllm_backend's repositories as we do."""

import json

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from quire_server import repository
from quire_server.repository import read_vllm_repository
from quire_spec.errors import ConfigError, InvalidArgument

# https://github.com/triton-inference-server/vllm_backend/blob/00ea75bc67f48ad7c6283b1983620e1dbb1a9cfe/src/model.py
UPSTREAM_INPUTS = {
    "text_input": ("TYPE_STRING", [1]),
    "stream": ("TYPE_BOOL", [1]),
    "sampling_parameters": ("TYPE_STRING", [1]),
    "exclude_input_in_output": ("TYPE_BOOL", [1]),
    "return_finish_reason": ("TYPE_BOOL", [1]),
    "return_cumulative_logprob": ("TYPE_BOOL", [1]),
    "return_logprobs": ("TYPE_BOOL", [1]),
    "return_num_input_tokens": ("TYPE_BOOL", [1]),
    "return_num_output_tokens": ("TYPE_BOOL", [1]),
}
UPSTREAM_OUTPUTS = {
    "text_output": ("TYPE_STRING", [-1]),
    "finish_reason": ("TYPE_STRING", [-1]),
    "cumulative_logprob": ("TYPE_FP32", [-1]),
    "logprobs": ("TYPE_STRING", [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
}


@pytest.fixture
def config(tmp_path):
    return repository.model_config("sql", "tales", tmp_path / "text.sock")


def test_tensors_are_vllm_backends_and_ids(config):
    inputs = {t["name"]: (t["data_type"], t["dims"]) for t in config["input"]}
    outputs = {t["name"]: (t["data_type"], t["dims"]) for t in config["output"]}
    assert inputs == UPSTREAM_INPUTS | {"input_ids": ("TYPE_INT64", [-1]), "return_output_ids": ("TYPE_BOOL", [1])}
    assert outputs == UPSTREAM_OUTPUTS | {"output_ids": ("TYPE_INT64", [-1])}
    assert all(t["optional"] for t in config["input"])


def test_the_server_reads_the_text_form_as_the_json_form(config, tmp_path):
    parsed = text_format.Parse(repository.pbtxt(config), ModelConfig())
    assert parsed == json_format.ParseDict(config, ModelConfig())
    assert (parsed.name, parsed.backend, parsed.max_batch_size) == ("sql", "python", 0)
    assert parsed.model_transaction_policy.decoupled
    assert [(g.kind, g.count) for g in parsed.instance_group] == [(parsed.instance_group[0].KIND_CPU, 1)]
    assert {k: v.string_value for k, v in parsed.parameters.items()} == {
        "quire_text_socket": str(tmp_path / "text.sock"),
        "quire_base_model": "tales",
    }


def test_text_form_escapes(tmp_path):
    odd = tmp_path / 'a "quoted" \\ path\n'
    parsed = text_format.Parse(repository.pbtxt(repository.model_config("m", "m", odd)), ModelConfig())
    assert parsed.parameters["quire_text_socket"].string_value == str(odd)


def test_base_folder_is_written_over_an_older_one(tmp_path):
    for socket in ("old.sock", "new.sock"):
        folder = repository.write_base(tmp_path, "tales", tmp_path / socket)
    assert folder == tmp_path / "tales"
    assert "new.sock" in (folder / "config.pbtxt").read_text()
    program = (folder / "1/model.py").read_text()
    assert program.encode() == repository.model_files()["1/model.py"]
    assert program.startswith("from quire_server.frontend import TritonPythonModel")
    assert program.count("\n") == 1


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "\u00e9", "x" * 64])
def test_a_name_that_the_server_would_refuse_is_refused(name, tmp_path):
    with pytest.raises(InvalidArgument, match="not a model name"):
        repository.model_config(name, "tales", tmp_path)


@pytest.fixture
def vllm(tmp_path):
    """Writes a vllm_backend model into a repository, and returns the model's folder."""

    def write(arguments, loras=None, name="vllm_model"):
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (version / "model.json").write_text(json.dumps(arguments))
        if loras is not None:
            (version / "multi_lora.json").write_text(json.dumps(loras))
        return version.parent

    return write


def test_upstreams_sample_is_read(vllm):
    folder = vllm(
        {
            "model": "facebook/opt-125m",
            "disable_log_requests": True,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "disable_log_stats": False,
        }
    )
    for place in (folder, folder.parent):
        config, catalogue = read_vllm_repository(place)
        assert (config.model, config.gpu_memory_utilization, config.device) == ("facebook/opt-125m", 0.5, "cuda")
        assert catalogue.adapters == ()


def test_upstreams_multi_lora_tutorial_is_read_strings_and_all(vllm):
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
        },
        {"alpaca": "/weights/loras/alpaca-lora-7b", "bactrian": "loras/bactrian"},
    )
    config, catalogue = read_vllm_repository(folder)
    assert (config.enable_lora, config.max_lora_rank, config.dtype, config.device) == (True, 16, "float16", "cpu")
    assert {a.name: a.source.path for a in catalogue.adapters} == {
        "alpaca": "/weights/loras/alpaca-lora-7b",
        "bactrian": str((folder / "1/loras/bactrian").resolve()),
    }


def test_a_model_folder_beside_the_file_is_found(vllm):
    folder = vllm({"model": "weights"})
    (folder / "1/weights").mkdir()
    assert read_vllm_repository(folder)[0].model == str((folder / "1/weights").resolve())


def test_adapters_are_not_read_without_enable_lora(vllm):
    assert read_vllm_repository(vllm({"model": "m"}, {"alpaca": "/a"}))[1].adapters == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "m", "max_num_partial_prefills": 2}, "'max_num_partial_prefills': this engine has no such argument"),
        ({"model": "m", "pipeline_parallel_size": 2}, "'pipeline_parallel_size': 2 is not supported"),
        ({"model": "m", "tensor_parallel_size": 64}, "tensor_parallel_size: 64"),
        ({"model": "m", "trust_remote_code": "true"}, "'trust_remote_code': True is not supported"),
        ({"model": "m", "tokenizer": "other"}, "'tokenizer': 'other' is not supported"),
        ({"model": "m", "quantization": "awq"}, "quantization: 'awq'"),
        ({"model": "m", "max_model_len": "long"}, "max_model_len: expected an integer"),
        ({"gpu_memory_utilization": 0.5}, "model: missing"),
        ({"model": "m", "enable_lora": True}, "multi_lora.json: missing"),
        ([], "expected an object"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(vllm, arguments, words):
    with pytest.raises(ConfigError) as caught:
        read_vllm_repository(vllm(arguments))
    assert words in str(caught.value)


def test_an_adapter_name_that_is_no_model_name_is_refused(vllm):
    with pytest.raises(InvalidArgument, match="'my_lora' is not a model name"):
        read_vllm_repository(vllm({"model": "m", "enable_lora": True}, {"my_lora": "/a"}))


def test_one_model_only(vllm, tmp_path):
    with pytest.raises(ConfigError, match=r"0 files 1/model\.json"):
        read_vllm_repository(tmp_path)
    vllm({"model": "a"}, name="a")
    vllm({"model": "b"}, name="b")
    with pytest.raises(ConfigError, match=r"2 files 1/model\.json"):
        read_vllm_repository(tmp_path)


def test_broken_json_names_the_file(vllm):
    folder = vllm({})
    (folder / "1/model.json").write_text("{")
    with pytest.raises(ConfigError, match=r"1/model\.json: "):
        read_vllm_repository(folder)
