# SPDX-License-Identifier: Apache-2.0
"""The `quire` command: reads arguments, calls one function for each subcommand, prints, and decides the exit status.

Modules are imported where they are used: `quire --version` needs no YAML, `quire validate` nothing of the server.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from quire_spec.errors import ConfigError

_ABOUT = """\
Serve large language models with many LoRA adapters from one resource, LLMService.
The same file works on a cluster (kubectl apply -f) and on a laptop (quire serve -f)."""

_START = """\
examples:
  quire validate -f llmservice.yaml          is the file right?
  quire serve -f llmservice.yaml             run it on this machine
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
  quire serve -f llmservice.yaml --host 0.0.0.0                    also for other machines; nothing is encrypted

Stop it with Ctrl-C: requests that are running get spec.rollout.drainSeconds to finish.
Adapters in the file follow the file at the next start."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 done, 1 something is wrong, 2 used wrongly (from argparse)."""
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except ConfigError as error:
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

    validate = commands.add_parser(
        "validate",
        help="check LLMService files",
        description=_VALIDATE,
        epilog=_VALIDATE_EXAMPLES,
        formatter_class=style,
    )
    validate.add_argument(
        "-f",
        "--file",
        dest="files",
        nargs="+",
        action="extend",
        required=True,
        help="files to check; - is standard input",
    )
    validate.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the report")
    validate.set_defaults(run=_validate)

    serve = commands.add_parser(
        "serve", help="run an LLMService here", description=_SERVE, epilog=_SERVE_EXAMPLES, formatter_class=style
    )
    _add_serve_options(serve)
    serve.set_defaults(run=_serve)
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", required=True, help="the LLMService; relative paths in it start at its folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    for name, what in (
        ("http", "requests over HTTP"),
        ("grpc", "requests over gRPC"),
        ("metrics", "the server's own metrics"),
        ("health", "health, all metrics, status"),
    ):
        parser.add_argument(
            f"--{name}-port", type=_port, metavar="PORT", help=f"{what} (default: spec.runtime.ports.{name})"
        )
    parser.add_argument(
        "--volume",
        dest="volumes",
        type=_volume,
        action="append",
        default=[],
        metavar="CLAIM=FOLDER",
        help="folder that stands for a PersistentVolumeClaim; repeatable",
    )
    parser.add_argument(
        "--secrets-dir", type=Path, metavar="DIR", help="DIR/SECRET/KEY are the Secrets (default: HF_TOKEN or none)"
    )
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


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 1 to 65535")
    return int(text)


def _volume(text: str) -> tuple[str, Path]:
    claim, equals, folder = text.partition("=")
    if not (claim and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not CLAIM=FOLDER, such as models=/srv/models")
    if not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{folder!r} is not a folder; make it, or correct the path")
    return claim, Path(folder)


def _validate(options: argparse.Namespace) -> int:
    from quire_operator.validate import report

    reports = []
    for file in options.files:
        reports.append(report(file))
        if options.output == "text":
            print(*reports[-1].lines(), sep="\n")
    if options.output == "json":
        print(json.dumps([found.to_json() for found in reports], indent=2, default=str))
    return 0 if all(found.ok for found in reports) else 1


def _serve(options: argparse.Namespace) -> int:
    from quire_operator import crd, serve
    from quire_operator.manifest import read
    from quire_operator.service import LLMService

    documents = [document for document in read(options.file) if crd.is_service(document.body)]
    if len(documents) != 1:
        raise ConfigError(f"{options.file}: has {len(documents)} LLMServices and one server serves one; split the file")
    service = LLMService.from_body(crd.valid(documents[0]))
    given = serve.Options(
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        health_port=options.health_port,
        volumes=tuple(options.volumes),
        run_dir=options.run_dir,
        cache_dir=options.cache_dir,
        secrets_dir=options.secrets_dir,
        verbose=options.verbose,
    )
    launch = serve.prepare(documents[0], service, given, os.environ)
    serve.missing_packages()
    serve.write(launch)
    if options.verbose:
        print(json.dumps(launch.engine.to_json(), indent=2), *launch.argv, file=sys.stderr)
    print(f"quire: {service.served_name} on {service.spec.device} from {launch.engine.model}", file=sys.stderr)
    serve.become(launch)
    raise AssertionError("exec returned")


if __name__ == "__main__":
    sys.exit(main())
