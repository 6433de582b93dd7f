# SPDX-License-Identifier: Apache-2.0
"""Stubs that die, and stubs whose server has died."""

import asyncio
import subprocess
import sys

import psutil
import pytest
from support.frontend_harness import running_frontend, wait_until

pytestmark = pytest.mark.server


STARTS_LATE = """
import os, sys, types
sys.modules["triton_python_backend_utils"] = types.SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1)
from quire_server.frontend import stub_model
server = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == server:
    pass
print("begins", flush=True)
stub_model._exit_with_server()
print("stays", flush=True)
"""


def test_a_stub_whose_server_ended_before_it_had_begun_ends_too():
    """With nobody left to end it: server and supervisor were killed while it was being started."""
    argv = [sys.executable, "-c", STARTS_LATE]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60, check=True, start_new_session=True)
    assert done.stdout == "begins\n"


def test_a_killed_stub_frees_its_requests_and_its_model_loads_again(tmp_path):
    with running_frontend(tmp_path) as own:
        own.add_model("sql")
        own.stub("sql").kill()
        wait_until(lambda: own.journal_entries("lost"), 20, "noticed by the text process")

        async def heal() -> None:
            async with own.client() as client:
                await client.unload_model("sql")

        asyncio.run(heal())
        own.add_model("sql")
        assert own.text("sql", "x", max_tokens=2) == "t0 t1 "
        assert psutil.Process(own.process.pid).is_running()
