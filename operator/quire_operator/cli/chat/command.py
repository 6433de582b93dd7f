# SPDX-License-Identifier: Apache-2.0
"""`quire chat`: finds or starts the server, and runs one answer or a chat. Called by main.py."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

from quire_operator.cli.chat.api import Api
from quire_operator.cli.chat.conversation import Conversation
from quire_operator.cli.chat.line_editor import LineEditor, history_path
from quire_operator.cli.chat.local_server import running_server
from quire_operator.cli.chat.session import Session
from quire_operator.cli.chat.terminal import AnswerPrinter
from quire_spec import constants
from quire_spec.documents.sources import STORE_SCHEMES
from quire_spec.errors import InvalidArgument, Unavailable
from quire_spec.net.server_url import server_root

_DEFAULT_URL = f"http://127.0.0.1:{constants.OPENAI_PORT}"


def run(args: argparse.Namespace) -> int:
    """Chat, and return the exit status."""
    environment = dict(os.environ)
    if args.api_key is not None:
        environment["QUIRE_API_KEY"] = args.api_key
    is_url = args.target is not None and "://" in args.target and not args.target.startswith(STORE_SCHEMES)
    if (args.target is None or is_url) and (args.adapters or args.device):
        args.usage_error("--lora and --device require MODEL: a running server has its adapters already")
    prompt = args.once
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
    if prompt is None and not sys.stdout.isatty():
        args.usage_error("standard output is not a terminal; give the prompt with --once or through a pipe")
    if prompt is not None and not prompt.strip():
        args.usage_error("the prompt is empty; give one with --once or through a pipe")
    with _server(args, is_url, environment) as root:
        api = Api(root, environment.get("QUIRE_API_KEY"))
        names = _model_names(api, args)
        given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        parameters = {name: value for name, value in given.items() if value is not None}
        conversation = Conversation(args.model or names[0], args.system, parameters)
        if prompt is not None:
            return _answer_once(api, conversation, prompt)
        session = Session(api, conversation, has_colors=_has_colors(environment))
        return session.run(LineEditor(history_path(environment), session.completions), names)


@contextlib.contextmanager
def _server(args: argparse.Namespace, is_url: bool, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the root of the server's URL."""
    if args.target is None:
        yield _DEFAULT_URL
    elif is_url:
        yield server_root(args.target, "URL", "QUIRE_API_KEY")
    else:
        flags = [f"--lora={adapter}" for adapter in args.adapters or ()]
        flags += [f"--device={args.device}"] if args.device else []
        with running_server(args.target, flags, environment) as root:
            yield root


def _model_names(api: Api, args: argparse.Namespace) -> list[str]:
    try:
        names = api.model_names()
    except Unavailable as error:
        if args.target is not None:
            raise
        raise Unavailable(
            f"nothing answers on {api.root}; start a server (quire serve MODEL), or name one: quire chat URL, or "
            "quire chat MODEL, which starts it"
        ) from error
    if not names and args.model is None:
        raise InvalidArgument(f"{api.root}: the server does not list its models; name one with --model")
    return names


def _answer_once(api: Api, conversation: Conversation, prompt: str) -> int:
    """Print one answer to standard output, and everything else to standard error."""
    is_terminal = sys.stdout.isatty()
    printer = AnswerPrinter(sys.stdout, is_terminal, is_terminal and _has_colors(os.environ))
    printer.print(api.stream_chat(conversation.request(prompt)))
    if printer.finish_reason == "length":
        print("quire chat: the answer ends at the limit of tokens; --max-tokens raises it", file=sys.stderr)
    return 0


def _has_colors(environment: Mapping[str, str]) -> bool:
    return not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
