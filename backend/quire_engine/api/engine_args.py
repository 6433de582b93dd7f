# SPDX-License-Identifier: Apache-2.0
"""vLLM's `EngineArgs`: the arguments of an `LLM` as an object, which a script can also fill from its command line.

parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
llm = LLM(**vars(parser.parse_args()))
"""

import argparse
import json
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, Self

from quire_spec.engine.config import EngineConfig
from quire_spec.engine.vllm_arguments import OTHER_VLLM_ARGUMENTS


class _CliArguments:
    """Base class of dataclasses: defines a command line option for each field."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each engine argument, and return the parser."""
        group = parser.add_argument_group("engine arguments")
        for argument in fields(cls):  # type: ignore[arg-type]
            option, default = f"--{argument.name.replace('_', '-')}", argument.default
            if isinstance(default, bool):
                group.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
            elif default is MISSING:
                group.add_argument(option, required=True)
            else:
                group.add_argument(option, default=default, type=str if isinstance(default, str) else _value)
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> Self:
        """Create an object from parsed options; options that are not engine arguments are ignored."""
        names = {argument.name for argument in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in vars(arguments).items() if name in names})


def _value(text: str) -> Any:
    """Parse numbers, booleans and JSON objects; other values are text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# Arguments that this engine does not have are None by default. None means that the script did not set the argument.
EngineArgs: Any = make_dataclass(
    "EngineArgs",
    [
        *((f.name, f.type, field(default=f.default)) for f in fields(EngineConfig)),
        *((name, Any, field(default=None)) for name in sorted(OTHER_VLLM_ARGUMENTS)),
    ],
    bases=(_CliArguments,),
)
"""Engine arguments with vLLM's names; `LLM(**dataclasses.asdict(engine_args))` checks them."""
