# SPDX-License-Identifier: Apache-2.0
"""Pickled checkpoints become safetensors with the same bits, and hostile files are rejected without running code."""

import json
import shlex
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_checkpoints import make_checkpoint

from quire_engine.__main__ import main
from quire_engine.weights.checkpoint import Checkpoint
from quire_engine.weights.conversion_report import CONVERT_COMMAND
from quire_engine.weights.pickle_conversion import convert_checkpoint
from quire_engine.weights.tensor_files import TensorFiles
from quire_spec.errors import ConfigError


def pickled(folder: Path, num_files: int = 1) -> dict[str, torch.Tensor]:
    """Replace the weights of a checkpoint of OPT by pickled files, one of the tensors with a NaN; return them."""
    make_checkpoint(folder, "opt")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    tensors["model.decoder.embed_tokens.weight"][0, 0] = float("nan")
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"]  # tied, as in the published checkpoint
    names = sorted(tensors)
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    files = {name: f"pytorch_model-{i % num_files}.bin" for i, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: tensors[name].clone() for name in names if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return tensors


@pytest.mark.parametrize("num_files", [1, 3])
def test_the_command_of_the_error_converts_every_tensor(tmp_path, capsys, num_files):
    source = tmp_path / "a model"
    tensors = pickled(source, num_files)
    (source / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ConfigError, match="can run code") as error:
        TensorFiles(source)
    command = str(error.value).partition(f"{CONVERT_COMMAND} ")[2]
    assert main(["convert", *shlex.split(command)]) == 0
    target = Path(f"{source}-safetensors")
    assert f"tensors={len(tensors)}" in capsys.readouterr().out
    assert Checkpoint.load(target).shape.architecture == "OPTForCausalLM"
    written = {name: load_file(path)[name] for name, path in TensorFiles(target).file_by_tensor.items()}
    assert written.keys() == tensors.keys() and len(list(target.glob("*.safetensors"))) == num_files
    assert all(torch.equal(written[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in tensors)
    assert (target / "merges.txt").exists() and not list(target.glob("*.bin*"))
    assert main(["convert", *shlex.split(command)]) == 1 and "already exists" in capsys.readouterr().err


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, ("import sys; sys.was_hacked = True",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"w": Code()}, "objects that are not tensors"),
        ({"w": torch.zeros(1).expand(10**9)}, "4000000000 bytes, more than 2 times"),
        ({"w": 1}, "'w' is not a dense tensor"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "'w' is not a dense tensor"),
        ([torch.zeros(1)], "dict of tensors, but contains list"),
    ],
    ids=["code", "view", "number", "sparse", "list"],
)
def test_hostile_files_are_rejected_and_leave_nothing(tmp_path, content, problem):
    (tmp_path / "m").mkdir()
    torch.save(content, tmp_path / "m/pytorch_model.bin")
    with pytest.raises(ConfigError, match=problem):
        convert_checkpoint(tmp_path / "m", tmp_path / "out")
    assert not hasattr(sys, "was_hacked") and [path.name for path in tmp_path.iterdir()] == ["m"]


def test_archives_that_expand_and_wrong_indexes_are_rejected(tmp_path):
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**7))
    with pytest.raises(ConfigError, match="unpacks to 10000000 bytes"):
        convert_checkpoint(tmp_path, tmp_path / "out")
    for weight_map in ({"w": "../x.bin"}, {"w": "model.safetensors"}, {"w": "absent.bin"}, {}, 1):
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match="download"):
            convert_checkpoint(tmp_path, tmp_path / "out")
