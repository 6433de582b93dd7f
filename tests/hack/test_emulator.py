# SPDX-License-Identifier: Apache-2.0
"""Tests of the emulated GPU's build cache."""

import os

from emulator.libraries import remove_stale


def test_stale_builds_are_removed(tmp_path):
    for name, age in {"old": 31, "used": 29, "tmpkilled": 31}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "libcudart.so.13").write_bytes(b"")
        then = (tmp_path / name).stat().st_mtime - age * 24 * 3600
        os.utime(tmp_path / name, (then, then))
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
