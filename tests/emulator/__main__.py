# SPDX-License-Identifier: Apache-2.0
"""Run Python with the emulated GPU: `python -m emulator -m pytest tests/emulated`, `python -m emulator script.py`.

EMULATOR_DEVICES, EMULATOR_MIB (each device's memory), EMULATOR_SMS (multiprocessors) and EMULATOR_SEED (of random
orders) configure the device. With EMULATOR_DRY=1 nothing is computed and memory is not touched: an engine of 8B weights
starts and runs on an imaginary 141 GB, to check its calls, shapes and byte counts.
"""

import os
import sys
from pathlib import Path

from emulator.libraries import build

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Replace this process by Python with the libraries preloaded."""
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    paths = [str(HERE / "start"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = build()
    emulated = {
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(paths),
        # A dry run needs no results of kernels: they are compiled instead of interpreted.
        **({} if os.environ.get("EMULATOR_DRY") == "1" else {"TRITON_INTERPRET": "1"}),
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
    }
    # Few multiprocessors: attention starts programs for each, and the interpreter is slow.
    defaults = {"EMULATOR_MIB": "512", "EMULATOR_SMS": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], defaults | os.environ | emulated)


if __name__ == "__main__":
    main()
