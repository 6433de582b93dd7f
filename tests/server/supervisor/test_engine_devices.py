# SPDX-License-Identifier: Apache-2.0
"""The GPUs of each of several cores."""

import pytest

from quire_server.supervisor.engine_process import visible_devices
from quire_spec.constants import core_names
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError


def devices(visible: str | None, cores: int, ranks: int, device: str = "cuda") -> list[str | None]:
    config = EngineConfig("m", device=device, data_parallel_size=cores, tensor_parallel_size=ranks)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [visible_devices(config, core, environment).get("CUDA_VISIBLE_DEVICES") for core in range(cores)]


def test_each_core_has_its_own_gpus():
    assert devices(None, 3, 1) == ["0", "1", "2"]
    assert devices(None, 2, 4) == ["0,1,2,3", "4,5,6,7"]
    assert devices("GPU-a,GPU-b,GPU-c,GPU-d", 2, 2) == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    assert devices("5", 2, 1, device="cpu") == [None, None]


def test_too_few_gpus_are_named():
    with pytest.raises(ConfigError, match="2 cores need 4 GPUs, but CUDA_VISIBLE_DEVICES is '0,1,2'"):
        devices("0,1,2", 2, 2)


def test_one_core_keeps_its_name():
    assert (core_names(1), core_names(2)) == (("core",), ("core-0", "core-1"))
