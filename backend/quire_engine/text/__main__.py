# SPDX-License-Identifier: Apache-2.0
"""Starts the text process: `python -m quire_engine.text`."""

from quire_engine.ipc.process import run_process
from quire_engine.text.process import main

run_process("quire_engine.text", main)
