# SPDX-License-Identifier: Apache-2.0
"""The fit finds the weights of steps whose time is a weighted sum, and refuses recordings that say too little."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulation import INFO

from quire_engine.simulation.recording import RecordedStep
from quire_engine.simulation.step_features import StepFeatures
from quire_engine.simulation.step_model import MIN_STEPS, fit, read_model, write_model
from quire_spec.errors import InvalidArgument


def random_features(rng):
    prefill, rows = rng.randrange(0, 2048), rng.randrange(0, 64)
    return StepFeatures(1, prefill, rows, rows * rng.randrange(1, 4000), prefill * rng.randrange(1, 4000))


def steps_of(weights, rng, num_steps=MIN_STEPS, noise=0.0):
    features = [random_features(rng) for _ in range(num_steps)]
    times = [sum(w * v for w, v in zip(weights, f.values(), strict=False)) for f in features]
    return [RecordedStep(f, t * (1 + rng.uniform(-noise, noise))) for f, t in zip(features, times, strict=True)]


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(0, 2**32))
def test_the_weights_are_found(weights, seed):
    rng = random.Random(seed)
    true = [1e-3, *(w * unit for w, unit in zip(weights, (1e-4, 1e-3, 1e-7, 1e-8), strict=True))]
    model = fit(INFO, steps_of(true, rng))
    for step in steps_of(true, rng, 50):
        assert model.seconds(step.features) == pytest.approx(step.seconds, rel=1e-6)
    assert model.relative_error["p90"] < 1e-6


@given(st.integers(0, 2**32))
def test_weights_are_never_negative_and_the_sum_of_times_is_kept(seed):
    rng = random.Random(seed)
    steps = [RecordedStep(random_features(rng), rng.uniform(0.001, 0.1)) for _ in range(MIN_STEPS)]
    model = fit(INFO, steps)
    assert min(model.seconds_per.values()) >= 0
    assert sum(model.seconds(s.features) for s in steps) == pytest.approx(sum(s.seconds for s in steps))


@pytest.mark.parametrize("prompts", [0, 1])
def test_simulated_steps_vary_as_the_recorded_ones(prompts):
    """One in ten steps takes three times as long as the others."""
    rng = random.Random(1)
    features = [replace(random_features(rng), prompts=i % 2) for i in range(4000)]
    steps = [RecordedStep(f, 1e-3 * (3.0 if i % 20 == f.prompts else 1.0)) for i, f in enumerate(features)]
    model = fit(INFO, steps)
    step = StepFeatures(1, 100 * prompts, 9, 900, 100 * prompts, prompts=prompts)
    times = sorted(model.varied_seconds(step, rng) for _ in range(4000))
    assert times[2000] == pytest.approx(1e-3, rel=0.02) and times[-200] == pytest.approx(3e-3, rel=0.02)
    assert sum(times) / 4000 == pytest.approx(1.2e-3, rel=0.05)


def test_larger_steps_than_recorded_are_outside():
    steps = steps_of([1e-3] * 5, random.Random(0))
    model = fit(INFO, steps)
    assert not any(model.is_outside(step.features) for step in steps)
    assert model.is_outside(StepFeatures(1, 0, 65, 0, 0)) and model.is_outside(StepFeatures(1, 3000, 0, 0, 0))


def test_a_recording_that_says_too_little_is_refused():
    rng = random.Random(0)
    with pytest.raises(InvalidArgument, match=f"199 steps, but {MIN_STEPS}"):
        fit(INFO, steps_of([1e-3] * 5, rng, MIN_STEPS - 1))
    steps = [RecordedStep(StepFeatures(1, 0, rng.randrange(1, 9), rng.randrange(1, 999), 0), 0.01) for _ in range(300)]
    with pytest.raises(InvalidArgument, match="prefill_tokens never varied"):
        fit(INFO, steps)


def test_a_model_survives_its_file(tmp_path):
    model = fit(INFO, steps_of([1e-3] * 5, random.Random(0)))
    write_model(model, tmp_path / "steps.json")
    assert read_model(tmp_path / "steps.json") == model
    (tmp_path / "steps.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="not a result of `quire simulate fit`"):
        read_model(tmp_path / "steps.json")
