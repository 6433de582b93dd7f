# SPDX-License-Identifier: Apache-2.0
"""What a stub had open can be read when it is dead."""

import os
import subprocess
import sys

from quire_server import ledger

_STUB = """
import os, pathlib, sys
from quire_server.ledger import Ledger
own = Ledger(pathlib.Path(sys.argv[1]))
for _ in range(3): own.opened()
own.closed()
os.kill(os.getpid(), 9)
"""


def test_the_count_outlives_the_process(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _STUB, tmp_path])
    assert process.wait() == -9
    assert ledger.num_open(tmp_path, process.pid) == 2
    ledger.forget(tmp_path, process.pid)
    assert ledger.num_open(tmp_path, process.pid) == 0


def test_a_stub_that_died_while_it_began_has_nothing_open(tmp_path):
    (tmp_path / ledger.FOLDER).mkdir()
    (tmp_path / ledger.FOLDER / "7").touch()
    assert ledger.num_open(tmp_path, 7) == 0


def test_a_process_id_used_again_begins_at_none(tmp_path):
    ledger.Ledger(tmp_path).opened()
    assert ledger.num_open(tmp_path, os.getpid()) == 1
    ledger.Ledger(tmp_path)
    assert ledger.num_open(tmp_path, os.getpid()) == 0
