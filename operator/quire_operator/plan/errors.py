# SPDX-License-Identifier: Apache-2.0
"""The planner's error: a reason for the condition Planned, and a message that contains a fix."""

from enum import StrEnum

from quire_spec.errors import ConfigError


class UnplannableReason(StrEnum):
    """Reasons of the condition Planned if its status is False."""

    DOES_NOT_FIT = "DoesNotFit"
    GPU_UNKNOWN = "GPUUnknown"
    SHARED_GPU = "SharedGPU"
    UNSUPPORTED_DTYPE = "UnsupportedDType"
    UNSUPPORTED_BY_ENGINE = "UnsupportedByEngine"
    NO_LEADER_WORKER_SET = "NoLeaderWorkerSet"
    NO_DISAGGREGATED_SET = "NoDisaggregatedSet"


class Unplannable(ConfigError):
    """The planner cannot make a plan for its inputs."""

    def __init__(self, reason: UnplannableReason, message: str) -> None:
        self.reason = reason
        super().__init__(message)
