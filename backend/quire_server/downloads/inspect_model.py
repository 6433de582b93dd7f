# SPDX-License-Identifier: Apache-2.0
"""`python -m quire_server.read_model`: reads facts about a model on a volume, and writes them as the termination
message of its container.

The operator runs this program in a Job, because only a pod can read a claim. The message contains config.json and the
size of the weights. This size is the total size in the weights' index. If there is no index, it is the offset at which
the last tensor of the weights file ends. The message is compressed, because Kubernetes keeps only 4096 bytes of it.
"""

import argparse
import base64
import gzip
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire_spec.errors import ConfigError
from quire_spec.model.checkpoint_documents import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    parse_config,
    parse_header,
    parse_index,
)
from quire_spec.model.quantization import MODELOPT_FILE, with_modelopt_file
from quire_spec.model.safetensors_header import LENGTH_BYTES, header_length

EXIT_PERMANENT_FAILURE = 2
"""Exit code after an error that will occur again on every run until the model's files change."""
MAX_MESSAGE_BYTES = 4096
_OMITTED_CONFIG_KEYS = ("id2label", "label2id", "_name_or_path", "transformers_version")
"""Keys of config.json that are left out of the message. Their values can be long, and the memory that the model needs
does not depend on them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the termination message; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quire_server.read_model", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder with config.json")
    parser.add_argument(
        "--into", type=Path, default=Path("/dev/termination-log"), metavar="FILE", help="write the message to this file"
    )
    args = parser.parse_args(argv)
    try:
        text, exit_code = termination_message(args.model), 0
    except ConfigError as error:
        text, exit_code = str(error)[:MAX_MESSAGE_BYTES], EXIT_PERMANENT_FAILURE
    print(text, file=sys.stderr)
    args.into.write_text(text)
    return exit_code


def termination_message(folder: Path) -> str:
    """Return the termination message: the arguments of CheckpointInfo.from_files, written as JSON, compressed, and
    encoded in base64.

    Raises:
        ConfigError: config.json does not exist or is too large for the message, or a file has invalid content.
    """
    config_file, index_file = folder / "config.json", folder / "model.safetensors.index.json"
    config = _parse(config_file, _read(config_file, MAX_CONFIG_BYTES), parse_config)
    if config is None:
        raise ConfigError(f"{folder}: config.json does not exist; give the folder of a Hugging Face model")
    modelopt_file = folder / MODELOPT_FILE
    config = with_modelopt_file(config, _parse(modelopt_file, _read(modelopt_file, MAX_CONFIG_BYTES), parse_config))
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if key not in _OMITTED_CONFIG_KEYS}
    index = _parse(index_file, _read(index_file, MAX_INDEX_BYTES), parse_index)
    document = {
        "config": config,
        "index": index,
        "header": None if index is not None else _read_header(folder / "model.safetensors"),
    }
    compressed = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
    text = base64.b64encode(compressed).decode()
    if len(text) > MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"{folder}/config.json: its compressed form has {len(text)} bytes, but the limit is {MAX_MESSAGE_BYTES}; "
            "remove the keys that transformers does not need"
        )
    return text


def _read(path: Path, max_bytes: int) -> bytes | None:
    """Return the content of a file, cut after `max_bytes` + 1 bytes; None if the file does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _parse(path: Path, data: bytes | None, parse: Callable[[bytes], Any]) -> Any:
    try:
        return None if data is None else parse(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_header(path: Path) -> Any:
    """Return a short substitute for the header of a safetensors file; None if the file does not exist."""

    def parse(data: bytes) -> Any:
        return parse_header(data[LENGTH_BYTES : LENGTH_BYTES + header_length(data[:LENGTH_BYTES])])

    return _parse(path, _read(path, LENGTH_BYTES + MAX_HEADER_BYTES), parse)


if __name__ == "__main__":
    sys.exit(main())
