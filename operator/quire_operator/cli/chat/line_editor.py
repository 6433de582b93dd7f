# SPDX-License-Identifier: Apache-2.0
"""Reads lines from a terminal with readline: arrow keys, a history file, completion by the tab key."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from quire_spec.errors import ConfigError

try:
    import readline
except ImportError:  # a Python without readline; the terminal's own line editing is left
    readline = None  # type: ignore[assignment]

_MAX_LINES = 1000


def history_path(environment: Mapping[str, str]) -> Path:
    """Return the file of the history, in the user's state folder."""
    state = environment.get("XDG_STATE_HOME")
    folder = Path(state) if state and Path(state).is_absolute() else Path("~/.local/state").expanduser()
    return folder / "quire" / "chat-history"


class LineEditor:
    """Lines that a user types. Each is added to the history file at once, so that a killed chat loses none."""

    def __init__(self, history: Path, completions: Callable[[str], Iterable[str]]) -> None:
        """`completions` returns the lines that can follow from the start of a line.

        Raises:
            ConfigError: the history file cannot be opened.
        """
        self._history = history
        if readline is None:
            return
        try:
            history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The file contains what users type. It is created with its mode, so that other users can never open it.
            os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
            history.chmod(0o600)
            readline.read_history_file(history)
        except OSError as error:
            raise ConfigError(f"history {history}: {error.strerror}; set XDG_STATE_HOME to another folder") from error
        readline.set_history_length(_MAX_LINES)
        readline.set_auto_history(False)
        readline.set_completer_delims("")
        readline.set_completer(lambda text, i: [*completions(text), None][i])
        readline.parse_and_bind("tab: complete")

    def read(self, prompt: str) -> str:
        """Return one line without spaces around it. A line that ends with a backslash is continued.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C.
        """
        lines = [input(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("... "))
        text = "\n".join(lines).strip()
        if text and readline is not None:
            readline.add_history(text.replace("\n", " "))
            with contextlib.suppress(OSError):
                readline.append_history_file(1, self._history)
        return text
