# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Imports and the collection of ten thousand tests create no garbage. Collecting garbage meanwhile takes 7 s of 27 s.
gc.disable()
_unfreeze = gc.unfreeze

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

ALLOWED_SKIPS = re.compile(
    "|".join(
        (
            # hardware
            r"no CUDA|needs a CUDA device",
            r"compiled CPU kernels need AVX2|no compiled kernels here|oneDNN multiplies bfloat16 with AVX-512 only",
            r"Triton compiles kernels on this machine",
            # another suite runs them
            r"needs PyTorch for CUDA on the emulated GPU: make emulated",
            r"runs real pods on a node, which takes minutes: make e2e",
            # downloads that only a developer asks for
            r"no genai-perf|needs 500 MB",
            # a restriction of the kernel, or of a cluster that was given
            r"mounting a tmpfs in a user namespace is not allowed here",
            r"QUIRE_TEST_KUBECONFIG is set|cluster that was given|an existing cluster|kubectl port-forward",
        )
    )
)
"""Reasons for which CI may skip a test. Any other skip fails there, because a missing program must not hide a suite."""

LONG_FILES = ("tests/e2e/test_wheel.py", "tests/server/supervisor/test_supervisor.py", "tests/server/test_tracing.py")
"""Files of one to two minutes that would be the last ones of `make test-server`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first, so that the processes that run tests side by side end at about the same time."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG_FILES))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exclude the modules and tests from garbage collections, each of which would take half a second to traverse them.

    An LLM collects garbage when it is created. It would unfreeze all objects when it is deleted.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def pytest_unconfigure() -> None:
    """Let the interpreter free the modules when it ends. Otherwise, those of nanobind would report leaks."""
    _unfreeze()


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not ALLOWED_SKIPS.search(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"CI must not skip this test. Provide what is missing, or allow it in tests/conftest.py.\n{reason}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport():
    """A skip is a failure in CI."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report():
    """A file that is skipped as a whole is a failure in CI."""
    report = yield
    _fail_if_skipped(report)
    return report
