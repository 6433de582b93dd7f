# SPDX-License-Identifier: Apache-2.0
"""Seconds in which the weights of a checkpoint are loaded: Model Streamer, and the reader of safetensors.

    python tests/bench/loading.py                   # a random 135M Llama in bfloat16, page cache warm
    python tests/bench/loading.py --folder DIR

Both readers fill the parameters of the same model in turn. The values are compared once. Exit status 1: the bar is
missed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))

from random_checkpoint import cached_checkpoint

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.weights.loader import load_weights
from quire_spec.model.model_config import ModelConfig

MAX_RATIO = 0.7


def main() -> int:
    """Measure; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a checkpoint (default: a random one)")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    folder = args.folder or cached_checkpoint("135m")
    shape = ModelConfig.load(folder)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    checksums = set()
    for _ in range(args.runs):
        for stream in seconds:
            model = get_model_class(shape.architecture)(shape, ParamFactory(torch.bfloat16, torch.device("cpu")))
            started_at = time.perf_counter()
            load_weights(folder, model.tensors(), tied_to=shape.tied_embedding_name, stream=stream)
            seconds[stream].append(time.perf_counter() - started_at)
            checksums.add(sum(float(_tensor(target).double().abs().sum()) for _, target in model.tensors()))
    assert len(checksums) == 1, "both readers load the same values"
    medians = {stream: statistics.median(values) for stream, values in seconds.items()}
    ratio = medians[True] / medians[False]
    print(
        f"safetensors {medians[False]:.3f} s, Model Streamer {medians[True]:.3f} s, ratio {ratio:.2f} (bar {MAX_RATIO})"
    )
    return int(ratio > MAX_RATIO)


def _tensor(target: object) -> torch.Tensor:
    return target if isinstance(target, torch.Tensor) else target.tensor  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
