# SPDX-License-Identifier: Apache-2.0
"""On the path of every Python that `python -m emulator` starts, and of those that it starts: has the device installed
before anything else runs."""

from typing import Any

from emulator import device

from quire_engine.worker.model_runner import DeviceModelRunner

device.install()

_make = DeviceModelRunner.__init__


def _init_idle(self: DeviceModelRunner, *args: Any, **options: Any) -> None:
    with device.idle():
        _make(self, *args, **options)


DeviceModelRunner.__init__ = _init_idle  # type: ignore[method-assign]
