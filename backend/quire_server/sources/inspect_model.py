# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_server.read_model`: tells what a plan needs of a model on a volume, in a termination message.

A Job of the operator runs it: a claim can be read from a pod only. The message is JSON, compressed, since Kubernetes
keeps 4096 bytes of it: config.json, and of the weights the total of the index or the end of the last tensor.
"""

import argparse
import base64
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire_spec.errors import ConfigError
from quire_spec.model.safetensors_header import LENGTH_BYTES, header_length, tensor_bytes

EXIT_PERMANENT_FAILURE = 2
"""Running again changes nothing until somebody changes the files."""
MAX_MESSAGE_BYTES = 4096
_MAX_JSON_BYTES = 64 * 2**20
_OMITTED_CONFIG_KEYS = ("id2label", "label2id", "_name_or_path", "transformers_version")
"""Of config.json: names of classes and notes, which can be long and say nothing about memory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the message; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quire_server.read_model", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder with config.json")
    parser.add_argument("--into", type=Path, default=Path("/dev/termination-log"), metavar="FILE", help="the message")
    args = parser.parse_args(argv)
    try:
        text, exit_code = termination_message(args.model), 0
    except ConfigError as error:
        text, exit_code = str(error)[:MAX_MESSAGE_BYTES], EXIT_PERMANENT_FAILURE
    print(text, file=sys.stderr)
    args.into.write_text(text)
    return exit_code


def termination_message(folder: Path) -> str:
    """What Checkpoint.from_files takes, as compressed JSON in base64.

    Raises:
        ConfigError: there is no config.json, a file is not what its name says, or config.json is too large to be told.
    """
    config = _read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"{folder}: there is no config.json; give the folder of a Hugging Face model")
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if key not in _OMITTED_CONFIG_KEYS}
    index = _read_json(folder / "model.safetensors.index.json")
    document = {
        "config": config,
        "index": None if index is None else {"metadata": {"total_size": _get(_get(index, "metadata"), "total_size")}},
        "header": None if index is not None else _read_header(folder / "model.safetensors"),
    }
    compressed = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
    text = base64.b64encode(compressed).decode()
    if len(text) > MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"{folder}/config.json: takes {len(text)} bytes compressed, and {MAX_MESSAGE_BYTES} can be told; remove "
            "from it "
            "what transformers does not need"
        )
    return text


def _read_json(path: Path) -> Any:
    """A parsed file; None: there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > _MAX_JSON_BYTES:
        raise ConfigError(f"{path}: more than {_MAX_JSON_BYTES} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error


def _read_header(path: Path) -> Any:
    """The header of a safetensors file with one tensor, which ends where the last one does; None: there is no file."""
    try:
        with path.open("rb") as file:
            end = tensor_bytes(json.loads(file.read(header_length(file.read(LENGTH_BYTES)))))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: its header is not JSON: {error}") from error
    return {"last": {"data_offsets": [0, end]}}


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


if __name__ == "__main__":
    sys.exit(main())
