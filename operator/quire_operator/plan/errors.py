# SPDX-License-Identifier: Apache-2.0
"""Why there is no plan: a reason in one word, as the condition Planned has it, and a sentence that says what to do."""

from enum import StrEnum

from quire_spec.errors import ConfigError


class UnplannableReason(StrEnum):
    """Reasons of Planned=False."""

    DOES_NOT_FIT = "DoesNotFit"
    GPU_UNKNOWN = "GPUUnknown"
    SHARED_GPU = "SharedGPU"
    UNSUPPORTED_DTYPE = "UnsupportedDType"
    UNSUPPORTED_BY_ENGINE = "UnsupportedByEngine"


class Unplannable(ConfigError):
    """There is no plan."""

    def __init__(self, reason: UnplannableReason, message: str) -> None:
        self.reason = reason
        super().__init__(message)
