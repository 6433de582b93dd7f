# SPDX-License-Identifier: Apache-2.0
"""The `quire` command: parses arguments, runs the function of the subcommand and sets the exit status.

Each function imports the modules that it needs. Therefore, `quire --version` does not load YAML, and `quire validate`
does not load the server.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from quire_operator.cli import environment, options, pod_options
from quire_operator.cli.bench import options as bench_options
from quire_operator.cli.chat import options as chat_options
from quire_operator.cli.model import options as model_options
from quire_spec.errors import QuireError

CommandFunction = Callable[[argparse.Namespace], int]
"""A function that runs a subcommand and returns its exit status."""

_DESCRIPTION = """\
Serve large language models with many LoRA adapters. One resource, LLMService, describes a model and its adapters.
The same file works in a cluster (kubectl apply -f) and on a laptop (quire serve -f)."""

_EPILOG = f"""\
examples:
  quire validate -f llmservice.yaml                check the file
  quire plan -f llmservice.yaml --gpu NVIDIA-L4    show whether it fits on a GPU, and how it runs
  quire render -f llmservice.yaml                  print the Kubernetes objects
  quire serve -f llmservice.yaml                   run it on this machine
  quire chat                                       chat with what runs on this machine
  quire batch -f llmservice.yaml -i in.jsonl -o out.jsonl     run a file of requests
  quire bench --concurrency 1,8,64                 measure latencies and throughput of a running server
  quire simulate run --model steps.json --trace trace.jsonl   predict latencies and cost
  quire adapter rollback sql                       give an adapter in a cluster its previous content
  quire operate                                    reconcile all LLMServices of a cluster
  quire doctor                                     check what this machine has for quire serve
  source <(quire completion bash)                  complete commands and options with the Tab key

{environment.HELP}
To list all fields with their units, defaults and reasons: kubectl explain llmservice.spec --recursive"""

_VALIDATE_DESCRIPTION = """\
Check LLMService files against the CRD: fields, types, ranges and the rules between fields. No cluster is needed.
All problems are reported at once, each with its line. Exit status 0: valid, 1: problems were found."""

_VALIDATE_EXAMPLES = """\
examples:
  quire validate -f llmservice.yaml examples/*.yaml
  helm template charts/mine | quire validate -f -
  quire validate -o json -f llmservice.yaml  [{"file", "ok", "problems": [{"line", "path", "rule", "fix"}]}]"""

_SERVE_DESCRIPTION = """\
Run an LLMService on this machine: Triton Inference Server, the engine, and the adapters in the file.
The model comes from a folder (path), from the Hugging Face hub, from a bucket or a web server, or from a claim, for
which --volume gives a folder."""

_SERVE_EXAMPLES = """\
examples:
  quire serve -f examples/llmservice.yaml
  curl -s localhost:8003/health/ready        200 when the model and the adapters are loaded, else 503 and the reason
  curl -s localhost:8000/v2/models/tales/generate -d '{"text_input": "Once upon a time", "max_tokens": 32}'
  curl -s localhost:8000/v2/models/pirate/generate -d '{"text_input": "Hello", "max_tokens": 32}'   an adapter

  quire serve -f llmservice.yaml --volume models=/srv/models       spec.model.source.pvc.claimName: models
  quire serve --vllm-repository model_repository/vllm_model        an unchanged vllm_backend model
  quire serve -f llmservice.yaml --model-repository ./models       further Triton models beside the LLM
  quire serve -f llmservice.yaml --host 0.0.0.0                    accept other machines; connections are unencrypted

Press Ctrl-C to stop. Requests that are running then have spec.rollout.drainSeconds to finish.
When the file of -f changes, its adapters are loaded and unloaded. A line of the log names other fields that changed:
they need a restart. A file with an error changes nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    The status is 0 for success, 1 for a failure and 2 for a command line that is wrong (from argparse).
    """
    parser = _build_parser()
    given = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(environment.with_environment(parser, given, os.environ))
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
        # The program that reads our output (head, less) closed the pipe. Without the next line, Python would report the
        # error again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _build_parser() -> argparse.ArgumentParser:
    formatter_class = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("quire", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=formatter_class)
    parser.add_argument("--version", action=_VersionAction, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_command(run: CommandFunction, help_text: str, description: str, examples: str) -> argparse.ArgumentParser:
        texts: dict[str, Any] = {"help": help_text, "description": description, "epilog": examples}
        subparser = subparsers.add_parser(run.__name__[1:], formatter_class=formatter_class, **texts)
        subparser.set_defaults(run=run, usage_error=subparser.error)
        return subparser

    command = add_command(_validate, "check LLMService files", _VALIDATE_DESCRIPTION, _VALIDATE_EXAMPLES)
    _add_validate_options(command)
    plan_help = "show GPUs, context length and memory"
    options.add_plan_options(add_command(_plan, plan_help, options.PLAN_DESCRIPTION, options.PLAN_EXAMPLES))
    render_help = "print the Kubernetes objects"
    options.add_render_options(add_command(_render, render_help, options.RENDER_DESCRIPTION, options.RENDER_EXAMPLES))
    adapter_help = "roll an adapter in a cluster back, or promote a version"
    command = add_command(_adapter, adapter_help, options.ADAPTER_DESCRIPTION, options.ADAPTER_EXAMPLES)
    options.add_adapter_options(command)
    operate_help = "run the operator of a cluster"
    command = add_command(_operate, operate_help, options.OPERATE_DESCRIPTION, options.OPERATE_EXAMPLES)
    options.add_operate_options(command)
    _add_serve_options(add_command(_serve, "run an LLMService on this machine", _SERVE_DESCRIPTION, _SERVE_EXAMPLES))
    chat_help = "chat with a model in the terminal"
    command = add_command(_chat, chat_help, chat_options.CHAT_DESCRIPTION, chat_options.CHAT_EXAMPLES)
    chat_options.add_chat_options(command)
    batch_help = "run a file of requests, here or on a server"
    options.add_batch_options(add_command(_batch, batch_help, options.BATCH_DESCRIPTION, options.BATCH_EXAMPLES))
    bench_help = "measure latencies and throughput of a server"
    command = add_command(_bench, bench_help, bench_options.BENCH_DESCRIPTION, bench_options.BENCH_EXAMPLES)
    bench_options.add_bench_options(command)
    simulate_help = "predict latencies and cost from a recording"
    command = add_command(_simulate, simulate_help, options.SIMULATE_DESCRIPTION, options.SIMULATE_EXAMPLES)
    options.add_simulate_options(command)
    add_command(_doctor, "check this machine", options.DOCTOR_DESCRIPTION, options.DOCTOR_EXAMPLES)
    command = add_command(
        _completion, "print the completion for a shell", options.COMPLETION_DESCRIPTION, options.COMPLETION_EXAMPLES
    )
    command.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def _add_validate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--file",
        dest="files",
        nargs="+",
        action="extend",
        required=True,
        help="files to check; - for standard input",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format of the report")


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder with a checkpoint, a repository on the Hugging Face hub, or a URL (s3://, gs://, oci://, "
        "https://); or the file of an LLMService, as -f",
    )
    source.add_argument("-f", "--file", help="the LLMService; paths in it are relative to its folder")
    source.add_argument(
        "--vllm-repository",
        type=Path,
        metavar="DIR",
        help="use this option instead of -f to serve a model of NVIDIA's vllm_backend; DIR is the model's folder, "
        "which contains 1/model.json and has the name of the model",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="device for MODEL (default: cuda if this machine has a GPU), and for --vllm-repository if model.json does "
        "not set one (default: cuda)",
    )
    model_options.add_model_options(parser)
    pod_options.add_pod_options(parser)
    options.add_folder_options(parser)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for sockets and configuration (default: in /tmp)"
    )
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="folder for downloads (default: ~/.cache/quire)")
    parser.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="I",
        help="number of this machine with --nnodes; only machine 0 serves requests (default: 0)",
    )


class _VersionAction(argparse.Action):
    """Prints the version of the installed distribution. The version is read only for --version, because reading it is
    slow.
    """

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
    return 0 if all(file_report.ok for file_report in reports) else 1


def _plan(args: argparse.Namespace) -> int:
    from quire_operator.cli import plan

    return plan.run(args)


def _render(args: argparse.Namespace) -> int:
    from quire_operator.cli import render

    return render.run(args)


def _adapter(args: argparse.Namespace) -> int:
    from quire_operator.cli import adapter

    return adapter.run(args)


def _operate(args: argparse.Namespace) -> int:
    from quire_operator.cli import operate

    return operate.run(args)


def _chat(args: argparse.Namespace) -> int:
    from quire_operator.cli.chat import command

    return command.run(args)


def _batch(args: argparse.Namespace) -> int:
    from quire_operator.cli import batch

    return batch.run(args)


def _bench(args: argparse.Namespace) -> int:
    from quire_operator.cli.bench import command

    return command.run(args)


def _simulate(args: argparse.Namespace) -> int:
    from quire_operator.cli import simulate

    return simulate.run(args)


def _doctor(args: argparse.Namespace) -> int:
    from quire_operator.cli.doctor import checks

    return checks.run(args)


def _completion(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_build_parser(), args.shell))
    return 0


def _serve(args: argparse.Namespace) -> int:
    from quire_operator.cli import serve, serve_vllm, service_file

    fields = pod_options.pod_fields(args)
    if args.model is not None and model_options.is_service_file(args.model):
        args.file, args.model = args.model, None
    if args.model is None and (given := model_options.given_options(args)):
        args.usage_error(f"{given[0]} requires MODEL; in a file, set the field of the LLMService")
    folders = args.run_dir, args.cache_dir, args.secrets_dir
    serve_options = serve.ServeOptions(fields, args.volumes, *folders, node_rank=args.node_rank)
    watched = None
    if args.model is not None:
        from quire_operator.cli.model import form as model_form
        from quire_operator.cli.model import gguf_file

        cache_dir = serve_options.cache_dir or serve.default_cache_dir(os.environ)
        args.model = gguf_file.served_folder(args.model, cache_dir)
        document = model_form.build(args, fields, has_gpu := serve.has_gpu())
        if args.save is not None:
            return model_form.save(document, args.save, fields)
        launch_plan = model_form.prepare(document, args, serve_options, os.environ)
        model_form.announce(document, args, launch_plan, has_gpu)
    elif args.vllm_repository is not None:
        if args.volumes:
            args.usage_error("--volume cannot be used with --vllm-repository: a vllm_backend repository has no claims")
        for field in fields:
            section, _, name = field.partition(".")
            if section == "engine":
                option = pod_options.option_of(field)
                args.usage_error(f"{option} cannot be used with --vllm-repository; set {name} in model.json")
        launch_plan = serve_vllm.prepare(args.vllm_repository, args.device or "cuda", serve_options, os.environ)
    elif args.device is not None:
        args.usage_error("--device requires MODEL or --vllm-repository; for an LLMService, set spec.device")
    else:
        read = partial(service_file.read, args.file, serve_options, os.environ)
        watched = read()
        launch_plan = watched.launch_plan
    config = launch_plan.config
    if not 0 <= args.node_rank < config.engine.nnodes:
        args.usage_error(f"--node-rank: must be from 0 to {config.engine.nnodes - 1}, one less than --nnodes")
    argv = launch_plan.argv if args.node_rank == 0 else launch_plan.node_argv(args.node_rank)
    serve.require_packages(config.openai is not None)
    serve.download_models(launch_plan, args.secrets_dir)
    serve.write_run_dir(launch_plan)
    if config.server.verbose:
        document = config.to_json() | {"engine": config.engine.to_json()}
        print(json.dumps(document, indent=2), *argv, file=sys.stderr)
    print(f"quire: {config.servedName} on {config.engine.device} from {config.engine.model}", file=sys.stderr)
    if watched is not None and args.file != "-" and args.node_rank == 0:
        service_file.watch(Path(args.file), read, watched)
    return serve.exec_supervisor(argv, launch_plan.environment)


if __name__ == "__main__":
    sys.exit(main())
