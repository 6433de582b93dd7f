# SPDX-License-Identifier: Apache-2.0
"""Results of a batch after its process ended at any write, and on a full disk: none lost, torn or repeated."""

import subprocess
import sys
from pathlib import Path

import pytest
from support import batch_crashes

PROGRAM = [sys.executable, batch_crashes.__file__]
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = "mount -t tmpfs -o size=256k tmpfs"


def can_mount_tmpfs(folder: Path) -> bool:
    return subprocess.run([*UNSHARE, f"{MOUNT} {folder}"], capture_output=True).returncode == 0


def test_no_result_is_lost_torn_or_repeated_after_an_end_at_any_write(tmp_path):
    done = subprocess.run([*PROGRAM, "crash", tmp_path], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    # Two bad lines and twelve requests, with three points at each write.
    assert int(done.stdout) >= 3 * 14


def test_a_run_on_a_full_disk_stops_and_can_be_continued(tmp_path):
    if not can_mount_tmpfs(tmp_path):
        pytest.skip("mounting a tmpfs in a user namespace is not allowed here")
    script = f"{MOUNT} {tmp_path} && exec {' '.join(map(str, PROGRAM))} full {tmp_path}"
    done = subprocess.run([*UNSHARE, script], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3, "the disk was never full"
