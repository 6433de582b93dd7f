# SPDX-License-Identifier: Apache-2.0
"""Rendering of the server's models: config and program, and the base model's folder in the model repository.

Only `write_base_model` and `remove_stale_copies` access the disk. Base and adapters are the same one-line program,
which the server runs under different model names. The supervisor calls this module.
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
    """Return the config of model `name` in the JSON form of the repository API.

    `base` is the served name of the base model; `name` is the same or an adapter name. `text_socket` is absolute.

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
        # A stub uses no device; the default would start one stub per GPU.
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {
            model_interface.PARAM_SOCKET: {"string_value": str(text_socket)},
            model_interface.PARAM_BASE: {"string_value": base},
        },
    }


def model_files() -> dict[str, bytes]:
    """Return the files of a model for the repository API, by path."""
    return {MODEL_FILE: MODEL_PY.encode()}


def write_base_model(repository: Path, base: str, text_socket: Path) -> Path:
    """Write the base model's folder into `repository`, replacing an older one; return the folder.

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
    """Remove model copies of a server that has ended; return their number.

    The server stores each model of the repository API in a separate folder in /tmp, regardless of TMPDIR. The socket in
    its config identifies the server. In a pod, /tmp outlives the container.
    """
    marker, num_removed = json.dumps(str(text_socket)).encode(), 0
    for config in temporary.glob("folder??????/config.pbtxt"):
        # Folders of other servers can be unreadable or disappear.
        with contextlib.suppress(OSError):
            if marker in config.read_bytes():
                shutil.rmtree(config.parent)
                num_removed += 1
    return num_removed


def to_pbtxt(config: Mapping[str, Any]) -> str:
    """Return the protobuf text form of a config, which the server reads from a model's folder."""
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
