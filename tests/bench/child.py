# SPDX-License-Identifier: Apache-2.0
"""An engine in a separate process, and its protocol: each command and each reply is one line of JSON.

`ChildProcess` is the benchmark's side; `take_stdout` and `serve` are the engine's. Standard library only: vLLM's
environment imports this too.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

TIMEOUT_S = 1800.0


class ChildFailed(Exception):
    """A process of the benchmark failed or ended; the message contains the end of its log."""


class ChildProcess:
    """A script of this folder in a process that ends with the `with` block.

    It is stopped between commands: the workers of some engines spin for a minute after a run, on the cores that the
    next engine is measured on.
    """

    def __init__(
        self,
        name: str,
        script: str,
        settings: Mapping[str, Any],
        folder: Path,
        python: str = sys.executable,
        timeout_s: float = TIMEOUT_S,
    ):
        """`timeout_s`: time limit for a reply; the start of the process counts as part of the first command."""
        self.name = name
        self._timeout_s = timeout_s
        self._log = folder / f"{name}.log"
        argv = [python, str(Path(__file__).with_name(script)), json.dumps(settings)]
        pipe = subprocess.PIPE
        # vLLM's sockets, which it leaves behind when it is killed.
        env = os.environ | {"VLLM_RPC_BASE_PATH": str(folder)}
        with self._log.open("wb") as log:
            # A new session: the benchmark alone handles Control-C, and can kill all descendants with their group.
            self.process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=log, env=env, text=True, start_new_session=True
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._commands, self._responses = self.process.stdin, self.process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._responses.close()

    def call(self, command: str, **arguments: Any) -> Any:
        """Send a command and return the reply.

        Raises:
            ChildFailed: the process failed, ended, or did not answer in time.
        """
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # the process has ended; reading reports it
            print(json.dumps([command, arguments]), file=self._commands, flush=True)
        readable, _, _ = select.select([self._responses], [], [], self._timeout_s)
        line = self._responses.readline() if readable else ""
        self._signal(signal.SIGSTOP)
        if not readable:
            raise ChildFailed(f"{self.name} failed at {command!r}:\nno answer in {self._timeout_s:g} s")
        response = json.loads(line) if line else {"error": self._log.read_text(errors="replace")[-6000:]}
        if "error" in response:
            raise ChildFailed(f"{self.name} failed at {command!r}:\n{response['error']}")
        return response["result"]

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its descendants."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def reserve_stdout() -> TextIO:
    """Return standard output for replies, and redirect other output to the log. Call this before importing
    libraries."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return responses


def serve_commands(responses: TextIO, **commands: Callable[..., Any]) -> None:
    """Answer commands until standard input is closed, which happens whenever the benchmark ends."""
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            response = {"result": commands[command](**arguments)}
        except Exception:
            response = {"error": traceback.format_exc()}
        print(json.dumps(response), file=responses, flush=True)
