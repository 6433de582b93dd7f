# SPDX-License-Identifier: Apache-2.0
"""Malicious adapter folders: each is rejected with a one-sentence reason, and other requests are not affected."""

import json
import math
import os
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from support.quire_serve import EXAMPLES, example_adapters

pytestmark = pytest.mark.server

PIRATE = EXAMPLES / "adapters/pirate"
STORY = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 12}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def _nan(folder):
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = math.nan
    save_file(tensors, folder / WEIGHTS)


def _header(folder, head, rest=b""):
    (folder / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + rest)


def _names(folder):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    _header(folder, json.dumps({"\x1b[2J" + "a" * 60 + str(i): entry for i in range(40_000)}).encode())


def _pickle(folder):
    (folder / WEIGHTS).unlink()
    torch.save({"code": os.system}, folder / "adapter_model.bin")


def _link(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/etc/passwd")


def _fifo(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def _rank(folder):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"r": 2 * config["r"]}))


def _tokens(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(EXAMPLES / "models/tiny/tokenizer.json"))
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def _giant_tokenizer(folder):
    (folder / "tokenizer.json").touch()
    os.truncate(folder / "tokenizer.json", 2**30)


HOSTILE_ADAPTERS = {
    "absent": (shutil.rmtree, "does not exist"),
    "shape": (_rank, "shape"),
    "truncated": (lambda f: os.truncate(f / WEIGHTS, 50_000), "has 50000 bytes, but its header describes"),
    "sparse": (lambda f: os.truncate(f / WEIGHTS, 3 * 2**30), f"has {3 * 2**30} bytes, but its header describes"),
    "empty": (lambda f: os.truncate(f / WEIGHTS, 0), "is not a safetensors file"),
    "nan": (_nan, "contains NaN or infinity"),
    "giant-header": (
        lambda f: (f / WEIGHTS).write_bytes((100 * 2**30).to_bytes(8, "little") + b"{}"),
        "declares a header",
    ),
    "giant-file": (lambda f: os.truncate(f / WEIGHTS, 100 * 2**30), "the limit is"),
    "tokens": (_tokens, "tokenizer.json has the token '<tool>' with id "),
    "giant-tokenizer": (_giant_tokenizer, "the limit is 67108864"),
    "nested-tokenizer": (lambda f: (f / "tokenizer_config.json").write_text("[" * 100_000), "the tokenizer files are"),
    "names": (_names, "has 40000 tensors, but an adapter of this model can have at most"),
    "nested": (lambda f: _header(f, b"[" * 100_000), "is not a safetensors file"),
    "pickle": (_pickle, WEIGHTS),
    "link": (_link, "leads out of"),
    "fifo": (_fifo, "not a regular file"),
    "config-nested": (lambda f: (f / CONFIG).write_text("[" * 100_000), f"{CONFIG} is not"),
    "config-expression": (
        lambda f: (f / CONFIG).write_text(
            json.dumps(json.loads((f / CONFIG).read_text()) | {"rank_pattern": {r"([\w.]+)+x": 1}})
        ),
        "repeats a group",
    ),
}
"""By name: the modification of a valid adapter, and the text of its error."""


def test_rejects_hostile_folders_without_affecting_others(service, tmp_path):
    before = service.status()
    good = {name: {"name": name, "source": {"path": str(path)}} for name, path in example_adapters().items()}
    expected = service.text("pirate", STORY, **GREEDY)
    pids = {name: service.pid(name) for name in ("core", "text", "server")}
    hostile = []
    for name, (modify, _) in HOSTILE_ADAPTERS.items():
        shutil.copytree(PIRATE, tmp_path / name)
        modify(tmp_path / name)
        hostile.append({"name": name, "source": {"path": str(tmp_path / name)}})
    try:
        response = service.put_adapters(
            {"generation": before["generation"] + 1, "adapters": [*good.values(), *hostile]}
        )
        assert response.status == 202
        for name, (_, message) in HOSTILE_ADAPTERS.items():
            service.wait(lambda name=name: service.adapter(name).get("state") == "Failed", 60, f"rejecting {name}")
            error = service.adapter(name)["error"]
            assert message in error, (name, error)
            assert len(error) < 600 and error.isprintable() and "Traceback" not in error, (name, error)
            assert service.text("pirate", STORY, **GREEDY) == expected
            assert service.generate("tales", STORY, lora_name=name, max_tokens=1).status == 400
        assert pids == {name: service.pid(name) for name in pids}
    finally:
        service.put_adapters({"generation": before["generation"] + 2, "adapters": list(good.values())})
        service.wait(lambda: len(service.status()["adapters"]) == len(good), 30, "free of the hostile adapters")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a\x00b", "a" * 64, "tales"])
def test_invalid_name_rejects_the_whole_catalog(service, name):
    entry = {"name": name, "source": {"path": str(PIRATE)}}
    response = service.put_adapters({"generation": service.status()["generation"] + 1, "adapters": [entry]})
    assert response.status == 400, response
    assert len(service.status()["adapters"]) == len(example_adapters())
