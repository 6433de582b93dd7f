# SPDX-License-Identifier: Apache-2.0
"""Options of the `quire` commands, with their help texts.

The module does not import any slow modules, because `quire --help` must be fast.

Called by main.py.
"""

import argparse
from pathlib import Path

from quire_operator.render.context import OPTIONAL_KINDS
from quire_spec.net.addresses import ANY_ADDRESS

OTHER_NAMES = {
    "--verbose": ("-v",),
    "--openai-port": ("--port",),
    "--tensor-parallel-size": ("-tp",),
    "--pipeline-parallel-size": ("-pp",),
    "--data-parallel-size": ("-dp",),
    "--quantization": ("-q",),
}
"""Other names of options of `quire serve`, as in vLLM."""

PLAN_DESCRIPTION = """\
Show how an LLMService will run: the number of GPUs, the context length, the batch sizes and how memory is used.
The command downloads only config.json and the index or the header of the weights. It needs no cluster and no GPU."""

PLAN_EXAMPLES = """\
examples:
  quire plan -f llmservice.yaml --gpu NVIDIA-L4            for a GPU product (node label nvidia.com/gpu.product)
  quire plan -f llmservice.yaml --gpu NVIDIA-L4 --count 2  with at most two GPUs for each replica
  quire plan -f llmservice.yaml                            for the GPU in spec.gpu, or a CPU with spec.device: CPU
  quire plan -f llmservice.yaml --model-config ./llama     offline, with a folder that contains config.json
  quire plan -f llmservice.yaml --volume models=/srv/models     spec.model.source.pvc.claimName: models
  kubectl get nodes -o json | quire plan -f llmservice.yaml --nodes -      for the smallest GPU of a cluster
  quire plan -f llmservice.yaml --gpu NVIDIA-L4 -o json    the content of status.plan

Exit status 0: the model fits, 1: it does not fit, or an error occurred. The error message suggests a fix."""


RENDER_DESCRIPTION = """\
Print the Kubernetes objects that the operator creates for an LLMService. No cluster is needed.
Only some clusters have the kinds that --with can list. Objects of these kinds are printed if the file requires them
and --with lists their kind."""

RENDER_EXAMPLES = """\
examples:
  quire render -f llmservice.yaml --gpu NVIDIA-L4
  quire render -f llmservice.yaml --gpu NVIDIA-L4 | kubectl diff -f -
  quire render -f llmservice.yaml --with PodMonitor ScaledObject InferencePool
  quire render -f llmservice.yaml --image registry.example/quire:gpu --secrets-dir ./secrets -o json

Each run creates a new key for the pods' admin port and prints it in a Secret. With --secrets-dir, the values of the
other Secrets are printed too. Objects that are not printed are listed on standard error.
If no operator runs in the cluster, apply the output in two steps. First, apply the Job and all objects before it, and
wait until the Job has completed. Then apply the other objects. The reason is that pods do not wait for the model: they
would occupy their GPUs during the download."""


ADAPTER_DESCRIPTION = """\
Change an adapter of an LLMService in a cluster. `rollback` writes the previous source of the adapter into the
LLMService. The pods keep the previous content loaded, so nothing is downloaded. A second rollback undoes the first.
`promote` gives one version of an adapter all its requests. The other versions get the weight 0 and stay loaded."""

ADAPTER_EXAMPLES = """\
examples:
  quire adapter rollback sql
  quire adapter rollback sql -n team --service support
  quire adapter promote sql v2

Credentials come from the first of these sources that exists: --kubeconfig, KUBECONFIG, the service account of the pod,
~/.kube/config."""

OPERATE_DESCRIPTION = """\
Run the operator: reconcile the Kubernetes objects of every LLMService in a cluster and write its status.
Pods keep serving when the operator is stopped. The Helm chart charts/quire installs the operator in a cluster."""

OPERATE_EXAMPLES = """\
examples:
  helm install quire charts/quire                          install it in the cluster, with the permissions it needs
  quire operate --log-format text                          run it here, as the user of your kubeconfig
  quire operate --namespace team-a --namespace team-b      watch only these namespaces
  curl -s localhost:8080/health/live                       200, or 503 with the failed check
  curl -s localhost:8080/metrics                           quire_operator_*: passes, errors, writes, queue, watches

Credentials come from the first of these sources that exists: --kubeconfig, KUBECONFIG, the service account of the pod,
and ~/.kube/config.
Run only one operator at a time. An operator that runs outside the cluster cannot reach pods, so it cannot push adapters
to them.
Exit status 0: SIGTERM or SIGINT stopped the operator, 1: a fatal error occurred; start the operator again."""


DOCTOR_DESCRIPTION = """\
Check what this machine has for quire serve: packages, GPU or CPU, memory, disk, the hub and the ports. It changes
nothing. Exit status 0: quire serve can run, 1: a line with FAIL names what is missing and the fix."""

DOCTOR_EXAMPLES = """\
examples:
  quire doctor"""

COMPLETION_DESCRIPTION = """\
Print a script that completes commands and options of quire in a shell."""

COMPLETION_EXAMPLES = """\
examples:
  source <(quire completion bash)                         in this shell
  quire completion bash > ~/.local/share/bash-completion/completions/quire
  quire completion zsh > "${fpath[1]}/_quire\""""

SIMULATE_DESCRIPTION = """\
Predict latencies, goodput and cost of a service before you buy its GPUs. The simulator runs the engine's own scheduler
and prefix cache on a virtual clock. It needs a recording of the same model on the same kind of device.

  record   run a trace on the model of an LLMService on this machine, and write what each step took
  fit      fit the time of a step to recordings
  run      simulate any number of replicas with a trace

A trace has one JSON object per line, in the format of Mooncake's traces; times are in milliseconds:
  {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}"""

SIMULATE_EXAMPLES = """\
examples:
  quire simulate record -f llmservice.yaml --trace monday.jsonl -o recording.jsonl
  quire simulate fit recording.jsonl -o steps.json
  quire simulate run --model steps.json --trace tuesday.jsonl                     one replica, as it was recorded
  quire simulate run -f llmservice.yaml --model steps.json --trace tuesday.jsonl  the planned replicas and KV cache
  quire simulate run --model steps.json --trace tuesday.jsonl --replicas auto --slo ttft=500ms,itl=50ms
  quire simulate run --model steps.json --trace tuesday.jsonl --rate-scale 2 --replicas 8 --price 2.50 -o json

docs/simulation.md explains each number and how far to trust it.
Exit status 0: done, 1: it failed, or with --strict more than 5 % of the time is extrapolated, 2: wrong input."""


BATCH_DESCRIPTION = """\
Run the requests of a file: on the model and adapters of an LLMService on this machine (-f), or on any server of the
OpenAI API (--url). The files have the format of OpenAI's Batch API. Each line of the input is one request:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "sql", "messages": [{"role": "user", "content": "..."}]}}
A model can be the base or an adapter; one file can name several. Other urls: /v1/completions, /v1/responses.

Each line of the output is one result, in the order in which requests end:
  {"id": "...", "custom_id": "1", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}
The error file contains lines that are not requests, and failed requests.

To continue after any stop (Ctrl-C, kill -9, a full disk), run the same command again. Lines with a result or an error
are not run again, and a line appended to the input is run. To repeat the failed lines, remove the error file first."""

BATCH_EXAMPLES = """\
examples:
  quire batch -f llmservice.yaml -i requests.jsonl -o results.jsonl
  quire batch --url http://localhost:8004 -i requests.jsonl -o results.jsonl
  OPENAI_API_KEY=... quire batch --url https://llm.example -i requests.jsonl -o results.jsonl

The command reads 4,096 lines at a time and sorts them by the model and by the start of the prompt. As a result,
requests that use the same adapter or begin with the same prompt run together.
With --url, requests get priority 100. If the server schedules by priority (spec.engine.schedulingPolicy: priority),
they run after other requests.
If the server is overloaded or the connection is lost, the command repeats the request.
Exit status 0: every line has a result, 1: the run stopped early; run the command again, 2: wrong usage, 3: some lines
failed."""


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `quire simulate`."""
    commands = parser.add_subparsers(dest="simulate_command", metavar="record|fit|run", required=True)
    record = commands.add_parser("record", help="run a trace on this machine, and write what each step took")
    record.add_argument("-f", "--file", required=True, help="the LLMService; its device must be on this machine")
    add_folder_options(record)
    _add_trace_options(record)
    record.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the recording")
    fit = commands.add_parser("fit", help="fit the time of a step to recordings")
    fit.add_argument("recordings", type=Path, nargs="+", metavar="RECORDING", help="results of record")
    fit.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the step model")
    run = commands.add_parser("run", help="simulate any number of replicas with a trace")
    run.add_argument("--model", type=Path, required=True, metavar="FILE", help="the step model: result of fit")
    run.add_argument("-f", "--file", help="the LLMService whose plan is simulated (default: the engine as recorded)")
    _add_defaults_option(run)
    add_model_options(run)
    _add_trace_options(run)
    run.add_argument("--rate-scale", metavar="X", help="multiply the rate of arrivals by this number (default: 1)")
    run.add_argument(
        "--replicas", metavar="N|auto", help="pods; auto: the fewest that reach --goodput (default: of -f)"
    )
    run.add_argument(
        "--router",
        metavar="POLICY",
        help="how requests are spread over pods: least-requests (default), round-robin, prefix-aware",
    )
    run.add_argument(
        "--costs", metavar="TIMES", help="times that replace recorded ones, such as adapter-copy=5ms,block-copy=30us"
    )
    run.add_argument("--slo", metavar="LIMITS", help="limits of a good request (default: ttft=500ms,itl=50ms)")
    run.add_argument("--goodput", metavar="SHARE", help="share of good requests for --replicas auto (default: 0.99)")
    run.add_argument("--price", metavar="DOLLARS", help="price of one replica for an hour; prints the cost")
    run.add_argument("-o", "--output", dest="format", choices=("text", "json"), help="format of the result")
    run.add_argument("--strict", action="store_true", help="fail if more than 5 %% of the time is extrapolated")


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="the requests, one JSON object a line"
    )
    parser.add_argument("--trace-block-size", metavar="TOKENS", help="tokens of each of hash_ids (default: 512)")
    parser.add_argument("--limit", metavar="N", help="use only the first N requests")


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire batch`."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("-f", "--file", help="the LLMService to run here; paths in it are relative to its folder")
    where.add_argument(
        "--url",
        help="URL of a server with the OpenAI API, such as http://localhost:8004; use this option instead of -f",
    )
    parser.add_argument(
        "-i", "--input", type=Path, required=True, metavar="FILE", help="file with one request on each line"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="file to which each result is appended"
    )
    parser.add_argument(
        "--error-file",
        type=Path,
        metavar="FILE",
        help="file to which failed lines are written (default: the name of the output file, but with the suffix "
        ".errors.jsonl)",
    )
    parser.add_argument(
        "--max-inflight",
        type=parse_count,
        metavar="N",
        help="maximum number of requests that are open at the same time (default: 64 with --url, otherwise twice "
        "spec.engine.maxNumSeqs)",
    )
    parser.add_argument(
        "--retry-timeout",
        type=_parse_seconds,
        metavar="SECONDS",
        help="stop the run if no request has succeeded for this many seconds (default: 600)",
    )
    server = parser.add_argument_group("with --url")
    server.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that contains the API key (default: OPENAI_API_KEY)"
    )
    server.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="priority of requests that do not set one. Requests with a lower number run first. With 0, no priority is "
        "sent (default: 100)",
    )
    server.add_argument(
        "--timeout", type=_parse_seconds, metavar="SECONDS", help="time limit of each request (default: 3600)"
    )
    local = parser.add_argument_group("with -f")
    add_folder_options(local)
    local.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for sockets and configuration (default: in /tmp)"
    )
    local.add_argument("--cache-dir", type=Path, metavar="DIR", help="folder for downloads (default: ~/.cache/quire)")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print which requests are repeated, and print the engine's log",
    )


def _add_defaults_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--defaults",
        type=Path,
        metavar="FILE",
        help="YAML file with defaults for specs, as in the chart's value `defaults` (default: none)",
    )


def add_adapter_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire adapter`."""
    parser.add_argument("action", choices=("rollback", "promote"), help="what to do, as described above")
    parser.add_argument("name", metavar="NAME", help="name of the adapter")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="for promote: the version that gets all requests")
    parser.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: that of the kubeconfig)")
    parser.add_argument("--service", metavar="NAME", help="the LLMService (default: the one that has the adapter)")
    _add_cluster_options(parser)


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig file (default: as described below)")
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: its current context)")


def add_operate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire operate`."""
    _add_defaults_option(parser)
    parser.add_argument(
        "-n",
        "--namespace",
        dest="namespaces",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="namespace to watch; can be repeated (default: all namespaces)",
    )
    _add_cluster_options(parser)
    for device in ("gpu", "cpu"):
        parser.add_argument(
            f"--{device}-image",
            default=f"quire:{device}",
            metavar="IMAGE",
            help=f"image of {device.upper()} pods if spec.runtime.image is not set (default: quire:{device})",
        )
    parser.add_argument(
        "--source-networks",
        metavar="CIDR,...",
        help="private networks from which the operator reads the sources of models, in addition to public addresses "
        "(default: all private networks, but never loopback or link-local addresses)",
    )
    parser.add_argument(
        "--workers",
        type=parse_count,
        default=8,
        metavar="N",
        help="number of services that are reconciled at the same time (default: 8)",
    )
    parser.add_argument(
        "--identity",
        metavar="NAME",
        help="identity of this installation, such as NAMESPACE/RELEASE; services that another operator owns are not "
        "changed (default: the namespace of the operator, or the name of this machine)",
    )
    parser.add_argument(
        "--resync",
        type=_parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="reconcile each service again after at most this many seconds (default: 600)",
    )
    parser.add_argument(
        "--host", default=ANY_ADDRESS, help="address on which health and metrics are served (default: all addresses)"
    )
    parser.add_argument(
        "--port",
        type=parse_port_or_zero,
        default=8080,
        help="port on which health and metrics are served; 0 selects any free port (default: 8080)",
    )
    parser.add_argument(
        "--liveness-port",
        type=parse_port_or_zero,
        default=8081,
        metavar="PORT",
        help="port of kopf's liveness endpoint, /health/live; with 0, it is not served (default: 8081)",
    )
    parser.add_argument("--log-format", choices=("json", "text"), default="json", help="format of the log")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="lowest level of the messages that are logged (default: info)",
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire plan`."""
    _add_defaults_option(parser)
    parser.add_argument("-f", "--file", required=True, help="the LLMService; - for standard input")
    add_model_options(parser)
    parser.add_argument(
        "--pipeline-parallel-size",
        type=parse_count,
        metavar="N",
        help="number of pipeline stages of quire serve --pipeline-parallel-size, all on one machine (default: one on "
        "each of spec.engine.pipelineParallelSize nodes); the memory is that of the stage that has the fewest KV "
        "tokens",
    )
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format of the plan")


def add_render_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire render`."""
    _add_defaults_option(parser)
    parser.add_argument("-f", "--file", required=True, help="the LLMService; - for standard input")
    add_model_options(parser)
    parser.add_argument("--image", help="image of the pods if spec.runtime.image is not set")
    parser.add_argument(
        "--with",
        dest="kinds",
        nargs="+",
        action="extend",
        choices=OPTIONAL_KINDS,
        default=[],
        metavar="KIND",
        help=f"optional kinds that the cluster has: {', '.join(OPTIONAL_KINDS)}",
    )
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="format of the objects")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire plan` and `quire render` that specify the model and the GPU."""
    parser.add_argument("--gpu", metavar="PRODUCT", help="GPU product; overrides spec.gpu.product")
    parser.add_argument(
        "--count", type=int, choices=(1, 2, 4, 8), help="number of GPUs for each replica; overrides spec.gpu.count"
    )
    parser.add_argument(
        "--nodes", metavar="FILE", help="file with the output of kubectl get nodes -o json; - for standard input"
    )
    parser.add_argument(
        "--model-config",
        type=Path,
        metavar="PATH",
        help="folder of the model, or its config.json; the command reads it instead of spec.model.source",
    )
    add_folder_options(parser)


def add_folder_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that specify local folders for claims and Secrets."""
    parser.add_argument(
        "--volume",
        dest="volumes",
        type=_parse_volume,
        action="append",
        default=[],
        metavar="CLAIM=FOLDER",
        help="local folder that replaces a PersistentVolumeClaim; can be repeated",
    )
    parser.add_argument(
        "--secrets-dir",
        type=Path,
        metavar="DIR",
        help="folder that contains the Secrets. DIR/SECRET/KEY is a file with the value of one key (default: the "
        "command does not read Secrets, and uses only HF_TOKEN)",
    )


def parse_port(text: str) -> int:
    """Parse a port number."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 1 to 65535")
    return int(text)


def parse_port_or_zero(text: str) -> int:
    """Parse a port number, or 0."""
    return 0 if text == "0" else parse_port(text)


def parse_count(text: str) -> int:
    """Parse a number that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def parse_count_or_zero(text: str) -> int:
    """Parse a number that is at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def parse_gib(text: str) -> float:
    """Parse a size in GiB, which can be 0."""
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GiB")
    return size


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds greater than 0")
    return seconds


def _parse_volume(text: str) -> tuple[str, Path]:
    claim, separator, folder = text.partition("=")
    if not (claim and separator and folder):
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form CLAIM=FOLDER, such as models=/srv/models")
    return claim, parse_folder(folder)


def parse_folder(text: str) -> Path:
    """Return the absolute path of an existing folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; create it, or correct the path")
    return Path(text).absolute()


def parse_file(text: str) -> Path:
    """Return the absolute path of an existing file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; create it, or correct the path")
    return Path(text).absolute()
