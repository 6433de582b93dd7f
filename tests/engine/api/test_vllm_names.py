# SPDX-License-Identifier: Apache-2.0
"""Scripts for vLLM's offline API: EngineArgs, TokensPrompt and RequestOutput.metrics."""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.tiny_checkpoints import make_checkpoint

from quire_engine import LLM, EngineArgs, SamplingParams, TokensPrompt
from quire_spec.errors import ConfigError

SETTINGS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**21}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


def test_engine_args_build_an_llm(model: Path) -> None:
    engine_args = EngineArgs(model=str(model), enforce_eager=True, **SETTINGS)
    engine_args.seed = 3
    llm = LLM(**asdict(engine_args))
    assert llm.engine.config.seed == 3 and llm.engine.max_model_len == 64
    engine_args.trust_remote_code = True
    with pytest.raises(ConfigError, match="'trust_remote_code': value True is not supported"):
        LLM(**asdict(engine_args))


def test_command_line_options_equal_engine_args(model: Path) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    options = ["--max-model-len=64", "--no-enable-prefix-caching", "--dtype=float32", "--enforce-eager=true"]
    arguments = parser.parse_args([f"--model={model}", *options, "--compilation-config", '{"level": 3}'])
    assert EngineArgs.from_cli_args(arguments) == EngineArgs(
        model=str(model),
        max_model_len=64,
        enable_prefix_caching=False,
        dtype="float32",
        enforce_eager=True,
        compilation_config={"level": 3},
    )
    with pytest.raises(TypeError, match="max_model_length"):
        EngineArgs(model=str(model), max_model_length=5)


def test_metrics_have_the_times_of_a_request(model: Path) -> None:
    llm = LLM(model=model, max_num_seqs=1, **SETTINGS)
    before_s = time.time()
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=[5, 6])] * 2, params, use_tqdm=False)
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None and metrics.num_generation_tokens == 5
        times = (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts)
        assert list(times) == sorted(times) and metrics.first_token_latency > 0
        assert before_s <= metrics.arrival_time <= time.time()
    first, second = (output.metrics for output in outputs)
    # One sequence at a time: the second waits for the first.
    assert first is not None and second is not None
    assert second.first_token_ts > first.last_token_ts > first.first_token_ts
    assert second.scheduled_ts > first.scheduled_ts
    assert outputs[0] == replace(outputs[0], metrics=None)
    json.dumps(asdict(first))
