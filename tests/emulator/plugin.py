# SPDX-License-Identifier: Apache-2.0
"""pytest plugin (-p emulator.plugin): engines use the emulated device by default, and failed device work fails the
test."""

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
    """Assert that no kernel bypassed the emulator and that none failed."""
    before = len(device.errors)
    yield
    assert not device.unknown()
    assert not device.errors[before:]
