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

from quire_operator.cli import options
from quire_spec.errors import QuireError

CommandFunction = Callable[[argparse.Namespace], int]
"""Does what a command line says; the exit status."""

_DESCRIPTION = """\
Serve large language models with many LoRA adapters from one resource, LLMService.
The same file works on a cluster (kubectl apply -f) and on a laptop (quire serve -f)."""

_EPILOG = """\
examples:
  quire validate -f llmservice.yaml          is the file right?
  quire plan -f llmservice.yaml --gpu NVIDIA-L4      does it fit, and how does it run?
  quire render -f llmservice.yaml            the Kubernetes objects that it becomes
  quire serve -f llmservice.yaml             run it on this machine
  quire operate                              look after all LLMServices of a cluster
  quire serve --help                         how to reach what runs

All fields of the file, with their units, defaults and reasons: kubectl explain llmservice.spec --recursive"""

_VALIDATE_DESCRIPTION = """\
Check LLMService files against the CRD: fields, types, ranges and the rules between fields, as an API server would,
but all problems at once, each with its line, and without a cluster. Exit status 0: all right, 1: problems."""

_VALIDATE_EXAMPLES = """\
examples:
  quire validate -f llmservice.yaml examples/*.yaml
  helm template charts/mine | quire validate -f -
  quire validate -o json -f llmservice.yaml  [{"file", "ok", "problems": [{"line", "path", "rule", "fix"}]}]"""

_SERVE_DESCRIPTION = """\
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
    args = _build_parser().parse_args(arguments)
    try:
        status = int(args.run(args))
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


def _build_parser() -> argparse.ArgumentParser:
    formatter_class = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="quire", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=formatter_class
    )
    parser.add_argument("--version", action=_VersionAction, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_command(
        name: str, help_text: str, description: str, examples: str, run: CommandFunction
    ) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(
            name, help=help_text, description=description, epilog=examples, formatter_class=formatter_class
        )
        subparser.set_defaults(run=run, refuse=subparser.error)
        return subparser

    _add_validate_options(
        add_command("validate", "check LLMService files", _VALIDATE_DESCRIPTION, _VALIDATE_EXAMPLES, _validate)
    )
    options.add_plan_options(
        add_command("plan", "work out memory, context and GPUs", options.PLAN_DESCRIPTION, options.PLAN_EXAMPLES, _plan)
    )
    options.add_render_options(
        add_command(
            "render", "print the Kubernetes objects", options.RENDER_DESCRIPTION, options.RENDER_EXAMPLES, _render
        )
    )
    options.add_operate_options(
        add_command(
            "operate",
            "look after the LLMServices of a cluster",
            options.OPERATE_DESCRIPTION,
            options.OPERATE_EXAMPLES,
            _operate,
        )
    )
    _add_serve_options(add_command("serve", "run an LLMService here", _SERVE_DESCRIPTION, _SERVE_EXAMPLES, _serve))
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
    for name, purpose in (
        ("http", "requests over HTTP"),
        ("grpc", "requests over gRPC"),
        ("metrics", "the server's own metrics"),
        ("health", "health, all metrics, status"),
    ):
        parser.add_argument(
            f"--{name}-port",
            type=options.parse_port,
            metavar="PORT",
            help=f"{purpose} (default: spec.runtime.ports.{name})",
        )
    options.add_folder_options(parser)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="sockets and configuration (default: below /tmp)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="downloaded adapters (default: ~/.cache/quire)")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print the engine's configuration and the server's log"
    )


class _VersionAction(argparse.Action):
    """Asks the installed distribution for its version only when it is wanted: that takes longer than the rest."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"quire {version('quire-llm')}")
        parser.exit()


def _validate(args: argparse.Namespace) -> int:
    from quire_operator.cli.validate import validate_file

    reports = []
    for file in args.files:
        reports.append(validate_file(file))
        if args.output == "text":
            print(*reports[-1].render_lines(), sep="\n")
    if args.output == "json":
        print(json.dumps([file_report.to_json() for file_report in reports], indent=2, default=str))
    return 0 if all(found.ok for found in reports) else 1


def _plan(args: argparse.Namespace) -> int:
    from quire_operator.cli import plan

    return plan.run(args)


def _render(args: argparse.Namespace) -> int:
    from quire_operator.cli import render

    return render.run(args)


def _operate(args: argparse.Namespace) -> int:
    from quire_operator.cli import operate

    return operate.run(args)


def _serve(args: argparse.Namespace) -> int:
    from quire_operator.api import crd
    from quire_operator.api.llmservice import LLMService
    from quire_operator.cli import serve, serve_vllm

    serve_options = serve.ServeOptions(
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        health_port=args.health_port,
        volumes=tuple(args.volumes),
        run_dir=args.run_dir,
        cache_dir=args.cache_dir,
        secrets_dir=args.secrets_dir,
        verbose=args.verbose,
    )
    if args.vllm_repository is not None:
        if args.volumes:
            args.refuse("--volume is for -f: a vllm_backend repository names folders, and no claims")
        argv = list(serve_vllm.supervisor_argv(args.vllm_repository, args.device or "cuda", serve_options, os.environ))
        serve.require_packages()
        serve.exec_supervisor(argv, os.environ)
    if args.device is not None:
        args.refuse("--device is for --vllm-repository: an LLMService says it, as spec.device")
    manifest = crd.single_service(args.file)
    service = LLMService.from_body(crd.require_valid(manifest))
    launch_plan = serve.prepare(manifest, service, serve_options, os.environ)
    serve.require_packages()
    serve.write_run_dir(launch_plan)
    if args.verbose:
        print(json.dumps(launch_plan.engine.to_json(), indent=2), *launch_plan.argv, file=sys.stderr)
    print(f"quire: {service.served_name} on {service.spec.device} from {launch_plan.engine.model}", file=sys.stderr)
    serve.exec_supervisor(launch_plan.argv, launch_plan.environment)


if __name__ == "__main__":
    sys.exit(main())
