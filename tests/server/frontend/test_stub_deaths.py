# SPDX-License-Identifier: Apache-2.0
"""Death of a stub, and of its server."""

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


def test_stub_exits_if_its_server_ended_during_startup():
    """Server and supervisor were killed while the stub started, so that no process remains to end it."""
    argv = [sys.executable, "-c", STARTS_LATE]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60, check=True, start_new_session=True)
    assert done.stdout == "begins\n"


def test_model_of_a_killed_stub_can_be_loaded_again(tmp_path):
    with running_frontend(tmp_path) as frontend:
        frontend.add_model("sql")
        frontend.stub("sql").kill()
        wait_until(lambda: frontend.journal_entries("lost"), 20, "noticed by the text process")

        async def unload() -> None:
            async with frontend.client() as client:
                await client.unload_model("sql")

        asyncio.run(unload())
        frontend.add_model("sql")
        assert frontend.text("sql", "x", max_tokens=2) == "t0 t1 "
        assert psutil.Process(frontend.process.pid).is_running()
