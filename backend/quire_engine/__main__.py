# SPDX-License-Identifier: Apache-2.0
"""Command line of the engine: `python -m quire_engine generate|bench|convert|compile`. It needs no server.

This module only parses arguments and prints results; it calls `api/llm.py`, `api/benchmark.py`,
`weights/pickle_conversion.py` and `api/kernel_compilation.py`.
"""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire_engine.api import benchmark
from quire_engine.api.llm import LLM
from quire_engine.api.outputs import LoRARequest, RequestOutput
from quire_engine.api.sampling_params import SamplingParams
from quire_spec.dataclass_json import to_json
from quire_spec.errors import InvalidArgument, QuireError

_GENERATE_EXAMPLES = """
examples:
  one prompt, greedy
    python -m quire_engine generate --model examples/models/tiny --prompt "Once upon a time" --temperature 0

  the same prompt with the base model and with two adapters, in one batch
    python -m quire_engine generate --model examples/models/tiny --prompt "SELECT" \\
        --lora sql=examples/adapters/sql --lora pirate=examples/adapters/pirate

  any parameter of docs/parameters.md; here, a chat model gets the prompt as a message, returns three outputs, and must
  not use one of the words
    python -m quire_engine generate --model org/name --chat --prompt "Name a fruit" --n 3 \\
        --param bad_words='["apple"]' --param repetition_penalty=1.1 --param min_p=0.05

  read one prompt per line from a file, and write each output as a JSON object on its own line
    python -m quire_engine generate --model org/name --prompt-file prompts.txt --max-tokens 128 -o json
"""

_BENCH_EXAMPLES = """
examples:
  throughput: send 64 prompts at once
    python -m quire_engine bench --model examples/models/tiny --num-prompts 64 --input-len 128 --output-len 64

  latency under load: send 4 requests per second
    python -m quire_engine bench --model examples/models/tiny --num-prompts 64 --rate 4

  the cost of adapters: the requests use two adapters in turn
    python -m quire_engine bench --model examples/models/tiny --lora a=DIR --lora b=DIR

  the cost of parameters: each request uses a penalty and returns log probabilities
    python -m quire_engine bench --model examples/models/tiny --param repetition_penalty=1.1 --param logprobs=5

  where the time is spent: write a trace of 100 steps, and open it in ui.perfetto.dev
    python -m quire_engine bench --model examples/models/tiny --profile trace.json

  any engine setting, by its name in EngineConfig
    python -m quire_engine bench --model org/name --device cuda --set max_num_seqs=256 --set block_size=32
"""

_CONVERT_EXAMPLES = """
examples:
  a folder with pytorch_model.bin
    python -m quire_engine convert ./opt-125m --into ./opt-125m-safetensors

  the folder of an adapter with adapter_model.bin
    python -m quire_engine convert ./sql-lora --into ./sql-lora-safetensors

  a GGUF file
    python -m quire_engine convert ./qwen3-4b-q4_k_m.gguf --into ./qwen3-4b

  a model of the Hugging Face Hub; the second command generates with the new folder
    python -m quire_engine convert facebook/opt-125m --into ./opt-125m
    python -m quire_engine generate --model ./opt-125m --prompt "Hello"
"""


_COMPILE_EXAMPLES = """
examples:
  kernels of models with the shape of Llama-3.1-8B, for H100 and H200
    python -m quire_engine compile --capability 9.0 --into /opt/quire/kernels

  kernels of another model; only its config.json is read
    python -m quire_engine compile --capability 9.0 --model ./qwen --into /opt/quire/kernels
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code: 0, 1 for an error that the user can correct, or 130 for an interrupt."""
    args = _build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        _COMMANDS[args.command](args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _generate(args: argparse.Namespace) -> None:
    params = _build_sampling_params(args)
    prompts = [*args.prompt, *_read_prompt_file(args.prompt_file)]
    if not prompts:
        raise InvalidArgument("generate: no prompt; give --prompt TEXT or --prompt-file FILE")
    lora_choices: list[LoRARequest | None] = [None, *_parse_lora_requests(args)]
    prompt_lora_pairs = [(prompt, lora) for prompt in prompts for lora in lora_choices]
    llm, lora_requests = _load_llm(args), [lora for _, lora in prompt_lora_pairs]
    if args.chat:
        conversations = [[{"role": "user", "content": prompt}] for prompt, _ in prompt_lora_pairs]
        with _profile_steps(llm, args):
            outputs = llm.chat(conversations, params, sys.stderr.isatty(), lora_requests)
    else:
        with _profile_steps(llm, args):
            outputs = llm.generate(
                [prompt for prompt, _ in prompt_lora_pairs], params, sys.stderr.isatty(), lora_requests
            )
    format_output = _format_as_json if args.output == "json" else _format_as_text
    for output in outputs:
        print(format_output(output))


def _bench(args: argparse.Namespace) -> None:
    llm = _load_llm(args)
    workload = benchmark.Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        rate=args.rate,
        params={"temperature": args.temperature} | _parse_key_values("--param", args.param),
        seed=args.seed,
        adapters=tuple(llm.load_adapter(lora) for lora in _parse_lora_requests(args)),
    )
    if not args.no_warmup:
        benchmark.run_benchmark(
            llm.engine, replace(workload, num_prompts=min(4, workload.num_prompts), rate=None, seed=workload.seed + 1)
        )
    with _profile_steps(llm, args):
        report = benchmark.run_benchmark(llm.engine, workload, progress=sys.stderr.isatty())
    if args.output == "json":
        print(json.dumps({"engine": _engine_settings(llm), "load": to_json(workload), "report": to_json(report)}))
    else:
        print(" ".join(f"{name}={value}" for name, value in _engine_settings(llm).items()))
        print(benchmark.format_report(report))


def _convert(args: argparse.Namespace) -> None:
    from quire_engine.weights import (
        gguf_conversion,
        hub,
        pickle_conversion,
    )  # imports torch, which --help does not need

    if args.model.endswith(".gguf"):
        report = gguf_conversion.convert_gguf(Path(args.model), args.into)
        print(f"converted tensors={report.num_tensors} bytes={report.num_bytes} folder={args.into}")
        return
    source = hub.resolve_model(args.model, args.revision, sys.stderr.isatty(), None, hub.PICKLE_PATTERNS)
    report = pickle_conversion.convert_checkpoint(source, args.into)
    print(f"converted and compared tensors={report.num_tensors} bytes={report.num_bytes} folder={args.into}")


def _compile(args: argparse.Namespace) -> None:
    from quire_engine.api import kernel_compilation  # imports torch, which --help does not need

    num_kernels = kernel_compilation.compile_kernels(args.model, args.capability, args.into)
    print(f"compiled kernels={num_kernels} capability={args.capability} folder={args.into}")


def _profile_steps(llm: LLM, args: argparse.Namespace) -> AbstractContextManager[None]:
    from quire_engine.api.profiler import profile_steps  # imports torch, which --help does not need

    return profile_steps(llm.engine, args.profile)


def _engine_settings(llm: LLM) -> dict[str, Any]:
    """Return the engine settings that affect a benchmark result."""
    engine = llm.engine
    field_names = ("model", "device", "block_size", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
    settings = {name: getattr(engine.config, name) for name in field_names}
    return settings | {"dtype": engine.memory.dtype, "num_blocks": engine.memory.num_blocks}


def _load_llm(args: argparse.Namespace) -> LLM:
    engine_args = {"device": args.device, "dtype": args.dtype, "enable_lora": bool(args.lora)}
    if args.max_model_len is not None:
        engine_args["max_model_len"] = args.max_model_len
    return LLM(args.model, **(engine_args | _parse_key_values("--set", args.set)))


def _parse_key_values(option: str, items: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE items. A value that is not valid JSON is used as a string, for example bfloat16."""
    values: dict[str, Any] = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator:
            raise InvalidArgument(f"{option}: {item!r} is not NAME=VALUE, for example {_OPTION_EXAMPLES[option]}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


_OPTION_EXAMPLES = {"--set": "block_size=32", "--param": "repetition_penalty=1.1"}


def _parse_lora_requests(args: argparse.Namespace) -> list[LoRARequest]:
    requests = []
    for lora_int_id, item in enumerate(args.lora, 1):
        name, separator, path = item.partition("=")
        if not (name and separator and path):
            raise InvalidArgument(f"--lora: {item!r} is not of the form NAME=PATH; use for example sql=adapters/sql")
        requests.append(LoRARequest(name, lora_int_id, path))
    return requests


def _read_prompt_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"--prompt-file: {path}: {error}") from error
    return [line for line in text.splitlines() if line.strip()]


def _build_sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs", "n")
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return SamplingParams.from_mapping({"stop": args.stop} | values | _parse_key_values("--param", args.param))


def _format_as_text(output: RequestOutput) -> str:
    adapter_name = output.lora_request.lora_name if output.lora_request else "base"
    return "\n".join(
        f"[{adapter_name}, {completion.finish_reason}, {len(completion.token_ids)} tokens] "
        f"{output.prompt}{completion.text}"
        for completion in output.outputs
    )


def _format_as_json(output: RequestOutput) -> str:
    return json.dumps(to_json(output), ensure_ascii=False)


_Option = tuple[str, str | None, Callable[[str], Any], str, dict[str, Any]]
"""A command line option. The items are the option's name, the name of its value in help texts, the type of its value
(bool for a flag), the help text, and further arguments for argparse."""

_REPEATABLE: dict[str, Any] = {"action": "append", "default": []}
_PARAM_HELP = "set a sampling parameter to a JSON value; docs/parameters.md lists the parameters; repeatable"
_LORA_HELP = {
    "generate": "also run each prompt with the adapter in DIR; NAME is your name for it; repeatable",
    "bench": "use the adapter in DIR; NAME is your name for it; repeatable: the requests use the adapters in turn",
}
_ENGINE_OPTIONS: tuple[_Option, ...] = (
    ("--model", "DIR", str, "folder of a checkpoint, or a Hugging Face Hub id", {"required": True}),
    ("--device", "DEVICE", str, "cpu or cuda (default cpu)", {"default": "cpu"}),
    ("--dtype", "DTYPE", str, "auto, float32, bfloat16 or float16 (default auto)", {"default": "auto"}),
    ("--max-model-len", "N", int, "maximum number of tokens in a prompt and its output together", {}),
    ("--set", "NAME=VALUE", str, "set a field of the engine; repeatable", _REPEATABLE),
    ("--profile", "FILE", Path, "write a trace of the first 100 steps, for chrome://tracing or ui.perfetto.dev", {}),
    ("--param", "NAME=VALUE", str, _PARAM_HELP, _REPEATABLE),
)
_GENERATE_OPTIONS: tuple[_Option, ...] = (
    ("--prompt", "TEXT", str, "a prompt; repeatable", _REPEATABLE),
    ("--prompt-file", "FILE", str, "file with one prompt per line; - reads standard input", {}),
    ("--max-tokens", "N", int, "maximum number of output tokens (default 64)", {"default": 64}),
    ("--temperature", "T", float, "sampling temperature; 0 is greedy (default 1)", {}),
    ("--top-p", "P", float, "sample from the most likely tokens, whose probabilities add up to P (default 1)", {}),
    ("--top-k", "K", int, "sample from the K most likely tokens (default: all)", {}),
    ("--seed", "N", int, "seed that makes sampling reproducible", {}),
    ("--n", "N", int, "outputs per prompt (default 1)", {}),
    ("--stop", "TEXT", str, "end an output where it contains this string; repeatable", _REPEATABLE),
    ("--chat", None, bool, "apply the model's chat template to each prompt", {}),
    ("--logprobs", "N", int, "with -o json, print log probabilities of the N most likely tokens per position", {}),
)
_BENCH_OPTIONS: tuple[_Option, ...] = (
    ("--num-prompts", "N", int, "number of requests (default 32)", {"default": 32}),
    ("--input-len", "N", int, "tokens per prompt (default 128)", {"default": 128}),
    ("--output-len", "N", int, "tokens per output (default 64)", {"default": 64}),
    ("--rate", "R", float, "arrivals per second (default: all at once)", {}),
    ("--temperature", "T", float, "sampling temperature (default 0)", {"default": 0.0}),
    ("--seed", "N", int, "seed for the random prompts and the times at which they arrive (default 0)", {"default": 0}),
    ("--no-warmup", None, bool, "do not run a few requests before the measurement", {}),
)
_BENCH_DESCRIPTION = "Run random prompts, and print tokens per second, time to first token and time between tokens."
_COMMANDS = {"generate": _generate, "bench": _bench, "convert": _convert, "compile": _compile}


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quire_engine",
        description="Generate with a model, benchmark it, convert its weights or compile kernels, without a server.",
        epilog="For examples see python -m quire_engine generate, bench, convert and compile with --help",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="generate|bench|convert|compile")
    for name, summary, description, examples, options in (
        (
            "generate",
            "generate outputs for prompts",
            "Generate outputs for prompts.",
            _GENERATE_EXAMPLES,
            _GENERATE_OPTIONS,
        ),
        ("bench", "measure throughput and latency", _BENCH_DESCRIPTION, _BENCH_EXAMPLES, _BENCH_OPTIONS),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option, metavar, parse, text, other in (*_ENGINE_OPTIONS, *options):
            value = {"action": "store_true"} if parse is bool else {"metavar": metavar, "type": parse}
            command.add_argument(option, help=text, **value | other)
        command.add_argument("--lora", metavar="NAME=DIR", help=_LORA_HELP[name], **_REPEATABLE)
        command.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")
    _add_convert_command(commands)
    _add_compile_command(commands)
    return parser


def _add_convert_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "convert",
        help="convert pickled weights to safetensors",
        description="Convert a checkpoint that contains pytorch_model.bin. The command writes the weights as "
        "safetensors to a new folder, and compares every tensor with its original. Only tensors are unpickled "
        "(torch.load with weights_only=True).",
        epilog=_CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("model", metavar="MODEL", help="folder of a checkpoint, or a Hugging Face Hub id")
    command.add_argument("--into", metavar="DIR", type=Path, required=True, help="new folder for the result")
    command.add_argument("--revision", metavar="REV", help="branch, tag or commit of the model on the Hugging Face Hub")


def _add_compile_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "compile",
        help="compile GPU kernels in advance, without a GPU",
        description="Compile the GPU kernels of bfloat16 models into a folder. An engine with "
        "QUIRE_KERNEL_CACHE=DIR does not compile these kernels when it starts.",
        epilog=_COMPILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--capability", metavar="X.Y", required=True, help="compute capability of the GPU (H100, H200: 9.0)"
    )
    command.add_argument("--into", metavar="DIR", type=Path, required=True, help="folder for the compiled kernels")
    model_help = "folder with the config.json of a model; repeatable (default: the shape of Llama-3.1-8B)"
    command.add_argument("--model", metavar="DIR", type=Path, help=model_help, **_REPEATABLE)


if __name__ == "__main__":
    sys.exit(main())
