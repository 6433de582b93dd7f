# SPDX-License-Identifier: Apache-2.0
"""Weights reach the emulated device by several threads through pinned buffers that are reused."""

import threading

import pytest
import torch
from safetensors.torch import load_file
from support.requirements_of_machine import requires_emulated_gpu
from support.tiny_checkpoints import make_checkpoint

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.weights import device_copier, loader
from quire_spec.model.model_config import ModelConfig

pytestmark = requires_emulated_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_chunk_fills_its_parameter(tmp_path, monkeypatch, dtype):
    """The device runs queued copies late, so a buffer that is reused too early would change its parameter."""
    folder = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    expected = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    monkeypatch.setattr(loader, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(device_copier, "BUFFER_BYTES", 1000)
    copy, threads = device_copier._CopyStream.copy, set()

    def recording_copy(self, destination, read):
        threads.add(threading.current_thread().name)
        copy(self, destination, read)

    monkeypatch.setattr(device_copier._CopyStream, "copy", recording_copy)
    shape = ModelConfig.load(folder)
    model = get_model_class(shape.architecture)(shape, ParamFactory(dtype, torch.device("cuda")))
    loader.load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name)
    loaded = dict(model.tensors())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name].cpu(), expected[name].to(dtype)) for name in expected)
    assert 1 < len(threads) <= device_copier.NUM_THREADS


def test_a_chunk_that_cannot_be_read_stops_the_load():
    def fail():
        raise OSError("read error")

    destination = torch.zeros(4, device="cuda")
    with pytest.raises(OSError, match="read error"), device_copier.open_copier(destination.device) as copy:
        for read in (lambda: torch.ones(4), fail, lambda: torch.ones(4)):
            copy(destination, read)
