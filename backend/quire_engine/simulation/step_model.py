# SPDX-License-Identifier: Apache-2.0
"""The time of a step as a weighted sum of its features, fitted to a recording.

The weights are not negative, and minimize the relative error. Without the final scaling, the predicted times would add
up to a few percent less than the recorded ones, and a simulated service would be faster than the real one.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire_engine.simulation.recording import RecordedStep, RecordingInfo
from quire_engine.simulation.step_features import StepFeatures
from quire_spec.dataclass_json import from_json, read_json_object, to_json
from quire_spec.errors import ConfigError, InvalidArgument

MIN_STEPS = 200
_REQUIRED = ("prefill_tokens", "decode_rows")


@dataclass(frozen=True, slots=True)
class StepModel:
    """Predicts the seconds of a step."""

    info: RecordingInfo
    """The engine that was recorded."""
    num_steps: int
    seconds_per: dict[str, float]
    """Seconds for each unit of a feature, by the name of the feature."""
    recorded_maximum: dict[str, int]
    """Largest value of each feature in the recording."""
    relative_error: dict[str, float] = field(default_factory=dict)
    """Percentiles of |predicted - recorded| / recorded over the recorded steps: p50, p90."""

    def seconds(self, features: StepFeatures) -> float:
        """Return the predicted time of a step."""
        weights = self.seconds_per
        return sum(weights[n] * value for n, value in zip(StepFeatures.names, features.values(), strict=True))

    def is_outside(self, features: StepFeatures) -> bool:
        """Return whether a feature is larger than in every recorded step, so that its time is extrapolated."""
        maximum = self.recorded_maximum
        return any(value > maximum[n] for n, value in zip(StepFeatures.names, features.values(), strict=True))


def fit(info: RecordingInfo, steps: Sequence[RecordedStep]) -> StepModel:
    """Fit a model to recorded steps.

    Raises:
        InvalidArgument: there are too few steps, or their work did not vary.
    """
    if len(steps) < MIN_STEPS:
        raise InvalidArgument(
            f"fit: the recording has {len(steps)} steps, but {MIN_STEPS} are needed; record a longer trace"
        )
    names = StepFeatures.names
    features = np.array([step.features.values() for step in steps], dtype=np.float64)
    seconds = np.array([step.seconds for step in steps])
    maximum = features.max(axis=0)
    for name in _REQUIRED:
        if len(set(features[:, names.index(name)])) == 1:
            raise InvalidArgument(
                f"fit: {name} never varied in the recording, so its cost is unknown; record a trace with "
                "requests of several lengths, and with several of them at a time"
            )
    # Each row is divided by its time, so that the squares that are minimized are relative errors. Each column is
    # divided by its largest value, so that the numbers have similar sizes.
    scale = np.where(maximum > 0, maximum, 1.0)
    weights = _non_negative_least_squares(features / scale / seconds[:, None]) / scale
    predicted = features @ weights
    weights *= seconds.sum() / predicted.sum()
    errors = np.abs(features @ weights / seconds - 1)
    return StepModel(
        info,
        len(steps),
        dict(zip(names, map(float, weights), strict=True)),
        dict(zip(names, map(int, maximum), strict=True)),
        {f"p{p}": float(np.percentile(errors, p)) for p in (50, 90)},
    )


def write_model(model: StepModel, path: Path) -> None:
    """Write a model as JSON."""
    path.write_text(json.dumps(to_json(model), indent=1) + "\n", encoding="utf-8")


def read_model(path: Path) -> StepModel:
    """Read a model.

    Raises:
        InvalidArgument: the file is not a model of this release.
    """
    if not path.is_file():
        raise InvalidArgument(f"--model: {path} does not exist; give a file that `quire simulate fit` has written")
    try:
        return from_json(StepModel, read_json_object(path))
    except (OSError, ConfigError) as error:
        raise InvalidArgument(f"{path} is not a result of `quire simulate fit`: {error}") from error


def _non_negative_least_squares(
    rows: "np.ndarray[Any, np.dtype[np.float64]]",
) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Return the weights >= 0 for which the products with the rows are closest to 1.

    The best weights solve the problem without bounds for some subset of the columns. There are only 31 subsets.
    """
    num_columns, target = rows.shape[1], np.ones(len(rows))
    best, best_error = np.zeros(num_columns), np.inf
    for size in range(1, num_columns + 1):
        for subset in itertools.combinations(range(num_columns), size):
            solution, _, rank, _ = np.linalg.lstsq(rows[:, subset], target, rcond=None)
            if rank < size or solution.min() < 0:
                continue
            error = float(np.square(rows[:, subset] @ solution - target).sum())
            if error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[list(subset)] = solution
    return best
