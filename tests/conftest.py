# SPDX-License-Identifier: Apache-2.0
"""The kernel language on a machine without a GPU: interpreted, in this process and those that it starts.

The language decides so when it is imported, and transformers imports it: hence here, before any test file.
"""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
