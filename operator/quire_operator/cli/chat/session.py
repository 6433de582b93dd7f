# SPDX-License-Identifier: Apache-2.0
"""The loop of a chat in a terminal: reads lines, runs commands, prints answers."""

import difflib
import sys
from collections.abc import Iterable

from quire_operator.cli.chat.api import Api
from quire_operator.cli.chat.conversation import Conversation
from quire_operator.cli.chat.line_editor import LineEditor
from quire_operator.cli.chat.terminal import AnswerPrinter, printable
from quire_spec.errors import QuireError

_HELP = """\
/model NAME    talk to another model or adapter; without NAME: print the current one
/models        list the models and adapters of the server
/system TEXT   set the system prompt; without TEXT: print it; /system - removes it
/clear         start a new conversation
/help          print this text
/exit          leave; also Ctrl-D
Ctrl-C stops an answer, and what has come stays in the conversation. A line that ends with \\ continues on the next."""
_COMMANDS = ("/model", "/models", "/system", "/clear", "/help", "/exit")


class Session:
    """One chat of a user."""

    def __init__(self, api: Api, conversation: Conversation, has_colors: bool) -> None:
        self._api = api
        self._conversation = conversation
        self._has_colors = has_colors
        self._names: list[str] = []

    def run(self, editor: LineEditor, names: list[str]) -> int:
        """Chat until the user leaves, and return the exit status 0. `names` are the models of the server."""
        self._names = names
        print(printable(f"{self._conversation.model} on {self._api.root}; /help lists the commands, Ctrl-D leaves"))
        while True:
            try:
                line = editor.read(">>> ")
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if line.split()[:1] == ["/exit"]:
                return 0
            try:
                if line.startswith("/"):
                    self._run_command(*line.partition(" ")[::2])
                elif line:
                    self._answer(line)
            except QuireError as error:
                self._note(str(error))
            except KeyboardInterrupt:
                self._note("stopped")

    def completions(self, start: str) -> list[str]:
        """Return the commands, and the names after /model, that begin with the start of a line."""
        lines: Iterable[str] = (f"/model {name}" for name in self._names) if start.startswith("/model ") else _COMMANDS
        return [line for line in lines if start.startswith("/") and line.startswith(start)]

    def _run_command(self, command: str, argument: str) -> None:
        conversation, argument = self._conversation, argument.strip()
        match command:
            case "/model" if argument:
                self._choose(argument)
            case "/model":
                print(printable(conversation.model))
            case "/models":
                self._names = self._api.model_names()
                for name in self._names:
                    print(printable(f"{'*' if name == conversation.model else ' '} {name}"))
            case "/system" if argument:
                conversation.system = None if argument == "-" else argument
            case "/system":
                print("no system prompt" if conversation.system is None else printable(conversation.system))
            case "/clear":
                conversation.clear()
                self._note("new conversation")
            case "/help":
                print(_HELP)
            case _:
                known = difflib.get_close_matches(command, _COMMANDS, 1)
                hint = f"; did you mean {known[0]}?" if known else ""
                self._note(f"{printable(command)}: unknown command{hint} /help lists the commands")

    def _choose(self, name: str) -> None:
        self._names = self._api.model_names()
        self._conversation.model = name
        if name not in self._names:
            # Sums of adapters, and adapters that are found by name, are not listed.
            self._note(f"{name} is not in the list of /models; the server decides whether it has it")

    def _answer(self, prompt: str) -> None:
        printer = AnswerPrinter(sys.stdout, is_terminal=True, has_colors=self._has_colors)
        pieces = self._api.stream_chat(self._conversation.request(prompt))
        try:
            printer.print(pieces)
        finally:
            self._conversation.add_turn(prompt, printer.text)
        if printer.finish_reason == "length":
            self._note("the answer ends at the limit of tokens; --max-tokens raises it")
        elif not printer.text:
            self._note("the answer is empty")

    def _note(self, text: str) -> None:
        text = printable(text)
        print(f"\x1b[2m({text})\x1b[0m" if self._has_colors else f"({text})", flush=True)
