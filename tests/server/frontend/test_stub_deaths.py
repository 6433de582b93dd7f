# SPDX-License-Identifier: Apache-2.0
"""Death of a stub, and of its server."""

import asyncio
import subprocess
import sys

import psutil
import pytest
from support.frontend_harness import wait_until

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


def test_model_of_a_killed_stub_can_be_loaded_again(running):
    running.add_model("killed")
    num_lost = len(running.journal_entries("lost"))
    running.stub("killed").kill()
    wait_until(lambda: len(running.journal_entries("lost")) > num_lost, 20, "noticed by the text process")

    async def unload() -> None:
        async with running.client() as client:
            await client.unload_model("killed")

    asyncio.run(unload())
    running.add_model("killed")
    assert running.text("killed", "x", max_tokens=2) == "t0 t1 "
    assert psutil.Process(running.process.pid).is_running()
    running.remove_model("killed")
