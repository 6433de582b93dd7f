# SPDX-License-Identifier: Apache-2.0
"""Model configs in the form that the server reads, and the base model's folder."""

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from quire_server.model_server import repository
from quire_spec.errors import InvalidArgument

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
    "embedding_request": ("TYPE_STRING", [1]),
    "image": ("TYPE_STRING", [-1]),
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


def test_tensors_are_those_of_vllm_backend_and_token_ids(config):
    inputs = {t["name"]: (t["data_type"], t["dims"]) for t in config["input"]}
    outputs = {t["name"]: (t["data_type"], t["dims"]) for t in config["output"]}
    flag = ("TYPE_BOOL", [1])
    additional = {"input_ids": ("TYPE_INT64", [-1]), "return_output_ids": flag, "return_prompt_logprobs": flag}
    assert inputs == UPSTREAM_INPUTS | additional
    assert outputs == UPSTREAM_OUTPUTS | {
        "output_ids": ("TYPE_INT64", [-1]),
        "prompt_logprobs": ("TYPE_STRING", [1]),
        "kv_transfer_params": ("TYPE_STRING", [1]),
    }
    assert all(t["optional"] for t in config["input"])


def test_text_form_equals_json_form(config, tmp_path):
    parsed = text_format.Parse(repository.to_pbtxt(config), ModelConfig())
    assert parsed == json_format.ParseDict(config, ModelConfig())
    assert (parsed.name, parsed.backend, parsed.max_batch_size) == ("sql", "python", 0)
    assert parsed.model_transaction_policy.decoupled
    assert [(g.kind, g.count) for g in parsed.instance_group] == [(parsed.instance_group[0].KIND_CPU, 1)]
    assert {k: v.string_value for k, v in parsed.parameters.items()} == {
        "quire_text_socket": str(tmp_path / "text.sock"),
        "quire_base_model": "tales",
    }


def test_text_form_escapes_strings(tmp_path):
    odd = tmp_path / 'a "quoted" \\ path\n'
    parsed = text_format.Parse(repository.to_pbtxt(repository.model_config("m", "m", odd)), ModelConfig())
    assert parsed.parameters["quire_text_socket"].string_value == str(odd)


def test_write_model_replaces_an_older_one(tmp_path):
    for socket in ("old.sock", "new.sock"):
        folder = repository.write_model(tmp_path, "tales", "tales", tmp_path / socket)
    assert folder == tmp_path / "tales"
    assert "new.sock" in (folder / "config.pbtxt").read_text()
    program = (folder / "1/model.py").read_text()
    assert program == repository.MODEL_PY
    assert program.startswith("from quire_server.frontend.stub_model import TritonPythonModel")
    assert program.count("\n") == 1
    repository.remove_model(tmp_path, "tales")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "\u00e9", "x" * 64])
def test_rejects_invalid_model_name(name, tmp_path):
    with pytest.raises(InvalidArgument, match="not a model name"):
        repository.model_config(name, "tales", tmp_path)
