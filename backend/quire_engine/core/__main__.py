# SPDX-License-Identifier: Apache-2.0
"""The core process: `python -m quire_engine.core`."""

from quire_engine.core.process import main
from quire_engine.ipc.process import run_process

run_process("quire_engine.core", main)
