# SPDX-License-Identifier: Apache-2.0
"""Where compiled forms have to be there: by what the processor can do, so that a build that fails is not skipped."""

import pytest

from quire_kernels import cpu_native

requires_native_kernels = pytest.mark.skipif(
    not cpu_native._cpu_flags() >= cpu_native._REQUIRED_CPU_FLAGS,
    reason="compiled forms are for processors with AVX-512 BF16",
)
