# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's interpreter faster for the tests of the CUDA kernels."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import support.lean_interpreter  # noqa: F401
