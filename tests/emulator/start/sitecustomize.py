# SPDX-License-Identifier: Apache-2.0
"""On the path of every Python that `python -m emulator` starts, and of those that it starts: has the device installed
before anything else runs."""

from typing import Any

from emulator import device

from quire_engine.worker.model_runner import DeviceModelRunner

device.install()

_make = DeviceModelRunner.__init__


def _make_idly(self: DeviceModelRunner, *args: Any, **how: Any) -> None:
    with device.idle():
        _make(self, *args, **how)


DeviceModelRunner.__init__ = _make_idly  # type: ignore[method-assign]
