# SPDX-License-Identifier: Apache-2.0
"""Command line of the simulator: `python -m quire_engine.simulation record|fit|run`. `quire simulate` calls it."""

import argparse
import json
import logging
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.layout_choice import choose_layout
from quire_engine.simulation import report
from quire_engine.simulation.recording import RecordingInfo, read_recording, record
from quire_engine.simulation.report import Slo
from quire_engine.simulation.resource_costs import ResourceCosts
from quire_engine.simulation.simulator import ROUTERS, SimulationResult, simulate
from quire_engine.simulation.step_model import fit, read_model, write_model
from quire_engine.simulation.trace import MOONCAKE_BLOCK_TOKENS, TraceRequest, read_trace
from quire_engine.worker.interface import ModelRunner
from quire_spec.dataclass_json import from_json, read_json_object
from quire_spec.documents.simulated_service import SimulatedService
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import InvalidArgument, QuireError

_TIMED_FIELDS = ("device", "tensor_parallel_size", "quantization", "kv_cache_dtype")
"""With other values of these fields, a step takes another time."""
MAX_OUTSIDE = 0.05
"""If a larger share of the time is extrapolated, the command warns; with --strict, it fails."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 1 for a failed --strict or a failed engine, 2 for wrong input."""
    args = _build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except InvalidArgument as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _record(args: argparse.Namespace) -> int:
    config = EngineConfig.from_json(read_json_object(args.engine))
    trace = _read_trace(args)

    def create_engine(wrap: Callable[[ModelRunner], ModelRunner]) -> Engine:
        from quire_engine.executor.runner_factory import create_runner  # imports torch, which fit and run do not need
        from quire_engine.weights.checkpoint import Checkpoint
        from quire_engine.weights.hub import resolve_model

        folder = resolve_model(config.model, config.revision, True, config.download_dir)
        checkpoint = Checkpoint.load(folder, config.model_impl)
        runner = create_runner(config, checkpoint.shape, checkpoint.folder, progress=sys.stderr.isatty())
        return Engine(config, checkpoint, wrap(runner), runner.memory)

    recording = record(
        create_engine,
        trace,
        args.trace_block_size,
        args.output,
        adapters=dict(args.adapter),
        progress=sys.stderr.isatty(),
    )
    print(report.recorded(recording, args.output))
    return 0


def _fit(args: argparse.Namespace) -> int:
    recordings = [read_recording(path) for path in args.recordings]
    info = recordings[0].info
    for other in recordings[1:]:
        info = replace(info, costs=info.costs.or_else(other.info.costs))
    for path, other in zip(args.recordings, recordings, strict=True):
        if other.info.shape != info.shape:
            raise InvalidArgument(f"{path} has another model than {args.recordings[0]}; fit them apart")
        _check_recorded(args.recordings[0], info, EngineConfig.from_json(other.info.engine))
    model = fit(info, [step for recording in recordings for step in recording.steps])
    write_model(model, args.output)
    print(report.fitted(model, args.output))
    return 0


def _run(args: argparse.Namespace) -> int:
    model = read_model(args.model)
    service = _recorded_service(model.info)
    if args.service is not None:
        service = from_json(SimulatedService, read_json_object(args.service))
        if service.shape != model.info.shape:
            raise InvalidArgument(
                f"{args.model} was recorded with another model ({model.info.engine['model']}); record the model of the "
                "LLMService"
            )
    config = EngineConfig.from_json(service.engine)
    _check_recorded(args.model, model.info, config)
    model = model.with_costs(args.costs)
    num_groups = choose_layout(config, service.shape).num_groups
    trace = [replace(r, arrival_s=r.arrival_s / args.rate_scale) for r in _read_trace(args)]
    origins = report.origins(model, args.costs, trace, config, args.service is not None)

    def run(num_replicas: int) -> SimulationResult:
        return simulate(
            model,
            config,
            trace,
            num_blocks=max(1, service.kv_tokens * num_groups // config.block_size),
            block_tokens=args.trace_block_size,
            num_replicas=num_replicas,
            router=args.router,
            progress=sys.stderr.isatty(),
        )

    if args.replicas == "auto":
        num_replicas, result = _fewest_replicas(run, len(trace), args.slo, args.goodput)
    else:
        num_replicas = service.replicas if args.replicas is None else args.replicas
        result = run(num_replicas)
    service_size = num_replicas, config.data_parallel_size
    summary = report.Summary.create(result, trace, *service_size, args.slo, args.price, origins)
    print(json.dumps(summary.to_json()) if args.format == "json" else summary.text())
    if result.outside_share > MAX_OUTSIDE:
        print(
            f"warning: {result.outside_share:.0%} of the computing time is in steps that are larger than every "
            "recorded one; record a trace with longer prompts or more requests at a time",
            file=sys.stderr,
        )
        return int(args.strict)
    return 0


def _fewest_replicas(
    run: Callable[[int], SimulationResult], maximum: int, slo: Slo, goodput: float
) -> tuple[int, SimulationResult]:
    """Return the smallest number of replicas that reaches the goodput, found by doubling and bisection."""
    too_few, enough = 0, 1
    while (result := run(enough)).timeline.goodput(slo.ttft_s, slo.itl_s) < goodput:
        if enough >= maximum:
            reached = result.timeline.goodput(slo.ttft_s, slo.itl_s)
            raise InvalidArgument(
                f"--replicas auto: requests that run alone reach a goodput of only {reached:.3f}; use larger limits in "
                "--slo, or a smaller --goodput"
            )
        too_few, enough = enough, min(2 * enough, maximum)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (other := run(middle)).timeline.goodput(slo.ttft_s, slo.itl_s) >= goodput:
            enough, result = middle, other
        else:
            too_few = middle
    return enough, result


def _check_recorded(path: Path, info: RecordingInfo, config: EngineConfig) -> None:
    """Check that the steps of an engine take the time of the recorded ones, as far as its configuration tells."""
    recorded = EngineConfig.from_json(info.engine)
    fields = [(name, getattr(config, name), getattr(recorded, name)) for name in _TIMED_FIELDS]
    if config.dtype != "auto":
        fields.append(("dtype", config.dtype, info.memory.dtype))
    for name, value, recorded_value in fields:
        if value != recorded_value:
            raise InvalidArgument(f"{name}: {path} was recorded with {recorded_value}, not with {value}; record again")


def _recorded_service(info: RecordingInfo) -> SimulatedService:
    num_groups = choose_layout(EngineConfig.from_json(info.engine), info.shape).num_groups
    tokens = info.memory.num_blocks // num_groups * info.memory.block_size
    return SimulatedService(info.engine, info.shape, tokens, 1)


def _read_trace(args: argparse.Namespace) -> list[TraceRequest]:
    trace = read_trace(args.trace)
    return trace[: args.limit] if args.limit else trace


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quire simulate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("record", help="run a trace on a real engine, and write what each step took")
    command.add_argument("--engine", type=Path, required=True, metavar="FILE", help="JSON file with EngineConfig")
    _add_trace(command)
    command.add_argument("--adapter", type=_adapter, action="append", default=[], metavar="NAME=FOLDER")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    command.set_defaults(run=_record)
    command = commands.add_parser("fit", help="fit the time of a step to recordings")
    command.add_argument("recordings", type=Path, nargs="+", metavar="RECORDING")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    command.set_defaults(run=_fit)
    command = commands.add_parser("run", help="simulate a service")
    command.add_argument("--service", type=Path, metavar="FILE", help="a SimulatedService (default: as recorded)")
    command.add_argument("--model", type=Path, required=True, metavar="FILE", help="result of fit")
    _add_trace(command)
    command.add_argument("--rate-scale", type=_positive, default=1.0, metavar="X")
    command.add_argument("--replicas", type=_replicas, metavar="N|auto")
    command.add_argument("--router", choices=ROUTERS, default="least-requests")
    command.add_argument("--costs", type=ResourceCosts.parse, default=ResourceCosts(), metavar="adapter-copy=5ms")
    command.add_argument("--slo", type=Slo.parse, default=Slo(), metavar="ttft=500ms,itl=50ms")
    command.add_argument("--goodput", type=_share, default=0.99, metavar="SHARE")
    command.add_argument("--price", type=_positive, metavar="DOLLARS")
    command.add_argument("--format", choices=("text", "json"), default="text")
    command.add_argument("--strict", action="store_true")
    command.set_defaults(run=_run)
    return parser


def _add_trace(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trace", type=Path, required=True, metavar="FILE")
    command.add_argument("--trace-block-size", type=_integer, default=MOONCAKE_BLOCK_TOKENS, metavar="TOKENS")
    command.add_argument("--limit", type=_integer, metavar="N")


def _adapter(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    return name, Path(folder)


def _integer(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _replicas(text: str) -> int | str:
    return text if text == "auto" else _integer(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    if (value := _positive(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
