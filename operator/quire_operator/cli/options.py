# SPDX-License-Identifier: Apache-2.0
"""Command-line options, with their texts; imports nothing that would make `quire --help` slow. Called by cli.py."""

import argparse
from pathlib import Path

from quire_operator.render.context import OPTIONAL_KINDS
from quire_spec.net.addresses import ANY_ADDRESS

PLAN_DESCRIPTION = """\
Work out how an LLMService runs before it does: how many GPUs, the context length, batch sizes, and where each GiB goes.
Nothing is downloaded but config.json and the index or header of the weights; no cluster and no GPU is needed."""

PLAN_EXAMPLES = """\
examples:
  quire plan -f llmservice.yaml --gpu NVIDIA-L4            on a kind of GPU, as nvidia.com/gpu.product names it
  quire plan -f llmservice.yaml --gpu NVIDIA-L4 --count 2  with two of them for each replica
  quire plan -f llmservice.yaml                            on the GPU of spec.gpu, or on a CPU with spec.device: CPU
  quire plan -f llmservice.yaml --model-config ./llama     offline: a folder with config.json, or config.json itself
  quire plan -f llmservice.yaml --volume models=/srv/models     spec.model.source.pvc.claimName: models
  kubectl get nodes -o json | quire plan -f llmservice.yaml --nodes -      on the smallest GPU of a cluster
  quire plan -f llmservice.yaml --gpu NVIDIA-L4 -o json    exactly what the operator writes to status.plan

Exit status 0: it fits, 1: it does not, or something is wrong; the message says what would do."""


RENDER_DESCRIPTION = """\
Print the Kubernetes objects of an LLMService as the operator makes them, planned for its GPU. No cluster is needed.
Kinds that only some clusters have are printed when --with names them, and when the file asks for them."""

RENDER_EXAMPLES = """\
examples:
  quire render -f llmservice.yaml --gpu NVIDIA-L4
  quire render -f llmservice.yaml --gpu NVIDIA-L4 | kubectl diff -f -
  quire render -f llmservice.yaml --with PodMonitor ScaledObject InferencePool
  quire render -f llmservice.yaml --image registry.example/quire:gpu --secrets-dir ./secrets -o json

Each run makes a new key for the pods' admin port and prints it in a Secret; with --secrets-dir the values of the other
Secrets are printed too. What is left out, and why, goes to standard error.
Without an operator, apply the Job and what is before it first: pods do not wait for the model, and take their GPUs."""


OPERATE_DESCRIPTION = """\
Look after the LLMServices of a cluster: make the Kubernetes objects of each, keep them as they should be, and say in
its status how it is. Runs until it is stopped; what serves goes on serving meanwhile. charts/quire installs it."""

OPERATE_EXAMPLES = """\
examples:
  helm install quire charts/quire                          the usual way: in the cluster, with the rights that it needs
  quire operate --log-format text                          from here, as whoever your kubeconfig says you are
  quire operate --namespace team-a --namespace team-b      these namespaces only
  curl -s localhost:8080/health/live                       200, or 503 and what hangs
  curl -s localhost:8080/metrics                           quire_operator_*: passes, errors, writes, queue, watches

It logs in as the pod that it runs in, or by --kubeconfig, KUBECONFIG or ~/.kube/config. Run one at a time.
From outside of the cluster it reaches no pods: adapters are not pushed then.
Exit status 0: stopped by SIGTERM or SIGINT, 1: something ended that must not; start it again."""


def add_operate_options(parser: argparse.ArgumentParser) -> None:
    """The options of `quire operate`."""
    parser.add_argument(
        "-n",
        "--namespace",
        dest="namespaces",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="namespace to look after; repeatable (default: all)",
    )
    parser.add_argument("--kubeconfig", metavar="FILE", help="cluster and user (default: as described below)")
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: its current one)")
    for device in ("gpu", "cpu"):
        parser.add_argument(
            f"--{device}-image",
            default=f"quire:{device}",
            metavar="IMAGE",
            help=f"image of pods of device {device.upper()} whose spec names none (default: quire:{device})",
        )
    parser.add_argument(
        "--workers",
        type=_parse_count,
        default=8,
        metavar="N",
        help="services that are worked on at a time (default: 8)",
    )
    parser.add_argument(
        "--resync",
        type=_parse_seconds,
        default=600.0,
        metavar="SECONDS",
        help="look at each service at least so often, changed or not (default: 600)",
    )
    parser.add_argument(
        "--host", default=ANY_ADDRESS, help="address of health and metrics (default: all, of the pod's family)"
    )
    parser.add_argument(
        "--port", type=parse_port_or_zero, default=8080, help="their port; 0: a free one (default: 8080)"
    )
    parser.add_argument(
        "--liveness-port",
        type=parse_port_or_zero,
        default=8081,
        metavar="PORT",
        help="port of kopf's liveness endpoint, /health/live; 0: not served (default: 8081)",
    )
    # Accepted and ignored for one release: charts before 0.2 pass it.
    parser.add_argument("--lease", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--log-format", choices=("json", "text"), default="json", help="form of the log")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="least level"
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """The options of `quire plan`."""
    parser.add_argument("-f", "--file", required=True, help="the LLMService; - is standard input")
    add_model_options(parser)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the plan")


def add_render_options(parser: argparse.ArgumentParser) -> None:
    """The options of `quire render`."""
    parser.add_argument("-f", "--file", required=True, help="the LLMService; - is standard input")
    add_model_options(parser)
    parser.add_argument("--image", help="image of the pods, where spec.runtime.image names none")
    parser.add_argument(
        "--with",
        dest="kinds",
        nargs="+",
        action="extend",
        choices=OPTIONAL_KINDS,
        default=[],
        metavar="KIND",
        help=f"kinds that the cluster has: {', '.join(OPTIONAL_KINDS)}",
    )
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="form of the objects")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that say where model and GPU are known from; `quire render` has them too."""
    parser.add_argument("--gpu", metavar="PRODUCT", help="kind of GPU, instead of spec.gpu.product")
    parser.add_argument("--count", type=int, choices=(1, 2, 4, 8), help="GPUs of a replica, instead of spec.gpu.count")
    parser.add_argument("--nodes", metavar="FILE", help="output of kubectl get nodes -o json; - is standard input")
    parser.add_argument(
        "--model-config", type=Path, metavar="PATH", help="a model's folder, or its config.json, instead of the source"
    )
    add_folder_options(parser)


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """Where claims and Secrets are on this machine."""
    parser.add_argument(
        "--volume",
        dest="volumes",
        type=_parse_volume,
        action="append",
        default=[],
        metavar="CLAIM=FOLDER",
        help="folder that stands for a PersistentVolumeClaim; repeatable",
    )
    parser.add_argument(
        "--secrets-dir", type=Path, metavar="DIR", help="DIR/SECRET/KEY are the Secrets (default: HF_TOKEN or none)"
    )


def parse_port(text: str) -> int:
    """A port's number."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 1 to 65535")
    return int(text)


def parse_port_or_zero(text: str) -> int:
    """A port's number, or 0."""
    return 0 if text == "0" else parse_port(text)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _parse_volume(text: str) -> tuple[str, Path]:
    claim, separator, folder = text.partition("=")
    if not (claim and separator and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not CLAIM=FOLDER, such as models=/srv/models")
    if not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{folder!r} is not a folder; make it, or correct the path")
    return claim, Path(folder)
