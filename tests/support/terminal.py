# SPDX-License-Identifier: Apache-2.0
"""A command in a terminal of its own: what a user types and sees."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CTRL_C, CTRL_D, UP, TAB = "\x03", "\x04", "\x1b[A", "\t"


class Terminal:
    """A running command. `screen` is everything that it has written."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        self._controller, user_side = pty.openpty()
        termios.tcsetwinsize(user_side, (40, 200))
        self.process = subprocess.Popen(
            command,
            stdin=user_side,
            stdout=user_side,
            stderr=user_side,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(user_side)
        self.screen = ""

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._controller, keys.encode())

    def enter(self, line: str) -> None:
        """Type a line."""
        self.type(line + "\r")

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """Wait until a text appears after what earlier calls waited for; return what came before it."""
        deadline = time.monotonic() + timeout_s
        while text not in self.screen[self._seen :]:
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"no {text!r} in {self.screen[self._seen :]!r}, before it {self.screen!r}")
        start = self.screen.index(text, self._seen)
        before = self.screen[self._seen : start]
        self._seen = start + len(text)
        return before

    _seen = 0

    def wait_end(self, timeout_s: float = 60.0) -> int:
        """Read to the end, and return the exit status."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and self._read(left):
            pass
        return self.process.wait(max(1.0, left))

    def close(self) -> None:
        """Close the terminal, and end the command if it still runs."""
        os.close(self._controller)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def _read(self, timeout_s: float) -> bool:
        """Read what is there; False at the end or after the timeout."""
        if not select.select([self._controller], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._controller, 65536)
        except OSError:  # Linux reports the end of the command as EIO
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)


def _take_terminal() -> None:
    """Make the terminal the controlling one, so that Ctrl-C sends SIGINT. A shell that runs the tests in the background
    ignores SIGINT, and its children inherit this."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def running_terminal(command: Sequence[str | Path], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Start a command in a terminal, and close it at the end."""
    terminal = Terminal(command, environment)
    try:
        yield terminal
    finally:
        terminal.close()
