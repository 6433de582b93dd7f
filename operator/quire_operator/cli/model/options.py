# SPDX-License-Identifier: Apache-2.0
"""Options of `quire serve MODEL`, which have the names of vLLM's options.

Each row of the table names the field of the LLMService, so that an option needs no other code. Called by main.py, which
parses them, and by form.py.
"""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from quire_operator.cli.model.other_vllm_options import OTHER_VLLM_OPTIONS
from quire_operator.cli.options import OTHER_NAMES, parse_count

DEST_PREFIX = "spec."
_DTYPES = {"auto": None, "half": "float16", "float": "float32"}
"""Further names that vLLM has. With auto, the checkpoint and the device decide, as without the option."""


def _parse_dtype(text: str) -> str | None:
    return _DTYPES.get(text, text)


_COUNT: dict[str, Any] = {"type": parse_count, "metavar": "N"}
SPEC_OPTIONS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("--max-model-len", "engine.maxModelLen", _COUNT, "maximum number of tokens of a prompt and its output"),
    ("--gpu-memory-utilization", "engine.gpuMemoryUtilization", {"metavar": "F"}, "share of the GPU's memory to use"),
    ("--max-num-seqs", "engine.maxNumSeqs", _COUNT, "maximum number of sequences in a step"),
    ("--max-num-batched-tokens", "engine.maxNumBatchedTokens", _COUNT, "maximum number of tokens in a step"),
    ("--block-size", "engine.blockSize", _COUNT, "tokens of a KV block"),
    ("--tensor-parallel-size", "engine.tensorParallelSize", _COUNT, "number of GPUs that share the model"),
    ("--dtype", "engine.dtype", {"type": _parse_dtype, "metavar": "DTYPE"}, "dtype of the weights, such as bfloat16"),
    ("--quantization", "engine.quantization", {"metavar": "NAME"}, "quantize the weights: int8, int4 or fp8"),
    ("--kv-cache-dtype", "engine.kvCacheDtype", {"metavar": "DTYPE"}, "dtype of the KV cache, such as fp8"),
    (
        "--mamba-ssm-cache-dtype",
        "engine.mambaSsmCacheDtype",
        {"metavar": "DTYPE"},
        "dtype of the states of sequences: float32 or bfloat16",
    ),
    (
        "--seed",
        "engine.seed",
        {"type": int, "metavar": "N"},
        "seed of the generator that gives a seed to each request without one of its own (default: 0)",
    ),
    ("--max-loras", "lora.maxLoaded", _COUNT, "number of adapter slots"),
    (
        "--max-loaded-lora-ranks",
        "lora.maxLoadedRanks",
        _COUNT,
        "largest sum of the LoRA ranks of the adapters in slots (default: --max-loras times --max-lora-rank)",
    ),
    ("--max-cpu-loras", "lora.maxCached", _COUNT, "number of adapters in host memory"),
    (
        "--max-lora-rank",
        "lora.maxRank",
        _COUNT,
        "maximum LoRA rank (default: 16, or the largest rank of the adapters that are local folders)",
    ),
)
"""The option, the path of its field in spec, other arguments of argparse, and the help text. The default of each is
that of the field."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the form with MODEL, and hidden ones that explain which options of vLLM do not exist."""
    group = parser.add_argument_group("options of quire serve MODEL, with the names of vLLM's options")
    for option, path, arguments, text in SPEC_OPTIONS:
        group.add_argument(*OTHER_NAMES.get(option, ()), option, dest=DEST_PREFIX + path, help=text, **arguments)
    add = group.add_argument
    add("--revision", metavar="REVISION", help="branch, tag or commit of MODEL on the hub")
    add("--served-model-name", nargs="+", metavar="NAME", help="names by which clients request the model")
    add(
        "--lora",
        "--lora-modules",
        dest="adapters",
        nargs="+",
        action="extend",
        metavar="NAME=SOURCE",
        help="adapter: a folder, a repository of the hub, or a URL (s3://, gs://, oci://, https://); can be repeated",
    )
    add("--enable-lora", action="store_true", help="reserve adapter slots also without --lora")
    add("--speculative-config", metavar="JSON", help='as in vLLM: {"method": "ngram", "num_speculative_tokens": 4}')
    add("--api-key", metavar="KEY", help="key that clients of the OpenAI API must send (default: $QUIRE_API_KEY)")
    add("--download-dir", type=Path, metavar="DIR", help="cache of the hub (default: $HF_HUB_CACHE)")
    add(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the LLMService to FILE, for quire serve -f and kubectl apply -f, and do not serve; -: print it",
    )
    for option, fix in OTHER_VLLM_OPTIONS.items():
        group.add_argument(option, nargs="*", action=_UnsupportedOption, metavar=fix, help=argparse.SUPPRESS)


class _UnsupportedOption(argparse.Action):
    """An option that vLLM has and Quire has not."""

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: object, _values: object, option: str | None = None
    ) -> NoReturn:
        parser.error(f"{option}: vLLM has this option, but Quire has not; {self.metavar}")


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the options of the form with MODEL that were given; a file contains these values itself."""
    others = ("revision", "served_model_name", "speculative_config", "download_dir", "api_key", "save")
    options = [option for option, path, _, _ in SPEC_OPTIONS if getattr(args, DEST_PREFIX + path) is not None]
    options += [f"--{name.replace('_', '-')}" for name in others if getattr(args, name) is not None]
    return options + ["--lora"] * bool(args.adapters) + ["--enable-lora"] * args.enable_lora


def is_service_file(model: str) -> bool:
    """Return whether MODEL is a YAML file, and not a folder or the id of a model."""
    return Path(model).suffix in (".yaml", ".yml", ".json") and Path(model).is_file()
