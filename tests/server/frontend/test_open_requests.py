# SPDX-License-Identifier: Apache-2.0
"""OpenRequestCounter: the counter of a dead stub can be read."""

import os
import subprocess
import sys

from quire_server.frontend import open_requests

_STUB = """
import os, pathlib, sys
from quire_server.frontend.open_requests import OpenRequestCounter
counter = OpenRequestCounter(pathlib.Path(sys.argv[1]))
for _ in range(3): counter.increment()
counter.decrement()
os.kill(os.getpid(), 9)
"""


def test_counter_outlives_the_process(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _STUB, tmp_path])
    assert process.wait() == -9
    assert open_requests.read_open_requests(tmp_path, process.pid) == 2
    open_requests.remove(tmp_path, process.pid)
    assert open_requests.read_open_requests(tmp_path, process.pid) == 0


def test_empty_file_counts_as_no_open_requests(tmp_path):
    (tmp_path / open_requests.FOLDER).mkdir()
    (tmp_path / open_requests.FOLDER / "7").touch()
    assert open_requests.read_open_requests(tmp_path, 7) == 0


def test_reused_process_id_starts_at_zero(tmp_path):
    open_requests.OpenRequestCounter(tmp_path).increment()
    assert open_requests.read_open_requests(tmp_path, os.getpid()) == 1
    open_requests.OpenRequestCounter(tmp_path)
    assert open_requests.read_open_requests(tmp_path, os.getpid()) == 0
