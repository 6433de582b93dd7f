# SPDX-License-Identifier: Apache-2.0
"""The server's model repository: what a model of ours looks like to it.

Rendering is pure; `write_base` and `clear_copies` touch the disk. Every model, base and adapter alike, is the same
one-line program; what tells them apart is the name that the server gives them. The supervisor calls this.
"""

import contextlib
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
    """The config of model `name`, in the JSON form that the repository API takes.

    `base` is the served name of the base model; `name` is the same or an adapter's. `text_socket` is absolute.

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
        # A stub holds no device; the default would start one per GPU.
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {
            model_interface.PARAM_SOCKET: {"string_value": str(text_socket)},
            model_interface.PARAM_BASE: {"string_value": base},
        },
    }


def model_files() -> dict[str, bytes]:
    """The files of a model that the repository API is to load, by path."""
    return {MODEL_FILE: MODEL_PY.encode()}


def write_base_model(repository: Path, base: str, text_socket: Path) -> Path:
    """Write the base model's folder into `repository`, over an older one; returns the folder.

    Raises:
        InvalidArgument: `base` is not a model name.
    """
    config = model_config(base, base, text_socket)
    folder = repository / base
    (folder / MODEL_FILE).parent.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_text(MODEL_PY)
    (folder / "config.pbtxt").write_text(to_pbtxt(config))
    return folder


def remove_stale_copies(text_socket: Path, temporary: Path = Path("/tmp")) -> int:
    """Remove the copies of models that a killed server left behind; returns how many. Only when that server is gone.

    The server keeps each model that came by the repository API in a folder of its own in /tmp, wherever TMPDIR points;
    whose it is, the socket in its config says. In a pod, /tmp outlives the container.
    """
    marker, num_removed = json.dumps(str(text_socket)).encode(), 0
    for config in temporary.glob("folder??????/config.pbtxt"):
        # Those of others may be closed to us, or go this moment.
        with contextlib.suppress(OSError):
            if marker in config.read_bytes():
                shutil.rmtree(config.parent)
                num_removed += 1
    return num_removed


def to_pbtxt(config: Mapping[str, Any]) -> str:
    """The protobuf text form of a config, which is what the server reads from a folder."""
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
