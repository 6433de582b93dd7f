# SPDX-License-Identifier: Apache-2.0
"""Marks the parts of an engine step as named ranges in profiler traces.

The model runner and the sampler mark their parts. `api/profiler.py` switches the marks on.
"""

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

_annotations_enabled = False


def annotate(name: str) -> AbstractContextManager[object]:
    """Return a context that records a range with this name. While no trace is recorded, the context does nothing.

    `record_function` would take 5 us or more even without a profiler, and a step has about ten ranges.
    """
    return record_function(name) if _annotations_enabled else nullcontext()


def set_annotations_enabled(enabled: bool) -> None:
    """Enable or disable the ranges of `annotate`."""
    global _annotations_enabled
    _annotations_enabled = enabled
