# SPDX-License-Identifier: Apache-2.0
"""Environment variables of options: QUIRE_SERVE_MAX_MODEL_LEN is `--max-model-len` of `quire serve`.

They become arguments after those of the command line, so that argparse checks both alike. Called by main.py.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence

from quire_operator.api.schema_messages import closest_match

HELP = """\
Each option of a command can be set by an environment variable, as QUIRE_SERVE_MAX_MODEL_LEN sets --max-model-len of
quire serve. An option on the command line takes precedence."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_SERVICE_VARIABLE = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Variables that Kubernetes sets for a Service, such as QUIRE_SERVE_SERVICE_HOST for a Service named quire-serve."""
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
"""Value of such a variable whose name could be that of an option: QUIRE_SERVE_PORT."""


def with_environment(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return the arguments with those that the environment sets. A wrong variable ends the command with a usage error,
    as a wrong option does."""
    command, parser = _command(parser, arguments)
    prefix = "".join(f"{name}_" for name in ("quire", *command)).upper()
    actions = {
        option.removeprefix("--").replace("-", "_").upper(): action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and not isinstance(action, argparse._HelpAction)
    }
    added = []
    for variable, value in sorted(environment.items()):
        name = variable.removeprefix(prefix)
        is_of_service = _SERVICE_VARIABLE.fullmatch(name) or _SERVICE_URL.match(value)
        if not command or name == variable or not value or is_of_service:
            continue
        if (action := actions.get(name)) is None:
            closest = closest_match(name, list(actions))
            hint = f"did you mean {prefix}{closest}?" if closest else f"see quire {' '.join(command)} --help"
            parser.error(f"{variable}: quire {' '.join(command)} has no option of this name; {hint}")
        if not _is_given(action, arguments):
            added += _to_arguments(parser, variable, value, action)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *added, *arguments[end:]]


def _command(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[tuple[str, ...], argparse.ArgumentParser]:
    """Return the names of the command and of its subcommand, and their parser."""
    names: tuple[str, ...] = ()
    for argument in arguments:
        groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not groups or argument not in groups[0].choices:
            break
        names, parser = (*names, argument), groups[0].choices[argument]
    return names, parser


def _is_given(action: argparse.Action, arguments: Sequence[str]) -> bool:
    """Return whether the command line has the option, which argparse accepts in an abbreviated form, too."""
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("-") and argument != "-"]
    return any(
        option == name or (name.startswith("--") and len(name) > 2 and option.startswith(name))
        for option in action.option_strings
        for name in given
    )


def _to_arguments(parser: argparse.ArgumentParser, variable: str, value: str, action: argparse.Action) -> list[str]:
    option = next(option for option in action.option_strings if option.startswith("--"))
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if value.lower() in _TRUE:
            return [option]
        if value.lower() in _FALSE:
            return [f"--no-{option[2:]}"] if isinstance(action, argparse.BooleanOptionalAction) else []
        parser.error(f"{variable}: {value!r} is not a boolean; give 1 or 0")
    if action.nargs in ("+", "*"):
        try:
            return [option, *shlex.split(value)]
        except ValueError as error:
            parser.error(f"{variable}: {value!r}: {error}; separate values by spaces and quote them as in a shell")
    return [f"{option}={value}"]
