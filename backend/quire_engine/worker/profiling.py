# SPDX-License-Identifier: Apache-2.0
"""Named ranges of an engine step in profiler traces. The model runner and the sampler call it, and `api/profiler.py`
switches it on."""

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

_annotations_enabled = False


def annotate(name: str) -> AbstractContextManager[object]:
    """Return a context that records a range of a step under `name`; it does nothing while no trace is recorded.

    `record_function` costs 5 us or more even without a profiler, and a step has about ten ranges.
    """
    return record_function(name) if _annotations_enabled else nullcontext()


def set_annotations_enabled(enabled: bool) -> None:
    """Switch the ranges of `annotate` on or off."""
    global _annotations_enabled
    _annotations_enabled = enabled
