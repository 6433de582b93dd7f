# SPDX-License-Identifier: Apache-2.0
"""For pytest (-p emulator.plugin): engines that name no device get the emulated one, and no work on it fails unseen."""

from collections.abc import Iterator
from typing import Any

import pytest

from emulator import device
from quire_spec.engine.config import EngineConfig

_make = EngineConfig.__init__
_read = EngineConfig.from_json.__func__  # type: ignore[attr-defined]


def _make_for_cuda(self: EngineConfig, *args: Any, **fields: Any) -> None:
    _make(self, *args, **{"device": "cuda"} | fields)


def _read_for_cuda(cls: type[EngineConfig], data: Any) -> EngineConfig:
    return _read(cls, {"device": "cuda"} | data if isinstance(data, dict) else data)


EngineConfig.__init__ = _make_for_cuda  # type: ignore[method-assign]
EngineConfig.from_json = classmethod(_read_for_cuda)  # type: ignore[method-assign, assignment]


@pytest.fixture(autouse=True)
def no_failed_kernels() -> Iterator[None]:
    """No kernel was launched past the emulator, and none failed."""
    before = len(device.errors)
    yield
    assert not device.unknown()
    assert not device.errors[before:]
