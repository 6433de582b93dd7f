# SPDX-License-Identifier: Apache-2.0
"""Writes the folders of the server's models into the model repository. Each folder contains a config and a program.

Only `write_model` and `remove_model` access the disk. The models contain the same one-line program, whether they are
for the base model or for an adapter. Only their names differ. The supervisor calls this module.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_server.model_server import model_interface
from quire_spec import constants

MODEL_FILE = "1/model.py"
MODEL_PY = "from quire_server.frontend.stub_model import TritonPythonModel  # noqa: F401\n"


def model_config(name: str, base: str, text_socket: Path) -> dict[str, Any]:
    """Return the config of model `name` in its JSON form.

    `base` is the served name of the base model; `name` is `base` or an adapter name. `text_socket` is an absolute path.

    Raises:
        InvalidArgument: `name` or `base` is not a model name.
    """
    constants.check_model_name(name, "model")
    constants.check_model_name(base, "base model")
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": n, "data_type": t, "dims": [d], "optional": True} for n, t, d in model_interface.INPUTS],
        "output": [{"name": n, "data_type": t, "dims": [d]} for n, t, d in model_interface.OUTPUTS],
        # A stub does not use a device. By default, the server would start one stub for each GPU.
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {
            model_interface.PARAM_SOCKET: {"string_value": str(text_socket)},
            model_interface.PARAM_BASE: {"string_value": base},
        },
    }


def write_model(repository: Path, name: str, base: str, text_socket: Path, program: str = MODEL_PY) -> Path:
    """Write the folder of a model into `repository`, and return the folder. If the folder already exists, its files are
    replaced.

    The repository API can also load a model that has no folder. Quire does not use this, because ensembles cannot call
    such a model.

    Raises:
        InvalidArgument: `name` or `base` is not a model name.
    """
    config = model_config(name, base, text_socket)
    folder = repository / name
    (folder / MODEL_FILE).parent.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_text(program)
    (folder / "config.pbtxt").write_text(to_pbtxt(config))
    return folder


def remove_model(repository: Path, name: str) -> None:
    """Remove the folder of a model that was unloaded."""
    shutil.rmtree(repository / name, ignore_errors=True)


def to_pbtxt(config: Mapping[str, Any]) -> str:
    """Return a config in the text form of protobuf. The server reads this form from the folder of a model."""
    return "".join(f"{line}\n" for key, value in config.items() for line in _field(key, value))


def _field(key: str, value: object) -> list[str]:
    if key == "parameters" and isinstance(value, Mapping):
        entries = [{"key": k, "value": v} for k, v in value.items()]
        return [line for entry in entries for line in _message_field(key, entry)]
    if isinstance(value, list):
        return [line for item in value for line in _field(key, item)]
    if isinstance(value, Mapping):
        return _message_field(key, value)
    return [f"{key}: {_scalar(value)}"]


def _message_field(key: str, value: Mapping[str, Any]) -> list[str]:
    body = [f"  {line}" for k, v in value.items() for line in _field(k, v)]
    return [f"{key} {{", *body, "}"]


def _scalar(value: object) -> str:
    if isinstance(value, str) and value.startswith(("TYPE_", "KIND_")):
        return value
    return json.dumps(value)
