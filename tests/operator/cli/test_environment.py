# SPDX-License-Identifier: Apache-2.0
"""Environment variables of options, for every option of every command, and completion in a real shell."""

import argparse
import os
import subprocess
import sys

import pytest
from support.quire_serve import EXAMPLES

from quire_operator.cli import main
from quire_operator.cli.environment import with_environment

TINY = str(EXAMPLES / "models/tiny")
PARSER = main._build_parser()


def leaves(parser, names=()):
    """Yield the names and the parser of each command."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups and names:
        yield names, parser
    for name, child in groups[0].choices.items() if groups else ():
        yield from leaves(child, (*names, name))


OPTIONS = [
    pytest.param(names, option, action, id=f"{'-'.join(names)}{option}")
    for names, parser in leaves(PARSER)
    for action in parser._actions
    for option in action.option_strings
    if option.startswith("--") and not isinstance(action, argparse._HelpAction)
]


@pytest.mark.parametrize(("names", "option", "action"), OPTIONS)
def test_variable_sets_the_option(names, option, action):
    variable = "_".join(("QUIRE", *names, option[2:].replace("-", "_"))).upper()
    value = "1" if action.nargs == 0 else "a 'b c'" if action.nargs in ("+", "*") else "v w"
    found = with_environment(PARSER, [*names], {variable: value})
    first = action.option_strings[0] if action.option_strings[0].startswith("--") else option
    first = next(name for name in action.option_strings if name.startswith("--"))
    values = [] if action.nargs == 0 else ["a", "b c"] if action.nargs in ("+", "*") else None
    assert found == [*names, *([f"{first}={value}"] if values is None else [first, *values])]
    assert with_environment(PARSER, [*names, option], {variable: value}) == [*names, option]
    assert with_environment(PARSER, [*names], {variable: ""}) == [*names]


def saved(capsys, *argv):
    assert main.main(["serve", TINY, "--save=-", *argv]) == 0
    return capsys.readouterr().out


def test_values_are_those_of_the_command_line(capsys, monkeypatch):
    argv = ("--max-model-len=512", "--lora", f"a={EXAMPLES}/adapters/sql", f"b={EXAMPLES}/adapters/pirate")
    expected = saved(capsys, *argv, "--enable-lora")
    variables = {"MAX_MODEL_LEN": "512", "LORA": " ".join(argv[2:]), "ENABLE_LORA": "true", "PORT": "tcp://10.0.0.1:80"}
    variables |= {"SERVICE_HOST": "10.0.0.1", "PORT_80_TCP_ADDR": "10.0.0.1", "OTHER_SERVICE_PORT_HTTP": "80"}
    for name, value in variables.items():
        monkeypatch.setenv(f"QUIRE_SERVE_{name}", value)
    assert saved(capsys) == expected
    assert "maxModelLen: 64\n" in saved(capsys, "--max-model-len=64")
    assert "maxModelLen: 64\n" in saved(capsys, "--max-model-le", "64")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("MAX_MODEL_LENGTH", "5", "did you mean QUIRE_SERVE_MAX_MODEL_LEN?"),
        ("ENABLE_LORA", "maybe", "QUIRE_SERVE_ENABLE_LORA: 'maybe' is not a boolean; give 1 or 0"),
        ("LORA", "'", "QUIRE_SERVE_LORA: "),
        ("MAX_MODEL_LEN", "x", "argument --max-model-len: "),
        ("ENFORCE_EAGER", "1", "--enforce-eager: vLLM has this option, but Quire has not"),
    ],
)
def test_wrong_variable_is_a_usage_error(variable, value, message, capsys, monkeypatch):
    monkeypatch.setenv(f"QUIRE_SERVE_{variable}", value)
    with pytest.raises(SystemExit) as error:
        main.main(["serve", TINY, "--save=-"])
    assert error.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["ser"], {"serve"}), (["serve", "--max-model"], {"--max-model-len"}), (["validate", "-o", "j"], {"json"})],
)
def test_completion_in_bash(words, expected, tmp_path):
    script = tmp_path / "quire.bash"
    script.write_text(
        subprocess.run(
            [sys.executable, "-m", "quire_operator.cli", "completion", "bash"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    code = f"""
        source {script}
        COMP_WORDS=(quire "$@"); COMP_CWORD=$#
        $(complete -p quire | grep -o -- '-F [^ ]*' | cut -d' ' -f2) quire
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    result = subprocess.run(
        ["bash", "-c", code, "bash", *words], capture_output=True, text=True, check=True, env=os.environ
    )
    assert set(result.stdout.split()) == expected
