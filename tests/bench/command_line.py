# SPDX-License-Identifier: Apache-2.0
"""Options and outputs that the benchmarks of serving, adapters and adapter loading share."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import random_checkpoint
import report


def new_parser(script: str, description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of the outputs."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=script, description=description, epilog=epilog, formatter_class=formatter)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables between its marks")
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, of the other engine and of the requests' lengths."""
    model, add = parser.add_mutually_exclusive_group(required=True), parser.add_argument
    model.add_argument("--model", type=Path, metavar="DIR", help="a Llama checkpoint in Hugging Face format")
    model.add_argument("--shape", choices=random_checkpoint.SHAPES, help="random weights, made once and kept")
    add("--vllm-python", metavar="FILE", help="interpreter of an environment that has vllm; adds vllm")
    add("--requests", type=int, default=64, metavar="N", help="requests of a run (default 64)")
    add("--prompt-tokens", type=_parse_bounds, metavar="A-B", help="tokens of a prompt (default %(default)s)")
    add("--output-tokens", type=_parse_bounds, metavar="A-B", help="tokens of an output (default %(default)s)")
    add("--runs", type=int, metavar="N", help="rounds (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts, lengths and arrivals (default 0)")


def parse_engine_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, positive: Sequence[str]
) -> argparse.Namespace:
    """Parse, and check as far as possible without loading anything; the options `positive` must be positive."""
    args = parser.parse_args(argv)
    for name, python in vars(args).items():
        if name.endswith("_python") and python and not os.access(python, os.X_OK):
            package = name.removesuffix("_python")
            parser.error(f"--{package}-python: {python!r} is not an executable; give the python of its environment")
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} contains no config.json; give the folder of a checkpoint")
    for name in ("requests", "runs", *positive):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be positive")
    return args


def _parse_bounds(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (text.replace("-", "", 1).isdigit() and 1 <= int(low) <= int(high or low)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A-B with 1 <= A <= B, for example 32-256")
    return int(low), int(high or low)


def publish(script: str, args: argparse.Namespace, results: dict[str, Any], text: str) -> None:
    """Print the report, and write the files that `new_parser` lets a user request."""
    print(text)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    if args.markdown:
        report.replace_marked(args.markdown, script, f"```\n{results['command']}\n```\n\n{text}")
