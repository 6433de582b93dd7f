# SPDX-License-Identifier: Apache-2.0
"""Adapters that are loaded at run time: places that must stay closed, and folders with hostile files."""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attack import Attack, Target

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
GIB = 2**30
LIMIT_S = 60.0
"""A call waits until the adapter is read; a source that does not answer has a time limit of its own."""


def places() -> Iterator[Attack]:
    """Paths and addresses from which no adapter may be loaded, and names that no adapter may have."""
    for path in (
        *("/etc", "/etc/passwd", "/", "", ".", "..", "../pirate", "pirate", "~", "~root", "/proc/self", "/dev/zero"),
        *("/dev/stdin", "/dev/shm", "/proc/self/fd/0", "{folder}/../secrets", "{folder}/pirate/../../secrets"),
        *("{folder}/link", "{folder}/pirate/\0", "{folder}/" + "a" * 300, "{folder}/" + "a/" * 2000),
        *("file:///etc/passwd", "file://{folder}/pirate", "gopher://127.0.0.1/x", "http://127.0.0.1:1/x"),
        *("http://user:password@127.0.0.1:1/x", "http://169.254.169.254/latest/meta-data", "http://[::1]:1/x"),
        *("https://localhost:1/x", "http://0.0.0.0:1/x", "http://127.1:1/", "s3://bucket", "s3://../x", "hf://../x"),
        *("ftp://127.0.0.1/x", "data:,x", "javascript:x", "\\\\host\\share", "owner/../../etc", "a" * 100_000),
    ):
        body = {"lora_name": "place", "lora_path": path}
        yield Attack("load_lora_adapter", f"path {path[:40]!r}", partial(_load_place, body=body), LIMIT_S)
    for name in (
        *("", ".", "..", "a/b", "../x", "a\nb", "a\0b", "<b>", "a" * 100_000, "tales", "pirate", " ", "-", "%2e%2e"),
        *("\u202e", "a b", "a'b", 'a"b', "{x}", "$(x)", "\ud83d\ude00", "con", "a@b", "a:b"),
    ):
        body = {"lora_name": name, "lora_path": "{folder}/pirate"}
        yield Attack("load_lora_adapter", f"name {name[:20]!r}", partial(_load_place, body=body), LIMIT_S)
    for name, body in {
        "no path": {"lora_name": "x"},
        "no name": {"lora_path": "{folder}/pirate"},
        "null": {"lora_name": None, "lora_path": None},
        "wrong types": {"lora_name": 1, "lora_path": []},
        "unknown field": {"lora_name": "x", "lora_path": "{folder}/pirate", "secret": "../../x"},
        "deep": {"lora_name": json.loads("[" * 300 + "]" * 300), "lora_path": "x"},
    }.items():
        yield Attack("load_lora_adapter", name, partial(_load_place, body=body), LIMIT_S)


async def _load_place(target: Target, body: dict[str, Any]) -> str:
    body = {k: v.replace("{folder}", str(target.folder)) if isinstance(v, str) else v for k, v in body.items()}
    link = target.folder / "link"
    if not link.is_symlink():
        link.symlink_to("/etc")
    answer = await target.admin("/v1/load_lora_adapter", body)
    if answer.startswith("200"):
        await target.admin("/v1/unload_lora_adapter", {"lora_name": body["lora_name"]})
        if "pirate" not in str(body["lora_path"]):
            return f"wrong: loaded: {answer}"
    if "root:" in answer or "password" in answer:
        return f"wrong: shows a secret: {answer}"
    return answer


def folders() -> Iterator[Attack]:
    """Folders with hostile files."""
    for i, (name, change) in enumerate(_changes().items()):
        send = partial(_load_folder, name=f"hostile-{i}", change=change)
        yield Attack("adapters", name, send, LIMIT_S)


async def _load_folder(target: Target, name: str, change: Callable[[Path], object]) -> str:
    folder = target.folder / name
    shutil.copytree(target.folder / "pirate", folder, dirs_exist_ok=True)
    change(folder)
    answer = await target.admin("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    if answer.startswith("200"):
        # A harmless adapter answers like every other.
        answer = await target.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 2})
        await target.admin("/v1/unload_lora_adapter", {"lora_name": name})
    shutil.rmtree(folder, ignore_errors=True)
    return answer


def _changes() -> dict[str, Callable[[Path], object]]:
    configs: dict[str, dict[str, Any]] = {
        "rank 1e9": {"r": 10**9},
        "negative rank": {"r": -1},
        "rank as text": {"r": "8"},
        "alpha 1e308": {"lora_alpha": 1e308},
        "alpha beyond float": {"lora_alpha": 10**400},
        "alpha as list": {"lora_alpha": [1]},
        "many patterns": {"rank_pattern": {f"layer.{i}": 4 for i in range(4096)}},
        "slow pattern": {"rank_pattern": {"(a+)+$": 4}, "alpha_pattern": {"(x+x+)+y": 4}},
        "slow target": {"target_modules": "(.*a){30}"},
        "60,000 targets": {"target_modules": [f"m{i}" for i in range(60_000)]},
        "no target": {"target_modules": []},
        "target as number": {"target_modules": 5},
        "all targets": {"target_modules": "all-linear"},
        "bias": {"bias": "all"},
        "type": {"peft_type": "IA3"},
        "layer": {"layers_to_transform": [99999]},
        "negative layer": {"layers_to_transform": [-1]},
        "foreign base": {"base_model_name_or_path": "../../etc/passwd"},
        "code": {"auto_mapping": {"base_model_class": "os.system", "parent_library": "os"}},
        "saved modules": {"modules_to_save": ["lm_head"]},
    }
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    headers: dict[str, bytes] = {
        "no tensors": b"{}",
        "overlap": json.dumps({"a": tensor, "b": tensor}).encode(),
        "beyond the end": json.dumps({"a": tensor | {"data_offsets": [0, 4 * GIB]}}).encode(),
        "negative offsets": json.dumps({"a": tensor | {"data_offsets": [-4, 0]}}).encode(),
        "reversed offsets": json.dumps({"a": tensor | {"data_offsets": [4, 0]}}).encode(),
        "shape 2^63": json.dumps({"a": tensor | {"shape": [2**63]}}).encode(),
        "shape 2^32 x 2^32": json.dumps({"a": tensor | {"shape": [2**32, 2**32]}}).encode(),
        "negative shape": json.dumps({"a": tensor | {"shape": [-1]}}).encode(),
        "int8": json.dumps({"a": tensor | {"dtype": "I8"}}).encode(),
        "unknown dtype": json.dumps({"a": tensor | {"dtype": "X"}}).encode(),
        "nested header": b"[" * 100_000,
        "header of text": b'"x"',
        "duplicate keys": b'{"a":' + json.dumps(tensor).encode() + b',"a":' + json.dumps(tensor).encode() + b"}",
        "path as name": json.dumps({"../../etc/passwd": tensor}).encode(),
        "60,000 names": json.dumps({f"a{i}": tensor for i in range(60_000)}).encode(),
        "7 MB of metadata": json.dumps({"__metadata__": {"a": "x" * 7_000_000}}).encode(),
        "metadata of numbers": b'{"__metadata__": {"a": 1}}',
        "not UTF-8": b"\xff" * 100,
    }
    changes: dict[str, Callable[[Path], object]] = {
        f"config: {name}": partial(_change_config, change=change) for name, change in configs.items()
    }
    changes |= {f"header: {name}": partial(_write_header, header=header) for name, header in headers.items()}
    for size in (2**31, 2**63, 2**64 - 1, 0):
        changes[f"header of {size} bytes"] = partial(_write_size, size=size)
    return changes | {
        "empty file": lambda folder: (folder / WEIGHTS).write_bytes(b""),
        "truncated": lambda folder: os.truncate(folder / WEIGHTS, 50_000),
        "sparse file of 3 GiB": lambda folder: os.truncate(folder / WEIGHTS, 3 * GIB),
        "FIFO": partial(_replace, create=os.mkfifo),
        "folder": partial(_replace, create=os.mkdir),
        "link to a file": partial(_replace, create=lambda path: os.symlink("/etc/passwd", path)),
        "link to a device": partial(_replace, create=lambda path: os.symlink("/dev/zero", path)),
        "link to itself": partial(_replace, create=lambda path: os.symlink(path, path)),
        "pickle": lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        "no config": lambda folder: (folder / CONFIG).unlink(),
        "config is a list": lambda folder: (folder / CONFIG).write_text("[]"),
        "deep config": lambda folder: (folder / CONFIG).write_text("[" * 100_000),
        "config of 20 MB": lambda folder: (folder / CONFIG).write_text('{"a": "' + "x" * 20_000_000 + '"}'),
        "config not UTF-8": lambda folder: (folder / CONFIG).write_bytes(b"\xff\xfe"),
        "10,000 files": lambda folder: [(folder / f"file-{i}").touch() for i in range(10_000)],
    }


def _change_config(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / CONFIG).read_text()) | change
    (folder / CONFIG).write_text(json.dumps(config))


def _write_header(folder: Path, header: bytes) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)


def _write_size(folder: Path, size: int) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + b"{}")


def _replace(folder: Path, create: Callable[[Path], object]) -> None:
    (folder / WEIGHTS).unlink()
    create(folder / WEIGHTS)
