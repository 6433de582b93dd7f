# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU's libraries, as far as they need no compiler."""

import os

from emulator.libraries import remove_stale


def test_builds_that_nobody_has_used_for_a_month_are_removed(tmp_path):
    for name, age in {"old": 31, "used": 29, "tmpkilled": 31}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "libcudart.so.13").write_bytes(b"")
        then = (tmp_path / name).stat().st_mtime - age * 24 * 3600
        os.utime(tmp_path / name, (then, then))
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
