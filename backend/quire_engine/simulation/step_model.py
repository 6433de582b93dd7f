# SPDX-License-Identifier: Apache-2.0
"""The time of a step as a weighted sum of its features, fitted to a recording.

The weights are not negative, and minimize the relative error. Simulated steps also vary around these times as the
recorded ones do. Without the final scaling, the predicted times would add
up to a few percent less than the recorded ones, and a simulated service would be faster than the real one.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np

from quire_engine.simulation.recording import RecordedStep, RecordingInfo
from quire_engine.simulation.resource_costs import ResourceCosts
from quire_engine.simulation.step_features import StepFeatures
from quire_spec.dataclass_json import from_json, read_json_object, to_json
from quire_spec.errors import ConfigError, InvalidArgument

MIN_STEPS = 200
_NUM_RATIOS = 200
_Floats = np.ndarray[Any, np.dtype[np.float64]]
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
    variation: dict[str, list[float]] = field(default_factory=dict)
    """Recorded / predicted time of steps with prompts ("prompts") and of others ("decode"), ascending. All values are
    equally frequent. Percentiles of latencies depend on slow steps, which the features do not explain."""

    def seconds(self, features: StepFeatures) -> float:
        """Return the predicted time of a step."""
        weights = self.seconds_per
        return sum(weights[n] * value for n, value in zip(StepFeatures.names, features.values(), strict=True))

    def varied_seconds(self, features: StepFeatures, random: Random) -> float:
        """Return the time of a step that varies as the recorded steps do."""
        ratios = self.variation.get("prompts" if features.prompts else "decode")
        return self.seconds(features) * (random.choice(ratios) if ratios else 1.0)

    def is_outside(self, features: StepFeatures) -> bool:
        """Return whether a feature is larger than in every recorded step, so that its time is extrapolated."""
        maximum = self.recorded_maximum
        return any(value > maximum[n] for n, value in zip(StepFeatures.names, features.values(), strict=True))

    def with_costs(self, costs: ResourceCosts) -> Self:
        """Return the model with given costs, which replace recorded ones. If no step has copied blocks, the copies of a
        step take the time of a copy that was measured apart."""
        info = replace(self.info, costs=costs.or_else(self.info.costs))
        model = replace(self, info=info)
        if info.costs.block_copy is None or (self.recorded_maximum["copied_blocks"] and costs.block_copy is None):
            return model
        seconds_per = self.seconds_per | {"copied_blocks": info.costs.block_copy}
        return replace(
            model, seconds_per=seconds_per, recorded_maximum=self.recorded_maximum | {"copied_blocks": 2**62}
        )


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
    predicted = features @ weights
    errors = np.abs(predicted / seconds - 1)
    has_prompts = features[:, names.index("prompts")] > 0
    return StepModel(
        info,
        len(steps),
        dict(zip(names, map(float, weights), strict=True)),
        dict(zip(names, map(int, maximum), strict=True)),
        {f"p{p}": float(np.percentile(errors, p)) for p in (50, 90)},
        {
            kind: _variation(seconds[chosen], predicted[chosen])
            for kind, chosen in (("prompts", has_prompts), ("decode", ~has_prompts))
        },
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


def _variation(seconds: _Floats, predicted: _Floats) -> list[float]:
    """Return ratios whose mean keeps the sum of the seconds."""
    if not len(seconds):
        return []
    ratios = np.sort(seconds / predicted)
    ratios *= seconds.sum() / predicted.sum() / ratios.mean()
    return [float(part.mean()) for part in np.array_split(ratios, min(_NUM_RATIOS, len(ratios)))]


def _non_negative_least_squares(rows: _Floats) -> _Floats:
    """Return the weights >= 0 for which the products with the rows are closest to 1.

    The best weights solve the problem without bounds for some subset of the columns that are not zero. There are at
    most 511 subsets.
    """
    num_columns = rows.shape[1]
    used = np.flatnonzero(rows.any(axis=0)).tolist()
    # The triangular factor has the same solutions as the rows.
    orthogonal, triangular = np.linalg.qr(rows)
    target = orthogonal.sum(axis=0)
    best, best_error = np.zeros(num_columns), np.inf
    for size in range(1, len(used) + 1):
        for subset in itertools.combinations(used, size):
            solution, _, rank, _ = np.linalg.lstsq(triangular[:, subset], target, rcond=None)
            if rank < size or solution.min() < 0:
                continue
            error = float(np.square(triangular[:, subset] @ solution - target).sum())
            if error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[list(subset)] = solution
    return best
