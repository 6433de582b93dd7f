# SPDX-License-Identifier: Apache-2.0
"""A repository of other Triton models: plain Python, a BLS model and an ensemble that call a model of Quire."""

from pathlib import Path

_TENSORS = """
input [{name: "x" data_type: TYPE_STRING dims: [1]}]
output [{name: "y" data_type: TYPE_STRING dims: [-1]}]
"""
_PLAIN = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        word = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0].decode()
        if word == "environment":
            word = json.dumps(dict(os.environ))
        elif word == "parameters":
            word = request.parameters()
        elif word == "die":
            os._exit(1)
        elif word.startswith("sleep"):
            time.sleep(float(word[5:]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([word.upper()], np.object_))])
"""
_BLS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        prompt = pb_utils.Tensor("text_input", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())
        parameters = pb_utils.Tensor("sampling_parameters", np.array([json.dumps({"max_tokens": 3})], np.object_))
        call = pb_utils.InferenceRequest(
            model_name=MODEL, requested_output_names=["text_output"], inputs=[prompt, parameters]
        )
        text = ""
        for response in call.exec(decoupled=True):
            if response.has_error():
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(response.error().message()))
            if response.output_tensors():
                text += pb_utils.get_output_tensor_by_name(response, "text_output").as_numpy()[0].decode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([text], np.object_))])
"""
_ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling {
  step [
    {model_name: "plain" model_version: -1 input_map {key: "x" value: "x"} output_map {key: "y" value: "prompt"}},
    {model_name: "%s" model_version: -1
     input_map {key: "text_input" value: "prompt"} output_map {key: "text_output" value: "y"}}
  ]
}
"""


def write_plain(repository: Path, name: str, code: str = _PLAIN, config: str | None = None) -> None:
    """Write a Python model that answers with its input in capitals."""
    folder = repository / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(code)
    (folder.parent / "config.pbtxt").write_text(config or f'backend: "python"\n{_TENSORS}')


def write_repository(folder: Path, llm: str, ensemble_llm: str = "") -> Path:
    """Write `plain`, `bls` and `ensemble`; the latter two call the model `llm`, or `ensemble_llm`."""
    write_plain(folder, "plain")
    write_plain(folder, "bls", f"MODEL = {llm!r}\n{_BLS}")
    (folder / "ensemble/1").mkdir(parents=True)
    (folder / "ensemble/config.pbtxt").write_text(_TENSORS + _ENSEMBLE % (ensemble_llm or llm))
    return folder
