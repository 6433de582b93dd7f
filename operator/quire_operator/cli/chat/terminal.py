# SPDX-License-Identifier: Apache-2.0
"""The output of a chat: the answer as it comes, thinking dimmed, control characters removed on a terminal."""

import re
from collections.abc import Generator
from contextlib import closing
from typing import TextIO

from quire_operator.cli.chat.api import Piece

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters except tab and newline. Output of a model could otherwise control the terminal."""
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def printable(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return _CONTROL_CHARACTERS.sub("", text)


class AnswerPrinter:
    """Prints one answer, and keeps its text."""

    def __init__(self, output: TextIO, is_terminal: bool, has_colors: bool) -> None:
        """On a terminal, the thinking of a reasoning model is printed too."""
        self._output, self._is_terminal, self._has_colors = output, is_terminal, has_colors
        self._is_thinking = False
        self._last = "\n"
        self.text = ""
        self.finish_reason: str | None = None

    def print(self, pieces: Generator[Piece, None, None]) -> None:
        """Print all pieces. `text` and `finish_reason` are right after an exception, too. The iterator is closed."""
        try:
            with closing(pieces):
                for piece in pieces:
                    self._print_piece(piece)
        finally:
            self._end_thinking()
            if self._last != "\n":
                self._write("\n")

    def _print_piece(self, piece: Piece) -> None:
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.reasoning and self._is_terminal:
            self._think(piece.reasoning)
        if piece.text:
            self._end_thinking()
            self.text += piece.text
            self._write(piece.text)

    def _think(self, text: str) -> None:
        if not self._is_thinking:
            self._is_thinking = True
            self._output.write(_DIM if self._has_colors else "thinking: ")
        self._write(text)

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            if self._has_colors:
                self._output.write(_RESET)
            self._write("\n" if self._last == "\n" else "\n\n")

    def _write(self, text: str) -> None:
        if self._is_terminal:
            text = printable(text)
        self._last = text[-1:] or self._last
        self._output.write(text)
        self._output.flush()
