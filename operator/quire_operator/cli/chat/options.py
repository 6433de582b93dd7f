# SPDX-License-Identifier: Apache-2.0
"""Options of `quire chat`, with their help texts. Called by main.py."""

import argparse

from quire_operator.cli.options import parse_count

CHAT_DESCRIPTION = """\
Chat in the terminal with a model that is served, here or on any server of the OpenAI API. If MODEL is given, the
command starts `quire serve MODEL`, waits until it is ready, and stops it at the end."""

CHAT_EXAMPLES = """\
examples:
  quire chat                                             the server on this machine (http://127.0.0.1:8004)
  quire chat https://llm.example --model sql             any server of the OpenAI API; QUIRE_API_KEY has the key
  quire chat examples/models/tiny                        serve a folder, and chat with it
  quire chat Qwen/Qwen2.5-0.5B-Instruct --lora tone=example-org/tone-lora      a model of the hub, and an adapter
  quire chat --once "What is the capital of France?"     one answer on standard output
  git diff | quire chat --system "Write a commit message for this change"      the prompt comes from a pipe

In the chat:
  /model NAME    talk to another model or adapter       /models        list them
  /system TEXT   set the system prompt                  /clear         start a new conversation
  /help          list all commands                      /exit, Ctrl-D  leave
Ctrl-C stops an answer. The arrow keys recall lines of earlier chats; the tab key completes commands and names.

With --once or a pipe, standard output contains only the answer.
Exit status 0: done, 1: the server failed, or the answer is not complete, 2: wrong usage, 130: Ctrl-C."""


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire chat`."""
    add = parser.add_argument
    add(
        "target",
        nargs="?",
        metavar="MODEL|URL",
        help="the URL of a server; or a model to serve: a folder, the file of an LLMService, or a repository on the "
        "Hugging Face hub (default: the server on port 8004 of this machine)",
    )
    add("--once", metavar="PROMPT", help="print one answer to PROMPT, and leave")
    add("--model", metavar="NAME", help="model or adapter that answers (default: the first one of the server)")
    add("--system", metavar="TEXT", help="system prompt")
    add("--temperature", type=_parse_temperature, metavar="T", help="0 is greedy (default: the model's)")
    add("--max-tokens", type=parse_count, metavar="N", help="maximum number of tokens of an answer")
    add(
        "--api-key",
        metavar="KEY",
        help="key of the server (default: $QUIRE_API_KEY, which other users of this machine cannot see)",
    )
    served = parser.add_argument_group("with MODEL")
    served.add_argument(
        "--lora",
        dest="adapters",
        nargs="+",
        action="extend",
        metavar="NAME=SOURCE",
        help="adapter, as for quire serve; can be repeated",
    )
    served.add_argument("--device", choices=("cuda", "cpu"), help="device, as for quire serve")


def _parse_temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; give a number of at least 0, such as 0.7")
    return value
