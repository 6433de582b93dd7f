# SPDX-License-Identifier: Apache-2.0
"""The `quire` command: reads arguments, calls one function for each subcommand, prints, and decides the exit status.

Modules are imported where they are used: `quire --version` needs no YAML, `quire validate` nothing of the server.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from quire_operator import options
from quire_spec.errors import QuireError

Run = Callable[[argparse.Namespace], int]
"""Does what a command line says; the exit status."""

_ABOUT = """\
Serve large language models with many LoRA adapters from one resource, LLMService.
The same file works on a cluster (kubectl apply -f) and on a laptop (quire serve -f)."""

_START = """\
examples:
  quire validate -f llmservice.yaml          is the file right?
  quire plan -f llmservice.yaml --gpu NVIDIA-L4      does it fit, and how does it run?
  quire render -f llmservice.yaml            the Kubernetes objects that it becomes
  quire serve -f llmservice.yaml             run it on this machine
  quire operate                              look after all LLMServices of a cluster
  quire serve --help                         how to reach what runs

All fields of the file, with their units, defaults and reasons: kubectl explain llmservice.spec --recursive"""

_VALIDATE = """\
Check LLMService files against the CRD: fields, types, ranges and the rules between fields, as an API server would,
but all problems at once, each with its line, and without a cluster. Exit status 0: all right, 1: problems."""

_VALIDATE_EXAMPLES = """\
examples:
  quire validate -f llmservice.yaml examples/*.yaml
  helm template charts/mine | quire validate -f -
  quire validate -o json -f llmservice.yaml  [{"file", "ok", "problems": [{"line", "path", "rule", "fix"}]}]"""

_SERVE = """\
Run an LLMService on this machine: Triton Inference Server, the engine, and the adapters of the file.
Models come from a folder (path), the Hugging Face hub, or a claim's folder given by --volume."""

_SERVE_EXAMPLES = """\
examples:
  quire serve -f examples/llmservice.yaml
  curl -s localhost:8003/health/ready        200 once the model and the adapters are loaded, 503 and why before
  curl -s localhost:8000/v2/models/tales/generate -d '{"text_input": "Once upon a time", "max_tokens": 32}'
  curl -s localhost:8000/v2/models/pirate/generate -d '{"text_input": "Hello", "max_tokens": 32}'   an adapter

  quire serve -f llmservice.yaml --volume models=/srv/models       spec.model.source.pvc.claimName: models
  quire serve --vllm-repository model_repository/vllm_model        a vllm_backend model, as it is
  quire serve -f llmservice.yaml --host 0.0.0.0                    also for other machines; nothing is encrypted

Stop it with Ctrl-C: requests that are running get spec.rollout.drainSeconds to finish.
Adapters in the file follow the file at the next start."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 something is wrong, 2 used wrongly (from argparse)."""
    given = _parser().parse_args(arguments)
    try:
        status = int(given.run(given))
        sys.stdout.flush()
        return status
    except QuireError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="quire", description=_ABOUT, epilog=_START, formatter_class=style)
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, words: str, about: str, examples: str, run: Run) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=words, description=about, epilog=examples, formatter_class=style)
        made.set_defaults(run=run, refuse=made.error)
        return made

    _add_validate_options(command("validate", "check LLMService files", _VALIDATE, _VALIDATE_EXAMPLES, _validate))
    options.add_plan_options(
        command("plan", "work out memory, context and GPUs", options.PLAN, options.PLAN_EXAMPLES, _plan)
    )
    options.add_render_options(
        command("render", "print the Kubernetes objects", options.RENDER, options.RENDER_EXAMPLES, _render)
    )
    options.add_operate_options(
        command(
            "operate", "look after the LLMServices of a cluster", options.OPERATE, options.OPERATE_EXAMPLES, _operate
        )
    )
    _add_serve_options(command("serve", "run an LLMService here", _SERVE, _SERVE_EXAMPLES, _serve))
    return parser


def _add_validate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--file",
        dest="files",
        nargs="+",
        action="extend",
        required=True,
        help="files to check; - is standard input",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the report")


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-f", "--file", help="the LLMService; relative paths in it start at its folder")
    source.add_argument(
        "--vllm-repository",
        type=Path,
        metavar="DIR",
        help="instead: a model of NVIDIA's vllm_backend (1/model.json), served under its folder's name",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="for --vllm-repository, where model.json says none (default: cuda)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    for name, what in (
        ("http", "requests over HTTP"),
        ("grpc", "requests over gRPC"),
        ("metrics", "the server's own metrics"),
        ("health", "health, all metrics, status"),
    ):
        parser.add_argument(
            f"--{name}-port", type=options.port, metavar="PORT", help=f"{what} (default: spec.runtime.ports.{name})"
        )
    options.add_folders(parser)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="sockets and configuration (default: below /tmp)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="downloaded adapters (default: ~/.cache/quire)")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print the engine's configuration and the server's log"
    )


class _Version(argparse.Action):
    """Asks the installed distribution for its version only when it is wanted: that takes longer than the rest."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"quire {version('quire-llm')}")
        parser.exit()


def _validate(given: argparse.Namespace) -> int:
    from quire_operator.validate import report

    reports = []
    for file in given.files:
        reports.append(report(file))
        if given.output == "text":
            print(*reports[-1].lines(), sep="\n")
    if given.output == "json":
        print(json.dumps([found.to_json() for found in reports], indent=2, default=str))
    return 0 if all(found.ok for found in reports) else 1


def _plan(given: argparse.Namespace) -> int:
    from quire_operator.plan import command

    return command.run(given)


def _render(given: argparse.Namespace) -> int:
    from quire_operator.render import command

    return command.run(given)


def _operate(given: argparse.Namespace) -> int:
    from quire_operator.reconcile import command

    return command.run(given)


def _serve(given: argparse.Namespace) -> int:
    from quire_operator import crd, serve, serve_vllm
    from quire_operator.service import LLMService

    wanted = serve.Options(
        host=given.host,
        http_port=given.http_port,
        grpc_port=given.grpc_port,
        metrics_port=given.metrics_port,
        health_port=given.health_port,
        volumes=tuple(given.volumes),
        run_dir=given.run_dir,
        cache_dir=given.cache_dir,
        secrets_dir=given.secrets_dir,
        verbose=given.verbose,
    )
    if given.vllm_repository is not None:
        if given.volumes:
            given.refuse("--volume is for -f: a vllm_backend repository names folders, and no claims")
        argv = list(serve_vllm.argv(given.vllm_repository, given.device or "cuda", wanted, os.environ))
        serve.missing_packages()
        serve.become(argv, os.environ)
    if given.device is not None:
        given.refuse("--device is for --vllm-repository: an LLMService says it, as spec.device")
    manifest = crd.only_service(given.file)
    service = LLMService.from_body(crd.valid(manifest))
    launch = serve.prepare(manifest, service, wanted, os.environ)
    serve.missing_packages()
    serve.write(launch)
    if given.verbose:
        print(json.dumps(launch.engine.to_json(), indent=2), *launch.argv, file=sys.stderr)
    print(f"quire: {service.served_name} on {service.spec.device} from {launch.engine.model}", file=sys.stderr)
    serve.become(launch.argv, launch.environment)


if __name__ == "__main__":
    sys.exit(main())
