# SPDX-License-Identifier: Apache-2.0
"""On the path of every Python that `python -m emulator` starts, and of those that it starts: has the device installed
before anything else runs."""

from typing import Any

from emulator import device

from quire_engine.runner import TorchRunner

device.install()

_make = TorchRunner.__init__


def _make_idly(self: TorchRunner, *args: Any, **how: Any) -> None:
    with device.idle():
        _make(self, *args, **how)


TorchRunner.__init__ = _make_idly  # type: ignore[method-assign]
