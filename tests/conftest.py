# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair, and several tests run side by side on it.
# The same examples in every run, so that a change fails for what it changed; QUIRE_TEST_RANDOM=1 draws others.
settings.register_profile(
    "quire",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("QUIRE_TEST_RANDOM"),
)
settings.load_profile("quire")

# The kernel language on a machine without a GPU: interpreted, in this process and those that it starts. It decides so
# when it is imported, and transformers imports it: hence here, before any test file.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
