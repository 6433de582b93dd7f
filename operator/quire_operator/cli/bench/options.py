# SPDX-License-Identifier: Apache-2.0
"""Options of `quire bench`, with their help texts. Called by main.py."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from quire_operator.cli.options import parse_count, parse_file
from quire_spec import constants

BENCH_DESCRIPTION = """\
Measure a running server of the OpenAI API: latencies and throughput at several loads, with adapters mixed.
A load is a number of open requests (--concurrency) or of new requests per second (--request-rate, Poisson).

Before the loads, some prompts are sent alone. Under each load, the same prompts must give the same text. If they do
not, or if a request fails, the command names the reason and reports no figures for that load."""

BENCH_EXAMPLES = """\
examples:
  quire bench                                                        the server on this machine, three loads
  quire bench --url http://gpu:8004 --concurrency 1,8,64 --num-prompts 256
  quire bench --request-rate 1,2,4 --seconds 60 --input-len 512-2048 --output-len 128
  quire bench --adapters sql=3,pirate=1                              three of four requests to the adapter sql
  quire bench --adapters zipf --goodput ttft:500 tpot:50             all adapters of the server, few of them popular
  quire bench --dataset prompts.jsonl --endpoint chat                real prompts
  quire bench --concurrency 1,8,64 --svg bench.svg -o bench.json     a chart, and all figures

  TTFT  time to the first token              TPOT  mean time of each further token of a request
  ITL   time between two parts of a stream   E2E   time of a whole request
  goodput: requests per second that keep all limits of --goodput, in milliseconds, with vLLM's names

A line of a JSONL file is {"prompt": "..."} or, with --endpoint chat, {"messages": [...]}; it can also have "model" and
"output_tokens". Each line of any other file is a prompt.
Exit status 0: all loads are reported, 1: a request failed, an output differs, or the server does not answer, 2: wrong
usage."""

ENDPOINTS = ("completions", "chat")
SLO_NAMES = ("ttft", "tpot", "e2el")


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire bench`."""
    add = parser.add_argument
    add(
        "--url",
        default=f"http://127.0.0.1:{constants.OPENAI_PORT}",
        help="URL of a server with the OpenAI API (default: %(default)s)",
    )
    add("--api-key", metavar="KEY", help="key of the server (default: $QUIRE_API_KEY)")
    add("--endpoint", choices=ENDPOINTS, default="completions", help="route of the requests (default: completions)")
    load = parser.add_argument_group("load").add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_list_of(parse_count),
        metavar="N,N",
        help="numbers of open requests, one load each (default: 1,4,16)",
    )
    load.add_argument(
        "--request-rate", type=_list_of(_parse_positive), metavar="R,R", help="new requests per second, one load each"
    )
    add("--num-prompts", type=parse_count, metavar="N", help="requests of each load (default: as many as --seconds)")
    add(
        "--seconds",
        type=_parse_positive,
        metavar="S",
        help="time in which requests of a load start (default: 20, unless --num-prompts is given)",
    )
    requests = parser.add_argument_group("requests")
    models = requests.add_mutually_exclusive_group()
    models.add_argument("--model", metavar="NAME", help="model of all requests (default: the first of the server)")
    models.add_argument(
        "--adapters",
        metavar="NAME=WEIGHT,...",
        help="models of the requests, with weights; or uniform or zipf[:EXPONENT], over all adapters in /v1/models",
    )
    requests.add_argument(
        "--input-len", type=_parse_range, default=(256, 256), metavar="N[-M]", help="tokens of a prompt (default: 256)"
    )
    requests.add_argument(
        "--output-len",
        type=_parse_range,
        default=(128, 128),
        metavar="N[-M]",
        help="maximum number of tokens of an output (default: 128)",
    )
    requests.add_argument("--dataset", type=parse_file, metavar="FILE", help="prompts (default: random words)")
    requests.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate exactly --output-len tokens, as Quire and vLLM can (default: without --dataset)",
    )
    requests.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and times (default: 0)")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput", nargs="+", type=_parse_slo, metavar="NAME:MS", help=f"limits: {', '.join(SLO_NAMES)}"
    )
    report.add_argument("--svg", type=Path, metavar="FILE", help="write a chart")
    report.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all figures as JSON")
    report.add_argument(
        "--report-anyway",
        action="store_true",
        help="also report loads with failed requests and different outputs; the report contains their number",
    )


def _list_of(parse: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [parse(part) for part in text.split(",")]


def _parse_positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0")
    return value


def _parse_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    numbers = parse_count(low), parse_count(high or low)
    if numbers[0] > numbers[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first number is greater than the second; exchange them")
    return numbers


def _parse_slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in SLO_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME:MILLISECONDS with one of {', '.join(SLO_NAMES)}")
    return name, _parse_positive(limit)
